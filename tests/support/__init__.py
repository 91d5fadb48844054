"""What the emulated and the gpu tier share: batches, devices, tolerances, and the tests written once for both."""

import pytest

# These are no test files, so pytest must be told to explain their asserts.
pytest.register_assert_rewrite(
    *[
        f"support.{name}"
        for name in (
            "basic", "batches", "debug_plans", "determinism", "devices", "kernels", "merging", "probes", "recipes",
            "streams", "tensor_core",
        )  # fmt: skip
    ]
)
