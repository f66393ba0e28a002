"""Checks that a table's MariaDB types store the values of Spark types unchanged, and that its engine keeps rows."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.database.value_text import check_keys
from marshal_dagster.spark.column_names import check_nested_names
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

_TYPES: Final[Mapping[str, str]] = {
    "byte": "tinyint",
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "string": "longtext",
    "char": "longtext",
    "varchar": "longtext",
    "binary": "longblob",
    "date": "date",
    "timestamp": "timestamp(6)",
    "timestamp_ntz": "datetime(6)",
    "array": "json",
    "map": "json",
    "struct": "json",
}
CHARSET: Final = "utf8mb4"
_MICROS: Final = 6

COLUMNS: Final = """
    SELECT column_name, column_type, data_type, numeric_scale, datetime_precision, character_set_name, collation_name,
        is_nullable, is_generated, extra
    FROM information_schema.columns WHERE table_schema = %(schema)s AND table_name = %(table)s
    ORDER BY ordinal_position
    """


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, as `information_schema.columns` describes it."""

    shown: str
    """The declared type."""
    type: str
    """The type's name without length, precision and sign."""
    scale: int | None
    precision: int | None
    """The number of digits of the fraction of a second."""
    charset: str | None
    collation: str | None
    nullable: str
    generated: str
    extra: str
    """More attributes, such as `on update current_timestamp(6)`."""

    @property
    def is_not_null(self) -> bool:
        """Whether the column rejects null, or replaces it by another value."""
        return self.nullable == "NO"

    @property
    def staged(self) -> str:
        """The type of this column in a staging table, where a `char` keeps the spaces at its end."""
        shown = "var" + self.shown if self.type == "char" else self.shown
        text = f" CHARACTER SET {self.charset} COLLATE {self.collation}" if self.charset else ""
        return f"{shown}{text} NULL"


def mariadb_type(name: str, data_type: "DataType") -> str:
    """Return the MariaDB type for a column. Raises `ConfigurationError` for a type that the sink does not write."""
    if isinstance(data_type, t.DecimalType):
        return f"decimal({data_type.precision},{data_type.scale})"
    target = _TYPES.get(data_type.typeName())
    if target is None:
        raise ConfigurationError(
            f"column {name!r} has type {data_type.simpleString()}, which a MariaDB sink does not write. Cast the column"
        )
    if target == "json":
        check_nested_names(name, data_type, case_sensitive=True)
        check_keys(name, data_type)
    return target


_WHOLE: Final = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
_TEXT: Final = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"})
_BINARY: Final = frozenset({"varbinary", "tinyblob", "blob", "mediumblob", "longblob"})


def _holds_whole(column: Column) -> bool:
    return column.type in _WHOLE or column.type == "decimal"


def _is_float(column: Column, *types: str) -> bool:
    # `double(10,2)` rounds.
    return column.type in types and column.scale is None


def _is_text(column: Column) -> bool:
    return column.type in _TEXT and column.charset == CHARSET


def _holds_micros(column: Column, *types: str) -> bool:
    return column.type in types and column.precision == _MICROS


_HOLDS: Final[Mapping[str, Callable[[Column], bool]]] = {
    "byte": lambda column: _holds_whole(column) or _is_float(column, "float", "double") or _is_text(column),
    "short": lambda column: _holds_whole(column) or _is_float(column, "float", "double") or _is_text(column),
    "integer": lambda column: _holds_whole(column) or _is_float(column, "double") or _is_text(column),
    "long": lambda column: _holds_whole(column) or _is_text(column),
    "float": lambda column: _is_float(column, "float", "double"),
    "double": lambda column: _is_float(column, "double"),
    "boolean": _holds_whole,
    "string": _is_text,
    "char": _is_text,
    "varchar": _is_text,
    "binary": lambda column: column.type in _BINARY,
    "date": lambda column: column.type in {"date", "datetime"} or _is_text(column),
    "timestamp": lambda column: _holds_micros(column, "timestamp"),
    "timestamp_ntz": lambda column: _holds_micros(column, "datetime") or _is_text(column),
    "array": _is_text,
    "map": _is_text,
    "struct": _is_text,
}


def holds(column: Column, data_type: "DataType") -> bool:
    """Return whether a column stores each value of a Spark type unchanged, or rejects it."""
    if isinstance(data_type, t.DecimalType):
        if column.type == "decimal":
            return (column.scale or 0) >= data_type.scale
        return _is_text(column) or (column.type in _WHOLE and data_type.scale == 0)
    return _HOLDS[data_type.typeName()](column)


def check_column_types(
    table: str, types: Mapping[str, "DataType"], there: Mapping[str, Column], own: Collection[str]
) -> None:
    """Raise `ConfigurationError` unless each column of the table stores the values of its Spark type unchanged.

    Args:
        table: The table's name, for the error.
        types: The Spark types, by the table's column names.
        there: The table's columns.
        own: The columns by which the sink finds rows; these must have integer types.
    """
    for name in types:
        if there[name].generated == "ALWAYS":
            raise ConfigurationError(
                f"table {table}: column {name!r} is generated, so it cannot hold the result's values. Drop the column "
                "from the result, or make it a plain column"
            )
    wrong = [
        f"column {name!r} is {_shown(there[name])}, and the result's is {data_type.simpleString()}: make it {wanted}"
        for name, data_type in types.items()
        if (wanted := mariadb_type(name, data_type))
        and not (holds(there[name], data_type) and (name not in own or _holds_whole(there[name])))
    ]
    if wrong:
        raise ConfigurationError(
            f"table {table} would store other values than the result has: {'; '.join(wrong)}. Or cast the column in "
            "the result to a type that the table's column stores unchanged"
        )


def _shown(column: Column) -> str:
    is_other_charset = column.charset not in {None, CHARSET}
    return f"{column.shown} CHARACTER SET {column.charset}" if is_other_charset else column.shown


def check_engines(schema: str, found: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `ConfigurationError` for a table that is not stored by InnoDB.

    Args:
        schema: The tables' database.
        found: Type and engine of each table, from `information_schema.tables`.
    """
    for name, (kind, engine) in found.items():
        if kind == "VIEW":
            raise ConfigurationError(f"table: {schema}.{name} is a view: use the table itself")
        if engine != "InnoDB":
            raise ConfigurationError(
                f"table: {schema}.{name} has the engine {engine}, which has no transactions: rows and ranges could not "
                f"be written together. Run ALTER TABLE {name} ENGINE = InnoDB first"
            )
