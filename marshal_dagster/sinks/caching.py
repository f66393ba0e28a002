"""Which rows a sink writes, and that the executors keep them while it does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from marshal_dagster.sinks.sink import PARTITION_COLUMN
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def without_partitions(frame: "DataFrame", done: Sequence[int]) -> "DataFrame":
    """Leave out the rows of the partitions `done`; those without a partition stay, to be found and refused."""
    if not done:
        return frame
    partition = f.col(PARTITION_COLUMN)
    return frame.where(partition.isNull() | ~partition.isin(list(done)))


@contextmanager
def persisted(frame: "DataFrame") -> Iterator["DataFrame"]:
    """Have the executors keep the rows of `frame`, once they are evaluated, until the block ends.

    After an interrupt they stay for as long as the session: the JVM is left alone then, since it would answer only when
    what it is at has ended.
    """
    from pyspark import StorageLevel

    rows = frame.persist(StorageLevel.MEMORY_AND_DISK)
    with unless_interrupted(rows.unpersist):
        yield rows


@contextmanager
def unless_interrupted(clean_up: Callable[[], object]) -> Iterator[None]:
    """Clean up at the end of the block, and after an error, but not after an interrupt."""
    try:
        yield
    except Exception:
        clean_up()
        raise
    else:
        clean_up()
