"""Which offsets a batch takes: where it starts, how far its plan goes (protocol.md, section 6, "Where to start")."""

import shlex
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from marshal_dagster.errors import DataLossError, DataTopicChangedError, StartPositionError
from marshal_dagster.protocol.state import Key, OffsetBounds


class StartPolicy(StrEnum):
    """Where a group starts that has no position yet; applied once, when it first claims a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"
    FAIL = "fail"


class Position(NamedTuple):
    """Where a partition stands: `offset` is the next to read, `readable` the first from there on that is left."""

    offset: int
    readable: int
    end: int

    @property
    def lag(self) -> int:
        """How many offsets are left to read."""
        return self.end - self.readable


def reach(key: Key) -> int:
    """Give the end of what was done or planned by ranges of `key`, its offset where there are none."""
    return max((range_.end for range_ in key.ahead), default=key.offset or 0)


def check_incarnation(name: str, key: Key, topic_id: str, extent: OffsetBounds) -> None:
    """Raise `DataTopicChangedError` when where the key stands belongs to another incarnation of the data topic."""
    if key.data_topic_id not in (None, topic_id):
        found = f"its position belongs to topic id {key.data_topic_id}, the cluster's is {topic_id}"
    elif key.offset is not None and key.offset > extent.end:
        found = f"its position {key.offset} lies beyond the topic's end {extent.end}"
    elif reach(key) > extent.end:
        found = f"ranges up to {reach(key)} were planned, which lies beyond the topic's end {extent.end}"
    else:
        return
    raise DataTopicChangedError(f"{name} was made anew: {found}. Nothing is read until a person sets the position")


def first_offset(
    name: str, key: Key, extent: OffsetBounds, policy: StartPolicy, *, group_offset: int | None, is_new: bool
) -> int:
    """Give the offset at which the owner of a won claim starts.

    The state's; else 0 in a later generation; else the group's committed offset in Kafka; else 0 for a partition that
    is new (`is_new`) in a topic of which the group has others; else what `policy` says. Raises `StartPositionError`.
    """
    if key.offset is not None:
        return key.offset
    if key.generation > 0:
        return 0
    if group_offset is not None:
        return group_offset
    if is_new:
        return 0
    if policy is StartPolicy.FAIL:
        raise StartPositionError(
            f"{name} has no position and the start policy is 'fail': set the position, or choose 'earliest' or 'latest'"
        )
    return extent.start if policy is StartPolicy.EARLIEST else extent.end


def position(name: str, offset: int, extent: OffsetBounds, *, allow_data_loss: bool) -> Position:
    """Lay `offset` against what can be read.

    Raises `DataLossError` for messages deleted unread unless that is accepted.
    """
    readable = max(offset, extent.start)
    if readable > offset and not allow_data_loss:
        raise DataLossError(
            f"retention deleted messages {offset} to {readable} (exclusive) of {name} before they were read; nothing "
            "was done. Accept the loss explicitly for one run, or set the position past it"
        )
    return Position(offset, readable, max(readable, extent.end))


@dataclass(frozen=True, slots=True)
class ClaimedRange:
    """One partition's part of a claimed batch.

    `epoch` is the claim's fencing token; with the coordination topic's id it orders all writers. `first_readable` is
    the first offset of the range that retention has left: `start`, unless messages were lost. `in_any_order`: members
    of the group claim ranges, so its neighbours may be done before it or after (protocol.md, section 8).
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
        if not 0 <= self.start <= self.first_readable <= self.end:
            raise ValueError(f"not a range: start {self.start}, readable {self.first_readable}, end {self.end}")

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} [{self.start}, {self.end})"

    @property
    def width(self) -> int:
        """How many offsets it spans; compaction and transactions can leave fewer records."""
        return self.end - self.start

    @property
    def lost(self) -> tuple[int, int] | None:
        """The part [start, end) that retention deleted before it was read, or None."""
        return (self.start, self.first_readable) if self.first_readable > self.start else None


def skip_text(range_: ClaimedRange, first: int, end: int) -> str:
    """Return the command by which a group skips offsets [first, end) of a range, and what of it that skips beside."""
    place = ["marshal-dagster", "position", "reset", range_.group, range_.topic]
    command = f"`{shlex.join([*place, '--to-offset', f'{range_.partition}={end}'])}`"
    before = first - range_.start
    if before <= 0:
        return command
    skipped, them = ("the one offset", "it") if before == 1 else (f"the {before} offsets", "them")
    return f"{command}, which skips {skipped} of the batch before it too: have {them} done first (docs/reprocess.md)"


def plan_ends(
    available: Mapping[int, tuple[int, int]],
    max_records: int | None,
    log_ends: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """Choose how far each partition's plan goes.

    `available` gives (position, end offset) for each partition; the answer holds the plan's end for those that get
    anything. At most `max_records` offsets in all; the largest lags are levelled first: a lag is what is left up to
    the end of the partition's log, which `log_ends` gives where that is beyond what is available.
    """
    widths = {partition: end - position for partition, (position, end) in available.items() if end > position}
    if max_records is not None and sum(widths.values()) > max_records:
        lags = {n: max(width, log_ends.get(n, 0) - available[n][0]) for n, width in widths.items()}
        widths = _levelled(widths, lags, max_records)
    return {partition: available[partition][0] + width for partition, width in widths.items() if width}


def _levelled(widths: Mapping[int, int], lags: Mapping[int, int], budget: int) -> dict[int, int]:
    """Share out less than the sum of `widths`, so that the largest of `lags` becomes as small as can be."""

    def taken(level: int) -> dict[int, int]:
        return {number: min(width, max(0, lags[number] - level)) for number, width in widths.items()}

    level = bisect_left(range(max(lags.values())), x=True, key=lambda level: sum(taken(level).values()) <= budget)
    shares, one_more = taken(level), taken(level - 1)
    spare = budget - sum(shares.values())
    growing = sorted(number for number in widths if one_more[number] > shares[number])
    return shares | {number: one_more[number] for number in growing[:spare]}
