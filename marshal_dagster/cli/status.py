"""`status`: the world state as the log has it now, and how far the data topics are ahead of it."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from marshal_dagster.admin.pause import group_names, unknown_group
from marshal_dagster.cli import output, tables, world_view
from marshal_dagster.cli.assignments import AssignmentCache
from marshal_dagster.cli.connections import check_topic, connection_of, data_connection_of, open_reader
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.log import LogIdentity
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """What is looked at, and where."""

    connection: ConnectionOptions
    coordination_topic: str
    data_connection: Path | None = None
    group: str | None = None
    topic: str | None = None
    as_json: bool = False


def run(request: StatusRequest) -> None:
    """Read the log to its present end and show what it says. Raises `MarshalError`."""
    connection = connection_of(request.connection)
    data_connection = data_connection_of(request.data_connection, connection)
    if request.topic is not None:
        check_topic("--topic", request.topic)
    wanted = world_view.ViewFilter(request.group, request.topic)
    followed = None if request.topic is None else [request.topic]
    with closing(open_reader(connection, request.coordination_topic, followed)) as rationalizer:
        world = rationalizer.catch_up()
        at_ms = SystemClock().wall_ms()
        with Topics(data_connection, client_id="marshal-dagster-status") as topics:
            data = read_data_topics(topics, world_view.data_places(world, wanted))
        looked = world_view.world_view(world, at_ms=at_ms, data=data, wanted=wanted)
        assignments = AssignmentCache(connection)
        looked = world_view.with_assignments(looked, assignments.of([group.name for group in looked.groups]))
        if request.as_json:
            output.write_json(_identity_json(rationalizer.identity) | world_view.to_json(world, looked))
        else:
            _show(rationalizer.identity, looked)
        if request.group is not None and request.group not in group_names(world):
            output.write_note(unknown_group(world, request.group))


def read_data_topics(topics: Topics, places: Mapping[str, set[int]]) -> dict[str, world_view.DataTopicEnds]:
    """Ask for id and ends of each data topic; what cannot be known does not keep the state from being shown."""
    found: dict[str, world_view.DataTopicEnds] = {}
    out_of_reach = False
    for topic, partitions in sorted(places.items()):
        if not out_of_reach:
            found[topic] = _guarded(lambda topic=topic, wanted=partitions: _look(topics, topic, wanted))  # type: ignore[misc]
            out_of_reach = found[topic].unknown is world_view.LagUnknownReason.UNAVAILABLE
        else:
            found[topic] = world_view.DataTopicEnds(unknown=world_view.LagUnknownReason.UNAVAILABLE)
    return found


def _look(topics: Topics, topic: str, partitions: set[int]) -> world_view.DataTopicEnds:
    described = topics.describe(topic)
    bounds = topics.offsets(topic, partitions & set(described.partitions))
    return world_view.DataTopicEnds(described.topic_id, {number: each.end for number, each in bounds.items()})


def _guarded(look: Callable[[], world_view.DataTopicEnds]) -> world_view.DataTopicEnds:
    try:
        return look()
    except MarshalError as error:
        unknown = next((why for kind, why in _UNKNOWN.items() if isinstance(error, kind)), None)
        if unknown is None:
            raise
        return world_view.DataTopicEnds(unknown=unknown)


_UNKNOWN: Mapping[type[MarshalError], world_view.LagUnknownReason] = {
    TopicNotFoundError: world_view.LagUnknownReason.NO_TOPIC,
    AuthorizationError: world_view.LagUnknownReason.NOT_ALLOWED,
    UnavailableError: world_view.LagUnknownReason.UNAVAILABLE,
}


def _identity_json(identity: LogIdentity) -> dict[str, str]:
    return {"coordination_topic": identity.topic, "coordination_topic_id": identity.topic_id}


def _show(identity: LogIdentity, looked: world_view.WorldView) -> None:
    followed = world_view.listed([partition.number for partition in looked.partitions])
    which = (
        f"{identity.partitions}"
        if len(looked.partitions) == identity.partitions
        else f"{followed} of the {identity.partitions}"
    )
    output.show(
        f"Coordination log {identity.topic} (id {identity.topic_id}), {which} coordination partitions",
        *tables.overview(looked),
    )
