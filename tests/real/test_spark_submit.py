"""Batches processed by a script that the run submits to Spark: the example as a user runs it, and failures."""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import dagster as dg
import psutil
import pytest

from marshal_dagster.errors import ClaimLostError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.pipes import Submission, handed_over
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.sinks import FileSink
from tests.conditions import wait_until
from tests.real import submitted_script
from tests.real.batch_function import values
from tests.real.spark_cluster import stop_tree
from tests.real.spark_driver import MESSAGES, PARTITIONS, Where, Work, claimed, messages, revoke, rows_in
from tests.real.submitted_script import Orders
from tests.real.test_spark_cluster import key_of
from tests.topics import reserved

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "spark_submit"
SCRIPT = Path(submitted_script.__file__)
SLOW_MS = 2_000
"""The duration of one message in batches that are interrupted: more than a minute in all."""


@pytest.fixture(autouse=True)
def _for_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have scripts import the library of this checkout."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def example(
    kafka: str, coordination_topic: str, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The example's code location."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("ORDERS_COORDINATION_TOPIC", coordination_topic)
    monkeypatch.setenv("ORDERS_OUTPUT", str(tmp_path / "output"))
    monkeypatch.syspath_prepend(EXAMPLE)
    with reserved(topics, "orders"):
        yield importlib.import_module("submitting")
    del sys.modules["submitting"]


@pytest.fixture
def work(kafka: str, filled: str, coordination_topic: str, tmp_path: Path) -> Work:
    """A group at the start of a filled topic."""
    return Work(Where("local[2]"), kafka, coordination_topic, filled, tmp_path / "output")


@pytest.mark.filterwarnings("ignore::dagster.PreviewWarning")  # Pipes' warning about its readers
def test_the_example_parses_each_order_once_though_its_first_script_is_killed(
    example: ModuleType, topics: Topics, fill: Callable[[str, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the script is killed at work, its run fails, releases and leaves no files.

    The next run writes each row once.
    """
    topics.create("orders", PARTITIONS, 1)
    fill("orders", PARTITIONS, MESSAGES)
    job, before = example.defs.resolve_job_def("orders"), spark_processes()
    with dg.DagsterInstance.ephemeral() as instance:
        with monkeypatch.context() as patched:
            patched.setattr(example, "SCRIPT", SCRIPT)
            mark = example.OUTPUT.with_name("at work")
            Orders(str(example.OUTPUT), str(mark), slow_ms=SLOW_MS).write(mark.parent, 1)
            threading.Thread(target=kill_at_work, args=(mark,), daemon=True).start()
            assert not job.execute_in_process(instance=instance, raise_on_error=False).success
        wait_until(lambda: spark_processes() == before, "no Spark process is left")
        assert not FileSink(example.OUTPUT).committed_files()
        brokers, log = os.environ["MARSHAL_BOOTSTRAP_SERVERS"], os.environ["ORDERS_COORDINATION_TOPIC"]
        key = key_of(Work(Where("local[2]"), brokers, log, "orders", example.OUTPUT, group="parsed-orders"))
        assert (key.owner, key.plan_end, key.offset) == (None, MESSAGES // PARTITIONS, 0)

        done = job.execute_in_process(instance=instance)
        assert done.success
        written = FileSink(example.OUTPUT).committed_files()
        rows = [name for path in written for name in path.read_text().splitlines()]
        assert len(set(rows)) == len(rows) == MESSAGES
        (output,) = [all_event for all_event in done.all_events if all_event.is_successful_output]
        assert output.step_output_data.metadata["ranges"].value == PARTITIONS
        lines = [each.message for each in instance.all_logs(done.run_id)]
        assert any(f"{PARTITIONS} ranges were written" in line for line in lines)
        assert job.execute_in_process(instance=instance).success
    assert FileSink(example.OUTPUT).committed_files() == written
    assert spark_processes() == before


def test_what_becomes_of_a_scripts_batches(work: Work, script: "Script", spark: "SparkSession") -> None:
    """A script ends a revoked batch at once, then processes the next one. If its run is killed, it ends at once."""
    sink, connection = FileSink(work.output, format="json"), KafkaConnection(bootstrap_servers=work.bootstrap_servers)

    def lose() -> None:
        with claimed(work, sink) as batch, handed_over(batch, connection) as submission:
            script.start(submission)
            script.work_on(submission.folder, work, SLOW_MS, goes_on=True)
            wait_until(work.mark.exists, "the batch is at work")
            revoke(work)
            raise ChildProcessError(script.says(20))

    with pytest.raises(ClaimLostError, match="held by no instance") as lost:
        lose()
    assert "has withdrawn its batch" in str(lost.value.__cause__)
    assert not sink.committed_files()

    with claimed(work, sink) as batch, handed_over(batch, connection) as submission:
        script.work_on(submission.folder, work)
        assert script.says() == "done"
    assert rows_in(sink.committed_files()) == messages()

    work.mark.unlink()
    work = replace(work, mode=DeliveryMode.AT_LEAST_ONCE, group="another", output=work.output.with_name("another"))
    with killed_run(work) as folder:
        script.work_on(folder, work, SLOW_MS)
        wait_until(work.mark.exists, "the batch is at work")
    assert "has died: nothing more is committed" in script.says(20)
    assert script.ends(20) != 0
    assert not folder.exists()
    assert not list(work.output.glob("part-*"))

    with claimed(work, is_dead=lambda _: True) as batch:
        assert all(each.is_replay for each in batch.report())
        values(batch.read(spark)).write.mode("append").json(str(work.output))
    assert rows_in(work.output.glob("part-*")) == messages()


class Script:
    """The submitted script: one process for several batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._below: list[psutil.Process] = []
        self._given = self._heard = 0

    def start(self, submission: Submission) -> None:
        """Submit the script."""
        settings = {"spark.master": "local[2]", "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "2"}
        command = submission.command(SCRIPT, str(self.folder / "output"), settings=settings)
        self._process = subprocess.Popen(command, env=os.environ | submission.environment)

    def work_on(self, batch: Path, work: Work, slow_ms: int = 0, *, goes_on: bool = False) -> None:
        """Pass a batch to the script, by its folder."""
        self._given += 1
        with_sink = work.mode is DeliveryMode.EFFECTIVELY_ONCE
        Orders(str(work.output), str(work.mark), str(batch), with_sink, slow_ms, goes_on).write(
            self.folder, self._given
        )

    def says(self, within_s: float = 150) -> str:
        """Wait for the script's next result line and return it."""
        path = self.folder / "said"
        wait_until(lambda: path.read_text().count("\n") > self._heard, "the script reports its next batch", within_s)
        self._heard += 1
        self._below = self._below or psutil.Process(self._process.pid).children(recursive=True)
        return path.read_text().splitlines()[self._heard - 1]

    def ends(self, within_s: float) -> int:
        """Wait until the script and its JVM have ended, and return the exit code."""
        code = self._process.wait(within_s)
        assert not psutil.wait_procs(self._below, within_s)[1]
        return code

    def kill(self) -> None:
        """Kill the script if it was started."""
        if hasattr(self, "_process"):
            stop_tree(self._process)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """The script, which is killed at the end."""
    script = Script(tmp_path)
    yield script
    script.kill()


@contextmanager
def killed_run(work: Work) -> Iterator[Path]:
    """Have a run in a separate process hand over a batch.

    Yield the batch's folder, and kill the run after the block.
    """
    ours, theirs = get_context("spawn").Pipe()
    run = get_context("spawn").Process(target=hand_over, args=(work, theirs))
    run.start()
    try:
        assert ours.poll(60)
        yield ours.recv()
    finally:
        run.kill()
        run.join()


def hand_over(work: Work, told: Connection) -> None:
    """Hand over a batch, send its folder, and wait."""
    connection = KafkaConnection(bootstrap_servers=work.bootstrap_servers)
    with claimed(work) as batch, handed_over(batch, connection) as submission:
        told.send(submission.folder)
        told.recv()


def kill_at_work(mark: Path) -> None:
    """Kill the script's Python process once Spark works for it."""
    wait_until(mark.exists, "the batch is at work")
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # another process, which may have ended meanwhile
            if SCRIPT.name in " ".join(each.cmdline()) and each.name() != "java":
                each.kill()


def spark_processes() -> set[psutil.Process]:
    """Return the Spark processes that this process has started."""
    return {each for each in psutil.Process().children() if "spark" in " ".join(each.cmdline())}
