"""The lag of a group in a topic: its positions in the world state, compared with the topic's offsets in Kafka.

The lag sensor uses it. Nothing here claims or writes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from marshal_dagster.kafka.record_times import hidden_by_future
from marshal_dagster.protocol.state import Key, Phase, Range, Ranges
from marshal_dagster.protocol.unread_records import unread_after
from marshal_dagster.protocol.world import World
from marshal_dagster.runs.names import run_of

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.protocol.state import OffsetBounds


@dataclass(frozen=True, slots=True)
class Position:
    """The position of the group in one partition, and why runs may not be able to process the partition."""

    offset: int | None
    generation: int
    passed_over: Ranges
    """Ranges after the offset that no run claims, because they are done or their plan is exhausted."""
    data_topic_id: str | None
    is_claimed: bool
    is_given_up: bool


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """A copy of a group's positions in a topic, used after the lock on the world state is released."""

    by_partition: Mapping[int, Position]
    working: Collection[str]
    """The ids of the runs that hold a live claim."""


@dataclass(frozen=True, slots=True)
class UnreadRecords:
    """The unread part of one partition: the number of `records` (offsets), the first at `start`."""

    partition: int
    start: int
    records: int
    position: Position


@dataclass(frozen=True, slots=True)
class TopicLag:
    """The lag of a topic. `unread`, `old` and `hidden` leave out exhausted plans, which need an operator."""

    records: int
    """The number of all unread records (offsets), including those of exhausted plans."""
    unread: Sequence[UnreadRecords]
    old: Collection[int]
    """The partitions whose oldest unread record is older than the limit, or counts as old; empty without a limit."""
    hidden: Mapping[int, int]
    """The partitions whose age is unknown, each with the offset of a record whose time is in the future."""
    given_up: Sequence[int]
    """The partitions with an exhausted plan."""
    is_recreated: Sequence[int]
    """The partitions whose offset belongs to an earlier topic of that name, or is greater than the end.

    See protocol.md, section 6.
    """

    @property
    def due(self) -> list[UnreadRecords]:
        """The unread parts that a run can claim now, because no member holds them."""
        return [unread for unread in self.unread if not unread.position.is_claimed]


def positions_of(world: World, group: str, topic: str, *, max_attempts: int, wall_ms: int) -> GroupPositions:
    """Copy the positions of `group`; a live owner is decided as in `abandoned_partitions`."""
    state = world.group_of(group, topic)
    now_ms = world.advice_time_ms(group, topic, wall_ms)
    interval_ms = state.settings.heartbeat_interval_ms
    found: dict[int, Position] = {}
    working: set[str] = set()
    for (of_topic, partition), key in state.keys.items():
        if of_topic != topic:
            continue
        owners = [key.owner] if state.is_live(key, now_ms) else []
        owners += [range_.owner for range_ in key.ranges if range_.is_live(now_ms, interval_ms)]
        working |= {run_of(owner.instance) for owner in owners if owner is not None}
        # Go consumers do not record the id of the data topic.
        known = replace(key, data_topic_id=None) if state.is_go else key
        found[partition] = _position(known, is_claimed=bool(owners), max_attempts=max_attempts)
    return GroupPositions(found, working)


def read_lag(topics: "Topics", topic: str, positions: GroupPositions, older_than_ms: int | None) -> TopicLag:
    """Read the topic's offsets from the broker; return the lag, and the partitions with unread records of that age.

    The limit `older_than_ms` is a time in unix ms. The function needs DESCRIBE on the topic, reads no record and joins
    no consumer group. It looks up the first offset with that time or later. If this offset is above the first unread
    one, an older record is unread. A record with a time in the future makes that look-up useless: the unread records
    then count as old, because otherwise no run would be requested for them. Raises the errors of `Topics`.
    """
    described = topics.describe(topic)
    bounds = topics.offsets(topic, described.partitions)
    records = 0
    unread, given_up, is_recreated = [], [], []
    for partition, at in sorted(bounds.items()):
        position = positions.by_partition.get(partition, _FROM_START)
        if position.data_topic_id not in {None, described.topic_id} or (position.offset or 0) > at.end:
            is_recreated.append(partition)
        elif found := _unread(partition, position, at):
            records += found.records
            if position.is_given_up:
                given_up.append(partition)
            else:
                unread.append(found)
    old: set[int] = set()
    hidden: dict[int, int] = {}
    if older_than_ms is not None:
        young = topics.offsets_at(topic, [left.partition for left in unread], older_than_ms)
        numbered = {left.partition: left.start for left in unread}
        old = {number for number, start in numbered.items() if number not in young or start < young[number]}
        seen_young = {number: young[number] for number in numbered if number not in old}
        hidden = hidden_by_future(topics, topic, seen_young)
    return TopicLag(records, unread, old | hidden.keys(), hidden, given_up, is_recreated)


def _position(key: Key, *, is_claimed: bool, max_attempts: int) -> Position:
    def is_passed_over(range_: Range) -> bool:
        return range_.phase is Phase.DONE or (range_.phase is Phase.PLANNED and range_.attempts >= max_attempts)

    return Position(
        offset=key.offset,
        generation=key.generation,
        passed_over=tuple(filter(is_passed_over, key.ranges)),
        data_topic_id=key.data_topic_id,
        is_claimed=is_claimed,
        is_given_up=key.plan_end is not None and key.plan_attempts >= max_attempts,
    )


_FROM_START: Final = _position(Key(), is_claimed=False, max_attempts=1)
"""The position of a partition that no record names yet: no member holds it, and it is read from its start."""


def _unread(partition: int, position: Position, at: "OffsetBounds") -> UnreadRecords | None:
    left = unread_after(position.offset or 0, position.passed_over, at)
    return UnreadRecords(partition, left.first, left.records, position) if left.records > 0 else None
