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
