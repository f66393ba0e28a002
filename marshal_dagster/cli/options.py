"""The options that several commands have, and what they say together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC as DEFAULT_COORDINATION_TOPIC  # noqa: PLC0414 - exported

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
Health = Annotated[
    str | None,
    typer.Option(
        "--health",
        metavar="HOST:PORT",
        help="Answer GET /health there; a PORT alone is on 127.0.0.1. Off by default.",
        show_default=False,
    ),
]
GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What the command line says of the connection; None where the environment or the default counts."""

    bootstrap_servers: str | None = None
    file: Path | None = None
    timeout_s: float | None = None
