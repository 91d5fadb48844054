"""Acceptance on the device."""

from support.tree_accept import *  # noqa: F403
