"""The state of a coordinated group, read from its coordinators' messages: each member's share and the last ping."""

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
    """The share that a coordinator last sent to a member; see the example of `read_group`."""

    member: str
    """The member's name."""
    tenure: str
    """The id of the member's process."""
    generation: int
    """The generation of the group; it grows with each rebalance."""
    epoch: int
    """The epoch of the coordinator that sent the share."""
    places: frozenset[DataPartitionId]
    """The partitions that are assigned to the member."""
    session_ms: int = 0
    """The member's session timeout in milliseconds; 0 if the coordinator did not write it."""
    gained: frozenset[DataPartitionId] = frozenset()
    """The partitions in `places` that the member did not have before."""
    assigned_at_ms: int = 0
    """When the share was sent, in Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class GroupAssignments:
    """The present assignment of a group, as `read_group` returns it."""

    group: str
    """The group's name."""
    epoch: int
    """The largest epoch of a coordinator of this group; 0 if there was none."""
    shares: Mapping[str, MemberAssignment]
    """The share of each member, by the member's name."""
    pinged_at_ms: int | None
    """When a coordinator last sent a ping, in Unix milliseconds; None if none did."""

    @property
    def session_ms(self) -> int:
        """The longest session timeout of the members, in milliseconds; 30,000 if none is known."""
        return max([share.session_ms for share in self.shares.values()], default=0) or _USUAL_SESSION_MS

    def silent_ms(self, now_ms: float) -> float:
        """Return how long ago a coordinator last sent a ping.

        Args:
            now_ms: The present time in Unix milliseconds.

        Returns:
            The time in milliseconds; infinite if no coordinator ever sent one.
        """
        return float("inf") if self.pinged_at_ms is None else now_ms - self.pinged_at_ms


def view_of(group: str, messages: Iterable[tuple[CoordinatorMessage, int]]) -> GroupAssignments:
    """Derive the state of a group from its coordinators' messages.

    Args:
        group: The group's name.
        messages: The messages, oldest first, each with its timestamp in Unix milliseconds. The last share of each
            member counts.

    Returns:
        The present assignment of the group.

    Example:
        ```python
        records = read_coordinator_messages(connection, CoordinatorTopics().coordinator_messages, [partition])
        view = view_of(
            "parcels", [(message, record.at_ms) for message, record in records if message.group == "parcels"]
        )
        ```
    """
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
    """Read the present assignment of a group.

    Args:
        connection: The cluster with the coordinator's topics.
        topics: The coordinator's topics.
        group: The group's name.

    Returns:
        The assignment; without members if no coordinator has led the group.

    Raises:
        TopicNotFoundError: One of the coordinator's topics does not exist.
        UnavailableError: The brokers do not answer in time.

    Example:
        ```python
        for name, share in read_group(connection, CoordinatorTopics(), "parcels").shares.items():
            print(name, sorted(share.places))
        ```
    """
    return read_groups(connection, topics, [group]).get(group) or view_of(group, ())


def read_groups(
    connection: KafkaConnection, topics: CoordinatorTopics, names: Collection[str] | None = None
) -> dict[str, GroupAssignments]:
    """Read the present assignments of several groups.

    Args:
        connection: The cluster with the coordinator's topics.
        topics: The coordinator's topics.
        names: The names of the groups; by default all groups that a coordinator has led.

    Returns:
        The assignments, sorted by group name. Groups that no coordinator has led are left out.

    Raises:
        TopicNotFoundError: One of the coordinator's topics does not exist.
        UnavailableError: The brokers do not answer in time.

    Example:
        ```python
        for name, view in read_groups(connection, CoordinatorTopics()).items():
            print(name, len(view.shares), "members")
        ```
    """
    count = topics.partitions(connection)
    numbers = range(count) if names is None else {partition_of(name, count) for name in names}
    messages: dict[str, list[tuple[CoordinatorMessage, int]]] = {}
    for message, record in read_coordinator_messages(connection, topics.coordinator_messages, numbers):
        if partition_of(message.group, count) == record.partition:
            messages.setdefault(message.group, []).append((message, record.at_ms))
    return {group: view_of(group, messages[group]) for group in sorted(messages) if names is None or group in names}
