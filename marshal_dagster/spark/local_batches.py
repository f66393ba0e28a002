"""The rows of a frame as Arrow batches in this process, in place of rows that PySpark makes one by one.

PySpark itself passes Arrow batches to a process only all at once (`toArrow`). So this uses the parts of which it makes
`toArrow` and `toLocalIterator`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.spark import connect
from marshal_dagster.spark.arrow_tasks import limited_batches
from marshal_dagster.spark.conversion_settings import settings_of
from marshal_dagster.spark.interrupts import changed_settings, unless_interrupted

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession

_OF_TASKS: Final = "spark.sql."
_LARGE_TYPES: Final = "spark.sql.execution.arrow.useLargeVarTypes"


def local_batches(frame: "DataFrame", most_rows: int, *, at_once: bool) -> "Iterator[RecordBatch] | None":
    """Return the rows of a frame as Arrow batches, in the order of its partitions.

    Without `at_once` Spark computes one partition after the other, and the next one while this process reads. The JVM
    of the driver has the rows of two partitions then, and this process one batch.

    Args:
        frame: The frame. Its columns have simple types.
        most_rows: The maximum number of rows of a batch. A smaller limit of the session stays.
        at_once: Whether one Spark job computes all partitions; for few rows.

    Returns:
        The batches, or None if this session or this process cannot pass them.
    """
    if find_spec("pyarrow") is None:
        return None
    if connect.is_connect(frame.sparkSession):
        return _of_server(frame)
    return _of_jvm(frame, most_rows, at_once=at_once)


def _of_jvm(frame: "DataFrame", most_rows: int, *, at_once: bool) -> "Iterator[RecordBatch] | None":
    import pyarrow as pa
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer
    from pyspark.sql.pandas.types import to_arrow_schema

    spark = frame.sparkSession
    types = {_LARGE_TYPES: "false"} if spark.conf.isModifiable(_LARGE_TYPES) else {}  # Spark 3.5 has no such setting
    with _known_settings(spark):
        try:
            with limited_batches(spark, most_rows, is_size_known=True), changed_settings(spark, types):
                serialized = frame._jdf.toArrowBatchRdd().toJavaRDD()  # noqa: SLF001 - there is no public name
        except Py4JJavaError:
            raise  # the JVM has the method, and the plan has failed
        except Py4JError:
            return None
        rows: RDD[bytes] = RDD(serialized, spark.sparkContext, NoOpSerializer())
        pieces = rows.collect() if at_once else rows.toLocalIterator(prefetchPartitions=True)
    schema = to_arrow_schema(frame.schema)
    return (pa.ipc.read_record_batch(pa.py_buffer(piece), schema) for piece in pieces)


@contextmanager
def _known_settings(spark: "SparkSession") -> Iterator[None]:
    """Let tasks know the session's settings, as those of a frame's own actions do.

    Spark passes them as properties of the thread that starts a job. A thread that is made in the block inherits them.
    """
    context = spark.sparkContext
    settings = {name: value for name, value in settings_of(spark).items() if name.startswith(_OF_TASKS)}
    before = {name: context.getLocalProperty(name) for name in settings}

    def set_all(properties: Mapping[str, Any]) -> None:
        for name, value in properties.items():
            context.setLocalProperty(name, value)

    set_all(settings)
    with unless_interrupted(lambda: set_all(before)):
        yield


def _of_server(frame: Any) -> "Iterator[RecordBatch] | None":  # noqa: ANN401 - a frame of Spark Connect
    """Return the batches as the server sends them. Their size is a setting of the server."""
    client, plan = frame.sparkSession.client, frame._plan  # noqa: SLF001 - there is no public name
    if not hasattr(client, "to_table_as_iterator"):
        return None
    return _batches(client.to_table_as_iterator(plan.to_proto(client), plan.observations))


def _batches(parts: Iterator[Any]) -> "Iterator[RecordBatch]":
    """Yield the batches of tables. The other parts are the schema."""
    for part in parts:
        if hasattr(part, "to_batches"):
            yield from part.to_batches()
