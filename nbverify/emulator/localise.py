"""Give a kernel body its twins: the same code objects, with names that refer to the CPU's side of things.

What a name holds decides, not what it is called: ``import numba.cuda as c``, ``from math import exp`` and a factory's
closure cell all work.  Functions that the body reaches through globals, closures, modules of ours and tuples are
treated alike, each once a launch, so recursion is fine.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import numpy as np
from greenlet import getcurrent

from nbverify.emulator import numbers, twins
from nbverify.emulator.memory import CheckedArray

# Functions and modules from here run as they are (a body may print, or compute with numpy).
LEFT_ALONE = frozenset(sys.stdlib_module_names | {"numpy", "greenlet", "pytest", "_pytest"}) - {"math"}


def localise(body: Any) -> Any:
    """``body`` with twins, ready to run in a thread of a launch."""
    return _Localiser().translate(body)


class _Localiser:
    def __init__(self) -> None:
        self._twins = twins.twins_by_id()
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (original, replacement); holding it keeps the id taken

    def translate(self, value: Any) -> Any:
        """What the kernel gets instead of ``value``; often ``value`` itself."""
        if id(value) in self._twins:
            return self._twins[id(value)]
        if id(value) in self._made:
            return self._made[id(value)][1]
        if isinstance(value, FunctionType):
            top = _top_package(value.__module__)
            return _StandIn(value, self) if top == "numba" else value if top in LEFT_ALONE else self._function(value)
        if isinstance(value, ModuleType):
            return value if _top_package(value.__name__) in LEFT_ALONE else self._module(value)
        if isinstance(value, np.signedinteger):
            return int(value)  # a constant made by int32(...): as a value, see twins.py
        if isinstance(value, np.ndarray) and value.ndim == 1:
            frozen = value.view()
            frozen.flags.writeable = False  # numba compiles a global array in, as a constant
            return CheckedArray(frozen, "constant array")
        if isinstance(value, tuple):
            return self._tuple(value)
        if _top_package(type(value).__module__) == "numba":  # a type, an intrinsic, or a dispatcher
            plain = getattr(value, "py_func", None)
            return self.translate(plain) if isinstance(plain, FunctionType) else _StandIn(value, self)
        if callable(value) and _top_package(getattr(value, "__module__", None)) in ("numba", "math"):
            return _StandIn(value, self)
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        code = function.__code__
        cells = tuple(CellType() for _ in code.co_freevars)
        # A copy for each function: its identity tells two functions of one factory apart (twins.shared_array).
        names = dict(function.__globals__)
        names["__builtins__"] = {**vars(builtins), "max": numbers.maximum, "min": numbers.minimum}
        made = FunctionType(code, names, function.__name__, None, cells)
        self._made[id(function)] = function, made  # before looking at what it refers to: that may be itself
        for name in set(_global_names(code)) & names.keys():
            names[name] = self.translate(names[name])
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            try:
                content = original.cell_contents
            except ValueError:  # a variable of the factory that was never set
                continue
            cell.cell_contents = self.translate(content)
        made.__defaults__ = self.translate(function.__defaults__)
        made.__kwdefaults__ = {k: self.translate(v) for k, v in (function.__kwdefaults__ or {}).items()}
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        return made

    def _module(self, module: ModuleType) -> Any:
        made = (_CudaModule if module.__name__ == "numba.cuda" else _StandIn)(module, self)
        self._made[id(module)] = module, made
        return made

    def _tuple(self, value: tuple) -> tuple:
        items = [self.translate(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)


class _StandIn:
    """Stands for a module, or for something of numba's without a twin: its attributes are translated when first
    asked for (``cuda.atomic`` has no twin, ``cuda.atomic.add`` has), and calling it says what is missing.
    """

    def __init__(self, original: Any, localiser: _Localiser):
        self._original, self._localiser = original, localiser

    def __getattr__(self, name: str) -> Any:
        try:
            value = getattr(self._original, name)
        except AttributeError:
            raise NotImplementedError(f"{self._refusal()} (asked for .{name})") from None
        value = self._localiser.translate(value)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only what has no twin is still a stand-in when it is called."""
        raise NotImplementedError(self._refusal())

    def _refusal(self) -> str:
        original = self._original
        name = getattr(original, "__qualname__", None) or getattr(original, "__name__", None) or repr(original)
        module = getattr(original, "__module__", None) or type(original).__module__
        return f"the emulator has no twin of {module}.{name}: add one in nbverify/emulator, or register_twin(...)"


class _CudaModule(_StandIn):
    @property
    def laneid(self) -> int:
        return getcurrent().lane


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function or comprehension inside: it shares the globals
            yield from _global_names(constant)


def _top_package(module: str | None) -> str:
    return (module or "").partition(".")[0]
