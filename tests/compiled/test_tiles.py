"""Every tile of the tensor-core kernel on the targets it ships for: registers, memory and the exact instructions.

``make test`` compiles one of each kind, ``make test-all`` all of them.  What was compiled before comes from the cache.
"""

import pytest

from benchmarks import compiled
from nbverify import compile
from nbverify.configurations import SPECS, TARGETS, configurations
from nbverify.tile_report import row_of

ALL = [one for cc in TARGETS for one in configurations(cc)]


def in_make_test():
    """The largest tile of each kind, on one target each: MLA on sm_120a, the next kind on sm_80, and so on."""
    found = set()
    for i, kind in enumerate(SPECS):
        cc = TARGETS[(i - 1) % len(TARGETS)]
        found.add((cc, [one.name for one in configurations(cc) if one.kind == kind][-1]))
    return found


QUICK = in_make_test()


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(compile.OVERRIDE, raising=False)


@pytest.mark.timeout(300)  # half a minute on an idle machine
@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(one, id=f"{one.name} {one.cc}", marks=() if (one.cc, one.name) in QUICK else pytest.mark.slow)
        for one in ALL
    ],
)
def test_tile(configuration):
    row = row_of(configuration)
    assert not compiled.problems_of(row), "\n".join(compiled.problems_of(row))
    record = compiled.kept()
    if record is not None and compiled.why_not(record) == "" and record["toolkit"] == compile.toolkit_versions():
        kept = [one for one in record["rows"] if (one["name"], one["target"]) == (row["name"], row["target"])]
        assert kept == [row], "the record says something else: python -m benchmarks.compiled"
