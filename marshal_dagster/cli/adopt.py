"""`adopt`: a group's first positions, from a consumer group or a checkpoint of Structured Streaming."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from marshal_dagster.cli import output
from marshal_dagster.cli.connecting import (
    READING,
    WRITING,
    check_topic,
    connection_of,
    data_connection_of,
    open_reader,
    person,
)
from marshal_dagster.cli.exits import ExitCode
from marshal_dagster.cli.moving import Moving
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.cli.telling import telling_warnings
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.operations.adopting import Adopting, Given
from marshal_dagster.operations.positions import Repositioning
from marshal_dagster.operations.targets import partitions_of


@dataclass(frozen=True, slots=True)
class AdoptRequest:
    """Whose positions are adopted, and from where."""

    connection: ConnectionOptions
    coordination_topic: str
    data_connection: Path | None
    group: str
    topic: str
    given: Given
    partitions: str | None = None
    wait: str = "5m"
    outside_the_log: bool = False
    dry_run: bool = False
    yes: bool = False
    as_json: bool = False


def run(request: AdoptRequest) -> ExitCode:
    """Show where the group would begin, ask, and set its positions. Raises `MarshalError`."""
    moving = Moving(
        request.group,
        request.topic,
        "Begin at these positions? The group is paused meanwhile",
        request.wait,
        request.dry_run,
        request.yes,
        request.as_json,
    )
    moving.check()
    check_topic("TOPIC", request.topic)
    others = request.given.begin_at("--")
    named = None if request.partitions is None else partitions_of(request.partitions, "--partitions")
    connection = connection_of(request.connection)
    rights = READING if request.dry_run else WRITING

    def open_log(interval_ms: int) -> Rationalizer:
        return open_reader(connection, request.coordination_topic, interval_ms=interval_ms, rights=rights)

    with (
        telling_warnings(),
        Topics(data_connection_of(request.data_connection, connection), client_id="marshal-dagster-adopt") as topics,
        closing(Adopting(Repositioning(open_log, topics, request.group, request.topic, person()))) as work,
    ):
        source = request.given.source(topics, request.topic)
        moves = work.look(source, named, others=others, outside_the_log=request.outside_the_log)
        if not request.dry_run:
            source.require_at_rest()
        for warning in (*source.notes, *work.warnings()):
            output.note(warning)
        return moving.carry_through(work, moves)
