"""Helpers with which sinks select the rows to write, persist them on the executors during a write, and order them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN
from marshal_dagster.spark.interrupts import unless_interrupted
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COUNTING: Final = {
    "spark.sql.inMemoryColumnarStorage.compressed": "false",  # the columns are hardly smaller, and take longer
    "spark.sql.adaptive.enabled": "false",  # with it Spark runs three jobs instead of one
    "spark.sql.shuffle.partitions": "1",
}
"""The settings of a session while persisted rows are evaluated and counted; the user's own plan was made before."""

_SEQUENCE: Final = "marshal_sequence"


def without_partitions(frame: "DataFrame", done: Sequence[int]) -> "DataFrame":
    """Return the rows except those of the partitions `done`; rows without a partition stay, to be refused later."""
    if not done:
        return frame
    partition = f.col(PARTITION_COLUMN)
    return frame.where(partition.isNull() | ~partition.isin(list(done)))


def numbered(frame: "DataFrame") -> "tuple[DataFrame, list[str]]":
    """Return the rows with a number that keeps those of a message in their order, and the columns to sort by."""
    number, taken = _SEQUENCE, {name.casefold() for name in frame.columns}
    while number in taken:
        number += "_"
    order = [name for name in (PARTITION_COLUMN, OFFSET_COLUMN) if name in frame.columns]
    return frame.withColumn(number, f.monotonically_increasing_id()), [*order, number]


def in_order(frame: "DataFrame", pieces: int) -> "DataFrame":
    """Return the rows by source partition and offset, in `pieces` partitions of the frame of about the same size."""
    rows, order = numbered(frame)
    spread = rows.repartitionByRange(pieces, *order) if pieces > 1 else rows.coalesce(1)
    return spread.sortWithinPartitions(*order).drop(order[-1])


@contextmanager
def persisted(frame: "DataFrame") -> Iterator["DataFrame"]:
    """Persist the rows of `frame` on the executors until the block ends.

    A frame that its user has persisted stays persisted as it is, also after the block. After an interrupt the rows stay
    persisted until the session ends: the JVM would answer `unpersist` only after its current job, so it is not called.
    """
    from pyspark import StorageLevel

    level = frame.storageLevel
    if level.useMemory or level.useDisk or level.useOffHeap:
        yield frame
        return
    rows = frame.persist(StorageLevel.MEMORY_AND_DISK)
    with unless_interrupted(rows.unpersist):
        yield rows
