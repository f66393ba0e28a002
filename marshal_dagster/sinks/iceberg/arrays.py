"""Arrow arrays as an Iceberg table stores them: its types, and the ids of its fields at every level."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.sinks.iceberg.columns import matched_fields

if TYPE_CHECKING:
    from pyarrow import Array, DataType, Field
    from pyiceberg.types import IcebergType, NestedField

FIELD_ID: Final = b"PARQUET:field_id"
"""The key of a field's id in the metadata of its Arrow field."""
NOT_UTF8: Final = "it has bytes that are not UTF-8, which readers of the table cannot read"
NULL: Final = "it is null, but the table requires a value"


def converted(array: "Array", wanted: "IcebergType", *, case_sensitive: bool) -> "Array":
    """Return an array of Spark's with the table's types and field ids. Its validity stays.

    Args:
        array: The array.
        wanted: The table's type. `columns` has checked that it holds all values.
        case_sensitive: Whether names of fields are compared so.
    """
    import pyarrow as pa
    from pyiceberg import types as i

    if array.offset:
        array = pa.concat_arrays([array])
    match wanted:
        case i.StructType():
            names = [array.type.field(index).name for index in range(array.type.num_fields)]
            fields = matched_fields(names, wanted.fields, case_sensitive=case_sensitive)
            parts = [
                (field, converted(array.field(index), field.field_type, case_sensitive=case_sensitive))
                for index, field in enumerate(fields)
                if field is not None
            ]
            kind = pa.struct([arrow_field(field, part.type) for field, part in parts])
            return _rebuilt(array, kind, 1, [part for _, part in parts])
        case i.ListType():
            values = converted(array.values, wanted.element_type, case_sensitive=case_sensitive)
            field = arrow_field(wanted.element_field, values.type, "element")
            is_large = pa.types.is_large_list(array.type)
            return _rebuilt(array, pa.large_list(field) if is_large else pa.list_(field), 2, [values])
        case i.MapType():
            keys = converted(array.keys, wanted.key_type, case_sensitive=case_sensitive)
            values = converted(array.items, wanted.value_type, case_sensitive=case_sensitive)
            kind = pa.map_(arrow_field(wanted.key_field, keys.type), arrow_field(wanted.value_field, values.type))
            entries = pa.StructArray.from_arrays([keys, values], fields=[kind.key_field, kind.item_field])
            return _rebuilt(array, kind, 2, [entries])
    target = _leaf_type(wanted, array.type)
    return array if array.type == target else array.cast(target)


def arrow_field(field: "NestedField", kind: "DataType", name: str | None = None) -> "Field":
    """Return the Arrow field of a field of the table. Parquet's writer stores its id, by which readers find it.

    Names are changed to those that Avro allows, as other writers of Iceberg do.
    """
    import pyarrow as pa
    from pyiceberg.schema import make_compatible_name

    written = name or make_compatible_name(field.name)
    return pa.field(written, kind, nullable=not field.required, metadata={FIELD_ID: str(field.field_id)})


def problem(array: "Array", field: "NestedField") -> str | None:
    """Return why the table cannot store a value of a converted array, or None.

    Args:
        array: The values of the field.
        field: The field of the table.
    """
    import pyarrow.compute as pc
    from pyiceberg import types as i

    if field.required and array.null_count:
        return NULL
    wanted = field.field_type
    match wanted:
        case i.StructType():
            inside = zip(_struct_fields(array, wanted), array.flatten(), strict=True)
            valid = array.is_valid() if array.null_count else None
            parts = [(part, values if valid is None else values.filter(valid)) for part, values in inside]
        case i.ListType():
            parts = [(wanted.element_field, array.flatten())]
        case i.MapType():
            compact = array.take(pc.indices_nonzero(array.is_valid()))  # without entries of a slice, or of null
            parts = [(wanted.key_field, compact.keys), (wanted.value_field, compact.items)]
        case i.StringType():
            return None if _is_valid(array) else NOT_UTF8
        case _:
            return None
    return next((found for part, values in parts if (found := problem(values, part)) is not None), None)


def first_problem(array: "Array", field: "NestedField", reason: str) -> int:
    """Return the index of the first value for which `problem` returns a reason, which one of them has."""
    return _first(len(array), lambda start, end: problem(array.slice(start, end - start), field) == reason)


def _first(count: int, has_problem: Callable[[int, int], bool]) -> int:
    start, end = 0, count
    while end - start > 1:
        middle = (start + end) // 2
        if has_problem(start, middle):
            end = middle
        else:
            start = middle
    return start


def _struct_fields(array: "Array", wanted: Any) -> "list[NestedField]":  # noqa: ANN401 - a StructType
    by_id = {field.field_id: field for field in wanted.fields}
    return [by_id[int(array.type.field(index).metadata[FIELD_ID])] for index in range(array.type.num_fields)]


def _is_valid(array: "Array") -> bool:
    import pyarrow as pa

    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _rebuilt(array: "Array", kind: "DataType", buffers: int, children: "list[Array]") -> "Array":
    import pyarrow as pa

    return pa.Array.from_buffers(kind, len(array), array.buffers()[:buffers], children=children)


def _leaf_type(wanted: "IcebergType", given: "DataType") -> "DataType":
    import pyarrow as pa
    from pyiceberg import types as i

    match wanted:
        case i.StringType() | i.BinaryType():
            return given  # a string or a large one; Parquet stores both in the same way
        case i.DecimalType():
            return pa.decimal128(wanted.precision, wanted.scale)
    return {
        "boolean": pa.bool_(),
        "int": pa.int32(),
        "long": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us"),
        "timestamptz": pa.timestamp("us", "UTC"),
    }[str(wanted)]
