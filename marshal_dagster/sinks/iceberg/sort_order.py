"""The order in which the rows of each file of a table are sorted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.sinks.iceberg.arrays import FIELD_ID
from marshal_dagster.sinks.iceberg.partitions import field_paths, numbers_of, source_array

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch, Table
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.sorting import SortField
    from pyiceberg.types import IcebergType

_TIME_UNITS: Final = {"year": "Y", "month": "M", "day": "D", "hour": "h"}
_UNSORTED: Final = 0


@dataclass(frozen=True, slots=True)
class _SortColumn:
    """One field of a sort order."""

    path: tuple[int, ...]
    """The ids of the fields that lead to its source, the column's first."""
    keys: "Callable[[Array], Array]"
    """Returns values that pyarrow sorts as Iceberg sorts the values of the source."""
    descending: bool
    nulls_first: bool


@dataclass(frozen=True, slots=True)
class FileOrder:
    """A sort order that the sink keeps in each file."""

    order_id: int
    """The id of the order in the table's metadata."""
    columns: tuple[_SortColumn, ...]

    def sort(self, rows: "Table") -> "Table":
        """Return the rows in this order. Equal rows stay in the order in which they came."""
        import pyarrow as pa
        import pyarrow.compute as pc

        (batch,) = rows.combine_chunks().to_batches()
        keys: dict[str, Array] = {}
        orders: list[tuple[str, str]] = []
        for number, column in enumerate(self.columns):
            values = source_array(column.path, _by_field_id(batch))
            if values is None:
                continue  # null in all rows
            found = column.keys(values)
            if found.null_count:
                keys[f"null_{number}"] = found.is_null().cast(pa.int8())
                orders.append((f"null_{number}", "descending" if column.nulls_first else "ascending"))
            keys[f"value_{number}"] = found
            orders.append((f"value_{number}", "descending" if column.descending else "ascending"))
        return rows.take(pc.sort_indices(pa.table(keys), sort_keys=orders)) if keys else rows


def file_order(metadata: "TableMetadata") -> FileOrder | None:
    """Return the table's sort order; None if it has none, or one that the sink does not keep exactly.

    Args:
        metadata: The metadata of the table.
    """
    schema, order = metadata.schema(), metadata.sort_order_by_id(metadata.default_sort_order_id)
    if order is None or order.order_id == _UNSORTED or order.is_unsorted:
        return None
    columns = [_sort_column(field, schema) for field in order.fields]
    kept = tuple(column for column in columns if column is not None)
    return FileOrder(order.order_id, kept) if len(kept) == len(columns) else None


def _sort_column(field: "SortField", schema: "Schema") -> _SortColumn | None:
    path = field_paths(schema.as_struct()).get(field.source_id)
    if path is None:
        return None  # the column was dropped, or is within a list or a map
    keys = _keys(field, schema.find_field(field.source_id).field_type)
    if keys is None:
        return None
    return _SortColumn(path, keys, field.direction.value == "desc", field.null_order.value == "nulls-first")


def _keys(field: "SortField", kind: "IcebergType") -> "Callable[[Array], Array] | None":
    """Return how the values of a field of a type become keys; None if the transform is not known."""
    transform = str(field.transform)
    if transform == "identity":
        return _bit_order if str(kind) in {"float", "double"} else _as_they_are
    if transform in _TIME_UNITS:
        return lambda values: _time_units(values, _TIME_UNITS[transform])
    if transform.partition("[")[0] in {"bucket", "truncate"}:
        of_value = field.transform.transform(kind)
        return lambda values: _of_each(values, of_value, is_time=str(kind) in {"date", "timestamp", "timestamptz"})
    return None


def _as_they_are(values: "Array") -> "Array":
    return values


def _bit_order(values: "Array") -> "Array":
    """Return integers in Iceberg's order of floating-point numbers: -NaN, -infinity, ..., -0, 0, ..., infinity, NaN."""
    import numpy as np
    import pyarrow as pa

    floats = values.fill_null(0).to_numpy(zero_copy_only=False)
    signed = floats.view(np.int32 if floats.itemsize == 4 else np.int64)  # noqa: PLR2004 - the bytes of a float
    ordered = np.where(signed < 0, signed ^ np.iinfo(signed.dtype).max, signed)
    return pa.array(ordered, mask=values.is_null().to_numpy(zero_copy_only=False))


def _time_units(values: "Array", unit: str) -> "Array":
    """Return the years, months, days or hours since 1970."""
    import numpy as np
    import pyarrow as pa

    source = f"datetime64[{'D' if pa.types.is_date32(values.type) else 'us'}]"
    numbers = numbers_of(values).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    units = numbers.view(source).astype(f"datetime64[{unit}]").astype(np.int64)
    return pa.array(units, mask=values.is_null().to_numpy(zero_copy_only=False))


def _of_each(values: "Array", of_value: Callable[[Any], Any], *, is_time: bool) -> "Array":
    """Return the transform's value of each value. It is computed once for each distinct one."""
    import pyarrow as pa

    encoded = values.dictionary_encode()
    distinct = numbers_of(encoded.dictionary) if is_time else encoded.dictionary
    return pa.array([of_value(value) for value in distinct.to_pylist()]).take(encoded.indices)


def _by_field_id(batch: "RecordBatch") -> "dict[int, Array]":
    fields: Sequence[Any] = list(batch.schema)
    return {int(field.metadata[FIELD_ID]): batch.column(at) for at, field in enumerate(fields)}
