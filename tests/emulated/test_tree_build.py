"""Best-first trees: the kernel body in the emulator."""

from support.tree_build import *  # noqa: F403
