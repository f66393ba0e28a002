"""The progress of a fuzzing process, in a file that remains however the process ends."""

import mmap
import struct
from pathlib import Path
from typing import Final, NamedTuple

_FORM: Final = struct.Struct("<QQ")


class Count(NamedTuple):
    """The numbers of inputs and records of a process."""

    inputs: int = 0
    records: int = 0


class Counter:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_FORM.pack(0, 0))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORM.size)
        self._count = Count()

    def add(self, records: int) -> None:
        """Count one input and its records."""
        self._count = Count(self._count.inputs + 1, self._count.records + records)
        _FORM.pack_into(self._memory, 0, *self._count)


def read_count(path: Path) -> Count:
    """Read the counts of a process; zeros if it never started."""
    return Count(*_FORM.unpack(path.read_bytes())) if path.exists() else Count()
