"""Which changes of a table's schema the files that were written before it still fit."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyiceberg.types import IcebergType, NestedField


def first_misfit(written: "Sequence[NestedField]", now: "Sequence[NestedField]") -> str | None:
    """Return the first field whose values readers of the new schema would not find as they were written.

    Args:
        written: The fields of the files.
        now: The fields of the table's new schema, at the same level.

    Returns:
        The name of a field that has another type or is now required; None if all files fit.
    """
    by_id = {field.field_id: field for field in written}
    for field in now:
        before = by_id.get(field.field_id)
        if before is None and field.required and field.initial_default is None:
            return field.name
        if before is not None and not _fits(before, field):
            return field.name
    return None


def _fits(before: "NestedField", now: "NestedField") -> bool:
    if now.required and not before.required:
        return False
    written, wanted = before.field_type, now.field_type
    if written.is_primitive or wanted.is_primitive:
        return written == wanted or _is_promotion(written, wanted)
    return type(written) is type(wanted) and first_misfit(_children(written), _children(wanted)) is None


def _is_promotion(written: "IcebergType", wanted: "IcebergType") -> bool:
    """Return whether Iceberg reads values of the first type as the second one."""
    from pyiceberg.types import DecimalType

    if isinstance(written, DecimalType) and isinstance(wanted, DecimalType):
        return written.scale == wanted.scale and written.precision <= wanted.precision
    return (str(written), str(wanted)) in {("int", "long"), ("float", "double")}


def _children(kind: "IcebergType") -> "Sequence[NestedField]":
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(kind, StructType):
        return kind.fields
    if isinstance(kind, ListType):
        return (kind.element_field,)
    return (kind.key_field, kind.value_field) if isinstance(kind, MapType) else ()
