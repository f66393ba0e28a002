"""`DeltaSink` compared with Spark's own append to a Delta table, in one warm Spark session."""

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from benchmarks import services
from benchmarks.batch import local_session
from benchmarks.harness import Benchmark, Measured
from benchmarks.sink_input import SinkInput, Sizes, compare
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.sinks import DeltaSink, delta_settings
from marshal_dagster.spark.connector import fetch_connector
from marshal_dagster.spark.packages import delta_package

MARSHAL: Final = (
    "struct<`group`: string, topic: string, data_topic_id: string, generation: bigint, first_readable: bigint, "
    "`end`: bigint, attempt: string>"
)


@dataclass(slots=True)
class Sides:
    """Both ways to append the same rows to a table, batch after batch; each call returns rows per second."""

    messages: SinkInput
    folder: Path
    _batches: list[int] = field(default_factory=lambda: [0, 0])
    _sink: DeltaSink = field(init=False)

    def __post_init__(self) -> None:
        """Create both tables."""
        columns = "partition int, offset bigint, key string, value string"
        self._create("ours", f"{columns}, marshal {MARSHAL}")
        self._create("spark", columns)
        self._sink = DeltaSink(self._place("ours"), session=lambda: self.messages.spark)

    def ours(self) -> float:
        """Append with the sink: one commit has the rows and the positions."""
        shift = self._batches[0] * self.messages.width
        ranges = [
            replace(range_, start=shift, first_readable=shift, end=shift + self.messages.width)
            for range_ in self.messages.ranges("benchmark")
        ]
        rows = self.messages.rows("partition", f"offset + {shift} AS offset")
        began_s = time.perf_counter()
        self._sink.write(rows, ranges, dict)
        return self._checked(0, "ours", time.perf_counter() - began_s)

    def beside(self) -> float:
        """Append with Spark and Delta alone. A batch that is repeated after its commit is there twice."""
        rows = self.messages.rows("partition", f"offset + {self._batches[1] * self.messages.width} AS offset")
        began_s = time.perf_counter()
        rows.write.format("delta").mode("append").save(self._place("spark"))
        return self._checked(1, "spark", time.perf_counter() - began_s)

    def _create(self, name: str, columns: str) -> None:
        self.messages.spark.sql(f"CREATE TABLE delta.`{self._place(name)}` ({columns}) USING delta")

    def _place(self, name: str) -> str:
        return str(self.folder / f"{name}_{self.messages.records}")

    def _checked(self, side: int, name: str, took_s: float) -> float:
        self._batches[side] += 1
        wanted = self.messages.wanted * self._batches[side]
        found = self.messages.spark.read.format("delta").load(self._place(name)).count()
        if found != wanted:
            raise RuntimeError(f"the table has {found} rows, not {wanted}")
        return self.messages.wanted / took_s


def run(sizes: Sizes) -> Measured:
    """Measure all sizes with one broker."""
    package = delta_package()
    fetch_connector(package)
    settings = delta_settings()
    jars = settings.pop("spark.jars")
    with (
        tempfile.TemporaryDirectory() as folder,
        services.broker() as connection,
        local_session(jars, settings) as spark,
        Topics(connection) as data,
    ):
        cases = compare(spark, connection, data, sizes, lambda messages: Sides(messages, Path(folder)), least=0.9)
    return Measured(cases, {"spark_master": "local[2]", "delta": package})


BENCHMARK: Final = Benchmark(
    "delta_sink", "rows to a Delta table exactly once, compared with Spark's own append", Sizes(), run
)
