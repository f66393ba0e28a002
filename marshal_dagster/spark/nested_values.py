"""Values of some kinds in a column, found in Spark, also within arrays, maps and structs."""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

Condition = Callable[["Column"], "Column"]
Kinds = tuple[type[Any], ...]
"""Classes of Spark's types."""


def text_kinds() -> Kinds:
    """Return the types of texts."""
    return t.StringType, t.CharType, t.VarcharType


def is_not_utf8(text: "Column") -> "Column":
    """Return whether a text has bytes that are not UTF-8: Spark keeps them, and readers replace them."""
    return ~f.is_valid_utf8(text)


def has_nul(text: "Column") -> "Column":
    """Return whether a text has the character U+0000."""
    return f.instr(text, "\0") > 0


def parts(name: str, data_type: "DataType") -> list[tuple[str, "DataType"]]:
    """Return the types within a type, each with the name of the field that it is of, `name` where it is none's."""
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
    """Return whether the type is one of `kinds` or has one within it."""
    return isinstance(data_type, kinds) or any(holds(part, kinds) for _, part in parts("", data_type))


def any_value(value: "Column", data_type: "DataType", kinds: Kinds, is_bad: Condition) -> "Column":
    """Return whether `is_bad` holds for a value of one of `kinds` in `value`, which is of type `data_type`."""

    def within(items: "Column", part: "DataType") -> list["Column"]:
        return [f.exists(items, lambda item: any_value(item, part, kinds, is_bad))] if holds(part, kinds) else []

    match data_type:
        case t.StructType():
            fields = [field for field in data_type.fields if holds(field.dataType, kinds)]
            found = [any_value(value.getField(field.name), field.dataType, kinds, is_bad) for field in fields]
        case t.ArrayType():
            found = within(value, data_type.elementType)
        case t.MapType():
            found = [*within(f.map_keys(value), data_type.keyType), *within(f.map_values(value), data_type.valueType)]
        case _:
            found = [is_bad(value)] if isinstance(data_type, kinds) else []
    no = f.lit(False)  # noqa: FBT003
    return reduce(or_, (f.coalesce(bad, no) for bad in found), no)
