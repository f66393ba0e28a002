"""The lines that a process of a group writes to its journal (`tests.fault_harness.journal`)."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from tests.fault_harness.journal import Journal, now_ms


class Did(StrEnum):
    """What a line reports."""

    STARTS = "must start"
    STOPS = "must stop"
    STOPPED = "has stopped"
    WORKS = "works under a lease"
    COMMITTED = "has committed"
    LEADS = "leads the group"
    FOLLOWS = "does not lead"


@dataclass(frozen=True, slots=True)
class Line:
    """A line; if it concerns a claim, it has `instance`, `epoch` and `offset`."""

    at_ms: float
    did: Did
    topic: str = ""
    partition: int = 0
    instance: str = ""
    epoch: int = 0
    offset: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """Return the partition of the line."""
        return self.topic, self.partition


LINES: Final = TypeAdapter(Line)


class GroupJournal(Journal[Line]):
    """The journal of a coordinator or a member."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, LINES)

    def note(self, did: Did, places: frozenset[tuple[str, int]] = frozenset()) -> None:
        """Add a line for each of these partitions, or one line without a partition."""
        at_ms = now_ms()
        self.write(*(Line(at_ms, did, *place) for place in sorted(places or {("", 0)})))
