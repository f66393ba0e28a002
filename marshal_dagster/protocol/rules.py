"""The rules that accept or refuse a record, as tables (protocol.md, sections 4, 5.5, 7 and 8.3).

Each table maps a type of record to a `Rule`. A rule has the conditions under which the record is accepted, the reason
to report for each condition that fails, and the effect. The conditions are checked in order, so each may rely on those
before it.

`NATIVE` and `GO` are the tables of the two rule sets. `OBSERVING` is the table of a reader that could not start at the
beginning of the log or at a snapshot. It refuses nothing, and no member claims from the state of that reader.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingRange,
    DataTopic,
    GroupSettingsRecord,
    Heartbeat,
    Mark,
    Message,
    PlanningRange,
    RangeDone,
    RangeHeartbeat,
    RangeMessage,
    ReleaseGroup,
    ReleasingPartition,
    ReleasingRange,
    RevokingClaim,
    RevokingRange,
)
from marshal_dagster.protocol.range_set import MOST_RANGES, finish, give_up, of_epoch, put, without_owners
from marshal_dagster.protocol.state import Group, Key, Owner, Phase, Range, Ranges, enables_ranges


class Refusal(StrEnum):
    """Why a valid record was refused. Snapshots store these texts as keys of their counts."""

    LIVE_OWNER = "the partition has a live owner"
    PAUSED = "the group is paused"
    NOT_OWNER = "the sender does not own the partition"
    NOT_LIVE = "the sender's claim is stale"
    OTHER_EPOCH = "the claim of that epoch is over"
    OFFSET_UNKNOWN = "the partition has no offset yet"
    EMPTY_PLAN = "the plan ends at or before the offset"
    OTHER_PLAN = "another plan is open"
    NOT_PAUSER = "it takes the instance that paused the group"
    LIVE_MEMBERS = "the group has live owners"
    OPEN_PLANS = "the group has open plans"
    SETTINGS_EXIST = "the group has settings; they are changed while it is paused, by who paused it"
    RANGES_DISABLED = "the group's settings do not enable ranges"
    HELD_BY_RANGES = "the partition is held by ranges"
    TOPIC_UNKNOWN = "the partition has no data topic id yet"
    OPEN_PLAN = "the partition has an open plan"
    BELOW_OFFSET = "the range begins below the offset"
    EMPTY_RANGE = "the range ends where it begins, or before"
    RANGE_TAKEN = "the range is held, planned or done, in part or whole"
    TOO_MANY_RANGES = "the partition has as many ranges as it may have"
    OUTSIDE_RANGE = "the plan does not end within the range"
    NOT_PLANNED = "the range has no plan"


class RecordNote(StrEnum):
    """What a reader reports about an accepted record. Snapshots store these texts as keys of their counts."""

    REWIND = "a heartbeat below the offset"
    LOWERED = "a heartbeat lowered the offset"
    DISPLACED = "a heartbeat displaced the owner"
    RELEASED_ELSEWHERE = "a release named another offset than the state's"
    BEYOND_RANGES = "a heartbeat above the offset of a partition that has ranges"
    UNPLANNED = "a heartbeat moved the offset without a plan"


M = TypeVar("M", bound=Message)

_NO_RANGE: Final = Range(0, 0, Phase.DONE)


@dataclass(slots=True)
class Event(Generic[M]):
    """A record, its place in the log, and the state that it may change."""

    message: M
    offset: int
    """The log offset of the record."""
    log_time_ms: int
    group: Group
    key: Key


Guard = Callable[[Event[Any]], bool]
Notes = tuple[RecordNote, ...]
Effect = Callable[[Event[Any]], Notes]


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one type of record: if all guards hold, the effect is applied.

    Otherwise the record is refused with the reason of the first guard that fails.
    """

    effect: Effect
    guards: tuple[tuple[Guard, Refusal], ...] = ()


# Guards: conditions under which a record is accepted


def is_owner(event: Event[Any]) -> bool:
    owner = event.key.owner
    return owner is not None and owner.instance == event.message.instance


def is_unowned(event: Event[Any]) -> bool:
    return event.key.owner is None or not event.group.is_live(event.key, event.log_time_ms)


def is_live_owner(event: Event[Any]) -> bool:
    return is_owner(event) and not is_unowned(event)


def is_pauser(event: Event[Any]) -> bool:
    return event.group.is_paused_by(event.message.instance, event.log_time_ms)


def is_running(event: Event[Any]) -> bool:
    group = event.group
    return group.paused_until_s is None or not group.is_paused(event.log_time_ms)


def is_running_or_pauser(event: Event[Any]) -> bool:
    return is_running(event) or is_pauser(event)


def is_offset_known(event: Event[Any]) -> bool:
    return event.key.offset is not None


# Guards of range claims, and of whole claims where a key has ranges


def is_free_of_live_ranges(event: Event[Any]) -> bool:
    return not event.key.ranges or not event.group.has_live_range(event.key, event.log_time_ms)


def is_free_of_ranges_or_pauser(event: Event[Any]) -> bool:
    return not event.key.ranges or not _effective_ranges(event) or is_pauser(event)


def is_takeover_or_free(event: Event[ClaimingRange]) -> bool:
    start, end, ranges = event.message.start, event.message.end, _effective_ranges(event)
    return _abandoned_plan(event) is not None or not any(range_.overlaps(start, end) for range_ in ranges)


def is_takeover_or_not_too_many(event: Event[ClaimingRange]) -> bool:
    return _abandoned_plan(event) is not None or len(_effective_ranges(event)) < MOST_RANGES


def is_range_of_epoch(event: Event[RangeMessage]) -> bool:
    return _named(event) is not _NO_RANGE


def is_range_owner(event: Event[RangeMessage]) -> bool:
    held = _named(event)
    return held.owner is not None and held.owner.instance == event.message.instance


def is_live_range(event: Event[RangeMessage]) -> bool:
    return _named(event).is_live(event.log_time_ms, event.group.settings.heartbeat_interval_ms)


def is_within_range(event: Event[PlanningRange]) -> bool:
    held = _named(event)
    return held.start < event.message.end <= held.end


def is_same_plan_or_first(event: Event[PlanningRange]) -> bool:
    held = _named(event)
    return held.phase is Phase.CLAIMED or held.end == event.message.end


def _effective_ranges(event: Event[Any]) -> Ranges:
    return event.group.effective_ranges(event.key, event.log_time_ms)


def _named(event: Event[Any]) -> Range:
    """Return the range that the record names, or `_NO_RANGE` if there is none; the first guard then refuses."""
    return of_epoch(event.key.ranges, event.message.epoch) or _NO_RANGE


def _abandoned_plan(event: Event[ClaimingRange]) -> Range | None:
    """Return the planned range without a live owner that is exactly the requested one."""
    bounds, interval_ms = (event.message.start, event.message.end), event.group.settings.heartbeat_interval_ms
    for range_ in event.key.ranges:
        if (range_.start, range_.end) == bounds and range_.phase is Phase.PLANNED:
            return None if range_.is_live(event.log_time_ms, interval_ms) else range_
    return None


# Effects: what an accepted record changes


def _owner_of(event: Event[Any]) -> Owner:
    return Owner(event.message.instance, event.message.client, event.offset)


def take(event: Event[ClaimingPartition]) -> Notes:
    key = event.key
    key.former_owner = key.owner or key.former_owner
    key.owner = _owner_of(event)
    key.last_beat_ms = event.log_time_ms
    if key.ranges:
        key.ranges = without_owners(key.ranges)
    if key.plan_end is not None:
        key.plan_attempts += 1
    return ()


def beat(event: Event[Heartbeat]) -> Notes:
    key, offset = event.key, event.message.offset
    key.last_beat_ms = event.log_time_ms
    if key.offset is not None and offset < key.offset:
        return (RecordNote.REWIND,)
    if key.ranges:
        return () if offset == key.offset else (RecordNote.BEYOND_RANGES,)
    is_planned = key.plan_end is not None or key.offset in {None, offset}
    key.move(offset)
    return () if is_planned else (RecordNote.UNPLANNED,)


def release(event: Event[ReleasingPartition]) -> Notes:
    key = event.key
    key.former_owner, key.owner = key.owner, None
    if is_pauser(event):
        key.move(event.message.offset)
        key.new_generation(event.offset)
        return ()
    return () if event.message.offset == key.offset else (RecordNote.RELEASED_ELSEWHERE,)


def revoke(event: Event[RevokingClaim]) -> Notes:
    event.key.former_owner, event.key.owner = event.key.owner, None
    return ()


def plan(event: Event[ClaimingMessages]) -> Notes:
    event.key.plan_end = event.message.plan_end
    return ()


def pause(event: Event[ReleaseGroup]) -> Notes:
    event.group.paused_until_s = event.message.expiry_s
    event.group.paused_by = event.message.instance
    event.group.pause_client, event.group.pause_reason = event.message.client, None
    return ()


def name_data_topic(event: Event[DataTopic]) -> Notes:
    key, before = event.key, event.key.data_topic_id
    key.data_topic_id = event.message.topic_id
    if before not in (None, key.data_topic_id):
        key.move(None)
        key.new_generation(event.offset)
    return ()


def apply_settings(event: Event[GroupSettingsRecord]) -> Notes:
    group, settings = event.group, event.message.settings
    delivery_changes = settings.delivery != group.settings.delivery
    group.settings = settings
    group.settings_accepted = True
    for key in group.keys.values():
        key.owner = None
        key.ranges = without_owners(key.ranges)
        forgets_ranges = bool(key.ranges) and not enables_ranges(settings)
        if forgets_ranges or (delivery_changes and key.offset is not None):
            key.new_generation(event.offset)
    return ()


def take_range(event: Event[ClaimingRange]) -> Notes:
    key, left = event.key, _abandoned_plan(event)
    key.owner = None
    new = left or Range(event.message.start, event.message.end, Phase.CLAIMED)
    attempts = new.attempts if left is None else left.attempts + 1
    held = new._replace(owner=_owner_of(event), last_beat_ms=event.log_time_ms, attempts=attempts)
    key.ranges = put(_effective_ranges(event), held)
    return ()


def plan_range(event: Event[PlanningRange]) -> Notes:
    planned = _named(event)._replace(end=event.message.end, phase=Phase.PLANNED)
    event.key.ranges = put(event.key.ranges, planned)
    return ()


def beat_range(event: Event[RangeHeartbeat]) -> Notes:
    event.key.ranges = put(event.key.ranges, _named(event)._replace(last_beat_ms=event.log_time_ms))
    return ()


def finish_range(event: Event[RangeDone]) -> Notes:
    key = event.key
    if key.offset is not None:
        key.ranges, offset = finish(key.ranges, _named(event), key.offset)
        key.move(offset)
    return ()


def release_range(event: Event[RangeMessage]) -> Notes:
    event.key.ranges = give_up(event.key.ranges, _named(event))
    return ()


def nothing(_: Event[Any]) -> Notes:
    """Change no key and no group; the reader has moved log time already."""
    return ()


def go_beat(event: Event[Heartbeat]) -> Notes:
    key, is_lowered = event.key, event.key.offset is not None and event.message.offset < event.key.offset
    is_displacing = key.owner is not None and not is_owner(event)
    if not is_owner(event):
        key.owner = _owner_of(event)
    key.last_beat_ms = event.log_time_ms
    key.move(event.message.offset)
    displaced = (RecordNote.DISPLACED,) if is_displacing else ()
    return (*displaced, RecordNote.LOWERED) if is_lowered else displaced


def go_release(event: Event[ReleasingPartition]) -> Notes:
    key, offset = event.key, event.message.offset
    if not is_pauser(event) and (key.offset is None or offset > key.offset):
        key.move(offset)
    return release(event)


def observe_owner(event: Event[Any]) -> Notes:
    event.key.owner = Owner(event.message.instance, event.message.client, epoch=None)
    event.key.last_beat_ms = event.log_time_ms
    return ()


def observe_beat(event: Event[Heartbeat]) -> Notes:
    event.key.offset = event.message.offset
    return observe_owner(event)


def observe_release(event: Event[ReleasingPartition]) -> Notes:
    if is_owner(event):
        event.key.owner = None
    event.key.offset = event.message.offset
    return ()


def observe_data_topic(event: Event[DataTopic]) -> Notes:
    event.key.data_topic_id = event.message.topic_id
    return ()


def observe_settings(event: Event[GroupSettingsRecord]) -> Notes:
    event.group.settings = event.message.settings
    event.group.settings_accepted = True
    return ()


Rules = Mapping[type[Message], Rule]

_RUNNING: Final = (is_running, Refusal.PAUSED)
_BY_RANGE_OWNER: Final = ((is_range_of_epoch, Refusal.OTHER_EPOCH), (is_range_owner, Refusal.NOT_OWNER))

NATIVE: Final[Rules] = MappingProxyType(
    {
        ClaimingPartition: Rule(
            take,
            (
                (is_unowned, Refusal.LIVE_OWNER),
                (is_running_or_pauser, Refusal.PAUSED),
                (is_free_of_live_ranges, Refusal.HELD_BY_RANGES),
                (is_free_of_ranges_or_pauser, Refusal.HELD_BY_RANGES),
            ),
        ),
        Heartbeat: Rule(beat, ((is_owner, Refusal.NOT_OWNER),)),
        ReleasingPartition: Rule(release, ((is_owner, Refusal.NOT_OWNER),)),
        RevokingClaim: Rule(
            revoke,
            (
                (
                    lambda event: event.key.owner is not None and event.key.owner.epoch == event.message.epoch,
                    Refusal.OTHER_EPOCH,
                ),
            ),
        ),
        ClaimingMessages: Rule(
            plan,
            (
                (is_owner, Refusal.NOT_OWNER),
                (is_live_owner, Refusal.NOT_LIVE),
                (is_running, Refusal.PAUSED),
                (is_offset_known, Refusal.OFFSET_UNKNOWN),
                (lambda event: event.message.plan_end > event.key.offset, Refusal.EMPTY_PLAN),
                (lambda event: event.key.plan_end in (None, event.message.plan_end), Refusal.OTHER_PLAN),
                (lambda event: not event.key.ranges, Refusal.HELD_BY_RANGES),
            ),
        ),
        ReleaseGroup: Rule(pause),
        DataTopic: Rule(
            name_data_topic,
            (
                (is_owner, Refusal.NOT_OWNER),
                (is_live_owner, Refusal.NOT_LIVE),
                (lambda event: event.key.data_topic_id is None or is_pauser(event), Refusal.NOT_PAUSER),
            ),
        ),
        GroupSettingsRecord: Rule(
            apply_settings,
            (
                (lambda event: not any(event.group.live_keys(event.log_time_ms)), Refusal.LIVE_MEMBERS),
                (lambda event: not event.group.settings_accepted or is_pauser(event), Refusal.SETTINGS_EXIST),
                (
                    lambda event: is_pauser(event) or all(key.plan_end is None for key in event.group.keys.values()),
                    Refusal.OPEN_PLANS,
                ),
            ),
        ),
        Mark: Rule(nothing),
        ClaimingRange: Rule(
            take_range,
            (
                (lambda event: enables_ranges(event.group.settings), Refusal.RANGES_DISABLED),
                _RUNNING,
                (is_unowned, Refusal.LIVE_OWNER),
                (lambda event: event.key.plan_end is None, Refusal.OPEN_PLAN),
                (is_offset_known, Refusal.OFFSET_UNKNOWN),
                (lambda event: event.key.data_topic_id is not None, Refusal.TOPIC_UNKNOWN),
                (lambda event: event.message.start >= event.key.offset, Refusal.BELOW_OFFSET),
                (lambda event: event.message.start < event.message.end, Refusal.EMPTY_RANGE),
                (is_takeover_or_free, Refusal.RANGE_TAKEN),
                (is_takeover_or_not_too_many, Refusal.TOO_MANY_RANGES),
            ),
        ),
        PlanningRange: Rule(
            plan_range,
            (
                *_BY_RANGE_OWNER,
                (is_live_range, Refusal.NOT_LIVE),
                _RUNNING,
                (is_within_range, Refusal.OUTSIDE_RANGE),
                (is_same_plan_or_first, Refusal.OTHER_PLAN),
            ),
        ),
        RangeHeartbeat: Rule(beat_range, _BY_RANGE_OWNER),
        RangeDone: Rule(
            finish_range, (*_BY_RANGE_OWNER, (lambda event: _named(event).phase is Phase.PLANNED, Refusal.NOT_PLANNED))
        ),
        ReleasingRange: Rule(release_range, _BY_RANGE_OWNER),
        RevokingRange: Rule(release_range, ((is_range_of_epoch, Refusal.OTHER_EPOCH),)),
    }
)

GO: Final[Rules] = MappingProxyType(
    {
        **NATIVE,
        Heartbeat: Rule(go_beat),
        ReleasingPartition: Rule(go_release, ((is_owner, Refusal.NOT_OWNER),)),
    }
)

OBSERVING: Final[Rules] = MappingProxyType(
    {
        **{kind: Rule(nothing) for kind in NATIVE},
        ClaimingPartition: Rule(observe_owner),
        Heartbeat: Rule(observe_beat),
        ReleasingPartition: Rule(observe_release),
        RevokingClaim: Rule(revoke),
        ReleaseGroup: Rule(pause),
        DataTopic: Rule(observe_data_topic),
        GroupSettingsRecord: Rule(observe_settings),
    }
)
