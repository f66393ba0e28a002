"""Compute the world state from the records of the log (protocol.md, sections 2, 3 and 5).

All readers that start at the beginning of the log or at a snapshot compute the same state; they are *certain*. A
`World` has one `PartitionWorld` for each coordination partition. A `PartitionWorld` has the `Group`s of its records,
and each `Group` has one `Key` for each (topic, partition). Only `apply` and `apply_many` change them. `rules` defines
what each record changes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Final, NamedTuple

from marshal_dagster.protocol.messages import (
    GROUP_MESSAGES,
    WITHOUT_SETTINGS,
    ClaimingMessages,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    Invalid,
    InvalidMessage,
    Mark,
    Message,
    ReleaseGroup,
    RevokingClaim,
    RevokingRange,
    RuleSet,
    coordination_partition,
    parse,
)
from marshal_dagster.protocol.rules import GO, NATIVE, OBSERVING, Event, Notes, RecordNote, Refusal, Rules
from marshal_dagster.protocol.state import RANGES, DataPartitionId, Group, Key


class VerdictKind(StrEnum):
    """The result of judging a record."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of judging a record, the reason if it is refused or invalid, and what to report about it."""

    kind: VerdictKind
    reason: Refusal | Invalid | None = None
    notes: Notes = ()


ACCEPTED: Final = Verdict(VerdictKind.ACCEPTED)
_REFUSED: Final = {refusal: Verdict(VerdictKind.REFUSED, refusal) for refusal in Refusal}
_INVALID: Final = {invalid: Verdict(VerdictKind.INVALID, invalid) for invalid in Invalid}


class LastRecord(NamedTuple):
    """The identity of the last record before a log offset: its offset, timestamp and the SHA-256 of its value.

    It shows whether the log was truncated and has grown again, because then another record is at that offset.
    """

    offset: int
    timestamp_ms: int
    digest: str

    @classmethod
    def of(cls, offset: int, timestamp_ms: int, value: bytes | None) -> "LastRecord":
        """Return the identity of a record; the digest of a null value is empty."""
        return cls(offset, timestamp_ms, "" if value is None else sha256(value).hexdigest())


class Unplanned(NamedTuple):
    """A heartbeat that moved an offset without a plan, which only Go consumers send, and its log offset."""

    log_offset: int
    message: Message


class PartitionWorld:
    """The world state of one coordination partition.

    `certain` is whether the state was read from the start of the log or from a snapshot. If it was not, every key is
    provisional and no member claims from it. `next_offset` is the log offset of the next record to apply.
    `log_time_ms` is the largest broker timestamp so far, None before the first record. `had_ranges` is whether the
    settings of any group ever named the feature `ranges` (protocol.md, section 5.2).
    """

    def __init__(self, number: int, coordination_partitions: int, defaults: GroupSettings, start: int) -> None:
        """Start at log offset `start` with an empty state."""
        self.number = number
        self.coordination_partitions = coordination_partitions
        self.defaults = defaults
        self.certain = start == 0
        self.had_ranges = False
        self.next_offset = start
        self.groups: dict[str, Group] = {}
        self.refused: Counter[Refusal] = Counter()
        self.invalid: Counter[Invalid] = Counter()
        self.noted: Counter[RecordNote] = Counter()
        self._last: LastRecord | tuple[int, int, bytes | None] | None = None
        self.log_time_ms: int | None = None
        self.unplanned: dict[str, Unplanned] = {}
        """For each group the last heartbeat that moved an offset without a plan, since this reader started."""
        self.revocations: dict[int, Message] = {}
        """The last accepted revocations since this reader started, by the epoch that they revoked, for people.

        No rule uses them, and snapshots do not have them.
        """
        self._beats: dict[bytes, Key] = {}
        self._beat_of: dict[int, bytes] = {}
        """The remembered heartbeat of a key, by the `id` of the key; a reader never drops a key."""
        self._event: Event[Message] = Event(_NOTHING, -1, 0, Group(defaults), Key())
        """The record that is being judged. The object is reused, because creating one costs as much as some rules."""

    @property
    def last(self) -> LastRecord | None:
        """The last record that was read, if the reader has set it; nothing in the state depends on it."""
        last = self._last
        return last if last is None or isinstance(last, LastRecord) else LastRecord.of(*last)

    def set_last_record(self, last: LastRecord | tuple[int, int, bytes | None] | None) -> None:
        """Set the last record: either its identity, or its offset, timestamp in ms and value."""
        self._last = last

    def group(self, name: str) -> Group:
        """Return the state of a group; an unknown group has the defaults."""
        return self.groups.get(name) or Group(self.defaults)

    def key(self, group: str, topic: str, partition: int) -> Key:
        """Return the state of a key; an unknown key is empty."""
        known = self.groups.get(group)
        key = known.keys.get((topic, partition)) if known is not None else None
        return key or Key(provisional=not self.certain)

    def keys_of(self, group: str, topic: str, partitions: Iterable[int]) -> list[Key]:
        """Return the states of partitions of a topic, in that order; an unknown key is empty."""
        known = self.group(group).keys.of_topic(topic, partitions)
        return [key or Key(provisional=not self.certain) for key in known]

    def present_ms(self, wall_ms: int) -> int:
        """Return the later of log time and `wall_ms` (a clock), because log time does not move in a silent log."""
        return max(self.log_time_ms or 0, wall_ms)

    def is_home_of(self, topic: str) -> bool:
        """Return whether this coordination partition holds the records of a data topic."""
        return coordination_partition(topic, self.coordination_partitions) == self.number

    def resume_at(self, next_offset: int, log_time_ms: int | None) -> None:
        """Continue at `next_offset`, after the caller has loaded the state of all records before it."""
        self.next_offset = next_offset
        self.log_time_ms = log_time_ms

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None, known: Message | None = None) -> Verdict:
        """Apply the record at log offset `offset`. Never raises because of the content of the record.

        Args:
            offset: The log offset of the record.
            timestamp_ms: The broker's timestamp.
            value: The value of the record.
            known: The message that `value` parses to, if the caller rendered it for this coordination partition.

        Returns:
            Whether the record was accepted, refused or invalid, and why.

        Raises:
            ValueError: a record at this offset or a later one was applied before.
        """
        if offset < self.next_offset:
            raise ValueError(
                f"offset {offset} of coordination partition {self.number} was applied before: the next one is "
                f"{self.next_offset}"
            )
        self.next_offset = offset + 1
        log_time_ms = self.log_time_ms
        if log_time_ms is None or timestamp_ms > log_time_ms:
            self.log_time_ms = log_time_ms = timestamp_ms
        if known is not None:
            return self._judge(known, offset, log_time_ms, None)
        message = parse(value)
        if isinstance(message, InvalidMessage):
            return self._count_invalid(message.reason)
        if type(message) not in GROUP_MESSAGES and not self.is_home_of(message.topic):
            return self._count_invalid(Invalid.MISPLACED)
        return self._judge(message, offset, log_time_ms, value)

    def keep_pause_reason(self, value: bytes | None, reason: str) -> None:
        """Keep the reason of a record that was applied, if it is the group's last pause. It changes nothing else."""
        message = parse(value)
        if not isinstance(message, ReleaseGroup):
            return
        group = self.groups.get(message.group)
        if group is not None and (group.paused_by, group.paused_until_s) == (message.instance, message.expiry_s):
            group.pause_reason = reason

    def apply_many(self, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        """Apply records, given as (offset, timestamp in ms, value), in order. The result is the same as by `apply`.

        Nearly all records of a long log are heartbeats of a known owner that differ from its last one in the sender's
        time only. They can only move `last_beat_ms`, so one look into a dict applies them.
        """
        beats, log_time_ms, next_offset, known_head = self._beats, self.log_time_ms, self.next_offset, b""
        for offset, timestamp_ms, value in records:
            if value is not None:
                head = value[:_BEAT_LENGTH]
                if head == known_head or _BEAT.fullmatch(head):
                    known_head = head
                    key = beats.get(value[_BEAT_LENGTH:])
                    if key is not None and key.owner is not None:
                        next_offset = offset + 1
                        if timestamp_ms > log_time_ms:  # type: ignore[operator] # noqa: PLR1730 - max() is slow here
                            log_time_ms = timestamp_ms
                        key.last_beat_ms = log_time_ms  # type: ignore[assignment] # set, because the owner is known
                        continue
            self.log_time_ms, self.next_offset = log_time_ms, next_offset
            self.apply(offset, timestamp_ms, value)
            log_time_ms, next_offset = self.log_time_ms, self.next_offset
        self.log_time_ms, self.next_offset = log_time_ms, next_offset

    def _judge(self, message: Message, offset: int, log_time_ms: int, value: bytes | None) -> Verdict:
        kind, place = type(message), (message.topic, message.partition)
        group = self.groups.get(message.group) or Group(self.defaults)
        known = group.keys.get(place)
        key = known or Key(provisional=not self.certain)
        event = self._event
        event.message, event.offset, event.log_time_ms = message, offset, log_time_ms
        event.group, event.key = group, key
        rule = self._rules_of(group)[kind]
        for guard, refusal in rule.guards:
            if not guard(event):
                self.refused[refusal] += 1
                return _REFUSED[refusal]
        notes = rule.effect(event)
        if kind is not Mark:
            self.groups[message.group] = group
            if kind not in GROUP_MESSAGES:
                if known is None:
                    group.keys[place] = key
                self._remember_beat(message, value, key)
                if kind in _REVOKING:
                    self._keep_revocation(message)
        if kind is GroupSettingsRecord and RANGES in group.settings.features:
            self.had_ranges = True
        if not notes:
            return ACCEPTED
        self.noted.update(notes)
        if RecordNote.UNPLANNED in notes:
            self.unplanned[message.group] = Unplanned(offset, message)
        return Verdict(VerdictKind.ACCEPTED, notes=notes)

    def _rules_of(self, group: Group) -> Rules:
        if not self.certain:
            return OBSERVING
        return NATIVE if group.settings.rule_set is RuleSet.NATIVE else GO

    def _remember_beat(self, message: Message, value: bytes | None, key: Key) -> None:
        """Store an accepted heartbeat without its time, so that `apply_many` recognises the next one that is equal.

        Such a heartbeat changes nothing but `last_beat_ms` until another record of the key is accepted, or settings
        remove its owner. Of these records only a plan changes neither owner nor offset. `value` is None for a record
        of this process, because `apply_many` does not read its next heartbeat either.
        """
        if type(message) is ClaimingMessages:
            return
        self._beats.pop(self._beat_of.pop(id(key), b""), None)
        if type(message) is not Heartbeat or value is None or not self.certain or len(self._beats) >= MOST_BEATS:
            return
        if message.offset == key.offset and key.owner is not None and _BEAT.fullmatch(value[:_BEAT_LENGTH]):
            self._beat_of[id(key)] = beat = value[_BEAT_LENGTH:]
            self._beats[beat] = key

    def _keep_revocation(self, message: Message) -> None:
        self.revocations[message.epoch] = message  # type: ignore[attr-defined] # both types have it
        if len(self.revocations) > MOST_REVOCATIONS:
            del self.revocations[next(iter(self.revocations))]

    def _count_invalid(self, reason: Invalid) -> Verdict:
        self.invalid[reason] += 1
        return _INVALID[reason]


_BEAT: Final = re.compile(rb"Heartbeat/1/[1-9][0-9]{9}/")
"""The beginning of a heartbeat whose time has ten digits, as the unix time has until the year 2286."""
_BEAT_LENGTH: Final = len(b"Heartbeat/1/0123456789/")
MOST_BEATS: Final = 8_192
"""How many heartbeats a reader of a coordination partition remembers; the other keys' are parsed."""
MOST_REVOCATIONS: Final = 8_192
"""How many revocations a reader of a coordination partition keeps; the oldest are dropped."""
_REVOKING: Final = frozenset({RevokingClaim, RevokingRange})
_NOTHING: Final = Mark(instance="", client="", group="", time_s=0)


class World:
    """The world state of a coordination log, or of those coordination partitions that the reader follows."""

    def __init__(
        self,
        coordination_partitions: int,
        heartbeat_interval_ms: int = WITHOUT_SETTINGS.heartbeat_interval_ms,
        rule_set: RuleSet = WITHOUT_SETTINGS.rule_set,
    ) -> None:
        """Start without any coordination partition.

        The heartbeat interval and the rule set are in force in each group until its first settings record.
        """
        if coordination_partitions < 1:
            raise ValueError(f"a coordination topic has at least 1 partition, not {coordination_partitions}")
        self.coordination_partitions = coordination_partitions
        self.partitions: dict[int, PartitionWorld] = {}
        self._defaults = GroupSettings(heartbeat_interval_ms, rule_set)

    def start(self, partition: int, offset: int) -> PartitionWorld:
        """Start to follow coordination partition `partition` at log offset `offset` with an empty state."""
        if not 0 <= partition < self.coordination_partitions:
            raise ValueError(
                f"coordination partition {partition} does not exist: the topic has {self.coordination_partitions}, "
                "numbered from 0"
            )
        world = PartitionWorld(partition, self.coordination_partitions, self._defaults, offset)
        self.partitions[partition] = world
        return world

    def adopt(self, state: PartitionWorld) -> None:
        """Replace the state of a coordination partition by `state`, and follow it from there.

        Raises:
            ValueError: the state has another partition count or other defaults.
        """
        if (state.coordination_partitions, state.defaults) != (self.coordination_partitions, self._defaults):
            raise ValueError(
                f"the state of coordination partition {state.number} was read with another partition count or other "
                "defaults"
            )
        self.partitions[state.number] = state

    @property
    def defaults(self) -> GroupSettings:
        """The settings in force in each group until its first settings record."""
        return self._defaults

    def apply(self, partition: int, offset: int, timestamp_ms: int, value: bytes | None) -> Verdict:
        """Apply one record; a coordination partition that is not followed yet starts at this record."""
        world = self.partitions.get(partition) or self.start(partition, offset)
        return world.apply(offset, timestamp_ms, value)

    def apply_many(self, partition: int, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        """Apply many records of one coordination partition; see `PartitionWorld.apply_many`."""
        remaining = iter(records)
        if partition not in self.partitions:
            first = next(remaining, None)
            if first is None:
                return
            self.apply(partition, *first)
        self.partitions[partition].apply_many(remaining)

    def partition_of(self, topic: str) -> PartitionWorld:
        """Return the state of the coordination partition of `topic`.

        Raises:
            KeyError: that coordination partition is not followed.
        """
        return self.partitions[coordination_partition(topic, self.coordination_partitions)]

    def group_of(self, group: str, topic: str) -> Group:
        """Return the state of `group` in the coordination partition of `topic`; an unknown group has the defaults."""
        return self.partition_of(topic).group(group)

    def key(self, group: str, topic: str, partition: int) -> Key:
        """Return the state of a key; an unknown key is empty."""
        return self.partition_of(topic).key(group, topic, partition)

    def advice_time_ms(self, group: str, topic: str, wall_ms: int) -> int:
        """Return the time that a member uses to judge which owners in `group` are stale; see `Group.advice_time_ms`."""
        world = self.partition_of(topic)
        return world.group(group).advice_time_ms(world.log_time_ms, wall_ms)

    def go_groups(self) -> dict[str, list[DataPartitionId]]:
        """Return the groups of Go consumers, each with the keys that show it (protocol.md, section 6, "Settings")."""
        found: dict[str, list[DataPartitionId]] = {}
        for world in self.partitions.values():
            for name, group in world.groups.items():
                if group.has_go_keys:
                    found.setdefault(name, []).extend(
                        place for place, key in group.keys.items() if key.offset is not None and not key.data_topic_id
                    )
        return found

    @property
    def has_settings(self) -> bool:
        """Whether settings of any group were accepted, so that the log has records that Go does not know."""
        return any(group.settings_accepted for world in self.partitions.values() for group in world.groups.values())

    def keys(self) -> Iterator[tuple[str, DataPartitionId, Group, Key]]:
        """Yield the group's name, the (topic, partition), the group and the state of every key."""
        for world in self.partitions.values():
            for name, group in world.groups.items():
                for place, key in group.keys.items():
                    yield name, place, group, key

    def snapshot_key(self, group: str, topic: str, partition: int) -> Key:
        """Return a copy of a key's state, which does not change while the reader follows the log."""
        return self.key(group, topic, partition).copy()
