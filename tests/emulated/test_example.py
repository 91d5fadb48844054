"""The example's model through the kernels' own bodies."""

from support.example_kernels import *  # noqa: F403
