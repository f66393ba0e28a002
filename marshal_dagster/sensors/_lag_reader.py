"""What a group has not read of a topic: the positions of the world state beside the topic's own offsets."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from marshal_dagster.kafka.record_times import hidden_by_future
from marshal_dagster.protocol.state import Key, Phase, Range, Ranges
from marshal_dagster.protocol.world import World
from marshal_dagster.runs.names import run_of

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.protocol.state import OffsetBounds


@dataclass(frozen=True, slots=True)
class Position:
    """Where the group is in one partition, and what keeps a run from it."""

    offset: int | None
    generation: int
    passed_over: Ranges
    """Ranges beyond the offset that no run takes: done, or planned and tried too often."""
    data_topic_id: str | None
    is_claimed: bool
    is_given_up: bool


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """A group's positions in a topic at one moment, kept beyond the world state's lock."""

    by_partition: Mapping[int, Position]
    working: Collection[str]
    """The runs that hold a live claim."""


@dataclass(frozen=True, slots=True)
class UnreadRecords:
    """What is unread of one partition: so many `records` (offsets) from `start` on."""

    partition: int
    start: int
    records: int
    position: Position


@dataclass(frozen=True, slots=True)
class TopicLag:
    """What is unread of a topic; except in `records`, without what is left to a person."""

    records: int
    """How much is unread in all."""
    unread: Sequence[UnreadRecords]
    old: Collection[int]
    """The partitions whose oldest unread record has the given age, or counts as that old; none if no age was given."""
    hidden: Mapping[int, int]
    """The partitions whose age is unknown, with the offset of the record whose time is in the future."""
    given_up: Sequence[int]
    """The partitions whose plan was tried too often."""
    is_recreated: Sequence[int]
    """The partitions whose offset belongs to an earlier topic of that name, or lies beyond the end.

    See protocol.md, section 6.
    """

    @property
    def due(self) -> list[UnreadRecords]:
        """What a run could take now, because no member holds it."""
        return [unread for unread in self.unread if not unread.position.is_claimed]


def positions_of(world: World, group: str, topic: str, *, max_attempts: int, wall_ms: int) -> GroupPositions:
    """Copy the positions of `group`; live is judged as `abandoned_partitions` does."""
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
        known = replace(key, data_topic_id=None) if state.is_go else key  # Go consumers name no data topic
        found[partition] = _position(known, is_claimed=bool(owners), max_attempts=max_attempts)
    return GroupPositions(found, working)


def read_lag(topics: "Topics", topic: str, positions: GroupPositions, older_than_ms: int | None) -> TopicLag:
    """Read the topic's offsets from the broker; return what is unread, and what is older than that time (unix ms).

    It needs DESCRIBE on the topic, reads no record and joins no consumer group: the first offset of a time or later
    shows whether an earlier one is unread. If that record has a time in the future, it shows nothing. Unread records
    then count as old, because otherwise no run would be requested for them. Raises what `Topics` does.
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
            (given_up.append(partition) if position.is_given_up else unread.append(found))
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
"""Of a partition that no record named yet: no member holds it, and it is read from its first record."""


def _unread(partition: int, position: Position, at: "OffsetBounds") -> UnreadRecords | None:
    start = max(position.offset or 0, at.start)
    for passed in position.passed_over:
        if passed.start <= start < passed.end:
            start = passed.end
    later = (passed for passed in position.passed_over if start < passed.start < at.end)
    records = at.end - start - sum(min(passed.end, at.end) - passed.start for passed in later)
    return UnreadRecords(partition, start, records, position) if records > 0 else None
