"""Every tile of the tensor-core kernel on the targets it ships for: registers, memory and the exact instructions.

``make test`` compiles one of each kind, ``make test-all`` all of them.  What was compiled before comes from the cache.
"""

from dataclasses import replace

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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("changes, copies", [({}, 2), ({"prefix_visible": False}, 1)], ids=["some", "every tile"])
def test_mma_of_kernels_that_check_every_tile(changes, copies):
    """Of teams: where every tile is checked, the values of tiles that are not must be gone from the program."""
    (given,) = (one for one in configurations("12.0") if one.name == "gqa128-8")
    row = row_of(replace(given, spec=replace(given.spec, **changes)))
    tiles = given.tiles
    assert not tiles.has_roles and tiles.separate_v
    assert row["expected"]["mma"] == tiles.score_mma + (copies + 2) * tiles.value_mma  # 2: what is not finite
    assert compiled.tile_problems(row) == []
