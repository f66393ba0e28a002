"""Processor time of a test: on a busy machine the duration of a test shows less than what it computes.

Each report of `pytest --junitxml` has the processor seconds of a test as the property `processor_s`.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Final

import psutil

PROPERTY: Final = "processor_s"
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Return the processor seconds of this process so far, and of its children that have ended."""
    return sum(os.times()[:4])


def tree_s() -> float:
    """Return the processor seconds so far of this process and of all that it started.

    Those of a process that became an orphan, such as PostgreSQL's, are not found.
    """
    statistics = {pid: fields for pid in psutil.pids() if (fields := _fields(pid))}
    children: dict[int, list[int]] = {}
    for pid, fields in statistics.items():
        children.setdefault(int(fields[1]), []).append(pid)
    return sum(sum(map(int, statistics[pid][11:15])) for pid in _tree(os.getpid(), children)) / _TICKS_A_SECOND


def _fields(pid: int) -> list[bytes]:
    """Return the fields of `/proc/PID/stat` that follow the name; none if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - after each test, for each process
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _tree(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in children.get(pid, ()):
        yield from _tree(child, children)
