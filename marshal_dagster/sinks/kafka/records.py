"""Converts the rows of a DataFrame to Kafka records, in the order of their source messages, for `kafka.sink`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks.caching import COUNTING, in_order, numbered, persisted, without_partitions
from marshal_dagster.sinks.rejected_rows import RejectedRow, text_check
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN
from marshal_dagster.spark.column_names import check_names
from marshal_dagster.spark.interrupts import changed_settings
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.local_batches import local_batches

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import Column, DataFrame, Row, SparkSession
    from pyspark.sql.types import StructType

VALUE, KEY, HEADERS, TIMESTAMP, OUTPUT_PARTITION = "value", "key", "headers", "timestamp", "output_partition"
_TYPES: Final = {
    VALUE: ("string", "binary"),
    KEY: ("string", "binary"),
    HEADERS: ("array<struct<key:string,value:binary>>",),
    TIMESTAMP: ("timestamp",),
    OUTPUT_PARTITION: ("int",),
}
REPLACED_TIMES: Final = {
    0: "and for 0 the client sends the current time",
    -1: "and Kafka stores a record with the time -1 as one without a time",
}
_RECORD: Final = (PARTITION_COLUMN, OFFSET_COLUMN, VALUE, KEY, HEADERS, TIMESTAMP, OUTPUT_PARTITION)
_BYTES_AT_ONCE: Final = 8_000_000
_ROW_BYTES: Final = 50
_HEADER_BYTES: Final = 16
"""What Arrow stores for each header, besides its name and value."""
_TASK_BYTES: Final = 8_000_000
"""The minimum size of the rows of a task, because a task starts and connects in the time in which it sends so much."""
_TASK_RANGES: Final = 4
"""The maximum number of ranges of a task with few rows."""
_LARGE: Final = (2_000, 16_000, 128_000)
"""The sizes in bytes above which the rows are summed up."""
_HELD_BY: Final = "marshal_held_by"
_NUL: Final = "a header's name has a NUL character (U+0000), at which the client would cut it off"


@dataclass(frozen=True, slots=True)
class Record:
    """A record to be written, with partition and offset of its source message."""

    source_partition: int
    source_offset: int | None
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] | None = None
    timestamp_ms: int | None = None
    partition: int | None = None

    @property
    def problem(self) -> str | None:
        """Why the client would send another record than this one; None if it sends this one."""
        if self.partition is not None and self.partition < 0:
            return f"column {OUTPUT_PARTITION!r} is {self.partition}, which is not the number of a partition"
        if self.timestamp_ms in REPLACED_TIMES:
            return f"column {TIMESTAMP!r} is {self.timestamp_ms} ms after 1970, {REPLACED_TIMES[self.timestamp_ms]}"
        return None


def check_record_columns(schema: "StructType", topic: str, *, case_sensitive: bool = False) -> None:
    """Raise `ConfigurationError` unless rows of `schema` can be written as records of `topic`.

    `case_sensitive` is the session's `spark.sql.caseSensitive`, by which column names are compared.
    """
    check_names(schema.names, (*_TYPES, "topic"), case_sensitive=case_sensitive)
    types = {column.name: column.dataType.simpleString() for column in schema.fields}
    if VALUE not in types:
        raise ConfigurationError(
            f"the result has no column {VALUE!r}, which a record of topic {topic} needs. Add it as a string or binary"
        )
    for name, wanted in _TYPES.items():
        if types.get(name, wanted[0]) not in wanted:
            raise ConfigurationError(
                f"the result's column {name!r} has type {types[name]}, but a record of topic {topic} needs "
                f"{' or '.join(wanted)}. Cast the column"
            )
    if "topic" in types:
        raise ConfigurationError(
            f"the result has a column 'topic', but this sink writes only to topic {topic}. Drop the column, or use one "
            "sink for each topic"
        )
    others = sorted(types.keys() - _TYPES.keys() - {PARTITION_COLUMN, OFFSET_COLUMN})
    if others:
        raise ConfigurationError(
            f"the result's columns {', '.join(others)} are not part of a Kafka record of topic {topic}. Put them into "
            f"{VALUE!r}, for example with to_json(struct(...)), or drop them"
        )


@dataclass(frozen=True, slots=True)
class FrameRecords:
    """An evaluated frame whose rows are persisted on the executors."""

    counts: Mapping[int | None, int]
    """The number of rows, by source partition."""
    rejected: RejectedRow | None
    """The first row with a header whose name is not UTF-8 or has a NUL character, or None."""
    largest: int
    """The size of the largest row, in bytes."""
    larger: Mapping[int, int]
    """For some sizes the total size of all rows that are larger, in bytes."""
    rows: "DataFrame"
    """The rows, with those columns of a record that the user's frame has."""
    has_whole_partitions: bool
    """Whether all rows of each source partition are in one partition of `rows`."""
    _size: int

    def __iter__(self) -> Iterator[Record]:
        """Yield all records by source partition and offset; this process holds about 8 MB of them at a time."""
        pieces = self._in_order()
        nulls = [f.lit(None).alias(name) for name in _RECORD if name not in pieces.columns]
        ordered = pieces.select("*", *nulls).select(*_RECORD)
        at_once = self._pieces == 1
        rows: Iterable[Row] = ordered.collect() if at_once else ordered.toLocalIterator(prefetchPartitions=True)
        for partition, offset, value, key, headers, timestamp_ms, output_partition in rows:
            yield Record(
                partition,
                offset,
                _bytes(value),
                _bytes(key),
                None if headers is None else [_header(header, partition, offset) for header in headers],
                timestamp_ms,
                output_partition,
            )

    def batches(self) -> "Iterator[RecordBatch] | None":
        """Return all rows as Arrow batches, in the order of the records, or None if Spark cannot pass them."""
        return local_batches(self._in_order(), self.batch_rows(_BYTES_AT_ONCE), at_once=self._pieces == 1)

    @property
    def session(self) -> "SparkSession":
        """The session that has evaluated the frame."""
        return self.rows.sparkSession

    def batch_rows(self, most_bytes: int) -> int:
        """Return how many rows a batch may have, so that no choice of rows is larger than `most_bytes`.

        A batch has at most all rows above some size, and the others are of that size at most. So a few large rows make
        no batch small.
        """
        by_size = [(most_bytes - total) // size for size, total in self.larger.items()]
        return max(1, most_bytes // max(1, self.largest), *by_size)

    def of(self, partition: int) -> "FrameRecords":
        """Return the records of one source partition."""
        return replace(self, rows=self.rows.where(f.col(PARTITION_COLUMN) == partition))

    def as_they_are(self) -> "DataFrame":
        """Return the rows, not moved or sorted, in few partitions of the frame if there are few rows."""
        tasks = max(math.ceil(self._size / _TASK_BYTES), math.ceil(len(self.counts) / _TASK_RANGES))
        return self.rows.coalesce(max(1, tasks))

    def by_range(self, most_tasks: int) -> "DataFrame":
        """Return the rows, all of a source partition in one partition of the frame, in the order of their messages.

        Args:
            most_tasks: The maximum number of partitions of the frame.
        """
        tasks = max(1, min(most_tasks, len(self.counts)))
        salts = _salts(self.session, tasks)
        numbers = {
            partition: salts[index % len(salts)] for index, partition in enumerate(sorted(map(_number, self.counts)))
        }
        entries = [f.lit(value).cast("bigint") for entry in numbers.items() for value in entry]
        rows, order = numbered(self.rows)
        spread = rows.repartition(tasks, f.create_map(*entries)[f.col(PARTITION_COLUMN)])
        return spread.sortWithinPartitions(*order).drop(order[-1])

    @property
    def _pieces(self) -> int:
        return max(1, math.ceil(self._size / _BYTES_AT_ONCE))

    def _in_order(self) -> "DataFrame":
        return in_order(self.rows, self._pieces)


def _number(partition: int | None) -> int:
    """Return a partition that is not null; rows without a partition were refused before."""
    assert partition is not None  # noqa: S101
    return partition


def _salts(spark: "SparkSession", tasks: int) -> list[int]:
    """Return numbers such that `repartition(tasks, number)` puts each into a partition of its own."""
    number = f.col("id")
    rows = spark.range(16 * tasks).select(f.pmod(f.hash(number), f.lit(tasks)), number).collect()
    return list({row[0]: row[1] for row in rows}.values())


@contextmanager
def evaluated(frame: "DataFrame", done: Sequence[int]) -> Iterator[FrameRecords]:
    """Evaluate `frame` once on the executors, without the rows of the partitions `done`, and yield its records."""
    wanted = without_partitions(frame, done)
    with persisted(wanted.select(*_columns(frame.columns))) as rows:
        # Keys and values are binary here, so the only strings are names of headers.
        texts = text_check(rows.schema, nul=_NUL)
        size = _size(rows.columns)
        larger = [f.sum(f.when(size > above, size).otherwise(f.lit(0))) for above in _LARGE]
        counted = (
            rows.withColumn(_HELD_BY, f.spark_partition_id())
            .groupBy(PARTITION_COLUMN)
            .agg(
                f.count("*"), f.sum(size), f.min(texts.problem), f.max(size), f.min(_HELD_BY), f.max(_HELD_BY), *larger
            )
        )
        with changed_settings(rows.sparkSession, COUNTING):
            totals = counted.collect()
        yield FrameRecords(
            counts={row[0]: row[1] for row in totals},
            rejected=texts.first((row[0], row[3]) for row in totals),
            largest=max((row[4] for row in totals), default=0),
            larger={above: sum(row[7 + index] for row in totals) for index, above in enumerate(_LARGE)},
            rows=rows,
            has_whole_partitions=all(row[5] == row[6] for row in totals),
            _size=sum(row[2] for row in totals),
        )


def _size(names: Sequence[str]) -> "Column":
    """Return the size of a row in bytes."""
    size = f.lit(_ROW_BYTES) + _bytes_of(f.col(VALUE))
    if KEY in names:
        size = size + _bytes_of(f.col(KEY))
    if HEADERS in names:
        in_headers = f.aggregate(
            HEADERS,
            f.lit(0),
            lambda total, header: total + _HEADER_BYTES + _bytes_of(header["key"]) + _bytes_of(header["value"]),
        )
        size = size + f.coalesce(in_headers, f.lit(0))
    return size


def _bytes_of(column: "Column") -> "Column":
    return f.coalesce(f.octet_length(column), f.lit(0))


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


def _header(header: "Row", partition: int | None, offset: int | None) -> tuple[str, bytes | None]:
    """Return a header's name and value. Raises `SinkRejectedError` for a header without a name."""
    if header[0] is None:
        raise SinkRejectedError(
            f"column {HEADERS!r}, partition {partition}, offset {offset}: a header has no name, which Kafka does not "
            "allow, so its range was not written. Give each header a name"
        )
    return header[0], _bytes(header[1])


def _columns(names: Sequence[str]) -> "list[Column]":
    """Return those columns of a record that are among `names`, with the types of a record."""
    columns = {
        PARTITION_COLUMN: f.col(PARTITION_COLUMN).cast("bigint"),  # not int: it could be cut to another partition
        OFFSET_COLUMN: f.col(OFFSET_COLUMN).cast("bigint"),
        VALUE: f.col(VALUE).cast("binary"),
        KEY: f.col(KEY).cast("binary"),
        HEADERS: f.col(HEADERS).cast("array<struct<key:string,value:binary>>"),
        TIMESTAMP: f.unix_millis(f.col(TIMESTAMP)),
        OUTPUT_PARTITION: f.col(OUTPUT_PARTITION).cast("int"),
    }
    return [column.alias(name) for name, column in columns.items() if name in names]
