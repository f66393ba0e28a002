"""Carry a secret to the Python tasks of a Spark job, apart from the function that they run.

Spark stores a function that its tasks run in plans, and servers may log it. So the secret is split into two shares,
each of which is random without the other. The function contains one. Spark's broadcast has the other one, or on a Spark
Connect server a file of the session.
"""

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marshal_dagster.spark import connect
from marshal_dagster.spark.interrupts import unless_interrupted

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class TaskSecret:
    """A secret whose text only a task of the session can put together. It can be pickled for that task."""

    _share: bytes
    _other: "Broadcast[bytes] | str"
    """The broadcast with the other share, or the name of the session's file with it."""

    def value(self) -> bytes:
        """Return the secret. Only a task of the session may call this."""
        if not isinstance(self._other, str):
            return _xor(self._share, self._other.value)
        from pyspark import SparkFiles

        return _xor(self._share, Path(SparkFiles.get(self._other)).read_bytes())


@contextmanager
def task_secret(spark: "SparkSession", secret: bytes) -> Iterator[TaskSecret]:
    """Carry a secret to the tasks of jobs that run inside the block.

    After the block the broadcast is deleted. The file on a Connect server stays until the session ends.

    Args:
        spark: The session.
        secret: The secret.

    Yields:
        The value with which a task gets the secret.
    """
    share = secrets.token_bytes(len(secret))
    other = _xor(share, secret)
    if connect.is_connect(spark):
        yield TaskSecret(share, _add_file(spark, other))
        return
    broadcast = spark.sparkContext.broadcast(other)
    with unless_interrupted(broadcast.destroy):
        yield TaskSecret(share, broadcast)


def _add_file(spark: "SparkSession", content: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"marshal-{secrets.token_hex(16)}")
        path.write_bytes(content)
        spark.addArtifacts(str(path), file=True)
    return path.name


def _xor(left: bytes, right: bytes) -> bytes:
    return (int.from_bytes(left) ^ int.from_bytes(right)).to_bytes(len(left))
