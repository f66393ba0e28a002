"""A group as its coordinators' messages show it: the share of each member, and how long the coordinator is silent."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.messages import CoordinatorMessage, Ping, StartFetcher, places_of
from marshal_dagster.coordinator.transport import CoordinatorTopics, partition_of, read_coordinator_messages
from marshal_dagster.kafka.connection import KafkaConnection

_USUAL_SESSION_MS: Final = 30_000


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """What a member was sent to work on, by which coordinator (`epoch`) and in which generation of the group."""

    member: str
    tenure: str
    generation: int
    epoch: int
    places: frozenset[DataPartitionId]
    session_ms: int = 0
    """Its session time-out; 0 if the coordinator has not written it."""
    gained: frozenset[DataPartitionId] = frozenset()
    """The part of `places` that the member did not have before."""
    assigned_at_ms: int = 0
    """When it was sent, in unix milliseconds."""


@dataclass(frozen=True, slots=True)
class GroupAssignments:
    """The present shares of a group; `pinged_at_ms` is when a coordinator pinged last, in unix milliseconds."""

    group: str
    epoch: int
    shares: Mapping[str, MemberAssignment]
    pinged_at_ms: int | None

    @property
    def session_ms(self) -> int:
        """Return the longest of its members' session time-outs, or the usual one if none is known."""
        return max([share.session_ms for share in self.shares.values()], default=0) or _USUAL_SESSION_MS

    def silent_ms(self, now_ms: float) -> float:
        """Return for how long no coordinator has been heard; infinite if none ever was."""
        return float("inf") if self.pinged_at_ms is None else now_ms - self.pinged_at_ms


def view_of(group: str, messages: Iterable[tuple[CoordinatorMessage, int]]) -> GroupAssignments:
    """Return a group by its messages, each with its time in unix milliseconds; of a member the last one counts."""
    epoch, pinged_at_ms = 0, None
    shares: dict[str, MemberAssignment] = {}
    for message, at_ms in messages:
        epoch = max(epoch, message.epoch)
        if isinstance(message, Ping):
            pinged_at_ms = at_ms if pinged_at_ms is None else max(pinged_at_ms, at_ms)
        elif isinstance(message, StartFetcher):
            places = places_of(message.places)
            shares[message.member] = MemberAssignment(
                message.member,
                message.tenure,
                message.generation,
                message.epoch,
                places,
                message.session_timeout_ms,
                places_of(message.gained) & places,
                at_ms,
            )
    return GroupAssignments(group, epoch, shares, pinged_at_ms)


def read_group(connection: KafkaConnection, topics: CoordinatorTopics, group: str) -> GroupAssignments:
    """Read what is assigned in a group now. Raises `TopicNotFoundError`, `UnavailableError`."""
    return read_groups(connection, topics, [group]).get(group) or view_of(group, ())


def read_groups(
    connection: KafkaConnection, topics: CoordinatorTopics, names: Collection[str] | None = None
) -> dict[str, GroupAssignments]:
    """Read what is assigned now in all groups that were led, or in those of `names`; by name, in their order.

    Raises `TopicNotFoundError`, `UnavailableError`.
    """
    count = topics.partitions(connection)
    numbers = range(count) if names is None else {partition_of(name, count) for name in names}
    messages: dict[str, list[tuple[CoordinatorMessage, int]]] = {}
    for message, record in read_coordinator_messages(connection, topics.coordinator_messages, numbers):
        messages.setdefault(message.group, []).append((message, record.at_ms))
    return {group: view_of(group, messages[group]) for group in sorted(messages) if names is None or group in names}
