"""Check that the Python workers of a session's executors have the packages that a sink's tasks import."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from marshal_dagster._internal.extras import Extra
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.error_text import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARROW: Final = ("pandas", "pyarrow")
"""The packages with which Spark passes rows to Python as Arrow batches. The driver needs them too."""
_MISSING: Final = re.compile(r"No module named '(?P<name>[\w.]+)'")
_checked: "WeakKeyDictionary[SparkSession, set[str]]" = WeakKeyDictionary()
"""The packages that the executors of a session have."""


def check_executors(spark: "SparkSession", packages: Sequence[str], otherwise: str) -> None:
    """Check that driver and executors can import packages. The result is kept for the session.

    Args:
        spark: The session.
        packages: The names of the packages, besides those for Arrow batches.
        otherwise: What the user can do instead of installing them, as the end of a sentence.

    Raises:
        ConfigurationError: A package is missing, or the executors run another version of Python.
    """
    wanted = (*ARROW, *packages)
    if _checked.get(spark, set()).issuperset(wanted):
        return
    _check_driver(otherwise)
    try:
        rows = spark.range(1).mapInArrow(_probe(wanted), "missing string").collect()
        missing = sorted(row.missing for row in rows)
    except Exception as error:
        found = _MISSING.search(str(error))
        if found is None:
            raise ConfigurationError(
                f"the executors of this session cannot run Python functions on Arrow batches ({first_line(error)}): "
                f"give them the driver's version of Python, or {otherwise}"
            ) from error
        missing = [found["name"]]
    if missing:
        raise ConfigurationError(
            f"the Python of this session's executors has no {' and no '.join(missing)}: install it there, or "
            f"{otherwise}"
        )
    _checked.setdefault(spark, set()).update(wanted)


def _check_driver(otherwise: str) -> None:
    try:
        from pyspark.sql.pandas.utils import require_minimum_pandas_version, require_minimum_pyarrow_version

        require_minimum_pandas_version()
        require_minimum_pyarrow_version()
    except ImportError as error:
        raise ConfigurationError(
            f"Spark cannot pass Arrow batches to Python ({first_line(error)}): {Extra.SPARK.command}, or {otherwise}"
        ) from error


def _probe(packages: Sequence[str]) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return a function that yields the names of packages that are missing where it runs."""

    def missing(_: Iterable[Any]) -> Iterator[Any]:
        import importlib.util

        import pyarrow as pa

        names = [name for name in packages if importlib.util.find_spec(name) is None]
        yield pa.RecordBatch.from_pydict({"missing": pa.array(names, pa.string())})

    missing.__module__ = "__main__"  # so that its code is pickled, because the executors may not have this package
    return missing
