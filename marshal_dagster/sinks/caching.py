"""Helpers with which sinks select the rows to write and persist them on the executors during a write."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from marshal_dagster.sinks.sink import PARTITION_COLUMN
from marshal_dagster.spark.interrupts import unless_interrupted
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def without_partitions(frame: "DataFrame", done: Sequence[int]) -> "DataFrame":
    """Return the rows except those of the partitions `done`; rows without a partition stay, to be refused later."""
    if not done:
        return frame
    partition = f.col(PARTITION_COLUMN)
    return frame.where(partition.isNull() | ~partition.isin(list(done)))


@contextmanager
def persisted(frame: "DataFrame") -> Iterator["DataFrame"]:
    """Persist the rows of `frame` on the executors until the block ends.

    After an interrupt they stay persisted until the session ends: the JVM would answer `unpersist` only after its
    current job, so it is not called.
    """
    from pyspark import StorageLevel

    rows = frame.persist(StorageLevel.MEMORY_AND_DISK)
    with unless_interrupted(rows.unpersist):
        yield rows
