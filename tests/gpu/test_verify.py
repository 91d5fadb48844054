"""Values of every feature against float64, and which launches must give the same bits."""

from support.basic import *  # noqa: F403
from support.determinism import *  # noqa: F403
