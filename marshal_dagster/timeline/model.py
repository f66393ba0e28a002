"""What a timeline shows: lanes, bars for claims, marks for records, and pauses. All times are log time in unix ms."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from marshal_dagster.protocol.state import Owner


class Lane(NamedTuple):
    """One row of the timeline: a partition of a data topic in a group.

    The row of the records that concern a whole group has an empty topic and the partition -1, so it sorts first.
    """

    group: str
    topic: str = ""
    partition: int = -1

    @property
    def is_group(self) -> bool:
        """Whether the row has the records that concern the whole group."""
        return not self.topic


class BarEnd(StrEnum):
    """Why a claim ended, as the page shows it."""

    RELEASED = "released"
    DONE = "its range was done"
    REVOKED = "revoked"
    TAKEN_OVER = "taken over by another claim"
    DISPLACED = "displaced by another member's heartbeat"
    SETTINGS = "ended by new group settings"


class MarkKind(StrEnum):
    """The kind of a record that has a mark, in the order of the legend."""

    PLAN = "plan"
    COMMIT = "commit"
    REFUSAL = "refusal"
    TAKEOVER = "takeover"
    REVOCATION = "revocation"
    POSITION = "position"
    PAUSE = "pause"
    SETTINGS = "settings"


class Span(NamedTuple):
    """A time from `start_ms` to `end_ms`."""

    start_ms: int
    end_ms: int


@dataclass(slots=True)
class Bar:
    """A claim: the time in which the world state has the owner of a partition, or of a range of its offsets.

    The owner holds it from the record at log offset `start_offset` on, until the one at `end_offset`. Both are offsets
    of the coordination partition. A claim that is still held has neither `end_offset` nor `ended_by`.
    """

    lane: Lane
    owner: Owner
    start_ms: int
    start_offset: int
    last_beat_ms: int
    sentence: str
    """The record that won the claim, as a sentence."""
    end_ms: int | None = None
    end_offset: int | None = None
    ended_by: BarEnd | None = None
    heartbeats: int = 0
    range_start: int | None = None
    """The first offset of the range that is held; None if the whole partition is."""
    range_end: int | None = None
    stale: list[Span] = field(default_factory=list)
    """The times in which the owner was stale."""
    heir: "Bar | None" = field(default=None, repr=False, compare=False)
    """The claim that continued what this one lost: it took the claim over, or claimed next after a revocation."""
    row: int = 0
    """The row of the bar within its lane. Only claims of ranges, which are held at the same time, need several."""

    def overlaps(self, other: "Bar") -> bool:
        """Return whether both claims are of the same offsets; a claim of a whole partition has all."""
        if self.range_start is None or self.range_end is None or other.range_start is None or other.range_end is None:
            return True
        return self.range_start < other.range_end and other.range_start < self.range_end

    def held(self, picture: Span) -> Span:
        """Return the time in which the claim was held; one that is still held ends with the picture."""
        return Span(self.start_ms, picture.end_ms if self.end_ms is None else self.end_ms)


class Mark(NamedTuple):
    """A record that is worth a mark, with its sender and its sentence."""

    kind: MarkKind
    lane: Lane
    at_ms: int
    instance: str
    sentence: str


class Pause(NamedTuple):
    """A time in which a group was paused, in the lanes of one topic; the group's own lane has an empty topic."""

    group: str
    topic: str
    span: Span


@dataclass(frozen=True, slots=True)
class Timeline:
    """All that one page shows. Lanes are sorted; bars are sorted by start, marks by time."""

    span: Span
    lanes: Sequence[Lane]
    bars: Sequence[Bar]
    marks: Sequence[Mark]
    pauses: Sequence[Pause]
    rows: dict[Lane, int]
    """How many rows each lane has. Lanes that are not named have one."""
    records: int = 0
    """How many records were read."""
    invalid: int = 0
    """How many of these were invalid; they belong to no lane."""
    notes: Sequence[str] = ()
    """What the reader of the page must know about the records."""

    @property
    def most_rows(self) -> int:
        """How many rows the lane with the most has."""
        return max(self.rows.values(), default=1)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.lanes

    @property
    def links(self) -> Sequence[tuple[Bar, Bar]]:
        """Each lost claim whose heir is in another row of its lane, with the heir."""
        shown = {id(bar) for bar in self.bars}
        heirs = [(bar, bar.heir) for bar in self.bars if bar.heir is not None]
        return [(bar, heir) for bar, heir in heirs if id(heir) in shown and heir.row != bar.row]

    @property
    def kinds(self) -> Sequence[MarkKind]:
        """The kinds of marks that there are."""
        present = {mark.kind for mark in self.marks}
        return [kind for kind in MarkKind if kind in present]

    def marks_of(self, kind: MarkKind) -> Sequence[Mark]:
        """Return the marks of a kind, by time."""
        return [mark for mark in self.marks if mark.kind is kind]
