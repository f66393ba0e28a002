"""Change of a group's positions: the present ones, the requested ones, and the steps between them.

The commands `position reset`, `position import`, `retry` and `reprocess`, and Dagster's jobs for the same, use it.
"""

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
from marshal_dagster.protocol.unread_records import is_of_topic

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.sinks.sink import Sink


@dataclass(frozen=True, slots=True)
class PositionChange:
    """One partition's position before and after the change."""

    partition: int
    key: Key
    """The state of the partition before the change."""
    extent: OffsetBounds
    """The offsets that can be read."""
    offset: int
    """The position after the change."""
    is_other: bool = False
    """Whether the position before belongs to a deleted topic of the same name."""
    ahead: Ranges = ()
    """The ranges after the present offset that are planned or done."""
    outside: str = ""
    """How `offset` is outside of the topic; empty if it is not."""
    is_too_young: bool = False
    """Whether no record has the requested time or a later one."""

    @property
    def owners(self) -> Sequence[Owner]:
        """The owners of the partition, or of ranges of it."""
        return self.key.owners

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the operator to read before confirming."""
        notes = [self.outside] if self.outside else []
        if self.is_too_young:
            notes.append("no record is that recent")
        if self.is_other:
            notes.append("the topic was deleted and re-created")
        if self.key.plan_end is not None:
            notes.append(f"the plan up to {self.key.plan_end} ends")
        notes += [f"[{range_.start}, {range_.end}) {range_.phase}: processed again, or never" for range_ in self.ahead]
        return [*notes, *(f"held by {owner.instance}" for owner in self.owners)]


@dataclass(slots=True)
class PositionResetter(LogUser):
    """Sets positions of one group in one data topic.

    Call `look`, show the operator its result, then call `carry_out`. After that `done` returns which positions were
    set.
    """

    topics: "Topics"
    group: str
    topic: str
    client: str
    """A name for the operator in the records, for people who read the log."""
    clock: Clock = field(default_factory=SystemClock)
    settings: GroupSettings | None = None
    """The settings that the group's members are configured with, if known."""
    go_consumers_stopped: bool = False
    """Whether the operator confirms that all consumers of the group are stopped, Go's and those of this library."""
    sink: "Sink | None" = None
    """The group's sink, if known; it reports whether it can replace its output."""
    _topic_id: str = field(default="", init=False)
    _hidden: Mapping[int, int] = field(default_factory=dict, init=False)
    """By partition, the offset that the last search by time found only because its timestamp is in the future."""

    def look(
        self,
        target: Target,
        partitions: Sequence[range] | None = None,
        *,
        allow_out_of_range: bool = False,
        new_group: bool = False,
        is_set_later: bool = True,
    ) -> Sequence[PositionChange]:
        """Return the position changes, sorted by partition; nothing is written.

        `new_group` allows a group that has no record in the log. `is_set_later` is false if nothing is set after this
        call.

        Raises `GoGroupError` if the operator must confirm something first (see `way`) and `is_set_later`;
        `ConfigurationError` for an unknown group, a target that means no offset, or offsets outside of the topic unless
        `allow_out_of_range`; `IncompleteLogError`, `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        described = self.topics.describe(self.topic)
        self._topic_id = described.topic_id
        numbers = choose_partitions(self.topic, target, partitions, described.partitions)
        world = self.reader.follow_all()
        require_certain(world, self.topic)
        if not new_group:
            advice = "To set its positions before its first claim, give --new-group"
            require_known(world, self.group, advice if is_set_later else "There is nothing to process again")
        if is_set_later:
            self.way()
        keys = self._keys(numbers)
        ahead = GroupAdmin(self.reader, self.group, self.client, clock=self.clock).ahead(self.topic)
        extents = self.topics.offsets(self.topic, numbers)
        at_time = self.topics.offsets_at(self.topic, numbers, target.at_ms) if isinstance(target, ToDatetime) else {}
        self._hidden = hidden_by_future(self.topics, self.topic, at_time)
        is_go = world.group_of(self.group, self.topic).is_go
        others = {n for n, key in keys.items() if not is_of_topic(key, described.topic_id, is_go=is_go)}
        positions = {n: PartitionPosition(keys[n].offset, extents[n], n in others, at_time.get(n)) for n in numbers}
        wanted = resolve(self.topic, target, positions)
        held = self._with_open_transactions(wanted, extents)
        outside = {n: text for n in numbers if (text := outside_text(wanted[n], held[n]))}
        if outside and not allow_out_of_range:
            named = "; ".join(f"{self.topic}/{n}: offset {wanted[n]}: {text}" for n, text in outside.items())
            raise ConfigurationError(
                f"offsets outside of the topic: {named}. Give others, or allow these with --allow-out-of-range "
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
        """Return warnings to show to the operator before these positions are set."""
        settings = self.settings_in_force()
        warnings = [
            f"{self.topic}/{partition}: the first record with that time or later, offset {offset}, has a timestamp in "
            "the future (its producer's clock or unit of time was wrong), so older records may follow it. Check that "
            "record, or give an offset instead of a time"
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
                f"group {self.group!r} delivers effectively once: its sink must replace its output for offsets that "
                "are read again; a sink that cannot rejects them. To check this, name the sink as module:name (--sink, "
                "or sink in a run config)"
            )
        return warnings

    def _refusals(self, sink: "Sink", changes: Sequence[PositionChange]) -> list[str]:
        """Return a warning if the sink could not replace its output from the new positions on."""
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
            return [f"the sink failed to report whether it can replace its output: {error}"]
        return [] if reason is None else [f"the sink would reject the records that are read again: {reason}"]

    def carry_out(
        self, moves: Sequence[PositionChange], *, wait_s: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> str | None:
        """Set the positions while the group is paused, then commit them to Kafka's own group offsets.

        Owners have `wait_s` to release their claims; claims of owners that `is_dead` reports as dead are revoked. In a
        Go group the positions are set as by `GroupAdmin.set_go_positions`. Returns why the offsets could not be
        committed to Kafka, or None; only lag tools read these.

        Raises what `GroupAdmin.set_positions` raises; `DataTopicChangedError` if the topic was deleted and re-created
        since `look`; in a Go group `PositionNotSetError` if the offsets could not be committed to Kafka.
        """
        self._check_topic("nothing was set. Run the command again")
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
            self._set(offsets, shorter_ms, wait_s * 1_000, is_dead)  # the group's first member has started meanwhile
        self._check_topic("the positions were set in the deleted one. Set them again")
        return self._commit_to_kafka(offsets.keys())

    def done(self, moves: Sequence[PositionChange]) -> Mapping[int, int]:
        """Return the partitions whose position was set since `look`, with their generations, by the log.

        Setting a position starts a new generation, except in a Go group, where only the offset shows it. Raises
        `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
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
        """Return how positions of this group are set, by the log as read last.

        Raises `GoGroupError` if the operator must confirm something first.
        """
        with self.reader.lock:
            return way_to_set(
                self.reader.world, self.group, self.topic, settings=self.settings, stopped=self.go_consumers_stopped
            )

    def positions(self, partitions: Collection[int]) -> Mapping[int, int]:
        """Read to the end of the log and return the offsets of those `partitions` that have a position.

        Raises what `keys` raises.
        """
        return {number: key.offset for number, key in self.keys(partitions).items() if key.offset is not None}

    def keys(self, partitions: Collection[int]) -> Mapping[int, Key]:
        """Read to the end of the log and return the state of `partitions`.

        Raises `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        require_certain(self.reader.follow_all(), self.topic)
        return self._keys(partitions)

    def settings_in_force(self) -> GroupSettings:
        """Return the group's settings by the log as read last."""
        reader = self.reader
        with reader.lock:
            return reader.world.group_of(self.group, self.topic).settings

    def _interval_ms(self) -> int:
        self.reader.follow_all()
        return self.settings_in_force().heartbeat_interval_ms

    @contextmanager
    def _admin(self, interval_ms: int) -> Iterator[GroupAdmin]:
        """Open the log with the write timeouts of a member with that heartbeat interval."""
        with closing(self.open_log(interval_ms)) as rationalizer:
            yield GroupAdmin(rationalizer, self.group, self.client, clock=self.clock)

    def _set_go(self, offsets: Mapping[int, int], wait_ms: float) -> None:
        with self._admin(GO_HEARTBEAT_INTERVAL_MS) as admin:
            admin.set_go_positions(self.topic, offsets, wait_ms=wait_ms)
        self._check_topic("the positions were set in the deleted one. Set them again")
        problem = self.topics.commit_group_offsets(self.group, self.topic, offsets)
        if problem is None:
            there = self.topics.group_offsets(self.group, self.topic)
            wrong = sorted(number for number, offset in offsets.items() if there.get(number) != offset)
            problem = f"partitions {wrong} have other offsets when read back" if wrong else None
        if problem is not None:
            raise PositionNotSetError(
                f"the positions of group {self.group!r} in {self.topic!r} were set in the coordination log, but not in "
                f"Kafka's own group offsets, from which a Go consumer may start: {problem}. Set them again before a "
                "consumer of the group starts"
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
        """Return the bounds; for wanted offsets after the end, include open transactions, which cannot be read yet."""
        beyond = [number for number, offset in wanted.items() if offset > extents[number].end]
        return {**extents, **self.topics.offsets(self.topic, beyond, committed_only=False)}

    def _check_topic(self, otherwise: str) -> None:
        topic_id = self.topics.describe(self.topic).topic_id
        if topic_id != self._topic_id:
            raise DataTopicChangedError(
                f"topic {self.topic!r} was deleted and re-created meanwhile (id {topic_id} instead of "
                f"{self._topic_id}): {otherwise}"
            )

    def _commit_to_kafka(self, numbers: Collection[int]) -> str | None:
        """Commit the present positions to Kafka for lag tools; return why that failed, or None."""
        try:
            offsets = self.positions(numbers)
        except MarshalError as error:
            return str(error)
        return self.topics.commit_group_offsets(self.group, self.topic, offsets)


def _is_set(move: PositionChange, now: Key) -> bool:
    """Return whether the position was set since `move`: members never change the generation."""
    return now.generation != move.key.generation and now.offset is not None and now.offset >= move.offset
