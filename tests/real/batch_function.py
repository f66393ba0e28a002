"""The processing function of the test batches, for every kind of session: local, Connect, cluster and spark-submit."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from marshal_dagster.spark import job_control

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def values(frame: "DataFrame", slow_ms: int = 0, slow_below: str | None = None) -> "DataFrame":
    """Return partition, offset and the message as text. Each message takes `slow_ms` milliseconds.

    If `slow_below` is given, messages are slow only on executors that work below a folder of this name.
    """
    slow = f"left(java_method('java.lang.Thread', 'sleep', {slow_ms}L), 0)" if slow_ms else "''"
    if slow_below is not None:
        folder = "java_method('java.lang.System', 'getProperty', 'user.dir')"
        slow = f"IF(contains({folder}, '/{slow_below}/'), {slow}, '')"
    return frame.selectExpr("partition", "offset", f"concat(CAST(value AS STRING), {slow}) AS value")


def mark_when_at_work(spark: "SparkSession", batch_id: str, mark: Path) -> None:
    """Start a thread that creates the file `mark` once Spark runs tasks of the batch."""

    def watch() -> None:
        while True:
            progress = job_control.progress(spark, batch_id)
            if progress is not None and progress.active_stages:
                mark.touch()
                return
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
