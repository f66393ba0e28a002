"""Lets the processes of the tests write without waiting for the disk.

What is written survives the death of its process, as before; only a crash of the machine could lose it, and no test has
one. On a busy disk such waits are most of the time of tests with many small transactions, such as Dagster's events.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any


def write_quickly() -> None:
    """Let new connections to SQLite, and calls of `os.fsync`, leave the time of writing to the operating system."""
    modules: tuple[Any, ...] = (sqlite3, sqlite3.dbapi2)
    connect = _without_waiting(sqlite3.connect)
    for module in modules:
        module.connect = connect
    system: Any = os
    system.fsync = lambda _: None


def _without_waiting(connect: Callable[..., sqlite3.Connection]) -> Callable[..., sqlite3.Connection]:
    @wraps(connect)
    def connected(*args: Any, **options: Any) -> sqlite3.Connection:  # noqa: ANN401 - as `sqlite3.connect`
        connection = connect(*args, **options)
        with suppress(sqlite3.Error):  # the first use of the file reports what is wrong with it
            connection.execute("PRAGMA synchronous = OFF")
        return connection

    return connected
