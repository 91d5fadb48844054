"""Public faults of this kind of software, as small inputs."""

from support.recipes import *  # noqa: F403
