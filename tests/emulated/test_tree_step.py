"""The whole step against plain decoding."""

from support.tree_step import *  # noqa: F403
