"""What a group has not read of a topic: the positions of the world state beside the topic's own offsets."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from marshal_dagster.protocol.state import Key, Phase, Range, Ranges
from marshal_dagster.protocol.world import World
from marshal_dagster.runs.names import run_of

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.protocol.state import OffsetBounds

_UNKNOWN_POSITION: Final = Key()


@dataclass(frozen=True, slots=True)
class Position:
    """Where the group stands in one partition, and what keeps a run from it."""

    offset: int | None
    generation: int
    passed_over: Ranges
    """Ranges ahead of the offset that no run takes: done, or planned and tried too often."""
    data_topic_id: str | None
    is_claimed: bool
    is_given_up: bool


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """A group's positions in a topic at one moment, kept beyond the world state's lock."""

    by_partition: Mapping[int, Position]
    working: Collection[str]
    """The runs that hold a live claim."""

    def at(self, partition: int) -> Position:
        """Give one; a partition that nobody named yet is held by nobody, and read from its first record."""
        return self.by_partition.get(partition) or _position(_UNKNOWN_POSITION, is_claimed=False, max_attempts=1)


@dataclass(frozen=True, slots=True)
class UnreadRecords:
    """What is unread of one partition: so many `records` (offsets) from `start` on."""

    partition: int
    start: int
    records: int
    position: Position

    @property
    def is_due(self) -> bool:
        """Whether a run could take it now: nobody holds the partition."""
        return not self.position.is_claimed


@dataclass(frozen=True, slots=True)
class TopicLag:
    """What is unread of a topic; but for `records`, without what is left to a person."""

    records: int
    """How much is unread in all."""
    unread: Sequence[UnreadRecords]
    old: Collection[int]
    """The partitions whose oldest unread record has the age that was asked for; none if no age was."""
    given_up: Sequence[int]
    """The partitions whose plan was tried too often."""
    is_recreated: Sequence[int]
    """The partitions whose offset belongs to an earlier topic of that name, or lies beyond the end.

    See protocol.md, section 6.
    """

    @property
    def due(self) -> list[UnreadRecords]:
        """Give what a run could take now."""
        return [each for each in self.unread if each.is_due]


def positions_of(world: World, group: str, topic: str, *, max_attempts: int, wall_ms: int) -> GroupPositions:
    """Copy the positions of `group`; live is judged as `partitions_left` does."""
    state = world.group_of(group, topic)
    now_ms = world.advice_time_ms(group, topic, wall_ms)
    found: dict[int, Position] = {}
    working: set[str] = set()
    for (of_topic, partition), key in state.keys.items():
        if of_topic != topic:
            continue
        is_live = state.is_live(key, now_ms)
        owners = [key.owner] if is_live else []
        interval_ms = state.settings.heartbeat_interval_ms
        owners += [range_.owner for range_ in key.ranges if range_.is_live(now_ms, interval_ms)]
        working |= {run_of(owner.instance) for owner in owners if owner is not None}
        known = replace(key, data_topic_id=None) if state.is_go else key  # Go consumers name no data topic
        found[partition] = _position(known, is_claimed=bool(owners), max_attempts=max_attempts)
    return GroupPositions(found, working)


def read_lag(topics: "Topics", topic: str, positions: GroupPositions, older_than_ms: int | None) -> TopicLag:
    """Ask the broker for the topic's offsets and see what is unread, and what is older than that time (unix ms).

    It needs DESCRIBE on the topic, reads no record and joins no consumer group: the first offset of a time or later
    tells whether an earlier one is unread. Raises what `Topics` does.
    """
    described = topics.describe(topic)
    bounds = topics.offsets(topic, described.partitions)
    records = 0
    unread, given_up, is_recreated = [], [], []
    for partition, at in sorted(bounds.items()):
        position = positions.at(partition)
        if position.data_topic_id not in {None, described.topic_id} or (position.offset or 0) > at.end:
            is_recreated.append(partition)
        elif found := _unread(partition, position, at):
            records += found.records
            (given_up.append(partition) if position.is_given_up else unread.append(found))
    old = _old(unread, lambda wanted: topics.offsets_at(topic, wanted, older_than_ms or 0)) if older_than_ms else set()
    return TopicLag(records, unread, old, given_up, is_recreated)


def _position(key: Key, *, is_claimed: bool, max_attempts: int) -> Position:
    return Position(
        offset=key.offset,
        generation=key.generation,
        passed_over=tuple(range_ for range_ in key.ranges if _is_passed_over(range_, max_attempts)),
        data_topic_id=key.data_topic_id,
        is_claimed=is_claimed,
        is_given_up=key.plan_end is not None and key.plan_attempts >= max_attempts,
    )


def _is_passed_over(each: Range, max_attempts: int) -> bool:
    return each.phase is Phase.DONE or (each.phase is Phase.PLANNED and each.attempts >= max_attempts)


def _unread(partition: int, position: Position, at: "OffsetBounds") -> UnreadRecords | None:
    start = max(position.offset or 0, at.start)
    for each in position.passed_over:
        if each.start <= start < each.end:
            start = each.end
    passed = sum(min(each.end, at.end) - each.start for each in position.passed_over if start < each.start < at.end)
    records = at.end - start - passed
    return UnreadRecords(partition, start, records, position) if records > 0 else None


def _old(unread: Sequence[UnreadRecords], first_young: Callable[[list[int]], Mapping[int, int]]) -> set[int]:
    """Give the partitions that have an unread record before the first one that is young enough."""
    young = first_young([each.partition for each in unread])
    return {each.partition for each in unread if each.partition not in young or each.start < young[each.partition]}
