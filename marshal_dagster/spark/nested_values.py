"""Spark expressions that find values of certain types in a column, also inside arrays, maps and structs.

Sinks and decoding use them to find values that an output cannot store.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import has
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

Condition = Callable[["Column"], "Column"]
Kinds = tuple[type[Any], ...]
"""Classes of Spark types."""


def text_kinds() -> Kinds:
    """Return the types of text."""
    return t.StringType, t.CharType, t.VarcharType


def is_not_utf8(text: "Column") -> "Column":
    """Return whether a text has bytes that are not UTF-8. Spark keeps them, but readers replace them."""
    return ~f.is_valid_utf8(text) if has("is_valid_utf8") else text.isNotNull() & valid_utf8(text).isNull()


def valid_utf8(text: "Column") -> "Column":
    """Return a text if its bytes are UTF-8, else null."""
    if has("try_validate_utf8"):
        return f.try_validate_utf8(text)
    as_it_was = text.cast("binary")  # Spark 3.5: what is not UTF-8 is decoded to other characters
    return f.when(f.encode(f.decode(as_it_was, "UTF-8"), "UTF-8") == as_it_was, text)


def has_nul(text: "Column") -> "Column":
    """Return whether a text has the character U+0000."""
    return f.instr(text.cast("string"), "\0") > 0  # without its collation, which may ignore the character


def parts(name: str, data_type: "DataType") -> list[tuple[str, "DataType"]]:
    """Return the types inside a type, each with the name of its field, or with `name` if it is not in a field."""
    match data_type:
        case t.StructType():
            return [(field.name, field.dataType) for field in data_type.fields]
        case t.ArrayType():
            return [(name, data_type.elementType)]
        case t.MapType():
            return [(name, data_type.keyType), (name, data_type.valueType)]
        case t.UserDefinedType():
            return [(name, data_type.sqlType())]
    return []


def holds(data_type: "DataType", kinds: Kinds) -> bool:
    """Return whether the type is one of `kinds` or contains one."""
    return isinstance(data_type, kinds) or any(holds(part, kinds) for _, part in parts("", data_type))


def any_value(value: "Column", data_type: "DataType", kinds: Kinds, is_bad: Condition) -> "Column":
    """Return whether `is_bad` is true for any value of `kinds` inside `value`, which has the type `data_type`."""
    return any_typed_value(value, data_type, kinds, lambda found, _: is_bad(found))


def any_typed_value(
    value: "Column", data_type: "DataType", kinds: Kinds, is_bad: Callable[["Column", "DataType"], "Column"]
) -> "Column":
    """Return what `any_value` does, for a condition that depends on the type of each value, too."""

    def within(items: "Column", part: "DataType") -> list["Column"]:
        if not holds(part, kinds):
            return []
        return [f.exists(items, lambda item: any_typed_value(item, part, kinds, is_bad))]

    match data_type:
        case t.StructType():
            fields = [field for field in data_type.fields if holds(field.dataType, kinds)]
            found = [any_typed_value(value.getField(field.name), field.dataType, kinds, is_bad) for field in fields]
        case t.ArrayType():
            found = within(value, data_type.elementType)
        case t.MapType():
            found = [*within(f.map_keys(value), data_type.keyType), *within(f.map_values(value), data_type.valueType)]
        case _:
            found = [is_bad(value, data_type)] if isinstance(data_type, kinds) else []
    no = f.lit(False)  # noqa: FBT003
    return reduce(or_, (f.coalesce(bad, no) for bad in found), no)
