"""A batch's Spark jobs, seen and cancelled from another thread, and the reasons for rejecting a session."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark import InheritableThread
from pyspark.sql import functions as f

from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.spark.job_control import batch_jobs, cancel, progress
from marshal_dagster.spark.reader import read_ranges, read_schema
from marshal_dagster.spark.session import check_session, check_single_execution
from tests.conditions import WITHIN_S, wait_until
from tests.real.spark_driver import Where, Work, lose_a_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def endless(spark: "SparkSession") -> "DataFrame":
    """Return a frame that takes hours, in two stages. Its tasks use no processor."""
    return spark.range(10**6).where("reflect('java.lang.Thread', 'sleep', 50L) is not null").selectExpr("max(id) AS m")


def running(spark: "SparkSession", batch: str) -> bool:
    """Return whether a task of the batch runs."""
    found = progress(spark, batch)
    return found is not None and found.active_stages > 0


def test_cancelling_ends_a_running_action(spark: "SparkSession") -> None:
    """After a call from another thread, an action of several hours fails, with the reason."""
    failures: list[str] = []

    def work() -> None:
        with batch_jobs(spark, "b1"):
            try:
                endless(spark).collect()
            except Exception as error:  # noqa: BLE001 - Spark's, of several kinds
                failures.append(str(error))

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        wait_until(lambda: running(spark, "b1"), "Spark works on b1")
        cancel(spark, "b1", "the lease has ended")
        future.result(WITHIN_S)
    assert "the lease has ended" in failures[0]
    wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds(), "no job is left")


def test_a_revoked_batch_has_its_jobs_cancelled(
    spark: "SparkSession", kafka: str, filled: str, coordination_topic: str, tmp_path: Path
) -> None:
    """The batch fails about one heartbeat after its revocation, and no job of the session continues."""
    work = Work(Where("here"), kafka, coordination_topic, filled, tmp_path / "output", DeliveryMode.AT_LEAST_ONCE)
    error, came_of = lose_a_batch(work, spark)
    assert "held by no instance" in error
    assert "was stopped" in came_of
    wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds(), "no job is left")


def test_a_cancelled_batch_starts_no_more_jobs(spark: "SparkSession") -> None:
    """Jobs that a cancelled batch starts later are cancelled too, until the batch has ended."""
    ended = []

    def work() -> None:
        with batch_jobs(spark, "b2"):
            for _ in range(3):
                with pytest.raises(Exception, match="b2"):
                    endless(spark).collect()
                ended.append(time.monotonic())

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        wait_until(lambda: running(spark, "b2"), "Spark works on b2")
        cancel(spark, "b2")
        cancel(spark, "b2")
        future.result(WITHIN_S)
    assert len(ended) == 3
    with batch_jobs(spark, "b2"):
        assert spark.range(10).count() == 10
    wait_until(
        lambda: not any(thread.name.startswith("cancel ") for thread in threading.enumerate()),
        "no thread that cancels is left",
    )


def test_other_jobs_of_the_session_go_on(spark: "SparkSession") -> None:
    """Jobs of other batches, and jobs outside of batches, are neither cancelled nor counted."""
    go_on = threading.Event()

    def other() -> int:
        with batch_jobs(spark, "b3, the other"):
            wait_until(go_on.is_set, "the task may continue")
            return spark.range(1000).count()

    with ThreadPoolExecutor(2) as pool:
        counted = pool.submit(other)
        with batch_jobs(spark, "b3"):
            cancel(spark, "b3")
            go_on.set()
            assert counted.result(WITHIN_S) == 1000
        assert pool.submit(lambda: spark.range(7).count()).result(WITHIN_S) == 7


def test_threads_of_the_batch_belong_to_it(spark: "SparkSession") -> None:
    """Jobs of an inheritable thread, of broadcasts and of subqueries belong to the batch."""
    failures: list[str] = []

    def work() -> None:
        try:
            spark.range(10).join(endless(spark).hint("broadcast"), f.expr("id = m")).count()
        except Exception as error:  # noqa: BLE001 - Spark's, of several kinds
            failures.append(str(error))

    with batch_jobs(spark, "b4"):
        thread = InheritableThread(target=work)
        thread.start()
        wait_until(lambda: running(spark, "b4"), "Spark works on b4")
        cancel(spark, "b4", "enough")
        thread.join(WITHIN_S)
    assert not thread.is_alive()
    assert "enough" in failures[0]


def test_progress_counts_tasks(spark: "SparkSession", tmp_path: Path) -> None:
    """While a stage waits for its last of three tasks, two of three are reported.

    Before and after there is no progress.
    """
    assert progress(spark, "b5") is None
    go_on = str(tmp_path / "go on")

    def wait(number: int) -> int:
        while number == 2 and not os.path.exists(go_on):  # noqa: PTH110 - runs in Spark's own Python
            time.sleep(0.05)
        return number

    def work() -> int:
        with batch_jobs(spark, "b5"):
            return int(spark.sparkContext.parallelize(range(3), 3).map(wait).sum())

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            wait_until(
                lambda: future.done() or ((found := progress(spark, "b5")) and found.tasks_done == 2),
                "two tasks are done, or the work has ended",
            )
            found = progress(spark, "b5")
            assert found is not None
            assert (found.active_stages, found.tasks_total) == (1, 3)
            assert str(found) == "2 of 3 tasks done, 1 stages running"
        finally:
            (tmp_path / "go on").touch()
        assert future.result(WITHIN_S) == 3
    wait_until(lambda: progress(spark, "b5") is None, "Spark shows the end of the job")


def test_a_batch_is_marked_once(spark: "SparkSession") -> None:
    """A batch within itself is an error. Its tags are removed when it ends."""
    before = spark.sparkContext.getLocalProperty("spark.job.description")
    with (
        batch_jobs(spark, "b6"),
        pytest.raises(ValueError, match="the jobs of batch b6 are already tagged"),
        batch_jobs(spark, "b6"),
    ):
        pass
    assert spark.sparkContext.getLocalProperty("spark.job.description") == before
    assert not spark.sparkContext.getJobTags()
    cancel(spark, "b6")
    cancel(spark, "never begun")


def test_the_suites_session_is_fit(spark: "SparkSession") -> None:
    """The session of `spark_settings` has the connector and runs each task once."""
    check_session(spark)
    check_single_execution(spark)


def test_a_session_is_looked_at_once(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """The check for the connector takes ten milliseconds, so it is not repeated for each batch."""
    check_session(spark)
    monkeypatch.setattr(type(spark), "version", property(lambda _: pytest.fail("the session is checked again")))
    check_session(spark)


def test_reading_asks_the_jvm_for_few_things(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the JVM takes part of a millisecond, and `getConf` calls it once for each setting."""
    frame = read_ranges(spark, {"kafka.bootstrap.servers": "127.0.0.1:1"}, "orders", {0: (0, 5), 1: (3, 4)})
    assert frame.columns == read_schema().names
    monkeypatch.setattr(type(spark.sparkContext), "getConf", lambda _: pytest.fail("all settings are read"))
    read_ranges(spark, {"kafka.bootstrap.servers": "127.0.0.1:1"}, "orders", {0: (0, 5)})


WITHOUT_CONNECTOR = """
from pyspark.sql import SparkSession
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.spark.job_control import batch_jobs, cancel, is_stopped, progress, session_ended
from marshal_dagster.spark.session import check_session, check_single_execution
spark = SparkSession.builder.master("local[1, 2]").config("spark.ui.enabled", "false").getOrCreate()
for check in (check_session, check_single_execution):
    try:
        check(spark)
    except ConfigurationError as error:
        print(f"refused: {error}")
frame = spark.range(1).select("id")
with batch_jobs(spark, "b"):
    spark.stop()
    cancel(spark, "b")
    print(progress(spark, "b"))
print("left", is_stopped(spark))
set_property = spark.sparkContext.setLocalProperty
for action in (lambda: frame.select(frame.id + 1).count(), lambda: set_property("a", "b")):
    try:
        action()
    except Exception as error:
        print(session_ended(spark, error))
"""


def test_an_unfit_session_is_one_line_and_a_stopped_one_is_left_alone() -> None:
    """A session without the connector or with retries gets a one-line error. On a stopped session nothing raises."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CONNECTOR],
        check=False,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.stdout + done.stderr[-2000:]
    assert lines[0].startswith(
        "refused: this session has no working Kafka connector (Failed to find data source: kafka"
    )
    assert "spark.jars.packages=org.apache.spark:spark-sql-kafka" in lines[0]
    assert "spark.master is local[1, 2], must not set a number of allowed failures" in lines[1]
    ended = "the Spark session has ended: its JVM died, or the function has stopped it"
    assert lines[2:] == ["None", "left True", ended, ended]
