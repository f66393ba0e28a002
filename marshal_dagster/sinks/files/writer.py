"""What writing a folder for each partition needs of a session."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.caching import unless_interrupted
from marshal_dagster.spark import connect
from marshal_dagster.spark.session import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTING = "spark.sql.maxConcurrentOutputFileWriters"
_UNSET = "0"
# A task that reads one Kafka partition has one file open anyway; each one more can take a row group's memory.
_FILES_AT_ONCE = "4"
_LOOKS = 64
_NOT_SEEN = ("PATH_NOT_FOUND", "FILE_NOT_EXIST", "FileNotFoundException")

_GLOB = re.compile(r"[{}\[\]*?\\]")

_lock = threading.Lock()
_users: "WeakKeyDictionary[SparkSession, int]" = WeakKeyDictionary()


def path_to_read(path: Path) -> str:
    """Return the local `path` as Spark reads it."""
    return escaped(f"file:{path}")


def escaped(path: str) -> str:
    """Return `path` with those characters escaped that stand for others where Spark reads."""
    return _GLOB.sub(r"\\\g<0>", path)


@contextlib.contextmanager
def some_files_at_once(spark: "SparkSession") -> Iterator[None]:
    """Let each task have a few files open while this lasts: Spark otherwise sorts all rows by partition first.

    That sort takes a quarter of the time of writing a batch. A value that the user has set stays; threads that write at
    once share the setting. After an interrupt the JVM is left alone: it would answer only when what it is at has ended.
    """
    with _lock:
        is_ours = spark in _users or spark.conf.get(_SETTING, _UNSET) == _UNSET
        if is_ours:
            _users[spark] = _users.get(spark, 0) + 1
            spark.conf.set(_SETTING, _FILES_AT_ONCE)
    with unless_interrupted(lambda: _leave(spark) if is_ours else None):
        yield


def _leave(spark: "SparkSession") -> None:
    with _lock:
        _users[spark] -= 1
        if not _users[spark]:
            del _users[spark]
            with contextlib.suppress(Exception):  # a session that has died needs no settings
                spark.conf.set(_SETTING, _UNSET)


def check_all_see(spark: "SparkSession", path: Path) -> None:
    """Raise `ConfigurationError` when an executor does not see the file at `path`.

    What it wrote would stay on its own machine, and be missing here without an error. On one machine nothing is asked;
    on a cluster, as many tasks as run at once look, so that each executor gets one.
    """
    if connect.is_connect(spark):
        _check_server_sees(spark, path)
        return
    context = spark.sparkContext
    if is_local(str(context.master)):
        return
    name = str(path)

    def look(_: int) -> tuple[str, bool]:
        return socket.gethostname(), os.path.exists(name)  # noqa: PTH110 - runs in an executor's Python

    tasks = context.defaultParallelism
    blind = sorted({host for host, sees in context.parallelize(range(tasks), tasks).map(look).collect() if not sees})
    if blind:
        raise ConfigurationError(
            f"path: executors on {', '.join(blind)} do not see {path.parent}: a file sink needs a file system that the "
            "driver and all executors have under the same path"
        )


def _check_server_sees(spark: "SparkSession", path: Path) -> None:
    """Do so for a Connect server, whose machine may be another and whose Python need not be this one's.

    The file is read many times over, which Spark spreads over all of its task slots.
    """
    looks = 1 if is_local(str(spark.conf.get("spark.master", ""))) else _LOOKS
    try:
        spark.read.text([path_to_read(path)] * looks).count()
    except Exception as error:
        if not any(word in str(error) for word in _NOT_SEEN):
            raise
        raise ConfigurationError(
            f"path: the Spark Connect server or one of its executors does not see {path.parent}: a file sink needs a "
            "file system that this process, the server and all executors have under the same path"
        ) from error
