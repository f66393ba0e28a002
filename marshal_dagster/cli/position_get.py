"""`position get`: where a group stands in its topics, and how that lies in what the topics hold."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marshal_dagster.admin.pause import require_known
from marshal_dagster.admin.position_spec import outside_text
from marshal_dagster.cli import output
from marshal_dagster.cli.connections import check_topic, connection_of, data_connection_of, open_reader
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.protocol.state import Key, OffsetBounds
from marshal_dagster.protocol.world import World

_COLUMNS = ("partition", "#log start", "#log end", "#position", "#lag", "#in Kafka", "#generation", "note")


@dataclass(frozen=True, slots=True)
class GetRequest:
    """Which group's positions; in one data topic, or in all that the log names for it."""

    connection: ConnectionOptions
    coordination_topic: str
    data_connection: Path | None
    group: str
    topic: str | None = None
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class DataTopic:
    """What the cluster has of a data topic, and of the group's offsets in it; empty where that cannot be known."""

    topic_id: str | None = None
    bounds: Mapping[int, OffsetBounds] = field(default_factory=dict)
    committed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """Where one partition stands; what is not known is None."""

    topic: str
    partition: int
    key: Key
    data: DataTopic

    @property
    def bounds(self) -> OffsetBounds | None:
        """What can be read of it."""
        return self.data.bounds.get(self.partition)

    @property
    def is_other(self) -> bool:
        """Whether it stands in a topic of that name that is no more."""
        return None not in {self.key.data_topic_id, self.data.topic_id} and self.key.data_topic_id != self.data.topic_id

    @property
    def lag(self) -> int | None:
        """How many offsets lie before the end."""
        if self.bounds is None or self.key.offset is None or self.is_other or self.key.offset > self.bounds.end:
            return None
        return self.bounds.end - max(self.key.offset, self.bounds.start)

    @property
    def notes(self) -> list[str]:
        """What to think of."""
        told = ["the topic was made anew"] if self.is_other else []
        if self.key.provisional:
            told.append("provisional")
        if self.bounds is not None and self.key.offset is not None and not self.is_other:
            told.append(outside_text(self.key.offset, self.bounds))
        if self.key.plan_end is not None:
            told.append(f"planned up to {self.key.plan_end}")
        told += [f"[{range_.start}, {range_.end}) {range_.phase}" for range_ in self.key.ahead]
        return [each for each in told if each]


def run(request: GetRequest) -> None:
    """Show the positions. Raises `MarshalError`."""
    if request.topic is not None:
        check_topic("TOPIC", request.topic)
    connection = connection_of(request.connection)
    data_connection = data_connection_of(request.data_connection, connection)
    with closing(open_reader(connection, request.coordination_topic)) as rationalizer:
        world = rationalizer.catch_up()
        require_known(world, request.group, "Nothing is known of where it stands")
        with Topics(data_connection, client_id="marshal-dagster-position") as topics:
            positions = list(positions_of(world, topics, request.group, request.topic))
    if request.as_json:
        output.write_json({"group": request.group, "positions": [_to_json(each) for each in positions]})
        return
    output.show(
        output.styled(f"Group {request.group}", "bold"),
        output.Table(_COLUMNS, [_row(position) for position in positions], may_fold={"partition", "note"}),
    )


def positions_of(world: World, topics: Topics, group: str, topic: str | None = None) -> Iterator[Position]:
    """Give each partition of `topic`, or of all topics that the log names for the group.

    A topic that cannot be looked at is told on stderr, and its positions are given as the log has them.
    """
    keys = {place: key for name, place, _, key in world.keys() if name == group and topic in {None, place[0]}}  # noqa: SIM118
    out_of_reach = False
    for name in sorted({place[0] for place in keys} if topic is None else {topic}):
        data = DataTopic()
        try:
            data = data if out_of_reach else _look(topics, group, name)
        except (TopicNotFoundError, AuthorizationError, UnavailableError) as error:
            output.write_note(str(error))
            out_of_reach = isinstance(error, UnavailableError)
        numbers = {number for of, number in keys if of == name} | data.bounds.keys()
        yield from (Position(name, number, world.key(group, name, number), data) for number in sorted(numbers))


def _look(topics: Topics, group: str, topic: str) -> DataTopic:
    described = topics.describe(topic)
    bounds = topics.offsets(topic, described.partitions)
    try:
        committed = topics.group_offsets(group, topic)
    except MarshalError as error:
        output.write_note(f"what Kafka has as offsets of the group is not shown: {error}")
        committed = {}
    return DataTopic(described.topic_id, bounds, committed)


def _row(each: Position) -> list[str | output.Line]:
    start, end = (None, None) if each.bounds is None else (each.bounds.start, each.bounds.end)
    numbers = (start, end, each.key.offset, each.lag, each.data.committed.get(each.partition), each.key.generation)
    note = output.styled("; ".join(each.notes), "yellow") if each.notes else output.NOTHING
    return [f"{each.topic}/{each.partition}", *map(output.number, numbers), note]


def _to_json(each: Position) -> dict[str, Any]:
    return {
        "topic": each.topic,
        "partition": each.partition,
        "log_start": None if each.bounds is None else each.bounds.start,
        "log_end": None if each.bounds is None else each.bounds.end,
        "offset": each.key.offset,
        "lag": each.lag,
        "committed_in_kafka": each.data.committed.get(each.partition),
        "generation": each.key.generation,
        "notes": each.notes,
    }
