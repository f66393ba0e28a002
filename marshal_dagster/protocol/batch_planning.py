"""Where the owner of a partition starts to read (PROTOCOL.md 6, "Where to start")."""

from enum import StrEnum
from typing import NamedTuple

from marshal_dagster.errors import DataLoss, DataTopicChanged, StartUnknown
from marshal_dagster.protocol.state import Key, Phase


class StartPolicy(StrEnum):
    """Where a group starts that has no position yet; applied once, when it first claims a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"
    FAIL = "fail"


class Extent(NamedTuple):
    """The offsets of a data partition that can be read: from `start` up to `end` (exclusive)."""

    start: int
    end: int


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
    if not key.ranges:
        return key.offset or 0
    return max((each.end for each in key.ranges if each.phase is not Phase.CLAIMED), default=key.offset or 0)


def check_incarnation(name: str, key: Key, topic_id: str, extent: Extent) -> None:
    """Raise `DataTopicChanged` when where the key stands belongs to another incarnation of the data topic."""
    if key.data_topic_id not in (None, topic_id):
        found = f"its position belongs to topic id {key.data_topic_id}, the cluster's is {topic_id}"
    elif key.offset is not None and key.offset > extent.end:
        found = f"its position {key.offset} lies beyond the topic's end {extent.end}"
    elif reach(key) > extent.end:
        found = f"ranges up to {reach(key)} were planned, which lies beyond the topic's end {extent.end}"
    else:
        return
    raise DataTopicChanged(f"{name} was made anew: {found}. Nothing is read until a person sets the position")


def first_offset(
    name: str, key: Key, extent: Extent, policy: StartPolicy, *, group_offset: int | None, is_new: bool
) -> int:
    """Give the offset at which the owner of a won claim starts.

    The state's; else 0 in a later generation; else the group's committed offset in Kafka; else 0 for a partition that
    is new (`is_new`) in a topic of which the group has others; else what `policy` says. Raises `StartUnknown`.
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
        raise StartUnknown(
            f"{name} has no position and the start policy is 'fail': set the position, or choose 'earliest' or 'latest'"
        )
    return extent.start if policy is StartPolicy.EARLIEST else extent.end


def position(name: str, offset: int, extent: Extent, *, accept_data_loss: bool) -> Position:
    """Lay `offset` against what can be read; raises `DataLoss` for messages deleted unread unless that is accepted."""
    readable = max(offset, extent.start)
    if readable > offset and not accept_data_loss:
        raise DataLoss(
            f"retention deleted messages {offset} to {readable} (exclusive) of {name} before they were read; nothing "
            "was done. Accept the loss explicitly for one run, or set the position past it"
        )
    return Position(offset, readable, max(readable, extent.end))
