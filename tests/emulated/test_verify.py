"""Values of every feature against float64."""

from support.basic import *  # noqa: F403
