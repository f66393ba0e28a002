"""`status`: show the world state that the log has now, and the lag in the data topics."""

from collections.abc import Iterator
from typing import Annotated

import typer

from marshal_dagster._internal.number_runs import runs_text
from marshal_dagster.cli import attention, output, world_tables
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import DataLogOptions, MaxAttempts, OnlyGroup, OnlyTopic
from marshal_dagster.cli.output import Line, Table
from marshal_dagster.cli.watching import INTERVAL_S, Interval, Watch, is_watched, problem_line, watch_on_screen
from marshal_dagster.cli.world_reader import open_world_reader
from marshal_dagster.cli.world_view import ViewFilter, WorldView, to_json
from marshal_dagster.coordination.log import LogIdentity
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS

app = command_group("Show the world state.")


@command(
    app,
    "status",
    "Show the world state, by group and key. It is what the coordination log leads to: groups, pauses, settings, and "
    "each key with its owner, offset and plan. Freshness and lag are as of now. If a coordinator leads a group, the "
    "member that each partition is assigned to is shown too. What needs an operator comes first, with the command that "
    "helps; with --check the exit code is then 1. It is a plan that failed so often that members no longer try it, an "
    "open plan that no member holds, a claim that is stale for more than two minutes, a "
    "pause that ends in more than a day, a pause or settings in only some coordination partitions, coordination "
    "partitions that are only observed, a re-created data topic, positions after the end of one, data topics whose "
    "cluster does not answer, or a group that the log does not have. A group that the log does not have makes the exit "
    "code 1 also without --check.",
    "status",
    "status --group flights --topic flights --json",
    "status --check --group flights",
)
def status(
    *,
    group: OnlyGroup = None,
    topic: OnlyTopic = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if anything needs an operator.")] = False,
    wide: Annotated[
        bool, typer.Option("--wide", "-w", help="Show epochs, generations and full instance ids too.")
    ] = False,
    watch: Watch = False,
    interval: Interval = INTERVAL_S,
    max_attempts: MaxAttempts = DEFAULT_MAX_ATTEMPTS,
    options: DataLogOptions,
) -> ExitCode:
    """Read the log to its present end and show the world state. Raises `MarshalError`."""
    columns = world_tables.WIDE_COLUMNS if wide else world_tables.COLUMNS
    with open_world_reader(options, ViewFilter(group, topic), "marshal-dagster-status") as reader:
        view = reader.look()
        reader.require_topic(view)
        log = reader.rationalizer.identity

        def page(view: WorldView, problem: str | None = None, _: int | None = None) -> Iterator[str | Line | Table]:
            yield from problem_line(problem)
            if view.groups or view.observed or check:
                yield from attention.urgent_lines(view, max_attempts)
            yield _log_line(log, view)
            yield from world_tables.overview(view, columns)

        if is_watched(watch=watch, once=check or options.as_json):
            watch_on_screen(view, reader.look, page, interval)
            return ExitCode.OK
    needed = [*attention.exhausted_lines(view, max_attempts), *attention.other_lines(view, max_attempts)]
    if options.as_json:
        output.write_json(
            {"coordination_topic": log.topic, "coordination_topic_id": log.topic_id}
            | {"exhausted_plans": attention.exhausted_json(view, max_attempts), "needs_operator": needed}
            | to_json(view)
        )
    else:
        output.show(*page(view))
    if options.as_json and not check and view.unknown_group is not None:
        output.write_note(view.unknown_group)
    is_problem = view.unknown_group is not None or (check and needed)
    return ExitCode.PROBLEMS if is_problem else ExitCode.OK


def _log_line(log: LogIdentity, view: WorldView) -> str:
    read = [partition.number for partition in view.partitions]
    which = f"{log.partitions}" if len(read) == log.partitions else f"{runs_text(read)} of the {log.partitions}"
    return f"Coordination log {log.topic} (id {log.topic_id}), {which} coordination partitions"
