"""Grid-wide reductions: the merge of partial states, joined to phase 1 by a barrier or by a second launch."""
