"""What plans of the tree step do alike when arrays are bound."""

from __future__ import annotations

from collections.abc import Mapping

from nbverify.arrays import ArrayInfo, overlaps, stream_handle
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


def check_capacity(name: str, value: object, largest: int) -> int:
    """An int from 1 to ``largest``; raises ArgumentError."""
    if type(value) is not int or not 1 <= value <= largest:
        raise ArgumentError(name, f"an int, 1 to {largest}", repr(value))
    return value


def refuse_overlaps(written: Mapping[str, ArrayInfo], read: Mapping[str, ArrayInfo]) -> None:
    """Blocks of one launch must not read what others write: raises ArgumentError where a written array shares memory.

    A read-only array to be written is refused too.
    """
    names = [*written, *read]
    infos = {**read, **written}
    for i, name in enumerate(written):
        if written[name].readonly:
            raise ArgumentError(name, "an array that may be written", "a read-only one")
        for other in names[i + 1 :]:
            if overlaps(written[name], infos[other]):
                raise ArgumentError(name, f"memory of its own (it is written while {other} is used)", "an overlap")
