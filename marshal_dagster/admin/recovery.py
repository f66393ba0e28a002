"""Makes a coordination log certain again that was cut without a snapshot (protocol.md, section 5, "Recover").

A person decides: what was cut may hold anything. All members of all groups have been stopped. What is known is looked
at, offsets are confirmed, then two Marks with more than 2 heartbeat intervals of log time between them show that nobody
is at work, and the first snapshot is written. Go consumers do not know a Mark: where they use the coordination topic a
release by an instance that owns nothing, for a key and at the offset shown, is written in its place.
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
from marshal_dagster.protocol.state import RANGES, DataPartitionId, Group, Key, OffsetBounds
from marshal_dagster.protocol.world import LastRecord, PartitionWorld, VerdictKind, World

NAME: Final = "recover"
"""The group and client that stand in the Marks; neither gets into any state."""
TRIES: Final = 5
_MORE_MS: Final = 100
"""How much longer than 2 intervals is waited: the broker's clock tells the time."""


class LastOffsets(NamedTuple):
    """The last offsets that a log without its beginning names for a key; either may have been refused."""

    heartbeat: int | None = None
    release: int | None = None


class ConfirmedOffset(NamedTuple):
    """What a person confirms for a key: the next offset to read, of the data topic with that id, if it is known."""

    offset: int
    data_topic_id: str | None


Whose = tuple[str, DataPartitionId]
"""A group and a partition of a data topic."""


@dataclass(slots=True)
class ObservedPartition:
    """One coordination partition that can only be observed, and what it says of each key."""

    world: PartitionWorld
    elsewhere: Mapping[str, Group] = field(default_factory=dict)
    """What the others have of each group's settings and pause: the certain ones, and behind them those observed too."""
    by: str = ""
    """Who recovers: the instance whose Marks are its own."""
    last_offsets: dict[Whose, LastOffsets] = field(default_factory=dict)
    disturbed_by: str | None = None
    """The first record since `look` that was no Mark, in words."""
    awaited: int | None = None
    """The log offset of the Mark, or of what stands for it, that was appended last,"""
    mark_ms: int | None = None
    """its log time, once it was read,"""
    mark: LastRecord | None = None
    """and what it is known by."""

    @property
    def longest_interval_ms(self) -> int:
        """The longest heartbeat interval of its groups that any record shows."""
        groups = [*self.world.groups.values(), *self.elsewhere.values()]
        shown = [group.settings.heartbeat_interval_ms for group in groups]
        return max(shown, default=self.world.defaults.heartbeat_interval_ms)

    @property
    def groups(self) -> dict[str, Group]:
        """Give what is known of each group; what is not known here, as it stands in the rest of the log.

        Settings and pauses are written to all coordination partitions. Settings that are seen here may have been
        refused: what can only be observed tells no difference.
        """
        names = dict.fromkeys((*self.world.groups, *self.elsewhere))
        return {name: self._group(name) for name in names}

    def _group(self, name: str) -> Group:
        here = self.world.groups.get(name) or Group(self.world.defaults)
        there = self.elsewhere.get(name) or Group(self.world.defaults)
        settled = there if there.settings_accepted else here
        paused = there if here.paused_until_s is None else here
        return Group(
            settled.settings, settled.settings_accepted, paused.paused_until_s, paused.paused_by, dict(here.keys)
        )

    def take(self, offset: int, timestamp_ms: int, value: bytes | None, *, is_quiet: bool) -> None:
        """Let one record act; when it `is_quiet`, anything but a Mark is noted as a disturbance."""
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
        """Say what is no Mark, or one of somebody who recovers at the same time and may confirm other offsets."""
        if isinstance(message, InvalidMessage):
            return "an invalid record"
        if message.instance == self.by:
            return None
        if not isinstance(message, Mark):
            return f"a {type_name(message)}"
        return "a Mark of another `recover`" if message.group == NAME else None

    def sign(self, *, is_go: bool, time_s: int) -> Message:
        """Make the record that only moves log time: a Mark, or a release that Go consumers know as well."""
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
    """Looks at what is left of a log, and writes the first snapshots of what can only be observed."""

    def __init__(
        self, log: CoordinationLog, snapshots: Snapshots, *, timeout_s: float = 10.0, clock: Clock | None = None
    ) -> None:
        """Say which log, and where its snapshots go. Raises `TopicNotFoundError`, `UnavailableError`."""
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
        """Read what is left of every coordination partition that can only be observed, to its present end.

        From now on nothing but Marks may come. Raises `TopicNotFoundError` where there is no topic for snapshots,
        `AuthorizationError`, `CoordinationLogChangedError`, `UnavailableError`, `RecoveryFailedError`.
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
        """Return the groups that Go consumers use, as far as what is left of the log tells.

        Those with the rule set `go` by their settings, shown or those that a person names in `settings`; where there
        are none, those with an offset and no data topic id.
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
        """Append the Marks, wait in between, and write the snapshots; give the coordination partitions.

        `heartbeat_interval_ms` is the longest that any member was configured with, where that is longer than what is
        shown; `settings` are those of groups of which none are left. Raises `RecoveryFailedError` when something else
        than Marks came since `look`: then nothing was written. Raises `TimestampTypeError` where a Mark was stored
        with its sender's timestamp; `CoordinationLogChangedError`, `AuthorizationError`, `UnavailableError`.
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
                "log time does not move on as this machine's clock does; check the brokers' clocks"
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
        """Read what the rest of the log has of the groups."""
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
            raise CoordinationLogChangedError(f"coordination topic {self.identity.topic!r} was made anew meanwhile")

    def _require_alone(self) -> None:
        """Make sure that nobody has recovered the same meanwhile: members may have begun with other offsets."""
        found = self._newest(self._log.bounds(self.observed.keys()))
        if found:
            raise RecoveryFailedError(
                f"coordination partitions {sorted(found)} have a snapshot since this was shown: another `recover` was "
                "faster. Nothing was written; look again"
            )

    def _check_last_read(self) -> None:
        """Follow the log where it was read to, and make sure that it has not lost what was read."""
        seen = {number: each.world for number, each in self.observed.items()}
        if foreign_snapshots(self._log, self._log.bounds(seen.keys()), self._timeout_s, seen):
            raise CoordinationLogChangedError(
                f"coordination topic {self.identity.topic!r} lost records since this was shown: the log was truncated. "
                "Nothing was written; look again"
            )
        self._log.follow({number: world.next_offset for number, world in seen.items()})

    def _require_quiet(self) -> None:
        """Read on once more: somebody may have begun to work since the last Mark."""
        self._check_last_read()
        self._read({number: at.end for number, at in self._log.bounds(self.observed.keys()).items()})
        self._require_undisturbed()

    def _require_undisturbed(self) -> None:
        for observed in self.observed.values():
            if observed.disturbed_by is not None:
                raise RecoveryFailedError(
                    f"somebody is at work: {observed.disturbed_by} came since this was shown. Nothing was written; "
                    "stop all members of all groups, then recover again"
                )

    def _require_written(self) -> None:
        """Make sure that the log still begins before what was written, and holds what that was read from."""
        found = self._newest(self._log.bounds(self.observed.keys()))
        unfit = sorted(self.observed.keys() - found.keys())
        if unfit:
            raise RecoveryFailedError(
                f"coordination partitions {unfit} lost records, or retention deleted more of them, while their "
                "snapshots were written: these do not fit. Look again"
            )

    def _mark(self) -> dict[int, int]:
        """Append a Mark, or what stands for it, everywhere and read it back; give its log time."""
        time_s = self._clock.wall_ms() // 1_000
        marks = {number: each.sign(is_go=self._is_go, time_s=time_s) for number, each in self.observed.items()}
        acks = self._log.append([Append(number, render(mark)) for number, mark in marks.items()])
        missing = [ack.error for ack in acks if ack.offset is None]
        if missing:
            raise UnavailableError(f"a Mark was not acknowledged: {missing[0]}")
        ends: dict[int, int] = {}
        for (number, each), (offset, _) in zip(self.observed.items(), acks, strict=True):
            if offset is not None:
                each.awaited, each.mark_ms, ends[number] = offset, None, offset + 1
        self._read(ends)
        self._require_undisturbed()
        found = {number: each.mark_ms for number, each in self.observed.items() if each.mark_ms is not None}
        if len(found) < len(self.observed):
            raise CoordinationLogChangedError(
                f"a Mark that {self.identity.topic!r} acknowledged is not in it: the log was truncated"
            )
        return found

    def _read(self, ends: Mapping[int, int]) -> None:
        try:
            for chunk in self._log.read_until(ends, self._timeout_s):
                observed = self.observed[chunk.partition]
                for offset, timestamp_ms, value in chunk.records:
                    observed.take(offset, timestamp_ms, value, is_quiet=self._is_quiet)
                if observed.awaited in chunk.sender_timed:
                    raise sender_timed_error(self.identity.topic, (chunk.partition, observed.awaited or 0))
        except PositionLostError as lost:
            raise self._why_lost(lost.partition) from None

    def _why_lost(self, partition: int) -> MarshalError:
        if self._log.bounds([partition])[partition].start <= self.observed[partition].world.next_offset:
            return CoordinationLogChangedError(
                f"coordination partition {partition} of {self.identity.topic!r} ends before what was read of it: the "
                "log was truncated. Nothing was written; look again"
            )
        return RecoveryFailedError(
            f"retention deleted more of coordination partition {partition} meanwhile; set retention.ms and "
            "retention.bytes to -1, then recover again"
        )


def _recovered(
    observed: ObservedPartition, confirmed: Mapping[Whose, ConfirmedOffset], named: Mapping[str, GroupSettings]
) -> PartitionWorld:
    """Give the state as of the last Mark: pauses and settings as shown, offsets as confirmed, nobody owns anything."""
    seen, at = observed.world, observed.awaited or 0
    world = PartitionWorld(seen.number, seen.coordination_partitions, seen.defaults, 0)
    world.resume_at(at + 1, observed.mark_ms)
    world.set_last_record(observed.mark)
    world.groups = {name: replace(group, keys={}) for name, group in observed.groups.items() if name != NAME}
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
    """Give settings and pause of each group, of several the longest interval and the longest pause."""
    found: dict[str, Group] = {}
    for name, group in (pair for world in worlds for pair in world.groups.items()):
        known = found.setdefault(name, Group(group.settings))
        if group.settings_accepted and (
            not known.settings_accepted or group.settings.heartbeat_interval_ms > known.settings.heartbeat_interval_ms
        ):
            known.settings, known.settings_accepted = group.settings, True
        if group.paused_until_s is not None and group.paused_until_s > (known.paused_until_s or -1):
            known.paused_until_s, known.paused_by = group.paused_until_s, group.paused_by
    return found


def _one_or_other(first: Mapping[str, Group], second: Mapping[str, Group]) -> dict[str, Group]:
    """Give settings and pause of each group as `first` has them, or else as `second` does."""
    found = {name: replace(group) for name, group in first.items()}
    for name, group in second.items():
        known = found.setdefault(name, group)
        if not known.settings_accepted:
            known.settings, known.settings_accepted = group.settings, group.settings_accepted
        if known.paused_until_s is None:
            known.paused_until_s, known.paused_by = group.paused_until_s, group.paused_by
    return found
