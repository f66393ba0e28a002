"""Spark, watched while it works on a batch."""

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
"""Seconds between two looks at how far Spark is; a line is logged when something has changed."""


@contextmanager
def full_disk_as_abort(group: str, topic: str) -> Iterator[None]:
    """Raise `BatchAbortedError` in one line where the block fails because nothing can be written."""
    try:
        yield
    except Exception as error:
        text = full_disk_text(error)
        if text is None:
            raise
        raise BatchAbortedError(
            f"group {group!r}, topic {topic!r}: a disk is full or a folder cannot be made ({text}). The batch ends and "
            "its claims are released: make room there (Spark's own files are in spark.local.dir), and run again"
        ) from None  # else the JVM's whole stack is shown too


@contextmanager
def session_death_as_abort(spark: "SparkSession") -> Iterator[None]:
    """Raise `BatchAbortedError` in place of what Spark raises when the session has died under the block."""
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
        raise BatchAbortedError(f"{ended} ({text}): this batch ends here and its claims are released") from error


@contextmanager
def progress_lines(context: OpExecutionContext, spark: "SparkSession", batch_id: str) -> Iterator[None]:
    """Log how far Spark is, from a thread of its own, while the block runs."""
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
