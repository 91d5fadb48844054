"""What plans of the tree step do alike: check numbers and arrays, and launch what is bound."""

from __future__ import annotations

from collections.abc import Container, Mapping

from nbverify.arrays import ArrayInfo, byte_range, overlaps, stream_handle
from nbverify.errors import ArgumentError
from nbverify.stages import StageCall


class BoundStage:
    """A stage, or several in a row, with their arrays, which must stay alive as long as launches can run."""

    def __init__(self, *calls: StageCall):
        self._calls = calls

    def launch(self, stream: object = None) -> None:
        """A driver call each: nothing is allocated, copied, waited for or read back, so a CUDA graph captures it.

        ``stream`` is an int handle, or any library's stream object; None: the legacy default stream.
        """
        handle = stream_handle(stream)
        for call in self._calls:
            call(handle)


def check_int(name: str, value: object, low: int, high: int) -> int:
    """``value``, if it is an int from ``low`` to ``high``, both included; else raises ArgumentError."""
    if type(value) is not int or not low <= value <= high:
        raise ArgumentError(name, f"an int, {low} to {high}", repr(value))
    return value


def refuse_overlaps(infos: Mapping[str, ArrayInfo], written: Container[str]) -> None:
    """Blocks of one launch must not read, nor write, what others write.

    Raises ArgumentError where an array of ``infos`` that is among the ``written`` shares memory with any other one,
    or is read-only.
    """
    for name, info in infos.items():
        if name in written and info.readonly:
            raise ArgumentError(name, "an array that may be written", "a read-only one")
    by_start = sorted(infos, key=lambda name: byte_range(infos[name])[0])
    for i, low in enumerate(by_start):
        end = byte_range(infos[low])[1]
        for high in by_start[i + 1 :]:
            if byte_range(infos[high])[0] >= end:
                break  # nor do those after it begin inside of ``low``
            if (low in written or high in written) and overlaps(infos[low], infos[high]):
                name, other = (low, high) if low in written else (high, low)
                raise ArgumentError(name, f"memory of its own (it is written while {other} is used)", "an overlap")
