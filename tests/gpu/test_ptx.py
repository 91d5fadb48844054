"""The PTX instructions on the device, with the kernels and the expectations of the emulated tier."""

import pytest
from support.ptx_cases import CASES, compile_case, parameters_of

from nbverify.compile import target_of
from nbverify.launch import Device, Launcher, LoadedKernel, ParameterBlock, ParameterLayout


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(dev, case):
    device = Device(dev.ordinal)
    if device.cc < case.min_cc:
        pytest.skip(f"needs sm_{case.min_cc[0]}{case.min_cc[1]}, this is sm_{device.cc[0]}{device.cc[1]}")
    before = case.before()
    arrays = {name: dev.upload(array) for name, array in before.items()}
    loaded = LoadedKernel(
        device, compile_case(case, target_of(device.cc)), threads=case.threads, shared_bytes=case.shared_bytes
    )
    block = ParameterBlock(ParameterLayout(parameters_of(before)))
    for name, array in arrays.items():
        block.set_array(name, array.data.ptr, array.size, array.itemsize)
    dev.cupy.cuda.runtime.deviceSynchronize()
    Launcher([loaded], [case.blocks], block)(0)
    device.synchronize()
    case.check(before, {name: dev.download(array) for name, array in arrays.items()})
