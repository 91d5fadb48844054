"""Public faults of this kind of software, as small inputs; and what ``debug=True`` finds."""

from support.debug_plans import *  # noqa: F403
from support.recipes import *  # noqa: F403
