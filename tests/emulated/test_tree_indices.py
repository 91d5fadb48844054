"""The next step's prefix indices."""

from support.tree_indices import *  # noqa: F403
