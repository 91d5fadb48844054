"""What only the tensor-core kernel does."""

from support.tensor_core import *  # noqa: F403
