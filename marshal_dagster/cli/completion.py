"""Complete the names of groups and data topics in a shell, from the coordination log.

A completion must be silent and quick, so every problem means that there is nothing to complete.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import closing, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any, Final

import typer

from marshal_dagster.cli.connections import connection_of, open_reader
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.protocol.world import World

_MOST_S: Final = 2.0
"""How long a completion may take."""
_CONNECT_S: Final = 1.5


def complete_group(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the groups in the log whose names begin with `incomplete`. Never fails, and takes two seconds at most."""
    return _matching(ctx, incomplete, lambda world, _: _groups(world))


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the data topics in the log whose names begin with `incomplete`, of the group that was given before."""
    return _matching(ctx, incomplete, _topics)


def _groups(world: World) -> set[str]:
    return {name for partition in world.partitions.values() for name in partition.groups}


def _topics(world: World, group: str | None) -> set[str]:
    return {topic for name, (topic, _), *_rest in world.keys() if group in {None, name}}  # noqa: SIM118 - no mapping


def _matching(ctx: typer.Context, incomplete: str, names_of: Callable[[World, str | None], set[str]]) -> list[str]:
    """Return the matching names, or none if they are not known in time."""
    found: list[str] = []

    def look() -> None:
        with suppress(Exception):
            names = names_of(_read_world(ctx.params), ctx.params.get("group"))
            found.extend(sorted(name for name in names if name.startswith(incomplete)))

    logging.disable()
    thread = threading.Thread(target=look, daemon=True)
    with redirect_stderr(StringIO()):
        thread.start()
        thread.join(_MOST_S)
    logging.disable(logging.NOTSET)
    return found


def _read_world(params: dict[str, Any]) -> World:
    """Read the coordination log that the options and the environment specify. Raises `MarshalError`."""
    file = params.get("connection_file")
    options = ConnectionOptions(
        bootstrap_servers=params.get("bootstrap_servers"),
        connection_file=None if file is None else Path(file),
        timeout_s=_CONNECT_S,
    )
    topic = params.get("coordination_topic") or DEFAULT_COORDINATION_TOPIC
    with closing(open_reader(connection_of(options), topic)) as reader:
        return reader.catch_up()
