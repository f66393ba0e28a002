"""Group members with real sinks, in a process for tests that kill or stop it.

`python -m tests.real.sink_worker JSON...` processes batches in effectively-once mode, with Spark or with a replacement
that needs no JVM. Each argument is a member of its own, in a thread; all share a Spark session. A member reports each
step as one line on stdout. At the step in its parameters it halts, reports that, and continues when its name comes as a
line on stdin.
"""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import BaseModel

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.log import Ack, Append, CoordinationLog
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import ClaimingMessages, DeliveryMode, GroupSettings, Heartbeat, RuleSet, parse
from marshal_dagster.sinks import DeltaSink, FileSink, IcebergSink, KafkaSink, MariaDBSink, PostgresSink
from marshal_dagster.sinks.row_writer import RowWriter
from marshal_dagster.spark import job_control
from marshal_dagster.spark.session import spark_settings, start_session
from tests.kafka_outputs import FakeKafkaSink
from tests.real.batch_worker import parent_ended, say
from tests.real.kill_points import KillableLog, KillPoint, Side, read_messages
from tests.session_settings import QUICK_HDFS, QUICK_PLANS, SMALL_DELTA, fetched_delta_settings
from tests.sink_outputs import TABLE, UPSERTS, FakeFileSink, FakeFrame, FakeMariaDBSink, FakePostgresSink, hook

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ["partition", "offset", "value"]
TASKS = 2
"""The tasks that write the rows of a member."""
_go_on: dict[str, threading.Event] = {}
"""By name, what lets a halted member continue."""


class Orders(BaseModel):
    """A member's parameters.

    Each line that it reports begins with `name`. `place` is the folder of the files or of a Delta table, the schema of
    the table in the PostgreSQL at `dsn`, the URL of a database (`is_mariadb`), a topic (`is_topic`), or the folder of
    an Iceberg catalog (`is_iceberg`). With `lacks_delta` the Delta table is in a session without Delta Lake. The member
    halts at the `halt_at_count`th time that the sink reaches the step `halt_at_step`. With `halt_in_commit` it halts
    between two records of its first commit, with `halt_when_written` before that commit. With `slow_ms` each message
    takes that long in Spark, and the member reports when Spark has started.
    """

    name: str = ""
    bootstrap_servers: str
    coordination_topic: str
    topic: str
    partitions: int
    group: str
    run_id: str
    place: str
    dsn: str | None = None
    is_topic: bool = False
    is_mariadb: bool = False
    is_delta: bool = False
    upserts: bool = False
    is_iceberg: bool = False
    lacks_delta: bool = False
    with_spark: bool = True
    heartbeat_interval_ms: int
    max_records: int | None = None
    halt_at_step: str | None = None
    halt_at_count: int = 1
    halt_in_commit: bool = False
    halt_when_written: bool = False
    slow_ms: int = 0
    watch_parent: bool = False

    def say(self, text: str) -> None:
        """Report one line."""
        say(self.name + text)

    def halt(self, where: str) -> None:
        """Report that this member has halted, and wait until it may continue."""
        self.say(f"halted {where}")
        _go_on[self.name].wait()
        _go_on[self.name].clear()


class HalfCommitLog(KillableLog):
    """A log whose member dies at its first commit, after the first of the commit's records."""

    def __init__(self, log: CoordinationLog, kill: Callable[[], None] | None = None) -> None:
        super().__init__(log, None, kill)
        self._ends: dict[int, int] = {}

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append, unless it is the commit: a Heartbeat at the end of a plan."""
        messages = [parse(record.value) for record in records]
        self._ends.update(
            {message.partition: message.plan_end for message in messages if isinstance(message, ClaimingMessages)}
        )
        if any(isinstance(each, Heartbeat) and each.offset == self._ends.get(each.partition) for each in messages):
            self.at = KillPoint(Side.WITHIN, "Heartbeat", self.seen["Heartbeat"] + 1)
        return super().append(records)


def open_sink(
    orders: Orders, spark: "SparkSession | None"
) -> DeltaSink | FileSink | IcebergSink | PostgresSink | MariaDBSink | KafkaSink:
    """Open the output."""
    sink: DeltaSink | FileSink | IcebergSink | PostgresSink | MariaDBSink | KafkaSink
    session = None if spark is None else lambda: spark
    if orders.is_topic:
        kind = KafkaSink if orders.with_spark else FakeKafkaSink
        writer = RowWriter.EXECUTORS if orders.halt_at_step is None else RowWriter.DRIVER  # steps of this process
        sink = kind(KafkaConnection(bootstrap_servers=orders.bootstrap_servers), orders.place, written_by=writer)
    elif orders.is_mariadb:
        sink = (MariaDBSink if orders.with_spark else FakeMariaDBSink)(orders.place, TABLE)
    elif orders.is_delta:
        sink = DeltaSink(orders.place, session=session, **(UPSERTS if orders.upserts else {}))
    elif orders.is_iceberg:
        sink = iceberg_sink(Path(orders.place))
    elif orders.dsn is None:
        sink = FileSink(orders.place, "json", session=session) if session else FakeFileSink(Path(orders.place))
    else:
        kind_of_table = PostgresSink if orders.with_spark else FakePostgresSink
        sink = kind_of_table(orders.dsn, TABLE, schema=orders.place)
    times = itertools.count(1)

    def reached(step: str) -> None:
        if step == orders.halt_at_step and next(times) == orders.halt_at_count:
            orders.halt(step)

    hook(sink, reached if orders.halt_at_step else None)
    return sink


def iceberg_sink(folder: Path) -> IcebergSink:
    """Open the table of the catalog in a folder."""
    from tests.iceberg_tables import NAME, catalog_name, catalog_properties  # pyiceberg may be missing

    return IcebergSink(NAME, catalog=catalog_name(folder), catalog_properties=catalog_properties(folder))


def open_delivery(orders: Orders) -> BatchSession:
    """Open the member's session."""
    connection = KafkaConnection(bootstrap_servers=orders.bootstrap_servers)
    log: CoordinationLog = KafkaLog(connection, orders.coordination_topic, orders.heartbeat_interval_ms)
    if orders.halt_in_commit:
        log = HalfCommitLog(log, lambda: orders.halt("between two commit records"))
    return BatchSession(
        log=log,
        data=Topics(connection),
        connection=connection,
        group=orders.group,
        client="worker",
        run_id=orders.run_id,
        settings=GroupSettings(orders.heartbeat_interval_ms, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE),
        reasons_to_stop=[parent_ended()] if orders.watch_parent else [],
    )


def result(batch: ClaimedBatch, orders: Orders, spark: "SparkSession | None") -> "DataFrame":
    """Return the rows that the batch produces."""
    if spark is None:
        batch.begin_processing()
        messages = read_messages(KafkaConnection(bootstrap_servers=orders.bootstrap_servers), batch.ranges)
        rows = [(partition, offset, value_of(partition, offset, orders.partitions)) for partition, offset in messages]
        return cast("DataFrame", FakeFrame(COLUMNS, tuple(rows)))
    frame = batch.read(spark).selectExpr("partition", "offset", "CAST(value AS STRING) AS value").coalesce(TASKS)
    if orders.slow_ms:
        threading.Thread(target=report_work, args=(spark, batch.batch_id, orders), daemon=True).start()
        slow = f"java_method('java.lang.Thread', 'sleep', {orders.slow_ms}L)"
        frame = frame.selectExpr("partition", "offset", f"concat(value, coalesce({slow}, '')) AS value")
    return frame


def value_of(partition: int, offset: int, partitions: int) -> str:
    """Return the message at this offset, as the `fill` fixture writes the messages."""
    return f"message {offset * partitions + partition}"


def report_work(spark: "SparkSession", batch_id: str, orders: Orders) -> None:
    """Report when Spark runs tasks of this batch."""
    while True:
        progress = job_control.progress(spark, batch_id)
        if progress is not None and progress.active_stages:
            orders.say("Spark is at work")
            return
        time.sleep(0.02)


def causes(error: BaseException | None) -> str:
    """Return an error and its chain of causes as text."""
    reported = []
    while error is not None:
        reported.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        error = error.__cause__
    return " <- ".join(reported)


def work(orders: Orders, spark: "SparkSession | None") -> int:
    """Process batches until the topic is drained. Return 1 if a batch failed."""
    delivery, sink = open_delivery(orders), open_sink(orders, spark)
    orders.say("ready")
    while True:
        batch = delivery.claimed_batch(BatchRequest(topic=orders.topic, max_records=orders.max_records), sink)
        try:
            with batch:
                if batch.idle is None:
                    orders.say(f"claimed {' '.join(str(one) for one in batch.all_ranges)}")
                    batch.write(result(batch, orders, spark))
                    if orders.halt_when_written:
                        orders.halt("when written")
        except MarshalError as error:
            orders.say(f"failed {causes(error)}")
            return 1
        if batch.idle is None:
            orders.say("committed")
        elif batch.idle.reason == "drained":
            orders.say("drained")
            return 0
        else:
            time.sleep(0.05)


def read_names() -> None:
    """Let each member continue whose name is read, and all at the end of stdin.

    Python cannot end while a thread waits in `sys.stdin`, which has a lock.
    """
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            _go_on[line.decode().removesuffix("\n")].set()
    for go_on in _go_on.values():
        go_on.set()


def main() -> int:
    """Let each member work. Return 1 if a batch failed."""
    members = [Orders.model_validate_json(argument) for argument in sys.argv[1:]]
    _go_on.update({orders.name: threading.Event() for orders in members})
    threading.Thread(target=read_names, daemon=True).start()
    spark = None
    if members[0].with_spark:
        slots = len(members) * TASKS if len(members) > 1 else 1
        extra = {"spark.master": f"local[{slots}]", "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "1"}
        extra |= QUICK_PLANS | QUICK_HDFS
        if any(orders.is_delta and not orders.lacks_delta for orders in members):
            extra |= SMALL_DELTA | fetched_delta_settings()
        spark = start_session(spark_settings(app_name="sink worker", extra=extra))
        spark.sparkContext.setLogLevel("OFF")
    with ThreadPoolExecutor(len(members)) as threads:
        return max(threads.map(lambda orders: work(orders, spark), members))


if __name__ == "__main__":
    sys.exit(main())
