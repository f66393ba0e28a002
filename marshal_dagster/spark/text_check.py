"""Texts of a column that are none, found in Spark, also within arrays, maps and structs."""

import operator
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType


def is_not_utf8(text: "Column") -> "Column":
    """Return whether a text has bytes that are not UTF-8: Spark keeps such, and what reads it replaces them."""
    return ~f.is_valid_utf8(text)


def has_nul(text: "Column") -> "Column":
    """Return whether a text has the character U+0000."""
    return f.instr(text, "\0") > 0


def has_text(data_type: "DataType") -> bool:
    """Return whether values of a type have texts, within arrays, maps and structs too."""
    if isinstance(data_type, t.ArrayType):
        return has_text(data_type.elementType)
    if isinstance(data_type, t.MapType):
        return has_text(data_type.keyType) or has_text(data_type.valueType)
    if isinstance(data_type, t.StructType):
        return any(has_text(column.dataType) for column in data_type.fields)
    return data_type.typeName() in {"string", "char", "varchar"}


def any_text(value: "Column", data_type: "DataType", is_bad: Callable[["Column"], "Column"]) -> "Column":
    """Return whether `is_bad` holds for a text in `value`, which is of type `data_type`."""

    def within(values: "Column", kind: "DataType") -> "Column":
        return f.exists(values, lambda item: any_text(item, kind, is_bad))

    if not has_text(data_type):
        return f.lit(False)  # noqa: FBT003
    if isinstance(data_type, t.ArrayType):
        found = [within(value, data_type.elementType)]
    elif isinstance(data_type, t.MapType):
        keys, values = (f.map_keys(value), data_type.keyType), (f.map_values(value), data_type.valueType)
        found = [within(*side) for side in (keys, values) if has_text(side[1])]
    elif isinstance(data_type, t.StructType):
        found = [
            any_text(value.getField(column.name), column.dataType, is_bad)
            for column in data_type.fields
            if has_text(column.dataType)
        ]
    else:
        found = [is_bad(value)]
    return reduce(operator.or_, (f.coalesce(bad, f.lit(False)) for bad in found))  # noqa: FBT003
