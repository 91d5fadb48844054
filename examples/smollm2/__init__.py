"""SmolLM2-135M-Instruct decoded with draft trees, token for token as plain greedy decoding does.  docs/example.md."""
