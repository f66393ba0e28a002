"""How far a fuzzing process has come, in a file that outlives it however it ends."""

import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

_FORM: Final = struct.Struct("<QQ")


class Count(NamedTuple):
    """What a process has done."""

    inputs: int = 0
    records: int = 0


class Counter:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        """Begin at nothing."""
        path.write_bytes(_FORM.pack(0, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)
        self._count = Count()

    def add(self, records: int) -> None:
        """Count one input and its records."""
        self._count = Count(self._count.inputs + 1, self._count.records + records)
        _FORM.pack_into(self._memory, 0, *self._count)


def read_count(path: Path) -> Count:
    """Read what a process has counted; nothing if it never began."""
    return Count(*_FORM.unpack(path.read_bytes())) if path.exists() else Count()
