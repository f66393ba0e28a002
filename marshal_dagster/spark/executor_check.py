"""Check that the Python workers of a session's executors have the packages that a sink's tasks import."""

import importlib.metadata
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
_DISTRIBUTION: Final = "marshal-dagster"
_PLACE: Final = re.compile(r"\(TID \d+\) \((?P<host>\S+) executor")
_ROWS: Final = 10_000
"""The rows of the probe. Spark divides them among all task slots, so usually each executor of that moment runs it."""
_MOST_PLACES: Final = 3
_checked: "WeakKeyDictionary[SparkSession, set[str]]" = WeakKeyDictionary()
"""The packages that the executors of a session have."""


def check_executors(spark: "SparkSession", packages: Sequence[str], otherwise: str) -> None:
    """Check that driver and executors can import packages. The result is kept for the session.

    Args:
        spark: The session.
        packages: The names of the packages, besides those for Arrow batches.
        otherwise: What the user can do instead of installing them, as the end of a sentence.

    Raises:
        ConfigurationError: A package is missing, or the executors have another version of Python or of this library.
    """
    wanted = (*ARROW, *packages)
    if _checked.get(spark, set()).issuperset(wanted):
        return
    _check_driver(otherwise)
    try:
        rows = (
            spark.range(_ROWS)
            .mapInArrow(_probe(wanted, _own_version()), "host string, python string, missing string")
            .collect()
        )
    except Exception as error:
        text = f"{error} {vars(error)}"  # PySpark keeps Java's text, which has the host, in a field
        place = f" on {found['host']}" if (found := _PLACE.search(text)) else ""
        if missing := _MISSING.search(text):
            raise _missing_error([missing["name"]], place, otherwise) from error
        raise ConfigurationError(
            f"the executors{place} cannot run Python functions on Arrow batches ({first_line(error)}): "
            f"give them the driver's version of Python, or {otherwise}"
        ) from error
    if rows:
        places = sorted({f"{row.host} ({row.python})" for row in rows})
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        place = f" on {', '.join(places[:_MOST_PLACES])}{more}"
        raise _missing_error({row.missing for row in rows}, place, otherwise)
    _checked.setdefault(spark, set()).update(wanted)


def _missing_error(names: Iterable[str], place: str, otherwise: str) -> ConfigurationError:
    return ConfigurationError(
        f"the Python of the executors{place} has no {' and no '.join(sorted(names))}: install it there, or {otherwise}"
    )


def _check_driver(otherwise: str) -> None:
    try:
        from pyspark.sql.pandas.utils import require_minimum_pandas_version, require_minimum_pyarrow_version

        require_minimum_pandas_version()
        require_minimum_pyarrow_version()
    except ImportError as error:
        raise ConfigurationError(
            f"Spark cannot pass Arrow batches to Python ({first_line(error)}): {Extra.SPARK.command}, or {otherwise}"
        ) from error


def _own_version() -> str | None:
    """Return the version of this library, None if it was not installed but copied."""
    try:
        return importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe(packages: Sequence[str], version: str | None) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return a function that yields each package that is missing where it runs, with the host and the Python.

    The functions of tasks are pickled, so they need the driver's version of this library.
    """
    distribution = _DISTRIBUTION

    def missing(_: Iterable[Any]) -> Iterator[Any]:
        import importlib.metadata
        import importlib.util
        import socket
        import sys

        import pyarrow as pa

        names = [name for name in packages if importlib.util.find_spec(name) is None]
        found = [each.version for each in importlib.metadata.distributions(name=distribution)]
        if version is not None and found and found[0] != version:
            names.append(f"{distribution} {version} (but {found[0]})")
        columns = {
            "host": [socket.gethostname()] * len(names),
            "python": [sys.executable] * len(names),
            "missing": names,
        }
        yield pa.RecordBatch.from_pydict({name: pa.array(values, pa.string()) for name, values in columns.items()})

    missing.__module__ = "__main__"  # so that its code is pickled, because the executors may not have this package
    return missing
