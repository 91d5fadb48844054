"""benchmarks.verify from flags to files, on a stand-in for the GPU: numpy arrays, the emulator, a clock of our own."""

import contextlib
import csv
import json
import sys
import weakref
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import nbverify as nv
from benchmarks import check, peers, problem, readme, shapes, table, verify
from benchmarks.check import Expected, attend, numpy_reference, rows_to_check
from benchmarks.measure import Session, describe, rates, timed
from benchmarks.problem import Pools, make_problem, normal_bits, to_bits, to_float
from benchmarks.shapes import MUST, Case, gqa, mla
from benchmarks.timing import ROOT, Times
from nbverify import reference
from nbverify.compile import source_hash
from nbverify.errors import NbverifyError

CEILINGS = {"read_gb_s": 4000.0, "copy_gb_s": 3900.0, "mma_tflop_s": 600.0, "empty_us": 1.25}
TINY = ["--heads", "2", "--kv-heads", "1", "--head-dim", "64", "--nodes", "3"]
TINY_CASE = Case(gqa(1, 3, 2, 1, 64, 20))


class Graph:
    def __init__(self, call):
        self.launch = lambda: call(None)


class HostDevice:
    """What ``device.Gpu`` is to the benchmark.  Every replay takes 10, 11, 12 ... us, whatever it does."""

    xp = np

    def __init__(self, gpu: str = "Stub"):
        self.gpu = gpu
        self.log: list[str] = []

    def head(self, seed, commit):
        return {"gpu": self.gpu, "sm": "0.0", "sms": 2, "driver": "1", "cuda": "13.0", "numba-cuda": "0", "numpy": "2",
                "commit": commit or "c0", "source_hash": source_hash(), "seed": seed, "date": "2026-12-01"}  # fmt: skip

    @contextlib.contextmanager
    def watched(self, seconds=0):
        yield

    def synchronize(self):
        pass

    def ceilings(self):
        return dict(CEILINGS)

    def precompile(self, specs, progress):
        self.log.append(f"precompile {len(specs)}")

    def plan(self, spec):
        self.log.append(f"plan {spec.max_kv_len}")
        kernel = (
            "mma" if spec.schedule == "step" else "simt"
        )  # the plain kernel has no such schedule, and is faster here
        return nv.VerifyPlan(replace(spec, kernel=kernel), device=nv.Emulator(2))

    def capture(self, call):
        return Graph(call)

    def replay(self, graph):
        graph.launch()

    def replay_times(self, graph, repeats):
        return Times(tuple(10.0 + i for i in range(repeats)))

    def launch_times(self, bound, count):
        return Times((5.0,) * count)

    def graph_launch_times(self, graph, count):
        return Times((1.5,) * count)

    def load_peers(self, folder):
        return peers.load(folder)


def run(capsys, *flags, device=None) -> tuple[int, str]:
    code = verify.main([*flags], make_device=lambda: device or HostDevice())
    return code, capsys.readouterr().out


def problem_of(case: Case, seed: int = 7):
    return make_problem(np, Pools(np, [case], 3), case, case.spec(), seed)


# ---- values


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_pools_are_normal_and_made_in_chunks(monkeypatch, dtype):
    bits = normal_bits(np, 50_000, dtype, seed=1)
    values = to_float(np, bits, dtype)
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02 and abs((values**4).mean() - 3) < 0.2
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    monkeypatch.setattr(problem, "CHUNK", 777)
    np.testing.assert_array_equal(normal_bits(np, 50_000, dtype, seed=1), bits)
    assert (normal_bits(np, 1000, dtype, seed=2) != bits[:1000]).mean() > 0.9


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_bits_go_to_floats_and_back(dtype):
    values = np.array([0, -0.0, 1, -1.5, 0.0625, 240, 2.0**-8], np.float32)
    np.testing.assert_array_equal(to_float(np, to_bits(values, dtype), dtype), values.astype(np.float64))


CASES = [
    Case(mla(2, 3, 4, 20)),
    Case(mla(1, 2, 2, 9), kv_dtype="float8_e4m3fn", mask="none"),
    Case(gqa(1, 33, 6, 2, 64, 30), mask="packed"),
    Case(gqa(2, 5, 4, 4, 64, 0), mask="tree", dtype="float16"),
    Case(gqa(1, 4, 6, 2, 128, 30), mask="causal", contiguous=True),
    Case(replace(mla(3, 3, 2, 1), prefixes=(4, 100, 7), nodes=(3, 1, 5))),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_oracle_is_the_reference(monkeypatch, case):
    monkeypatch.setattr(check, "CHUNK_KEYS", 8)
    with problem_of(case) as p:
        arrays = {name: array for name, array in p.arrays.items() if name not in ("out", "lse")}
        floats = {
            name: to_float(np, array, p.spec.kv_dtype if "cache" in name else p.spec.dtype)
            for name, array in arrays.items()
            if name in ("q", "k_cache", "v_cache")
        }
        want, want_lse = reference.verify_attention(
            **{**arrays, **floats}, sm_scale=p.spec.sm_scale, mask=p.spec.mask.value, head_dim_v=case.shape.head_dim_v
        )
        accuracy = Expected(p).compare(want, want_lse)
        assert accuracy.worst_row < 1e-14 and accuracy.lse < 1e-13
        assert accuracy.rows == accuracy.of_rows == case.shape.rows
        assert numpy_reference(p)["oracles_differ"] < 1e-14


def test_without_drafts_the_oracle_is_the_prefix_alone():
    with problem_of(TINY_CASE) as p:
        whole, _ = attend(p, 0, np.arange(3))
        prefix, _ = attend(p, 0, np.arange(3), drafts=False)
        p.arrays["k_cache"][p.draft_slots[0]] = 0xFFFF  # NaN
        np.testing.assert_array_equal(attend(p, 0, np.arange(3), drafts=False)[0], prefix)
        assert abs(whole - prefix).max() > 0.1


def test_a_wrong_bit_of_the_mask_is_no_rounding_error():
    """33 drafts beside 32k prefix tokens, of which one is seen or hidden by mistake."""
    with problem_of(Case(gqa(1, 33, 2, 1, 64, 32_768))) as p:
        expected = Expected(p)
        right = p.trees[0].copy()
        for node, key in ((32, 0), (32, 32), (7, 20), (1, 2)):
            p.trees[0][...] = right
            p.trees[0][node, key] ^= True
            out, _ = attend(p, 0, np.arange(33))
            assert expected.compare(out).worst_row > 2 * check.ROW_ERROR["bfloat16"]


def test_rounding_and_nan_are_judged():
    with problem_of(TINY_CASE) as p:
        out, lse = attend(p, 0, np.arange(3))
        rounded = to_bits(out.astype(np.float32), "bfloat16")
        Expected(p).compare(rounded, lse).require("bfloat16")
        with pytest.raises(check.WrongResult, match="out: a row is off"):
            Expected(p).compare(out * 1.01, lse).require("bfloat16")
        with pytest.raises(check.WrongResult, match=r"lse: off by 0\.01"):
            Expected(p).compare(out, lse + 0.01).require("bfloat16")
        for array in (out, lse):
            kept = array[1, 1].copy()
            array[1, 1] = np.nan
            with pytest.raises(check.WrongResult):
                Expected(p).compare(out, lse).require("bfloat16")
            array[1, 1] = kept


def test_a_huge_shape_is_checked_in_part_from_first_to_last():
    shape = mla(4, 8, 8, 1000)
    assert [(r, list(nodes)) for r, nodes in rows_to_check(shape)] == [(r, list(range(8))) for r in range(4)]
    half = rows_to_check(shape, shape.flop / 2)
    assert [r for r, _ in half] == [0, 3] and all(len(nodes) == 8 for _, nodes in half)
    few = rows_to_check(shape, shape.flop / 16)
    assert [(r, list(nodes)) for r, nodes in few] == [(3, [0, 7])]
    assert [(r, list(nodes)) for r, nodes in rows_to_check(shape, 1.0)] == [(3, [7])]


def test_the_pools_are_left_as_they_were():
    pools = Pools(np, [TINY_CASE], 3)
    before = {name: rows.copy() for name, rows in pools.rows(TINY_CASE).items()}
    with make_problem(np, pools, TINY_CASE, TINY_CASE.spec(), 0) as p:
        assert (p.arrays["k_cache"] != before["k_cache"]).any()
        slots = np.concatenate([*p.prefix_slots, *p.draft_slots])
        np.testing.assert_array_equal(np.sort(slots), np.arange(23))
        assert not np.array_equal(slots, np.arange(23))
    for name, rows in pools.rows(TINY_CASE).items():
        np.testing.assert_array_equal(rows, before[name])


# ---- the run


def test_flags_to_files(capsys, tmp_path):
    files = {name: tmp_path / name for name in ("o.json", "o.csv")}
    device = HostDevice()
    code, text = run(
        capsys, *TINY, "--prefix", "8,20", "--mask", "tree", "--seed", "4", "--commit", "abc",
        "--json", str(files["o.json"]), "--csv", str(files["o.csv"]), device=device,
    )  # fmt: skip
    assert code == 0
    assert device.log == ["precompile 1", "plan 23"]  # one plan for both
    record = json.loads(files["o.json"].read_text())
    assert record["complete"] and record["head"]["commit"] == "abc" and record["head"]["seed"] == 4
    assert record["head"]["source_hash"] == source_hash() and record["ceilings"] == CEILINGS
    assert "running" not in record and not list(tmp_path.glob("*.part"))
    first, second = record["rows"]
    assert (first["prefix"], second["prefix"]) == (8, 20)
    assert second["us"] == {"min": 10.0, "p10": 12.9, "p50": 24.5, "p90": 36.1, "repeats": 30}
    assert second["host_us"]["p50"] == 5.0 and second["replay_us"]["p50"] == 1.5
    assert second["flop"] == 2 * 3 * 2 * 23 * 128 and second["bytes"] == 23 * 256 + 6 * 128 * 2
    assert second["gb_s"] == pytest.approx(second["bytes"] / 24.5e3)
    assert 0 < second["error"]["relative"] < 0.004 and second["error"]["rows"] == 6
    assert second["row_tiles"] == 1 and second["padding"] == 1 - 6 / second["row_tile"]
    # The CSV says the same.
    with open(files["o.csv"], newline="") as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, record["rows"], strict=True):
        flat = table.flatten(row)
        assert set(line) == set(flat)
        assert {name: str("" if value is None else value) for name, value in flat.items()} == line
    # And the table.
    assert f"sources {source_hash()}  seed 4" in text and "read 4,000 GB/s" in text and "mma.sync 600 TFLOP/s" in text
    header, line = (
        next(t for t in text.splitlines() if t.startswith(start)) for start in ("requests", "1 x 3 x 2/1 x 64, 20")
    )
    assert len(header) == len(line)
    assert [part.split() for part in line.split("|")[1:4]] == [
        ["24.5", "12.9-36.1"],
        ["0", "0.0", "0.00", "0.0", "0.0"],
        ["5.0", "1.5"],
    ]
    assert "written to" in text


def test_the_suite_of_goals_is_judged_on_an_h200_only(capsys, monkeypatch):
    small = replace(TINY_CASE.shape, prefixes=(8,))
    goals = tuple(shapes.Goal(replace(small, num_q_heads=heads), must, aim) for heads, must, aim in
                  ((1, 24, 20), (2, 25, 20), (3, 40, 30)))  # fmt: skip
    monkeypatch.setattr(shapes, "MUST", goals)
    code, text = run(capsys, "--suite", "must", device=HostDevice("NVIDIA H200"))
    assert code == 1
    assert [line.split()[-3:] for line in text.splitlines() if line.startswith("1 x 3")] == [
        ["24", "20", "MISS"], ["25", "20", "must"], ["40", "30", "aim"],
    ]  # fmt: skip
    assert "1 of 3 reach the aim, 1 more what they must" in text
    assert "1 slower than they must be: 1 x 3 x 1/1 x 64, 8" in text
    code, text = run(capsys, "--suite", "must")
    assert code == 0 and "not judged here" in text
    for flags in (["--split", "fixed"], ["--launches", "2"]):
        code, text = run(capsys, "--suite", "must", *flags, device=HostDevice("NVIDIA H200"))
        assert code == 0 and "not judged here" in text


def test_claims_are_measured_and_shown(capsys, monkeypatch, tmp_path):
    case = replace(TINY_CASE, shape=replace(TINY_CASE.shape, prefixes=(8,)))
    claims = [
        shapes.Claim("tree mask against none", case, replace(case, mask="none"), 1.03),
        shapes.Claim("graph captured at 256k", replace(case, capture_prefix=40), case, 1.10),
        shapes.Claim("fp8 cache", case, replace(case, kv_dtype="float8_e4m3fn"), 1.5, at_least=True),
    ]
    monkeypatch.setattr(shapes, "side_claims", lambda usual, peers: claims)
    device = HostDevice()
    code, text = run(capsys, "--suite", "claims", "--json", str(tmp_path / "c.json"), device=device)
    assert code == 1
    record = json.loads((tmp_path / "c.json").read_text())
    assert [claim["holds"] for claim in record["claims"]] == [True, True, False]
    assert len(record["rows"]) == 4 and len([t for t in device.log if t.startswith("plan")]) == 4
    assert "plan 43" in device.log  # its workspace holds the 40 of the capture
    assert [claim["figures"] for claim in record["claims"]] == [[24.5, 24.5]] * 3
    assert record["head"]["source_hash"] == source_hash()
    fp8 = next(line for line in text.splitlines() if line.startswith("fp8 cache"))
    assert fp8.split("|")[1].split() == ["24.5", "us", "24.5", "us"]
    assert fp8.split("|")[2].split() == ["1.000", ">=", "1.50", "NO"]
    assert "2 of 3 claims met" in text and "1 do not hold: fp8 cache: 1 x 3 x 2/1 x 64, 8" in text


def test_rows_wasted_are_claimed_without_being_measured(capsys, monkeypatch):
    case = replace(TINY_CASE, kernel="mma")
    more = replace(case, shape=replace(case.shape, nodes=(8,)))
    claims = [shapes.Claim("mma rows wasted", case, more, limit, of="waste") for limit in (0.7, 0.5)]
    monkeypatch.setattr(shapes, "side_claims", lambda usual, peers: claims)
    device = HostDevice("NVIDIA H200")
    code, text = run(capsys, "--suite", "claims", device=device)
    assert code == 1 and device.log == ["precompile 0"]
    # 3 nodes x 2 heads fill 6 of 16 rows.
    lines = [line for line in text.splitlines() if line.startswith("mma rows wasted")]
    assert all("  to 8 nodes; worst 3  |" in line for line in lines)
    assert [[part.split() for part in line.split("|")[1:]] for line in lines] == [
        [["16.0", "rows", "6.0", "rows"], ["0.625", "<=", "0.70", "yes"]],
        [["16.0", "rows", "6.0", "rows"], ["0.625", "<=", "0.50", "NO"]],
    ]


def test_a_graph_captured_at_other_lengths_gives_the_result_of_its_own():
    case = replace(TINY_CASE, capture_prefix=50)
    session = Session(HostDevice(), [case], seed=0, repeats=5, ceilings=CEILINGS)
    row = session.row(case)
    assert row["error"]["relative"] < 0.004 and row["captured_at"] == 50  # values are checked: 50 keys would be wrong


class CountingDevice(HostDevice):
    """Which kernels a replay runs."""

    def __init__(self):
        super().__init__()
        self.kernels: list[str] = []

    def plan(self, spec):
        plan = super().plan(spec)
        launch = plan._backend._emulator.launch
        plan._backend._emulator.launch = lambda *args, name, **options: (
            self.kernels.append(name), launch(*args, name=name, **options),
        )  # fmt: skip
        return plan


def test_a_step_is_one_schedule_and_all_its_launches():
    """In one graph, captured at other lengths: the schedule is of those that it is replayed with."""
    case = replace(TINY_CASE, kernel="mma", schedule="step", launches=3, capture_prefix=50)
    device = CountingDevice()
    row = Session(device, [case], seed=0, repeats=5, ceilings=CEILINGS).row(case)
    assert row["error"]["relative"] < 0.004 and (row["schedule"], row["launches"]) == ("step", 3)
    assert device.kernels == ["schedule", *["verify"] * 3] * 2  # at the lengths of the capture, and at its own
    one = describe(replace(case, launches=1))
    assert (row["flop"], row["bytes"]) == (3 * one["flop"], 3 * one["bytes"])
    assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"]["p50"] / 1e3)


def test_one_schedule_a_step_is_claimed(capsys, monkeypatch):
    short = replace(TINY_CASE, shape=replace(TINY_CASE.shape, prefixes=(8,)), kernel="mma", launches=2)
    claims = [shapes.Claim("one schedule a step", replace(short, schedule="step"), short, 1.0)]
    monkeypatch.setattr(shapes, "side_claims", lambda usual, peers: claims)
    code, text = run(capsys, "--suite", "claims", "--kernel", "mma")
    assert code == 0
    assert "1 x 3 x 2/1 x 64, 8, schedule step, kernel mma, 2 launches  " in text and "1 of 1 claims met" in text


class WrongDevice(HostDevice):
    """Something is wrong with its results: in the first replay, or in later ones."""

    def __init__(self, when: str):
        super().__init__()
        self.when = when

    def plan(self, spec):
        plan = super().plan(spec)
        bind = plan.bind
        plan.bind = lambda **arrays: self.note(arrays) or bind(**arrays)
        return plan

    def note(self, arrays):
        self.out = arrays["out"]

    def replay(self, graph):
        super().replay(graph)
        if self.when == "first":
            self.out[0, 0] ^= 0x0100  # doubles or halves

    def replay_times(self, graph, repeats):
        if self.when == "later":
            self.out[0, 0, 0] += 1  # the last bit
        return super().replay_times(graph, repeats)


@pytest.mark.parametrize("when, words", [("first", "out: a row is off"), ("later", "out: replays of one graph")])
def test_a_wrong_result_has_no_time(capsys, when, words):
    code, text = run(capsys, *TINY, "--prefix", "8", device=WrongDevice(when))
    assert code == 1
    assert f"| WrongResult: {words}" in text and "1 failed: 1 x 3 x 2/1 x 64, 8" in text


def test_a_case_that_cannot_run_says_why_and_the_others_run(capsys):
    class Refusing(HostDevice):
        def plan(self, spec):
            if spec.max_nodes == 4:
                raise nv.CompileError("no such thing\nin many lines")
            return super().plan(spec)

    code, text = run(capsys, *TINY[:-1], "4,3", "--prefix", "8", device=Refusing())
    assert code == 1
    lines = [line for line in text.splitlines() if line.startswith("1 x")]
    assert lines[0].endswith("| CompileError: no such thing") and "24.5" in lines[1]


def test_an_interrupted_run_leaves_what_it_has(capsys, tmp_path):
    class Dying(HostDevice):
        def plan(self, spec):
            if spec.max_nodes == 4:
                raise KeyboardInterrupt
            return super().plan(spec)

    code, _ = run(capsys, *TINY[:-1], "3,4", "--prefix", "8", "--json", str(tmp_path / "o.json"), device=Dying())
    record = json.loads((tmp_path / "o.json").read_text())
    assert (code, record["complete"], len(record["rows"])) == (130, False, 1)
    assert record["running"] == "1 x 4 x 2/1 x 64, 8"


def test_slow_cases_are_repeated_less():
    asked = []

    def measure(repeats):
        asked.append(repeats)
        return Times((20_000.0,) * repeats)

    assert timed(measure, 30)["repeats"] == 25 and asked == [1, 25]
    assert timed(measure, 30, budget_us=1.0)["repeats"] == 5
    assert timed(measure, 7)["repeats"] == 7


# ---- peers


def test_peers_that_are_absent_say_why_once(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, text = run(capsys, *TINY, "--prefix", "8,20", "--peers", "--json", str(tmp_path / "o.json"))
    assert code == 0
    assert text.count("not measured: all peers: torch cannot be imported") == 1
    missing = json.loads((tmp_path / "o.json").read_text())["peers"]["missing"]
    assert list(missing) == ["all peers"]


def test_every_peer_that_cannot_be_loaded_has_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found, missing = peers.load_classes(None)
    assert found == []
    assert set(missing) == {
        "SGLang Triton", "FlashInfer fa2, prefix", "FlashInfer fa3, prefix", "FlashInfer fa2, mask", "FlashMLA, prefix",
        "torch gather + SDPA",
    }  # fmt: skip
    assert all(missing.values())


class NoClock:
    """Calls without a GPU."""

    def capture(self, call):
        self.call = weakref.ref(call)
        return None, call()

    def replay(self, graph):
        assert self.call() is not None, "the tensors that the graph reads are gone"

    def times(self, graph, repeats):
        self.replay(graph)
        return Times((2.0,) * repeats)

    def free(self):
        pass


class Broken(peers.Peer):
    name = title = "broken"

    def __init__(self):
        pass

    def serves(self, problem):
        return True

    def prepare(self, problem):
        raise RuntimeError("not on\nthis machine")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_plain_pytorch_on_our_arrays(case):
    torch = pytest.importorskip("torch")
    from benchmarks.peers import sdpa
    from benchmarks.peers.flashmla import gather_pages

    with problem_of(case) as p:
        given = [sdpa.Sdpa(None), Broken()]
        found = dict(peers.measure_peers(given, NoClock(), p, ours_us=3.0, timed=lambda measure: timed(measure, 5)))
        assert found["broken"] == {"failed": "RuntimeError: not on"}
        assert ("sdpa" in found) != p.spec.is_fp8
        if "sdpa" in found:
            assert found["sdpa"]["error"]["worst_row"] < check.ROW_ERROR[case.dtype]
            assert (found["sdpa"]["us"]["p50"], found["sdpa"]["ratio"]) == (2.0, 1.5)
        if case.shape.shared_kv and not p.spec.is_fp8:
            seen = peers.TorchProblem(p)
            cache, table_of_pages = gather_pages(seen)
            for request, slots in enumerate(p.prefix_slots):
                rows = cache[table_of_pages[request].long()].view(-1, 576)[: len(slots)]
                assert torch.equal(rows, seen.k_pool[torch.from_numpy(slots), 0])


def test_the_folder_of_peers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(peers.FOLDER_VARIABLE, raising=False)
    assert peers.folder_of(None) is None
    (tmp_path / ".peers").mkdir()
    assert peers.folder_of(None) == tmp_path / ".peers"
    (tmp_path / "other").mkdir()
    monkeypatch.setenv(peers.FOLDER_VARIABLE, "other")
    assert peers.folder_of(None) == tmp_path / "other"
    assert peers.folder_of(".peers") == tmp_path / ".peers"
    with pytest.raises(NbverifyError, match="no such folder"):
        peers.folder_of("nowhere")


def test_wheels_are_unpacked_once_behind_what_is_installed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with zipfile.ZipFile(tmp_path / "peer_of_a_test-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer_of_a_test.py", "answer = 42\n")
    peers.unpack_wheels(tmp_path)
    place = Path(sys.path[-1])
    assert (place / "peer_of_a_test.py").read_text() == "answer = 42\n"
    (place / "peer_of_a_test.py").write_text("answer = 43\n")
    peers.unpack_wheels(tmp_path)
    assert (place / "peer_of_a_test.py").read_text() == "answer = 43\n"


def test_reasons_are_one_line():
    assert peers.one_line(RuntimeError("\n first\nsecond")) == "RuntimeError: first"
    assert peers.one_line(ValueError()) == "ValueError: "
    assert len(peers.one_line(ValueError("x" * 999))) == 200


# ---- tables, pictures, the README


def times(us: float) -> dict:
    return {"min": us, "p10": 0.99 * us, "p50": us, "p90": 1.02 * us, "repeats": 30}


def entry(us: float, ours_us: float, whole_tree: bool = True) -> dict:
    return {"us": times(us), "error": {"relative": 2e-3}, "ratio": ours_us / us, "whole_tree": whole_tree}


def made_up_record() -> dict:
    """Of the suite of goals, with peers, as a run writes it."""
    rows = []
    for goal in MUST:
        case, us = Case(goal.shape), (goal.must_us + goal.aim_us) / 2
        found = {"triton": entry(20 * us, us), "sdpa": {"failed": "OutOfMemoryError: no"}}
        found |= {"fa2": entry(1.5 * us, us, False)} if goal.shape.shared_kv else {"fa2_mask": entry(2.5 * us, us)}
        rows.append(
            {**describe(case), "kernel": "mma", "us": times(us), **rates(case, us, CEILINGS), "host_us": times(5),
             "replay_us": times(1), "error": {"relative": 1.9e-3}, "numpy_ms": {"ms": 1234.5}, "peers": found,
             "goal": {"must_us": goal.must_us, "aim_us": goal.aim_us}}
        )  # fmt: skip
    titles = {"triton": "SGLang Triton", "fa2": "FlashInfer fa2, prefix", "fa2_mask": "FlashInfer fa2, mask",
              "sdpa": "torch gather + SDPA"}  # fmt: skip
    return {"benchmark": "verify", "suite": "must", "complete": True, "head": HostDevice("NVIDIA H200").head(0, None),
            "ceilings": CEILINGS, "rows": rows, "claims": [], "peers": {"titles": titles, "missing": {}}}  # fmt: skip


def test_the_table_of_claims():
    """Name, cases, the two figures, ratio, limit, met or not; in columns."""
    usual = {"measured": "1 x 9 x 8, 4k", "against": "1 x 8 x 8, 4k", "at_least": False, "of": "time", "limit": 1.03}
    lines = table.claim_lines([
        {**usual, "claim": "tree mask against none", "figures": [10.4, 10.0], "ratio": 1.04, "holds": False},
        {**usual, "claim": "one node more", "of": "share", "at_least": True, "limit": 0.65, "figures": [0.30, 0.40],
         "ratio": 0.75, "holds": True, "new_row_tile": True},
        {**usual, "claim": "mma rows wasted", "of": "waste", "limit": 0.2, "figures": [87.5, 72], "ratio": 0.177,
         "holds": True},
        {**usual, "claim": "fp8 cache", "figures": None, "ratio": None, "holds": None, "why_not": "not measured"},
    ])  # fmt: skip
    assert [[" ".join(part.split()) for part in line.split("|")] for line in lines] == [
        ["claim measured against", "measured against", "ratio limit met"],
        ["tree mask against none 1 x 9 x 8, 4k 1 x 8 x 8, 4k", "10.4 us 10.0 us", "1.040 <= 1.03 NO"],
        ["one node more 1 x 9 x 8, 4k 1 x 8 x 8, 4k", "30.0 % 40.0 %", "0.750 >= 0.65 yes, a row tile begins"],
        ["mma rows wasted 1 x 9 x 8, 4k 1 x 8 x 8, 4k", "87.5 rows 72.0 rows", "0.177 <= 0.20 yes"],
        ["fp8 cache 1 x 9 x 8, 4k 1 x 8 x 8, 4k", "- -", "- not measured"],
        ["2 of 4 claims met"],
    ]
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in lines[:-1]}) == 1


def test_the_table_of_peers():
    record = made_up_record()
    lines = table.peer_lines(record["rows"], record["peers"]["titles"])
    first = next(line for line in lines if line.startswith("1 x 8 x 8, 4k"))
    assert [cell.split() for cell in first.split("|")[1:]] == [
        ["15.0"], ["300", "0.050", "2.0e-03"], ["22.5", "0.667", "2.0e-03"], ["-"], ["-"],
    ]  # fmt: skip
    assert len([line for line in lines if "x" in line and "|" in line and "32k" in line]) == 9
    assert any(line.startswith("  prefix: without drafts and merge") for line in lines)
    assert next(line for line in lines if "OutOfMemoryError: no" in line).count(";") == len(MUST) - 1  # once, for all


@pytest.mark.parametrize("value, text", [(0.0, "0.00"), (0.0349, "0.03"), (9.876, "9.88"), (34.14, "34.1"),
                                         (123.4, "123"), (20492.3, "20,492")])  # fmt: skip
def test_numbers(value, text):
    assert table.number(value) == text


def test_the_picture_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    record = made_up_record()
    plot.draw(record, tmp_path / "with_peers.png")
    del record["peers"]
    for row in record["rows"]:
        del row["peers"]
    record["rows"][3] = {**describe(Case(mla(1, 1, 8, 5))), "failed": "x"}
    plot.draw(record, tmp_path / "ours.png")
    plot.draw({**record, "rows": []}, tmp_path / "nothing.png")
    for name in ("with_peers", "ours", "nothing"):
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000
    assert plot.series_of(describe(Case(mla(1, 8, 8, 5700), split="fixed"))) == "1 x 8 x 8, split fixed"


def test_a_missing_matplotlib_is_told_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert verify.main([*TINY, "--plot", "x.png"], make_device=lambda: pytest.fail("a device was made")) == 1
    assert "pip install 'nbverify[bench]'" in capsys.readouterr().err


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """A README with an empty section, and no records."""
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{readme.BEGIN}\nstale words\n{readme.END}\nafter\n")
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme, "RESULTS", tmp_path / "results")
    return tmp_path


def write_record(path: Path, **changes) -> Path:
    path.write_text(json.dumps({**made_up_record(), **changes}))
    return path


def test_the_section_of_the_readme(tree, capsys):
    assert readme.main(["--check"]) == 1  # stale
    assert readme.main([]) == 0
    assert readme.NOTHING_YET in (tree / "README.md").read_text()
    assert readme.main([str(write_record(tree / "o.json"))]) == 0
    name = "verify-must_nvidia-h200_2026-12-01.json"
    assert [path.name for path in (tree / "results").iterdir()] == [name]
    text = (tree / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "stale words" not in text
    assert f"(results/{name})" in text and f"`{source_hash()}`" in text
    assert "| 1 x 8 x 8, 4k | **15.0** (14.8-15.3) | 8 %, memory | 300 (20x) | 22.5 (1.5x) | - |" in text
    assert "| 1 x 17 x 9/3 x 64, 2k | **11.5** (11.4-11.7) | 4 %, memory | 230 (20x) | 28.8 (2.5x) | - |" in text
    assert text.count("\n| ") == len(MUST) + 2 * 2
    assert readme.main(["--check"]) == 0
    (tree / "README.md").write_text(text.replace("**15.0**", "**14.0**"))
    assert readme.main(["--check"]) == 1
    # A newer record of the same GPU takes the place of the older one.
    newer = made_up_record()
    newer["head"] |= {"date": "2026-12-24"}
    (tree / "n.json").write_text(json.dumps(newer))
    assert readme.main([str(tree / "n.json")]) == 0
    assert [path.name for path in (tree / "results").iterdir()] == [name.replace("-01.json", "-24.json")]


@pytest.mark.parametrize("changes, words", [
    ({"suite": "claims"}, "not a record of benchmarks.verify --suite must"),
    ({"complete": False}, "did not come to its end"),
    ({"head": {**HostDevice("NVIDIA H200").head(0, None), "source_hash": "0123"}}, "kernel sources 0123"),
])  # fmt: skip
def test_what_is_no_record_to_keep(tree, capsys, changes, words):
    assert readme.main([str(write_record(tree / "o.json", **changes))]) == 1
    assert words in capsys.readouterr().err and not list((tree / "results").iterdir())


def test_a_kept_record_of_other_sources_is_stale(tree, capsys):
    head = {**HostDevice("NVIDIA H200").head(0, None), "source_hash": "0123"}
    write_record(tree / "results" / "verify-must_x_2026-12-01.json", head=head)
    assert readme.main([]) == 1 and "measure again" in capsys.readouterr().err
    assert readme.main(["--check"]) == 1


def test_json_without_a_file_goes_to_the_results(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verify, "RESULTS", tmp_path)
    assert run(capsys, *TINY, "--prefix", "8", "--json")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["verify-shapes_stub_2026-12-01.json"]


def test_this_readme_has_the_section():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count(readme.BEGIN) == 1
