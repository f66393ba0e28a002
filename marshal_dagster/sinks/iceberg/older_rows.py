"""Rows of older generations in an Iceberg table: which files have them, and those files without them.

The sink stores in one column of each row which group and topic the row is of. With the columns `partition` and `offset`
that identifies the rows at some offsets, also after other engines have compacted the table.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.iceberg.arrays import arrow_field, converted
from marshal_dagster.sinks.iceberg.parquet_files import FileWriter, WrittenFile
from marshal_dagster.sinks.iceberg.partitions import partition_columns, split
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, Intervals

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyarrow import RecordBatch
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.types import IcebergType, NestedField

_REWRITTEN_TYPES: Final = (
    "boolean", "int", "long", "float", "double", "date", "timestamp", "timestamptz", "string", "binary",
)  # fmt: skip
_INTEGERS: Final = ("int", "long")


@dataclass(frozen=True, slots=True)
class SourceColumns:
    """The columns of a table that show which message a row is of."""

    source: "NestedField"
    """The column that the sink fills with the texts of `source_of`."""
    partition: "NestedField"
    offset: "NestedField"

    def with_bounds(self, properties: Mapping[str, str]) -> dict[str, str]:
        """Return a table's properties, with which files have whole bounds of these columns."""
        own = (self.source, self.partition, self.offset)
        return {**properties, **{f"write.metadata.metrics.column.{field.name}": "full" for field in own}}

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the columns. A column that is renamed keeps its id; one that is created again has another."""
        return self.source.field_id, self.partition.field_id, self.offset.field_id

    def are_in(self, file: WrittenFile) -> bool:
        """Return whether each row of a file of the sink has a value in each of these columns."""
        nulls = file.statistics["null_value_counts"]
        return all(nulls.get(field_id) == 0 for field_id in self.ids)


def source_columns(schema: "Schema", name: str, output: str) -> SourceColumns:
    """Return the columns of a table.

    Args:
        schema: The table's schema.
        name: The name of the sink's column.
        output: The name of the table, for errors.

    Raises:
        ConfigurationError: One of the columns is missing or has another type.
    """
    fields = {field.name: field for field in schema.fields}
    wanted = {name: ("string",), PARTITION_COLUMN: _INTEGERS, OFFSET_COLUMN: ("long",)}
    for column, kinds in wanted.items():
        found = fields.get(column)
        if found is None or str(found.field_type) not in kinds:
            state = "no such column" if found is None else f"the type {found.field_type}"
            raise ConfigurationError(
                f"{output}: source_column={name!r} needs the column {column!r} of type {' or '.join(kinds)}, but the "
                f"table has {state}. Add the column, or leave source_column out"
            )
    return SourceColumns(fields[name], fields[PARTITION_COLUMN], fields[OFFSET_COLUMN])


def source_of(range_: ClaimedRange) -> str:
    """Return the text that rows of a range have in the sink's column: group, topic and Kafka's id of the topic."""
    return json.dumps([range_.group, range_.topic, range_.data_topic_id], separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class OlderRows:
    """The rows of one source at some offsets."""

    columns: SourceColumns
    source: str
    offsets: Mapping[int, Intervals]
    """By partition, as separate intervals in ascending order."""

    def expression(self) -> "BooleanExpression":
        """Return a condition that holds for all of them, and for few others."""
        from pyiceberg import expressions

        e: Any = expressions  # whose hints do not allow names of columns
        columns = self.columns
        places = [
            e.And(
                e.EqualTo(columns.partition.name, partition),
                e.GreaterThanOrEqual(columns.offset.name, intervals[0][0]),
                e.LessThan(columns.offset.name, intervals[-1][1]),
            )
            for partition, intervals in self.offsets.items()
        ]
        own = e.EqualTo(columns.source.name, self.source)
        found: BooleanExpression = e.And(own, e.Or(*places) if len(places) > 1 else places[0])
        return found

    def are_all_of(self, file: "DataFile") -> bool:
        """Return whether a file's statistics show that it has no other rows."""
        bounds = [_bounds(file, field) for field in (self.columns.source, self.columns.partition, self.columns.offset)]
        if None in bounds:
            return False
        (source, other), (partition, last_partition), (first, last) = bounds  # type: ignore[misc]
        if source != self.source or other != self.source or partition != last_partition:
            return False
        return any(start <= first and last < end for start, end in self.offsets.get(partition, ()))

    def mask(self, batch: "RecordBatch") -> "NDArray[Any]":
        """Return for each row of a batch whether it is one of them."""
        import numpy as np
        import pyarrow.compute as pc

        columns = self.columns
        of_source = pc.equal(batch.column(columns.source.name), self.source).fill_null(False)  # noqa: FBT003
        found: NDArray[Any] = np.zeros(len(batch), dtype=bool)
        partitions, offsets = batch.column(columns.partition.name), batch.column(columns.offset.name)
        known = pc.and_(of_source, pc.and_(partitions.is_valid(), offsets.is_valid()))
        known = known.to_numpy(zero_copy_only=False)
        partitions = partitions.fill_null(0).to_numpy(zero_copy_only=False)
        offsets = offsets.fill_null(0).to_numpy(zero_copy_only=False)
        for partition, intervals in self.offsets.items():
            edges = np.array(intervals, dtype=np.int64).reshape(-1)
            inside = np.searchsorted(edges, offsets, side="right") % 2 == 1
            found |= known & (partitions == partition) & inside
        return found


@dataclass(frozen=True, slots=True)
class Replacement:
    """How a commit removes rows of older generations."""

    removed: "Sequence[DataFile]" = ()
    """The table's files that have some of them."""
    rewritten: Sequence[WrittenFile] = ()
    """New files with the other rows of those files."""


NOTHING_REPLACED: Final = Replacement()


def replacement(
    older: OlderRows, tasks: "Iterable[FileScanTask]", metadata: "TableMetadata", io: "FileIO", name: str
) -> Replacement:
    """Write the files that have rows of older generations again, without these rows.

    Args:
        older: The rows.
        tasks: The table's files that may have some of them.
        metadata: The table's metadata.
        io: Access to its storage.
        name: The beginning of the names of new files.

    Raises:
        SinkRejectedError: A file has other rows too, and a column whose values pyiceberg does not read exactly.
    """
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    writer = FileWriter(metadata, io, name)
    scan = ArrowScan(metadata, io, metadata.schema(), AlwaysTrue())
    removed: list[DataFile] = []
    rewritten: list[WrittenFile] = []
    for task in tasks:
        if older.are_all_of(task.file):
            removed.append(task.file)
            continue
        _check_exact(metadata, task.file.file_path)
        batches = list(scan.to_record_batches([task]))
        masks = [older.mask(batch) for batch in batches]
        if not any(mask.any() for mask in masks):
            continue
        removed.append(task.file)
        for batch, mask in zip(batches, masks, strict=True):
            rewritten.extend(_written(writer, metadata, batch.filter(_array(~mask))))
    rewritten.extend(writer.close())
    return Replacement(removed, rewritten)


def intervals_of(offsets: "Iterable[NDArray[Any]]") -> Intervals:
    """Return offsets as intervals."""
    import numpy as np

    found = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *offsets]))
    if not len(found):
        return ()
    ends = np.flatnonzero(np.diff(found) != 1)
    starts = [0, *(ends + 1)]
    return [(int(found[at]), int(found[end]) + 1) for at, end in zip(starts, [*ends, len(found) - 1], strict=True)]


def _written(writer: FileWriter, metadata: "TableMetadata", batch: "RecordBatch") -> Iterator[WrittenFile]:
    import numpy as np
    import pyarrow as pa

    if not len(batch):
        return
    fields = metadata.schema().fields
    arrays = {
        field.field_id: converted(batch.column(field.name), field.field_type, case_sensitive=True) for field in fields
    }
    rows = pa.RecordBatch.from_arrays(
        list(arrays.values()), schema=pa.schema([arrow_field(field, arrays[field.field_id].type) for field in fields])
    )
    columns = partition_columns(metadata.spec(), metadata.schema())
    for _, key, indexes in split(columns, arrays, np.zeros(len(batch), dtype=np.int64)):
        yield from writer.write(0, key, rows if indexes is None else rows.take(indexes))


def _array(mask: "NDArray[Any]") -> Any:  # noqa: ANN401 - a BooleanArray
    import pyarrow as pa

    return pa.array(mask)


def _bounds(file: "DataFile", field: "NestedField") -> tuple[Any, Any] | None:
    """Return the bounds of a column of a file; None if they are unknown, or the column has nulls."""
    from pyiceberg.conversions import from_bytes

    lower = (file.lower_bounds or {}).get(field.field_id)
    upper = (file.upper_bounds or {}).get(field.field_id)
    if lower is None or upper is None or (file.null_value_counts or {}).get(field.field_id) != 0:
        return None
    kind: Any = field.field_type
    return from_bytes(kind, lower), from_bytes(kind, upper)


def _check_exact(metadata: "TableMetadata", path: str) -> None:
    """Raise `SinkRejectedError` if the table has a column that cannot be read and written again exactly."""
    for field in metadata.schema().fields:
        if not _is_exact(field.field_type):
            raise SinkRejectedError(
                f"file {path} has rows of an older generation beside others, and the table's column "
                f"{field.name!r} has type {field.field_type}, which pyiceberg does not rewrite exactly. Set the "
                "position after these rows, or write to a new table"
            )


def _is_exact(kind: "IcebergType") -> bool:
    from pyiceberg import types as i

    match kind:
        case i.StructType():
            return all(_is_exact(field.field_type) for field in kind.fields)
        case i.ListType():  # a null list of structs is read as an empty one
            return not isinstance(kind.element_type, i.StructType) and _is_exact(kind.element_type)
        case i.DecimalType():
            return True
    return str(kind) in _REWRITTEN_TYPES
