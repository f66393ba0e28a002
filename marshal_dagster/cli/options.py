"""The options that several commands have, and what they say together."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

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
GoConsumersStopped = Annotated[
    str | None,
    typer.Option(
        "--go-consumers-stopped",
        metavar="GROUP",
        help="All consumers of the group are stopped, Go's too; repeat the group's name to confirm it.",
        show_default=False,
    ),
]
GoConsumersStoppedForPause = Annotated[
    str | None,
    typer.Option(
        "--go-consumers-stopped",
        metavar="GROUP",
        help="No Go consumer newer than January 2017 will start on this coordination topic again: it would not know "
        "the record. Repeat the group's name to confirm it.",
        show_default=False,
    ),
]
GoConsumersStoppedForGood = Annotated[
    str | None,
    typer.Option(
        "--go-consumers-stopped",
        metavar="GROUP",
        help="No Go consumer, of any group, will use this coordination topic again. Repeat the group's name to confirm "
        "it.",
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


FROM_ENVIRONMENT: Final = ConnectionOptions()
"""The connection of a command line that says nothing of it."""

R = TypeVar("R")


def with_connection(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options of the connection: its parameter `connection` is made of them.

    typer makes options of a function's parameters, so the parameter is replaced in the signature that typer reads.
    """
    signature = inspect.signature(command)
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (
            ("bootstrap_servers", BootstrapServers),
            ("connection", ConnectionFile),
            ("timeout", Timeout),
        )
    ]
    parameters = [
        shown
        for parameter in signature.parameters.values()
        for shown in (
            options if parameter.name == "connection" else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    ]

    @wraps(command)
    def run(
        *,
        bootstrap_servers: str | None,
        connection: Path | None,
        timeout: float | None,
        **others: Any,  # noqa: ANN401
    ) -> R:
        return command(connection=ConnectionOptions(bootstrap_servers, connection, timeout), **others)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
