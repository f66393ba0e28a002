"""A separate driver process for tests, because a process has only one cluster session or Connect session.

`Driver` calls a module's function in that process and passes on its result or exception. The session stays open between
calls.
"""

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

from marshal_dagster.admin.revoke import ClaimRevoker
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, failing_record
from marshal_dagster.coordination.claimer import assume_alive, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ClaimLostError, FailingRecordError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import Owner
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.sinks import FileSink, Sink
from marshal_dagster.spark.connect import is_connect
from marshal_dagster.spark.connect_session import connect, disconnect
from marshal_dagster.spark.session import spark_settings, start_session
from tests.real.batch_function import mark_when_at_work, values
from tests.real.services import watched
from tests.real.spark_cluster import prepare_driver
from tests.sink_conformance import Row
from tests.sink_outputs import hook

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WITHIN_S = 200.0
_STACK_S = 2.0
"""The time that a process gets to write its stack."""
PARTITIONS, MESSAGES = 4, 80
_ENDLESS_MS = 60_000
_NOTICED_WITHIN_MS = 20_000
"""The heartbeat interval of a batch that is revoked."""
_current: "list[tuple[Where, SparkSession]]" = []


@dataclass(frozen=True)
class Where:
    """The session to use: the URL of a master with settings, or the URL of a Connect server with its token."""

    master: str
    settings: tuple[tuple[str, str], ...] = ()
    token: str | None = None


@dataclass(frozen=True)
class Work:
    """One group's work on one topic."""

    where: Where
    bootstrap_servers: str
    coordination_topic: str
    topic: str
    output: Path
    mode: DeliveryMode = DeliveryMode.EFFECTIVELY_ONCE
    group: str = field(default_factory=lambda: new_instance_id("orders"))
    heartbeat_interval_ms: int = 60_000

    @property
    def mark(self) -> Path:
        """The file that shows that Spark runs tasks of the batch."""
        return self.output.with_name("at work")

    @property
    def may_continue(self) -> Path:
        """The file for which tasks wait (`note_each`)."""
        return self.output.with_name("may continue")


class Driver:
    """The process with the session.

    If a call hangs, the process prints its stack and is killed, so later calls fail.
    """

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._pid = pool.submit(os.getpid).result(WITHIN_S)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:  # noqa: ANN401 - the function's
        """Start `function` in the process and return a function that waits for its result."""
        future = self._pool.submit(function, *arguments)

        def wait() -> Any:  # noqa: ANN401 - the function's
            try:
                return future.result(WITHIN_S)
            except TimeoutError:
                os.kill(self._pid, signal.SIGUSR1)
                time.sleep(_STACK_S)
                os.kill(self._pid, signal.SIGKILL)
                raise

        return wait

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - the function's
        """Call `function` in the process and return its result."""
        return self.start(function, *arguments)()


@contextmanager
def running_driver() -> Iterator[Driver]:
    """Start the process, and end it with its session."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        driver = Driver(pool)
        with watched("the process with the session", driver._pid):
            yield driver
        driver.call(stop_session)


def _prepare() -> None:
    faulthandler.register(signal.SIGUSR1)
    prepare_driver()


def session(where: Where) -> "SparkSession":
    """Return the session for `where`. Stop the previous session if it is a different one."""
    if not _current or _current[0][0] != where:
        stop_session()
        if where.master.startswith("sc://"):
            _current.append((where, connect(where.master, token=where.token)))
            return _current[0][1]
        here = {"spark.sql.shuffle.partitions": "2", "spark.driver.host": "127.0.0.1"}
        settings = spark_settings(app_name="driver", extra=_small(where.master) | here | dict(where.settings))
        found = start_session(settings)
        found.sparkContext.setLogLevel("OFF")
        _current.append((where, found))
    return _current[0][1]


def _small(master: str) -> dict[str, str]:
    """Return the settings of a session with little memory whose executors start quickly."""
    memory = {"spark.driver.memory": "512m", "spark.executor.memory": "512m"}
    return {"spark.master": master, "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"], **memory}


def stop_session() -> None:
    """Stop the session if there is one."""
    while _current:
        spark = _current.pop()[1]
        if is_connect(spark):
            disconnect(spark)
        else:
            spark.stop()


def open_delivery(work: Work, is_dead: Callable[[Owner], bool] = assume_alive) -> BatchSession:
    """Open a session of a group member."""
    connection = KafkaConnection(bootstrap_servers=work.bootstrap_servers)
    return BatchSession(
        log=KafkaLog(connection, work.coordination_topic, work.heartbeat_interval_ms),
        data=Topics(connection),
        connection=connection,
        group=work.group,
        client="driver",
        run_id=f"run{time.monotonic_ns()}",
        settings=GroupSettings(work.heartbeat_interval_ms, RuleSet.NATIVE, work.mode),
        is_dead=is_dead,
    )


@contextmanager
def claimed(
    work: Work, sink: Sink | None = None, is_dead: Callable[[Owner], bool] = assume_alive
) -> Iterator[ClaimedBatch]:
    """Claim a batch of all messages, and close the member afterwards."""
    delivery = open_delivery(work, is_dead)
    try:
        with delivery.claimed_batch(BatchRequest(topic=work.topic), sink) as batch:
            yield batch
    finally:
        delivery.log.close()
        delivery.data.close()


def messages() -> list[Row]:
    """Return the rows of the topic's messages, as the `fill` fixture writes them."""
    return sorted((n % PARTITIONS, n // PARTITIONS, f"message {n}") for n in range(MESSAGES))


def rows_in(paths: Iterable[Path]) -> list[Row]:
    """Return the rows of JSON-lines files."""
    lines = (json.loads(line) for path in paths for line in path.read_text().splitlines())
    return sorted((row["partition"], row["offset"], row["value"]) for row in lines)


def write_through_the_sink(work: Work, endless_below: str | None = None) -> None:
    """Process one batch in effectively-once mode, into files.

    Tasks do not end on the worker whose folder is `endless_below`.
    """
    spark = session(work.where)
    with claimed(work, FileSink(work.output, format="json")) as batch:
        if endless_below:
            mark_when_at_work(spark, batch.batch_id, work.mark)
        batch.write(values(batch.read(spark), _ENDLESS_MS if endless_below else 0, endless_below))


def write_into(work: Work, sink: Sink) -> None:
    """Process one batch in effectively-once mode. The session is created before the sink uses it."""
    spark = session(work.where)
    with claimed(work, sink) as batch:
        batch.write(values(batch.read(spark)))


def write_and_lose_an_executor(work: Work, sink: Sink, step: str | None) -> None:
    """Process one batch. The JVM of the first executor is killed whose task reaches a step of the sink.

    Without a step it is killed when a task has read half of its messages.
    """
    from pyspark.sql import functions as f

    driver, mark = os.getpid(), str(work.mark)

    def kill(reached: str | None) -> None:
        import os

        import psutil

        if reached != step or os.getpid() == driver:
            return
        try:
            open(mark, "x").close()  # noqa: PTH123 - runs in an executor's Python
        except FileExistsError:
            return
        for parent in psutil.Process().parents():
            if parent.name() == "java":
                parent.kill()
                break

    def kill_at_half(value: str) -> str:
        if int(value.split()[1]) >= MESSAGES // 2:
            kill(None)
        return value

    kill.__module__ = kill_at_half.__module__ = "__main__"  # pickled with its code, which executors cannot import
    hook(sink, kill)
    spark = session(work.where)
    with claimed(work, sink) as batch:
        rows = values(batch.read(spark))
        if step is None:
            rows = rows.withColumn("value", f.udf(kill_at_half, "string", useArrow=False)("value"))
        batch.write(rows)


def fail_at_a_message(work: Work) -> str:
    """Return the error of a batch that fails at message 33."""
    failing_record.SEARCH_S = 600.0  # type: ignore[misc] # the machine may be busy
    spark = session(work.where)
    value = "IF(CAST(value AS string) = 'message 33', raise_error('no good'), 1) AS value"
    with pytest.raises(FailingRecordError) as raised, claimed(work, FileSink(work.output)) as batch:
        batch.write(batch.read(spark).selectExpr("partition", "offset", value))
    return str(raised.value)


def rows_of_table(work: Work) -> list[Row]:
    """Read the Delta table at the work's output with plain Spark."""
    table = session(work.where).read.format("delta").load(str(work.output))
    return sorted(tuple(row) for row in table.select("partition", "offset", "value").collect())


def write_oneself(work: Work) -> None:
    """Process one at-least-once batch that writes its output itself."""
    with claimed(work) as batch:
        values(batch.read(session(work.where))).write.json(str(work.output))


def fail_in_a_task(work: Work) -> list[str]:
    """Process a batch whose task records that it ran and then fails. Return the states in the batch's report.

    The failing record is not searched for, because each part would fail as often as the session retries.
    """
    from pyspark.sql import functions as f

    spark, noted = session(work.where), str(work.output)

    @f.udf("string")
    def note_and_fail(_: bytes) -> str:
        with open(noted, "a") as file:  # noqa: PTH123 - runs in an executor's Python
            file.write("ran\n")
        raise ValueError("this record is poison")

    batches = []

    def process() -> None:
        with claimed(work) as batch:
            batches.append(batch)
            frame = batch.read(spark).where("partition = 0 AND offset = 0")
            frame.coalesce(1).select(note_and_fail("value")).collect()

    with pytest.raises(Exception, match="this record is poison"), patch.object(failing_record, "SEARCH_S", 0.0):
        process()
    return [each.state for each in batches[0].report()]


def note_each(work: Work) -> list[str]:
    """Process a batch whose tasks record each offset. Return the states in the batch's report.

    After three messages each task waits for the file `may_continue`.
    """
    from pyspark.sql import functions as f

    spark, noted, may_continue = session(work.where), str(work.output), str(work.may_continue)

    @f.udf("string")
    def note(partition: int, offset: int) -> str:
        with open(noted, "a") as file:  # noqa: PTH123 - runs in an executor's Python
            file.write(f"{partition}/{offset}\n")
        while offset >= 2 and not os.path.exists(may_continue):  # noqa: PTH110 - runs in an executor's Python
            time.sleep(0.05)
        return ""

    batches = []

    def process() -> None:
        with claimed(work) as batch:
            batches.append(batch)
            batch.read(spark).select(note("partition", "offset")).collect()

    with pytest.raises(Exception, match="Spark runs a task of this batch again"):
        process()
    return [each.state for each in batches[0].report()]


def run_op(work: Work, spark: dg.ConfigurableResource[Any], slow_ms: int = 0) -> tuple[bool, str]:
    """Execute a run whose op uses the session of a resource. Return whether it succeeded, and its error."""
    stop_session()

    def process(_: dg.OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> "DataFrame":
        mark_when_at_work(frame.sparkSession, batch.batch_id, work.mark)
        return values(frame, slow_ms)

    made = build_claimed_batch_op(
        process, name="orders", topic=work.topic, spark_key="spark", sink=FileSink(work.output, format="json")
    )
    claimer = ClaimerResource(
        connection=KafkaConnectionConfig(bootstrap_servers=work.bootstrap_servers),
        coordination_topic=work.coordination_topic,
        group=work.group,
        delivery="effectively_once",
        heartbeat_interval_s=20,
    )

    @dg.job(resource_defs={"spark": spark, "claimer": claimer})
    def job() -> None:
        made()

    with dg.DagsterInstance.ephemeral() as instance:
        done = job.execute_in_process(instance=instance, raise_on_error=False)
    errors = [event.step_failure_data.error for event in done.all_events if event.is_step_failure]
    cause = None if not errors or errors[0] is None else errors[0].cause
    return done.success, "" if cause is None else cause.message.strip()


def run_with_dagsters_session(work: Work) -> tuple[bool, str]:
    """Execute a run with the session of a `LazyPySparkResource`, and stop that session."""
    settings = spark_settings(app_name="dagster", extra=_small(work.where.master) | {"spark.cores.max": "1"})
    spark = LazyPySparkResource(spark_config=settings)
    try:
        return run_op(work, spark)
    finally:
        spark.spark_session.stop()


def revoke(work: Work) -> None:
    """Revoke all claims of the group, as another member."""
    connection = KafkaConnection(bootstrap_servers=work.bootstrap_servers)

    def open_log(interval_ms: int) -> Rationalizer:
        return Rationalizer(KafkaLog(connection, work.coordination_topic, interval_ms))

    with closing(ClaimRevoker(open_log, work.group, work.topic, "another")) as revoking:
        assert len(revoking.carry_out(revoking.look())) == PARTITIONS


def lose_a_batch(work: Work, spark: "SparkSession | None" = None) -> tuple[str, str]:
    """Process a batch that would take longer than any test, and revoke it while Spark works.

    Return the error of the batch's block, and the cause of that error.
    """
    spark = spark or session(work.where)
    work = replace(work, heartbeat_interval_ms=_NOTICED_WITHIN_MS)

    def revoke_when_at_work() -> None:
        while not work.mark.exists():
            time.sleep(0.05)
        revoke(work)

    try:
        with claimed(work) as batch:
            mark_when_at_work(spark, batch.batch_id, work.mark)
            threading.Thread(target=revoke_when_at_work, daemon=True).start()
            values(batch.read(spark), 100_000).write.format("noop").mode("append").save()
    except ClaimLostError as error:
        return str(error), str(error.__cause__)
    raise AssertionError("its claim was not lost")
