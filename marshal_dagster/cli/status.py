"""`status`: show the world state that the log has now, and the lag in the data topics."""

from typing import Annotated

import typer

from marshal_dagster.admin.pause import group_names, unknown_group
from marshal_dagster.cli import attention, output, world_tables
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import DataLogOptions, MaxAttempts, OnlyGroup, OnlyTopic
from marshal_dagster.cli.world_reader import open_world_reader
from marshal_dagster.cli.world_view import ViewFilter, listed, to_json
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS

app = command_group("Show the world state.")


@command(
    app,
    "status",
    "Show the world state, by group and key. It is what the coordination log leads to: groups, pauses, settings, and "
    "each key with its owner, offset and plan. Freshness and lag are as of now. If a coordinator leads a group, the "
    "member that each partition is assigned to is shown too. Plans that failed so often that members no longer try "
    "them come first, with the command that retries them. With --check the exit code is 1 if anything needs an "
    "operator: such a plan, an open plan that no member holds, a claim that is stale for more than two minutes, a "
    "pause that ends in more than a day, coordination partitions that are only observed, a re-created data topic, or a "
    "group that the log does not have.",
    "status",
    "status --group flights --topic flights --json",
    "status --check --group flights",
)
def status(
    *,
    group: OnlyGroup = None,
    topic: OnlyTopic = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if anything needs an operator.")] = False,
    max_attempts: MaxAttempts = DEFAULT_MAX_ATTEMPTS,
    options: DataLogOptions,
) -> ExitCode:
    """Read the log to its present end and show the world state. Raises `MarshalError`."""
    with open_world_reader(options, ViewFilter(group, topic), "marshal-dagster-status") as reader:
        view = reader.look()
        reader.require_topic(view)
        log = reader.rationalizer.identity
    exhausted = attention.exhausted_lines(view, max_attempts)
    others = attention.other_lines(view, max_attempts) if check else []
    if options.as_json:
        output.write_json(
            {"coordination_topic": log.topic, "coordination_topic_id": log.topic_id}
            | {"exhausted_plans": attention.exhausted_json(view, max_attempts)}
            | ({"needs_operator": [*exhausted, *others]} if check else {})
            | to_json(view)
        )
    else:
        read = [partition.number for partition in view.partitions]
        which = f"{log.partitions}" if len(read) == log.partitions else f"{listed(read)} of the {log.partitions}"
        output.show(
            *(output.styled(line, "bold red") for line in (*exhausted, *others)),
            f"Coordination log {log.topic} (id {log.topic_id}), {which} coordination partitions",
            *world_tables.overview(view),
        )
    if group is not None and not check and group not in group_names(view.world):
        output.write_note(unknown_group(view.world, group))
    return ExitCode.PROBLEMS if check and (exhausted or others) else ExitCode.OK
