"""The part of the sink that Spark's tasks run: they write rows to files, which the driver commits.

A task reports its files as its result. So files of a task that died, or that Spark ran twice, are never in the table.
"""

import pickle
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

from marshal_dagster.sinks.caching import without_partitions
from marshal_dagster.sinks.iceberg.arrays import arrow_field, converted, first_problem, problem
from marshal_dagster.sinks.iceberg.parquet_files import FILE_PREFIX, FileWriter, WrittenFile, check_properties
from marshal_dagster.sinks.iceberg.partitions import PartitionColumn, partition_columns, split
from marshal_dagster.sinks.rejected_rows import RejectedRow
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.arrow_tasks import limited_batches, sparing_next_tasks
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.task_secret import TaskSecret, task_secret

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.types import NestedField
    from pyspark.sql import DataFrame

_ROWS_AT_ONCE: Final = 2_000
_RESULTS: Final = "result binary"
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What tasks need to write the rows of one batch. It can be pickled.

    Raises:
        ConfigurationError: The table's properties do not allow to write Parquet files.
    """

    metadata: "TableMetadata"
    io_properties: Mapping[str, Any] = field(repr=False)
    """The settings of the storage, with the credentials that the catalog has given out."""
    attempt: str
    columns: "Sequence[NestedField | None]"
    """The table's column of each column of the frame."""
    case_sensitive: bool
    source_field: "NestedField | None" = None
    """The table's column for the source of each row, None if it has none."""
    sources: Mapping[int, str] = field(default_factory=dict)
    """The source of the rows of each Kafka partition."""

    def written_fields(self) -> "list[NestedField]":
        """Return the table's columns that files have."""
        return [found for found in (*self.columns, self.source_field) if found is not None]

    def __post_init__(self) -> None:
        """Check the table's properties, so that an error comes before the rows are computed."""
        check_properties(self.metadata)


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What one task has written."""

    files: tuple[WrittenFile, ...]
    counts: Mapping[int | None, int]
    """The number of rows, by Kafka partition."""
    rejected: RejectedRow | None = None
    """The first row that the table cannot store. Then the task has stopped."""


def run_tasks(frame: "DataFrame", done: Sequence[int], plan: WritePlan) -> list[TaskResult]:
    """Compute the rows of a frame in tasks that write them to files.

    Args:
        frame: The frame.
        done: The partitions whose rows are left out.
        plan: What the tasks need.

    Returns:
        The results of the tasks that count.

    Raises:
        Exception: Spark's error for a task that failed or died, as it comes from the user's code too.
    """
    spark, names = frame.sparkSession, frame.schema.names
    has_offset = OFFSET_COLUMN in names
    rows = without_partitions(frame, done).select(
        f.col(PARTITION_COLUMN).cast("bigint").alias("partition"),
        (f.col(OFFSET_COLUMN) if has_offset else f.lit(None)).cast("bigint").alias("offset"),
        *(f.col(quoted(name)).alias(f"field_{number}") for number, name in enumerate(names)),
    )
    with task_secret(spark, pickle.dumps(plan)) as secret, limited_batches(spark, _ROWS_AT_ONCE):
        found = rows.mapInArrow(WriteTask(secret), _RESULTS).collect()
    return [cast("TaskResult", pickle.loads(row[0])) for row in found]  # noqa: S301 - of our own tasks


@dataclass(frozen=True, slots=True)
class WriteTask:
    """The function that each Spark task runs on its rows. It yields one result."""

    plan: TaskSecret

    def __call__(self, batches: "Iterable[RecordBatch]") -> "Iterator[RecordBatch]":
        """Write the rows."""
        import pyarrow as pa

        plan: WritePlan = pickle.loads(self.plan.value())  # noqa: S301 - the driver's own bytes
        with sparing_next_tasks():
            result = write_batches(plan, batches)
        if result is not None:
            yield pa.RecordBatch.from_arrays([pa.array([pickle.dumps(result)], pa.binary())], ["result"])


def write_batches(plan: WritePlan, batches: "Iterable[RecordBatch]") -> TaskResult | None:
    """Write the rows of one task: Kafka partition, offset, and the columns of the frame. Return None without rows."""
    from pyiceberg.io import load_file_io

    filled = (batch for batch in batches if len(batch))
    first = next(filled, None)
    if first is None:
        return None
    name = f"{FILE_PREFIX}{plan.attempt}-{secrets.token_hex(_NUMBER_BYTES)}"
    io = load_file_io(dict(plan.io_properties), plan.metadata.location)
    writer = FileWriter(plan.metadata, io, name)
    columns = partition_columns(plan.metadata.spec(), plan.metadata.schema())
    counts: Counter[int | None] = Counter()
    files: list[WrittenFile] = []
    rejected = None
    for batch in chain([first], filled):
        partitions, offsets, *fields = batch.columns
        for entry in partitions.value_counts():
            counts[entry["values"].as_py()] += entry["counts"].as_py()
        if None in counts:
            break
        arrays = _table_arrays(plan, fields, partitions)
        rejected = _rejected(plan, columns, arrays, partitions, offsets)
        if rejected is not None:
            break
        rows = _table_rows(plan, arrays)
        for kafka_partition, key, indexes in split(columns, arrays, partitions.to_numpy()):
            files.extend(writer.write(kafka_partition, key, rows if indexes is None else rows.take(indexes)))
    files.extend(writer.close())  # also if a row is refused, so that the driver removes them
    return TaskResult(tuple(files), counts, rejected)


def _table_arrays(plan: WritePlan, fields: "Sequence[Array]", partitions: "Array") -> "dict[int, Array]":
    """Return the table's columns by field id."""
    arrays = {
        field.field_id: converted(array, field.field_type, case_sensitive=plan.case_sensitive)
        for field, array in zip(plan.columns, fields, strict=True)
        if field is not None
    }
    if plan.source_field is not None:
        arrays[plan.source_field.field_id] = _sources(plan.sources, partitions)
    return arrays


def _sources(sources: Mapping[int, str], partitions: "Array") -> "Array":
    """Return the source of each row."""
    import pyarrow as pa

    encoded = partitions.dictionary_encode()
    return pa.array([sources.get(key, "") for key in encoded.dictionary.to_pylist()], pa.string()).take(encoded.indices)


def _rejected(
    plan: WritePlan,
    columns: "Sequence[PartitionColumn]",
    arrays: "Mapping[int, Array]",
    partitions: "Array",
    offsets: "Array",
) -> RejectedRow | None:
    """Return the first row with a value that the table cannot store, of the first column that has one."""
    for wanted in plan.columns:
        if wanted is None or (reason := problem(arrays[wanted.field_id], wanted)) is None:
            continue
        at = first_problem(arrays[wanted.field_id], wanted, reason)
        return RejectedRow(partitions[at].as_py(), offsets[at].as_py(), wanted.name, reason)
    for column in columns:
        found = column.first_problem(arrays)
        if found is not None:
            name = plan.metadata.schema().find_field(column.path[0]).name
            return RejectedRow(partitions[found].as_py(), offsets[found].as_py(), name, column.reason)
    return None


def _table_rows(plan: WritePlan, arrays: "Mapping[int, Array]") -> "RecordBatch":
    """Return the columns in the order of the table."""
    import pyarrow as pa

    fields = [field for field in plan.metadata.schema().fields if field.field_id in arrays]
    return pa.RecordBatch.from_arrays(
        [arrays[field.field_id] for field in fields],
        schema=pa.schema([arrow_field(field, arrays[field.field_id].type) for field in fields]),
    )
