"""`status`: the world state as the log has it now, and how far the data topics are ahead of it."""

from marshal_dagster.admin.pause import group_names, unknown_group
from marshal_dagster.cli import output, world_tables
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.options import DataLogOptions, OnlyGroup, OnlyTopic
from marshal_dagster.cli.world_reader import open_world_reader
from marshal_dagster.cli.world_view import ViewFilter, listed, to_json

app = command_group("Show the world state.")


@command(
    app,
    "status",
    "Show the world state, by group and key. That is what the coordination log leads to: groups, pauses, settings, and "
    "each key with its owner, offset and plan. Freshness and lag are as of now. Where a coordinator leads a group, the "
    "member that each partition is assigned to is shown too.",
    "status",
    "status --group flights --topic flights --json",
)
def status(*, group: OnlyGroup = None, topic: OnlyTopic = None, options: DataLogOptions) -> None:
    """Read the log to its present end and show the world state. Raises `MarshalError`."""
    with open_world_reader(options, ViewFilter(group, topic), "marshal-dagster-status") as reader:
        view = reader.look()
        reader.require_topic(view)
        log = reader.rationalizer.identity
    if options.as_json:
        output.write_json({"coordination_topic": log.topic, "coordination_topic_id": log.topic_id} | to_json(view))
    else:
        read = [partition.number for partition in view.partitions]
        which = f"{log.partitions}" if len(read) == log.partitions else f"{listed(read)} of the {log.partitions}"
        output.show(
            f"Coordination log {log.topic} (id {log.topic_id}), {which} coordination partitions",
            *world_tables.overview(view),
        )
    if group is not None and group not in group_names(view.world):
        output.write_note(unknown_group(view.world, group))
