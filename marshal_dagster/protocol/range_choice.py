"""What a member had better claim of a partition that is held by ranges: advice (protocol.md, section 8.4, "Claim")."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from marshal_dagster.protocol.range_set import MOST_RANGES
from marshal_dagster.protocol.state import Group, Key, Owner, Phase, Range, Ranges, enables_ranges

Bounds = tuple[int, int]
"""The start and the end (exclusive) of a range."""


@dataclass(frozen=True, slots=True)
class ChoiceContext:
    """What one knows beside the state: the time, in ms, and who is `dead` though not stale yet."""

    at_ms: int
    dead: Collection[Owner] = ()


def choose_range(
    group: Group,
    key: Key,
    look: ChoiceContext,
    *,
    until: int,
    size: int,
    readable: int = 0,
    max_attempts: int | None = None,
) -> Bounds | None:
    """Choose what to claim of `key`, or None where nothing is free or ranges cannot be claimed.

    First the lowest planned range that nobody alive holds and that had fewer than `max_attempts` attempts, exactly as
    it is; else at most `size` offsets of the lowest gap, none at or beyond `until`; those below `readable`, which
    retention has deleted, do not count.
    """
    if not _may_be_claimed(group, key, look):
        return None
    counted = group.effective_ranges(key, look.at_ms)
    left = _abandoned_plan(group, counted, look, max_attempts)
    if left is not None:
        return left.start, left.end
    kept = [range_ for range_ in counted if range_.phase is not Phase.CLAIMED or range_.owner not in look.dead]
    gap = _lowest_gap(kept, key.offset or 0, until)
    if gap is None:
        return None
    start, end = gap[0], min(gap[1], max(gap[0], readable) + size)
    others = len(counted) - len(overlapping_dead_ranges(counted, start, end, look.dead))
    return (start, end) if start < end and others < MOST_RANGES else None


def overlapping_dead_ranges(ranges: Ranges, start: int, end: int, dead: Collection[Owner]) -> list[Range]:
    """Give the ranges of `dead` owners that overlap [start, end): revoke them before it is claimed."""
    return [
        range_ for range_ in ranges if range_.owner is not None and range_.owner in dead and range_.overlaps(start, end)
    ]


def _may_be_claimed(group: Group, key: Key, look: ChoiceContext) -> bool:
    is_held_whole = group.is_live(key, look.at_ms) and key.owner not in look.dead
    is_begun = key.offset is not None and key.data_topic_id is not None
    is_open = enables_ranges(group.settings) and not group.is_paused(look.at_ms)
    return is_open and is_begun and not is_held_whole and key.plan_end is None and not key.provisional


def _abandoned_plan(group: Group, ranges: Ranges, look: ChoiceContext, max_attempts: int | None) -> Range | None:
    interval_ms = group.settings.heartbeat_interval_ms
    for range_ in ranges:
        is_held = range_.is_live(look.at_ms, interval_ms) and range_.owner not in look.dead
        is_worn = max_attempts is not None and range_.attempts >= max_attempts
        if range_.phase is Phase.PLANNED and not (is_held or is_worn):
            return range_
    return None


def _lowest_gap(kept: Iterable[Range], offset: int, until: int) -> Bounds | None:
    """Give the lowest offsets from `offset` on and below `until` that none of `kept`, which are ordered, has."""
    at = offset
    for range_ in kept:
        if at < range_.start:
            break
        at = range_.end
    end = min([until, *(range_.start for range_ in kept if range_.start > at)])
    return (at, end) if at < end else None
