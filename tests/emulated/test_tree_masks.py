"""Trees to buffers, on the CPU."""

from support.tree_masks import *  # noqa: F403
