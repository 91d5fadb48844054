"""What benchmarks.verify measures: flags, suites, and the FLOP and bytes that its shares are computed from."""

from dataclasses import replace

import pytest

import nbverify as nv
from benchmarks import shapes, verify
from benchmarks.measure import judge, judge_waste, rates, specs_of
from benchmarks.shapes import MUST, Case, gqa, mla
from nbverify.configurations import TARGETS
from nbverify.kernels.planner import choose_tiles, limits_of

H200 = {"read_gb_s": 4360.0, "mma_tflop_s": 605.0}  # what the limits were computed with


def work_of(*flags: str) -> verify.Work:
    return verify.work_of(verify.build_parser().parse_args(list(flags)))


def labels(*flags: str) -> list[str]:
    return [case.label for case in work_of(*flags).cases]


# ---- flags


def test_lists_multiply_out_in_the_order_given():
    flags = ["--heads", "8,16", "--batch", "2", "--nodes", "8,1", "--prefix", "4k,5700"]
    assert labels(*flags) == [
        "2 x 8 x 8, 4k", "2 x 8 x 8, 5,700", "2 x 1 x 8, 4k", "2 x 1 x 8, 5,700",
        "2 x 8 x 16, 4k", "2 x 8 x 16, 5,700", "2 x 1 x 16, 4k", "2 x 1 x 16, 5,700",
    ]  # fmt: skip


def test_the_usual_shapes_are_those_of_kimi():
    assert labels() == ["1 x 8 x 8, 4k", "1 x 8 x 8, 32k", "1 x 33 x 8, 4k", "1 x 33 x 8, 32k"]
    (case,) = work_of("--nodes", "8", "--prefix", "4k").cases
    assert case.shape == mla(1, 8, 8, 4096) and case.shape.sm_scale == pytest.approx(0.144680, abs=5e-7)


def test_presets_and_heads_of_ones_own():
    assert labels("--preset", "qwen3-8b,kimi-k2.6-tp4", "--nodes", "9", "--prefix", "2k") == [
        "1 x 9 x 32/8 x 128, 2k", "1 x 9 x 16, 2k",
    ]  # fmt: skip
    assert labels("--heads", "4", "--kv-heads", "2", "--head-dim", "192/128", "--nodes", "1", "--prefix", "0") == [
        "1 x 1 x 4/2 x 192/128, 0"
    ]
    (case,) = work_of("--heads", "4", "--head-dim", "128/64", "--nodes", "1", "--prefix", "1k").cases
    assert (case.shape.shared_kv, case.shape.sm_scale) == (True, 128**-0.5)


def test_ragged_lists_are_one_batch():
    (case,) = work_of("--nodes", "8", "--prefix", "4641,45118", "--ragged").cases
    assert (case.shape.nodes, case.shape.prefixes) == ((8, 8), (4641, 45118))
    (case,) = work_of("--batch", "3", "--nodes", "8,1,4", "--prefix", "1k", "--ragged").cases
    assert (case.shape.nodes, case.shape.prefixes) == ((8, 1, 4), (1024,) * 3)
    assert case.label == "3 x 1..8 x 8, 1k"
    (case,) = work_of("--prefix", "10,20", "--ragged").cases  # one number of nodes, not the usual two
    assert case.shape.nodes == (8, 8)


def test_how_it_is_computed_reaches_the_spec():
    flags = ["--kv-dtype", "float8_e4m3fn", "--mask", "tree", "--split", "fixed", "--reduction", "two_launch",
             "--kernel", "simt", "--launches", "3", "--nodes", "8", "--prefix", "4k"]  # fmt: skip
    (case,) = work_of(*flags).cases
    spec = case.spec()
    assert (spec.kv_dtype, spec.mask, spec.split, spec.reduction, spec.kernel) == (
        "float8_e4m3fn", "tree", "fixed", "two_launch", "simt",
    )  # fmt: skip
    assert (spec.max_requests, spec.max_nodes, spec.max_kv_len) == (1, 8, 4104)
    assert case.label == (
        "1 x 8 x 8, 4k, kv_dtype float8_e4m3fn, mask tree, split fixed, reduction two_launch, kernel simt, 3 launches"
    )
    (step,) = work_of("--kernel", "mma", "--schedule", "step", "--nodes", "8", "--prefix", "4k").cases
    assert step.spec().schedule == "step" and step.label == "1 x 8 x 8, 4k, schedule step, kernel mma"
    (case,) = work_of("--nodes", "8", "--prefix", "4k").cases
    assert case.spec().kernel == nv.VerifySpec.mla(8, max_requests=1, max_nodes=1, max_kv_len=1, sm_scale=1).kernel
    (same,) = work_of("--nodes", "8", "--prefix", "4k", "--kv-dtype", "bfloat16").cases
    assert same == case  # said or not


@pytest.mark.parametrize("flags, words", [
    (["--preset", "qwen3-8b", "--heads", "8"], "--heads: expected no heads beside --preset"),
    (["--kv-heads", "8"], "--heads: expected a number of query heads"),
    (["--heads", "7", "--kv-heads", "2"], "num_q_heads: expected a multiple"),
    (["--heads", "8", "--head-dim", "500/512"], "head_dim_qk: expected"),
    (["--nodes", "0"], "--nodes: expected >= 1"),
    (["--batch", "0"], "--batch: expected >= 1"),
    (["--ragged", "--nodes", "1,2", "--prefix", "1,2,3"], "--ragged: expected as many"),
    (["--ragged", "--batch", "4", "--prefix", "1,2,3"], "--batch: expected none, or 3"),
    (["--kv-dtype", "float16"], "kv_dtype: expected"),
    (["--kernel", "simt", "--schedule", "step"], "schedule: expected 'launch' with kernel='simt'"),
    (["--launches", "0"], "--launches: expected >= 1"),
    (["--launches", "61", "--peers"], "--launches: expected 1 beside --peers"),
    (["--peers", "/no/such/folder"], "/no/such/folder: no such folder"),
])  # fmt: skip
def test_wrong_flags_are_told_before_a_device_is_looked_for(flags, words, capsys):
    assert verify.main(flags, make_device=lambda: pytest.fail("a device was made")) in (1, 2)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    (["--prefix", "5.7k"], "expected whole numbers"), (["--prefix", ""], "expected whole numbers"),
    (["--prefix", "-1"], "expected whole numbers"), (["--suite", "all"], "expected one of must, neighbours, claims"),
    (["--preset", "gpt"], "expected one of kimi-k2.6-tp8"), (["--head-dim", "1/2/3"], "expected 128, or 576/512"),
    (["--repeats", "x"], "whole number"),
])  # fmt: skip
def test_wrong_usage(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        verify.main(flags)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_sizes():
    assert shapes.sizes("4k, 32K,5700,0") == (4096, 32768, 5700, 0)
    assert [shapes.size_text(n) for n in (0, 1, 1023, 1024, 5700, 131072)] == ["0", "1", "1,023", "1k", "5,700", "128k"]


# ---- FLOP and bytes


def test_flop_and_bytes_by_hand():
    kimi = mla(1, 8, 8, 32 * 1024)  # 32,776 keys, 64 rows; a key is 576 bf16 = 1,152 bytes
    assert kimi.flop == 2 * 64 * 32_776 * 1088 == 4_564_516_864
    assert kimi.num_bytes(2) == 32_776 * 1152 + 64 * (576 + 512) * 2 == 37_897_216
    assert kimi.num_bytes(1) == 32_776 * 576 + 139_264  # an fp8 cache; q and out stay 16 bits wide
    qwen = gqa(8, 8, 32, 8, 128, 32 * 1024)  # a key: 8 heads x (128 + 128) x 2 bytes = 4 KiB, for all heads
    assert qwen.num_bytes(2) == 8 * 32_776 * 4096 + 8 * 8 * 32 * 256 * 2
    assert qwen.flop == 8 * (2 * 8 * 32 * 32_776 * 256)


def test_a_ragged_batch_is_the_sum_of_its_requests():
    both = replace(mla(2, 1, 8, 1), nodes=(3, 5), prefixes=(100, 7))
    alone = [replace(mla(1, 1, 8, 1), nodes=(n,), prefixes=(c,)) for n, c in ((3, 100), (5, 7))]
    assert both.flop == sum(shape.flop for shape in alone)
    assert both.num_bytes(2) == sum(shape.num_bytes(2) for shape in alone)
    assert (both.rows, both.keys, both.longest, both.is_even) == (64, 115, 103, False)


def test_rates_and_the_larger_limit():
    case = Case(mla(1, 8, 8, 32 * 1024))
    found = rates(case, 32.0, H200)
    assert found["gb_s"] == pytest.approx(37_897_216 / 32e-6 / 1e9)
    assert found["tflop_s"] == pytest.approx(4_564_516_864 / 32e-6 / 1e12)
    assert found["bound"] == "memory" and found["limit_us"] == pytest.approx(37.897216 / 4.36)
    assert found["limit_share"] == found["read_share"] == pytest.approx(found["limit_us"] / 32)
    assert found["mma_share"] == pytest.approx(found["tflop_s"] / 605)
    assert rates(replace(case, shape=mla(1, 10, 8, 32 * 1024)), 32.0, H200)["bound"] == "tensor"  # 80 rows


# ---- suites


def test_must_is_the_two_tables():
    work = work_of("--suite", "must")
    assert [case.label for case in work.cases] == [
        "1 x 8 x 8, 4k", "1 x 8 x 8, 5,700", "1 x 8 x 8, 32k", "1 x 9 x 8, 32k", "1 x 8 x 8, 128k", "1 x 33 x 8, 32k",
        "1 x 65 x 8, 128k", "1 x 64 x 16, 32k", "8 x 8 x 8, 32k", "16 x 17 x 8, 8k", "32 x 8 x 8, 4k",
        "1 x 1 x 8, 128k",
        "1 x 8 x 32/8 x 128, 4k", "1 x 8 x 32/8 x 128, 32k", "1 x 33 x 32/8 x 128, 32k", "1 x 65 x 32/8 x 128, 32k",
        "8 x 8 x 32/8 x 128, 32k", "16 x 17 x 32/4 x 128, 8k", "1 x 17 x 9/3 x 64, 2k",
    ]  # fmt: skip
    figures = [(goal.must_us, goal.aim_us) for goal in work.goals.values()]
    assert figures == [
        (18, 12), (20, 13), (32, 22), (40, 26), (65, 48), (80, 58), (430, 340), (200, 180), (112, 85), (165, 105),
        (70, 50), (50, 42), (16, 11), (46, 37), (80, 52), (130, 95), (310, 270), (130, 95), (14, 9),
    ]  # fmt: skip


def test_the_limits_of_the_grouped_query_table_come_out():
    found = [rates(Case(goal.shape), 1.0, H200)["limit_us"] for goal in MUST if not goal.shape.shared_kv]
    assert found == pytest.approx([4, 31, 31, 58, 246, 62, 0.4], rel=0.07)  # it rounds


def test_neighbours():
    assert {name: shape.label for name, shape in shapes.neighbours(mla(1, 8, 8, 4096)).items()} == {
        "one node more": "1 x 9 x 8, 4k", "one head less": "1 x 8 x 7, 4k", "10 % longer": "1 x 8 x 8, 4,506",
    }  # fmt: skip
    assert shapes.neighbours(gqa(1, 8, 32, 8, 128, 4096))["one head less"].label == "1 x 8 x 24/8 x 128, 4k"
    assert "one head less" not in shapes.neighbours(gqa(1, 8, 4, 4, 64, 4096))
    assert len(work_of("--suite", "neighbours").claims) == 3 * len(MUST)


def test_every_claim_compares_two_cases_that_differ_in_what_it_says():
    claims = work_of("--suite", "claims", "--peers").claims
    by_name = {claim.name: claim for claim in reversed(claims)}  # the first of each
    assert by_name["tree mask against none"].against.mask == "none"
    assert by_name["shuffled slots"].against.contiguous and not by_name["shuffled slots"].measured.contiguous
    captured = by_name["graph captured at 256k"]
    assert captured.measured.capture_prefix == 262_144 and captured.measured.spec().max_kv_len == 262_152
    ragged = by_name["ragged batch"]
    assert ragged.measured.shape.prefixes == (4641, 45118, 1730, 1696) and ragged.against.shape.keys == 53_185 + 32
    assert ragged.measured.shape.keys == ragged.against.shape.keys
    fp8 = by_name["fp8 cache"]
    assert (fp8.against.kv_dtype, fp8.limit, fp8.at_least) == ("float8_e4m3fn", 1.5, True)
    fixed = [claim for claim in claims if claim.name == "fixed against balanced"]
    assert [claim.measured.shape for claim in fixed] == [goal.shape for goal in MUST]
    assert by_name["never slower than Triton"].against == "triton"
    step = {claim.name: claim for claim in work_of("--suite", "claims", "--kernel", "mma").claims}[
        "one schedule a step"
    ]
    assert [(one.schedule, one.launches) for one in (step.measured, step.against)] == [("step", 61), ("launch", 61)]
    plain = {claim.name for claim in work_of("--suite", "claims", "--kernel", "simt").claims}
    assert "one schedule a step" in by_name and "one schedule a step" not in plain  # the plain kernel has none
    assert "never slower than Triton" not in {claim.name for claim in work_of("--suite", "claims").claims}


def test_pairs_have_the_shape_of_each_other_and_differ_in_one_thing():
    """But for neighbours and wasted rows, which are about the shape."""
    names = ["num_q_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "shared_kv", "nodes", "prefixes", "sm_scale"]
    for claim in work_of("--suite", "claims", "--kernel", "mma").claims:
        if claim.of == "waste":
            continue
        a, b = claim.measured, claim.against
        shape = [name for name in names if getattr(a.shape, name) != getattr(b.shape, name)]
        case = [name for name in ("dtype", "kv_dtype", "mask", "split", "reduction", "schedule", "kernel", "contiguous",
                                  "capture_prefix", "launches") if getattr(a, name) != getattr(b, name)]  # fmt: skip
        assert len(shape + case) == 1 and shape in ([], ["prefixes"])
        assert sum(a.shape.prefixes) == sum(b.shape.prefixes)


def test_the_limits_of_the_claims():
    limits = {
        claim.name: (claim.limit, claim.at_least) for claim in work_of("--suite", "claims", "--kernel", "mma").claims
    }
    assert limits == {
        "tree mask against none": (1.03, False), "shuffled slots": (1.05, False),
        "graph captured at 256k": (1.10, False), "ragged batch": (1.10, False), "fp8 cache": (1.5, True),
        "fixed against balanced": (1.3, False), "one schedule a step": (1.0, False), "mma rows wasted": (0.20, False),
    }  # fmt: skip


@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)], ids=str)
def test_all_claims_take_two_rounds_of_sixteen_compilers_at_most(cc):
    """Shapes that differ in lengths only share a kernel; each is compiled once."""
    specs, refused = specs_of(work_of("--suite", "neighbours,claims", "--kernel", "mma").cases)
    kernels = {(spec.compile_key, choose_tiles(spec, limits_of(cc))) for spec in specs.values()}
    assert not refused and len(kernels) <= 32


# ---- judging


def row(us: float, **more) -> dict:
    return {"us": {"p50": us}, "limit_share": 10 / us, "fragments": 4, "row_tiles": 1, "row_tile": 64, **more}


def test_judging():
    tax, fp8 = (next(c for c in work_of("--suite", "claims").claims if c.name == name)
                for name in ("tree mask against none", "fp8 cache"))  # fmt: skip
    assert [judge(tax, row(us), row(100))["holds"] for us in (102.9, 103.1)] == [True, False]
    assert [judge(fp8, row(us), row(100))["holds"] for us in (149, 151)] == [False, True]
    neighbour = work_of("--suite", "neighbours").claims[0]
    assert [judge(neighbour, row(us), row(100))["holds"] for us in (117, 118)] == [True, False]  # shares, 0.85
    assert judge(neighbour, row(117), row(100))["figures"] == pytest.approx([10 / 117, 0.1])
    for more in ({"row_tiles": 2}, {"fragments": 5}):
        wider = judge(neighbour, row(150, **more), row(100))
        assert (wider["new_row_tile"], wider["limit"], wider["holds"]) == (True, 0.65, True)
        assert judge(neighbour, row(155, **more), row(100))["holds"] is False
    # Less than before, or a tile of another height for as many fragments, is no excuse.
    for more in ({"fragments": 3, "row_tile": 48}, {"row_tile": 128}):
        assert judge(neighbour, row(118, **more), row(100))["holds"] is False
    failed = judge(tax, row(1), {"failed": "CompileError: no"})
    assert (failed["holds"], failed["ratio"], failed["why_not"]) == (None, None, "CompileError: no")
    assert judge(tax, row(1), None)["why_not"] == "not measured"


def limits_named(cc: str):
    major, _, minor = cc.partition(".")
    return limits_of((int(major), int(minor)))


def test_models_have_as_many_rows_as_9_nodes_of_8_heads():
    assert [(few.label, many.nodes) for few, many in shapes.models()] == [
        ("1 x 9 x 8, 4k", (65,)), ("1 x 5 x 16, 32k", (65,)), ("1 x 18 x 32/8 x 128, 4k", (65,)),
        ("1 x 9 x 32/4 x 128, 8k", (65,)), ("1 x 24 x 9/3 x 64, 2k", (65,)),
    ]  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("cc", TARGETS)
def test_a_fifth_of_the_mma_rows_is_wasted_at_most(cc, kv_dtype):
    """Closed form, of the tiles that the planner chooses.

    One fault is known: in the second tile of 48 rows that 9 nodes of 8 heads take, 24 are there, and three warps that
    share columns multiply all three fragments or none.
    """
    claims = work_of("--suite", "claims", "--kernel", "mma", "--kv-dtype", kv_dtype).claims
    found = [judge_waste(claim, limits_named(cc)) for claim in claims if claim.of == "waste"]
    assert len(found) == 5
    missed = [(claim["against"], claim["ratio"]) for claim in found if not claim["holds"]]
    assert missed == [("to 65 nodes; worst 9", 0.25)], "if it is mended, the fault must go from here"


def test_waste_by_hand():
    """72 rows in two tiles of 48: scores and outputs of 6 fragments, where 5 have rows."""
    nine = Case(mla(1, 9, 8, 4096), kernel="mma")
    assert choose_tiles(nine.spec(), limits_named("9.0")).rows_per_tile == 48
    found = judge_waste(shapes.Claim("mma rows wasted", nine, nine, 0.17, of="waste"), limits_named("9.0"))
    issued = 6 * 16
    assert found["figures"] == pytest.approx([issued, 72]) and found["ratio"] == pytest.approx(1 - 72 / issued)
    assert (found["holds"], found["against"]) == (False, "to 9 nodes; worst 9")


def test_wasted_rows_are_those_of_tensor_cores():
    assert {claim.of for claim in work_of("--suite", "claims", "--kernel", "simt").claims} == {"time"}


def test_launches_of_a_step_share_a_plan_and_add_up():
    one = Case(mla(1, 8, 8, 4096), kernel="mma")
    step = replace(one, schedule="step", launches=61)
    specs, _ = specs_of([one, replace(one, launches=61), step])
    assert len(set(specs.values())) == 2 and specs[step].schedule == "step"
    assert (step.flop, step.num_bytes) == (61 * one.shape.flop, 61 * one.shape.num_bytes(2))
    assert rates(step, 61 * 32.0, H200)["limit_share"] == pytest.approx(rates(one, 32.0, H200)["limit_share"])


def test_cases_of_a_model_share_a_plan():
    usual = Case(mla(1, 8, 8, 4096))
    longer, wider = replace(usual, shape=mla(1, 8, 8, 32_768)), replace(usual, shape=mla(1, 9, 8, 4096))
    batch, fixed = replace(usual, shape=mla(32, 8, 8, 100)), replace(usual, split="fixed")
    specs, refused = specs_of([usual, longer, wider, batch, fixed])
    assert specs[usual] == specs[longer] == specs[batch]
    assert (specs[usual].max_requests, specs[usual].max_kv_len, specs[usual].max_nodes) == (32, 32_776, 8)
    assert len(set(specs.values())) == 3 and not refused
