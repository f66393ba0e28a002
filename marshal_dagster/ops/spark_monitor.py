"""Monitoring of Spark while it processes a batch.

The context managers here log Spark's progress, and turn a full disk or a dead session into one clear error.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from dagster import Failure, OpExecutionContext, RetryRequested

from marshal_dagster.errors import BatchAbortedError, MarshalError
from marshal_dagster.spark.error_text import full_disk_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


PROGRESS_EVERY_S: Final = 5.0
"""Seconds between two checks of Spark's progress. A line is logged if something changed."""


@contextmanager
def full_disk_as_abort(group: str, topic: str) -> Iterator[None]:
    """Raise `BatchAbortedError` with a one-line message if the block fails because a disk cannot be written."""
    try:
        yield
    except Exception as error:
        text = full_disk_text(error)
        if text is None:
            raise
        raise BatchAbortedError(
            f"group {group!r}, topic {topic!r}: the batch failed and its claims are released, because a disk is full "
            f"or a folder cannot be created ({text}). Free disk space (Spark writes to spark.local.dir), and run again"
        ) from None  # otherwise the traceback shows the whole JVM stack


@contextmanager
def session_death_as_abort(spark: "SparkSession") -> Iterator[None]:
    """Raise `BatchAbortedError` instead of Spark's error if the session died during the block."""
    from marshal_dagster.spark.job_control import session_ended

    try:
        yield
    except (MarshalError, Failure, RetryRequested):
        raise
    except Exception as error:
        ended = session_ended(spark, error)
        if ended is None:
            raise
        text = next(iter(str(error).splitlines()), type(error).__name__)
        raise BatchAbortedError(f"{ended} ({text}): the batch ended and its claims are released. Run again") from error


@contextmanager
def progress_lines(context: OpExecutionContext, spark: "SparkSession", batch_id: str) -> Iterator[None]:
    """Log Spark's progress from a separate thread while the block runs."""
    from marshal_dagster.spark.job_control import progress

    over = threading.Event()

    def log_progress() -> None:
        last = ""
        while not over.wait(PROGRESS_EVERY_S):
            now = progress(spark, batch_id)
            if now is not None and str(now) != last:
                last = str(now)
                context.log.info("Spark: %s", last)

    thread = threading.Thread(target=log_progress, name=f"progress {batch_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
