"""From a spec to kernel bodies: what the compiler compiles and the emulator runs."""

import os
from collections.abc import Callable

from nbverify.errors import ArgumentError

if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
    raise ArgumentError(
        "NUMBA_ENABLE_CUDASIM", 'unset: numba\'s simulator has no warps; device="emulator" has', "it set"
    )

from nbverify.kernels import check, simt, verify
from nbverify.kernels.geometry import Geometry
from nbverify.spec import VerifySpec


def make_bodies(spec: VerifySpec, geometry: Geometry, *, debug: bool) -> tuple[Callable, ...]:
    """The bodies of a launch, in the order of ``geometry.steps``."""
    bodies = (verify if spec.kernel == "mma" else simt).make_bodies(spec, geometry)
    return (*check.make_bodies(spec), *bodies) if debug else tuple(bodies)
