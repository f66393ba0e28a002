"""The commands by which a person acts on a group: their options and help, as `main` has them of the others.

Nothing heavy is imported here either.
"""

from typing import Annotated

import typer

from marshal_dagster.cli.command import Command, command_group, help_text
from marshal_dagster.cli.exit_codes import HELP, ExitCode
from marshal_dagster.cli.options import (
    DEFAULT_COORDINATION_TOPIC,
    FROM_ENVIRONMENT,
    AsJson,
    ConnectionOptions,
    CoordinationTopic,
    DataConnection,
    DryRun,
    GoConsumersStopped,
    GoConsumersStoppedForGood,
    GoConsumersStoppedForPause,
    GroupName,
    NewGroup,
    Yes,
    with_connection,
)

app = command_group("What a person does to a group.")
position_app = command_group("A group's positions: shown and set.")
settings_app = command_group("What a group's members agree on: shown and set.")
app.add_typer(position_app, name="position")
app.add_typer(settings_app, name="settings")

TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The data topic.", show_default=False)]
Partitions = Annotated[
    str | None,
    typer.Option("--partitions", "-p", metavar="0,2-4", help="These; all by default.", show_default=False),
]

Wait = Annotated[
    str, typer.Option("--wait", metavar="DURATION", help="How long those that hold partitions have to leave.")
]
AllowOutOfRange = Annotated[
    bool, typer.Option("--allow-out-of-range", help="Also offsets that the topic does not hold.")
]


@app.command(
    "pause",
    cls=Command,
    short_help="Pause a group.",
    epilog=HELP,
    help=help_text(
        "Pause a group: its members claim and plan no more, end what they have in hand, and leave. It begins again at "
        "the time named, or when somebody resumes it. A pause in force is replaced. The newest Go consumers do not "
        "know the record: a group that they share, or that has no settings yet, is paused only with "
        "--go-consumers-stopped.",
        "pause flights --for 2h",
        "pause flights --until 2026-01-31T18:00:00Z --dry-run",
    ),
)
@with_connection
def _pause(  # noqa: PLR0917 - typer gives options by name
    group: GroupName,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="An ISO 8601 time with its zone.", show_default=False),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option("--for", metavar="DURATION", help="A length of time: 90s, 30m, 2h, 1d12h.", show_default=False),
    ] = None,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    new_group: NewGroup = False,
    go_consumers_stopped: GoConsumersStoppedForPause = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import pause

    if (until is None) == (length is None):
        raise typer.BadParameter("give one of --until and --for")
    pause.pause(
        pause.PauseRequest(
            connection, coordination_topic, group, dry_run, as_json, go_consumers_stopped, until, length, new_group
        )
    )


@app.command(
    "resume",
    cls=Command,
    short_help="Resume a group.",
    epilog=HELP,
    help=help_text("End a group's pause, whoever began it.", "resume flights", "resume flights --dry-run --json"),
)
@with_connection
def _resume(  # noqa: PLR0917 - by name
    group: GroupName,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    go_consumers_stopped: GoConsumersStoppedForPause = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import pause

    pause.resume(pause.ResumeRequest(connection, coordination_topic, group, dry_run, as_json, go_consumers_stopped))


@position_app.command(
    "get",
    cls=Command,
    short_help="Show where a group stands.",
    epilog=HELP,
    help=help_text(
        "Show where a group stands in each partition of a data topic, or of all that the log names for it: the next "
        "offset to read, beside what the topic holds and what Kafka has as the group's offset.",
        "position get flights",
        "position get flights flights --json",
    ),
)
@with_connection
def _get(  # noqa: PLR0917 - by name
    group: GroupName,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="This data topic only.", show_default=False)
    ] = None,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import position_get

    position_get.run(position_get.GetRequest(connection, coordination_topic, data_connection, group, topic, as_json))


@position_app.command(
    "set",
    cls=Command,
    short_help="Set where a group goes on.",
    epilog=HELP,
    help=help_text(
        "Set the next offset to read: shows what was and what is to be, asks, pauses the group, waits for those that "
        "hold partitions to leave, sets the positions and puts the pause back that was in force before. Should it "
        "fail half way the group goes on, and it is said what was set. A group without settings gets them first "
        "(`settings set`), or, where Go consumers share it, its positions are set without a pause, with "
        "--go-consumers-stopped, once all of its consumers are stopped.",
        "position set flights flights --offsets 0=1500,1=1720",
        "position set flights flights --timestamp 2026-01-31T18:00:00Z --dry-run",
        "position set flights flights --back 1000 --partitions 0,2-3 --yes",
    ),
)
@with_connection
def _set(  # noqa: PLR0917 - by name
    group: GroupName,
    topic: TopicArgument,
    offsets: Annotated[
        str | None,
        typer.Option(
            "--offsets", metavar="P=OFFSET,...", help="These; or one number for all partitions.", show_default=False
        ),
    ] = None,
    timestamp: Annotated[
        str | None,
        typer.Option(
            "--timestamp",
            metavar="TIME",
            help="The first record of that time or later: ISO 8601 with its zone.",
            show_default=False,
        ),
    ] = None,
    earliest: Annotated[bool, typer.Option("--earliest", help="The first record that is left.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="The end: only what comes is read.")] = False,
    back: Annotated[
        int | None,
        typer.Option("--back", metavar="N", min=1, help="N offsets before where it stands.", show_default=False),
    ] = None,
    partitions: Partitions = None,
    wait: Wait = "5m",
    allow_out_of_range: AllowOutOfRange = False,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    new_group: NewGroup = False,
    go_consumers_stopped: GoConsumersStopped = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.admin.position_spec import TargetOptions
    from marshal_dagster.cli import position_reset
    from marshal_dagster.cli.position import PositionOptions

    where = TargetOptions(offsets, timestamp, earliest, latest, back)
    if where.given != 1:
        raise typer.BadParameter("give one of --offsets, --timestamp, --earliest, --latest and --back")
    moving = PositionOptions(
        connection=connection,
        coordination_topic=coordination_topic,
        data_connection=data_connection,
        group=group,
        topic=topic,
        partitions=partitions,
        wait=wait,
        allow_out_of_range=allow_out_of_range,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
        go_consumers_stopped=go_consumers_stopped,
    )
    return position_reset.run(moving, where, new_group=new_group)


@app.command(
    "adopt",
    cls=Command,
    short_help="Take a group's first positions over.",
    epilog=HELP,
    help=help_text(
        "Take a group's first positions from where its work was done before: what Kafka holds as the offsets of a "
        "consumer group, or the newest committed batch in a checkpoint folder of Spark Structured Streaming. Stop that "
        "consumer group or query first. Shows what is to be, asks, and sets the positions as `position set` does. "
        "Refused where the group has positions already.",
        "adopt flights flights --consumer-group flights-loader --dry-run",
        "adopt flights flights --checkpoint /data/checkpoints/flights --yes",
    ),
)
@with_connection
def _adopt(  # noqa: PLR0917 - by name
    group: GroupName,
    topic: TopicArgument,
    consumer_group: Annotated[
        str | None,
        typer.Option(
            "--consumer-group", metavar="NAME", help="The committed offsets of this group.", show_default=False
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="FOLDER", help="The checkpoint of a query, on this machine.", show_default=False
        ),
    ] = None,
    others: Annotated[
        str | None,
        typer.Option(
            "--others",
            metavar="earliest|latest",
            help="TargetOptions partitions begin of which it has no offset; a checkpoint's at the earliest by default.",
            show_default=False,
        ),
    ] = None,
    partitions: Partitions = None,
    wait: Wait = "5m",
    allow_out_of_range: AllowOutOfRange = False,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    go_consumers_stopped: GoConsumersStopped = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.admin.import_positions import PositionSourceOptions
    from marshal_dagster.cli import position_import
    from marshal_dagster.cli.position import PositionOptions

    given = PositionSourceOptions(consumer_group, checkpoint, others)
    if not given.is_one:
        raise typer.BadParameter("give one of --consumer-group and --checkpoint")
    moving = PositionOptions(
        connection=connection,
        coordination_topic=coordination_topic,
        data_connection=data_connection,
        group=group,
        topic=topic,
        partitions=partitions,
        wait=wait,
        allow_out_of_range=allow_out_of_range,
        dry_run=dry_run,
        yes=yes,
        as_json=as_json,
        go_consumers_stopped=go_consumers_stopped,
    )
    return position_import.run(moving, given)


@app.command(
    "reprocess",
    cls=Command,
    short_help="Have a range of offsets done again.",
    epilog=HELP,
    help=help_text(
        "Have the group's own members do a range of a partition's offsets again, which they have done before: shows "
        "what is to be, asks, sets the position back to the range's start, waits until the members have reached its "
        "end, and has the group go on where it stood. It stays until then; interrupted, it has the group go on there. "
        "The exit code is 1 when the members were not through in time.",
        "reprocess flights flights --partition 0 --from 1500 --to 1720 --dry-run",
        "reprocess flights flights --partition 0 --from 1500 --to 1720 --within 2h --yes",
    ),
)
@with_connection
def _reprocess(  # noqa: PLR0917 - by name
    group: GroupName,
    topic: TopicArgument,
    partition: Annotated[
        int, typer.Option("--partition", "-p", metavar="N", min=0, help="The partition.", show_default=False)
    ],
    start: Annotated[
        int, typer.Option("--from", metavar="OFFSET", min=0, help="The first offset of the range.", show_default=False)
    ],
    end: Annotated[
        int, typer.Option("--to", metavar="OFFSET", min=1, help="The first one behind it.", show_default=False)
    ],
    within: Annotated[
        str, typer.Option("--within", metavar="DURATION", help="How long the members have for it.")
    ] = "1h",
    wait: Wait = "5m",
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    data_connection: DataConnection = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import reprocess

    return reprocess.run(
        reprocess.ReprocessRequest(
            connection=connection,
            coordination_topic=coordination_topic,
            data_connection=data_connection,
            group=group,
            topic=topic,
            partition=partition,
            start=start,
            end=end,
            within=within,
            wait=wait,
            dry_run=dry_run,
            yes=yes,
            as_json=as_json,
        )
    )


@settings_app.command(
    "show",
    cls=Command,
    short_help="Show a group's settings.",
    epilog=HELP,
    help=help_text(
        "Show the settings of a group that are in force, by coordination partition where they differ. A group without "
        "settings is judged as Go consumers judge it.",
        "settings show flights",
        "settings show flights --json",
    ),
)
@with_connection
def _settings_show(
    group: GroupName,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import settings

    return settings.show(settings.SettingsRequest(connection, coordination_topic, group, as_json))


@settings_app.command(
    "set",
    cls=Command,
    short_help="Give a group settings, or change them.",
    epilog=HELP,
    help=help_text(
        "Give a group its settings, or change them; what is not named stays as it is in force, or is as a member has "
        "it by default. Shows what was and what is to be, asks, pauses the group, waits for those that hold something "
        "to leave, writes the settings and puts the pause back that was in force before. A group of which nothing is "
        "there yet is not paused. Configure all members alike.",
        "settings set flights --heartbeat-interval 10 --delivery effectively_once",
        "settings set flights --ranges --dry-run",
    ),
)
@with_connection
def _settings_set(  # noqa: PLR0917 - typer gives options by name
    group: GroupName,
    heartbeat_interval: Annotated[
        float | None,
        typer.Option(
            "--heartbeat-interval", metavar="SECONDS", min=0.1, help="Seconds between heartbeats.", show_default=False
        ),
    ] = None,
    rules: Annotated[
        str | None, typer.Option("--rules", metavar="native|go", help="The rule set.", show_default=False)
    ] = None,
    delivery: Annotated[
        str | None,
        typer.Option(
            "--delivery",
            metavar="MODE",
            help="at_most_once, at_least_once or effectively_once.",
            show_default=False,
        ),
    ] = None,
    ranges: Annotated[bool, typer.Option("--ranges", help="Let members claim ranges of a partition.")] = False,
    wait: Wait = "5m",
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    new_group: NewGroup = False,
    go_consumers_stopped: GoConsumersStoppedForGood = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.admin.group_settings import SettingsChange
    from marshal_dagster.cli import settings

    change = SettingsChange(heartbeat_interval, rules, delivery, ranges=ranges)
    request = settings.ChangeRequest(
        connection, coordination_topic, group, as_json, wait, dry_run, yes, change, new_group, go_consumers_stopped
    )
    return settings.set_settings(request)


@settings_app.command(
    "disable-ranges",
    cls=Command,
    short_help="Switch a group's ranges off.",
    epilog=HELP,
    help=help_text(
        "Take the feature `ranges` out of a group's settings, so that members that do not know it can claim. Shows "
        "what is forgotten, asks, pauses the group, waits for those that hold something to leave, and for two "
        "heartbeat intervals more, and puts the pause back that was in force before.",
        "settings disable-ranges flights --dry-run",
    ),
)
@with_connection
def _disable_ranges(  # noqa: PLR0917 - by name
    group: GroupName,
    wait: Wait = "5m",
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import settings

    return settings.switch_ranges_off(
        settings.WritingRequest(connection, coordination_topic, group, as_json, wait, dry_run, yes)
    )


@app.command(
    "revoke",
    cls=Command,
    short_help="Take from a dead owner what it holds.",
    epilog=HELP,
    help=help_text(
        "Take from an owner who is dead what it holds of a data topic, so that others can claim it at once instead of "
        "when it is stale. Shows what it holds, and asks. Should the owner live it is fenced: its next heartbeat or "
        "commit is refused. In a group that Go consumers share nothing can be revoked: another instance takes each "
        "partition at its offset and releases it, and a live Go owner takes it back with its next heartbeat. The exit "
        "code is 1 when not all could be taken.",
        "revoke flights flights --instance 5b1c0d3e-8f6a-4e62-9d2c-1f0a7b3c4d5e --dry-run",
        "revoke flights flights --instance 5b1c0d3e-8f6a-4e62-9d2c-1f0a7b3c4d5e.0f1e2d3c4b5a --partitions 0-3",
    ),
)
@with_connection
def _revoke(  # noqa: PLR0917 - by name
    group: GroupName,
    topic: TopicArgument,
    instance: Annotated[
        str,
        typer.Option(
            "--instance",
            "-i",
            metavar="ID",
            help="The owner: an instance id, or the run id in front of it.",
            show_default=False,
        ),
    ],
    partitions: Partitions = None,
    connection: ConnectionOptions = FROM_ENVIRONMENT,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> ExitCode:
    from marshal_dagster.cli import revoke

    return revoke.run(
        revoke.RevokeRequest(connection, coordination_topic, group, topic, instance, partitions, dry_run, yes, as_json)
    )
