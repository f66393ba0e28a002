"""The offsets of a batch: which ranges to plan, and how an output takes each of them once (PROTOCOL.md 6).

Every range is half open: `start` is the first offset, `end` the next one to read after it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from marshal_dagster.errors import SinkRefused


@dataclass(frozen=True, slots=True)
class ClaimedRange:
    """One partition's part of a claimed batch.

    `epoch` is the claim's fencing token; with the coordination topic's id it orders all writers. `first_readable` is
    the first offset of the range that retention has left: `start`, unless messages were lost. `in_any_order`: members
    of the group claim ranges, so its neighbours may be done before it or after (docs/range-claims.md).
    """

    coordination_topic_id: str
    group: str
    topic: str
    data_topic_id: str
    partition: int
    generation: int
    epoch: int
    start: int
    end: int
    first_readable: int
    in_any_order: bool = False

    def __post_init__(self) -> None:
        """Refuse values that cannot be."""
        if not 0 <= self.start <= self.first_readable <= self.end:
            raise ValueError(f"not a range: start {self.start}, readable {self.first_readable}, end {self.end}")

    def __str__(self) -> str:
        """Name topic, partition and offsets."""
        return f"{self.topic}/{self.partition} [{self.start}, {self.end})"

    @property
    def width(self) -> int:
        """How many offsets it spans; compaction and transactions can leave fewer records."""
        return self.end - self.start

    @property
    def lost(self) -> tuple[int, int] | None:
        """The part [start, end) that retention deleted before it was read, or None."""
        return (self.start, self.first_readable) if self.first_readable > self.start else None


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """How far an output has got with one (group, topic, partition)."""

    coordination_topic_id: str
    data_topic_id: str
    generation: int
    epoch: int
    position: int


class Verdict(StrEnum):
    """What an output does with a range.

    Rows of older generations at the offsets read give way in both cases of writing: a new generation that is under way
    still meets what older ones wrote further on.
    """

    TAKE = "take"
    """The range follows on what is stored in its generation: write its rows."""
    SKIP = "skip"
    """The range was taken before: write nothing."""
    REPLACE = "replace"
    """The first range of a new generation or of an empty output: write its rows, wherever it starts."""


def judge(stored: StoredPosition | None, wanted: ClaimedRange) -> Verdict:
    """Say what an output that has got as far as `stored` does with `wanted` (PROTOCOL.md 6, "Effectively once").

    Raises `SinkRefused` for a lower token or generation, another coordination log, a data topic made anew without a new
    generation, and a position that is neither the range's start nor its end.
    """
    if stored is None:
        return Verdict.REPLACE
    if stored.coordination_topic_id != wanted.coordination_topic_id:
        raise SinkRefused(
            f"{wanted} of group {wanted.group!r}: the output was written under coordination topic id "
            f"{stored.coordination_topic_id}, this run uses {wanted.coordination_topic_id}. The coordination topic was "
            "made anew; a person must check what was done and point the group at a new output"
        )
    if wanted.generation < stored.generation:
        raise SinkRefused(
            f"{wanted} of group {wanted.group!r}: generation {wanted.generation} is older than {stored.generation} in "
            "the output: the position was set while this run worked; let it end"
        )
    if wanted.epoch < stored.epoch:
        raise SinkRefused(
            f"{wanted} of group {wanted.group!r}: fencing token {wanted.epoch} is lower than {stored.epoch} in the "
            "output: another run has taken the partition over; this one must stop"
        )
    if wanted.generation > stored.generation:
        return Verdict.REPLACE
    if wanted.data_topic_id != stored.data_topic_id:
        raise SinkRefused(
            f"{wanted} of group {wanted.group!r}: the output holds data topic {stored.data_topic_id}, this run reads "
            f"{wanted.data_topic_id} in the same generation: the data topic was made anew; set the position first"
        )
    if stored.position == wanted.end:
        return Verdict.SKIP
    if stored.position != wanted.start:
        raise SinkRefused(
            f"{wanted} of group {wanted.group!r}: the output stands at {stored.position}, which is neither the range's "
            "start nor its end: nothing was written; compare the output with `marshal-dagster position get`"
        )
    return Verdict.TAKE


def plan_ends(available: Mapping[int, tuple[int, int]], max_records: int | None) -> dict[int, int]:
    """Choose how far each partition's plan goes.

    `available` gives (position, end offset) for each partition; the answer holds the plan's end for those that get
    anything. At most `max_records` offsets in all; the largest lags are levelled first.
    """
    lags = {partition: end - position for partition, (position, end) in available.items() if end > position}
    if max_records is None or sum(lags.values()) <= max_records:
        return {partition: available[partition][1] for partition in lags}
    level, spare = _level(sorted(lags.values(), reverse=True), max_records)
    ends: dict[int, int] = {}
    for partition in sorted(lags):
        share = lags[partition] - level
        if share < 0:
            continue
        extra = 1 if spare else 0
        spare -= extra
        if share + extra:
            ends[partition] = available[partition][0] + share + extra
    return ends


def _level(lags: list[int], budget: int) -> tuple[int, int]:
    """Find the level to which the largest of `lags` (falling) can be brought, and what then is left of `budget`."""
    spent = 0
    for count, lag in enumerate(lags, start=1):
        below = lags[count] if count < len(lags) else 0
        cost = (lag - below) * count
        if spent + cost > budget:
            lowered, spare = divmod(budget - spent, count)
            return lag - lowered, spare
        spent += cost
    return 0, 0
