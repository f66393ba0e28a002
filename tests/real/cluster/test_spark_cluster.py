"""Claimed batches on Spark's standalone cluster, with the URL of its master.

Tests with the same session follow each other, because each new session starts two executors.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.state import Key
from marshal_dagster.sinks import DeltaSink, FileSink, PostgresSink
from marshal_dagster.spark.session import SINGLE_EXECUTION
from tests.conditions import wait_until
from tests.kafka_outputs import KafkaOutput, committed
from tests.real.canaries import SecretOutputs, has_executions, write_with_secrets
from tests.real.executor_python import python_without, refused, write_with
from tests.real.spark_cluster import WORKERS, SparkCluster
from tests.real.spark_driver import (
    MESSAGES,
    PARTITIONS,
    Driver,
    Where,
    Work,
    fail_in_a_task,
    lose_a_batch,
    messages,
    note_each,
    rows_in,
    rows_of_table,
    run_with_dagsters_session,
    session,
    write_and_lose_an_executor,
    write_into,
    write_oneself,
    write_through_the_sink,
)
from tests.real.test_kill_points_sinks import KafkaTopic, Table
from tests.session_settings import INTERPRETED
from tests.sink_outputs import TABLE

SINGLE = tuple(SINGLE_EXECUTION.items())
HOSTS = r"127\.0\.0\.\d"
"""The hosts of the workers."""

SHOWN = {
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
}
"""What other users can see of a session."""


@pytest.fixture
def work(  # noqa: PLR0917 - fixtures
    cluster: SparkCluster,
    delta: dict[str, str],
    kafka: str,
    filled: str,
    shared_coordination_topic: str,
    tmp_path: Path,
) -> Work:
    """A group at the start of a filled topic, and a session with Delta Lake if this Spark has one."""
    where = Where(
        cluster.master, tuple((INTERPRETED | SHOWN | {"spark.eventLog.dir": cluster.events.as_uri()} | delta).items())
    )
    return Work(where, kafka, shared_coordination_topic, filled, tmp_path / "output")


@pytest.fixture
def outputs(postgres: str, connection: KafkaConnection, tmp_path: Path) -> SecretOutputs:
    """An empty table and an empty topic, which are reached with secrets."""
    folder = tmp_path / "seen"
    folder.mkdir()
    return SecretOutputs(Table(postgres), KafkaOutput(connection), folder)


def key_of(work: Work) -> Key:
    """Return the state of partition 0 in the log."""
    log = KafkaLog(KafkaConnection(bootstrap_servers=work.bootstrap_servers), work.coordination_topic, 5_000)
    try:
        return Rationalizer(log, topics=[work.topic]).catch_up().snapshot_key(work.group, work.topic, 0)
    finally:
        log.close()


def executors(work: Work) -> int:
    """Return how many executors the session has."""
    return len(session(work.where).sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1  # the driver is one


def tasks_at_work(work: Work) -> int:
    """Return how many tasks the executors run."""
    infos = session(work.where).sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return sum(int(info.numRunningTasks()) for info in infos)


def test_effectively_once_through_the_file_sink(driver: Driver, work: Work) -> None:
    """Executors of both workers write the rows, which equal the topic's messages."""
    driver.call(write_through_the_sink, work)
    assert driver.call(executors, work) == WORKERS
    assert rows_in(FileSink(work.output).committed_files()) == messages()


def test_effectively_once_into_a_delta_table(driver: Driver, work: Work) -> None:
    """Executors cache the rows and write them into the table, each once."""
    driver.call(write_into, work, DeltaSink(str(work.output)))
    assert driver.call(rows_of_table, work) == messages()


def test_effectively_once_into_a_topic(driver: Driver, work: Work, connection: KafkaConnection) -> None:
    """Executors cache the rows, and their tasks write each into the topic, once."""
    topic = KafkaTopic(connection)
    driver.call(write_into, work, topic.open())
    assert topic.rows() == messages()


def test_a_secret_of_a_sink_that_tasks_use_is_found_nowhere(
    driver: Driver, cluster: SparkCluster, work: Work, outputs: SecretOutputs
) -> None:
    """Neither functions of tasks, plans, pages and the event log have it, nor what master, workers and tasks print."""
    driver.call(write_with_secrets, work, outputs, None)
    outputs.check(cluster.folder)
    assert has_executions(cluster.events)
    assert list(cluster.folder.glob("*/*/*/stderr"))


def test_executors_that_lack_what_a_sink_needs_are_refused_before_anything_is_written(
    driver: Driver, work: Work, outputs: SecretOutputs, tmp_path: Path
) -> None:
    """One line has the host, the Python and what it lacks. The same executors suffice if the driver writes."""
    table, topic = outputs.table, outputs.topic
    without_psycopg = python_without(tmp_path / "no psycopg", "psycopg")
    without_arrow = python_without(tmp_path / "no arrow", "pyarrow")

    error = driver.call(refused, work, table.open(), without_psycopg)
    assert f" ({without_psycopg}) has no psycopg: install it there, or use written_by='driver'" in error
    error = driver.call(refused, work, topic.open(), without_arrow)
    assert re.search(rf"the Python of the executors on {HOSTS} has no pyarrow: install it there", error)
    error = driver.call(refused, work, topic.open(), None)
    assert re.search(rf"the executors on {HOSTS} cannot run Python functions on Arrow batches", error)
    assert "give them the driver's version of Python, or use written_by='driver'" in error
    assert (table.rows(), table.staging_tables(), committed(topic.connection, topic.topic)) == ([], [], [])

    by_driver = PostgresSink(table.dsn, TABLE, schema=table.schema, written_by="driver")
    driver.call(write_with, work, by_driver, without_arrow)
    assert table.rows() == messages()


@pytest.mark.parametrize("step", ["noted", "committed"])
def test_an_executor_killed_while_its_task_writes_a_range(
    driver: Driver, work: Work, connection: KafkaConnection, step: str
) -> None:
    """Another executor repeats the task, whose first run had the range open or committed. The batch succeeds."""
    topic = KafkaTopic(connection)
    driver.call(write_and_lose_an_executor, work, topic.open(), step)
    assert work.mark.exists()
    assert topic.rows() == messages()


def test_an_executor_killed_while_its_task_copies_rows(driver: Driver, work: Work, postgres: str) -> None:
    """Another executor repeats the task. Rows that the first run has copied do not count."""
    table = Table(postgres)
    driver.call(write_and_lose_an_executor, work, table.open(), None)
    assert work.mark.exists()
    assert table.rows() == messages()


def test_at_least_once(driver: Driver, work: Work) -> None:
    """The batch writes its own output, which equals the topic's messages."""
    driver.call(write_oneself, replace(work, mode=DeliveryMode.AT_LEAST_ONCE))
    assert rows_in(work.output.glob("part-*")) == messages()


def test_a_revoked_batch_ends_its_tasks_on_the_cluster(driver: Driver, work: Work) -> None:
    """The batch fails about one heartbeat after its revocation, and no executor continues."""
    work = replace(work, mode=DeliveryMode.AT_LEAST_ONCE)
    error, came_of = driver.call(lose_a_batch, work)
    assert "held by no instance" in error
    assert "was stopped" in came_of
    wait_until(lambda: not driver.call(tasks_at_work, work), "no task is at work", pause_s=0.1)


def test_a_killed_worker_costs_no_record(driver: Driver, cluster: SparkCluster, work: Work) -> None:
    """A worker and its executor die during a batch. Others run its tasks again, and each row exists once.

    The tasks of this executor would not end.
    """
    wait_until(lambda: driver.call(executors, work) == WORKERS, "both workers have an executor", pause_s=0.1)
    result = driver.start(write_through_the_sink, work, cluster.worker_to_kill)
    wait_until(work.mark.exists, "the batch is at work")
    cluster.kill_worker()
    cluster.add_worker()
    result()
    assert rows_in(FileSink(work.output).committed_files()) == messages()
    cluster.wait_for(WORKERS)


def test_a_session_with_retries_is_refused_at_most_once(driver: Driver, work: Work) -> None:
    """The error names the setting, before anything is planned or committed. In another mode the session does retry."""
    once = replace(work, mode=DeliveryMode.AT_MOST_ONCE)
    with pytest.raises(ConfigurationError, match=r"spark\.task\.maxFailures is 4, must be 1"):
        driver.call(write_oneself, once)
    assert key_of(once).plan_end is None
    assert not key_of(once).offset
    again = replace(work, mode=DeliveryMode.AT_LEAST_ONCE, group=new_instance_id("again"))
    assert driver.call(fail_in_a_task, again) == ["not committed"] * PARTITIONS
    assert work.output.read_text().startswith("ran\n" * 4), "the task did not run four times"


def test_a_task_that_is_lost_with_its_worker_is_not_run_again_at_most_once(
    driver: Driver, cluster: SparkCluster, work: Work
) -> None:
    """No offset is processed twice. The committed messages of the batch are reported as possibly dropped."""
    once = replace(work, mode=DeliveryMode.AT_MOST_ONCE, where=replace(work.where, settings=SINGLE))
    result = driver.start(note_each, once)
    wait_until(lambda: work.output.exists() and work.output.read_text().count("\n") > 2, "three messages are noted")
    cluster.kill_worker()
    cluster.add_worker()
    once.may_continue.touch()
    states = result()
    noted = work.output.read_text().splitlines()
    assert sorted(noted) == sorted(set(noted))
    assert states == ["possibly dropped"] * PARTITIONS
    cluster.wait_for(WORKERS)


def test_a_failing_task_is_not_retried_at_most_once(driver: Driver, work: Work) -> None:
    """With the required settings the task runs once, and its committed messages are reported as possibly dropped."""
    once = replace(work, mode=DeliveryMode.AT_MOST_ONCE, where=replace(work.where, settings=SINGLE))
    assert driver.call(fail_in_a_task, once) == ["possibly dropped"] * PARTITIONS
    assert work.output.read_text() == "ran\n"
    assert key_of(once).offset == MESSAGES // PARTITIONS


def test_in_the_session_of_dagsters_resource(driver: Driver, cluster: SparkCluster, work: Work) -> None:
    """The settings of an op's `LazyPySparkResource` name the master. `test_dagster_runs` has it with a local one."""
    assert driver.call(run_with_dagsters_session, replace(work, where=Where(cluster.master))) == (True, "")
    assert rows_in(FileSink(work.output).committed_files()) == messages()
