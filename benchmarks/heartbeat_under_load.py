"""How late heartbeats are while their own batch loads all cores, in Spark and in the same Python process."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import services
from benchmarks.harness import Benchmark, Case, Goal, Measured, rounded
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import ClaimingPartition, GroupSettings, Heartbeat, coordination_partition, parse
from marshal_dagster.spark.session import spark_settings, start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COORDINATION_TOPIC: Final = "__marshal"
TOPIC: Final = "orders"
LATE_AT_MOST: Final = 1.25
"""Target for the longest time between two heartbeats, in intervals: none is late by more than a quarter."""
_READ_WITHIN_S: Final = 60.0
_TASKS_A_CORE: Final = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: duration of the batch, heartbeat interval of the group, and rows of a Spark job.

    The kept result is of 1 h with 10 s.
    """

    seconds: int = 120
    heartbeat_interval_ms: int = 10_000
    rows_a_job: int = 200_000_000


def run(sizes: Sizes) -> Measured:
    """Run a batch that loads all cores, and read from the log when its heartbeats arrived."""
    with services.broker() as connection, tempfile.TemporaryDirectory(prefix="marshal-benchmark-") as folder:
        services.create_coordination_topic(connection, COORDINATION_TOPIC)
        with Topics(connection) as topics:
            topics.create(TOPIC, 1, 1)
            services.load(connection, TOPIC, [(0, b"order")])
            instance = _hold(connection, topics, sizes, Path(folder))
        beats_ms = list(_beats_ms(connection, instance))
    gaps_s = [(later - earlier) / 1_000 for earlier, later in pairwise(beats_ms)]
    if not gaps_s:
        raise RuntimeError(f"{len(beats_ms)} claims and heartbeats in {sizes.seconds} s: increase --seconds")
    interval_s = sizes.heartbeat_interval_ms / 1_000
    late = max(0.0, max(gaps_s) - interval_s) / interval_s
    return Measured(
        [
            Case(
                "longest time between two heartbeats of a batch that loads all cores, beside the interval",
                [max(gaps_s)],
                [interval_s],
                "s",
                Goal.RATIO_AT_MOST,
                LATE_AT_MOST,
            )
        ],
        {
            "heartbeats": len(beats_ms) - 1,
            "latest_by_intervals": rounded(late),
            "load_average_at_end": [rounded(each) for each in os.getloadavg()],
        },
    )


def _hold(connection: KafkaConnection, topics: Topics, sizes: Sizes, folder: Path) -> str:
    """Work on a batch for the configured time, and return its instance id."""
    settings = {"spark.master": "local[*]", "spark.local.dir": str(folder)}
    spark = start_session(spark_settings(app_name="benchmark", extra=settings))
    spark.sparkContext.setLogLevel("ERROR")
    log = KafkaLog(connection, COORDINATION_TOPIC, sizes.heartbeat_interval_ms)
    delivery = BatchSession(
        log=log,
        data=topics,
        connection=connection,
        group="benchmark",
        client="benchmark",
        run_id="3b0e6b5c-6f64-4a4e-9d1b-0c8f6a2d7e11",
        settings=GroupSettings(sizes.heartbeat_interval_ms),
    )
    with delivery.claimed_batch(BatchRequest(topic=TOPIC)) as batch:
        batch.read(spark).count()
        _load_all_cores(spark, batch, sizes)
    spark.stop()
    log.close()
    return batch.batch_id


def _load_all_cores(spark: "SparkSession", batch: ClaimedBatch, sizes: Sizes) -> None:
    """Keep more Spark tasks than cores busy, and the interpreter of this process."""
    from pyspark import InheritableThread

    until_s = time.monotonic() + sizes.seconds
    tasks = _TASKS_A_CORE * (os.cpu_count() or 1)
    failed: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        try:
            while time.monotonic() < until_s:
                spark.range(0, sizes.rows_a_job, 1, tasks).selectExpr("max(xxhash64(id, id))").collect()
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            over.set()

    thread = InheritableThread(target=work)
    thread.start()
    spun = 0
    while not over.is_set():
        spun += sum(number * number for number in range(10_000))
    thread.join()
    if failed:
        raise failed[0]
    batch.check()


def _beats_ms(connection: KafkaConnection, instance: str) -> Iterator[int]:
    """Yield the log times (ms) of the instance's claim and of each heartbeat."""
    log = KafkaLog(connection, COORDINATION_TOPIC)
    partition = coordination_partition(TOPIC, services.COORDINATION_PARTITIONS)
    end = log.bounds([partition])[partition].end
    log.follow({partition: 0})
    for chunk in log.read_until({partition: end}, _READ_WITHIN_S):
        for _, at_ms, value in chunk.records:
            message = parse(value)
            if isinstance(message, ClaimingPartition | Heartbeat) and message.instance == instance:
                yield at_ms
    log.close()


BENCHMARK: Final = Benchmark(
    "heartbeat_under_load", "how late heartbeats are while the batch loads all cores", Sizes(), run
)
