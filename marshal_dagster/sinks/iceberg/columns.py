"""Which column of a result goes to which column of an Iceberg table. Types that would change a value are refused."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN
from marshal_dagster.spark.column_names import name_key
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.types import IcebergType, NestedField
    from pyspark.sql.types import DataType, StructType

_EXACT: Final[Mapping[str, tuple[str, ...]]] = {
    "boolean": ("boolean",),
    "byte": ("int", "long"),
    "short": ("int", "long"),
    "integer": ("int", "long"),
    "long": ("long",),
    "float": ("float", "double"),
    "double": ("double",),
    "date": ("date",),
    "timestamp": ("timestamptz",),
    "timestamp_ntz": ("timestamp",),
    "string": ("string",),
    "binary": ("binary",),
}
"""For each of Spark's types the types of Iceberg that hold all its values exactly."""


def match_columns(
    result: "StructType",
    schema: "Schema",
    output: str,
    *,
    case_sensitive: bool,
    filled: "Sequence[NestedField]" = (),
) -> "list[NestedField | None]":
    """Return the table's column for each column of a result; None for one that is left out.

    The columns `partition` and `offset` are left out if the table does not have them. All others must be there.

    Args:
        result: The schema of the result.
        schema: The schema of the table.
        output: The name of the table, for errors.
        case_sensitive: The session's `spark.sql.caseSensitive`, by which names are compared.
        filled: The table's columns that the sink fills.

    Raises:
        ConfigurationError: A column is missing in the table, or its type cannot hold all values. Or a column of
            the table that is required or has a default is missing in the result, or two columns have the same name
            in files.
    """
    found = [_column(name, schema.fields, case_sensitive=case_sensitive) for name in result.names]
    for column, field in zip(result.fields, found, strict=True):
        if field is not None:
            _check_type(column.dataType, field.field_type, column.name, output, case_sensitive=case_sensitive)
        elif column.name not in {PARTITION_COLUMN, OFFSET_COLUMN}:
            raise ConfigurationError(
                f"{output} has no column {column.name!r}, which the result has, so nothing was written. Add the column "
                "to the table, or leave it out of the result"
            )
    own = {field.field_id for field in filled}
    others = [field for field in schema.fields if field.field_id not in own]
    _check_fields(result.names, found, others, "column", output)
    return found


def matched_fields(
    names: Sequence[str], fields: "Sequence[NestedField]", *, case_sensitive: bool
) -> "list[NestedField | None]":
    """Return the table's field of each name, None if there is none."""
    return [_column(name, fields, case_sensitive=case_sensitive) for name in names]


def _column(name: str, fields: "Sequence[NestedField]", *, case_sensitive: bool) -> "NestedField | None":
    """Return the field of this name: the one that is spelt the same, else the only one that the session equates."""
    equal = [field for field in fields if field.name == name]
    key = name_key(name, case_sensitive=case_sensitive)
    alike = [field for field in fields if name_key(field.name, case_sensitive=case_sensitive) == key]
    if equal or len(alike) == 1:
        return (equal or alike)[0]
    if alike:
        raise ConfigurationError(
            f"the result's column {name!r} could be {' or '.join(repr(field.name) for field in alike)} of the table. "
            "Spell it as the table does"
        )
    return None


def _check_fields(
    names: Sequence[str],
    found: "Sequence[NestedField | None]",
    fields: "Sequence[NestedField]",
    what: str,
    output: str,
) -> None:
    """Check the fields `found` for the names of a result, of all fields at this level of the table."""
    matched: dict[int, str] = {}
    for name, field in zip(names, found, strict=True):
        if field is None:
            continue
        if (other := matched.get(field.field_id)) is not None:
            raise ConfigurationError(
                f"{output}: {other!r} and {name!r} both belong to the {what} {field.name!r}, so nothing was written. "
                "Leave one out of the result"
            )
        matched[field.field_id] = name
        _check_written_name(field, fields, what, output)
    _check_missing(fields, [field for field in found if field is not None], what, output)


def _check_written_name(field: "NestedField", fields: "Sequence[NestedField]", what: str, output: str) -> None:
    from pyiceberg.schema import make_compatible_name

    written = make_compatible_name(field.name)
    other = next((other for other in fields if other != field and make_compatible_name(other.name) == written), None)
    if other is not None:
        raise ConfigurationError(
            f"{output}: its {what} {field.name!r} has the same name in files as {other.name!r}, so nothing was "
            "written. Rename one of the two"
        )


def _check_missing(fields: "Sequence[NestedField]", found: "Sequence[NestedField]", what: str, output: str) -> None:
    given = {field.field_id for field in found}
    for field in fields:
        if field.field_id in given:
            continue
        if field.required:
            raise ConfigurationError(
                f"{output}: its {what} {field.name!r} is required, but the result does not have it, so nothing was "
                f"written. Add it to the result"
            )
        if getattr(field, "write_default", None) is not None or getattr(field, "initial_default", None) is not None:
            raise ConfigurationError(
                f"{output}: its {what} {field.name!r} has a default, which this sink does not write, and the result "
                "does not have it, so nothing was written. Add it to the result"
            )


def _check_type(given: "DataType", wanted: "IcebergType", path: str, output: str, *, case_sensitive: bool) -> None:
    """Raise `ConfigurationError` unless the type `wanted` holds all values of the type `given` exactly."""
    from pyiceberg import types as i

    match given, wanted:
        case t.StructType(), i.StructType():
            found = matched_fields(given.names, wanted.fields, case_sensitive=case_sensitive)
            for part, field in zip(given.fields, found, strict=True):
                if field is None:
                    raise ConfigurationError(
                        f"{output}: its column {path!r} has no field {part.name!r}, which the result has, so nothing "
                        "was written. Add the field to the table, or leave it out of the result"
                    )
                _check_type(
                    part.dataType, field.field_type, f"{path}.{part.name}", output, case_sensitive=case_sensitive
                )
            _check_fields(given.names, found, wanted.fields, f"field of {path}", output)
        case t.ArrayType(), i.ListType():
            _check_type(
                given.elementType, wanted.element_type, f"{path}.element", output, case_sensitive=case_sensitive
            )
        case t.MapType(), i.MapType():
            _check_type(given.keyType, wanted.key_type, f"{path}.key", output, case_sensitive=case_sensitive)
            _check_type(given.valueType, wanted.value_type, f"{path}.value", output, case_sensitive=case_sensitive)
        case t.DecimalType(), i.DecimalType() if given.scale == wanted.scale and given.precision <= wanted.precision:
            pass
        case _ if not (
            wanted.is_primitive
            and not isinstance(given, t.DecimalType)
            and str(wanted) in _EXACT.get(given.typeName(), ())
        ):
            raise ConfigurationError(
                f"{output}: its column {path!r} has type {wanted}, which cannot hold all values of the result's "
                f"{given.simpleString()} exactly, so nothing was written. Cast the result's column, or change the table"
            )
