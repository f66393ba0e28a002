"""Clean up in a Spark session, unless an interrupt ends the work."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def unless_interrupted(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` at the end of the block and after an error, but not after an interrupt.

    After an interrupt the JVM would answer the call only after its current job.
    """
    try:
        yield
    except Exception:
        clean_up()
        raise
    else:
        clean_up()


@contextmanager
def changed_settings(spark: "SparkSession", settings: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of a session during the block. After an interrupt they stay until the session ends."""
    before = {name: spark.conf.get(name) for name in settings}
    with unless_interrupted(lambda: _set(spark, before)):
        _set(spark, settings)
        yield


def _set(spark: "SparkSession", settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        spark.conf.set(name, value)
