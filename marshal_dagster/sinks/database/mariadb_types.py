"""Checks that a table's MariaDB types store the values of Spark types unchanged, and that its engine keeps rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.database.value_text import declared_type
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
    "decimal": "decimal",
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

    declared: str
    """The declared type, without the character set."""
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
        declared = "var" + self.declared if self.type == "char" else self.declared
        text = f" CHARACTER SET {self.charset} COLLATE {self.collation}" if self.charset else ""
        return f"{declared}{text} NULL"

    @property
    def shown(self) -> str:
        """The declared type, with an unexpected character set."""
        is_other_charset = self.charset not in {None, CHARSET}
        return f"{self.declared} CHARACTER SET {self.charset}" if is_other_charset else self.declared

    @property
    def is_generated(self) -> bool:
        """Whether MariaDB computes each value."""
        return self.generated == "ALWAYS"

    @property
    def is_whole(self) -> bool:
        """Whether the column stores whole numbers as numbers."""
        return self.type in _WHOLE or self.type == "decimal"

    def holds(self, data_type: "DataType") -> bool:
        """Return whether the column stores each value of a Spark type unchanged, or rejects it."""
        if isinstance(data_type, t.DecimalType):
            if self.type == "decimal":
                return (self.scale or 0) >= data_type.scale
            return _is_text(self) or (self.type in _WHOLE and data_type.scale == 0)
        return _HOLDS[data_type.typeName()](self)


def mariadb_type(name: str, data_type: "DataType") -> str:
    """Return the MariaDB type for a column. Raises `ConfigurationError` for a type that the sink does not write."""
    return declared_type(name, data_type, _TYPES, "MariaDB")


_WHOLE: Final = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
_TEXT: Final = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"})
_BINARY: Final = frozenset({"varbinary", "tinyblob", "blob", "mediumblob", "longblob"})


def _is_float(column: Column, *types: str) -> bool:
    # `double(10,2)` rounds.
    return column.type in types and column.scale is None


def _is_text(column: Column) -> bool:
    return column.type in _TEXT and column.charset == CHARSET


def _holds_micros(column: Column, *types: str) -> bool:
    return column.type in types and column.precision == _MICROS


_HOLDS: Final[Mapping[str, Callable[[Column], bool]]] = {
    "byte": lambda column: column.is_whole or _is_float(column, "float", "double") or _is_text(column),
    "short": lambda column: column.is_whole or _is_float(column, "float", "double") or _is_text(column),
    "integer": lambda column: column.is_whole or _is_float(column, "double") or _is_text(column),
    "long": lambda column: column.is_whole or _is_text(column),
    "float": lambda column: _is_float(column, "float", "double"),
    "double": lambda column: _is_float(column, "double"),
    "boolean": lambda column: column.is_whole,
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
