"""``debug=True``: wrong device contents are named, and overrun nothing even when they are not."""

from support.debug_plans import *  # noqa: F403
