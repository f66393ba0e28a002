"""Parquet files of an Iceberg table, which one task writes: one Kafka partition and one partition of the table each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.iceberg.partitions import Key
from marshal_dagster.sinks.iceberg.sort_order import file_order

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema
    from pyiceberg.io import FileIO
    from pyiceberg.io.pyarrow import StatisticsCollector
    from pyiceberg.table.metadata import TableMetadata

FILE_PREFIX: Final = "marshal-"
_MOST_OPEN: Final = 100
_MOST_BUFFERED_BYTES: Final = 64 * 1024 * 1024
"""The rows that a task holds in memory. Then the largest part of them is written as a row group."""
_ROW_GROUP_ROWS: Final = 1_048_576
_CODECS: Final = {"uncompressed": "none"}
_CODECS_WITH_LEVELS: Final = ("zstd", "gzip", "brotli")
_FLOATING: Final = ("FLOAT", "DOUBLE")


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that a task has written, with the values of Iceberg's `DataFile`."""

    kafka_partition: int
    path: str
    size: int
    key: Key
    spec_id: int
    statistics: Mapping[str, Any]
    """The numbers of records, values, nulls and NaNs, and the bounds of each column."""
    sort_order_id: int | None = None
    """The id of the table's sort order in which the rows are, None if they are in no order."""

    @property
    def records(self) -> int:
        """The number of rows."""
        return int(self.statistics["record_count"])


@dataclass(slots=True)
class _OpenFile:
    path: str
    output: Any
    stream: Any
    writer: Any
    buffered: "list[RecordBatch]" = field(default_factory=list)
    buffered_bytes: int = 0
    buffered_rows: int = 0
    nans: dict[int, int] = field(default_factory=dict)


class FileWriter:
    """Writes rows to files, several at the same time, with a limit on the memory of all of them."""

    def __init__(self, metadata: "TableMetadata", io: "FileIO", name: str) -> None:
        """Prepare to write.

        Args:
            metadata: The metadata of the table.
            io: Access to its storage.
            name: The beginning of the names of the files, of the attempt and the task.
        """
        from pyiceberg.table.locations import load_location_provider

        self._metadata = metadata
        self._io = io
        self._name = name
        self._locations = load_location_provider(metadata.location, metadata.properties)
        self._target_bytes, self._row_group_rows = _limits(metadata.properties)
        self._order = file_order(metadata)
        self._open: dict[tuple[int, Key], _OpenFile] = {}
        self._count = 0

    def write(self, kafka_partition: int, key: Key, rows: "RecordBatch") -> Iterator[WrittenFile]:
        """Add rows of one Kafka partition and one partition of the table; yield the files that became complete."""
        place = kafka_partition, key
        if place not in self._open:
            if len(self._open) >= _MOST_OPEN:
                yield self._closed(max(self._open, key=lambda other: self._open[other].buffered_bytes))
            self._open[place] = self._opened(rows.schema)
        file = self._open[place]
        file.buffered.append(rows)
        file.buffered_bytes += rows.nbytes
        file.buffered_rows += len(rows)
        if self._order is not None:
            yield from self._closed_sorted(place)
            return
        if file.buffered_rows >= self._row_group_rows:
            self._flush(file)
        while sum(other.buffered_bytes for other in self._open.values()) > _MOST_BUFFERED_BYTES:
            self._flush(max(self._open.values(), key=lambda other: other.buffered_bytes))
        if file.stream.tell() >= self._target_bytes:
            yield self._closed(place)

    def close(self) -> Iterator[WrittenFile]:
        """Complete all files and yield them."""
        while self._open:
            yield self._closed(next(iter(self._open)))

    def _closed_sorted(self, place: tuple[int, Key]) -> Iterator[WrittenFile]:
        """Complete a file that is large enough, and others while too many rows are in memory.

        A file is sorted as a whole, so all its rows are in memory until then.
        """
        if self._open[place].buffered_bytes >= self._target_bytes:
            yield self._closed(place)
        while sum(other.buffered_bytes for other in self._open.values()) > _MOST_BUFFERED_BYTES:
            yield self._closed(max(self._open, key=lambda other: self._open[other].buffered_bytes))

    def _opened(self, schema: "Schema") -> _OpenFile:
        import pyarrow.parquet as pq

        path = self._locations.new_data_location(f"{self._name}-{self._count:05}.parquet")
        self._count += 1
        output = self._io.new_output(path)
        stream = output.create()
        return _OpenFile(path, output, stream, pq.ParquetWriter(stream, schema, **_options(self._metadata.properties)))

    def _flush(self, file: _OpenFile) -> None:
        """Write the rows in memory as a row group."""
        import pyarrow as pa

        if not file.buffered:
            return
        rows = pa.Table.from_batches(file.buffered)
        for column in rows.schema:
            if pa.types.is_floating(column.type):
                _count_nans(file, column, rows[column.name])
        if self._order is not None:
            rows = self._order.sort(rows)
        file.writer.write_table(rows, row_group_size=self._row_group_rows)
        file.buffered, file.buffered_bytes, file.buffered_rows = [], 0, 0

    def _closed(self, place: tuple[int, Key]) -> WrittenFile:
        file = self._open.pop(place)
        self._flush(file)
        file.writer.close()
        file.stream.close()
        statistics = _statistics(file.writer.writer.metadata, self._metadata)
        statistics["nan_value_counts"] = file.nans
        size = len(self._io.new_input(file.path))
        order_id = None if self._order is None else self._order.order_id
        return WrittenFile(place[0], file.path, size, place[1], self._metadata.default_spec_id, statistics, order_id)


def _statistics(footer: Any, table: "TableMetadata") -> dict[str, Any]:  # noqa: ANN401 - a FileMetaData
    """Return Iceberg's statistics of a file with this footer. Bounds that do not hold for all rows are left out."""
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.schema import sanitize_column_names

    schema = table.schema()
    mapping = parquet_path_to_id_mapping(sanitize_column_names(schema))
    plan = compute_statistics_plan(schema, table.properties)
    try:
        found = data_file_statistics_from_parquet_metadata(footer, plan, mapping)
        for path in _without_bounds(footer):
            found.column_aggregates.pop(mapping[path], None)
        return found.to_serialized_dict()
    except (OverflowError, UnicodeEncodeError):  # a date that Python does not have, or a bound that is not UTF-8
        return data_file_statistics_from_parquet_metadata(footer, _only_counts(plan), mapping).to_serialized_dict()


def _only_counts(plan: "Mapping[int, StatisticsCollector]") -> "dict[int, StatisticsCollector]":
    """Return a plan of statistics without bounds."""
    from pyiceberg.io.pyarrow import MetricModeTypes, MetricsMode

    counts = MetricsMode(MetricModeTypes.COUNTS)
    has_bounds = (MetricModeTypes.TRUNCATE, MetricModeTypes.FULL)
    return {
        key: replace(column, mode=counts) if column.mode.type in has_bounds else column for key, column in plan.items()
    }


def _without_bounds(footer: Any) -> set[str]:  # noqa: ANN401 - a FileMetaData
    """Return the columns of which a row group has values but no bounds, as Parquet leaves out long ones."""
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(footer.num_columns)]
    return {column.path_in_schema for column in columns if _lacks_bounds(column)}


def _lacks_bounds(column: Any) -> bool:  # noqa: ANN401 - a ColumnChunkMetaData
    statistics = column.statistics
    if statistics is None:
        return True
    if statistics.has_min_max or column.physical_type in _FLOATING:
        return False  # NaNs have no bounds, but they are counted
    return not statistics.has_null_count or bool(column.num_values > statistics.null_count)


def _count_nans(file: _OpenFile, column: Any, values: Any) -> None:  # noqa: ANN401 - a field, and its values
    import pyarrow.compute as pc

    number = int(column.metadata[b"PARQUET:field_id"])
    file.nans[number] = file.nans.get(number, 0) + (pc.sum(pc.is_nan(values)).as_py() or 0)


def check_properties(table: "TableMetadata") -> None:
    """Write a small file in memory; raise `ConfigurationError` if the table's properties do not allow that."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.table({"value": pa.array([0])})
    try:
        _limits(table.properties)
        with pq.ParquetWriter(pa.BufferOutputStream(), rows.schema, **_options(table.properties)) as writer:
            writer.write_table(rows)
    except (pa.ArrowException, OSError, OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"the properties of the Iceberg table at {table.location} do not allow pyarrow to write Parquet files: "
            f"{error}. Correct its properties write.parquet.* and write.target-file-size-bytes"
        ) from error


def _limits(properties: Mapping[str, str]) -> tuple[int, int]:
    """Return the bytes of a file, and the rows of a row group, after which the next one is begun."""
    target_bytes = int(properties.get("write.target-file-size-bytes", 512 * 1024 * 1024))
    return target_bytes, int(properties.get("write.parquet.row-group-limit", _ROW_GROUP_ROWS))


def _options(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the Parquet writer that the table's properties set."""
    codec = properties.get("write.parquet.compression-codec", "zstd").lower()
    level = properties.get("write.parquet.compression-level") if codec in _CODECS_WITH_LEVELS else None
    return {
        "compression": _CODECS.get(codec, codec),
        "compression_level": None if level is None else int(level),
        "data_page_size": int(properties.get("write.parquet.page-size-bytes", 1024 * 1024)),
        "dictionary_pagesize_limit": int(properties.get("write.parquet.dict-size-bytes", 2 * 1024 * 1024)),
        "store_decimal_as_integer": True,
    }


def data_files(files: Sequence[WrittenFile]) -> list[Any]:
    """Return Iceberg's entries of files."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    return [
        DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=file.path,
            file_format=FileFormat.PARQUET,
            partition=Record(*file.key),
            file_size_in_bytes=file.size,
            sort_order_id=file.sort_order_id,
            spec_id=file.spec_id,
            equality_ids=None,
            key_metadata=None,
            **file.statistics,
        )
        for file in files
    ]
