"""Change the ranges of a key (protocol.md, section 8.2).

Ranges are immutable. An accepted record replaces the key's tuple of ranges; the tuple is ordered and without overlap.
`rules` calls these functions as the effects of range records.
"""

from collections.abc import Iterable
from typing import Final

from marshal_dagster.protocol.state import Key, Phase, Range, Ranges

MOST_RANGES: Final = 256
"""How many ranges a key may have. There is a limit because each record of the key is judged against all of them."""


def of_epoch(ranges: Ranges, epoch: int) -> Range | None:
    """Return the range that the record at log offset `epoch` won, if its owner still holds it."""
    for each in ranges:
        if each.owner is not None and each.owner.epoch == epoch:
            return each
    return None


def put(ranges: Iterable[Range], new: Range) -> Ranges:
    """Add a range; it replaces the range with the same start."""
    return tuple(sorted([*(range_ for range_ in ranges if range_.start != new.start), new]))


def give_up(ranges: Ranges, given: Range) -> Ranges:
    """Remove the owner of a range. A range that is only claimed is removed altogether."""
    if given.phase is Phase.CLAIMED:
        return tuple(range_ for range_ in ranges if range_ is not given)
    return put(ranges, given.without_owner())


def without_owners(ranges: Ranges) -> Ranges:
    """Remove all owners. Ranges that are only claimed are removed altogether."""
    return tuple(range_.without_owner() for range_ in ranges if range_.phase is not Phase.CLAIMED)


def is_done(key: Key, start: int, end: int) -> bool:
    """Return whether all offsets from `start` to `end` (exclusive) are done: below the offset, or in a done range."""
    if key.offset is not None and key.offset >= end:
        return True
    return any(range_.phase is Phase.DONE and range_.start <= start and end <= range_.end for range_ in key.ranges)


def finish(ranges: Ranges, done: Range, offset: int) -> tuple[Ranges, int]:
    """Mark the range `done` as done and merge it with the done ranges that it touches.

    Returns:
        The ranges that remain, and the offset, which passes the done range if that starts there.
    """
    start, end, kept = done.start, done.end, []
    for range_ in ranges:
        if range_ is done:
            continue
        if range_.phase is not Phase.DONE or range_.end < start or range_.start > end:
            kept.append(range_)
        else:
            start, end = min(start, range_.start), max(end, range_.end)
    if start == offset:
        return tuple(kept), end
    return put(kept, Range(start, end, Phase.DONE)), offset
