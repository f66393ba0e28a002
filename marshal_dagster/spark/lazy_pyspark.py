"""PySpark's column functions and types, imported on first use.

A process that uses no Spark never loads them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["functions", "types"]

if TYPE_CHECKING:
    from pyspark.sql import functions, types
else:

    class _LazyModule:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> object:
            return getattr(import_module(self._name), name)

    functions, types = _LazyModule("pyspark.sql.functions"), _LazyModule("pyspark.sql.types")
