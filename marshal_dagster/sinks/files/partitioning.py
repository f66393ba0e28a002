"""Columns that are stored as folders `column=value`: which columns and values can be read back unchanged."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.sink import OFFSET_COLUMN
from marshal_dagster.spark.conversion_settings import TEXT_TIMES, check_settings
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.nested_values import Condition, Kinds, has_nul, is_not_utf8, text_kinds

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession
    from pyspark.sql.types import StructType

NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
"""The value of a folder whose rows have null in the column."""
_LONGEST: Final = 255
"""The most bytes that file systems, and HDFS by default, allow in the name of a folder."""
_ESCAPED: Final = r"""[\x01-\x1f\x7f"#%'*/:=?\\{\[\]^]"""
"""The characters for which Spark writes three bytes in the name of a folder."""


def check_partition_by(spark: "SparkSession | None", schema: "StructType", partition_by: Sequence[str]) -> None:
    """Check that rows can be divided by these columns, and that the folders' names keep the values.

    Args:
        spark: The session that writes; None for the plain Python rows with which sinks are tested.
        schema: The columns of the rows.
        partition_by: The columns that become folders.

    Raises:
        ConfigurationError: A column is missing, no column would be left, a column's type is not supported, or a
            setting of the session would change dates.
    """
    if not partition_by:
        return
    check_settings(spark, TEXT_TIMES, "a file sink with partition_by")
    kinds = {column.name: column.dataType for column in schema.fields}
    for name in partition_by:
        if name not in kinds:
            raise ConfigurationError(
                f"partition_by has {name!r}, which is not a column of the result ({', '.join(kinds)}). Names are "
                "compared with upper and lower case"
            )
        is_text = kinds[name].simpleString() == "string"  # and no type with a collation
        if not is_text and not isinstance(kinds[name], (t.IntegralType, t.BooleanType, t.DateType)):
            raise ConfigurationError(
                f"partition_by has column {name!r} of type {kinds[name].simpleString()}, whose values the names of "
                "folders do not keep. Use a column of strings, integers, booleans or dates"
            )
    if len(kinds) == len(partition_by):
        raise ConfigurationError("partition_by has all columns of the result, so that no column is left for the files")


def check_names(partition_by: Sequence[str]) -> tuple[str, ...]:
    """Return the columns as a tuple.

    Raises:
        ConfigurationError: `partition_by` is a string, has a column twice, or has the column `offset` or one whose
            folders engines would skip.
    """
    if isinstance(partition_by, str):
        raise ConfigurationError(f"partition_by is {partition_by!r}; it must be a list of columns: [{partition_by!r}]")
    if len(set(partition_by)) < len(partition_by) or OFFSET_COLUMN in partition_by:
        raise ConfigurationError(
            f"partition_by is {list(partition_by)}; it must name each column once, and not {OFFSET_COLUMN!r}"
        )
    hidden = [name for name in partition_by if not name or name[0] in "._"]
    if hidden:
        raise ConfigurationError(
            f"partition_by has {hidden[0]!r}: engines skip folders whose names begin with a dot or an underscore. "
            "Rename the column"
        )
    return tuple(partition_by)


def wrong_values(column: str) -> Iterator[tuple[str, Kinds, Condition]]:
    """Yield the values of a column that cannot be in the name of a folder.

    Args:
        column: The name of the column.

    Yields:
        A description, the types that can have such a value, and the condition for it.
    """
    yield "an empty string in a column of partition_by", text_kinds(), lambda text: text == f.lit("")
    yield f"{NO_VALUE!r} in a column of partition_by", text_kinds(), lambda text: text == f.lit(NO_VALUE)
    yield "a string that is not valid UTF-8", text_kinds(), is_not_utf8
    yield "the character NUL in a column of partition_by", text_kinds(), has_nul
    what = f"more than {_LONGEST} bytes in the name of its folder, a column of partition_by,"
    yield what, text_kinds(), partial(_is_too_long, column)


def _is_too_long(column: str, text: "Column") -> "Column":
    """Return whether the folder `column=text` has a longer name than file systems allow."""
    longest = _LONGEST - len(column.encode()) - 1 - 2 * len(re.findall(_ESCAPED, column))
    return f.octet_length(text) + 2 * f.length(f.regexp_replace(text, f"[^{_ESCAPED[1:]}", "")) > longest
