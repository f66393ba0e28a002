"""What Spark's tasks share that get their rows as Arrow batches: the size of a batch, and errors for the driver.

A task that raises loses its class on the way to the driver. So a task returns a known error as text, and the driver
raises it again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from marshal_dagster import errors
from marshal_dagster.errors import MarshalError
from marshal_dagster.spark.interrupts import unless_interrupted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BATCH_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_NO_LIMIT: Final = 0


@contextmanager
def limited_batches(spark: "SparkSession", most_rows: int) -> Iterator[None]:
    """Limit the rows of an Arrow batch during the block, so that a batch of large rows fits into memory.

    Args:
        spark: The session.
        most_rows: The maximum number of rows of a batch. A smaller limit of the session stays.
    """
    before = int(spark.conf.get(_BATCH_ROWS) or _NO_LIMIT)
    if 0 < before <= most_rows:
        yield
        return
    spark.conf.set(_BATCH_ROWS, most_rows)
    with unless_interrupted(lambda: spark.conf.set(_BATCH_ROWS, before)):
        yield


def error_as_text(error: MarshalError) -> str:
    """Return the name of the error's public class, a blank, and its message."""
    kind = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    return f"{kind.__name__} {error}"


def error_from_text(text: str) -> MarshalError:
    """Return the error that `error_as_text` has made a text of."""
    name, _, message = text.partition(" ")
    error: MarshalError = getattr(errors, name)(message)
    return error
