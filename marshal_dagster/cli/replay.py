"""`replay`: show the world state that a stored coordination log leads to, or the verdict on each record."""

import json
from collections.abc import Iterable
from typing import Annotated, Final

import typer

from marshal_dagster.cli import output, world_tables
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.options import AsJson
from marshal_dagster.cli.stored_log import StoredLogOptions, stored_log
from marshal_dagster.cli.world_view import world_view
from marshal_dagster.protocol.replay import StoredRecord, summary
from marshal_dagster.protocol.world import World

_TOGETHER: Final = 10_000


app = command_group("Show the world state that a stored log leads to.")


@command(
    app,
    "replay",
    "Show the world state that a stored log leads to. It is the state after the last record. Each line of the log is "
    '{"partition": p, "offset": o, "timestamp": ms, "value": text or null}.',
    "replay log.jsonl --json",
    "tail --json | marshal-dagster replay - --coordination-partitions 8",
)
def replay(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The stored log; - for standard input.")],
    options: StoredLogOptions,
    as_json: AsJson = False,
    at_each: Annotated[
        bool, typer.Option("--at-each", help="Write the verdict on each record as a line of JSON.")
    ] = False,
) -> None:
    """Replay a stored log and write the state that it leads to.

    Raises:
        ConfigurationError: An option is wrong, or the file cannot be read.
        MalformedLogError: A line of the log is malformed.
    """
    with stored_log(file, options) as log:
        world = log.world
        if at_each:
            _judge_each(world, log.records, is_live=log.is_live)
        else:
            _apply(world, log.records)
    if as_json:
        output.write_line(json.dumps(summary(world)))
    elif not at_each:
        output.show(*world_tables.overview(world_view(world)))


def _apply(world: World, records: Iterable[StoredRecord]) -> None:
    """Apply all records, many of a coordination partition at a time, because partitions are independent."""
    waiting: dict[int, list[tuple[int, int, bytes | None]]] = {}
    count = 0
    for record in records:
        waiting.setdefault(record.partition, []).append((record.offset, record.timestamp_ms, record.value))
        count += 1
        if record.reason is not None:
            _apply_waiting(world, waiting)
            world.partitions[record.partition].keep_pause_reason(record.value, record.reason)
            waiting, count = {}, 0
        if count == _TOGETHER:
            _apply_waiting(world, waiting)
            waiting, count = {}, 0
    _apply_waiting(world, waiting)


def _apply_waiting(world: World, waiting: dict[int, list[tuple[int, int, bytes | None]]]) -> None:
    for partition, records in waiting.items():
        world.apply_many(partition, records)


def _judge_each(world: World, records: Iterable[StoredRecord], *, is_live: bool) -> None:
    """Write the verdict on each record. If the log is still being written, write without delay."""
    for record in records:
        verdict = world.apply(record.partition, record.offset, record.timestamp_ms, record.value)
        output.write_line(
            f'{{"partition": {record.partition}, "offset": {record.offset}, "verdict": "{verdict.kind.value}"}}'
        )
        if is_live:
            output.flush()
