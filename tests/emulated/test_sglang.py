"""The SGLang plugin between a stand-in backend and the emulated kernels, on metadata recorded from SGLang 0.5.23."""

from types import SimpleNamespace

import numpy as np
import pytest
from support import sglang_stand_in as stand_in
from support.sglang_stand_in import BF16, EmulatorPlace, Pool, TritonAttnBackend, layer_of, taken_over

import nbverify as nv
from nbverify.integrations import sglang_takeover
from nbverify.integrations.sglang_plans import Plans

FP8 = stand_in.NUMPY_DTYPE["float8_e4m3fn"]
NUM_SLOTS = 80
MLA = dict(q_heads=4, kv_heads=1, dim_qk=96, dim_v=64, is_mla=True)
GQA = dict(q_heads=4, kv_heads=2, dim_qk=32, dim_v=32, is_mla=False)
KIMI = dict(q_heads=8, kv_heads=1, dim_qk=576, dim_v=512, is_mla=True)  # of a GPU at TP8
SHAPES = {"mla": MLA, "gqa": GQA}


class Forward:
    """Two layers of a verify, on a stand-in of a version: q, K, V, the pool, and what stock makes of them."""

    def __init__(self, shape, page=1, *, dtype=BF16, kv_dtype=None, version="0.5.23", rows=16, scales=(None, None)):
        self.rng, self.shape, self.page, self.dtype, self.rows = np.random.default_rng(61), shape, page, dtype, rows
        dims = {name: shape[name] for name in ("kv_heads", "dim_qk", "dim_v")}
        self.pool = Pool(2, NUM_SLOTS, **dims, dtype=kv_dtype or dtype, is_mla=shape["is_mla"])
        stand_in.fill(self.rng, self.pool, np.append(stand_in.metadata(page, "eager").kv_indices, 0))
        self.inputs = [stand_in.activations(self.rng, rows, **shape, dtype=dtype) for _ in range(2)]
        self.layers = [
            layer_of(shape["q_heads"], shape["dim_qk"], shape["dim_v"], i, k_scale=scales[0], v_scale=scales[1])
            for i in range(2)
        ]
        self.backend = TritonAttnBackend(version, self.pool)

    def run(self, metadata, batch):
        """Outputs of both layers."""
        self.backend.forward_metadata = metadata
        rows = int(metadata.qo_indptr[-1])
        return [
            self.backend.forward_extend(*(x[:rows] for x in inputs), layer, batch)
            for inputs, layer in zip(self.inputs, self.layers, strict=True)
        ]


def eager(forward):
    return forward.run(
        stand_in.metadata(forward.page, "eager"), stand_in.forward_batch(stand_in.out_cache_loc(forward.page))
    )


def assert_like_stock(got, want, dtype="bfloat16", rows=12, **options):
    for mine, stock in zip(got, want, strict=True):
        stand_in.assert_same_as_stock(mine[:rows], stock[:rows], dtype, **options)


# ---- golden metadata


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize(
    "name, kernel",
    [("mla", "simt"), ("gqa", "simt"), ("mla", "mma"), pytest.param("kimi", "mma", marks=pytest.mark.slow)],
)
def test_golden_eager(name, kernel, page):
    shape = KIMI if name == "kimi" else SHAPES[name]
    want = eager(Forward(shape, page))
    ours = Forward(shape, page)
    backend = taken_over(ours.backend, place=EmulatorPlace(kernel))
    assert_like_stock(eager(ours), want)
    assert (backend.nbverify.taken, backend.nbverify.stock) == (2, 0) and ours.backend.stock_calls == []
    assert (backend.nbverify.plans.binds, backend.nbverify.plans.rebinds) == (1, 1), "one bind a forward"
    eager(ours)
    assert backend.nbverify.plans.binds == 2, "other metadata, another bind"


@pytest.mark.parametrize(
    "name, page",
    [
        ("mla", 1),
        ("gqa", 4),
        pytest.param("mla", 4, marks=pytest.mark.slow),
        pytest.param("gqa", 1, marks=pytest.mark.slow),
    ],
)
def test_golden_capture_and_replay(name, page):
    """Warm up at 4 requests, then at 2, as SGLang captures; write a batch of 3 into the buffers; replay the first."""
    shape = SHAPES[name]
    stock = Forward(shape, page)
    replayed = stand_in.metadata(page, "replay")
    loc = stand_in.out_cache_loc(page, padded=4)
    want = stock.run(replayed, stand_in.forward_batch(loc))

    ours = Forward(shape, page)
    backend = taken_over(ours.backend)
    plans = backend.nbverify.plans
    static = stand_in.metadata(page, "capture")
    static_loc = np.zeros(16, np.int64)
    batch = stand_in.forward_batch(static_loc)
    backend.forward_metadata = static
    layer, inputs = ours.layers[0], ours.inputs[0]
    for _ in range(2):  # warm-ups
        ours.run(static, batch)
    backend.nbverify.place.capturing = True  # nothing may be made from here on
    out = backend.forward_extend(*inputs, layer, batch)
    assert (plans.binds, len(plans._held)) == (1, 1), "one plan, one bind for the warm-ups and the capture"
    graph = next(iter(plans._held.values())).bound.launch
    backend.nbverify.place.capturing = False

    smaller = SimpleNamespace(**vars(static))
    for name in ("qo_indptr", "kv_indptr", "mask_indptr"):
        setattr(smaller, name, getattr(static, name)[:3])
    ours.run(smaller, stand_in.forward_batch(static_loc[:8]))
    assert (plans.binds, len(plans._held)) == (2, 1), "another shape: another bind of the same plan"

    def load(metadata, locs):
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "custom_mask", "mask_indptr"):
            getattr(static, name)[:] = getattr(metadata, name)
        static_loc[:] = locs
        ours.pool.store(layer, locs, inputs[1], inputs[2])  # the graph stores, then verifies
        out[:] = np.nan

    load(replayed, loc)
    graph()
    stand_in.assert_same_as_stock(out[:12], want[0][:12], "bfloat16")
    assert np.isfinite(out.astype(float)).all(), "padded rows too: they see slot 0"
    first = out[:12].tobytes()
    # A padded request's mask bytes are left over from another batch, and its slot is written by many.
    static.custom_mask[104:] = 255
    graph()
    assert out[:12].tobytes() == first
    # Stale metadata behind the batch is never followed.
    static.kv_indices[15:] = -1
    graph()
    assert out[:12].tobytes() == first


@pytest.mark.parametrize("version", stand_in.VERSIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_each_version_calls_the_kernel_in_its_way(shape, version):
    want = eager(Forward(shape, version=version))
    ours = Forward(shape, version=version)
    taken_over(ours.backend)
    assert_like_stock(eager(ours), want)
    assert ours.backend.stock_calls == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_and_outputs_that_are_given(dtype):
    numpy_dtype = stand_in.NUMPY_DTYPE[dtype]
    want = eager(Forward(GQA, dtype=numpy_dtype))
    ours = Forward(GQA, dtype=numpy_dtype)
    taken_over(ours.backend)
    given = np.full((12, 4 * 32), np.nan).astype(numpy_dtype)
    batch = stand_in.forward_batch(stand_in.out_cache_loc(1), _attn_output=given)
    ours.backend.forward_metadata = stand_in.metadata(1, "eager")
    rows = (x[:12] for x in ours.inputs[0])
    assert ours.backend.forward_extend(*rows, ours.layers[0], batch) is given
    stand_in.assert_same_as_stock(given, want[0], dtype)


# ---- fp8 pools


@pytest.mark.parametrize("name, scales", [("mla", (None, None)), ("mla", (0.5, 0.5)), ("gqa", (0.5, 2.0))])
def test_fp8_pools(name, scales):
    """Drafts are read after rounding to fp8, half an ulp of 4 bits of significand, where stock has activations."""
    options = dict(kv_dtype=FP8, scales=scales)
    want = eager(Forward(SHAPES[name], **options))
    ours = Forward(SHAPES[name], **options)
    backend = taken_over(ours.backend)
    got = eager(ours)
    # A draft's V is off by 2^-4 of itself, and its scores by 2^-4 of the products' spread (about 1 here).
    assert_like_stock(got, want, draft_error=2 * 2.0**-4 * 3)
    assert backend.nbverify.taken == 2
    # Exactly what float64 makes of the pool: the difference to stock is that rounding, and nothing else.
    for i, (mine, layer) in enumerate(zip(got, ours.layers, strict=True)):
        reference, _ = nv.reference.verify_attention(
            q=ours.inputs[i][0][:12].reshape(12, 4, -1),
            k_cache=ours.pool.k[i],
            v_cache=None if ours.pool.is_mla else ours.pool.v[i],
            head_dim_v=layer.v_head_dim,
            out_cache_loc=stand_in.out_cache_loc(1),
            **{k: v for k, v in vars(stand_in.metadata(1, "eager")).items() if k != "max_extend_len"},
            sm_scale=layer.scaling,
            k_scale=layer.k_scale_float or 1.0,
            v_scale=layer.v_scale_float or 1.0,
        )
        stand_in.assert_same_as_stock(mine, reference.reshape(12, -1), "bfloat16")


def test_each_layer_has_its_own_scales():
    forward = Forward(MLA, kv_dtype=FP8, scales=(0.5, 0.5))
    ours = Forward(MLA, kv_dtype=FP8, scales=(0.5, 0.5))
    for one in (forward, ours):
        one.layers[1] = layer_of(4, 96, 64, 1, k_scale=2.0, v_scale=2.0)
    want = eager(forward)
    backend = taken_over(ours.backend)
    assert_like_stock(eager(ours), want, draft_error=2 * 2.0**-4 * 3)
    assert backend.nbverify.plans.binds == 1, "scales are rebound, not bound"


# ---- planted faults: what the tests above would find


def causal(call):
    mask, start = np.array(call.custom_mask), np.asarray(call.mask_indptr)
    for b in range(len(start) - 1):
        prefix = int(call.kv_indptr[b + 1] - call.kv_indptr[b])
        block = mask[start[b] : start[b] + 4 * (prefix + 4)].reshape(4, prefix + 4)
        block[:, prefix:] = np.tri(4)
    return call._replace(custom_mask=mask)


FAULTS = {
    "a causal mask": causal,
    "a mask offset": lambda call: call._replace(mask_indptr=call.mask_indptr + 1),
    "a prefix offset": lambda call: call._replace(kv_indices=np.roll(call.kv_indices, 1)),
    "another scale": lambda call: call._replace(sm_scale=1.25 * call.sm_scale),
    "other draft slots": lambda call: call._replace(out_cache_loc=call.out_cache_loc[::-1].copy()),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", ["mla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_planted_faults_are_found(name, fault, monkeypatch):
    shape = SHAPES[name]
    want = eager(Forward(shape))
    ours = Forward(shape)
    taken_over(ours.backend)
    launch = Plans.launch
    monkeypatch.setattr(Plans, "launch", lambda self, call, *mask: launch(self, fault(call), *mask))
    got = eager(ours)
    with pytest.raises(AssertionError):
        assert_like_stock(got, want)


def test_planted_faults_of_scales_are_found(monkeypatch):
    want = eager(Forward(MLA, kv_dtype=FP8, scales=(0.5, 0.5)))
    ours = Forward(MLA, kv_dtype=FP8, scales=(0.5, 0.5))
    taken_over(ours.backend)
    launch = Plans.launch
    no_scales = lambda self, call, *mask: launch(self, call._replace(k_scale=1.0, v_scale=1.0), *mask)  # noqa: E731
    monkeypatch.setattr(Plans, "launch", no_scales)
    got = eager(ours)
    with pytest.raises(AssertionError):
        assert_like_stock(got, want, draft_error=2 * 2.0**-4 * 3)


# ---- masks that a replay leaves out, and compact ones


class WithVerifyMask(TritonAttnBackend):
    """0.5.18 and later."""

    nodes = 4
    sliding_window_size = None

    def __init__(self, pool):
        super().__init__("0.5.23", pool)
        self.mask_indptr = np.zeros(5, np.int64)
        self.verify_mask = None

    verify_mask = None  # seen on the class, as a property is

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        self.verify_mask = MODULE.maybe_create_verify_mask(
            is_draft_runner=False, skip_prefill=False, max_bs=max_bs, max_context_len=32, num_draft_tokens=self.nodes,
            device="cpu", is_read=True, dtype="uint8",
        )  # fmt: skip

    def _target_verify_num_tokens_per_req(self, spec_info):
        return self.nodes

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        lens = batch.seq_lens
        self.mask_indptr[1:] = np.cumsum(self.nodes * (lens + self.nodes))
        if batch.spec_info.custom_mask is not None:
            self.verify_mask.buffer[: len(batch.spec_info.custom_mask)] = batch.spec_info.custom_mask


MODULE = SimpleNamespace(
    VerifyMask=lambda **fields: SimpleNamespace(**fields),
    maybe_create_verify_mask=lambda max_bs, max_context_len, num_draft_tokens, is_read, **others: SimpleNamespace(
        buffer=np.zeros(max_bs * num_draft_tokens * (max_context_len + num_draft_tokens), np.uint8), mode="FULL",
        max_bs=max_bs, is_read=is_read,
    ),
)  # fmt: skip


def graph_batch(lens, custom_mask):
    spec_info = SimpleNamespace(custom_mask=custom_mask, num_tokens_per_req=4)
    return stand_in.forward_batch(
        None, seq_lens=np.array(lens), req_pool_indices=np.zeros(len(lens)), spec_info=spec_info
    )


def drafts_of(backend, lens):
    """The draft columns of each request in the backend's buffer, [B, 4, 4]."""
    mask, starts = backend.verify_mask.buffer, backend.mask_indptr
    blocks = [mask[starts[b] : starts[b + 1]].reshape(4, n + 4)[:, n:] for b, n in enumerate(lens)]
    return np.stack(blocks)


def test_a_replay_without_a_mask_is_a_chain():
    backend = taken_over(WithVerifyMask(Pool(1, 8, 1, 32, 32, BF16, is_mla=False)))
    backend.init_cuda_graph_state(4, 16)
    ones = np.ones(80, bool)
    backend.init_forward_metadata_out_graph(graph_batch([1] * 4, ones), in_capture=True)
    stale = np.full(576, 7, np.uint8)
    backend.init_forward_metadata_out_graph(graph_batch([1] * 4, stale))
    lens = [5, 2, 7, 1]
    backend.init_forward_metadata_out_graph(graph_batch(lens, None))
    assert (drafts_of(backend, lens) == np.tri(4)).all()
    assert (backend.verify_mask.buffer == 7).sum() == 576 - 4 * 16, "nothing else was written"
    # Captured without a mask, the graph reads none: the buffer is left alone.
    backend.init_forward_metadata_out_graph(graph_batch([1] * 4, None), in_capture=True)
    backend.init_forward_metadata_out_graph(graph_batch([1] * 4, stale))
    backend.init_forward_metadata_out_graph(graph_batch(lens, None))
    assert (backend.verify_mask.buffer == 7).all()


def compact(forward):
    """The backend of a forward with a compact mask, its graph state made, the golden trees in it."""
    backend = forward.backend = taken_over(WithVerifyMask(forward.pool))
    sglang_takeover.use_compact_mask(backend.nbverify, MODULE, "QLEN_ONLY")
    backend.init_cuda_graph_state(4, 16)
    return backend


def test_compact_masks():
    want = eager(Forward(MLA))
    ours = Forward(MLA)
    backend = compact(ours)
    mask = backend.verify_mask
    assert (mask.mode, mask.buffer.size) == ("QLEN_ONLY", 4 * 4 * 5) and MODULE.maybe_create_verify_mask is not None
    backend.init_forward_metadata_out_graph(graph_batch([1] * 4, np.ones(80, bool)), in_capture=True)  # the sentinel
    mask.buffer[:48] = np.tile(nv.reference.ancestor_mask(stand_in.GOLDEN[1]["parents"]).ravel(), 3)
    metadata = stand_in.metadata(1, "eager")
    metadata.custom_mask = mask.buffer
    got = ours.run(metadata, stand_in.forward_batch(stand_in.out_cache_loc(1)))
    assert_like_stock(got, want)
    assert backend.nbverify.plans.binds == 1
    # A chain without a mask.
    backend.init_forward_metadata_out_graph(graph_batch([5, 2, 7, 1], None))
    assert (mask.buffer[:64].reshape(4, 4, 4) == np.tri(4)).all()


def test_compact_masks_never_reach_a_stock_kernel():
    """It would read them as FULL ones: wrong, and without an error."""
    ours = Forward(MLA)
    backend = compact(ours)
    backend.kernel_options = {"logit_cap": 30.0}
    metadata = stand_in.metadata(1, "eager")
    with pytest.raises(nv.ArgumentError, match=r"compact_mask.*a logit cap"):
        ours.run(metadata, stand_in.forward_batch(stand_in.out_cache_loc(1)))
    assert backend.stock_calls == []
    metadata.custom_mask = None  # nothing to misread
    ours.run(metadata, stand_in.forward_batch(stand_in.out_cache_loc(1)))
    assert len(backend.stock_calls) == 2


def test_no_plan_is_made_while_a_graph_is_captured():
    ours, lines = Forward(GQA), []
    place = EmulatorPlace()
    place.capturing = True
    backend = taken_over(ours.backend, place=place, lines=lines)
    eager(ours)
    assert backend.nbverify.taken == 0 and len(backend.stock_calls) == 2
    assert len(lines) == 1 and "warm-up" in lines[0]
