"""`position set`: shows where a group stands in a topic and where it is to stand, asks, and sets it."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer

from marshal_dagster.cli import output, survey
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
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.cli.telling import telling_warnings
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.operations.positions import Move, Repositioning
from marshal_dagster.operations.targets import Where, partitions_of
from marshal_dagster.operations.times import duration_s

_COLUMNS: Final = ("partition", "#log start", "#log end", "#before", "#after", "#by", "note")


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
    if request.as_json and not (request.yes or request.dry_run):
        raise ConfigurationError("--json: nobody can be asked; give --yes too, after a look with --dry-run")
    check_topic("TOPIC", request.topic)
    target, wait_s = request.where.target("--"), duration_s(request.wait, "--wait")
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
        if not request.as_json:
            output.show(
                output.styled(f"Group {request.group}, topic {request.topic}", "bold"),
                output.Table(_COLUMNS, [_row(each) for each in moves], may_fold={"note"}),
            )
        if not request.dry_run and not (request.yes or _agreed()):
            output.note("nothing was written")
            return ExitCode.PROBLEMS
        done = {} if request.dry_run else _carry_out(work, moves, request, wait_s)
    _tell(request, moves, done)
    return ExitCode.OK


def _agreed() -> bool:
    return typer.confirm("Set these positions? The group is paused meanwhile", err=True)


def _carry_out(
    work: Repositioning, moves: Sequence[Move], request: SetRequest, wait_s: float
) -> Mapping[int, int | None]:
    """Set the positions, and give the generations that this has begun; should it fail, say what was set."""
    if any(each.owners for each in moves):
        output.note(f"the group is paused; those that hold partitions have {request.wait} to leave")
    try:
        problem = work.carry_out(moves, wait_s=wait_s)
    except BaseException:
        _tell_half_done(work, moves)
        raise
    if problem is not None:
        output.note(f"the group's offsets in Kafka were not updated (only lag tools read them): {problem}")
    try:
        return work.done(moves)
    except MarshalError as error:
        output.note(f"the positions were set; the log could not be read again: {error}")
        return {each.partition: None for each in moves}


def _tell_half_done(work: Repositioning, moves: Sequence[Move]) -> None:
    try:
        done = work.done(moves)
    except MarshalError as error:
        output.note(f"what was set could not be read ({error}): see `marshal-dagster position get`")
        return
    left = [each.partition for each in moves if each.partition not in done]
    output.note(f"set: partitions {survey.listed(done) or 'none'}; not set: {survey.listed(left) or 'none'}")


def _tell(request: SetRequest, moves: Sequence[Move], done: Mapping[int, int | None]) -> None:
    if request.as_json:
        output.write_json(
            {
                "group": request.group,
                "topic": request.topic,
                "dry_run": request.dry_run,
                "positions": [_to_json(each, done) for each in moves],
            }
        )
    elif request.dry_run:
        output.show("A dry run: nothing was written.")
    else:
        output.show(f"The positions of partitions {survey.listed([each.partition for each in moves])} were set.")


def _row(move: Move) -> list[str | output.Line]:
    before = move.key.offset
    by = output.NOTHING if before is None or move.is_other else f"{move.offset - before:+d}"
    numbers = (move.extent.start, move.extent.end, before, move.offset)
    note = output.styled("; ".join(move.notes), "yellow") if move.notes else output.NOTHING
    return [str(move.partition), *map(output.number, numbers), by, note]


def _to_json(move: Move, done: Mapping[int, int | None]) -> dict[str, Any]:
    return {
        "partition": move.partition,
        "log_start": move.extent.start,
        "log_end": move.extent.end,
        "before": move.key.offset,
        "after": move.offset,
        "set": move.partition in done,
        "generation": done.get(move.partition),
        "notes": list(move.notes),
    }
