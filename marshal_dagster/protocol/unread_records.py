"""The unread part of a data partition. Each tool that shows a lag counts it here."""

from collections.abc import Iterable
from dataclasses import dataclass

from marshal_dagster.protocol.state import Key, OffsetBounds, Phase, Range


@dataclass(frozen=True, slots=True)
class UnreadRecords:
    """The unread part of a partition: the first unread offset that still exists, and the number of unread offsets."""

    first: int
    records: int
    margin: int
    """The offsets between the partition's beginning and the first unread one."""
    deleted: int
    """The unread offsets after the position that retention has deleted."""


def is_of_topic(key: Key, topic_id: str | None, *, is_go: bool) -> bool:
    """Return whether a key belongs to the data topic with this id, and not to a deleted one of the same name.

    Go consumers record no id, so in their groups each key does (protocol.md, section 6).
    """
    return is_go or key.data_topic_id in {None, topic_id}


def unread_records(key: Key | None, topic_id: str, at: OffsetBounds, *, is_go: bool) -> UnreadRecords | None:
    """Return the unread part of a partition, or None if its position belongs to another topic or is after the end.

    A partition that no record names is unread from its beginning. Ranges that are done count as read.
    """
    if key is None:
        return unread_after(at.start, (), at)
    position = at.start if key.offset is None else key.offset
    if position > at.end or not is_of_topic(key, topic_id, is_go=is_go):
        return None
    return unread_after(position, (range_ for range_ in key.ranges if range_.phase is Phase.DONE), at)


def unread_after(position: int, read: Iterable[Range], at: OffsetBounds) -> UnreadRecords:
    """Return the unread part after a position, without the ranges `read`, which are in ascending order."""
    first, later, deleted = max(position, at.start), 0, max(0, at.start - position)
    for range_ in read:
        deleted -= max(0, min(range_.end, at.start) - max(range_.start, position))
        if range_.end <= first:
            continue
        if range_.start <= first:
            first = range_.end
        else:
            later += min(range_.end, at.end) - min(range_.start, at.end)
    first = min(first, at.end)
    return UnreadRecords(first, at.end - first - later, first - at.start, deleted)
