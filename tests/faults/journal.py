"""What a member writes down of what it believes and does, a line each, before it does it.

Times are milliseconds of CLOCK_BOOTTIME, which is one for all processes of a machine.
"""

import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from marshal_dagster.protocol.ranges import ClaimedRange


class Part(NamedTuple):
    """A claimed range, as far as the judges ask for it."""

    partition: int
    generation: int
    epoch: int
    start: int
    end: int


def part(one: ClaimedRange) -> Part:
    """Cut a range down to what the judges ask for."""
    return Part(one.partition, one.generation, one.epoch, one.start, one.end)


class Line(BaseModel):
    """A line of a journal."""

    model_config = ConfigDict(frozen=True)

    at_ms: float
    instance: str


class Claimed(Line):
    """A batch was claimed, with these ranges."""

    kind: Literal["claimed"] = "claimed"
    parts: tuple[Part, ...]


class Processed(Line):
    """A message is processed now, under a lease that ends then, or under none."""

    kind: Literal["processed"] = "processed"
    part: Part
    offset: int
    lease_ends_ms: float | None


class Left(Line):
    """A batch was left, by an error or without; what was `committed` and `dropped` by then, as this member believes."""

    kind: Literal["left"] = "left"
    committed: tuple[Part, ...]
    dropped: tuple[Part, ...]
    error: str | None = None
    text: str = ""


class Refused(Line):
    """There was no batch, and that is why: an error, or idleness."""

    kind: Literal["refused"] = "refused"
    error: str
    text: str


class Known(Line):
    """How a key stands for a certain reader that has read a coordination partition up to `next_offset`."""

    kind: Literal["known"] = "known"
    coordination_partition: int
    next_offset: int
    group: str
    topic: str
    partition: int
    state: tuple[Any, ...]
    """All but its ranges."""
    ranges: tuple[tuple[Any, ...], ...]


class Halted(Line):
    """The member stops here, or ends."""

    kind: Literal["halted"] = "halted"


Entry = Claimed | Processed | Left | Refused | Known | Halted
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


class Journal:
    """A member's journal: each line is there as a whole, or not at all, however the member ends."""

    def __init__(self, path: Path) -> None:
        """Open it."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, entry: Entry) -> None:
        """Add a line."""
        os.write(self._file, entry.model_dump_json().encode() + b"\n")


def now_ms() -> float:
    """Tell the time since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * 1_000


def read_journal(path: Path) -> list[Entry]:
    """Read what is there; the line that a dying member was about to write may be missing, none is half there."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [_ENTRY.validate_json(line) for line in lines]
