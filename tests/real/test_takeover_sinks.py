"""Effectively once with each sink when members are killed, stopped or orphaned, and others take over.

The killed and stopped members are separate processes (`tests.real.sink_worker`), with a JVM in the Spark tests. The
successor waits until their claims are stale. It runs in this process with its warm Spark session, or is another such
process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, IdleReason
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.errors import ClaimLostError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import Key
from tests.conditions import WITHIN_S, wait_for_line, wait_until
from tests.kafka_outputs import KafkaOutput
from tests.real.conftest import MakeTopic
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side
from tests.real.sink_worker import HalfCommitLog, Orders, value_of
from tests.real.test_kill_points_sinks import DeltaFolder, Files, HadoopFiles, KafkaTopic, Output, Table, result
from tests.sink_conformance import Row
from tests.sink_outputs import DELTA_STEPS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("interpreted")
HEARTBEAT_INTERVAL_MS = 3_000
PARTITIONS, MESSAGES = 5, 40
ENDLESS_MS = 60_000
"""The time of a message that Spark still processes when its process is killed."""


def input_rows() -> list[Row]:
    """Return the rows of the data topic, which the output must contain."""
    places = [(n, at) for n in range(PARTITIONS) for at in range(MESSAGES // PARTITIONS)]
    return [(partition, offset, value_of(partition, offset, PARTITIONS)) for partition, offset in places]


class Site:
    """A group, its data topic, one output, and the processes that were started on it."""

    def __init__(self, connection: KafkaConnection, coordination_topic: str, topics: Topics, topic: str) -> None:
        self.connection, self.topics, self.topic = connection, topics, topic
        self.coordination_topic = coordination_topic
        self.group = new_instance_id("group")
        self._started: list[subprocess.Popen[str]] = []
        self._logs: list[KillableLog] = []

    def delivery(self, at: KillPoint | None = None, *, half_commit: bool = False) -> BatchSession:
        """Open a member in this process that dies at `at` or in its first commit."""
        kafka = KafkaLog(self.connection, self.coordination_topic, HEARTBEAT_INTERVAL_MS)
        log = HalfCommitLog(kafka) if half_commit else KillableLog(kafka, at)
        self._logs.append(log)
        return BatchSession(
            log=log,
            data=self.topics,
            connection=self.connection,
            group=self.group,
            client="tester",
            run_id=f"here{len(self._logs)}",
            settings=GroupSettings(HEARTBEAT_INTERVAL_MS, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE),
        )

    def batch(self, output: Output, delivery: BatchSession | None = None, **limits: Any) -> ClaimedBatch:  # noqa: ANN401
        """Return a batch of a member in this process, by default of a new one."""
        return (delivery or self.delivery()).claimed_batch(BatchRequest(topic=self.topic, **limits), output.open())

    def wait_until_claimable(self, output: Output) -> None:
        """Wait until all claims are stale or released."""
        claimer = self.batch(output)._whole.claimer

        def is_claimable() -> bool:
            claimer.rationalizer.catch_up()
            return len(claimer.claimable(range(PARTITIONS))) == PARTITIONS

        wait_until(is_claimable, "all partitions can be claimed")

    def drain(self, output: Output, spark: "SparkSession") -> list[ClaimedBatch]:
        """Take over in this process: wait until all claims are stale, then drain the topic."""
        self.wait_until_claimable(output)
        delivery = self.delivery()
        done: list[ClaimedBatch] = []
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            batch = self.batch(output, delivery)
            try:
                with batch:
                    if batch.idle is None:
                        batch.write(result(batch, spark))
            except ClaimLostError:  # the machine was too busy to keep the lease
                continue
            if batch.idle is None:
                done.append(batch)
            elif batch.idle.reason is IdleReason.DRAINED:
                return done
            time.sleep(0.05)
        raise AssertionError("the topic was not drained in time")

    def key(self, partition: int) -> Key:
        """Read the current state of a key from the log."""
        return self.delivery()._rationalizer(self.topic).catch_up().snapshot_key(self.group, self.topic, partition)

    def start(self, output: Output, **orders: object) -> "Worker":
        """Start a member in a separate process group."""
        return self.start_together(self.orders(output, **orders))

    def start_together(self, *orders: str) -> "Worker":
        """Start members of this and of other groups in one process, with one JVM."""
        return self._launch([sys.executable, "-m", "tests.real.sink_worker", *orders])

    def start_below(self, output: Output, **orders: object) -> "Worker":
        """Start a process in a separate process group, whose child is a member."""
        return self._launch([sys.executable, "-c", _PARENT, self.orders(output, watch_parent=True, **orders)])

    def orders(self, output: Output, **orders: object) -> str:
        """Return the parameters of one more member."""
        place: dict[str, object] = {}
        if isinstance(output, Table):
            place = {"place": output.schema, "dsn": output.dsn}
        elif isinstance(output, Files):
            place = {"place": str(output.path)}
        elif isinstance(output, KafkaOutput):
            place = {"place": output.topic, "is_topic": True}
        elif isinstance(output, DeltaFolder):
            place = {"place": str(output.path), "is_delta": True}
        elif isinstance(output, HadoopFiles):
            place = {"place": output.uri}
        base = {
            "bootstrap_servers": self.connection.bootstrap_servers,
            "coordination_topic": self.coordination_topic,
            "topic": self.topic,
            "partitions": PARTITIONS,
            "group": self.group,
            "run_id": f"there{len(self._started)}",
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
        }
        return Orders.model_validate({**base, **place, **orders}).model_dump_json()

    def close(self) -> None:
        """Kill the remaining processes and close the logs."""
        for process in self._started:
            with_children = [psutil.Process(process.pid), *children(process.pid)] if process.poll() is None else []
            for one in with_children:
                one.kill()
            process.communicate()
        for log in self._logs:
            log.close()

    def _launch(self, command: list[str]) -> "Worker":
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._started.append(process)
        return Worker(process)


def children(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


class Worker:
    """A started process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._reported: list[str] = []

    def wait_until_reported(self, what: str) -> str:
        """Wait until the process has printed a line that starts with `what`, and return the line."""
        while not (found := [line for line in self._reported if line.startswith(what)]):
            self._reported.append(wait_for_line(self.process, ""))
        self._reported.remove(found[0])
        return found[0]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def go_on(self) -> None:
        """Let the halted process continue."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill_all(self, when: Callable[[], bool] = lambda: True) -> None:
        """Kill the process group, including a JVM, as soon as `when` returns true.

        Wait until all processes have ended.
        """
        processes = [psutil.Process(self.process.pid), *children(self.process.pid)]
        wait_until(when, "the moment to kill has come", pause_s=0)
        os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.wait(WITHIN_S) == -signal.SIGKILL
        _, alive = psutil.wait_procs(processes, WITHIN_S)
        assert not alive

    def wait(self) -> int:
        """Wait until the process ends by itself, and return its exit code."""
        return self.process.wait(WITHIN_S)


MakeSite = Callable[[], Site]


@pytest.fixture
def make_site(
    connection: KafkaConnection,
    coordination_topic: str,
    topics: Topics,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
) -> Iterator[MakeSite]:
    """A function that creates groups without history, each with a data topic of 5 partitions with 8 messages each."""
    with ExitStack() as stack:

        def make() -> Site:
            name = topic(PARTITIONS)
            fill(name, PARTITIONS, MESSAGES)
            site = Site(connection, coordination_topic, topics, name)
            stack.callback(site.close)
            return site

        yield make


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    """A group without history."""
    return make_site()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """An empty folder."""
    return Files(tmp_path / "output")


@pytest.fixture
def table(postgres: str) -> Table:
    """An empty table."""
    return Table(postgres)


@pytest.fixture
def delta(tmp_path: Path, spark: "SparkSession") -> DeltaFolder:
    """A Delta table that does not exist yet."""
    return DeltaFolder(tmp_path / "output", spark)


@pytest.fixture
def kafka_topic(connection: KafkaConnection) -> KafkaTopic:
    """An empty topic."""
    return KafkaTopic(connection)


@pytest.fixture(params=["files", "table"])
def output(request: pytest.FixtureRequest) -> Output:
    """An empty output of the kind in the parameter."""
    found: Output = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("output", ["files", "table", "kafka_topic"], indirect=True)
def test_half_of_its_partitions_each(
    site: Site, output: Output, spark: "SparkSession", fill: Callable[[str, int, int], None]
) -> None:
    """A run dies between two of its commit records.

    Two others take over at the same time, half of the partitions each.
    """
    dead = site.batch(output, site.delivery(half_commit=True))
    with pytest.raises(KilledError), dead:
        dead.write(result(dead, spark))
    assert [site.key(n).offset for n in range(PARTITIONS)] == [8, 0, 0, 0, 0]
    site.wait_until_claimable(output)

    with site.batch(output, partitions=(1, 2)) as one, site.batch(output, partitions=(3, 4)) as two:
        assert [[each.partition for each in batch.skipped] for batch in (one, two)] == [[1, 2], [3, 4]]
        for batch in (two, one):
            batch.write(result(batch, spark))
    assert [site.key(n).offset for n in range(PARTITIONS)] == [8] * 5
    assert output.rows() == input_rows()

    fill(site.topic, PARTITIONS, MESSAGES)
    site.drain(output, spark)
    assert [(partition, offset) for partition, offset, _ in output.rows()] == [
        (partition, offset) for partition in range(PARTITIONS) for offset in range(16)
    ]


@pytest.mark.parametrize("output", ["files", "table", "delta", "kafka_topic"], indirect=True)
def test_half_each_of_what_was_not_written(site: Site, output: Output, spark: "SparkSession") -> None:
    """A run dies before its write. Two others write its plan at the same time, half of the partitions each."""
    dead = site.batch(output, site.delivery(KillPoint(Side.AFTER, "ClaimingMessages")))
    with pytest.raises(KilledError), dead:
        pytest.fail("the batch was entered")
    site.wait_until_claimable(output)

    with site.batch(output, partitions=(0, 1)) as one, site.batch(output, partitions=(2, 3, 4)) as two:
        assert [[range_.partition for range_ in batch.ranges] for batch in (one, two)] == [[0, 1], [2, 3, 4]]
        assert all(report.is_replay for batch in (one, two) for report in batch.report())
        for batch in (two, one):
            batch.write(result(batch, spark))
    assert output.rows() == input_rows()


# Stopped past the lease, and continued


@pytest.mark.parametrize(("output", "step"), [("files", "judged"), ("table", "copied")], indirect=["output"])
def test_a_member_stopped_before_its_write(site: Site, output: Output, step: str) -> None:
    """The write with the old fencing token is rejected and the batch fails. The output is that of the successor."""
    stopped = site.start(output, with_spark=False, halt_at_step=step)
    claimed = stopped.wait_until_reported("claimed")
    stopped.wait_until_reported(f"halted {step}")
    stopped.signal(signal.SIGSTOP)
    site.wait_until_claimable(output)

    successor = site.start(output, with_spark=False)
    assert successor.wait_until_reported("claimed") == claimed, (
        "the successor does not take over the stopped member's plan"
    )
    successor.wait_until_reported("drained")
    assert successor.wait() == 0
    written = output.rows()

    stopped.signal(signal.SIGCONT)
    stopped.go_on()
    said = stopped.wait_until_reported("failed")
    assert "ClaimLostError" in said
    assert "SinkRejectedError" in said
    assert "fencing token" in said
    assert stopped.wait() == 1
    assert output.rows() == written == input_rows()


def test_a_member_stopped_before_its_commit(site: Site, output: Output) -> None:
    """The stopped member's rows exist once, and its successor commits them.

    The member's own commit is rejected, and the error names the successor.
    """
    stopped = site.start(output, with_spark=False, halt_when_written=True)
    stopped.wait_until_reported("halted when written")
    stopped.signal(signal.SIGSTOP)
    assert output.rows() == input_rows()
    site.wait_until_claimable(output)

    with site.batch(output) as successor:
        assert (len(successor.ranges), len(successor.skipped)) == (0, PARTITIONS)
        stopped.signal(signal.SIGCONT)
        stopped.go_on()
        said = stopped.wait_until_reported("failed")
    assert "ClaimLostError" in said
    assert f"held by client 'tester', instance '{successor.batch_id}'" in said
    assert stopped.wait() == 1
    assert successor.committed
    assert output.rows() == input_rows()


# Spark processes that are killed


def test_a_spark_process_killed_at_work(
    make_site: MakeSite, tmp_path: Path, table: Table, spark: "SparkSession"
) -> None:
    """SIGKILL to the process group, with the JVM, during Spark actions and between two commit records.

    The outputs are exact, and rows that were written are not written again.
    """
    outputs: dict[str, Output] = {"files ": Files(tmp_path / "files"), "table ": table}
    sites = {name: make_site() for name in outputs}
    committing, written = make_site(), Files(tmp_path / "written")
    worker = committing.start_together(
        *(sites[name].orders(output, name=name, slow_ms=ENDLESS_MS) for name, output in outputs.items()),
        committing.orders(written, halt_in_commit=True),
    )
    claimed = {name: worker.wait_until_reported(f"{name}claimed") for name in outputs}
    for name in outputs:
        worker.wait_until_reported(f"{name}Spark is at work")
    worker.wait_until_reported("halted between two commit records")
    worker.kill_all()
    assert [committing.key(n).offset for n in range(PARTITIONS)] == [8, 0, 0, 0, 0]

    for name, output in outputs.items():
        assert output.rows() == [], name
        done = sites[name].drain(output, spark)
        assert claimed[name] == f"{name}claimed {' '.join(str(each) for each in done[0].all_ranges)}\n", (
            "the successor does not take over the killed member's plan"
        )
        assert output.rows() == input_rows(), name
    done = committing.drain(written, spark)
    assert [[each.partition for each in batch.skipped] for batch in done] == [[1, 2, 3, 4]]
    assert written.rows() == input_rows()


def test_a_session_whose_jvm_is_killed(make_site: MakeSite, files: Files, table: Table, spark: "SparkSession") -> None:
    """SIGKILL only to the JVM, during a Spark action: the run releases at once, and the next one repeats the batch."""
    outputs: dict[str, Output] = {"files ": files, "table ": table}
    sites = {name: make_site() for name in outputs}
    worker = sites["files "].start_together(
        *(sites[name].orders(output, name=name, slow_ms=ENDLESS_MS) for name, output in outputs.items())
    )
    claimed = {name: worker.wait_until_reported(f"{name}claimed") for name in outputs}
    for name in outputs:
        worker.wait_until_reported(f"{name}Spark is at work")
    (jvm,) = [each for each in children(worker.process.pid) if each.name() == "java"]
    jvm.kill()
    assert worker.wait() not in {0, -signal.SIGKILL}
    for name, output in outputs.items():
        keys = [sites[name].key(n) for n in range(PARTITIONS)]
        assert all(key.owner is None and key.plan_end and not key.offset for key in keys), name
        assert output.rows() == [], name

        done = sites[name].drain(output, spark)

        assert claimed[name] == f"{name}claimed {' '.join(str(each) for each in done[0].all_ranges)}\n", (
            "the next run does not take over the failed run's plan"
        )
        assert output.rows() == input_rows(), name


def test_a_spark_process_killed_at_each_step_of_its_sinks(
    make_site: MakeSite, tmp_path: Path, hdfs: str, spark: "SparkSession"
) -> None:
    """SIGKILL to the process group, with the JVM that has the rows: each output has all rows once, or none."""
    outputs: dict[str, Output] = {step: DeltaFolder(tmp_path / step, spark) for step in DELTA_STEPS}
    outputs |= {f"hdfs {step}": HadoopFiles(f"{hdfs}/{new_instance_id('out')}", spark) for step in ("judged", "linked")}
    sites = {name: make_site() for name in outputs}
    steps = {name: name.removeprefix("hdfs ") for name in outputs}
    worker = sites["judged"].start_together(
        *(sites[name].orders(output, name=f"{name}: ", halt_at_step=steps[name]) for name, output in outputs.items())
    )
    for name, step in steps.items():
        worker.wait_until_reported(f"{name}: halted {step}")
    worker.kill_all()
    for name, output in outputs.items():
        is_there = steps[name] in {"committed", "linked"}
        assert output.rows() == (input_rows() if is_there else []), name

        done = sites[name].drain(output, spark)

        assert sum(len(batch.skipped) for batch in done) == (PARTITIONS if is_there else 0), name
        assert output.rows() == input_rows(), name


@pytest.mark.parametrize("sign", ["*.parquet", "_delta_log/*"])
def test_a_spark_process_killed_within_deltas_own_commit(
    site: Site, tmp_path: Path, spark: "SparkSession", sign: str
) -> None:
    """SIGKILL as soon as the first file of rows, or of the commit, exists: the table has all rows or none."""
    output = DeltaFolder(tmp_path / "output", spark)
    worker = site.start(output, halt_at_step="judged")
    worker.wait_until_reported("halted judged")
    assert not list(output.path.glob(sign))
    worker.go_on()
    worker.kill_all(lambda: any(output.path.glob(sign)))
    found = output.rows()
    assert found in ([], input_rows())

    done = site.drain(output, spark)

    assert sum(len(batch.skipped) for batch in done) == (PARTITIONS if found else 0)
    assert output.rows() == input_rows()


def test_an_orphaned_spark_process_stops(site: Site, table: Table, spark: "SparkSession") -> None:
    """Only the run worker is killed. Its step cancels its Spark jobs and ends, and the output has none of its rows."""
    run_worker = site.start_below(table, slow_ms=500)
    run_worker.wait_until_reported("Spark is at work")
    orphans = children(run_worker.process.pid)
    run_worker.signal(signal.SIGKILL)

    said = run_worker.wait_until_reported("failed")
    assert "BatchAbortedError" in said
    assert "the parent process ended" in said
    _, alive = psutil.wait_procs(orphans, WITHIN_S)
    assert not alive, "processes of the step are still alive"
    assert table.rows() == []
    site.drain(table, spark)
    assert table.rows() == input_rows()


_PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "tests.real.sink_worker", sys.argv[1]]).wait()
"""
