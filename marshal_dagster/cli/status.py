"""`status`: the world state as the log has it now, and how far the data topics are ahead of it."""

from collections.abc import Callable, Mapping
from contextlib import closing

from marshal_dagster.admin.pause import group_names, unknown_group
from marshal_dagster.cli import output, tables, world_view
from marshal_dagster.cli.assignments import AssignmentCache
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import check_topic, connection_of, data_connection_of, open_reader
from marshal_dagster.cli.options import DataLogOptions, OnlyGroup, OnlyTopic
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.log import LogIdentity
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics

app = command_group("Show the world state.")


@command(
    app,
    "status",
    "Show the world state, by group and key. That is what the coordination log leads to: groups, pauses, settings, and "
    "each key with its owner, offset and plan. Freshness and lag are as of now. Where a coordinator leads a group, the "
    "owner that each partition is assigned to is shown too.",
    "status",
    "status --group flights --topic flights --json",
)
def status(*, group: OnlyGroup = None, topic: OnlyTopic = None, options: DataLogOptions) -> None:
    """Read the log to its present end and show the world state. Raises `MarshalError`."""
    connection = connection_of(options)
    data_connection = data_connection_of(options.data_connection, connection)
    if topic is not None:
        check_topic("--topic", topic)
    wanted = world_view.ViewFilter(group, topic)
    followed = None if topic is None else [topic]
    with closing(open_reader(connection, options.coordination_topic, followed)) as rationalizer:
        world = rationalizer.catch_up()
        at_ms = SystemClock().wall_ms()
        with Topics(data_connection, client_id="marshal-dagster-status") as topics:
            data = read_data_topics(topics, world_view.data_places(world, wanted))
        looked = world_view.world_view(world, at_ms=at_ms, data=data, wanted=wanted)
        assignments = AssignmentCache(connection)
        looked = world_view.with_assignments(looked, assignments.of([group.name for group in looked.groups]))
        if options.as_json:
            output.write_json(_identity_json(rationalizer.identity) | world_view.to_json(world, looked))
        else:
            _show(rationalizer.identity, looked)
        if group is not None and group not in group_names(world):
            output.write_note(unknown_group(world, group))


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
