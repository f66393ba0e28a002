"""The lines of a member's journal (`tests.fault_harness.journal`)."""

from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from marshal_dagster.protocol.batch_planning import ClaimedRange


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
ENTRY: Final[TypeAdapter[Entry]] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])
