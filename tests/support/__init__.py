"""What the emulated and the gpu tier share: batches, devices, tolerances, and the tests written once for both."""

import pytest

# These are no test files, so pytest must be told to explain their asserts.
SUPPORT = "basic batches debug_plans determinism devices kernels probes recipes streams tensor_core"
pytest.register_assert_rewrite(*[f"support.{name}" for name in SUPPORT.split()])
