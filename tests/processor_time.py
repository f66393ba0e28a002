"""Processor time of a test: on a busy machine the duration of a test shows less than what it computes.

Each report of `pytest --junitxml` has the processor seconds of a test as the property `processor_s`.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PROPERTY: Final = "processor_s"
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Return the processor seconds of this process so far, and of its children that have ended."""
    return sum(os.times()[:4])


def tree_s() -> float:
    """Return the processor seconds so far of this process and of all that it started.

    Those of a process that became an orphan, such as PostgreSQL's, are not found.
    """
    statistics = {int(folder.name): fields for folder in Path("/proc").glob("[0-9]*") if (fields := _fields(folder))}
    children: dict[int, list[int]] = {}
    for pid, (_, parent, *_) in statistics.items():
        children.setdefault(int(parent), []).append(pid)
    return sum(sum(map(int, statistics[pid][11:15])) for pid in _tree(os.getpid(), children)) / _TICKS_A_SECOND


def _fields(folder: Path) -> list[str]:
    """Return the fields of `/proc/PID/stat` that follow the name; none if the process has ended."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _tree(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in children.get(pid, ()):
        yield from _tree(child, children)
