"""The gates of the compiled tiles, and the record of them: rows that are made up, and those that are kept."""

import dataclasses
import json

import pytest

from benchmarks import compiled
from benchmarks.compiled import FAULTS, LINKER, SOUND, Fault, problems_of, resource_problems
from nbverify import compile
from nbverify.configurations import SPECS, TARGETS, configurations
from nbverify.tile_counts import counts_of, ptx_counts

GOOD = {
    "name": "made-up", "target": "sm_80", "cooperative": True, "threads": 384, "registers": 168, "spill_bytes": 0,
    "local_bytes": 0, "stack_bytes": 0, "static_shared_bytes": 0, "dynamic_shared_bytes": 90_000,
    "shared_limit_bytes": 101_376, "blocks_per_sm": 1, "blocks_limited_by": "registers",
    "instructions": {"mma": 136, "ldmatrix": 62, "row copies": 54, "f64": 0, "local memory": 0},
    "expected": {"mma": 136, "ldmatrix": 62, "row copies": 54, "dynamic_shared_bytes": 90_000},
}  # fmt: skip
KNOWN = Fault(spill_bytes=16, local_bytes=8)
each_kept_row = pytest.mark.parametrize(
    "row", (compiled.kept() or {"rows": []})["rows"], ids=lambda row: f"{row['name']} {row['target']}"
)


# ---- gates


def test_a_sound_tile_passes():
    assert problems_of(GOOD, linker=LINKER) == []
    assert problems_of({**GOOD, "blocks_per_sm": None}, linker=LINKER) == []  # an architecture that is not in the table


@pytest.mark.parametrize("changes, text", [
    ({"spill_bytes": 4}, "4 bytes spilled, expected 0"),
    ({"local_bytes": 8}, "8 bytes of local memory, expected 0"),
    ({"stack_bytes": 16}, "16 bytes of stack, expected up to 0"),
    ({"registers": 169}, "169 registers, expected up to 168 with 384 threads"),
    ({"registers": 169, "threads": 288}, "169 registers, expected up to 168 with 288 threads"),
    ({"registers": 256, "threads": 32}, "256 registers, expected up to 255"),
    ({"registers": 0}, "0 registers"),
    ({"static_shared_bytes": 1024}, "1024 bytes of static shared memory"),
    ({"blocks_per_sm": 0}, "no block fits an SM"),
    ({"dynamic_shared_bytes": 90_016}, "dynamic_shared_bytes: 90016, expected 90000"),
    ({"shared_limit_bytes": 89_999}, "90,000 bytes of shared memory, the limit is 89,999"),
])  # fmt: skip
def test_what_is_wrong_is_named(changes, text):
    (problem,) = problems_of({**GOOD, **changes}, linker=LINKER)
    assert problem.startswith(f"made-up: {text}")


@pytest.mark.parametrize("name", ["mma", "ldmatrix", "row copies"])
@pytest.mark.parametrize("by", [-1, 1])
def test_counts_are_exact(name, by):
    instructions = {**GOOD["instructions"], name: GOOD["instructions"][name] + by}
    (problem,) = problems_of({**GOOD, "instructions": instructions}, linker=LINKER)
    assert problem == f"made-up: {name}: {instructions[name]}, expected {GOOD['expected'][name]}"


@pytest.mark.parametrize("name, text", [("f64", "1 float64"), ("local memory", "1 accesses to arrays")])
def test_instructions_that_must_not_be(name, text):
    (problem,) = problems_of({**GOOD, "instructions": {**GOOD["instructions"], name: 1}}, linker=LINKER)
    assert text in problem


def with_fault(spill_bytes, local_bytes):
    return {**GOOD, "spill_bytes": spill_bytes, "local_bytes": local_bytes, "stack_bytes": local_bytes}


@pytest.mark.parametrize("row, is_known", [
    (with_fault(16, 8), True),
    (with_fault(20, 8), False),  # worse
    (with_fault(16, 12), False),
    (with_fault(12, 8), False),  # better: the line of the table must change
    (with_fault(0, 0), False),  # mended: it must go
])  # fmt: skip
def test_a_known_fault_is_known_to_the_byte(row, is_known):
    assert (resource_problems(row, KNOWN, linker=LINKER) == []) == is_known


def test_another_linker_may_spill_elsewhere_in_what_is_known_to_spill():
    assert resource_problems(with_fault(400, 80), KNOWN, linker="13.0.88") == []
    assert resource_problems(with_fault(4, 0), SOUND, linker="13.0.88") != []


def test_the_linker_of_either_toolkit():
    assert compiled.linker_of({"nvidia-nvjitlink-cu12": "12.9.86"}) == "12.9.86"
    assert compiled.linker_of({"nvidia-nvjitlink": "13.0.88"}) == "13.0.88"
    assert compiled.linker_of({}) == "unknown"


# ---- the record


def all_configurations():
    return {(one.name, compile.target_of(cc).name): one for cc in TARGETS for one in configurations(cc)}


def test_known_faults_are_of_tiles_that_ship():
    assert set(FAULTS) <= set(all_configurations()), "the planner has other tiles now: take the line out"
    assert all(fault != SOUND for fault in FAULTS.values())


def test_a_kept_record_belongs_to_the_kernel_sources():
    """Else it is of other code: python -m benchmarks.compiled, or remove it."""
    record = compiled.kept()
    assert record is None or compiled.why_not(record) == ""


def test_a_kept_record_has_every_tile():
    record = compiled.kept()
    if record is not None:
        assert [(row["name"], row["target"]) for row in record["rows"]] == list(all_configurations())


@each_kept_row
def test_a_kept_row_is_of_the_planners_tile_and_passes_the_gates(row):
    one = all_configurations()[row["name"], row["target"]]
    tiles, mma_and_ldmatrix = one.tiles, ptx_counts(one.tiles)
    assert {name: row[name] for name in dataclasses.asdict(tiles) if name in row} == {
        name: value for name, value in dataclasses.asdict(tiles).items() if name in row
    }
    assert (row["threads"], row["rows_per_tile"], row["keys_per_tile"]) == (
        tiles.threads, tiles.rows_per_tile, tiles.keys_per_tile,
    )  # fmt: skip
    assert (row["expected"]["mma"], row["expected"]["ldmatrix"]) == mma_and_ldmatrix
    assert row["expected"]["dynamic_shared_bytes"] == tiles.shared_bytes(one.spec.max_requests)
    assert row["mma_per_tile"] == counts_of(tiles).mma
    assert problems_of(row, linker=LINKER) == []


def test_the_table_in_the_docs_is_of_the_record():
    """Mend with ``python -m benchmarks.compiled``."""
    assert compiled.page() == compiled.PAGE.read_text(encoding="utf-8")


# ---- the command, on a compiler that is made up


@pytest.fixture
def places(monkeypatch, tmp_path):
    """A record and a page of the test's own, and rows that cost nothing."""

    def row_of(configuration):
        counts = dict(zip(("mma", "ldmatrix"), ptx_counts(configuration.tiles), strict=True))
        target = compile.target_of(configuration.cc).name
        return {
            **GOOD, **dataclasses.asdict(configuration.tiles), "name": configuration.name, "target": target,
            "threads": configuration.tiles.threads, "rows_per_tile": configuration.tiles.rows_per_tile,
            "keys_per_tile": configuration.tiles.keys_per_tile, "mma_per_tile": 1, "ldmatrix_per_tile": 2,
            "instructions": {**GOOD["instructions"], **counts},
            "expected": {**GOOD["expected"], **counts},
        }  # fmt: skip

    monkeypatch.setattr(compiled, "row_of", row_of)
    monkeypatch.setattr(compiled, "FAULTS", {})
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    monkeypatch.setattr(compiled, "RECORD", tmp_path / "compiled.json")
    monkeypatch.setattr(compiled, "PAGE", tmp_path / "tiles.md")
    monkeypatch.setattr(compiled, "LINKER", compiled.linker_of(compile.toolkit_versions()))
    (tmp_path / "tiles.md").write_text(f"before\n{compiled.BEGIN}\n{compiled.END}\nafter\n")
    return tmp_path


def test_the_command_keeps_a_record_and_writes_the_docs(places, capsys):
    assert compiled.main(["--jobs", "1"]) == 0
    record = json.loads((places / "compiled.json").read_text())
    assert record["complete"] and compiled.why_not(record) == ""
    assert [(row["name"], row["target"]) for row in record["rows"]] == list(all_configurations())
    page = (places / "tiles.md").read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and compile.source_hash() in page
    assert page.count("| sm_120a |") == len(configurations("12.0"))
    assert f"[{len(record['rows'])}/{len(record['rows'])}] sm_120a" in capsys.readouterr().out
    assert compiled.main(["--check"]) == 0


def test_a_look_at_some_writes_nothing(places):
    assert compiled.main(["--jobs", "1", "--cc", "12.0", "--kinds", "mla"]) == 0
    assert not (places / "compiled.json").exists()
    assert compiled.main(["--check"]) == 1, "the page says neither that there is a record nor that there is none"


def test_a_fault_is_exit_code_1_and_kept_all_the_same(places, monkeypatch, capsys):
    """So that the docs show it; the tests fail until it is mended, or known."""
    row_of = compiled.row_of
    monkeypatch.setattr(compiled, "row_of", lambda one: {**row_of(one), "spill_bytes": 4 * (one.name == "mla-4")})
    assert compiled.main(["--jobs", "1"]) == 1
    assert capsys.readouterr().err.count("mla-4: 4 bytes spilled, expected 0") == len(TARGETS)
    assert "| **4** |" in (places / "tiles.md").read_text()


def test_records_that_cannot_be_kept(places):
    compiled.main(["--jobs", "1"])
    record = compiled.kept()
    for changes, text in (
        ({"complete": False}, "did not come to its end"),
        ({"source_hash": "0"}, "compiled from kernel sources 0"),
        ({"toolkit": {}}, "linked with nvJitLink unknown"),
    ):
        assert text in compiled.why_not({**record, **changes})
    compiled.RECORD.write_text(json.dumps({**record, "source_hash": "0"}))
    assert compiled.main(["--check"]) == 1


def test_a_page_without_a_record_says_so(places):
    compiled.main(["--jobs", "1"])
    compiled.RECORD.unlink()
    assert compiled.main(["--check"]) == 1
    assert compiled.main(["--docs"]) == 0
    assert compiled.NOTHING_YET in (places / "tiles.md").read_text()
    assert compiled.main(["--check"]) == 0


def test_kinds_that_there_are_not(places, capsys):
    with pytest.raises(SystemExit) as stop:
        compiled.main(["--kinds", "mla,none"])
    assert stop.value.code == 2
    assert f"expected some of {', '.join(SPECS)}, got none" in capsys.readouterr().err
