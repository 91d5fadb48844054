"""From a spec to kernel bodies: what the compiler compiles and the emulator runs."""

import os
from collections.abc import Callable

from nbverify.errors import ArgumentError

if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
    raise ArgumentError(
        "NUMBA_ENABLE_CUDASIM", 'unset: numba\'s simulator has no warps; device="emulator" has', "it set"
    )

from nbverify.kernels import check, simt, step_schedule, verify
from nbverify.kernels.geometry import Geometry
from nbverify.spec import VerifySpec


def make_bodies(spec: VerifySpec, geometry: Geometry, *, debug: bool) -> tuple[Callable, ...]:
    """The bodies of a spec, in the order of ``geometry.steps``."""
    bodies = tuple((verify if spec.kernel == "mma" else simt).make_bodies(spec, geometry))
    if debug:
        bodies = (*check.make_bodies(spec, geometry), *bodies)
    if spec.schedule == "step":
        bodies = (step_schedule.make_body(spec, geometry), *bodies)
    return bodies
