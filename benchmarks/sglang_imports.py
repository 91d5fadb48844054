"""Stand-ins for packages that SGLang imports and that its attention path does not use."""

import enum
import importlib.abc
import importlib.machinery
import sys
import types

ALWAYS = ("torchvision",)
ON_A_GPU = ("torchvision", "sgl_kernel")  # without a GPU SGLang does without it by itself


def supports_pdl() -> bool:
    """Answered truthfully."""
    import torch

    return torch.cuda.get_device_capability()[0] >= 9


class Stand(type):
    """A class that can be imported and subclassed, and neither made nor called."""

    def __call__(cls, *args, **kwargs):
        raise NotImplementedError(f"{cls.__name__} is not installed here")

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stand(f"{cls.__name__}.{name}", (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of packages that are not installed."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__version__ = [], "0.0.0"

        def get(name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "InterpolationMode":
                modes = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
                return enum.Enum(name, {mode: mode.lower() for mode in modes})
            if f"{spec.name}.{name}" == "sgl_kernel.utils.is_arch_support_pdl":
                return supports_pdl  # the one name that the Triton backend calls on a GPU
            return Stand(name, (), {})

        module.__getattr__ = get
        return module

    def exec_module(self, module):
        pass


def allow_missing(names: tuple[str, ...] = ALWAYS) -> None:
    """From now on such modules can be imported; call it before anything of SGLang is."""
    sys.meta_path.append(StandIns(names))  # last: only what is really missing
