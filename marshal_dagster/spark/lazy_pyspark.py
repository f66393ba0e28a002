"""PySpark's column functions and types, imported on first use.

A process that uses no Spark never loads them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["functions", "has", "parse_ddl", "types"]

if TYPE_CHECKING:
    from pyspark.sql import functions, types
else:

    class _LazyModule:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> object:
            return getattr(import_module(self._name), name)

    functions, types = _LazyModule("pyspark.sql.functions"), _LazyModule("pyspark.sql.types")


def has(name: str) -> bool:
    """Return whether this PySpark has a function of columns; 3.5 lacks those for variants and UTF-8."""
    return hasattr(import_module("pyspark.sql.functions"), name)


def parse_ddl(schema: str) -> "types.DataType":
    """Return the type that a text in DDL describes. Raises `PySparkException` if it is invalid."""
    module = import_module("pyspark.sql.types")
    parse = getattr(module.DataType, "fromDDL", None) or module._parse_datatype_string  # noqa: SLF001 - before Spark 4.0
    parsed: types.DataType = parse(schema)
    return parsed
