"""Choose the offsets of a batch: where it starts and where its plan ends (protocol.md, section 6, "Where to start").

A member calls these functions after it has won a claim. They compute with the state and the topic's bounds only; the
caller reads those from Kafka.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from marshal_dagster.errors import DataLossError, StartPositionError
from marshal_dagster.protocol.state import Key, OffsetBounds


class StartPolicy(StrEnum):
    """The offset at which a group without a position starts; applies only when the group first claims a topic.

    Example:
        ```python
        BatchRequest(topic="orders", start=StartPolicy.LATEST)
        ```
    """

    EARLIEST = "earliest"
    """Start at the first offset that the partition still holds."""
    LATEST = "latest"
    """Start at the end of the partition: earlier messages are not processed."""
    FAIL = "fail"
    """Raise `StartPositionError`: an operator must set the position first."""


class Position(NamedTuple):
    """The position of a group in a partition, and what it can read from there."""

    offset: int
    """The next offset to process."""
    readable: int
    """The first offset from `offset` on that retention has not deleted."""
    end: int
    """The end (exclusive) of what can be read."""

    @property
    def lag(self) -> int:
        """The number of offsets that can still be read."""
        return self.end - self.readable


def reach(key: Key) -> int:
    """Return the end of the last planned or done range of `key`, or its offset if there is no range."""
    return max((range_.end for range_ in key.ranges and key.ahead), default=key.offset or 0)


def other_incarnation(key: Key, topic_id: str | None, extent: OffsetBounds) -> str | None:
    """Return what shows that the position in `key` belongs to another incarnation of the data topic, or None.

    `extent` has the bounds of all records, committed or not. Without `topic_id` only offsets are compared.
    """
    if topic_id is not None and key.data_topic_id not in (None, topic_id):
        return f"its position belongs to topic id {key.data_topic_id}, the cluster's is {topic_id}"
    if key.offset is not None and key.offset > extent.end:
        return f"its position {key.offset} lies beyond the topic's end {extent.end}"
    if reach(key) > extent.end:
        return f"its planned ranges reach {reach(key)}, which lies beyond the topic's end {extent.end}"
    return None


def first_offset(
    name: str, key: Key, extent: OffsetBounds, policy: StartPolicy, *, group_offset: int | None, is_new: bool
) -> int:
    """Return the offset at which the owner of a won claim starts.

    The first of these that exists is the start:

    1. the offset of the key in the state,
    2. 0, if the generation is above 0,
    3. `group_offset`, which the group has committed in Kafka,
    4. 0 if the partition was added after the group had started with the topic (`is_new`),
    5. the offset that `policy` chooses.

    Raises:
        StartPositionError: only the policy is left, and it is `fail`.
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
            f"{name}: the group has no position and the start policy is 'fail'. Set the position with `marshal-dagster "
            "position reset`, or choose the policy 'earliest' or 'latest'"
        )
    return extent.start if policy is StartPolicy.EARLIEST else extent.end


def position(name: str, offset: int, extent: OffsetBounds, *, allow_data_loss: bool) -> Position:
    """Compare `offset` with what can be read, and return the position.

    Raises:
        DataLossError: retention deleted messages that were not read, and `allow_data_loss` is false.
    """
    readable = max(offset, extent.start)
    if readable > offset and not allow_data_loss:
        raise DataLossError(
            f"{name}: retention deleted messages {offset} to {readable} (exclusive) before the group read them; "
            f"nothing was processed. Accept the loss for one run (`allow_data_loss`), or set the position to {readable}"
        )
    return Position(offset, readable, max(readable, extent.end))


@dataclass(frozen=True, slots=True)
class ClaimedRange:
    """The offsets of one partition that belong to a claimed batch.

    A sink stores these values with the rows, so that it takes each range once (protocol.md, section 6, "Effectively
    once"). `str()` gives `topic/partition [start, end)`.

    Raises:
        ValueError: the offsets are not in the order 0 <= start <= first_readable <= end.

    Example:
        ```python
        for range_ in batch.ranges:
            print(range_, range_.width, range_.lost)
        ```
    """

    coordination_topic_id: str
    """Kafka's id of the coordination topic. Fencing tokens are comparable only under the same id."""
    group: str
    """The group that claimed the partition."""
    topic: str
    """The data topic."""
    data_topic_id: str
    """Kafka's id of the data topic; a topic that was deleted and re-created has another one."""
    partition: int
    """The partition of the data topic."""
    generation: int
    """The generation of the key (protocol.md, section 3.6); it grows when an operator sets the position."""
    epoch: int
    """The fencing token: the log offset of the record that won the claim. A later claim has a larger one."""
    start: int
    """The first offset."""
    end: int
    """The end (exclusive): the next offset to read after the range."""
    first_readable: int
    """The first offset that retention has left; equal to `start` unless messages were lost."""
    in_any_order: bool = False
    """Whether members of the group claim ranges, so that the neighbouring ranges may be done earlier or later.

    See protocol.md, section 8.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.first_readable <= self.end:
            raise ValueError(
                f"invalid range of {self.topic}/{self.partition}: start {self.start}, first_readable "
                f"{self.first_readable}, end {self.end}; expected 0 <= start <= first_readable <= end"
            )

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition} [{self.start}, {self.end})"

    @property
    def width(self) -> int:
        """The number of offsets; compaction and transactions can leave fewer records."""
        return self.end - self.start

    @property
    def lost(self) -> tuple[int, int] | None:
        """The part, as (start, end), that retention deleted before the group read it, or None."""
        return (self.start, self.first_readable) if self.first_readable > self.start else None


def skip_text(range_: ClaimedRange, first: int, end: int) -> str:
    """Return the command that skips the offsets [first, end) of a range, and which other offsets it skips too.

    The command sets the position to `end`. So it also skips the offsets of the range before `first`.
    """
    import shlex

    place = ["marshal-dagster", "position", "reset", range_.group, range_.topic]
    command = f"`{shlex.join([*place, '--to-offset', f'{range_.partition}={end}'])}`"
    before = first - range_.start
    if before <= 0:
        return command
    skipped, them = ("the one offset", "it") if before == 1 else (f"the {before} offsets", "them")
    advice = f"process {them} first (docs/operate/reprocess.md)"
    return f"{command}, which also skips {skipped} of the batch before it: {advice}"


def plan_ends(
    available: Mapping[int, tuple[int, int]],
    max_records: int | None,
    log_ends: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """Choose the end of each partition's plan, so that the largest lags shrink first.

    Args:
        available: For each partition its position and the end (exclusive) of what the batch may take.
        max_records: The number of offsets of all plans together, at most; None for all that is available.
        log_ends: For each partition the end of its log, if that lies beyond what is available. Lags are counted to it.

    Returns:
        The end (exclusive) of the plan of each partition that gets at least one offset.
    """
    widths = {partition: end - position for partition, (position, end) in available.items() if end > position}
    if max_records is not None and sum(widths.values()) > max_records:
        lags = {n: max(width, log_ends.get(n, 0) - available[n][0]) for n, width in widths.items()}
        widths = _levelled(widths, lags, max_records)
    return {partition: available[partition][0] + width for partition, width in widths.items() if width}


def _levelled(widths: Mapping[int, int], lags: Mapping[int, int], budget: int) -> dict[int, int]:
    """Divide `budget`, which is less than the sum of `widths`, so that the largest lag that remains is minimal."""

    def taken(level: int) -> dict[int, int]:
        return {number: min(width, max(0, lags[number] - level)) for number, width in widths.items()}

    level = bisect_left(range(max(lags.values())), x=True, key=lambda level: sum(taken(level).values()) <= budget)
    shares, one_more = taken(level), taken(level - 1)
    spare = budget - sum(shares.values())
    growing = sorted(number for number in widths if one_more[number] > shares[number])
    return shares | {number: one_more[number] for number in growing[:spare]}
