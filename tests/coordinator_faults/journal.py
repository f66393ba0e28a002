"""What a process of a group writes down of what it believes and does, a line each, before it does it.

Times are milliseconds of CLOCK_BOOTTIME, which is one for all processes of a machine.
"""

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tests.faults.journal import now_ms


class Did(StrEnum):
    """What a line tells."""

    STARTS = "is told to start"
    STOPS = "is told to stop"
    STOPPED = "has stopped"
    WORKS = "works under a lease"
    COMMITTED = "has committed"
    LEADS = "leads the group"
    FOLLOWS = "does not lead"


@dataclass(frozen=True, slots=True)
class Line:
    """A line; what is of a claim has its `instance`, `epoch` and `offset`."""

    at_ms: float
    did: Did
    topic: str = ""
    partition: int = 0
    instance: str = ""
    epoch: int = 0
    offset: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """The partition that it is about."""
        return self.topic, self.partition


class Journal:
    """A process's journal: each line is there as a whole, or not at all, however the process ends."""

    def __init__(self, path: Path) -> None:
        """Open it."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, *lines: Line) -> None:
        """Add lines."""
        text = "".join(json.dumps(asdict(line)) + "\n" for line in lines)
        os.write(self._file, text.encode())

    def tell(self, did: Did, places: frozenset[tuple[str, int]] = frozenset()) -> None:
        """Add a line for each of these partitions, or one of none."""
        at_ms = now_ms()
        self.write(*(Line(at_ms, did, *place) for place in sorted(places or {("", 0)})))


def read_journal(path: Path) -> list[Line]:
    """Read what is there."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text().splitlines():
        fields = json.loads(text)
        found.append(Line(**{**fields, "did": Did(fields["did"])}))
    return found
