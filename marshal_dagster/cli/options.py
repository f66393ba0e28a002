"""Options that several commands share. `command` turns the fields of the dataclasses into options."""

import math
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC

COORDINATOR_TOPIC_VARIABLE: Final = "MARSHAL_COORDINATOR_TOPIC"


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the groups whose names begin with `incomplete`; see `marshal_dagster.cli.completion`."""
    return _completed("group", ctx, incomplete)


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the data topics whose names begin with `incomplete`; see `marshal_dagster.cli.completion`."""
    return _completed("topic", ctx, incomplete)


def _completed(what: str, ctx: typer.Context, incomplete: str) -> list[str]:
    """Import the module only when a shell completes a name. It uses the options itself."""
    names: list[str] = getattr(import_module("marshal_dagster.cli.completion"), f"complete_{what}")(ctx, incomplete)
    return names


def finite(seconds: float | None) -> float | None:
    """Return `seconds`, an option's value. Raises `typer.BadParameter`.

    Some versions of typer take nan for a number of every range.
    """
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is not a number of seconds")
    return seconds


BootstrapServers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        "--bootstrap-server",
        "-b",
        metavar="HOST:PORT,...",
        help="Brokers to connect to first (default: MARSHAL_BOOTSTRAP_SERVERS). MARSHAL_... variables set the rest.",
    ),
]
ConnectionFile = Annotated[
    Path | None,
    typer.Option(
        "--connection",
        "-c",
        metavar="FILE",
        help="A .toml or .json file with the whole connection. MARSHAL_... variables are then ignored.",
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Time limit of the first connection and of each request (default: 10)."
    ),
]
CoordinationTopic = Annotated[
    str,
    typer.Option(
        "--coordination-topic",
        metavar="NAME",
        envvar="MARSHAL_COORDINATION_TOPIC",
        show_envvar=False,
        help="The coordination topic; MARSHAL_COORDINATION_TOPIC sets it too.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write only JSON to stdout.")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, without writing anything.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
SinkName = Annotated[
    str | None,
    typer.Option(
        "--sink", metavar="MODULE:NAME", help="The group's sink, to check whether it can replace output that it holds."
    ),
]
NewGroup = Annotated[bool, typer.Option("--new-group", help="Allow a group that is not in the log yet.")]
DataConnection = Annotated[
    Path | None,
    typer.Option(
        "--data-connection",
        metavar="FILE",
        help="Connection file of the data topics' cluster, if it is another one (or MARSHAL_DATA_... variables).",
    ),
]
GoConsumersStopped = Annotated[
    str | None,
    typer.Option(
        "--go-consumers-stopped",
        metavar="GROUP",
        help="Repeat the group's name to confirm that all of its consumers are stopped, including Go consumers.",
    ),
]
OnlyGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        "-g",
        metavar="NAME",
        help="Show only this group.",
        autocompletion=complete_group,
    ),
]
OnlyTopic = Annotated[
    str | None,
    typer.Option(
        "--topic",
        "-t",
        metavar="NAME",
        help="Show only this data topic; read only its coordination partition.",
        autocompletion=complete_topic,
    ),
]
MaxAttempts = Annotated[
    int,
    typer.Option(
        "--max-attempts",
        metavar="N",
        min=1,
        help="How often members retry a plan before they give it up (max_attempts of your ops).",
    ),
]
Health = Annotated[
    str | None,
    typer.Option(
        "--health",
        metavar="HOST:PORT",
        help="Serve GET /health, /live, /ready and /metrics at this address; a PORT alone is on 127.0.0.1. "
        "Default: off.",
    ),
]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The data topic.", autocompletion=complete_topic)]
Partitions = Annotated[
    str | None,
    typer.Option("--partitions", "-p", metavar="0,2-4", help="Only these partitions (default: all)."),
]
Wait = Annotated[
    str, typer.Option("--wait", metavar="DURATION", help="How long to wait for the owners of partitions to leave.")
]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.", autocompletion=complete_group)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The connection options. None means that the environment or the default applies."""

    bootstrap_servers: BootstrapServers = None
    connection_file: ConnectionFile = None
    timeout_s: Timeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions(ConnectionOptions):
    """The connection, the coordination topic, and whether to write JSON."""

    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC
    as_json: AsJson = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLogOptions(LogOptions):
    """The options of a coordination log, and the connection to the data topics' cluster."""

    data_connection: DataConnection = None
