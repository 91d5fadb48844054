#!/usr/bin/env bash
# Collect the peers for a GPU machine: x86-64 Linux, Python 3.12, PyTorch 2.11 for CUDA 13, no network needed there.
#
#   benchmarks/peers/stage.sh DIR       about 19 MiB in DIR; 360 MiB are downloaded once; pip and python3 are needed
#
# Everything comes from wheels on PyPI.  Nothing of it belongs in a commit.
set -euo pipefail
out=$(mkdir -p "${1:?usage: stage.sh DIR}" && cd "$1" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

fetch() { # FOLDER PACKAGE==VERSION, as the GPU machine needs it and not as this one does
    local platforms=()
    for glibc in 34 28 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
    python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
        --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 --platform any \
        --dest "$1" "$2"
}

fetch "$out" flashinfer-python==0.6.13 # compiled on the GPU machine, by its nvcc
fetch "$out" apache-tvm-ffi==0.1.15.post2
fetch "$out" tabulate==0.10.0
fetch "$tmp" sglang==0.5.23       # four files of it: the Triton kernel and what it imports
fetch "$tmp" sglang-kernel==0.4.3 # one file of it: FlashMLA's decode kernel

python3 - "$tmp" "$out" <<'PY'
import lzma
import sys
import zipfile
from pathlib import Path

tmp, out = map(Path, sys.argv[1:])
folder = "sglang/kernels/ops/attention/"
wanted = {"score_mod.py", "prefill_attention.py", "decode_attention.py", "extend_attention.py"}
with zipfile.ZipFile(next(tmp.glob("sglang-0*.whl"))) as wheel:
    for name in wheel.namelist():
        if name.startswith(folder) and name.removeprefix(folder) in wanted:
            wheel.extract(name, out / "sgl")
with zipfile.ZipFile(next(tmp.glob("sglang_kernel-*.whl"))) as wheel:
    name = next(n for n in wheel.namelist() if n.endswith("flashmla_ops.abi3.so"))
    (out / "flashmla_ops.abi3.so.xz").write_bytes(lzma.compress(wheel.read(name)))
PY
du -sh "$out"
