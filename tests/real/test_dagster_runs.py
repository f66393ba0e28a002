"""Runs on a real Kafka and Spark: what they record, how they end, and how a dead run's work is found and redone."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import dagster as dg
import psutil
import pytest
from dagster_pyspark import LazyPySparkResource, PySparkResource

from jobs.flights import CarrierTotal, carrier_totals, departures_by_carrier
from marshal_dagster.batches import ClaimedBatch, RangeOptions
from marshal_dagster.batches.context import BatchContext
from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.topic_settings import create_snapshot_topic
from marshal_dagster.errors import UnavailableError, UnsafeTopicError
from marshal_dagster.jobs.batch import build_claimed_batch_job, build_reprocess_job
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.protocol.state import Key, Phase
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.announcements import announced_ranges
from marshal_dagster.sensors.run_failure import build_run_failure_sensors
from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor
from marshal_dagster.sinks import FileSink
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.real.forked_runs import FORKED, execute_job, fork_server
from tests.real.log_time import let_claims_become_stale
from tests.real.test_cli_log import delete_up_to
from tests.stderr_capture import lines_about

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOCATION = Path(__file__).parent / "dagster_location.py"
PARTITIONS, MESSAGES = 2, 40
HEARTBEAT_INTERVAL_S = 30
"""So long that no lease ends, even if processes are stopped for a while. Log time passes when a test lets it."""
PRELOADED = (
    "marshal_dagster.jobs.batch",
    "marshal_dagster.ops.claimed_batch",
    "marshal_dagster.resources.claimer",
    "marshal_dagster.sinks",
    "pyspark.sql",
)
"""What `LOCATION` imports."""


@dataclass(slots=True)
class Site:
    """One group on a topic, and its own Dagster instance, on disk."""

    connection: KafkaConnection
    coordination_topic: str
    topic: str
    folder: Path
    instance: dg.DagsterInstance
    group: str = field(default_factory=lambda: new_instance_id("group"))
    started: list[ForkServerProcess] = field(default_factory=list)
    _reader: Rationalizer | None = None

    @property
    def mark(self) -> Path:
        """The file by which a run shows that it holds a batch."""
        return self.folder / "mark"

    def claimer(self, **settings: Any) -> ClaimerResource:  # noqa: ANN401 - any field
        """Return a claimer of the group."""
        return ClaimerResource(
            **{
                "connection": KafkaConnectionConfig(bootstrap_servers=self.connection.bootstrap_servers),
                "coordination_topic": self.coordination_topic,
                "group": self.group,
                "heartbeat_interval_s": HEARTBEAT_INTERVAL_S,
                **settings,
            }
        )

    def rationalizer(self) -> RationalizerResource:
        """Return a reader of the log."""
        return RationalizerResource(
            connection=KafkaConnectionConfig(bootstrap_servers=self.connection.bootstrap_servers),
            coordination_topic=self.coordination_topic,
        )

    def key(self, partition: int = 0) -> Key:
        """Read the state of a key."""
        if self._reader is None:
            self._reader = Rationalizer(KafkaLog(self.connection, self.coordination_topic))
        return self._reader.catch_up().key(self.group, self.topic, partition)

    def start(
        self,
        job: str,
        *,
        delivery: DeliveryMode = DeliveryMode.AT_LEAST_ONCE,
        heartbeat_interval_s: int = HEARTBEAT_INTERVAL_S,
        claim_ranges: bool = False,
        max_records: int = 10,
    ) -> ForkServerProcess:
        """Start a run in its own run worker."""
        environment = {
            "DAGSTER_HOME": str(self.folder),
            "TEST_SERVERS": self.connection.bootstrap_servers,
            "TEST_COORDINATION_TOPIC": self.coordination_topic,
            "TEST_TOPIC": self.topic,
            "TEST_GROUP": self.group,
            "TEST_DELIVERY": delivery.value,
            "TEST_HEARTBEAT_INTERVAL_S": str(heartbeat_interval_s),
            "TEST_CLAIM_RANGES": str(claim_ranges),
            "TEST_MAX_RECORDS": str(max_records),
            "TEST_MARK": str(self.mark),
        }
        output = self.folder / f"{job}.log"
        process = FORKED.Process(target=execute_job, args=({**os.environ, **environment}, LOCATION, job, output))
        process.start()
        self.started.append(process)
        return process

    def let_claims_become_stale(self) -> None:
        """Let the claims of all present runs become stale. None of them may write meanwhile."""
        let_claims_become_stale(self.connection, self.coordination_topic, HEARTBEAT_INTERVAL_S * 1_000)

    def start_and_wait(self, job: str, **settings: Any) -> ForkServerProcess:  # noqa: ANN401 - as `start`
        """Start a run and wait until it processes a batch."""
        process = self.start(job, **settings)
        wait_until(lambda: self.mark.exists() or process.exitcode is not None, f"{job} holds a batch")
        assert self.mark.exists(), (self.folder / f"{job}.log").read_text()[-4000:]
        return process

    def run(self) -> dg.DagsterRun:
        """Return the newest run."""
        return self.instance.get_runs(limit=1)[0]

    def tick(self, job: dg.JobDefinition) -> dg.SensorResult:
        """Evaluate a stale-claim sensor for `job`."""
        sensor = build_stale_claim_sensor(job, group=self.group)
        context = dg.build_sensor_context(instance=self.instance, resources={"rationalizer": self.rationalizer()})
        return cast("dg.SensorResult", sensor(context))

    def react(self, run: dg.DagsterRun, delivery: DeliveryMode) -> dg.SensorResult | dg.SkipReason:
        """Evaluate the run-failure sensor for `run`."""
        sensor, _ = build_run_failure_sensors(group=self.group)
        with dg.build_run_status_sensor_context(
            sensor_name=sensor.name,
            dagster_event=dg.DagsterEvent(dg.DagsterEventType.RUN_FAILURE.value, run.job_name),
            dagster_instance=self.instance,
            dagster_run=run,
            resources={"claimer": self.claimer(delivery=delivery.value)},
        ) as context:
            return cast("dg.SensorResult | dg.SkipReason", sensor(context))

    def close(self) -> None:
        """Kill the remaining runs and close the log."""
        for process in self.started:
            for each in _tree(process.pid):
                each.kill()
            process.join(WITHIN_S)
        if self._reader is not None:
            self._reader.close()


def _exit_code(process: ForkServerProcess) -> int | None:
    process.join(WITHIN_S)
    return process.exitcode


def _tree(pid: int | None) -> list[psutil.Process]:
    try:
        assert pid is not None
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """The process from which run workers are forked."""
    with fork_server(*PRELOADED):
        yield


@pytest.fixture
def site(
    connection: KafkaConnection,
    coordination_topic: str,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
    tmp_path: Path,
) -> Iterator[Site]:
    """A topic of two partitions with twenty messages each."""
    name = topic(PARTITIONS)
    fill(name, PARTITIONS, MESSAGES)
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        made = Site(connection, coordination_topic, name, tmp_path, instance)
        yield made
        made.close()


def _with_session(spark: "SparkSession") -> dg.ResourceDefinition:
    class Session:
        spark_session = spark

    return dg.ResourceDefinition.hardcoded_resource(Session())


def _error(result: dg.ExecuteInProcessResult, node: str) -> str:
    failure = result.failure_data_for_node(node)
    assert failure is not None
    assert failure.error is not None
    return failure.error.to_string()


# In one process


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", [LazyPySparkResource, PySparkResource])
def test_flights_are_counted_once_each(
    site: Site,
    spark: "SparkSession",
    connection: KafkaConnection,
    kind: type[LazyPySparkResource | PySparkResource],
) -> None:
    """The deployment's own op drains a topic of flights in several batches, and the sink has the correct totals.

    The session is that of a resource of dagster-pyspark, which leaves it running.
    """
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    flights = [("UA", 2.0), ("UA", None), ("B6", -1.0), ("EV", 33.0), ("UA", 4.0), ("EV", None)] * 10
    for number, (carrier, delay) in enumerate(flights):
        value = f'{{"carrier": "{carrier}", "dep_delay": {"null" if delay is None else delay}, "tailnum": null}}'
        producer.produce(f"{site.topic}", value, partition=number % PARTITIONS)
    assert producer.flush(WITHIN_S) == 0
    sink = FileSink(site.folder / "out")
    op = build_claimed_batch_op(
        departures_by_carrier, name="work", topic=site.topic, sink=sink, max_records=60, spark_key="pyspark"
    )
    result = build_claimed_batch_job(op).execute_in_process(
        instance=site.instance,
        resources={"claimer": site.claimer(delivery="effectively_once"), "pyspark": kind(spark_config={})},
    )
    assert spark.range(1).count() == 1
    totals = dict(carrier_totals(sink))
    assert totals.pop(None).flights == MESSAGES  # type: ignore[call-overload] # the fixture's messages are no flights
    assert totals == {
        "UA": CarrierTotal(30, 60.0, 20),
        "B6": CarrierTotal(10, -10.0, 10),
        "EV": CarrierTotal(20, 330.0, 10),
    }
    assert result.output_for_node("work").offsets == MESSAGES + len(flights)
    assert len(result.output_for_node("work").batch_ids) == 2
    assert [site.key(n).offset for n in range(PARTITIONS)] == [50, 50]


def test_a_second_tick_reads_only_new_records(site: Site) -> None:
    """Although each tick creates its resources, the log is read once. Later ticks read only new records."""
    job = build_reprocess_job(build_claimed_batch_op(lambda *_: None, name="work", topic=site.topic))
    member = Member(site.group, "client", "run.1")
    with site.rationalizer().world():
        pass
    reader = site.rationalizer().rationalizer()
    settings = site.claimer().settings
    log = KafkaLog(site.connection, site.coordination_topic, settings.heartbeat_interval_ms)
    claimer = Claimer(Rationalizer(log), member, site.topic, settings)
    claimer.ensure_group_settings()
    claimer.claim(range(PARTITIONS))
    site.tick(job)
    read = reader.records_read
    assert read >= PARTITIONS
    site.tick(job)
    assert reader.records_read == read
    claimer.release()
    site.tick(job)
    assert reader.records_read == read + PARTITIONS
    assert site.rationalizer().rationalizer() is reader
    claimer.rationalizer.close()


def test_an_unsafe_coordination_topic_is_refused_unless_reported(site: Site, topic: MakeTopic) -> None:
    """A dangerous setting of the coordination topic fails the run with the reason, unless the claimer accepts it."""
    settings = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
    unsafe = topic(1, {**settings, "unclean.leader.election.enable": "true"})

    @dg.op
    def claim(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
        with claimer.claimed_batch(context, topic=site.topic) as batch:
            assert batch.ranges
            batch.begin_processing()

    @dg.job
    def work() -> None:
        claim()

    strict, lax = (site.claimer(coordination_topic=unsafe, allow_unsafe_topic=accept) for accept in (False, True))
    refused = work.execute_in_process(instance=site.instance, resources={"claimer": strict}, raise_on_error=False)
    assert UnsafeTopicError.__name__ in _error(refused, "claim")
    assert "unclean.leader.election.enable is true, it must be false" in _error(refused, "claim")
    accepted = work.execute_in_process(instance=site.instance, resources={"claimer": lax})
    lines = [entry.user_message for entry in site.instance.all_logs(accepted.run_id) if not entry.is_dagster_event]
    assert any("accepts a dangerous setting" in line for line in lines)


def test_a_log_that_was_cut_after_a_run_is_read_on_by_the_next(
    site: Site, connection: KafkaConnection, topics: Topics
) -> None:
    """A run writes snapshots at its end.

    After retention deleted the whole log, the next run continues at that position.
    """
    seen: list[tuple[int, int, int]] = []

    @dg.op
    def take_one(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
        with claimer.claimed_batch(context, topic=site.topic, max_records=1) as batch:
            batch.begin_processing()
            seen.extend((range_.partition, range_.start, range_.end) for range_ in batch.ranges)

    @dg.job
    def work() -> None:
        take_one()

    assert create_snapshot_topic(topics, site.coordination_topic)
    work.execute_in_process(instance=site.instance, resources={"claimer": site.claimer()})
    for number, at in topics.offsets(site.coordination_topic, range(4), committed_only=False).items():
        delete_up_to(connection, site.coordination_topic, number, at.end)
    work.execute_in_process(instance=site.instance, resources={"claimer": site.claimer()})
    (first, second) = seen
    assert sum(end - start for _, start, end in seen) == 2
    assert first != second
    reader = Rationalizer(
        KafkaLog(connection, site.coordination_topic), snapshots=kafka_snapshots(connection, site.coordination_topic)
    )
    positions = {place: key.offset for _, place, _, key in reader.catch_up().keys()}  # noqa: SIM118 - no mapping
    assert all(world.certain for world in reader.world.partitions.values())
    assert sum(offset or 0 for offset in positions.values()) == 2
    reader.close()


def test_a_broker_that_is_down_fails_the_run_in_one_line(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a broker a run fails within the timeout with the cause and what to do.

    The client does not flood stderr.
    """
    op = build_claimed_batch_op(lambda *_: None, name="work", topic=site.topic)
    nowhere = KafkaConnectionConfig(bootstrap_servers="127.0.0.1:9", timeout_s=1)
    result = build_claimed_batch_job(op).execute_in_process(
        instance=site.instance, resources={"claimer": site.claimer(connection=nowhere)}, raise_on_error=False
    )
    assert f"{UnavailableError.__name__}: Kafka at 127.0.0.1:9 cannot be reached" in _error(result, "work")
    assert "(tried for 1 s)" in _error(result, "work")
    assert not [line for line in lines_about("127.0.0.1:9", capfd.readouterr().err) if line.startswith("%")]


# Canceled while Spark works


@dataclass(slots=True)
class Slow:
    """A function whose rows take Spark a while, in the first run that calls it."""

    is_at_work: threading.Event = field(default_factory=threading.Event)
    seen: Counter[tuple[int, int]] = field(default_factory=Counter)

    def rows(self, _: dg.OpExecutionContext, __: ClaimedBatch, frame: "DataFrame") -> "DataFrame":
        """Return the rows. In the first run each takes a second on its task."""
        rows = frame.select("partition", "offset")
        if self.is_at_work.is_set():
            return rows
        self.is_at_work.set()
        return rows.where("reflect('java.lang.Thread', 'sleep', 1000L) is not null")

    def read(self, context: dg.OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> None:
        """Read the rows and record them."""
        self.seen.update((row.partition, row.offset) for row in self.rows(context, batch, frame).collect())


def _cancel_at_work(site: Site, slow: Slow, spark: "SparkSession") -> None:
    """Terminate the run of this process as the button in the UI does, once a Spark task runs."""
    tracker = spark.sparkContext.statusTracker()

    def is_at_work() -> bool:
        stages = [tracker.getStageInfo(each) for each in tracker.getActiveStageIds()]
        return slow.is_at_work.is_set() and any(stage and stage.numActiveTasks for stage in stages)

    wait_until(is_at_work, "Spark is at work")
    site.instance.report_run_canceling(site.run())
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("phase", ["reading", "writing", "processing at most once"])
def test_a_run_canceled_while_spark_works_commits_nothing_more(site: Site, spark: "SparkSession", phase: str) -> None:
    """The run ends as canceled and releases, and Spark stops.

    The next run does the work; in at-most-once mode, the canceled run has reported the dropped ranges.
    """
    slow, sink = Slow(), FileSink(site.folder / "out")
    delivery = {"reading": "at_least_once", "writing": "effectively_once"}.get(phase, "at_most_once")
    is_writing, is_dropping = phase == "writing", delivery == "at_most_once"
    op = build_claimed_batch_op(
        slow.rows if is_writing else slow.read,
        name="work",
        topic=site.topic,
        sink=sink if is_writing else None,
        spark_key="spark",
    )
    job, resources = (
        build_claimed_batch_job(op),
        {
            "claimer": site.claimer(delivery=delivery),
            "spark": _with_session(spark),
        },
    )
    with ThreadPoolExecutor(1) as pool:
        cancel = pool.submit(_cancel_at_work, site, slow, spark)
        job.execute_in_process(instance=site.instance, resources=resources, raise_on_error=False)
        cancel.result()
    canceled = site.run()
    assert canceled.status is dg.DagsterRunStatus.CANCELED
    wait_until(lambda: not spark.sparkContext.statusTracker().getActiveJobsIds(), "Spark has stopped")
    position = (20, None) if is_dropping else (0, 20)
    assert [(key.owner, key.offset, key.plan_end) for key in map(site.key, range(PARTITIONS))] == [
        (None, *position)
    ] * PARTITIONS
    assert not slow.seen
    assert _reported_dropped(site, canceled) == ({(0, 0, 20), (1, 0, 20)} if is_dropping else set())

    assert job.execute_in_process(instance=site.instance, resources=resources).success
    rows = [(row.partition, row.offset) for row in sink.read(spark).collect()] if is_writing else []
    all_once = Counter({(number, offset): 1 for number in range(PARTITIONS) for offset in range(20)})
    assert slow.seen + Counter(rows) == (Counter() if is_dropping else all_once)
    assert [site.key(number).offset for number in range(PARTITIONS)] == [20, 20]


def _reported_dropped(site: Site, run: dg.DagsterRun) -> set[tuple[Any, Any, Any]]:
    """Return the ranges that a run itself reported as possibly dropped."""
    found = set()
    for entry in site.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION):
        assert entry.asset_observation is not None
        table = entry.asset_observation.metadata.get("dropped")
        for row in table.records if isinstance(table, dg.TableMetadataValue) else ():
            assert row.data["state"] == "possibly dropped"
            found.add((row.data["partition"], row.data["start"], row.data["end"]))
    return found


# In processes that end


def test_runs_share_partitions_by_ranges(site: Site, spark: "SparkSession") -> None:
    """While one run holds a range of each partition, another run processes the rest.

    After the first run was killed, its ranges are processed last.
    """
    settings: dict[str, Any] = {
        "delivery": DeliveryMode.EFFECTIVELY_ONCE,
        "claim_ranges": True,
    }
    sink = FileSink(site.folder / "out")
    op = build_claimed_batch_op(
        lambda _, __, frame: frame.select("partition", "offset"),
        name="work",
        topic=site.topic,
        sink=sink,
        ranges=RangeOptions(size=6),
        spark_key="spark",
    )
    resources = {"claimer": site.claimer(**settings), "spark": _with_session(spark)}
    holding = site.start_and_wait("hold", **settings)

    result = build_claimed_batch_job(op).execute_in_process(instance=site.instance, resources=resources)

    assert result.output_for_node("work").offsets == 30
    assert [site.key(n).offset for n in range(PARTITIONS)] == [0, 0]
    for each in _tree(holding.pid):
        each.kill()
    holding.join(WITHIN_S)
    site.let_claims_become_stale()
    wait_until(lambda: site.tick(build_reprocess_job(op)).run_requests, "the sensor finds what the dead run left")
    again = build_claimed_batch_job(op).execute_in_process(instance=site.instance, resources=resources)
    assert again.output_for_node("work").offsets == 10
    assert [(site.key(n).offset, site.key(n).ranges) for n in range(PARTITIONS)] == [(20, ()), (20, ())]
    rows = Counter((row.partition, row.offset) for row in sink.read(spark).collect())
    assert rows == Counter({(number, offset): 1 for number in range(PARTITIONS) for offset in range(20)})


def test_two_spark_runs_work_on_one_partition_at_once_one_of_them_ahead_of_the_messages(
    site: Site, spark: "SparkSession", fill: Callable[[str, int, int], None]
) -> None:
    """A range processed ahead waits for the ranges before it. Then the offset passes both, and each row exists once."""
    sink = FileSink(site.folder / "out")
    op = build_claimed_batch_op(
        _wait_in_spark(site.folder),
        name="work",
        topic=site.topic,
        sink=sink,
        ranges=RangeOptions(size=20, prefetch_offsets=20, wait_s=WITHIN_S),
        max_batches=1,
        spark_key="spark",
    )
    job = build_claimed_batch_job(op)

    def ranges() -> list[tuple[int, int, Phase]]:
        return [(range_.start, range_.end, range_.phase) for range_ in site.key().ranges]

    def is_at_work(start: int) -> bool:
        return (site.folder / f"at-work-{start}").exists()

    def run() -> bool:
        claimer = site.claimer(delivery="effectively_once", claim_ranges=True)
        resources = {"claimer": claimer, "spark": _with_session(spark)}
        return job.execute_in_process(instance=site.instance, resources=resources).success

    def finish(run: Future[bool], start: int) -> None:
        (site.folder / f"let-go-{start}").touch()
        assert run.result(WITHIN_S)

    with (
        ThreadPoolExecutor(2) as pool,
        _released(site.folder),
        patch.object(BatchContext, "extents", autospec=True, side_effect=BatchContext.extents) as looks,
    ):
        near = pool.submit(run)
        wait_until(lambda: is_at_work(0) or near.done(), "Spark is at work on the messages that are there")
        ahead = pool.submit(run)
        wait_until(lambda: (20, 40, Phase.CLAIMED) in ranges() or ahead.done(), "a range is held ahead")
        looks.reset_mock()
        wait_until(lambda: looks.call_count > 3 or ahead.done(), "it has looked for messages several times")
        assert (ahead.done(), (20, 40, Phase.CLAIMED) in ranges(), is_at_work(20)) == (False, True, False), "it waits"
        fill(site.topic, PARTITIONS, MESSAGES)
        wait_until(lambda: is_at_work(20) or ahead.done(), "Spark is at work on the messages that have come")
        assert not near.done()
        assert not ahead.done()
        assert ranges() == [(0, 20, Phase.PLANNED), (20, 40, Phase.PLANNED)]
        assert len({one.owner.instance for one in site.key().ranges if one.owner is not None}) == 2

        finish(ahead, 20)
        assert (site.key().offset, ranges()) == (0, [(0, 20, Phase.PLANNED), (20, 40, Phase.DONE)])
        finish(near, 0)

    assert [(site.key(n).offset, site.key(n).ranges) for n in range(PARTITIONS)] == [(40, ())] * PARTITIONS
    rows = Counter((row.partition, row.offset) for row in sink.read(spark).collect())
    assert rows == Counter({(number, offset): 1 for number in range(PARTITIONS) for offset in range(40)})


def _wait_in_spark(folder: Path) -> Callable[[dg.OpExecutionContext, ClaimedBatch, "DataFrame"], "DataFrame"]:
    """Return a function whose rows one Spark task computes, which waits for a file."""
    from pyspark.sql.functions import udf

    def rows(_: dg.OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> "DataFrame":
        start = batch.ranges[0].start
        at_work, let_go = str(folder / f"at-work-{start}"), str(folder / f"let-go-{start}")

        def wait(_: int) -> bool:
            import os
            import time

            open(at_work, "w").close()  # noqa: PTH123 - the code runs without this module's imports
            while not os.path.exists(let_go):  # noqa: PTH110
                time.sleep(0.02)
            return True

        wait.__module__ = "__main__"
        return frame.select("partition", "offset").coalesce(1).where(udf(wait, "boolean")("offset"))

    return rows


@contextmanager
def _released(folder: Path) -> Iterator[None]:
    """Let the tasks of both runs continue after the block, also if it failed."""
    try:
        yield
    finally:
        for start in (0, 20):
            (folder / f"let-go-{start}").touch()


def test_a_terminated_run_releases_at_once(site: Site) -> None:
    """SIGTERM while Spark works ends the run and releases its partitions at once, with the plan still open."""
    worker = site.start_and_wait("spark_multiprocess")
    assert site.key().owner is not None
    tree = _tree(worker.pid)
    worker.terminate()
    wait_until(lambda: site.key().owner is None and site.key(1).owner is None, "both claims are released")
    assert (site.key().offset, site.key().plan_end) == (0, 20)
    wait_until(lambda: not psutil.wait_procs(tree, timeout=0)[1], "all processes of the run have ended")
    assert site.run().is_finished


def test_a_step_whose_run_worker_is_killed_stops_and_releases(site: Site) -> None:
    """If only the run worker is killed, its orphaned step notices, stops, and releases without a commit."""
    worker = site.start_and_wait("hold_in_step", heartbeat_interval_s=20)
    step = psutil.Process(int(site.mark.read_text()))
    assert step.pid != worker.pid
    worker.kill()
    worker.join(WITHIN_S)
    wait_until(lambda: site.key().owner is None, "the claim is released")
    wait_until(lambda: not step.is_running() or step.status() == psutil.STATUS_ZOMBIE, "the step has ended")
    assert site.key().offset == 0


def test_an_announcement_outlives_a_kill(site: Site) -> None:
    """If a run dies by SIGKILL right after its announcement, Dagster's storage has the announcement.

    Nothing is committed.
    """
    worker = site.start("kill_after_announcing", delivery=DeliveryMode.AT_MOST_ONCE)
    assert _exit_code(worker) == -signal.SIGKILL
    found = [(row.partition, row.start, row.end) for row, _ in announced_ranges(site.instance, site.run().run_id)]
    assert found == [(0, 0, 20), (1, 0, 20)]
    assert (site.key().offset, site.key().plan_end) == (0, 20)


def test_a_killed_runs_plan_is_found_and_redone(site: Site, spark: "SparkSession") -> None:
    """A run is killed at work. The sensor requests a run for its partitions, and that run replays the plan.

    `test_takeover_sinks` kills processes while Spark works.
    """
    worker = site.start_and_wait("hold", max_records=MESSAGES)
    dead = site.key().owner
    assert dead is not None
    for each in reversed(_tree(worker.pid)):
        each.kill()
    worker.join(WITHIN_S)
    site.let_claims_become_stale()
    op = build_claimed_batch_op(lambda *_: None, name="work", topic=site.topic, spark_key="spark")
    redo = build_reprocess_job(op, name="redo")
    wait_until(lambda: site.tick(redo).run_requests, "the sensor finds the stale claim")
    (request,) = site.tick(redo).run_requests or ()
    result = redo.execute_in_process(
        run_config=request.run_config,
        tags=dict(request.tags),
        instance=site.instance,
        resources={"claimer": site.claimer(), "spark": _with_session(spark)},
    )
    (record,) = (event for event in result.all_events if event.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION)
    table = cast("dg.TableMetadataValue", record.step_materialization_data.materialization.metadata["ranges"])
    assert [(row.data["start"], row.data["end"], row.data["replay"]) for row in table.records] == [(0, 20, True)] * 2
    assert [site.key(n).offset for n in range(PARTITIONS)] == [20, 20]
    assert not site.tick(redo).run_requests


def test_a_run_that_dagster_says_is_over_is_taken_over_without_waiting(site: Site, spark: "SparkSession") -> None:
    """After Dagster has marked a killed run as failed, the next run revokes its claims and works at once."""
    worker = site.start_and_wait("hold")
    for each in reversed(_tree(worker.pid)):
        each.kill()
    worker.join(WITHIN_S)
    site.instance.report_run_failed(site.run())
    op = build_claimed_batch_op(lambda *_: None, name="work", topic=site.topic, spark_key="spark")
    result = build_claimed_batch_job(op).execute_in_process(
        instance=site.instance, resources={"claimer": site.claimer(), "spark": _with_session(spark)}
    )
    assert result.output_for_node("work").offsets == MESSAGES


def test_what_a_failed_run_held_is_revoked_at_once(site: Site) -> None:
    """If Dagster reports a failed run, the sensor frees its partitions. A run without claims is skipped."""
    worker = site.start_and_wait("hold")
    run = site.run()
    for each in reversed(_tree(worker.pid)):
        each.kill()
    worker.join(WITHIN_S)
    reported = site.react(run, DeliveryMode.AT_LEAST_ONCE)
    assert isinstance(reported, dg.SensorResult)
    assert f"revoked the claims of run {run.run_id}: {site.topic}/0: plan [0, 5)" in str(reported.skip_reason)
    assert [(site.key(n).owner, site.key(n).plan_end) for n in range(PARTITIONS)] == [(None, 5), (None, 5)]
    again = site.react(run, DeliveryMode.AT_LEAST_ONCE)
    assert isinstance(again, dg.SkipReason)
    assert "held nothing" in str(again.skip_message)


def test_what_a_failed_at_most_once_run_dropped_is_reported(site: Site) -> None:
    """A run killed right after its commit is revoked, and its possibly dropped messages become an observation."""
    worker = site.start("kill_after_commit", delivery=DeliveryMode.AT_MOST_ONCE)
    assert _exit_code(worker) == -signal.SIGKILL
    reported = site.react(site.run(), DeliveryMode.AT_MOST_ONCE)
    assert isinstance(reported, dg.SensorResult)
    assert [event.metadata["possibly_dropped_offsets"].value for event in reported.asset_events] == [20, 20]
    assert (site.key().owner, site.key().offset) == (None, 20)
