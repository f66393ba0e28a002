"""The commands by which a person acts on a group: their options and help, as `main` has them of the others.

Nothing heavy is imported here either.
"""

from typing import Annotated

import typer

from marshal_dagster.cli.exits import HELP
from marshal_dagster.cli.options import (
    DEFAULT_COORDINATION_TOPIC,
    AsJson,
    BootstrapServers,
    ConnectionFile,
    ConnectionOptions,
    CoordinationTopic,
    DryRun,
    GroupName,
    NewGroup,
    Timeout,
)
from marshal_dagster.cli.parts import Command, command_group, help_text

app = command_group("What a person does to a group.")


@app.command(
    "pause",
    cls=Command,
    short_help="Pause a group.",
    epilog=HELP,
    help=help_text(
        "Pause a group: its members claim and plan no more, end what they have in hand, and leave. It begins again at "
        "the time named, or when somebody resumes it. A pause in force is replaced.",
        "pause flights --for 2h",
        "pause flights --until 2026-01-31T18:00:00Z --dry-run",
    ),
)
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
    bootstrap_servers: BootstrapServers = None,
    connection: ConnectionFile = None,
    timeout: Timeout = None,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    new_group: NewGroup = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import pause

    if (until is None) == (length is None):
        raise typer.BadParameter("give one of --until and --for")
    options = ConnectionOptions(bootstrap_servers, connection, timeout)
    pause.pause(pause.PauseRequest(options, coordination_topic, group, dry_run, as_json, until, length, new_group))


@app.command(
    "resume",
    cls=Command,
    short_help="Resume a group.",
    epilog=HELP,
    help=help_text("End a group's pause, whoever began it.", "resume flights", "resume flights --dry-run --json"),
)
def _resume(  # noqa: PLR0917 - by name
    group: GroupName,
    bootstrap_servers: BootstrapServers = None,
    connection: ConnectionFile = None,
    timeout: Timeout = None,
    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    from marshal_dagster.cli import pause

    options = ConnectionOptions(bootstrap_servers, connection, timeout)
    pause.resume(pause.ResumeRequest(options, coordination_topic, group, dry_run, as_json))
