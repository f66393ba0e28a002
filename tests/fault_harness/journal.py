"""A process writes its beliefs and its steps to a journal, one line each, before it acts.

Times are milliseconds of CLOCK_BOOTTIME, which is the same for all processes of a machine.
"""

import os
import time
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter

L = TypeVar("L")


class Journal(Generic[L]):
    """A process's journal: each line is written as a whole or not at all, however the process ends."""

    def __init__(self, path: Path, lines: TypeAdapter[L]) -> None:
        """Open the journal; `lines` is the type of its lines."""
        self._lines = lines
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *lines: L) -> None:
        """Add lines."""
        os.write(self._file, b"".join(self._lines.dump_json(line) + b"\n" for line in lines))


def read_journal(path: Path, lines: TypeAdapter[L]) -> list[L]:
    """Read all lines; the last line of a process that died may be missing, but never incomplete."""
    return [lines.validate_json(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def now_ms() -> float:
    """Return the time since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1_000
