"""A process with a Spark session and members of a group: `python -m tests.sink_faults.worker JSON`.

`tests.sink_faults.run` starts it. Its members work batch after batch in threads until SIGTERM or until its parent ends.
"""

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import psutil
from pydantic import BaseModel, Field, TypeAdapter

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.spark.session import spark_settings, start_session
from tests.fault_harness.journal import Journal
from tests.real.batch_worker import parent_ended
from tests.real.kill_points import die
from tests.sink_faults.outputs import OutputPlace, SinkKind, session_settings
from tests.sink_outputs import hook

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MEMBERS: Final = 2
MOST_SAID: Final = 500
GIVEN_UP: Final = 3
"""The exit code of a process whose JVM is gone."""
MOST_ATTEMPTS: Final = 1_000
"""Faults may interrupt the same plan more often than five times."""


class Orders(BaseModel):
    """The orders for a process. Its sinks make as many more steps as `dies` contains, once that file exists."""

    bootstrap_servers: str
    coordination_topic: str
    topic: str
    group: str
    run_id: str
    output: OutputPlace
    journal: Path
    dies: Path
    heartbeat_interval_ms: int
    max_records: int


class Ready(BaseModel):
    """The session has started."""

    kind: Literal["ready"] = "ready"


class Claimed(BaseModel):
    """A batch was claimed."""

    kind: Literal["claimed"] = "claimed"


class Committed(BaseModel):
    """A batch was committed: the number of ranges that were written, and of those that were there before."""

    kind: Literal["committed"] = "committed"
    written: int
    skipped: int


class Failed(BaseModel):
    """A batch failed, before or after it had claimed something."""

    kind: Literal["failed"] = "failed"
    had_claimed: bool
    text: str


Line = Annotated[Ready | Claimed | Committed | Failed, Field(discriminator="kind")]
LINES: Final[TypeAdapter[Line]] = TypeAdapter(Line)


class Worker:
    """One run of a process."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.journal: Journal[Line] = Journal(orders.journal, LINES)
        self.is_over = threading.Event()
        self._steps: int | None = None
        self._lock = threading.Lock()

    def work(self) -> int:
        """Let the members work until SIGTERM. Return 3 if the JVM is gone."""
        signal.signal(signal.SIGTERM, self._end)
        spark = start_session(spark_settings(app_name="sink faults", extra=session_settings(self.orders.output.kind)))
        spark.sparkContext.setLogLevel("OFF")
        self.journal.write(Ready())
        with ThreadPoolExecutor(MEMBERS) as threads:
            return max(threads.map(lambda number: self._member(spark, number), range(MEMBERS)))

    def _end(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_over.set()

    def _member(self, spark: "SparkSession", number: int) -> int:
        sink, delivery = self.orders.output.sink(lambda: spark), self._delivery(number)
        if self.orders.output.kind is not SinkKind.KAFKA:  # its tasks take the sink along
            hook(sink, self._reached)
        chance = random.Random(f"{self.orders.run_id} {number}")
        has_no_parent = parent_ended()
        while not self.is_over.is_set() and not has_no_parent():
            most = max(1, round(self.orders.max_records * chance.uniform(0.2, 1)))
            request = BatchRequest(topic=self.orders.topic, max_records=most, max_attempts=MOST_ATTEMPTS)
            batch = delivery.claimed_batch(request, sink)
            try:
                with batch:
                    if batch.idle is None:
                        self.journal.write(Claimed())
                        batch.write(self._result(batch, spark))
            except Exception as error:  # noqa: BLE001 - a killed JVM raises errors of py4j
                text = f"{type(error).__name__}: {str(error)[:MOST_SAID]}"
                self.journal.write(Failed(had_claimed=bool(batch.all_ranges), text=text))
                if not self._has_jvm(spark):
                    self.is_over.set()
                    return GIVEN_UP
                if not isinstance(error, MarshalError):
                    time.sleep(0.5)
            else:
                if batch.idle is None:
                    self.journal.write(Committed(written=len(batch.ranges), skipped=len(batch.skipped)))
            time.sleep(0.1)
        delivery.close()
        return 0

    def _delivery(self, number: int) -> BatchSession:
        connection = KafkaConnection(bootstrap_servers=self.orders.bootstrap_servers, timeout_s=10)
        interval_ms = self.orders.heartbeat_interval_ms
        return BatchSession(
            log=KafkaLog(connection, self.orders.coordination_topic, interval_ms),
            data=Topics(connection),
            connection=connection,
            group=self.orders.group,
            client="sink-faults",
            run_id=f"{self.orders.run_id}-{number}",
            settings=GroupSettings(interval_ms, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE),
        )

    @staticmethod
    def _result(batch: ClaimedBatch, spark: "SparkSession") -> "DataFrame":
        """Return the rows of a batch. Each value is that of the message and the generation in which it was read."""
        generations = " ".join(f"WHEN {one.partition} THEN {one.generation}" for one in batch.all_ranges)
        value = f"concat(CAST(value AS STRING), '|', CASE partition {generations} END)"
        return batch.read(spark).selectExpr("partition", "offset", f"{value} AS value").repartition(2)

    def _reached(self, _: str) -> None:
        """Die if the sinks have made the ordered number of steps."""
        with self._lock:
            if self._steps is None and self.orders.dies.exists():
                self._steps = int(self.orders.dies.read_text())
            if self._steps is None:
                return
            self._steps -= 1
            if self._steps:
                return
            for child in psutil.Process().children(recursive=True):
                child.kill()
            die()

    @staticmethod
    def _has_jvm(spark: "SparkSession") -> bool:
        gateway = spark.sparkContext._gateway
        return gateway is not None and gateway.proc.poll() is None


if __name__ == "__main__":
    code = Worker(Orders.model_validate_json(sys.argv[1])).work()
    sys.stdout.flush()
    os._exit(code)
