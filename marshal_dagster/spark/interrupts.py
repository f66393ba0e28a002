"""Clean up in a Spark session, unless an interrupt ends the work."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_lock = threading.Lock()
_changed: "WeakKeyDictionary[SparkSession, dict[str, tuple[int, Any]]]" = WeakKeyDictionary()
"""The settings that are changed now: how many blocks changed each one, and its value before."""


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
    """Change settings of a session during the block. After an interrupt they stay until the session ends.

    Threads that change a setting at the same time share it, and the last one sets its old value again.
    """
    with _lock:
        changed = _changed.setdefault(spark, {})
        for name, value in settings.items():
            users, before = changed.get(name) or (0, spark.conf.get(name))
            changed[name] = users + 1, before
            spark.conf.set(name, value)
    with unless_interrupted(lambda: _leave(spark, settings)):
        yield


def _leave(spark: "SparkSession", names: Iterable[str]) -> None:
    with _lock:
        changed = _changed[spark]
        for name in names:
            users, before = changed.pop(name)
            if users > 1:
                changed[name] = users - 1, before
            else:
                spark.conf.set(name, before)
