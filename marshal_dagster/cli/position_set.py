"""`position set`: shows where a group stands in a topic and where it is to stand, asks, and sets it."""

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
from marshal_dagster.operations.positions import Repositioning
from marshal_dagster.operations.targets import Where, partitions_of


@dataclass(frozen=True, slots=True)
class SetRequest:
    """What is to stand where."""

    connection: ConnectionOptions
    coordination_topic: str
    data_connection: Path | None
    group: str
    topic: str
    where: Where
    partitions: str | None = None
    wait: str = "5m"
    outside_the_log: bool = False
    new_group: bool = False
    dry_run: bool = False
    yes: bool = False
    as_json: bool = False


def run(request: SetRequest) -> ExitCode:
    """Show what was and what is to be, ask, and set the positions. Raises `MarshalError`."""
    moving = Moving(
        request.group,
        request.topic,
        "Set these positions? The group is paused meanwhile",
        request.wait,
        request.dry_run,
        request.yes,
        request.as_json,
    )
    moving.check()
    check_topic("TOPIC", request.topic)
    target = request.where.target("--")
    named = None if request.partitions is None else partitions_of(request.partitions, "--partitions")
    connection = connection_of(request.connection)
    rights = READING if request.dry_run else WRITING

    def open_log(interval_ms: int) -> Rationalizer:
        return open_reader(connection, request.coordination_topic, interval_ms=interval_ms, rights=rights)

    with (
        telling_warnings(),
        Topics(data_connection_of(request.data_connection, connection), client_id="marshal-dagster-position") as topics,
        closing(Repositioning(open_log, topics, request.group, request.topic, person())) as work,
    ):
        moves = work.look(target, named, outside_the_log=request.outside_the_log, new_group=request.new_group)
        for warning in work.warnings():
            output.note(warning)
        return moving.carry_through(work, moves)
