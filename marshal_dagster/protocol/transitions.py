"""The table of PROTOCOL.md 4, as a table.

For each type of record: the conditions under which it is accepted, the reason that is named when one fails, its effect.

`NATIVE` and `GO` (section 7) judge; `OBSERVING` (section 5) is what a reader does that could not start at the
log's beginning: it refuses nothing and is never claimed from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DataTopic,
    GroupSettings,
    Heartbeat,
    Mark,
    Message,
    ReleaseGroup,
    ReleasingPartition,
    RevokingClaim,
)
from marshal_dagster.protocol.state import Group, Key, Owner


class Refusal(StrEnum):
    """Why a valid record changed nothing."""

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


class Note(StrEnum):
    """What a reader reports of a record that it accepted."""

    REWIND = "a heartbeat below the offset"
    LOWERED = "a heartbeat lowered the offset"
    DISPLACED = "a heartbeat displaced the owner"
    RELEASED_ELSEWHERE = "a release named another offset than the state's"


M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Event(Generic[M]):
    """One record, where it fell, and the state that it may change."""

    message: M
    offset: int
    log_time_ms: int
    group: Group
    key: Key


Guard = Callable[[Event[Any]], bool]
Effect = Callable[[Event[Any]], Note | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """All of `guards` must hold, else the first that fails names the refusal; then `effect` is carried out."""

    effect: Effect
    guards: tuple[tuple[Guard, Refusal], ...] = ()

    def refusal(self, event: Event[Any]) -> Refusal | None:
        """Name the reason for which `event` is refused, or None."""
        for guard, refusal in self.guards:
            if not guard(event):
                return refusal
        return None


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
    return not event.group.is_paused(event.log_time_ms)


def is_running_or_pauser(event: Event[Any]) -> bool:
    return is_running(event) or is_pauser(event)


def is_claim_of_epoch(event: Event[RevokingClaim]) -> bool:
    return event.key.owner is not None and event.key.owner.epoch == event.message.epoch


def is_offset_known(event: Event[Any]) -> bool:
    return event.key.offset is not None


def is_plan_ahead(event: Event[ClaimingMessages]) -> bool:
    return event.key.offset is not None and event.message.plan_end > event.key.offset


def is_plan_free(event: Event[ClaimingMessages]) -> bool:
    return event.key.plan_end in (None, event.message.plan_end)


def is_first_id_or_pauser(event: Event[DataTopic]) -> bool:
    return event.key.data_topic_id is None or is_pauser(event)


def is_group_idle(event: Event[Any]) -> bool:
    return not any(event.group.live_keys(event.log_time_ms))


def is_first_settings_or_pauser(event: Event[GroupSettings]) -> bool:
    return not event.group.settings_accepted or is_pauser(event)


def is_without_plans_or_pauser(event: Event[GroupSettings]) -> bool:
    return is_pauser(event) or all(key.plan_end is None for key in event.group.keys.values())


# Effects: what an accepted record changes


def _owner_of(event: Event[Any]) -> Owner:
    return Owner(event.message.instance, event.message.client, event.offset)


def take(event: Event[ClaimingPartition]) -> None:
    key = event.key
    key.owner = _owner_of(event)
    key.last_beat_ms = event.log_time_ms
    if key.plan_end is not None:
        key.plan_attempts += 1


def beat(event: Event[Heartbeat]) -> Note | None:
    key, offset = event.key, event.message.offset
    key.last_beat_ms = event.log_time_ms
    if key.offset is not None and offset < key.offset:
        return Note.REWIND
    key.move(offset)
    return None


def release(event: Event[ReleasingPartition]) -> Note | None:
    key = event.key
    key.owner = None
    if is_pauser(event):
        key.move(event.message.offset)
        key.new_generation(event.offset)
        return None
    return None if event.message.offset == key.offset else Note.RELEASED_ELSEWHERE


def revoke(event: Event[RevokingClaim]) -> None:
    event.key.owner = None


def plan(event: Event[ClaimingMessages]) -> None:
    event.key.plan_end = event.message.plan_end


def pause(event: Event[ReleaseGroup]) -> None:
    event.group.paused_until_s = event.message.expiry_s
    event.group.paused_by = event.message.instance


def name_data_topic(event: Event[DataTopic]) -> None:
    key, before = event.key, event.key.data_topic_id
    key.data_topic_id = event.message.topic_id
    if before not in (None, key.data_topic_id):
        key.move(None)
        key.new_generation(event.offset)


def settle(event: Event[GroupSettings]) -> None:
    group, settings = event.group, event.message.settings
    delivery_changes = settings.delivery != group.settings.delivery
    group.settings = settings
    group.settings_accepted = True
    for key in group.keys.values():
        key.owner = None
        if delivery_changes and key.offset is not None:
            key.new_generation(event.offset)


def nothing(_: Event[Any]) -> None:
    """Log time has moved; that is all."""


def go_beat(event: Event[Heartbeat]) -> Note | None:
    key, lowered = event.key, event.key.offset is not None and event.message.offset < event.key.offset
    displaced = key.owner is not None and not is_owner(event)
    if not is_owner(event):
        key.owner = _owner_of(event)
    key.last_beat_ms = event.log_time_ms
    key.move(event.message.offset)
    if displaced:
        return Note.DISPLACED
    return Note.LOWERED if lowered else None


def go_release(event: Event[ReleasingPartition]) -> Note | None:
    key, offset = event.key, event.message.offset
    if not is_pauser(event) and (key.offset is None or offset > key.offset):
        key.move(offset)
    return release(event)


def observe_owner(event: Event[Any]) -> None:
    event.key.owner = Owner(event.message.instance, event.message.client, epoch=None)
    event.key.last_beat_ms = event.log_time_ms


def observe_beat(event: Event[Heartbeat]) -> None:
    observe_owner(event)
    event.key.offset = event.message.offset


def observe_release(event: Event[ReleasingPartition]) -> None:
    if is_owner(event):
        event.key.owner = None
    event.key.offset = event.message.offset


def observe_data_topic(event: Event[DataTopic]) -> None:
    event.key.data_topic_id = event.message.topic_id


def observe_settings(event: Event[GroupSettings]) -> None:
    event.group.settings = event.message.settings
    event.group.settings_accepted = True


Rules = Mapping[type[Message], Rule]

NATIVE: Final[Rules] = MappingProxyType(
    {
        ClaimingPartition: Rule(take, ((is_unowned, Refusal.LIVE_OWNER), (is_running_or_pauser, Refusal.PAUSED))),
        Heartbeat: Rule(beat, ((is_owner, Refusal.NOT_OWNER),)),
        ReleasingPartition: Rule(release, ((is_owner, Refusal.NOT_OWNER),)),
        RevokingClaim: Rule(revoke, ((is_claim_of_epoch, Refusal.OTHER_EPOCH),)),
        ClaimingMessages: Rule(
            plan,
            (
                (is_owner, Refusal.NOT_OWNER),
                (is_live_owner, Refusal.NOT_LIVE),
                (is_running, Refusal.PAUSED),
                (is_offset_known, Refusal.OFFSET_UNKNOWN),
                (is_plan_ahead, Refusal.EMPTY_PLAN),
                (is_plan_free, Refusal.OTHER_PLAN),
            ),
        ),
        ReleaseGroup: Rule(pause),
        DataTopic: Rule(
            name_data_topic,
            (
                (is_owner, Refusal.NOT_OWNER),
                (is_live_owner, Refusal.NOT_LIVE),
                (is_first_id_or_pauser, Refusal.NOT_PAUSER),
            ),
        ),
        GroupSettings: Rule(
            settle,
            (
                (is_group_idle, Refusal.LIVE_MEMBERS),
                (is_first_settings_or_pauser, Refusal.SETTINGS_EXIST),
                (is_without_plans_or_pauser, Refusal.OPEN_PLANS),
            ),
        ),
        Mark: Rule(nothing),
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
        GroupSettings: Rule(observe_settings),
    }
)
