"""Trees to buffers, on the GPU."""

from support.tree_masks import *  # noqa: F403
