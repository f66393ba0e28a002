"""Read the world state of a live log, with the lag and the assignments of its groups, for `status` and `top`."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from marshal_dagster._internal.texts import nearest_first
from marshal_dagster.admin.pause import group_names
from marshal_dagster.cli.assignments import AssignmentCache
from marshal_dagster.cli.connections import connection_of, data_connection_of, open_reader
from marshal_dagster.cli.options import DataLogOptions
from marshal_dagster.cli.world_view import (
    DataTopicEnds,
    LagUnknownReason,
    ViewFilter,
    WorldView,
    data_places,
    unread_in,
    world_view,
)
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.record_times import record_ages
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.protocol.unread_records import UnreadRecords
from marshal_dagster.protocol.world import World

_UNKNOWN: Final[Mapping[type[MarshalError], LagUnknownReason]] = {
    TopicNotFoundError: LagUnknownReason.NO_TOPIC,
    AuthorizationError: LagUnknownReason.NOT_ALLOWED,
    UnavailableError: LagUnknownReason.UNAVAILABLE,
}
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class WorldReader:
    """Reads the coordination log and the ends of the data topics. Each reading continues where the last one ended."""

    rationalizer: Rationalizer
    topics: Topics
    wanted: ViewFilter
    clock: Clock
    assignments: AssignmentCache

    def look(self) -> WorldView:
        """Read to the log's present end. Raises `MarshalError`."""
        world = self.rationalizer.catch_up()
        at_ms = self.clock.wall_ms()
        data = read_data_topics(self.topics, data_places(world, self.wanted))
        add_ages(self.topics, data, world, self.wanted, at_ms)
        assigned = self.assignments.of([name for name in group_names(world) if self.wanted.has_group(name)])
        return world_view(world, at_ms=at_ms, data=data, assigned=assigned, wanted=self.wanted)

    def require_topic(self, view: WorldView) -> None:
        """Raise `TopicNotFoundError` if the view is limited to a topic that neither the log nor the cluster has.

        Raises `AuthorizationError`, `UnavailableError`.
        """
        topic = self.wanted.topic
        if topic is None or topic in (known := data_places(view.world)):
            return
        try:
            self.topics.describe(topic)
        except TopicNotFoundError as error:
            names = ", ".join(map(repr, nearest_first(topic, known)[:_SHOWN]))
            raise TopicNotFoundError(f"{error}; the log has the topics {names}" if names else str(error)) from None


@contextmanager
def open_world_reader(options: DataLogOptions, wanted: ViewFilter, client_id: str) -> Iterator[WorldReader]:
    """Connect to the coordination log, and with `client_id` to the data topics. Raises `MarshalError`."""
    connection = connection_of(options)
    data_connection = data_connection_of(options.data_connection, connection)
    if wanted.topic is not None:
        require_topic_name("--topic", wanted.topic)
    followed = None if wanted.topic is None else [wanted.topic]
    with (
        closing(open_reader(connection, options.coordination_topic, followed)) as rationalizer,
        Topics(data_connection, client_id=client_id) as topics,
    ):
        yield WorldReader(rationalizer, topics, wanted, SystemClock(), AssignmentCache(connection))


def read_data_topics(topics: Topics, places: Mapping[str, set[int]]) -> dict[str, DataTopicEnds]:
    """Look up the id and ends of each data topic, or why they are unknown. Stop when Kafka cannot be reached.

    Raises `MarshalError` for errors that do not depend on the topic.
    """
    found: dict[str, DataTopicEnds] = {}
    for topic, partitions in sorted(places.items()):
        if any(ends.unknown is LagUnknownReason.UNAVAILABLE for ends in found.values()):
            found[topic] = DataTopicEnds(unknown=LagUnknownReason.UNAVAILABLE)
            continue
        try:
            described = topics.describe(topic)
            bounds = topics.offsets(topic, partitions & set(described.partitions))
            found[topic] = DataTopicEnds(described.topic_id, bounds)
        except tuple(_UNKNOWN) as error:
            found[topic] = DataTopicEnds(unknown=next(why for kind, why in _UNKNOWN.items() if isinstance(error, kind)))
    return found


def add_ages(topics: Topics, data: dict[str, DataTopicEnds], world: World, wanted: ViewFilter, at_ms: int) -> None:
    """Add to each data topic in `data` how old the first unread record of each key is, as far as Kafka answers.

    If retention deleted unread records, it is the age of the first record that is left.
    """
    places: dict[str, set[tuple[int, int]]] = {}
    for name, (topic, partition), group, key in world.keys():  # noqa: SIM118 - no mapping
        if topic not in data or not wanted.has_group(name):
            continue
        unread = unread_in(data[topic], partition, key, is_go=group.is_go)
        if isinstance(unread, UnreadRecords) and unread.records:
            places.setdefault(topic, set()).add((partition, unread.first))
    for topic, firsts in places.items():
        with suppress(*_UNKNOWN):
            data[topic] = replace(data[topic], ages_ms=record_ages(topics, topic, firsts, at_ms))
