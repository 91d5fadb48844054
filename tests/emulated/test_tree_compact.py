"""Compaction of accepted KV."""

from support.tree_compact import *  # noqa: F403
