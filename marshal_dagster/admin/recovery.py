"""Recovery of a coordination log whose beginning was deleted without a snapshot (protocol.md, section 5, "Recover").

An operator decides this, because the deleted records may have contained anything, and first stops all members of all
groups. Recovery reads what is left of the log, and the operator confirms the offsets. It then writes two Marks with
more than 2 heartbeat intervals of log time between them. If no other record arrives, no member is running, and it
writes the first snapshot. Go consumers do not understand a Mark. If they use the coordination topic, recovery writes a
release instead: by an instance that owns nothing, for a known partition, at the offset shown.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from operator import itemgetter
from typing import Any, Final, NamedTuple

from marshal_dagster.coordination.appender import GO_TIME_SHIFT_S
from marshal_dagster.coordination.claims import new_instance_id
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.log import Append, CoordinationLog, LogIdentity, PositionLostError
from marshal_dagster.coordination.rationalizer import Rationalizer, sender_timed_error
from marshal_dagster.coordination.snapshots import Snapshots, foreign_snapshots, newest_snapshots
from marshal_dagster.errors import CoordinationLogChangedError, MarshalError, RecoveryFailedError, UnavailableError
from marshal_dagster.protocol.messages import (
    WITHOUT_SETTINGS,
    GroupSettings,
    Heartbeat,
    InvalidMessage,
    Mark,
    Message,
    ReleasingPartition,
    RuleSet,
    parse,
    render,
    type_name,
)
from marshal_dagster.protocol.state import RANGES, DataPartitionId, Group, Key, Keys, OffsetBounds
from marshal_dagster.protocol.world import LastRecord, PartitionWorld, VerdictKind, World

NAME: Final = "recover"
"""The group and client of the Marks; neither gets into any state."""
TRIES: Final = 5
_MORE_MS: Final = 100
"""How much longer than 2 intervals to wait, because log time comes from the broker's clock."""


class LastOffsets(NamedTuple):
    """The last offsets of a partition in the rest of the log; the record of either may have been refused."""

    heartbeat: int | None = None
    release: int | None = None


class ConfirmedOffset(NamedTuple):
    """The offset that an operator confirms for a partition, with the id of its data topic if known."""

    offset: int
    data_topic_id: str | None


Whose = tuple[str, DataPartitionId]
"""A group and a partition of a data topic."""


@dataclass(slots=True)
class ObservedPartition:
    """One incomplete coordination partition, and what the rest of its log shows of each data partition."""

    world: PartitionWorld
    elsewhere: Mapping[str, Group] = field(default_factory=dict)
    """Settings and pause of each group in the other coordination partitions; complete ones take precedence."""
    by: str = ""
    """The instance id of this recovery, by which it recognizes its own Marks."""
    last_offsets: dict[Whose, LastOffsets] = field(default_factory=dict)
    disturbed_by: str | None = None
    """A text that names the first record since `look` that shows another process at work; None if there is none."""
    awaited: int | None = None
    """The log offset of the Mark, or of the release that replaces it, that was appended last."""
    mark_ms: int | None = None
    """The log time of that record, once it was read."""
    mark: LastRecord | None = None
    """The identity of that record, once it was read."""

    @property
    def longest_interval_ms(self) -> int:
        """The longest heartbeat interval of a group that any record shows."""
        groups = [*self.world.groups.values(), *self.elsewhere.values()]
        shown = [group.settings.heartbeat_interval_ms for group in groups]
        return max(shown, default=self.world.defaults.heartbeat_interval_ms)

    @property
    def groups(self) -> dict[str, Group]:
        """The known state of each group; values that this partition does not show come from the other partitions.

        Settings and pauses are written to all coordination partitions. Settings that this partition shows may have been
        refused, because an incomplete log does not show whether they were.
        """
        names = dict.fromkeys((*self.world.groups, *self.elsewhere))
        return {name: self._group(name) for name in names}

    def _group(self, name: str) -> Group:
        here = self.world.groups.get(name) or Group(self.world.defaults)
        there = self.elsewhere.get(name) or Group(self.world.defaults)
        settled = there if there.settings_accepted else here
        paused = there if here.paused_until_s is None else here
        return Group(
            settled.settings,
            settled.settings_accepted,
            paused.paused_until_s,
            paused.paused_by,
            Keys(here.keys.items()),
            paused.pause_client,
            paused.pause_reason,
        )

    def take(self, offset: int, timestamp_ms: int, value: bytes | None, *, is_quiet: bool) -> None:
        """Apply one record; if `is_quiet`, store any record but a Mark as a disturbance."""
        message = parse(value)
        verdict = self.world.apply(offset, timestamp_ms, value)
        self.world.set_last_record((offset, timestamp_ms, value))
        if offset == self.awaited and isinstance(message, Message) and message.instance == self.by:
            self.mark_ms, self.mark = self.world.log_time_ms, LastRecord.of(offset, timestamp_ms, value)
        what = self._disturbance(message)
        if is_quiet and what is not None and self.disturbed_by is None:
            self.disturbed_by = f"{what} at offset {offset} of coordination partition {self.world.number}"
        if verdict.kind is not VerdictKind.ACCEPTED:
            return
        if isinstance(message, Heartbeat | ReleasingPartition):
            whose = (message.group, (message.topic, message.partition))
            before = self.last_offsets.get(whose, LastOffsets())
            is_beat = isinstance(message, Heartbeat)
            self.last_offsets[whose] = before._replace(**{"heartbeat" if is_beat else "release": message.offset})

    def _disturbance(self, message: Message | InvalidMessage) -> str | None:
        """Return a text for a record that is not a Mark, or a Mark of another recovery; None for other Marks.

        A recovery at the same time may confirm other offsets.
        """
        if isinstance(message, InvalidMessage):
            return "an invalid record"
        if message.instance == self.by:
            return None
        if not isinstance(message, Mark):
            return f"a {type_name(message)}"
        return "a Mark of another `recover`" if message.group == NAME else None

    def sign(self, *, is_go: bool, time_s: int) -> Message:
        """Return a record that only advances log time: a Mark, or a release that Go consumers understand."""
        signed: dict[str, Any] = {"instance": self.by, "client": NAME}
        if not is_go:
            return Mark(group=NAME, time_s=time_s, **signed)
        time_s -= GO_TIME_SHIFT_S
        for group, state in sorted(self.world.groups.items()):
            for (topic, partition), key in sorted(state.keys.items(), key=itemgetter(0)):
                if key.offset is not None:
                    signed |= {"group": group, "topic": topic, "partition": partition, "offset": key.offset}
                    return ReleasingPartition(time_s=time_s, **signed)
        named = (f"{NAME}-{number}" for number in count())
        topic = next(filter(self.world.is_home_of, named))
        return ReleasingPartition(group=NAME, topic=topic, partition=0, offset=0, time_s=time_s, **signed)


class Recovery:
    """Reads what is left of a log, and writes the first snapshots of its incomplete coordination partitions."""

    def __init__(
        self, log: CoordinationLog, snapshots: Snapshots, *, timeout_s: float = 10.0, clock: Clock | None = None
    ) -> None:
        """Use `log`, and write to `snapshots`. Raises `TopicNotFoundError`, `UnavailableError`."""
        self.identity = log.identity()
        self.observed: dict[int, ObservedPartition] = {}
        self._log = log
        self._snapshots = snapshots
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._instance = new_instance_id(NAME)
        self._is_quiet = False
        self._is_go = False
        self._go_elsewhere: frozenset[str] = frozenset()
        self._native_elsewhere: frozenset[str] = frozenset()

    def look(self) -> Mapping[int, ObservedPartition]:
        """Read each incomplete coordination partition from its beginning to its present end.

        From now on any record but a Mark makes the recovery fail. Raises `TopicNotFoundError` if there is no topic for
        snapshots; `AuthorizationError`, `CoordinationLogChangedError`, `UnavailableError`, `RecoveryFailedError`.
        """
        world = World(self.identity.partitions)
        bounds = self._log.bounds(range(self.identity.partitions))
        cut = {number: at for number, at in bounds.items() if at.start > 0}
        known = self._newest(cut) if cut else {}
        cut = {number: at for number, at in cut.items() if number not in known}
        elsewhere = self._elsewhere(bounds.keys() - cut.keys()) if cut else {}
        self.observed = {
            number: ObservedPartition(world.start(number, at.start), by=self._instance) for number, at in cut.items()
        }
        self._is_quiet = False
        self._log.follow({number: at.start for number, at in cut.items()})
        self._read({number: at.end for number, at in cut.items()})
        self._is_quiet = True
        shown = _shown_by([observed.world for observed in self.observed.values()])
        for observed in self.observed.values():
            observed.elsewhere = _one_or_other(elsewhere, shown)
        return self.observed

    def go_groups(self, settings: Mapping[str, GroupSettings] | None = None) -> frozenset[str]:
        """Return the groups that Go consumers use, as far as the rest of the log shows.

        These are groups with the rule set `go` in their settings, either shown or given in `settings`. A group without
        settings counts if it has an offset and no data topic id.
        """
        named = settings or {}
        has_ids, has_offsets, accepted = set(self._native_elsewhere), set(self._go_elsewhere), dict(named)
        for observed in self.observed.values():
            for name, group in observed.groups.items():
                if group.settings_accepted:
                    accepted.setdefault(name, group.settings)
                has_ids |= {name for key in group.keys.values() if key.data_topic_id is not None}
                has_offsets |= {name for key in group.keys.values() if key.offset is not None}
        by_settings = {name for name, in_force in accepted.items() if in_force.rule_set is RuleSet.GO}
        return frozenset(by_settings | (has_offsets - has_ids - accepted.keys()))

    def recover(
        self,
        confirmed: Mapping[Whose, ConfirmedOffset],
        heartbeat_interval_ms: int | None = None,
        settings: Mapping[str, GroupSettings] | None = None,
    ) -> list[int]:
        """Append the Marks, wait between them, write the snapshots, and return the recovered coordination partitions.

        `confirmed` has the offset of each partition of each group. `heartbeat_interval_ms` is the longest interval that
        any member is configured with, if longer than those shown. `settings` has the settings of groups that have none
        in the rest of the log.

        Raises `RecoveryFailedError` if any record but a Mark arrived since `look`; then no snapshot was written. Raises
        `TimestampTypeError` if a Mark was stored with its sender's timestamp; `CoordinationLogChangedError`,
        `AuthorizationError`, `UnavailableError`.
        """
        if not self.observed:
            return []
        named = settings or {}
        self._is_go = bool(self.go_groups(named))
        shown_ms = max(observed.longest_interval_ms for observed in self.observed.values())
        named_ms = max((in_force.heartbeat_interval_ms for in_force in named.values()), default=0)
        silence_ms = 2 * max(shown_ms, named_ms, heartbeat_interval_ms or 0)
        self._check_last_read()
        first = self._mark()
        for _ in range(TRIES):
            self._clock.sleep_ms(silence_ms + _MORE_MS)
            last = self._mark()
            if all(last[number] - began_ms > silence_ms for number, began_ms in first.items()):
                break
        else:
            raise RecoveryFailedError(
                f"log time of coordination topic {self.identity.topic!r} does not advance with this machine's clock. "
                "Nothing was recovered; check the brokers' clocks"
            )
        self._require_same(self._log.identity())
        self._require_alone()
        self._require_quiet()
        for observed in self.observed.values():
            self._snapshots.write(_recovered(observed, confirmed, named), self.identity)
        self._require_written()
        return sorted(self.observed)

    def _newest(self, bounds: Mapping[int, OffsetBounds]) -> Mapping[int, PartitionWorld]:
        defaults = World(self.identity.partitions).defaults
        return newest_snapshots(
            self._log,
            bounds,
            self._timeout_s,
            lambda foreign: self._snapshots.newest(self.identity, bounds, defaults, foreign),
        )

    def _elsewhere(self, whole: Collection[int]) -> dict[str, Group]:
        """Return settings and pause of the groups in the complete coordination partitions."""
        reader = Rationalizer(self._log, timeout_s=self._timeout_s, clock=self._clock, snapshots=self._snapshots)
        self._require_same(reader.identity)
        world = reader.catch_up()
        certain = [partition for number, partition in world.partitions.items() if number in whole and partition.certain]
        groups = [(name, group) for partition in certain for name, group in partition.groups.items()]
        self._go_elsewhere = frozenset(name for name, group in groups if group.has_go_keys)
        self._native_elsewhere = frozenset(
            name for name, group in groups if any(key.data_topic_id is not None for key in group.keys.values())
        )
        return _shown_by(certain)

    def _require_same(self, now: LogIdentity) -> None:
        if now != self.identity:
            raise CoordinationLogChangedError(
                f"coordination topic {self.identity.topic!r} was deleted and re-created meanwhile. Nothing was "
                "recovered; run the command again"
            )

    def _require_alone(self) -> None:
        """Raise an error if another recovery was faster: members may have started with other offsets."""
        found = self._newest(self._log.bounds(self.observed.keys()))
        if found:
            raise RecoveryFailedError(
                f"coordination partitions {sorted(found)} of {self.identity.topic!r} have a snapshot since this was "
                "shown: another `recover` was faster. Nothing was recovered; run the command again"
            )

    def _check_last_read(self) -> None:
        """Continue to follow the log, and raise an error if it has lost records that were read."""
        seen = {number: observed.world for number, observed in self.observed.items()}
        if foreign_snapshots(self._log, self._log.bounds(seen.keys()), self._timeout_s, seen):
            raise CoordinationLogChangedError(
                f"coordination topic {self.identity.topic!r} lost records since this was shown: the log was truncated. "
                "Nothing was recovered; run the command again"
            )
        self._log.follow({number: world.next_offset for number, world in seen.items()})

    def _require_quiet(self) -> None:
        """Read to the end again, because a member may have started since the last Mark."""
        self._check_last_read()
        self._read({number: at.end for number, at in self._log.bounds(self.observed.keys()).items()})
        self._require_undisturbed()

    def _require_undisturbed(self) -> None:
        for observed in self.observed.values():
            if observed.disturbed_by is not None:
                raise RecoveryFailedError(
                    f"another process is writing to {self.identity.topic!r}: {observed.disturbed_by} arrived since "
                    "this was shown. Nothing was recovered; stop all members of all groups, then run `marshal-dagster "
                    "recover` again"
                )

    def _require_written(self) -> None:
        """Raise an error unless the log still contains the records that the new snapshots depend on."""
        found = self._newest(self._log.bounds(self.observed.keys()))
        unfit = sorted(self.observed.keys() - found.keys())
        if unfit:
            raise RecoveryFailedError(
                f"coordination partitions {unfit} of {self.identity.topic!r} lost records, or retention deleted more "
                "of them, while their snapshots were written, so the snapshots are not valid. Run the command again"
            )

    def _mark(self) -> dict[int, int]:
        """Append a Mark, or the release that replaces it, to each partition, read it back, and return its log time."""
        time_s = self._clock.wall_ms() // 1_000
        marks = {number: observed.sign(is_go=self._is_go, time_s=time_s) for number, observed in self.observed.items()}
        acks = self._log.append([Append(number, render(mark)) for number, mark in marks.items()])
        missing = [ack.error for ack in acks if ack.offset is None]
        if missing:
            raise UnavailableError(
                f"a Mark was not acknowledged: {missing[0]}. Coordination topic {self.identity.topic!r} was not "
                "recovered; run the command again when the broker answers"
            )
        ends: dict[int, int] = {}
        for (number, observed), (offset, _) in zip(self.observed.items(), acks, strict=True):
            if offset is not None:
                observed.awaited, observed.mark_ms, ends[number] = offset, None, offset + 1
        self._read(ends)
        self._require_undisturbed()
        found = {number: observed.mark_ms for number, observed in self.observed.items() if observed.mark_ms is not None}
        if len(found) < len(self.observed):
            raise CoordinationLogChangedError(
                f"a Mark that coordination topic {self.identity.topic!r} acknowledged is missing from it: the log was "
                "truncated. Nothing was recovered; run the command again"
            )
        return found

    def _read(self, ends: Mapping[int, int]) -> None:
        try:
            for chunk in self._log.read_until(ends, self._timeout_s):
                observed = self.observed[chunk.partition]
                for offset, timestamp_ms, value in chunk.records:
                    observed.take(offset, timestamp_ms, value, is_quiet=self._is_quiet)
                    if (reason := chunk.reasons.get(offset)) is not None:
                        observed.world.keep_pause_reason(value, reason)
                if observed.awaited in chunk.sender_timed:
                    raise sender_timed_error(self.identity.topic, (chunk.partition, observed.awaited or 0))
        except PositionLostError as lost:
            raise self._why_lost(lost.partition) from None

    def _why_lost(self, partition: int) -> MarshalError:
        if self._log.bounds([partition])[partition].start <= self.observed[partition].world.next_offset:
            return CoordinationLogChangedError(
                f"coordination partition {partition} of {self.identity.topic!r} ends before what was read of it: the "
                "log was truncated. Nothing was recovered; run the command again"
            )
        return RecoveryFailedError(
            f"retention deleted more of coordination partition {partition} of {self.identity.topic!r} meanwhile; set "
            "retention.ms and retention.bytes of the topic to -1, then run `marshal-dagster recover` again"
        )


def _recovered(
    observed: ObservedPartition, confirmed: Mapping[Whose, ConfirmedOffset], named: Mapping[str, GroupSettings]
) -> PartitionWorld:
    """Return the state as of the last Mark: pauses and settings as shown, offsets as confirmed, and no owners."""
    seen, at = observed.world, observed.awaited or 0
    world = PartitionWorld(seen.number, seen.coordination_partitions, seen.defaults, 0)
    world.resume_at(at + 1, observed.mark_ms)
    world.set_last_record(observed.mark)
    world.groups = {name: replace(group, keys=Keys()) for name, group in observed.groups.items() if name != NAME}
    for name, settings in named.items():
        group = world.groups.setdefault(name, Group(seen.defaults))
        if not group.settings_accepted:
            group.settings, group.settings_accepted = settings, settings != WITHOUT_SETTINGS
    world.had_ranges = any(RANGES in group.settings.features for group in world.groups.values())
    for (name, place), key in confirmed.items():
        if world.is_home_of(place[0]):
            group = world.groups.setdefault(name, Group(seen.defaults))
            group.keys[place] = Key(offset=key.offset, generation=at, data_topic_id=key.data_topic_id)
    return world


def _shown_by(worlds: Iterable[PartitionWorld]) -> dict[str, Group]:
    """Return settings and pause of each group; of several, those with the longest interval and the latest end."""
    found: dict[str, Group] = {}
    for name, group in (pair for world in worlds for pair in world.groups.items()):
        known = found.setdefault(name, Group(group.settings))
        if group.settings_accepted and (
            not known.settings_accepted or group.settings.heartbeat_interval_ms > known.settings.heartbeat_interval_ms
        ):
            known.settings, known.settings_accepted = group.settings, True
        if group.paused_until_s is not None and group.paused_until_s > (known.paused_until_s or -1):
            known.copy_pause(group)
    return found


def _one_or_other(first: Mapping[str, Group], second: Mapping[str, Group]) -> dict[str, Group]:
    """Return settings and pause of each group from `first` or, if missing there, from `second`."""
    found = {name: replace(group) for name, group in first.items()}
    for name, group in second.items():
        known = found.setdefault(name, group)
        if not known.settings_accepted:
            known.settings, known.settings_accepted = group.settings, group.settings_accepted
        if known.paused_until_s is None:
            known.copy_pause(group)
    return found
