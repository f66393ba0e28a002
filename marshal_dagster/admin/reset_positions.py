"""A group's positions: where they stand, where a person wants them, and how they get there."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from marshal_dagster.admin.go_groups import Way, way_to_set
from marshal_dagster.admin.log_access import LogUser, require_certain
from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.admin.pause import require_known
from marshal_dagster.admin.position_spec import (
    PartitionPosition,
    Target,
    ToDatetime,
    choose_partitions,
    outside_text,
    resolve,
)
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.errors import ConfigurationError, DataTopicChangedError, MarshalError, PositionNotSetError
from marshal_dagster.kafka.record_times import hidden_by_future
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import GO_HEARTBEAT_INTERVAL_MS, DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import Key, OffsetBounds, Owner, Ranges

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.sinks.sink import Sink


@dataclass(frozen=True, slots=True)
class PositionChange:
    """One partition's position before and after.

    `key` is its state before, `extent` what can be read of it, `ahead` what is planned or done ahead of the offset;
    `is_other` tells that the position before is of a topic of that name that is no more. `outside` says how the new
    offset lies outside what is there, and is empty where it does not. `is_too_young`: no record has the time asked for.
    """

    partition: int
    key: Key
    extent: OffsetBounds
    offset: int
    is_other: bool = False
    ahead: Ranges = ()
    outside: str = ""
    is_too_young: bool = False

    @property
    def owners(self) -> Sequence[Owner]:
        """Who holds the partition, or ranges of it."""
        return self.key.owners

    @property
    def notes(self) -> Sequence[str]:
        """What a person should think of before, in words."""
        notes = [self.outside] if self.outside else []
        if self.is_too_young:
            notes.append("no record is that young")
        if self.is_other:
            notes.append("the topic was made anew")
        if self.key.plan_end is not None:
            notes.append(f"the plan up to {self.key.plan_end} ends")
        notes += [f"[{range_.start}, {range_.end}) {range_.phase}: done again, or never" for range_ in self.ahead]
        return [*notes, *(f"held by {owner.instance}" for owner in self.owners)]


@dataclass(slots=True)
class PositionResetter(LogUser):
    """Sets positions of one group in one data topic; `client` is for people to see.

    `look` first, show a person what it gives, then `carry_out`; `done` tells at any time afterwards what was set.
    `settings` are those that the group's members are configured with, where that is known. `go_consumers_stopped`: a
    person says that all consumers of the group are stopped, Go's and those of this library. `sink` is the group's
    output, where that is known: it is asked whether it can replace what it holds.
    """

    topics: "Topics"
    group: str
    topic: str
    client: str
    clock: Clock = field(default_factory=SystemClock)
    settings: GroupSettings | None = None
    go_consumers_stopped: bool = False
    sink: "Sink | None" = None
    _topic_id: str = field(default="", init=False)
    _hidden: Mapping[int, int] = field(default_factory=dict, init=False)
    """By partition, the record that the last look-up by time found only because its time is in the future."""

    def look(
        self,
        target: Target,
        partitions: Sequence[range] | None = None,
        *,
        allow_out_of_range: bool = False,
        new_group: bool = False,
        is_set_later: bool = True,
    ) -> Sequence[PositionChange]:
        """Give what is to be, by partition, in their order. Nothing is written.

        Raises `GoGroupError` where a person must say first how (see `way`), unless it is not to be set at all after
        this look; `ConfigurationError` for a group that the log does not name unless it may be a `new_group`, for what
        `target` cannot mean, and for offsets outside what the topic holds unless these may lie `allow_out_of_range`;
        `IncompleteLogError`, `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        described = self.topics.describe(self.topic)
        self._topic_id = described.topic_id
        numbers = choose_partitions(self.topic, target, partitions, described.partitions)
        world = self.reader.follow_all()
        if not new_group:
            require_known(world, self.group, "If its positions are to be set before its first claim give --new-group")
        require_certain(world, self.topic)
        if is_set_later:
            self.way()
        keys = self._keys(numbers)
        ahead = GroupAdmin(self.reader, self.group, self.client, clock=self.clock).ahead(self.topic)
        extents = self.topics.offsets(self.topic, numbers)
        at_time = self.topics.offsets_at(self.topic, numbers, target.at_ms) if isinstance(target, ToDatetime) else {}
        self._hidden = hidden_by_future(self.topics, self.topic, at_time)
        others = {n for n, key in keys.items() if key.data_topic_id not in {None, described.topic_id}}
        positions = {n: PartitionPosition(keys[n].offset, extents[n], n in others, at_time.get(n)) for n in numbers}
        wanted = resolve(self.topic, target, positions)
        held = self._with_open_transactions(wanted, extents)
        outside = {n: text for n in numbers if (text := outside_text(wanted[n], held[n]))}
        if outside and not allow_out_of_range:
            named = "; ".join(f"{self.topic}/{n}: offset {wanted[n]}: {text}" for n, text in outside.items())
            raise ConfigurationError(
                f"outside what the topic holds: {named}. Name others, or allow these with --allow-out-of-range "
                "(allow_out_of_range in a run config)"
            )
        return [
            PositionChange(
                partition=n,
                key=keys[n],
                extent=extents[n],
                offset=wanted[n],
                is_other=n in others,
                ahead=ahead.get(n, ()),
                outside=outside.get(n, ""),
                is_too_young=isinstance(target, ToDatetime) and n not in at_time,
            )
            for n in numbers
        ]

    def warnings(self, changes: Sequence[PositionChange]) -> Sequence[str]:
        """Say what a person should know of the group before these positions are set."""
        settings = self.settings_in_force()
        warnings = [
            f"{self.topic}/{partition}: the first record of that time or later, offset {offset}, has a time in the "
            "future (its sender's clock or unit of time was wrong), so older records may follow it. Check that record, "
            "or give an offset instead of a time"
            for partition, offset in self._hidden.items()
        ]
        if self.go_consumers_stopped and settings.rule_set is RuleSet.GO:
            warnings.append(
                f"Go consumers share group {self.group!r}: the next heartbeat of one that is not stopped moves the "
                "position again"
            )
        if self.sink is not None:
            warnings += self._refusals(self.sink, changes)
        elif settings.delivery is DeliveryMode.EFFECTIVELY_ONCE:
            warnings.append(
                f"group {self.group!r} delivers effectively once: at the offsets read again its output must replace "
                "what it holds; one that cannot refuses. It could not be asked: name it as module:name (--sink, or "
                "sink in a run config)"
            )
        return warnings

    def _refusals(self, sink: "Sink", changes: Sequence[PositionChange]) -> list[str]:
        """Ask the sink whether it could replace what it holds from the new positions on."""
        ranges = [
            ClaimedRange(
                coordination_topic_id="",
                group=self.group,
                topic=self.topic,
                data_topic_id=self._topic_id,
                partition=change.partition,
                generation=change.key.generation + 1,
                epoch=0,
                start=change.offset,
                end=change.extent.end,
                first_readable=max(change.offset, change.extent.start),
            )
            for change in changes
            if max(change.offset, change.extent.start) < change.extent.end
        ]
        try:
            reason = sink.can_replace(ranges) if ranges else None
        except Exception as error:  # noqa: BLE001 - a sink's, which may be a user's own
            return [f"the sink could not be asked whether it can replace what it holds: {error}"]
        return [] if reason is None else [f"the sink would refuse what is read again: {reason}"]

    def carry_out(
        self, moves: Sequence[PositionChange], *, wait_s: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> str | None:
        """Set the positions, pausing the group meanwhile; then tell Kafka's own group offsets, and give why not.

        Owners have `wait_s` to leave; what `is_dead` knows to be dead is revoked. Raises as `GroupAdmin.set_positions`,
        and `DataTopicChangedError` for a topic that was made anew since `look`. In a Go group it is done as
        `GroupAdmin.set_go_positions` does, and `PositionNotSetError` is raised where Kafka's own group offsets did not
        follow.
        """
        self._check_topic("nothing was set")
        self.reader.follow_all()
        way, offsets = self.way(), {move.partition: move.offset for move in moves}
        if way is Way.GO:
            self._set_go(offsets, wait_s * 1_000)
            return None
        if way is Way.SETTINGS_FIRST and self.settings is not None:
            with self._admin(self.settings.heartbeat_interval_ms) as admin:
                admin.give_first_settings(self.settings)
        interval_ms = self._interval_ms()
        try:
            self._set(offsets, interval_ms, wait_s * 1_000, is_dead)
        except ConfigurationError:
            shorter_ms = self._interval_ms()
            if shorter_ms >= interval_ms:
                raise
            self._set(offsets, shorter_ms, wait_s * 1_000, is_dead)  # the group's first member came meanwhile
        self._check_topic("positions were set in one that is no more: set them again")
        return self._commit_to_kafka(offsets.keys())

    def done(self, moves: Sequence[PositionChange]) -> Mapping[int, int]:
        """Give the partitions of which the log shows that a position was set since, each with its generation.

        That is a new one, but in a Go group, where only the offset shows it. Raises `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        now = self.keys([move.partition for move in moves])
        is_go = self.settings_in_force().rule_set is RuleSet.GO
        return {
            change.partition: key.generation
            for change in moves
            if _is_set(change, key := now[change.partition])
            or (is_go and key.offset == change.offset and key.owner is None)
        }

    def way(self) -> Way:
        """Return how positions are set here, by the log as read last. Raises `GoGroupError` where a person must say."""
        with self.reader.lock:
            return way_to_set(
                self.reader.world, self.group, self.topic, settings=self.settings, stopped=self.go_consumers_stopped
            )

    def positions(self, partitions: Collection[int]) -> Mapping[int, int]:
        """Read on, and give those of `partitions` that have a position.

        Raises `UnavailableError`, `CoordinationLogChangedError`.
        """
        return {number: key.offset for number, key in self.keys(partitions).items() if key.offset is not None}

    def keys(self, partitions: Collection[int]) -> Mapping[int, Key]:
        """Read on, and give the state of `partitions`.

        Raises `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        require_certain(self.reader.follow_all(), self.topic)
        return self._keys(partitions)

    def settings_in_force(self) -> GroupSettings:
        """Return the group's settings as the last reading has them."""
        reader = self.reader
        with reader.lock:
            return reader.world.group_of(self.group, self.topic).settings

    def _interval_ms(self) -> int:
        self.reader.follow_all()
        return self.settings_in_force().heartbeat_interval_ms

    @contextmanager
    def _admin(self, interval_ms: int) -> Iterator[GroupAdmin]:
        """Open the log as members of that heartbeat interval write it."""
        with closing(self.open_log(interval_ms)) as rationalizer:
            yield GroupAdmin(rationalizer, self.group, self.client, clock=self.clock)

    def _set_go(self, offsets: Mapping[int, int], wait_ms: float) -> None:
        with self._admin(GO_HEARTBEAT_INTERVAL_MS) as admin:
            admin.set_go_positions(self.topic, offsets, wait_ms=wait_ms)
        self._check_topic("positions were set in one that is no more: set them again")
        problem = self.topics.commit_group_offsets(self.group, self.topic, offsets)
        if problem is None:
            there = self.topics.group_offsets(self.group, self.topic)
            wrong = sorted(number for number, offset in offsets.items() if there.get(number) != offset)
            problem = f"partitions {wrong} have others when read back" if wrong else None
        if problem is not None:
            raise PositionNotSetError(
                f"the positions of group {self.group!r} in {self.topic!r} were set in the coordination log, but not in "
                f"Kafka's own group offsets, where a Go consumer starts that finds offset 0: {problem}. Set them again "
                "before a consumer of the group starts"
            )

    def _set(
        self, offsets: Mapping[int, int], interval_ms: int, wait_ms: float, is_dead: Callable[[Owner], bool]
    ) -> None:
        with self._admin(interval_ms) as admin:
            admin.set_positions(self.topic, offsets, self._topic_id, wait_ms=wait_ms, is_dead=is_dead)

    def _keys(self, numbers: Collection[int]) -> dict[int, Key]:
        reader = self.reader
        with reader.lock:
            return {number: reader.world.snapshot_key(self.group, self.topic, number) for number in numbers}

    def _with_open_transactions(
        self, wanted: Mapping[int, int], extents: Mapping[int, OffsetBounds]
    ) -> Mapping[int, OffsetBounds]:
        """Give what there is, also behind open transactions where that matters: nothing can be read there yet."""
        beyond = [number for number, offset in wanted.items() if offset > extents[number].end]
        return {**extents, **self.topics.offsets(self.topic, beyond, committed_only=False)}

    def _check_topic(self, otherwise: str) -> None:
        topic_id = self.topics.describe(self.topic).topic_id
        if topic_id != self._topic_id:
            raise DataTopicChangedError(
                f"topic {self.topic!r} was made anew meanwhile (id {topic_id} instead of {self._topic_id}): {otherwise}"
            )

    def _commit_to_kafka(self, numbers: Collection[int]) -> str | None:
        """Let lag tools see where the partitions stand by now; best effort."""
        try:
            offsets = self.positions(numbers)
        except MarshalError as error:
            return str(error)
        return self.topics.commit_group_offsets(self.group, self.topic, offsets)


def _is_set(move: PositionChange, now: Key) -> bool:
    """Tell by the state `now` whether a position was set: members only move it on, in the same generation."""
    return now.generation != move.key.generation and now.offset is not None and now.offset >= move.offset
