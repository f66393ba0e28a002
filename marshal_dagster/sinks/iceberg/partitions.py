"""The values by which an Iceberg table is partitioned, of the rows of an Arrow batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pyarrow import Array
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.types import IcebergType

_TRANSFORMS: Final = ("identity", "bucket", "truncate", "year", "month", "day", "hour", "void")
_CALENDAR_UNITS: Final = {"year": "Y", "month": "M"}
_SHOWN_AS_DATES: Final = ("identity", "day", "hour")
"""The transforms whose values pyiceberg converts to Python's dates when it commits."""
_FIRST_DAY: Final = -719_162
_LAST_DAY: Final = 2_932_896
_DAY_US: Final = 24 * 60 * 60 * 1_000_000
_OUT_OF_YEARS: Final = "its year is not within 1 to 9999, and the table is partitioned by the date"
_TOO_LOW: Final = "the table is partitioned by its truncation, which is below the least number of the column's type"
_INTEGER_BITS: Final = {"int": 32, "long": 64}
Key = tuple[Any, ...]
"""A partition: its values in the order of the specification, as Iceberg stores them."""


def check_spec(spec: "PartitionSpec", schema: "Schema", output: str) -> None:
    """Raise `ConfigurationError` if the sink cannot compute the partitions of a table exactly.

    Args:
        spec: How the table is partitioned.
        schema: The schema of the table.
        output: The name of the table, for errors.
    """
    for field in spec.fields:
        if schema.find_column_name(field.source_id) is None:
            raise ConfigurationError(
                f"{output}: its partition field {field.name!r} is of a column that was dropped, so nothing was "
                f"written. Remove the field with pyiceberg: update_spec().remove_field({field.name!r}).commit()"
            )
        transform, source = str(field.transform), schema.find_field(field.source_id)
        is_floating = str(source.field_type) in {"float", "double"} and transform != "void"
        if is_floating or transform.partition("[")[0] not in _TRANSFORMS:
            raise ConfigurationError(
                f"{output} is partitioned by {transform} of column {source.name!r}, which has type "
                f"{source.field_type}. This sink writes only {', '.join(_TRANSFORMS)}, and not of floating-point "
                "numbers: write to a table that is partitioned in another way"
            )


@dataclass(slots=True)
class PartitionColumn:
    """One field of a specification, with the values that were computed for it."""

    path: tuple[int, ...]
    """The ids of the fields that lead to its source, the column's first."""
    of_value: Callable[[Any], Any]
    is_time: bool
    """Whether values are computed from numbers: those of dates and timestamps."""
    known: dict[Any, int]
    """The index of each value."""
    values: list[Any]
    limits: tuple[int, int] | None
    """The least and the greatest number that a number, date or timestamp may have, None if all are allowed."""
    reason: str
    """Why others are not allowed."""

    def first_problem(self, arrays: "Mapping[int, Array]") -> int | None:
        """Return the index of the first row whose value is not within the limits, None if there is none."""
        import pyarrow.compute as pc

        array = None if self.limits is None else source_array(self.path, arrays)
        if array is None or self.limits is None:
            return None
        numbers, (least, greatest) = numbers_of(array), self.limits
        found = pc.indices_nonzero(pc.or_(pc.less(numbers, least), pc.greater(numbers, greatest)))
        return int(found[0].as_py()) if len(found) else None

    def indexes(self, array: "Array | None", count: int) -> "NDArray[Any]":
        """Return the index of the value of each row; `array` is None if the result does not have the column."""
        import numpy as np

        if array is None:
            return np.full(count, self._index(None), dtype=np.int64)
        encoded = array.dictionary_encode()
        distinct = encoded.dictionary
        if self.is_time:
            distinct = numbers_of(distinct)
        codes = [self._index(None if value is None else self.of_value(value)) for value in distinct.to_pylist()]
        codes.append(self._index(None))
        at: NDArray[Any] = encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)
        found: NDArray[Any] = np.asarray(codes, dtype=np.int64)[at]
        return found

    def _index(self, value: Any) -> int:  # noqa: ANN401 - any of Iceberg's
        at = self.known.setdefault(value, len(self.values))
        if at == len(self.values):
            self.values.append(value)
        return at


def partition_columns(spec: "PartitionSpec", schema: "Schema") -> list[PartitionColumn]:
    """Return the fields of a specification."""
    from pyiceberg.transforms import TruncateTransform

    paths = field_paths(schema.as_struct())
    columns = []
    for field in spec.fields:
        kind, transform = schema.find_field(field.source_id).field_type, str(field.transform)
        is_date = str(kind) == "date"
        is_time = is_date or str(kind) in {"timestamp", "timestamptz"}
        unit = _CALENDAR_UNITS.get(transform)
        of_value = field.transform.transform(kind) if unit is None else _calendar(unit, is_date=is_date)
        limits = _limits(is_date=is_date) if is_time and transform in _SHOWN_AS_DATES else None
        bits = _INTEGER_BITS.get(str(kind))
        if bits is not None and isinstance(field.transform, TruncateTransform):
            limits = _truncatable(bits, field.transform.width)
        reason = _OUT_OF_YEARS if is_time else _TOO_LOW
        columns.append(PartitionColumn(paths[field.source_id], of_value, is_time, {}, [], limits, reason))
    return columns


def _truncatable(bits: int, width: int) -> tuple[int, int]:
    """Return the least and the greatest integer whose truncation fits into the bits; pyiceberg does not check it."""
    least = -(2 ** (bits - 1))
    return -(-least // width) * width, -least - 1


def _limits(*, is_date: bool) -> tuple[int, int]:
    """Return the numbers of the first and the last date or timestamp that Python has."""
    return (_FIRST_DAY, _LAST_DAY) if is_date else (_FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1)


def numbers_of(array: "Array") -> "Array":
    """Return the days or microseconds since 1970 of dates or timestamps."""
    import pyarrow as pa

    return array.cast(pa.int32() if pa.types.is_date32(array.type) else pa.int64())


def _calendar(unit: str, *, is_date: bool) -> Callable[[Any], Any]:
    """Return the transform to years or months since 1970, also for dates that Python does not have."""
    import numpy as np

    source, target = f"datetime64[{'D' if is_date else 'us'}]", f"datetime64[{unit}]"
    return lambda value: None if value is None else int(np.array(value, source).astype(target).astype(int))


def split(
    columns: Sequence[PartitionColumn], arrays: "Mapping[int, Array]", others: "NDArray[Any]"
) -> "Iterator[tuple[int, Key, NDArray[Any] | None]]":
    """Yield each combination of a partition and of a value of `others`, with the indexes of its rows.

    Args:
        columns: The fields of the specification.
        arrays: The table's columns, by field id.
        others: Another value of each row, by which rows are split too.

    Yields:
        The other value, the partition, and the indexes in ascending order; None if these are all rows.
    """
    import numpy as np

    codes = [column.indexes(source_array(column.path, arrays), len(others)) for column in columns]
    keys = np.column_stack([others.astype(np.int64), *codes])
    if len(keys) and (keys == keys[0]).all():  # most batches, without a sort
        other, *indexes = keys[0].tolist()
        yield other, tuple(column.values[at] for column, at in zip(columns, indexes, strict=True)), None
        return
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(inverse.reshape(-1), minlength=len(distinct)))
    for number, (other, *indexes) in enumerate(distinct.tolist()):
        rows = order[ends[number - 1] if number else 0 : ends[number]]
        yield other, tuple(column.values[at] for column, at in zip(columns, indexes, strict=True)), rows


def source_array(path: tuple[int, ...], arrays: "Mapping[int, Array]") -> "Array | None":
    """Return the array of a field, in which the field is null if a struct around it is; None if it is missing."""
    array = arrays.get(path[0])
    for field_id in path[1:]:
        if array is None:
            return None
        ids = [int(array.type.field(index).metadata[b"PARQUET:field_id"]) for index in range(array.type.num_fields)]
        array = array.flatten()[ids.index(field_id)] if field_id in ids else None
    return array


def field_paths(struct: "IcebergType", above: tuple[int, ...] = ()) -> dict[int, tuple[int, ...]]:
    """Return for each field of structs the ids that lead to it."""
    from pyiceberg.types import StructType

    found = {}
    for field in struct.fields if isinstance(struct, StructType) else ():
        found[field.field_id] = (*above, field.field_id)
        found |= field_paths(field.field_type, found[field.field_id])
    return found
