"""Checks that a table's PostgreSQL types store the values of Spark types unchanged, whatever a session's settings are.

`postgres` uses it before a batch is processed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from marshal_dagster.sinks.database.dialect import RENAMED
from marshal_dagster.sinks.sink import quoted
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

    from marshal_dagster._internal.postgres import Connection

_COLUMNS: Final = """
    WITH RECURSIVE columns AS (
        SELECT a.attname, a.attnum, pg_catalog.format_type(a.atttypid, a.atttypmod) AS shown, a.atttypid AS type,
            a.atttypmod AS modifier, a.attgenerated <> '' OR a.attidentity = 'a' AS is_generated
        FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid
        JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
        WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
        AND pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT, INSERT, UPDATE, REFERENCES')
        UNION ALL
        SELECT c.attname, c.attnum, c.shown, t.typbasetype,
            CASE WHEN t.typtypmod = -1 THEN c.modifier ELSE t.typtypmod END, c.is_generated
        FROM columns AS c JOIN pg_catalog.pg_type AS t ON t.oid = c.type WHERE t.typtype = 'd'
    )
    SELECT c.attname, c.shown, CASE n.nspname WHEN 'pg_catalog' THEN t.typname ELSE '' END, t.typcategory::text,
        c.modifier, c.is_generated
    FROM columns AS c JOIN pg_catalog.pg_type AS t ON t.oid = c.type
    JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace WHERE t.typtype <> 'd' ORDER BY c.attnum
    """


@dataclass(frozen=True, slots=True)
class TableColumn:
    """The type of a table's column; for a domain its base type."""

    shown: str
    """The declared type, as PostgreSQL shows it."""
    type: str
    """The name of the type if it is a built-in type, else empty."""
    category: str
    """`pg_type.typcategory`."""
    modifier: int
    """`pg_attribute.atttypmod`: -1 without length, precision or scale."""
    is_generated: bool = False
    """Whether PostgreSQL computes each value, or always takes it from a sequence."""

    @property
    def scale(self) -> int | None:
        """The scale of a `numeric`, None if it has no scale and so stores every number."""
        # PostgreSQL stores the scale as a signed number of 11 bits, and adds 4 to the modifier.
        return None if self.modifier < 0 else (((self.modifier - 4) & 0x7FF) ^ 1024) - 1024

    @property
    def is_text(self) -> bool:
        """Whether the column stores any string unchanged. `name` and "char" do not: they truncate it."""
        return self.type in {"text", "varchar", "bpchar"} or (self.category == "S" and not self.type)

    @property
    def is_whole(self) -> bool:
        """Whether the column stores whole numbers as numbers."""
        return self.type in _WHOLE or (self.type == "numeric" and (self.scale is None or self.scale >= 0))

    def holds(self, data_type: "DataType") -> bool:
        """Return whether the column stores each value of a Spark type unchanged, or rejects it.

        A text column stores the text of every type except binary.
        """
        if self.is_text:
            return not isinstance(data_type, t.BinaryType)
        if isinstance(data_type, t.DecimalType):
            if self.type == "numeric":
                return self.scale is None or self.scale >= data_type.scale
            return self.type in _WHOLE and data_type.scale == 0
        return _HOLDS[data_type.typeName()](self)

    def changes_last_spaces(self, length: int) -> bool:
        """Return whether the column stores another number of spaces at the end of a string of `length` characters.

        `varchar(n)` drops spaces after n characters without an error. `char(n)` drops or adds some until n are reached.
        """
        limit = self.modifier - 4
        return (self.type == "varchar" and 0 <= limit < length) or (self.type == "bpchar" and 0 <= limit != length)


def table_columns(connection: "Connection", schema: str, table: str) -> dict[str, TableColumn]:
    """Return a table's columns by name, without those on which the role has no right; empty if the table is missing."""
    found = connection.execute(_COLUMNS, (schema, table))
    return {name: TableColumn(*described) for name, *described in found}


_WHOLE: Final = frozenset({"int2", "int4", "int8"})
_JSON: Final = frozenset({"json", "jsonb"})
_CHANGING_TEXT: Final = frozenset(
    {"bool", "bytea", "money", "float4", "float8", "name", "char", "oid", "xid", "xid8", "cid"}
    | {"tsvector", "tsquery", "aclitem"}
)
"""Types that parse a string to another value, such as `yes` to true, or truncate it."""

_COMPOUND: Final = frozenset({"A", "C", "D", "G", "P", "R", "T", "Z"})
"""Type categories: arrays, composites, dates and times, geometric, pseudo-types, ranges, intervals, internal types."""


def _is_unscaled(column: TableColumn) -> bool:
    return column.type == "numeric" and column.scale is None


def _holds_micros(column: TableColumn) -> bool:
    return column.modifier in {-1, 6}


def _reads_text(column: TableColumn) -> bool:
    """Return whether PostgreSQL parses a string for this type to exactly the value that it denotes, or rejects it.

    For other types it may drop the zone of a time, round a number to the column's scale, or look up an object's name.
    """
    if column.category in _COMPOUND or column.type in _CHANGING_TEXT:
        return False
    if column.type == "numeric":
        return column.scale is None
    return not column.type.startswith("reg")


_HOLDS: Final[Mapping[str, Callable[[TableColumn], bool]]] = {
    "byte": lambda column: column.is_whole or column.type in {"float4", "float8"},
    "short": lambda column: column.is_whole or column.type in {"float4", "float8"},
    "integer": lambda column: column.is_whole or column.type == "float8",
    "long": lambda column: column.is_whole,
    "float": lambda column: column.type in {"float4", "float8"} or _is_unscaled(column),
    "double": lambda column: column.type == "float8" or _is_unscaled(column),
    "boolean": lambda column: column.type == "bool",
    "string": _reads_text,
    "char": _reads_text,
    "varchar": _reads_text,
    "binary": lambda column: column.type == "bytea",
    "date": lambda column: column.type in {"date", "timestamp"},
    "timestamp": lambda column: column.type == "timestamptz" and _holds_micros(column),
    "timestamp_ntz": lambda column: column.type == "timestamp" and _holds_micros(column),
    "array": lambda column: column.type in _JSON,
    "map": lambda column: column.type in _JSON,
    "struct": lambda column: column.type in _JSON,
}


def with_exact_floats(frame: "DataFrame", there: Mapping[str, TableColumn]) -> "DataFrame":
    """Return a frame with floats as doubles where the table has doubles, which would parse a float's text otherwise.

    The text of a float is the shortest one that names it among floats: 0.1 is 0.10000000149011612 as a double.

    Args:
        frame: The rows.
        there: The table's columns.
    """
    doubles = {
        field.name
        for field in frame.schema.fields
        if isinstance(field.dataType, t.FloatType) and field.name in there and there[field.name].type == "float8"
    }
    if not doubles:
        return frame
    columns = [(name, f.col(quoted(name))) for name in frame.columns]
    return frame.select(*(column.cast("double").alias(name) if name in doubles else column for name, column in columns))


def limited_columns(columns: Iterable[str], there: Mapping[str, TableColumn]) -> dict[int, TableColumn]:
    """Return the columns that may change spaces at the end of a string, by their place among `columns`."""
    return {
        index: column
        for index, name in enumerate(columns)
        if (column := there.get(RENAMED.get(name, name))) and column.type in {"varchar", "bpchar"}
    }
