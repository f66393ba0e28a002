"""`FileSink` compared with Spark's own Parquet writer, in one warm Spark session."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks import services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.sink_input import SinkInput, Sizes, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import FileSink


@dataclass(slots=True)
class Sides:
    """Both ways to write the same rows to an empty folder; each call returns rows per second."""

    messages: SinkInput
    folder: Path
    _folders: Iterator[int]

    def ours(self) -> float:
        """Write with the sink: files are synced, committed by one more file, and moved to their visible places."""
        folder = self._empty_folder()
        sink = FileSink(folder, session=lambda: self.messages.spark)
        rows, ranges = self.messages.rows("partition", "offset"), self.messages.ranges("benchmark")
        began_s = time.perf_counter()
        sink.write(rows, ranges, dict)
        return self._checked(folder, time.perf_counter() - began_s)

    def beside(self) -> float:
        """Write with Spark alone. Nothing is synced, and a batch that is repeated is there twice."""
        folder, rows = self._empty_folder(), self.messages.rows("partition", "offset")
        began_s = time.perf_counter()
        rows.write.mode("append").parquet(folder)
        return self._checked(folder, time.perf_counter() - began_s)

    def _empty_folder(self) -> str:
        return str(self.folder / f"output_{next(self._folders)}")

    def _checked(self, folder: str, took_s: float) -> float:
        return self.messages.rate(self.messages.spark.read.parquet(folder).count(), took_s)


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker."""
    with (
        tempfile.TemporaryDirectory() as folder,
        services.broker() as connection,
        local_session() as spark,
        Topics(connection) as data,
    ):
        folders = count()
        cases = compare(
            spark, connection, data, sizes, lambda messages: Sides(messages, Path(folder), folders), least=0.9
        )
    return Measured(cases, {"spark_master": "local[2]"})


BENCHMARK: Final = Benchmark(
    "file_sink", "rows to Parquet files exactly once, compared with Spark's own writer", Sizes(), run
)
