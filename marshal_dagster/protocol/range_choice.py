"""Choose the range that a member claims in a partition (protocol.md, section 8.4, "Claim").

The choice is advice: the rules in `rules` decide whether the claim is accepted.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from marshal_dagster.protocol.range_set import MOST_RANGES
from marshal_dagster.protocol.state import Group, Key, Owner, Phase, Range, Ranges, enables_ranges

Bounds = tuple[int, int]
"""The start and the end (exclusive) of a range."""


@dataclass(frozen=True, slots=True)
class ChoiceContext:
    """What a member knows in addition to the state.

    `at_ms` is the time at which owners are judged, in unix milliseconds (`Group.advice_time_ms`). `dead` are owners
    that are known to be dead but are not stale yet.
    """

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
    """Return the range of `key` to claim, or None if nothing is free or ranges cannot be claimed.

    The first choice is the lowest planned range without a live owner that has fewer than `max_attempts` attempts. It is
    claimed exactly as it is. Otherwise the choice is at the start of the lowest gap between ranges.

    Args:
        group: The state of the group.
        key: The state of the partition for the group.
        look: The time, and the owners that are known to be dead.
        until: The end (exclusive) of the offsets that may be claimed.
        size: The number of offsets at most. Offsets below `readable` do not count.
        readable: The first offset that retention has not deleted.
        max_attempts: Leave planned ranges with this number of attempts or more; None: take all.
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
    """Return the ranges of `dead` owners that overlap [start, end); the caller revokes them before it claims."""
    return [
        range_ for range_ in ranges if range_.owner is not None and range_.owner in dead and range_.overlaps(start, end)
    ]


def _may_be_claimed(group: Group, key: Key, look: ChoiceContext) -> bool:
    is_held_whole = group.is_live(key, look.at_ms) and key.owner not in look.dead
    has_position = key.offset is not None and key.data_topic_id is not None
    is_open = enables_ranges(group.settings) and not group.is_paused(look.at_ms)
    return is_open and has_position and not is_held_whole and key.plan_end is None and not key.provisional


def _abandoned_plan(group: Group, ranges: Ranges, look: ChoiceContext, max_attempts: int | None) -> Range | None:
    interval_ms = group.settings.heartbeat_interval_ms
    for range_ in ranges:
        is_held = range_.is_live(look.at_ms, interval_ms) and range_.owner not in look.dead
        is_worn = max_attempts is not None and range_.attempts >= max_attempts
        if range_.phase is Phase.PLANNED and not (is_held or is_worn):
            return range_
    return None


def _lowest_gap(kept: Iterable[Range], offset: int, until: int) -> Bounds | None:
    """Return the lowest offsets, from `offset` to `until` (exclusive), that no range in the ordered `kept` covers."""
    at = offset
    for range_ in kept:
        if at < range_.start:
            break
        at = range_.end
    end = min([until, *(range_.start for range_ in kept if range_.start > at)])
    return (at, end) if at < end else None
