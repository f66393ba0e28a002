"""The options that several commands have. `command` makes options of a dataclass's fields."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC

COORDINATOR_TOPIC_VARIABLE: Final = "MARSHAL_COORDINATOR_TOPIC"

BootstrapServers = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers",
        "-b",
        metavar="HOST:PORT,...",
        help="Brokers to ask first; MARSHAL_BOOTSTRAP_SERVERS by default. Other fields stay as MARSHAL_... say.",
        show_default=False,
    ),
]
ConnectionFile = Annotated[
    Path | None,
    typer.Option(
        "--connection",
        "-c",
        metavar="FILE",
        help="A .toml or .json file with the whole connection, in place of MARSHAL_... variables.",
        show_default=False,
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        help="How long the first connection and each request may take (10 by default).",
        show_default=False,
    ),
]
CoordinationTopic = Annotated[
    str,
    typer.Option(
        "--coordination-topic",
        metavar="NAME",
        envvar="MARSHAL_COORDINATION_TOPIC",
        show_envvar=False,
        help="The topic that is the coordination log; MARSHAL_COORDINATION_TOPIC sets it too.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout, and nothing else.")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change, and write nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
SinkName = Annotated[
    str | None,
    typer.Option(
        "--sink",
        metavar="MODULE:NAME",
        help="The group's sink: it is asked whether it can replace what it holds.",
        show_default=False,
    ),
]
NewGroup = Annotated[
    bool, typer.Option("--new-group", help="The group is one that the log does not name yet; else that is an error.")
]
DataConnection = Annotated[
    Path | None,
    typer.Option(
        "--data-connection",
        metavar="FILE",
        help="The data topics' cluster, if it is another one; MARSHAL_DATA_... variables name it too.",
        show_default=False,
    ),
]
GoConsumersStopped = Annotated[
    str | None,
    typer.Option(
        "--go-consumers-stopped",
        metavar="GROUP",
        help="All consumers of the group are stopped, Go's too; repeat the group's name to confirm it.",
        show_default=False,
    ),
]
OnlyGroup = Annotated[str | None, typer.Option("--group", "-g", help="This group only.", show_default=False)]
OnlyTopic = Annotated[
    str | None,
    typer.Option(
        "--topic", "-t", help="This data topic only; no other coordination partition is read.", show_default=False
    ),
]
MaxAttempts = Annotated[
    int,
    typer.Option(
        "--max-attempts",
        metavar="N",
        min=1,
        help="How often members take over a plan before they give it up (max_attempts of your ops).",
    ),
]
Health = Annotated[
    str | None,
    typer.Option(
        "--health",
        metavar="HOST:PORT",
        help="Answer GET /health there; a PORT alone is on 127.0.0.1. Off by default.",
        show_default=False,
    ),
]
TopicArgument = Annotated[str, typer.Argument(metavar="TOPIC", help="The data topic.", show_default=False)]
Partitions = Annotated[
    str | None,
    typer.Option("--partitions", "-p", metavar="0,2-4", help="These; all by default.", show_default=False),
]
Wait = Annotated[
    str, typer.Option("--wait", metavar="DURATION", help="How long the owners of partitions have to leave.")
]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """The connection as the command line describes it; None where the environment or the default counts."""

    bootstrap_servers: BootstrapServers = None
    connection_file: ConnectionFile = None
    timeout_s: Timeout = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions(ConnectionOptions):
    """Which coordination log, and whether the answer is JSON."""

    coordination_topic: CoordinationTopic = DEFAULT_COORDINATION_TOPIC
    as_json: AsJson = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLogOptions(LogOptions):
    """A coordination log, and the cluster of the data topics that it names."""

    data_connection: DataConnection = None
