"""One schedule for all launches of a step."""

from support.step_schedule import *  # noqa: F403
