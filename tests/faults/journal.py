"""The lines of a member's journal (`tests.fault_harness.journal`)."""

from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from marshal_dagster.protocol.batch_planning import ClaimedRange


class Part(NamedTuple):
    """The fields of a claimed range that the checkers need."""

    partition: int
    generation: int
    epoch: int
    start: int
    end: int


def part(one: ClaimedRange) -> Part:
    """Return the fields of a range that the checkers need."""
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
    """A message is processed now, under a lease that ends at that time, or without one."""

    kind: Literal["processed"] = "processed"
    part: Part
    offset: int
    lease_ends_ms: float | None


class Left(Line):
    """A batch ended, with an error or without; the member believes that these parts are `committed` and `dropped`."""

    kind: Literal["left"] = "left"
    committed: tuple[Part, ...]
    dropped: tuple[Part, ...]
    error: str | None = None
    text: str = ""


class Refused(Line):
    """There was no batch, because of an error or because there was nothing to do."""

    kind: Literal["refused"] = "refused"
    error: str
    text: str


class Known(Line):
    """The state of a key for a certain reader that has read a coordination partition up to `next_offset`."""

    kind: Literal["known"] = "known"
    coordination_partition: int
    next_offset: int
    group: str
    topic: str
    partition: int
    state: tuple[Any, ...]
    """All fields except the ranges."""
    ranges: tuple[tuple[Any, ...], ...]


class Halted(Line):
    """The member stops here, or ends."""

    kind: Literal["halted"] = "halted"


Entry = Claimed | Processed | Left | Refused | Known | Halted
ENTRY: Final[TypeAdapter[Entry]] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])
