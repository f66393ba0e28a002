"""The function that batches have in every kind of session: in the run, on a server, on a cluster, in a script."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from marshal_dagster.spark import job_control

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def values(frame: "DataFrame", slow_ms: int = 0) -> "DataFrame":
    """Give partition, offset and the message as text; each one takes `slow_ms`."""
    slow = f"left(java_method('java.lang.Thread', 'sleep', {slow_ms}L), 0)" if slow_ms else "''"
    return frame.selectExpr("partition", "offset", f"concat(CAST(value AS STRING), {slow}) AS value")


def mark_when_at_work(spark: "SparkSession", batch_id: str, mark: Path) -> None:
    """Touch `mark` once Spark has tasks of the batch at work, from a thread of its own."""

    def watch() -> None:
        while True:
            progress = job_control.progress(spark, batch_id)
            if progress is not None and progress.active_stages:
                mark.touch()
                return
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
