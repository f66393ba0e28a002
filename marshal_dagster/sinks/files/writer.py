"""Prepares a Spark session for a file sink: a setting for writing, and the check that executors see its folder."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark import connect
from marshal_dagster.spark.interrupts import unless_interrupted
from marshal_dagster.spark.session import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTING = "spark.sql.maxConcurrentOutputFileWriters"
_UNSET = "0"
# A task that reads one Kafka partition has one file open; each additional file can use the memory of a row group.
_FILES_AT_ONCE = "4"
_LOOKS = 64
NOT_SEEN: Final = ("PATH_NOT_FOUND", "FILE_NOT_EXIST", "FileNotFoundException")
"""Texts of Spark's errors about a path that it does not see."""

_GLOB = re.compile(r"[{}\[\]*?\\]")

_lock = threading.Lock()
_users: "WeakKeyDictionary[SparkSession, int]" = WeakKeyDictionary()


def path_to_read(path: Path) -> str:
    """Return the local `path` as Spark reads it."""
    return escaped(f"file:{path}")


def escaped(path: str) -> str:
    """Return `path` with the characters of glob patterns escaped, because Spark expands patterns when it reads."""
    return _GLOB.sub(r"\\\g<0>", path)


@contextlib.contextmanager
def some_files_at_once(spark: "SparkSession") -> Iterator[None]:
    """Let each Spark task keep a few files open during the block, so that Spark does not sort the rows by partition.

    The sort takes a quarter of the time of writing a batch. A value that the user has set is not changed, and threads
    that write at the same time share the setting. After an interrupt the setting is not reset, because the JVM would
    answer only after its current job.
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
            with contextlib.suppress(Exception):  # the session may have died
                spark.conf.set(_SETTING, _UNSET)


def check_all_see(spark: "SparkSession", path: Path) -> None:
    """Raise `ConfigurationError` if an executor does not see the file at `path`.

    Rows that it wrote would stay on its own machine and be missing here without an error. Nothing is checked if Spark
    runs on one machine. On a cluster, as many tasks check as can run at once, so that each executor gets one.
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
            f"executors on {', '.join(blind)} do not see {path.parent}. Use a folder that the driver and all "
            "executors mount under the same path, or a URI of a Hadoop file system"
        )


def _check_server_sees(spark: "SparkSession", path: Path) -> None:
    """Do the same through a Spark Connect server, which may run on another machine and with another Python.

    Spark reads the file many times, which it distributes over all of its task slots.
    """
    looks = 1 if is_local(str(spark.conf.get("spark.master", ""))) else _LOOKS
    try:
        spark.read.text([path_to_read(path)] * looks).count()
    except Exception as error:
        if not any(word in str(error) for word in NOT_SEEN):
            raise
        raise ConfigurationError(
            f"the Spark Connect server or one of its executors does not see {path.parent}. Use a folder that "
            "this process, the server and all executors mount under the same path"
        ) from error
