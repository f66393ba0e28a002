"""The ranges by which a partition is held, and what becomes of them (protocol.md, section 8.2).

All are values: an accepted record gives a key another tuple of them, ordered and without overlap.
"""

from collections.abc import Iterable
from typing import Final

from marshal_dagster.protocol.state import Key, Phase, Range, Ranges

MOST_RANGES: Final = 256
"""How many a key may have: each of its records is judged against all of them."""


def of_epoch(ranges: Ranges, epoch: int) -> Range | None:
    """Find the range that was won by the record at log offset `epoch`, while its owner has it."""
    for each in ranges:
        if each.owner is not None and each.owner.epoch == epoch:
            return each
    return None


def put(ranges: Iterable[Range], new: Range) -> Ranges:
    """Add a range, in place of the one that begins where it does."""
    return tuple(sorted([*(range_ for range_ in ranges if range_.start != new.start), new]))


def give_up(ranges: Ranges, given: Range) -> Ranges:
    """Take the owner from a range: one that is only claimed is gone."""
    if given.phase is Phase.CLAIMED:
        return tuple(range_ for range_ in ranges if range_ is not given)
    return put(ranges, given.without_owner())


def without_owners(ranges: Ranges) -> Ranges:
    """Take all owners away; what was only claimed is gone."""
    return tuple(range_.without_owner() for range_ in ranges if range_.phase is not Phase.CLAIMED)


def is_done(key: Key, start: int, end: int) -> bool:
    """Tell whether all offsets from `start` up to `end` are done: passed by the offset, or done ahead of it."""
    if key.offset is not None and key.offset >= end:
        return True
    return any(range_.phase is Phase.DONE and range_.start <= start and end <= range_.end for range_ in key.ranges)


def finish(ranges: Ranges, done: Range, offset: int) -> tuple[Ranges, int]:
    """Let `done` be done, as one with the done ranges that it touches; give what is left, and the offset."""
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
