"""Effectively once with each sink when members are killed, stopped or orphaned, and others take over.

The killed and stopped members are separate processes (`tests.real.sink_worker`), with a JVM in the Spark tests. The
successor lets their claims become stale. It runs in this process with its warm Spark session, or is another such
process.

All members of a module are killed or stopped before its first test, so that their claims become stale at the same time.
Members that are killed together share a process, because each JVM costs as much as several tests.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import pytest

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import Key
from tests.conditions import WITHIN_S, wait_for_line, wait_until
from tests.kafka_outputs import KafkaOutput
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side, drain
from tests.real.log_time import let_claims_become_stale
from tests.real.sink_worker import HalfCommitLog, Orders, value_of
from tests.real.test_kill_points_sinks import (
    DeltaFolder,
    Files,
    HadoopFiles,
    IcebergFolder,
    KafkaTopic,
    MariaDBTable,
    Output,
    Table,
    result,
)
from tests.session_settings import QUICK_PLANS, session_settings
from tests.sink_conformance import Row
from tests.sink_outputs import DELTA_STEPS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HEARTBEAT_INTERVAL_MS = 60_000
"""So long that no lease ends, even if processes are stopped for a while. Log time passes when a test lets it."""
SHORT_INTERVAL_MS = 20_000
"""For a process that looks every 5 s whether its parent lives."""
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
        self.interval_ms = HEARTBEAT_INTERVAL_MS
        self._started: list[subprocess.Popen[str]] = []
        self._logs: list[KillableLog] = []

    def delivery(self, at: KillPoint | None = None, *, half_commit: bool = False) -> BatchSession:
        """Open a member in this process that dies at `at` or in its first commit."""
        kafka = KafkaLog(self.connection, self.coordination_topic, self.interval_ms)
        log = HalfCommitLog(kafka) if half_commit else KillableLog(kafka, at)
        self._logs.append(log)
        return BatchSession(
            log=log,
            data=self.topics,
            connection=self.connection,
            group=self.group,
            client="tester",
            run_id=f"here{len(self._logs)}",
            settings=GroupSettings(self.interval_ms, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE),
        )

    def batch(self, output: Output, delivery: BatchSession | None = None, **limits: Any) -> ClaimedBatch:  # noqa: ANN401
        """Return a batch of a member in this process, by default of a new one."""
        return (delivery or self.delivery()).claimed_batch(BatchRequest(topic=self.topic, **limits), output.open())

    def let_claims_become_stale(self) -> None:
        """Let the claims of all dead and stopped members of the coordination topic become stale."""
        let_claims_become_stale(self.connection, self.coordination_topic, self.interval_ms)

    def drain(self, output: Output, spark: "SparkSession") -> list[ClaimedBatch]:
        """Take over in this process: let all claims become stale, then drain the topic."""
        self.let_claims_become_stale()
        delivery = self.delivery()
        return drain(lambda: self.batch(output, delivery), lambda batch: batch.write(result(batch, spark)))

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
        elif isinstance(output, MariaDBTable):
            place = {"place": output.dsn, "is_mariadb": True}
        elif isinstance(output, Files):
            place = {"place": str(output.path)}
        elif isinstance(output, KafkaOutput):
            place = {"place": output.topic, "is_topic": True}
        elif isinstance(output, DeltaFolder):
            place = {"place": str(output.path), "is_delta": True, "upserts": output.upserts}
        elif isinstance(output, IcebergFolder):
            place = {"place": str(output.folder), "is_iceberg": True}
        elif isinstance(output, HadoopFiles):
            place = {"place": output.uri}
        base = {
            "bootstrap_servers": self.connection.bootstrap_servers,
            "coordination_topic": self.coordination_topic,
            "topic": self.topic,
            "partitions": PARTITIONS,
            "group": self.group,
            "run_id": f"there{len(self._started)}",
            "heartbeat_interval_ms": self.interval_ms,
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
        """Wait until the process has printed a line that starts with `what`, and return the line.

        A member that fails would keep the others waiting, so its report is an error unless it is the wanted one.
        """
        while not (found := [line for line in self._reported if line.startswith(what)]):
            self._reported.append(wait_for_line(self.process, ""))
            assert self._reported[-1].startswith(what) or "failed " not in self._reported[-1], self._reported
        self._reported.remove(found[0])
        return found[0]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def go_on(self, name: str = "") -> None:
        """Let the halted member of this name continue."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
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


class MakeSite(Protocol):
    """A function that creates a group without history."""

    def __call__(self, topic: str | None = None) -> Site:
        """Create a group that reads `topic`, by default a new one of 5 partitions with 8 messages each."""
        ...


MakeOutput = Callable[[str], Output]


@pytest.fixture(scope="module")
def make_site(
    connection: KafkaConnection, shared_coordination_topic: str, topics: Topics, fill: Callable[[str, int, int], None]
) -> Iterator[MakeSite]:
    """A function that creates groups without history."""
    with ExitStack() as stack:

        def make(topic: str | None = None) -> Site:
            if topic is None:
                topic = new_instance_id("data")
                assert topics.create(topic, PARTITIONS, 1)
                fill(topic, PARTITIONS, MESSAGES)
            site = Site(connection, shared_coordination_topic, topics, topic)
            stack.callback(site.close)
            return site

        yield make


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    """A group without history."""
    return make_site()


@pytest.fixture(scope="module")
def messages(make_site: MakeSite) -> str:
    """A filled topic, which many groups read."""
    return make_site().topic


@pytest.fixture(scope="module")
def quick_spark(spark: "SparkSession") -> Iterator["SparkSession"]:
    """The session, in which plans are interpreted."""
    with session_settings(spark, QUICK_PLANS):
        yield spark


@pytest.fixture(scope="module")
def make_output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeOutput:
    """A function that creates an empty output of a kind. A Delta table does not exist yet."""

    def make(kind: str) -> Output:
        match kind:
            case "files":
                return Files(tmp_path_factory.mktemp("output") / "output")
            case "table":
                return Table(request.getfixturevalue("postgres"))
            case "mariadb":
                return MariaDBTable(request.getfixturevalue("mariadb"))
            case "kafka_topic":
                return KafkaTopic(request.getfixturevalue("connection"))
            case "delta" | "delta_upsert":
                folder, spark = tmp_path_factory.mktemp("output") / "output", request.getfixturevalue("quick_spark")
                return DeltaFolder(folder, spark, upserts=kind == "delta_upsert")
            case "iceberg":
                return IcebergFolder(tmp_path_factory.mktemp("lake"))
            case "hdfs":
                uri = f"{request.getfixturevalue('hdfs')}/{new_instance_id('out')}"
                return HadoopFiles(uri, request.getfixturevalue("quick_spark"))
        raise ValueError(kind)

    return make


@dataclass
class Scene:
    """A group with its output, and the process of its member."""

    site: Site
    output: Output
    worker: Worker | None = None
    claimed: str = ""
    """What the member reported when it had claimed its batch."""
    failed: str = ""
    """What the member reported when its batch failed."""

    @property
    def process(self) -> Worker:
        """The process of the member."""
        assert self.worker is not None
        return self.worker


Scenes = dict[str, Scene]
MakeScene = Callable[[str], Scene]


@pytest.fixture(scope="module")
def make_scene(make_site: MakeSite, make_output: MakeOutput, messages: str) -> MakeScene:
    """A function that creates a group, which reads the topic that many groups read, and an output of a kind."""
    return lambda kind: Scene(make_site(messages), make_output(kind))


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """A function that returns which parameters of a test are selected in this run, of those given.

    Without parameters it returns `[""]` if the test is selected.
    """
    names = {item.name for item in request.session.items if item.path == request.path}

    def find(test: Callable[..., object], *parameters: str) -> list[str]:
        if not parameters:
            return [""] if test.__name__ in names else []
        return [each for each in parameters if f"{test.__name__}[{each}]" in names]

    return find


Selected = Callable[..., list[str]]


@pytest.fixture(scope="module", autouse=True)
def prepared(request: pytest.FixtureRequest) -> None:
    """Kill and stop the members of all selected tests. An error is reported by the tests of that member."""
    items = [item for item in request.session.items if item.path == request.path]
    needed = {name for item in items for name in getattr(item, "fixturenames", ())}
    for name in PREPARED:
        if name in needed:
            with suppress(Exception):
                request.getfixturevalue(name)


PREPARED = (
    "stopped_before_write",
    "stopped_before_commit",
    "killed",
    "dead_in_commit",
    "dead_before_write",
)


@pytest.fixture(scope="module")
def dead_in_commit(
    selected: Selected, make_site: MakeSite, make_output: MakeOutput, quick_spark: "SparkSession"
) -> Scenes:
    """Runs that died between two of their commit records, each with a topic of its own."""
    scenes = {}
    for kind in selected(test_half_of_its_partitions_each, "files", "table", "mariadb", "kafka_topic"):
        scene = scenes[kind] = Scene(make_site(), make_output(kind))
        dead = scene.site.batch(scene.output, scene.site.delivery(half_commit=True))
        with pytest.raises(KilledError), dead:
            dead.write(result(dead, quick_spark))
    return scenes


@pytest.mark.parametrize("kind", ["files", "table", "mariadb", "kafka_topic"])
def test_half_of_its_partitions_each(
    dead_in_commit: Scenes, kind: str, quick_spark: "SparkSession", fill: Callable[[str, int, int], None]
) -> None:
    """A run dies between two of its commit records.

    Two others take over at the same time, half of the partitions each.
    """
    site, output = dead_in_commit[kind].site, dead_in_commit[kind].output
    assert [site.key(n).offset for n in range(PARTITIONS)] == [8, 0, 0, 0, 0]
    site.let_claims_become_stale()

    with site.batch(output, partitions=(1, 2)) as one, site.batch(output, partitions=(3, 4)) as two:
        assert [[each.partition for each in batch.skipped] for batch in (one, two)] == [[1, 2], [3, 4]]
        for batch in (two, one):
            batch.write(result(batch, quick_spark))
    assert [site.key(n).offset for n in range(PARTITIONS)] == [8] * 5
    assert output.rows() == input_rows()

    fill(site.topic, PARTITIONS, MESSAGES)
    site.drain(output, quick_spark)
    assert [(partition, offset) for partition, offset, _ in output.rows()] == [
        (partition, offset) for partition in range(PARTITIONS) for offset in range(16)
    ]


WRITTEN_BY_TWO = ("files", "table", "mariadb", "delta", "delta_upsert", "kafka_topic")


@pytest.fixture(scope="module")
def dead_before_write(selected: Selected, make_scene: MakeScene) -> Scenes:
    """Runs that died with a plan, before their write."""
    kinds = selected(test_half_each_of_what_was_not_written, *WRITTEN_BY_TWO)
    scenes = {kind: make_scene(kind) for kind in kinds}
    for scene in scenes.values():
        dead = scene.site.batch(scene.output, scene.site.delivery(KillPoint(Side.AFTER, "ClaimingMessages")))
        with pytest.raises(KilledError), dead:
            pytest.fail("the batch was entered")
    return scenes


@pytest.mark.parametrize("kind", WRITTEN_BY_TWO)
def test_half_each_of_what_was_not_written(dead_before_write: Scenes, kind: str, quick_spark: "SparkSession") -> None:
    """A run dies before its write. Two others write its plan at the same time, half of the partitions each."""
    site, output = dead_before_write[kind].site, dead_before_write[kind].output
    site.let_claims_become_stale()

    with site.batch(output, partitions=(0, 1)) as one, site.batch(output, partitions=(2, 3, 4)) as two:
        assert [[range_.partition for range_ in batch.ranges] for batch in (one, two)] == [[0, 1], [2, 3, 4]]
        assert all(report.is_replay for batch in (one, two) for report in batch.report())
        for batch in (two, one):
            batch.write(result(batch, quick_spark))
    assert output.rows() == input_rows()


# Stopped past the lease, and continued


STEPS = {
    "files-judged": ("files", "judged"),
    "table-copied": ("table", "copied"),
    "mariadb-copied": ("mariadb", "copied"),
}


@pytest.fixture(scope="module")
def stopped_before_write(selected: Selected, make_scene: MakeScene) -> Scenes:
    """Processes that are stopped at a step of their sink."""
    scenes = {name: make_scene(STEPS[name][0]) for name in selected(test_a_member_stopped_before_its_write, *STEPS)}
    for name, scene in scenes.items():
        scene.worker = scene.site.start(scene.output, with_spark=False, halt_at_step=STEPS[name][1])
    for name, scene in scenes.items():
        scene.claimed = scene.process.wait_until_reported("claimed")
        scene.process.wait_until_reported(f"halted {STEPS[name][1]}")
        scene.process.signal(signal.SIGSTOP)
    return scenes


@pytest.mark.parametrize("name", STEPS)
def test_a_member_stopped_before_its_write(stopped_before_write: Scenes, name: str) -> None:
    """The write with the old fencing token is rejected and the batch fails. The output is that of the successor."""
    scene = stopped_before_write[name]
    site, output, stopped = scene.site, scene.output, scene.process
    site.let_claims_become_stale()

    successor = site.start(output, with_spark=False)
    assert successor.wait_until_reported("claimed") == scene.claimed, (
        "the successor does not take over the stopped member's plan"
    )
    successor.wait_until_reported("drained")
    assert successor.wait() == 0
    written = output.rows()

    stopped.signal(signal.SIGCONT)
    stopped.go_on()
    said = stopped.wait_until_reported("failed")
    assert "SinkRejectedError" in said
    assert "fencing token" in said
    assert stopped.wait() == 1
    assert output.rows() == written == input_rows()


@pytest.fixture(scope="module")
def stopped_before_commit(selected: Selected, make_scene: MakeScene) -> Scenes:
    """Processes that are stopped when their rows are written."""
    kinds = selected(test_a_member_stopped_before_its_commit, "files", "table", "mariadb")
    scenes = {kind: make_scene(kind) for kind in kinds}
    for scene in scenes.values():
        scene.worker = scene.site.start(scene.output, with_spark=False, halt_when_written=True)
    for scene in scenes.values():
        scene.process.wait_until_reported("halted when written")
        scene.process.signal(signal.SIGSTOP)
    return scenes


@pytest.mark.parametrize("kind", ["files", "table", "mariadb"])
def test_a_member_stopped_before_its_commit(stopped_before_commit: Scenes, kind: str) -> None:
    """The stopped member's rows exist once, and its successor commits them.

    The member's own commit is rejected, and the error names the successor.
    """
    scene = stopped_before_commit[kind]
    site, output, stopped = scene.site, scene.output, scene.process
    assert output.rows() == input_rows()
    site.let_claims_become_stale()

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


AT_WORK = ("files", "table", "mariadb")
STEPS_OF_SINKS = {step: ("delta", step) for step in DELTA_STEPS}
if find_spec("pyiceberg"):
    STEPS_OF_SINKS |= {f"iceberg {step}": ("iceberg", step) for step in ("written", "judged", "committed")}
STEPS_OF_SINKS |= {f"hdfs {step}": ("hdfs", step) for step in ("judged", "linked")}
MERGES, APPENDS = "within Delta's MERGE", "within Delta's append"
WITHIN_DELTA = {MERGES: "delta_upsert", APPENDS: "delta"}


def kill_within_deltas_commit(worker: Worker, tables: Mapping[str, Path]) -> None:
    """Let a MERGE write its first file of rows, then an append commit; kill all as soon as a table's log grows."""

    def files(name: str) -> set[Path]:
        return {file for table in tables.values() for file in table.glob(name)}

    rows, log = files("*.parquet"), files("_delta_log/*")
    worker.go_on(MERGES)
    wait_until(lambda: files("*.parquet") - rows, "the MERGE writes rows")
    worker.go_on(APPENDS)
    worker.kill_all(lambda: bool(files("_delta_log/*") - log))


@pytest.fixture(scope="module")
def killed(selected: Selected, make_scene: MakeScene) -> Scenes:
    """Members of a Spark process that was killed with its JVM.

    Some are in Spark actions, "committing" is between two commit records, others are at a step of their sink, and two
    are within Delta's own code.
    """
    at_work = AT_WORK if selected(test_a_spark_process_killed_at_work) else ()
    steps = STEPS_OF_SINKS if selected(test_a_spark_process_killed_at_each_step_of_its_sinks) else {}
    within = WITHIN_DELTA if selected(test_a_spark_process_killed_within_deltas_own_commit) else {}
    halts = steps | {name: (kind, "judged") for name, kind in within.items()}
    scenes: Scenes = {}
    members: list[str] = []

    def add(name: str, kind: str, **orders: object) -> None:
        scene = scenes[name] = make_scene(kind)
        members.append(scene.site.orders(scene.output, name=name, **orders))

    for kind in at_work:
        add(kind, kind, slow_ms=ENDLESS_MS)
    if at_work:
        add("committing", "files", halt_in_commit=True)
    for name, (kind, step) in halts.items():
        add(name, kind, halt_at_step=step)
    worker = next(iter(scenes.values())).site.start_together(*members)
    for kind in at_work:
        scenes[kind].claimed = worker.wait_until_reported(f"{kind}claimed")
        worker.wait_until_reported(f"{kind}Spark is at work")
    if at_work:
        worker.wait_until_reported("committinghalted between two commit records")
    for name, (_, step) in halts.items():
        worker.wait_until_reported(f"{name}halted {step}")
    if within:
        kill_within_deltas_commit(worker, {name: path_of(scenes[name]) for name in within})
    else:
        worker.kill_all()
    return scenes


def path_of(scene: Scene) -> Path:
    """Return the folder of a Delta table."""
    assert isinstance(scene.output, DeltaFolder)
    return scene.output.path


def test_a_spark_process_killed_at_work(killed: Scenes, quick_spark: "SparkSession") -> None:
    """SIGKILL to the process group, with the JVM, during Spark actions and between two commit records.

    The outputs are exact, and rows that were written are not written again.
    """
    committing, written = killed["committing"].site, killed["committing"].output
    assert [committing.key(n).offset for n in range(PARTITIONS)] == [8, 0, 0, 0, 0]

    for kind in AT_WORK:
        scene = killed[kind]
        assert scene.output.rows() == [], kind
        done = scene.site.drain(scene.output, quick_spark)
        assert scene.claimed == f"{kind}claimed {' '.join(str(each) for each in done[0].all_ranges)}\n", (
            "the successor does not take over the killed member's plan"
        )
        assert scene.output.rows() == input_rows(), kind
    done = committing.drain(written, quick_spark)
    assert [[each.partition for each in batch.skipped] for batch in done] == [[1, 2, 3, 4]]
    assert written.rows() == input_rows()


@pytest.fixture(scope="module")
def jvm_killed(selected: Selected, make_scene: MakeScene) -> Scenes:
    """Members of a process whose JVM was killed during Spark actions, and of which one lacked Delta Lake."""
    at_work = AT_WORK if selected(test_a_session_whose_jvm_is_killed) else ()
    lacking = ("delta",) if selected(test_a_session_without_delta_lake_is_refused) else ()
    scenes = {kind: make_scene(kind) for kind in (*at_work, *lacking)}
    members = [scenes[kind].site.orders(scenes[kind].output, name=kind, slow_ms=ENDLESS_MS) for kind in at_work]
    members += [scenes[kind].site.orders(scenes[kind].output, name=kind, lacks_delta=True) for kind in lacking]
    worker = next(iter(scenes.values())).site.start_together(*members)
    for kind in lacking:
        scenes[kind].failed = worker.wait_until_reported(f"{kind}failed")
    for kind in at_work:
        scenes[kind].worker = worker
        scenes[kind].claimed = worker.wait_until_reported(f"{kind}claimed")
        worker.wait_until_reported(f"{kind}Spark is at work")
    if at_work:
        (jvm,) = [each for each in children(worker.process.pid) if each.name() == "java"]
        jvm.kill()
    return scenes


def test_a_session_whose_jvm_is_killed(jvm_killed: Scenes, quick_spark: "SparkSession") -> None:
    """SIGKILL only to the JVM, during a Spark action: the run releases at once, and the next one repeats the batch."""
    for kind in AT_WORK:
        scene = jvm_killed[kind]
        assert scene.process.wait() not in {0, -signal.SIGKILL}
        keys = [scene.site.key(n) for n in range(PARTITIONS)]
        assert all(key.owner is None and key.plan_end and not key.offset for key in keys), kind
        assert scene.output.rows() == [], kind

        done = scene.site.drain(scene.output, quick_spark)

        assert scene.claimed == f"{kind}claimed {' '.join(str(each) for each in done[0].all_ranges)}\n", (
            "the next run does not take over the failed run's plan"
        )
        assert scene.output.rows() == input_rows(), kind


def test_a_session_without_delta_lake_is_refused(jvm_killed: Scenes) -> None:
    """The error states what to do, before anything is processed. The next run takes over the plan."""
    scene = jvm_killed["delta"]
    assert "does not have Delta Lake: start it with `delta_settings`" in scene.failed
    keys = [scene.site.key(n) for n in range(PARTITIONS)]
    assert [(key.owner, key.offset, key.plan_end) for key in keys] == [(None, 0, MESSAGES // PARTITIONS)] * PARTITIONS


def test_a_spark_process_killed_at_each_step_of_its_sinks(killed: Scenes, quick_spark: "SparkSession") -> None:
    """SIGKILL to the process group, with the JVM that has the rows: each output has all rows once, or none."""
    for name, (_, step) in STEPS_OF_SINKS.items():
        scene = killed[name]
        is_there = step in {"committed", "linked"}
        assert scene.output.rows() == (input_rows() if is_there else []), name

        done = scene.site.drain(scene.output, quick_spark)

        assert sum(len(batch.skipped) for batch in done) == (PARTITIONS if is_there else 0), name
        assert scene.output.rows() == input_rows(), name


def test_a_spark_process_killed_within_deltas_own_commit(killed: Scenes, quick_spark: "SparkSession") -> None:
    """SIGKILL as soon as the first file of a commit exists: each table has all rows or none."""
    for name in WITHIN_DELTA:
        scene = killed[name]
        found = scene.output.rows()
        assert found in ([], input_rows()), name

        done = scene.site.drain(scene.output, quick_spark)

        assert sum(len(batch.skipped) for batch in done) == (PARTITIONS if found else 0), name
        assert scene.output.rows() == input_rows(), name


def test_an_orphaned_spark_process_stops(make_scene: MakeScene, quick_spark: "SparkSession") -> None:
    """Only the run worker is killed. Its step cancels its Spark jobs and ends, and the output has none of its rows."""
    scene = make_scene("table")
    scene.site.interval_ms = SHORT_INTERVAL_MS
    run_worker = scene.site.start_below(scene.output, slow_ms=ENDLESS_MS)
    run_worker.wait_until_reported("Spark is at work")
    orphans = children(run_worker.process.pid)
    run_worker.signal(signal.SIGKILL)

    said = run_worker.wait_until_reported("failed")
    assert "BatchAbortedError" in said
    assert "the parent process ended" in said
    _, alive = psutil.wait_procs(orphans, WITHIN_S)
    assert not alive, "processes of the step are still alive"
    assert scene.output.rows() == []
    scene.site.drain(scene.output, quick_spark)
    assert scene.output.rows() == input_rows()


_PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "tests.real.sink_worker", sys.argv[1]]).wait()
"""
