"""A frame's rows as the records of a topic, in the order of the messages that they come from."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks.caching import persisted, without_partitions
from marshal_dagster.sinks.rejected_rows import RejectedRow, text_check
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN
from marshal_dagster.spark.column_names import check_names
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row
    from pyspark.sql.types import StructType

VALUE, KEY, HEADERS, TIMESTAMP, OUTPUT_PARTITION = "value", "key", "headers", "timestamp", "output_partition"
_TYPES: Final = {
    VALUE: ("string", "binary"),
    KEY: ("string", "binary"),
    HEADERS: ("array<struct<key:string,value:binary>>",),
    TIMESTAMP: ("timestamp",),
    OUTPUT_PARTITION: ("int",),
}
_BYTES_AT_ONCE: Final = 8_000_000
_ROW_BYTES: Final = 50
_SEQUENCE = "marshal_sequence"


@dataclass(frozen=True, slots=True)
class Record:
    """One record to be written, with the place of the message that it comes from."""

    source_partition: int
    source_offset: int | None
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] | None = None
    timestamp_ms: int | None = None
    partition: int | None = None


def check_record_columns(schema: "StructType", topic: str, *, case_sensitive: bool = False) -> None:
    """Raise `ConfigurationError` unless rows of `schema` are records of `topic`, names compared as the session does."""
    check_names(schema.names, (*_TYPES, "topic"), case_sensitive=case_sensitive)
    types = {column.name: column.dataType.simpleString() for column in schema.fields}
    if VALUE not in types:
        raise ConfigurationError(f"the result has no column {VALUE!r}, which is what a record of {topic} holds")
    for name, wanted in _TYPES.items():
        if types.get(name, wanted[0]) not in wanted:
            raise ConfigurationError(
                f"the result's column {name!r} is of type {types[name]}; a record of {topic} takes "
                f"{' or '.join(wanted)}: cast it"
            )
    if "topic" in types:
        raise ConfigurationError(
            f"the result has a column 'topic'; this sink writes to {topic} alone: drop the column, or use a sink for "
            "each topic"
        )
    others = sorted(types.keys() - _TYPES.keys() - {PARTITION_COLUMN, OFFSET_COLUMN})
    if others:
        raise ConfigurationError(
            f"the result's columns {', '.join(others)} are no part of a record of {topic}: put them into {VALUE!r}, by "
            "to_json(struct(...)) say, or drop them"
        )


@dataclass(frozen=True, slots=True)
class FrameRecords:
    """An evaluated frame, which executors keep."""

    counts: Mapping[int | None, int]
    rejected: RejectedRow | None
    """The first row with a header whose name is not UTF-8."""
    _rows: "DataFrame"
    _size: int

    def __iter__(self) -> Iterator[Record]:
        """Yield all records by partition and offset; only some megabytes of them are in this process at a time."""
        pieces = max(1, math.ceil(self._size / _BYTES_AT_ONCE))
        order = [PARTITION_COLUMN, OFFSET_COLUMN, _SEQUENCE]
        spread = self._rows.repartitionByRange(pieces, *order) if pieces > 1 else self._rows.coalesce(1)
        ordered = spread.sortWithinPartitions(*order).drop(_SEQUENCE)
        rows: Iterable[Row] = ordered.toLocalIterator(prefetchPartitions=True) if pieces > 1 else ordered.collect()
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


@contextmanager
def evaluated(frame: "DataFrame", done: Sequence[int]) -> Iterator[FrameRecords]:
    """Evaluate `frame`, but for the rows of the partitions `done`, once and on all executors, and give its records."""
    wanted = without_partitions(frame, done)
    columns = _columns(frame.columns)
    size = f.lit(_ROW_BYTES) + _bytes_of(f.col(VALUE)) + _bytes_of(f.col(KEY))
    in_headers = f.aggregate(
        HEADERS, f.lit(0), lambda total, header: total + _bytes_of(header["key"]) + _bytes_of(header["value"])
    )
    size = size + f.coalesce(in_headers, f.lit(0))
    with persisted(wanted.select(*columns, f.monotonically_increasing_id().alias(_SEQUENCE))) as rows:
        # Keys and values are bytes by now, so the texts are the names of headers.
        texts = text_check(rows.schema, refuse_nul=False)
        totals = rows.groupBy(PARTITION_COLUMN).agg(f.count("*"), f.sum(size), f.min(texts.problem)).collect()
        yield FrameRecords(
            counts={row[0]: row[1] for row in totals},
            rejected=texts.first((row[0], row[3]) for row in totals),
            _rows=rows,
            _size=sum(row[2] for row in totals),
        )


def _bytes_of(column: "Column") -> "Column":
    return f.coalesce(f.octet_length(column), f.lit(0))


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


def _header(header: "Row", partition: int | None, offset: int | None) -> tuple[str, bytes | None]:
    """Return a header's name and value. Raises `SinkRejectedError` for a name that a header cannot have."""
    if header[0] is None:
        raise SinkRejectedError(
            f"column {HEADERS!r}, partition {partition}, offset {offset}: a header without a name, which a Kafka "
            "record cannot have: its range was not written; give each header a name"
        )
    return header[0], _bytes(header[1])


def _columns(names: Sequence[str]) -> "list[Column]":

    def given(name: str, kind: str) -> "Column":
        column = f.col(name) if name in names else f.lit(None)
        return column.cast(kind).alias(name)

    milliseconds = f.unix_millis(f.col(TIMESTAMP)) if TIMESTAMP in names else f.lit(None).cast("bigint")
    return [
        given(PARTITION_COLUMN, "bigint"),  # not int: a number that was cut could be that of another partition
        given(OFFSET_COLUMN, "bigint"),
        given(VALUE, "binary"),
        given(KEY, "binary"),
        given(HEADERS, "array<struct<key:string,value:binary>>"),
        milliseconds.alias(TIMESTAMP),
        given(OUTPUT_PARTITION, "int"),
    ]
