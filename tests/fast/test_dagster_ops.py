"""Check the claimed-batch op with in-memory topics; the stand-in for Spark returns lists."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Literal, cast

import dagster as dg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run_iterator

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.assets.checks import build_claim_checks
from marshal_dagster.assets.decorator import marshal_asset
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, RangeOptions, record_reader
from marshal_dagster.batches import batch as batch_module
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    ClaimLostError,
    ConfigurationError,
    DecodeError,
    FailingRecordError,
    SinkRejectedError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.jobs.batch import build_claimed_batch_job, build_claimed_batch_schedule, build_reprocess_job
from marshal_dagster.kafka import record_size
from marshal_dagster.ops import execution
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.ops.config import ClaimedBatchConfig
from marshal_dagster.ops.dropped_ranges import possibly_dropped
from marshal_dagster.ops.execution import BatchExecution
from marshal_dagster.ops.metadata import BatchesResult, ExecutionOutcome
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.protocol.messages import ClaimingPartition, DeliveryMode, Heartbeat, RevokingClaim
from marshal_dagster.protocol.state import Phase
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.runs.abandoned_work import ExpectedKeyState
from marshal_dagster.runs.announcements import announced_ranges, announcer
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.spark import job_control as spark_jobs
from marshal_dagster.spark import reader, session
from tests.batch_fixtures import GROUP, HI_MS, TOPIC, MemorySink, Scene
from tests.conditions import WITHIN_S
from tests.faulty_log import Fault, FaultyLog, InterruptError, of_type

AT_MOST_ONCE, AT_LEAST_ONCE, EFFECTIVELY_ONCE = DeliveryMode


@dataclass(slots=True)
class Stand:
    """A scene with a Dagster instance, and an op whose resources are stand-ins for Kafka and Spark."""

    scene: Scene
    instance: dg.DagsterInstance
    process: Callable[[dg.OpExecutionContext, ClaimedBatch, Any], Any]
    mode: DeliveryMode = EFFECTIVELY_ONCE
    sessions: int = 0
    on_session: Callable[[], object] = lambda: None
    ranges: bool = False
    """Whether the group claims ranges."""
    log: FaultyLog | None = None
    """The log of the op's batch session; None for one without faults."""
    seen: list[Any] = field(default_factory=list)

    def claimer(self) -> ClaimerResource:
        """Return a claimer resource whose batch sessions use the scene."""
        stand = self

        class SceneClaimer(ClaimerResource):
            def open_delivery(self, context: Any) -> BatchSession:  # noqa: ANN401 - the context of an op or an asset
                opened = self._open.get("delivery")
                if opened is None:
                    stack = ExitStack()
                    stack.enter_context(logs_to_run(context))
                    opened = stand.scene.delivery(stand.mode, log=stand.log, ranges=stand.ranges)
                    opened.announce = announcer(context)
                    self._open.update(delivery=opened, stack=stack)
                return cast("BatchSession", opened)

        return SceneClaimer(
            connection=KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1"), group=GROUP, delivery=self.mode.value
        )

    def spark(self) -> dg.ResourceDefinition:
        """Return a resource that records when its session is requested."""
        stand = self

        class Session:
            @property
            def spark_session(self) -> object:
                stand.sessions += 1
                stand.on_session()
                return object()

        return dg.ResourceDefinition.hardcoded_resource(Session())

    def run(self, config: ClaimedBatchConfig | None = None, **settings: Any) -> dg.ExecuteInProcessResult:  # noqa: ANN401 - settings of the op
        """Run the op, followed by an op that takes its output."""
        run_config = dg.RunConfig(ops={"work": config} if config else {})
        return self.job(**settings).execute_in_process(
            run_config=run_config, instance=self.instance, raise_on_error=False
        )

    def job(self, **settings: Any) -> dg.JobDefinition:  # noqa: ANN401 - settings of the op
        """Return the job of both ops."""

        def process(context: dg.OpExecutionContext, batch: ClaimedBatch, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
            self.seen.append(frame)
            return self.process(context, batch, frame)

        sink = self.scene.sink if self.mode is EFFECTIVELY_ONCE else None
        first = build_claimed_batch_op(
            process, **{"name": "work", "topic": TOPIC, "sink": sink, "spark_key": "spark", **settings}
        )

        @dg.op
        def after(done: BatchesResult) -> BatchesResult:
            return done

        resources = {"claimer": self.claimer().get_resource_definition(), "spark": self.spark()}

        @dg.job(resource_defs=resources, executor_def=dg.in_process_executor)
        def both() -> None:
            after(first())

        return both

    def observations(self, result: dg.ExecuteInProcessResult) -> list[dg.AssetObservation]:
        """Return a run's observations."""
        kind = dg.DagsterEventType.ASSET_OBSERVATION
        return [
            event.asset_observation_data.asset_observation for event in result.all_events if event.event_type == kind
        ]

    def recorded_observations(self, result: dg.ExecuteInProcessResult) -> list[dg.AssetObservation]:
        """Return a run's observations, those of a failed step included."""
        entries = self.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
        events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
        return [event.asset_observation_data.asset_observation for event in events]

    def materializations(self, result: dg.ExecuteInProcessResult) -> list[dg.AssetMaterialization]:
        """Return the materializations of a run's batches, in all attempts of its step."""
        entries = self.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION)
        return [entry.asset_materialization for entry in entries if entry.asset_materialization is not None]

    def tags(self, result: dg.ExecuteInProcessResult) -> dict[str, str]:
        """Return a run's tags."""
        run = self.instance.get_run_by_id(result.run_id)
        assert run is not None
        return dict(run.tags)

    def lines(self, result: dg.ExecuteInProcessResult) -> list[str]:
        """Return the lines that a run logged."""
        return [entry.user_message for entry in self.instance.all_logs(result.run_id) if not entry.is_dagster_event]


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    """Yield one Dagster instance for all tests; each test reads only its own runs."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


class Frame(list[Any]):
    """A stand-in for a data frame: a list of partitions and offsets, with the columns that a run checks."""

    columns = ["partition", "offset"]  # noqa: RUF012 - like a DataFrame's


def do_without_spark(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    """Let batches read lists of the scene's messages."""

    def read_ranges(
        _spark: object, _options: object, topic: str, ranges: dict[int, tuple[int, int]], **_: object
    ) -> list[Any]:
        at = scene.data._topics[topic].partitions
        return Frame(
            (n, offset) for n, (start, end) in ranges.items() for offset in at[n].messages if start <= offset < end
        )

    monkeypatch.setattr(record_reader, "check_session", lambda _: None)
    monkeypatch.setattr(record_reader, "check_single_execution", lambda _: None)
    monkeypatch.setattr(reader, "read_ranges", read_ranges)
    monkeypatch.setattr(reader, "count_records", lambda frame: Counter(n for n, _ in frame))
    monkeypatch.setattr(reader, "offsets_read", lambda _: dict.fromkeys(range(8), ()))
    monkeypatch.setattr(spark_jobs, "batch_jobs", lambda *_: nullcontext())
    monkeypatch.setattr(spark_jobs, "cancel", lambda *_: None)
    monkeypatch.setattr(spark_jobs, "progress", lambda *_: "1 of 2 tasks done")


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance) -> Stand:
    """Return a topic of three partitions with ten messages each, and an op that returns its messages."""
    scene = Scene()
    scene.data.make(messages=10)

    do_without_spark(monkeypatch, scene)
    return Stand(scene, instance, lambda _context, _batch, frame: frame)


def _error(result: dg.ExecuteInProcessResult) -> str:
    error = result.failure_data_for_node("work")
    assert error is not None
    assert error.error is not None
    return error.error.to_string()


@pytest.mark.slow
def test_one_run_works_batch_after_batch_in_one_session(stand: Stand) -> None:
    """Batches of at most `max_records` offsets follow each other until the topic is drained, in one Spark session."""
    result = stand.run(max_records=12)
    assert result.success
    assert stand.sessions == 1
    done = result.output_for_node("work")
    assert (done.outcome, done.offsets, done.lag, len(done.batch_ids)) == (ExecutionOutcome.DONE, 30, 0, 3)
    assert stand.scene.sink.counts() == dict.fromkeys(stand.scene.data.all_messages(), 1)
    assert result.output_for_node("after") == done


@pytest.mark.slow
def test_each_batch_is_recorded_with_its_ranges_and_numbers(stand: Stand) -> None:
    """Each batch is a materialization with a table of its ranges, plotted numbers, delivery mode and batch id."""
    result = stand.run(max_records=12)
    first, *_ = records = stand.materializations(result)
    assert [record.metadata["offsets"].value for record in records] == [12, 12, 6]
    assert [each.metadata["lag"].value for each in records] == [18, 6, 0]
    assert {f"{phase}_s" for phase in ("waiting", "starting_spark", "reading", "processing", "committing")} <= set(
        first.metadata
    )
    assert first.metadata["delivery"].value == "effectively_once"
    assert first.metadata["batch_id"].value == result.output_for_node("work").batch_ids[0]
    assert [row.data for row in cast("dg.TableMetadataValue", first.metadata["ranges"]).records] == [
        {
            "topic": TOPIC,
            "partition": n,
            "start": 0,
            "end": 4,
            "offsets": 4,
            "lost": 0,
            "lag_before": 10,
            "lag_after": 6,
            "epoch": stand.scene.values().index(_claim(stand, n)),
            "generation": 0,
            "state": "committed",
            "replay": False,
        }
        for n in range(3)
    ]


def _claim(stand: Stand, partition: int) -> str:
    return next(
        value
        for value in stand.scene.values()
        if value.startswith("ClaimingPartition/") and value.endswith(f"/{partition}")
    )


@pytest.mark.slow
def test_metadata_that_dagster_cannot_store_becomes_text(stand: Stand) -> None:
    """The batch is committed by then, so it is recorded whatever the function has added."""

    def process(_context: object, batch: ClaimedBatch, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        batch.metadata |= {"price": Decimal("1.50"), "shops": {"north": {1}}, "ended": 3, 5: "five", "count": 2}  # type: ignore[dict-item]
        return frame

    stand.process = process
    (recorded,) = stand.materializations(stand.run())
    own = {name: recorded.metadata[name].value for name in ("price", "shops", "own/ended", "5", "count")}
    assert own == {"price": "1.50", "shops": "{'north': {1}}", "own/ended": 3, "5": "five", "count": 2}


@pytest.mark.slow
def test_records_are_distinguished_from_offsets_where_they_are_counted(stand: Stand) -> None:
    """Offsets without a record (compacted, aborted, markers) count in a range's width, not in its records."""
    stand.scene.data._topics[TOPIC].partitions[1].messages = [0, 3, 4, 6, 7, 8, 9]
    result = stand.run(max_records=15, count_records=True)
    records = stand.materializations(result)
    assert [(each.metadata["offsets"].value, each.metadata["records"].value) for each in records] == [
        (15, 13),
        (15, 14),
    ]
    rows = [row.data for record in records for row in cast("dg.TableMetadataValue", record.metadata["ranges"]).records]
    assert [(row["partition"], row["offsets"], row["records"]) for row in rows if row["partition"] == 1] == [
        (1, 5, 3),
        (1, 5, 4),
    ]
    assert _output(result).metadata["records"].value == 27


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mean", "limits", "offsets"),
    [
        (100.0, {"max_bytes": 1_250}, [12, 12, 6]),
        (100.0, {"max_bytes": 1_250, "max_records": 20}, [12, 12, 6]),
        (100.0, {"max_bytes": 3_000, "max_records": 20}, [20, 10]),
        (1e9, {"max_bytes": 1_000, "max_batches": 2}, [1, 1]),
        (0.0, {"max_bytes": 12}, [12, 12, 6]),
        (None, {"max_bytes": 1}, [30]),
    ],
)
def test_a_limit_in_bytes_is_one_in_offsets(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, mean: float | None, limits: dict[str, Any], offsets: list[int]
) -> None:
    """The bytes are converted by the mean size of a sample.

    The smaller limit holds; a batch has at least one offset.
    """
    monkeypatch.setattr(record_size, "bytes_per_offset", lambda *_: mean)
    result = stand.run(**limits)
    assert [each.metadata["offsets"].value for each in stand.materializations(result)] == offsets


@pytest.mark.slow
def test_what_retention_deleted_is_reported_with_its_range(stand: Stand) -> None:
    """An at-least-once run continues after deleted offsets, and reports which offsets were not read."""
    stand.mode, stand.process = AT_LEAST_ONCE, lambda *_: None
    stand.run(max_batches=1, max_records=6)
    stand.scene.data.retain_from(1, 7)
    result = stand.run()
    (record,) = stand.materializations(result)
    assert (record.metadata["offsets"].value, record.metadata["lost_offsets"].value) == (24, 5)
    rows = [row.data for row in cast("dg.TableMetadataValue", record.metadata["ranges"]).records]
    assert [(row["start"], row["lost"]) for row in rows] == [(2, 0), (2, 5), (2, 0)]
    (reported,) = [each for each in stand.observations(result) if "lost" in each.metadata]
    assert reported.metadata["lost"].value == [{"partition": 1, "start": 2, "end": 7}]
    assert reported.metadata["lost_offsets"].value == 5


@pytest.mark.slow
def test_the_output_has_the_sum_of_all_batches(stand: Stand) -> None:
    """The op's output has the sums, the remaining lag, all ranges and the reason why the run ended."""
    result = stand.run(max_records=12, max_batches=2)
    metadata = _output(result).metadata
    assert {name: metadata[name].value for name in ("batches", "offsets", "lag", "ended")} == {
        "batches": 2,
        "offsets": 24,
        "lag": 6,
        "ended": "at a limit of this run",
    }
    assert len(cast("dg.TableMetadataValue", metadata["ranges"]).records) == 6


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "plan"), [(AT_LEAST_ONCE, 10), (EFFECTIVELY_ONCE, None)])
def test_the_claim_comes_before_the_session(stand: Stand, mode: DeliveryMode, plan: int | None) -> None:
    """The partitions are held when the session starts; a batch is planned before its sink is called."""
    stand.mode = mode
    held: list[tuple[bool, int | None]] = []

    def note() -> None:
        keys = [stand.scene.key(n) for n in range(3)]
        held.extend((key.owner is not None, key.plan_end) for key in keys)

    planned: list[int | None] = []
    stand.scene.sink.while_reading = lambda: planned.append(stand.scene.key().plan_end)
    stand.on_session = note
    stand.process = lambda _context, _batch, frame: frame if mode is EFFECTIVELY_ONCE else None
    assert stand.run().success
    assert held == [(True, plan)] * 3
    assert planned == ([10] if mode is EFFECTIVELY_ONCE else [])


@pytest.mark.slow
def test_the_run_is_tagged_with_group_and_topic(stand: Stand) -> None:
    """Runs can be found by group, topic and outcome."""
    tags = stand.tags(stand.run())
    assert {tags[f"marshal/{name}"] for name in ("group", "topic", "outcome")} == {GROUP, TOPIC, "done"}


@pytest.mark.slow
def test_two_assets_of_one_group_and_topic_are_a_warning(stand: Stand) -> None:
    """They share the group's position, so the second one never gets what the first one has processed."""
    first = stand.run(max_records=12, max_batches=1)
    again = stand.run(max_records=12, max_batches=1)
    other = stand.run(asset_key=dg.AssetKey(["sums", "orders"]))
    warned = [
        [line for line in stand.lines(result) if "share its position" in line] for result in (first, again, other)
    ]
    assert warned[:2] == [[], []]
    (warning,) = warned[2]
    assert f"run {again.run_id} was for asset 'work'" in warning
    assert "give 'sums/orders' a ClaimerResource with another group" in warning
    assert other.output_for_node("work").offsets == 6


def test_run_config_limits_what_is_taken(stand: Stand) -> None:
    """Partitions and limits in the run config override those of the op."""
    config = ClaimedBatchConfig(partitions="1", max_records=3, max_batches=1)
    assert stand.run(config, max_records=12).output_for_node("work").offsets == 3
    assert [stand.scene.key(n).offset for n in range(3)] == [0, 3, 0]


@pytest.mark.slow
def test_partitions_in_the_run_config_have_the_form_of_the_admin_jobs(stand: Stand) -> None:
    """Numbers and ranges of numbers are accepted; what names no partitions fails the run with that text."""
    stand.run(ClaimedBatchConfig(partitions="0,2-2", max_batches=2))
    assert [stand.scene.key(n).offset for n in range(3)] == [10, 0, 10]
    result = stand.run(ClaimedBatchConfig(partitions="one"))
    assert not result.success
    assert "partitions: 'one' names no partitions" in _error(result)


def test_an_op_reads_in_as_many_tasks_as_it_is_reported(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """`min_partitions` reaches the read of each batch; 0 is refused when the op is built."""
    requested: list[int | None] = []

    def read_ranges(*_: object, min_partitions: int | None, **__: object) -> list[object]:
        requested.append(min_partitions)
        return []

    monkeypatch.setattr(reader, "read_ranges", read_ranges)
    stand.run(min_partitions=8, max_batches=1)
    assert requested[0] == 8
    with pytest.raises(ConfigurationError, match="min_partitions is 0"):
        stand.job(min_partitions=0)


@pytest.mark.slow
def test_progress_is_logged_while_spark_works(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the function works, the run logs Spark's progress; an unchanged state is not logged again."""
    reported = threading.Event()
    requested = iter(range(10**6))
    monkeypatch.setattr("marshal_dagster.ops.spark_monitor.PROGRESS_EVERY_S", 0.001)
    monkeypatch.setattr(
        spark_jobs, "progress", lambda *_: reported.set() if next(requested) > 20 else "1 of 2 tasks done"
    )
    stand.process = lambda _context, _batch, frame: frame if reported.wait(WITHIN_S) else None
    result = stand.run()
    assert [line for line in stand.lines(result) if line.startswith("Spark")] == ["Spark: 1 of 2 tasks done"]


def test_the_lag_counts_partitions_that_got_no_part(stand: Stand) -> None:
    """If one partition fills the batch, the lag still includes the other partitions."""
    stand.scene.data.append(0, 90)
    result = stand.run(max_records=50, max_batches=1)
    (record,) = stand.materializations(result)
    assert len(cast("dg.TableMetadataValue", record.metadata["ranges"]).records) == 1
    assert record.metadata["lag"].value == 120 - 50


def test_an_op_for_the_entire_topic_redoes_all_of_it(stand: Stand) -> None:
    """An op that claims the entire topic does so even if its config names some partitions."""
    result = stand.run(ClaimedBatchConfig(partitions="1"), claim_entire_topic=True)
    assert result.output_for_node("work").offsets == 30


# Nothing to do


def _paused(stand: Stand) -> None:
    stand.scene.pause(60)


def _held(stand: Stand) -> None:
    stand.scene.delivery(stand.mode).claimed_batch(_request(), stand.scene.sink).__enter__()


def _drained(stand: Stand) -> None:
    stand.scene.drain(stand.scene.delivery(stand.mode))


def _missing(stand: Stand) -> None:
    stand.scene.data.delete()


def _given_up(stand: Stand) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), stand.scene.batch(stand.scene.delivery(stand.mode), max_attempts=9):
            _ = 1 / 0


def _request() -> BatchRequest:
    return BatchRequest(topic=TOPIC)


IDLE = {
    "paused": (_paused, f"group '{GROUP}' is paused until"),
    "held": (_held, "all are held by client1"),
    "drained": (_drained, "has no unread messages"),
    "topic_missing": (_missing, f"topic '{TOPIC}' does not exist"),
}


@pytest.mark.parametrize("state", IDLE)
def test_nothing_to_do_is_said_and_skips_what_depends_on_it(stand: Stand, state: str) -> None:
    """The run succeeds without Spark; its log and an observation show the reason, and the next op is skipped."""
    prepare, text = IDLE[state]
    prepare(stand)
    result = stand.run(max_attempts=2, allow_missing_topic=True)
    assert result.success
    assert stand.sessions == 0
    assert [event.step_key for event in result.all_events if event.is_step_skipped] == ["after"]
    assert any(text in line for line in stand.lines(result))
    (reported,) = stand.observations(result)
    assert reported.asset_key == dg.AssetKey("work")
    assert reported.metadata["state"].value == state
    assert text in str(reported.metadata["reason"].value)
    assert stand.tags(result)["marshal/outcome"] == state


@pytest.mark.parametrize("state", IDLE)
def test_nothing_to_do_fails_the_run_if_requested(stand: Stand, state: str) -> None:
    """With `on_idle: fail` the run fails with the same text."""
    prepare, text = IDLE[state]
    prepare(stand)
    result = stand.run(ClaimedBatchConfig(on_idle="fail"), max_attempts=2)
    assert not result.success
    assert text in _error(result)


def test_a_missing_data_topic_fails_the_run_without_retries(stand: Stand) -> None:
    """The name may be wrong: the error has it, and the option that allows a missing topic.

    An observation shows the state.
    """
    stand.scene.data.delete()
    result = stand.run(retry_policy=dg.RetryPolicy(max_retries=2))
    assert not result.success
    assert (
        f"group 'etl': topic '{TOPIC}' does not exist. If the topic is created later, set allow_missing_topic"
        in _error(result)
    )
    assert not [event for event in result.all_events if event.is_step_up_for_retry]
    (reported,) = stand.recorded_observations(result)
    assert reported.metadata["state"].value == "topic_missing"
    assert stand.tags(result)["marshal/outcome"] == "topic_missing"


def _fail(*_: object) -> None:
    raise ZeroDivisionError("carrier 'XX' is unknown")


def evaluations(stand: Stand, result: dg.ExecuteInProcessResult) -> list[dg.AssetCheckEvaluation]:
    """Return the results of checks that a run evaluated itself."""
    entries = stand.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    events = [entry.dagster_event for entry in entries if entry.dagster_event is not None]
    return [cast("dg.AssetCheckEvaluation", event.event_specific_data) for event in events]


@pytest.mark.thorough
def test_a_run_that_finds_only_exhausted_plans_fails_and_says_what_to_do(stand: Stand) -> None:
    """After six failed runs, the seventh reads nothing and is not retried.

    Its error has the ranges, the last error and the command that retries them.
    """
    good = stand.process
    stand.process = _fail
    failed = [stand.run() for _ in range(6)]
    assert not any(result.success for result in failed)
    assert [[check.passed for check in evaluations(stand, result)] for result in failed] == [*[[]] * 5, [False]]
    sessions = stand.sessions
    result = stand.run(retry_policy=dg.RetryPolicy(max_retries=2))
    assert not result.success
    assert stand.sessions == sessions
    error = _error(result)
    assert f"{TOPIC}/0 [0, 10) of group '{GROUP}' was tried 6 times, last in run {failed[-1].run_id}: " in error
    assert "ZeroDivisionError: carrier 'XX' is unknown" in error
    assert f"Fix the cause and run `marshal-dagster retry {GROUP} {TOPIC}`" in error
    assert not [event for event in stand.instance.all_logs(result.run_id) if "retry" in str(event.step_key)]
    assert stand.tags(result)["marshal/outcome"] == "given_up"
    assert stand.tags(result)["dagster/retry_on_asset_or_op_failure"] == "false"
    (check,) = evaluations(stand, result)
    assert (check.asset_key, check.check_name, check.passed) == (dg.AssetKey("work"), "exhausted_plans", False)
    stand.process = good
    fixed = stand.run(ClaimedBatchConfig(retry_exhausted=True))
    assert fixed.success
    assert [check.passed for check in evaluations(stand, fixed)] == [True]
    assert not evaluations(stand, stand.run())


@pytest.mark.slow
def test_a_run_that_did_other_work_beside_exhausted_plans_warns_and_fails_its_check(stand: Stand) -> None:
    """The run succeeds; the exhausted plans are a warning in its log and a failed check."""
    for _ in range(3):
        with (
            pytest.raises(ZeroDivisionError),
            stand.scene.batch(stand.scene.delivery(stand.mode), partitions=(1,), max_attempts=9),
        ):
            _ = 1 / 0
    result = stand.run(max_attempts=2)
    assert result.success
    assert [stand.scene.key(n).offset for n in range(3)] == [10, 0, 10]
    (warning,) = [line for line in stand.lines(result) if "was tried 3 times" in line]
    assert warning.startswith(f"{TOPIC}/1 [0, 10) of group '{GROUP}' was tried 3 times, ")
    assert warning.endswith(f". Fix the cause and run `marshal-dagster retry {GROUP} {TOPIC} 1`")
    assert [check.passed for check in evaluations(stand, result)] == [False]


def _bad_records_in(*bad: int) -> Callable[[dg.OpExecutionContext, ClaimedBatch, Any], Any]:
    """Return a function that fails if there is a message of these partitions."""

    def process(_context: object, _batch: object, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        if found := sorted({partition for partition, _ in frame} & set(bad)):
            raise ZeroDivisionError(f"a bad record in partition {found[0]}")
        return frame

    return process


def _counting_but(bad: tuple[int, int], rows: Counter[Any], mode: DeliveryMode) -> Callable[..., Any]:
    """Return a function that counts its messages in `rows`, and fails at this partition and offset."""

    def process(_context: object, _batch: object, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        if bad in frame:
            raise ZeroDivisionError("a bad record")
        rows.update(frame)
        return frame if mode is EFFECTIVELY_ONCE else None

    return process


def _offsets(stand: Stand, partitions: int = 4) -> list[int | None]:
    return [stand.scene.key(n).offset for n in range(partitions)]


def _attempts(stand: Stand, partitions: int = 4) -> list[int | None]:
    """Return the number of attempts of each open plan."""
    keys = [stand.scene.key(n) for n in range(partitions)]
    return [None if key.plan_end is None else key.plan_attempts for key in keys]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_what_failed_twice_is_tried_in_halves_until_only_the_bad_partition_is_left(
    stand: Stand, mode: DeliveryMode
) -> None:
    """One of four partitions has a bad record: scheduled runs process the other three, and its plan is exhausted."""
    stand.mode = mode
    stand.scene.data.make(partitions=4, messages=10)
    fail = _bad_records_in(2)
    rows: Counter[Any] = Counter()

    def process(context: dg.OpExecutionContext, batch: ClaimedBatch, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        fail(context, batch, frame)
        rows.update(frame)
        return frame if mode is EFFECTIVELY_ONCE else None

    stand.process = process
    for attempts in (0, 1):
        assert not stand.run().success
        assert (_offsets(stand), _attempts(stand)) == ([0] * 4, [attempts] * 4)
    stand.scene.data.append(0, 5)
    third = stand.run()
    error = _error(third)
    assert "some partitions failed again, all others are processed. partitions [2, 3]: Zero" in error
    assert (_offsets(stand), _attempts(stand)) == ([15, 10, 0, 0], [None, None, 2, 2])
    assert [each.metadata["offsets"].value for each in stand.materializations(third)] == [20, 5]
    error = _error(stand.run())
    assert "partitions [2]: ZeroDivisionError: a bad record in partition 2" in error
    assert "partitions [3]" not in error
    for runs in range(3):
        assert (_offsets(stand), _attempts(stand)) == ([15, 10 + runs, 0, 10], [None, None, 3 + runs, None])
        stand.scene.data.append(1, 1)
        assert stand.run().success is (runs == 2)
    assert _offsets(stand) == [15, 13, 0, 10]
    assert "was tried 6 times" in _error(stand.run())
    assert max(rows.values()) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_ranges_that_failed_twice_are_tried_in_halves_too(stand: Stand, mode: DeliveryMode) -> None:
    """One range has a bad record: all others are processed, in its partition too, and its plan is exhausted."""
    stand.mode, stand.ranges = mode, True
    stand.scene.data.make(partitions=4, messages=10)
    rows: Counter[Any] = Counter()
    stand.process = _counting_but((2, 1), rows, mode)
    options: dict[str, Any] = {"ranges": RangeOptions(size=5)}
    for attempts in (0, 1):
        assert not stand.run(**options).success
        assert (_offsets(stand), _range_attempts(stand)) == ([0] * 4, [[attempts]] * 4)
    error = _error(stand.run(**options))
    assert "all others are processed. partitions [2, 3]: ZeroDivisionError" in error
    assert (_offsets(stand), _range_attempts(stand)) == ([10, 10, 0, 0], [[], [], [2], [2]])
    assert "partitions [2]: ZeroDivisionError" in _error(stand.run(**options))
    for attempts in (3, 4):
        assert (_offsets(stand), _range_attempts(stand)) == ([10, 10, 0, 10], [[], [], [attempts], []])
        assert not stand.run(**options).success
    result = stand.run(**options)
    assert result.success
    assert f"marshal-dagster retry {GROUP} {TOPIC} 2" in "".join(stand.lines(result))
    assert set(rows) == stand.scene.data.all_messages() - {(2, n) for n in range(5)}
    assert max(rows.values()) == 1
    assert "was tried 6 times" in _error(stand.run(**options))


@pytest.mark.thorough
def test_a_range_that_is_given_up_keeps_no_other_of_its_partition_from_being_tried_by_itself(stand: Stand) -> None:
    """A second range of the partition fails too: it is also tried alone, and its own plan is exhausted."""
    stand.mode, stand.ranges = AT_LEAST_ONCE, True
    stand.scene.data.make(partitions=2, messages=10)

    def process(_context: object, _batch: object, frame: Any) -> None:  # noqa: ANN401 - a stand-in
        if {(0, 1), (0, 6)} & set(frame):
            raise ZeroDivisionError("a bad record")

    stand.process = process
    options: dict[str, Any] = {"ranges": RangeOptions(size=5), "max_attempts": 2}
    for _ in range(8):
        stand.run(**options)
        stand.scene.data.append(1, 1)
    assert _range_attempts(stand, 2) == [[2, 2], []]
    assert _offsets(stand, 2)[1] == 17


def _range_attempts(stand: Stand, partitions: int = 4) -> list[list[int]]:
    """Return the number of attempts of each open plan of a range, by partition."""
    keys = [stand.scene.key(n) for n in range(partitions)]
    return [[range_.attempts for range_ in key.ranges if range_.phase is Phase.PLANNED] for key in keys]


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(DeliveryMode))
def test_the_record_that_fails_is_in_the_runs_error(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, mode: DeliveryMode
) -> None:
    """The record is searched while the claims are held, except in at most once.

    A run that finds the plans exhausted names the record too.
    """
    owners: list[bool] = []

    def find(error: Exception, frame: Any, *_: object, **__: object) -> FailingRecordError:  # noqa: ANN401 - a stand-in
        owners.append(stand.scene.key().owner is not None)
        return FailingRecordError(f"offset {frame[0][1]} fails: {error}")

    monkeypatch.setattr(batch_module, "find_failing_record", find)
    stand.mode, stand.process = mode, lambda *_: 1 / 0
    errors = [_error(stand.run(max_attempts=1)) for _ in range(1 if mode is AT_MOST_ONCE else 3)]
    assert owners == [True] * (len(errors) - 1)
    for error in errors[: len(owners)]:
        assert "FailingRecordError: offset 0 fails: division by zero" in error
    if owners:
        assert ", last in run " in errors[-1]
        assert "FailingRecordError: offset 0 fails: division by zero" in errors[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decision", "calls"), [(dg.Failure("no", {"shop": "north"}, allow_retries=False), 1), (dg.RetryRequested(2), 3)]
)
@pytest.mark.parametrize("failed", [0, 2])
def test_a_decision_about_retries_outlives_the_error_that_names_the_record(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, decision: Exception, calls: int, failed: int
) -> None:
    """A function may let Dagster retry the step or not, also if its plans failed before and are retried in parts."""
    stand.mode, stand.process = AT_LEAST_ONCE, lambda *_: 1 / 0
    for _ in range(failed):
        stand.run()
    before = len(stand.seen)

    def process(*_: object) -> None:
        raise decision from ZeroDivisionError()

    stand.process = process
    monkeypatch.setattr(batch_module, "find_failing_record", lambda *_, **__: FailingRecordError("offset 0 fails"))
    result = stand.run(retry_policy=dg.RetryPolicy(max_retries=1), max_attempts=20)
    assert not result.success
    parts = 2 if failed and isinstance(decision, dg.Failure) else 1
    assert len(stand.seen) - before == calls * parts
    assert "FailingRecordError: offset 0 fails" in _error(result)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AT_LEAST_ONCE, EFFECTIVELY_ONCE])
def test_one_message_is_skipped_by_the_steps_of_the_docs(stand: Stand, mode: DeliveryMode) -> None:
    """The steps of docs/operate/reprocess.md: end the plan, process what precedes the message, and pass over it."""
    stand.mode = mode
    rows: Counter[Any] = Counter()
    stand.process = _counting_but((1, 4), rows, mode)
    for _ in range(3):
        assert not stand.run().success
    operator = GroupAdmin(
        Rationalizer(stand.scene.log(), clock=stand.scene.clock), GROUP, "ops", clock=stand.scene.clock
    )
    operator.end_plans(TOPIC, [1], wait_ms=0)
    assert stand.run(ClaimedBatchConfig(partitions="1", max_records=4, max_batches=1)).success
    operator.set_positions(TOPIC, {1: 5}, stand.scene.data.describe(TOPIC).topic_id, wait_ms=0)
    assert stand.run().success
    assert _offsets(stand, 3) == [10, 10, 10]
    assert rows == Counter(stand.scene.data.all_messages() - {(1, 4)})
    if mode is EFFECTIVELY_ONCE:
        assert stand.scene.sink.counts() == rows


@pytest.mark.slow
def test_one_more_attempt_takes_a_plan_that_was_given_up(stand: Stand) -> None:
    """With `retry_exhausted`, the run carries out the exhausted plan exactly as it was."""
    _given_up(stand)
    result = stand.run(ClaimedBatchConfig(retry_exhausted=True), max_attempts=2)
    tables = [cast("dg.TableMetadataValue", one.metadata["ranges"]) for one in stand.materializations(result)]
    rows = [row.data for table in tables for row in table.records]
    assert [(row["start"], row["end"], row["replay"]) for row in rows] == [(0, 10, True)] * 3


def test_a_missing_coordination_topic_is_no_reason_to_skip(stand: Stand) -> None:
    """Without the coordination topic nothing is known, so the run fails and names the topic."""
    stand.scene.broker.delete()
    result = stand.run()
    assert not result.success
    assert TopicNotFoundError.__name__ in _error(result)
    assert "__marshal" in _error(result)


def _die_in_the_run_of_the_next(stand: Stand) -> None:
    """Leave claims of a dead process, in the run that the scene's next member will have."""
    dead = stand.scene.delivery(stand.mode)
    dead.run_id = f"run{stand.scene._members + 1}"
    batch = stand.scene.batch(dead)
    batch.__enter__()
    batch._guard.stack.close()


def test_what_a_dead_process_of_the_same_run_held_is_waited_for(stand: Stand) -> None:
    """A retried step finds the run's own claims: it waits until they are stale, and then works."""
    _die_in_the_run_of_the_next(stand)
    began_ms = stand.scene.clock.wall_ms()
    result = stand.run()
    assert result.success
    assert stand.scene.sink.counts() == dict.fromkeys(stand.scene.data.all_messages(), 1)
    assert stand.tags(result)["marshal/outcome"] == "done"
    assert 2 * HI_MS < stand.scene.clock.wall_ms() - began_ms < 3 * HI_MS
    assert any("This same run holds some of it (instance 'run2." in line for line in stand.lines(result))


def test_what_the_same_run_works_on_is_held(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another step of the run that still sends heartbeats holds its claims like any member."""
    _die_in_the_run_of_the_next(stand)
    sleep_ms = stand.scene.clock.sleep_ms

    def sleep_while_it_beats(duration_ms: float) -> None:
        sleep_ms(duration_ms / 2)
        for partition in range(3):
            owner = stand.scene.key(partition).owner
            assert owner is not None
            stand.scene.about(Heartbeat, owner.instance, partition, offset=0)
        sleep_ms(duration_ms / 2)

    monkeypatch.setattr(stand.scene.clock, "sleep_ms", sleep_while_it_beats)
    began_ms = stand.scene.clock.wall_ms()
    result = stand.run()
    assert (result.success, stand.tags(result)["marshal/outcome"]) == (True, "held")
    assert stand.scene.clock.wall_ms() - began_ms < 3 * HI_MS


def test_a_run_that_may_not_wait_for_its_own_claims_fails(stand: Stand) -> None:
    """If the time budget is shorter than the wait, the step fails so that it is retried, instead of succeeding."""
    _die_in_the_run_of_the_next(stand)
    result = stand.run(ClaimedBatchConfig(time_budget_s=5))
    assert (result.success, stand.tags(result)["marshal/outcome"]) == (False, "held")
    assert "no batch was processed: no partition" in _error(result)
    assert "This same run holds some of it (instance 'run2." in _error(result)


# Retried steps

RETRIES = dg.RetryPolicy(max_retries=3)


def _fail_at(stand: Stand, *calls: int, error: BaseException | type[BaseException] = ZeroDivisionError) -> None:
    """Let the user's function fail in these calls, counted from 1."""
    counted = iter(range(1, 10**6))

    def process(_context: object, _batch: object, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        if next(counted) in calls:
            raise error
        return frame

    stand.process = process


@pytest.mark.slow
def test_a_step_that_is_tried_again_gives_what_all_of_its_attempts_did(stand: Stand) -> None:
    """The first attempt processes one batch and fails in the second; the step's output covers all three."""
    _fail_at(stand, 2)
    result = stand.run(max_records=12, retry_policy=RETRIES)
    done = result.output_for_node("after")
    recorded = stand.materializations(result)
    assert (done.offsets, done.lag, len(done.batch_ids)) == (30, 0, 3)
    assert list(done.batch_ids) == [each.metadata["batch_id"].value for each in recorded]
    assert [each.metadata["offsets"].value for each in recorded] == [12, 12, 6]
    assert stand.scene.sink.counts() == dict.fromkeys(stand.scene.data.all_messages(), 1)
    metadata = _output(result).metadata
    assert {name: metadata[name].value for name in ("batches", "batches_of_earlier_attempts", "offsets")} == {
        "batches": 3,
        "batches_of_earlier_attempts": 1,
        "offsets": 30,
    }
    assert len(cast("dg.TableMetadataValue", metadata["ranges"]).records) == 9


@pytest.mark.slow
@pytest.mark.parametrize("error", [ZeroDivisionError, dg.RetryRequested(3), KeyboardInterrupt], ids=repr)
def test_a_step_that_dropped_messages_is_not_retried(stand: Stand, error: Any) -> None:  # noqa: ANN401 - a class or an instance
    """In at most once a retry would find the topic drained and succeed, so nothing would show the failure."""
    stand.mode = AT_MOST_ONCE
    _fail_at(stand, 1, error=error)
    result = stand.run(retry_policy=RETRIES)
    assert not result.success
    assert len(stand.seen) == 1
    assert "messages are dropped (at most once), so the step is not retried" in _error(result)
    assert type(error() if isinstance(error, type) else error).__name__ in _error(result)


@pytest.mark.slow
@pytest.mark.parametrize("is_reported", [False, True], ids=["unreported", "reported"])
def test_a_step_that_is_repeated_after_a_kill_fails_if_it_dropped_messages(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, is_reported: bool
) -> None:
    """A killed process records nothing. The retry finds the announced ranges, also if a sensor has reported them."""
    stand.mode = AT_MOST_ONCE
    _fail_at(stand, 1, error=RuntimeError)
    forbid = BatchExecution._forbid_retries

    def killed(work: BatchExecution, error: BaseException) -> None:
        if not isinstance(error, RuntimeError):
            forbid(work, error)
        elif is_reported:
            found = possibly_dropped(
                work.context.instance, work.claimer.group, work.context.run, work.claimer.group_keys
            )
            for observation in found.observations():
                work.context.log_event(observation)

    monkeypatch.setattr(BatchExecution, "_forbid_retries", killed)
    result = stand.run(retry_policy=RETRIES)
    assert not result.success
    assert len(stand.seen) == 1
    assert "an earlier attempt of this step was stopped" in _error(result)
    assert "possibly dropped [0, 10)" in _error(result)


def test_a_step_that_fails_before_its_at_most_once_commit_is_retried(stand: Stand) -> None:
    """Nothing is dropped then, and the retry processes all messages."""
    stand.mode, stand.process = AT_MOST_ONCE, lambda *_: None
    divisors = iter([0, 1])
    stand.on_session = lambda: 1 / next(divisors)
    assert stand.run(retry_policy=RETRIES).success
    assert len(stand.seen[0]) == 30


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 4])
def test_a_step_whose_retries_exhaust_its_own_plan_fails(stand: Stand, more: int) -> None:
    """Neither what earlier attempts completed, nor messages that arrived for the last one, hide that."""
    fail, arriving = _bad_records_in(1), iter([more])

    def process(*arguments: Any) -> Any:  # noqa: ANN401 - a stand-in
        if stand.scene.key(1).plan_attempts == 2:
            stand.scene.data.append(0, next(arriving, 0))
        return fail(*arguments)

    stand.process = process
    result = stand.run(max_attempts=2, max_claims=1, retry_policy=dg.RetryPolicy(max_retries=9))
    assert [stand.scene.key(n).offset for n in range(3)] == [10 + more, 0, 10]
    assert not result.success
    assert f"{TOPIC}/1 [0, 10) of group '{GROUP}' was tried 3 times" in _error(result)
    assert stand.tags(result)["marshal/outcome"] == "given_up"


@pytest.mark.slow
def test_a_re_execution_that_finds_only_the_exhausted_plan_fails(stand: Stand) -> None:
    """The batches of the run that failed are part of its output, but it has done nothing itself."""
    for partition in (0, 2):
        stand.scene.data.append(partition, 10)  # these come first, because more is unread in them
    stand.process = _bad_records_in(1)
    first = stand.run(max_attempts=2, max_claims=1, retry_policy=dg.RetryPolicy(max_retries=1))
    assert (first.success, [stand.scene.key(n).offset for n in range(3)]) == (False, [20, 0, 20])
    with pytest.raises(ZeroDivisionError), stand.scene.batch(stand.scene.delivery(stand.mode), partitions=(1,)):
        _ = 1 / 0
    job = stand.job(max_attempts=2, max_claims=1)
    again = stand.instance.create_run_for_job(job, parent_run_id=first.run_id, root_run_id=first.run_id)
    events = list(execute_run_iterator(InMemoryJob(job), again, stand.instance))
    assert [event.step_key for event in events if event.is_step_failure] == ["work"]


@pytest.mark.slow
def test_what_earlier_attempts_in_a_run_did_counts_for_its_number_of_batches(stand: Stand) -> None:
    """A retry processes only the remaining batches."""
    _fail_at(stand, 2)
    result = stand.run(max_records=5, max_batches=3, retry_policy=RETRIES)
    assert len(result.output_for_node("after").batch_ids) == len(stand.materializations(result)) == 3


@pytest.mark.slow
def test_a_run_that_failed_behind_its_last_batch_is_not_given_another(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its retry returns the batch of the first attempt, and claims nothing."""
    monkeypatch.setattr(stand.instance, "add_run_tags", stand.instance.add_run_tags)
    _fail_behind_the_work(stand, 1)
    result = stand.run(max_records=5, max_batches=1, retry_policy=RETRIES)
    assert result.output_for_node("after").offsets == 5
    assert stand.tags(result)["marshal/outcome"] == "done"


def _output(result: dg.ExecuteInProcessResult) -> Any:  # noqa: ANN401 - Dagster exports no name for it
    (output,) = (
        event
        for event in result.all_events
        if event.event_type == dg.DagsterEventType.STEP_OUTPUT and event.step_key == "work"
    )
    return output.step_output_data


def _fail_behind_the_work(stand: Stand, times: int) -> None:
    """Let tagging the outcome fail this number of times, so that the step fails after it drained the topic."""
    add_run_tags, left = stand.instance.add_run_tags, iter(range(times))

    def fail(run_id: str, tags: dict[str, str]) -> None:
        if "marshal/outcome" in tags and next(left, None) is not None:
            raise RuntimeError("the database is locked")
        add_run_tags(run_id, tags)

    stand.instance.add_run_tags = fail  # type: ignore[method-assign,assignment]


@pytest.mark.slow
@pytest.mark.parametrize("on_idle", ["skip", "fail"])
def test_a_step_that_failed_behind_its_work_hands_it_on_when_tried_again(
    stand: Stand,
    on_idle: Literal["skip", "fail"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The retries find nothing to do; the step's output has the batch of the first attempt, once."""
    monkeypatch.setattr(stand.instance, "add_run_tags", stand.instance.add_run_tags)
    _fail_behind_the_work(stand, 2)
    result = stand.run(ClaimedBatchConfig(on_idle=on_idle), retry_policy=RETRIES)
    assert result.success
    assert [each.asset_key for each in stand.observations(result)] == []
    assert result.output_for_node("after").offsets == 30
    assert len(result.output_for_node("after").batch_ids) == 1
    assert "no unread messages" in str(_output(result).metadata["ended"].value)
    assert stand.tags(result)["marshal/outcome"] == "done"
    assert len(stand.materializations(result)) == 1


@pytest.mark.slow
def test_a_retry_that_finds_nothing_done_before_says_that_there_is_nothing(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of another run are not part of this step's output, so downstream steps are skipped."""
    assert stand.run().success
    monkeypatch.setattr(stand.instance, "add_run_tags", stand.instance.add_run_tags)
    _fail_behind_the_work(stand, 1)
    result = stand.run(retry_policy=RETRIES)
    assert [event.step_key for event in result.all_events if event.is_step_skipped] == ["after"]
    assert stand.tags(result)["marshal/outcome"] == "drained"


@pytest.mark.slow
def test_a_run_whose_worker_is_started_anew_gives_what_its_first_one_did(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster's run monitoring resumes the same run, in which the step starts as if for the first time."""
    monkeypatch.setattr(stand.instance, "run_will_resume", lambda _: True)
    _fail_at(stand, 2, error=KeyboardInterrupt)
    run = stand.instance.get_run_by_id(stand.run(max_records=12).run_id)
    assert run is not None
    assert run.status is dg.DagsterRunStatus.STARTED
    again = stand.job(max_records=12)
    events = list(execute_run_iterator(InMemoryJob(again), run, stand.instance, resume_from_failure=True))
    (output,) = (event for event in events if event.event_type_value == "STEP_OUTPUT" and event.step_key == "work")
    metadata = output.step_output_data.metadata
    assert {name: metadata[name].value for name in ("batches", "batches_of_earlier_attempts", "offsets")} == {
        "batches": 3,
        "batches_of_earlier_attempts": 1,
        "offsets": 30,
    }


@pytest.mark.parametrize(
    ("interrupt", "policy"),
    [(KeyboardInterrupt(), RETRIES), (ZeroDivisionError(), RETRIES), (dg.RetryRequested(max_retries=3), None)],
    ids=lambda each: type(each).__name__,
)
def test_a_step_of_a_run_that_is_canceled_is_not_tried_again(
    stand: Stand, interrupt: BaseException, policy: dg.RetryPolicy | None
) -> None:
    """This holds even if a retry policy or the function requests a retry.

    Nothing is claimed again, and the run ends as canceled.
    """
    calls = _cancel_in_the_work(stand, interrupt)
    result = stand.run(retry_policy=policy)
    assert calls == [0]
    assert _status(stand, result) is dg.DagsterRunStatus.CANCELED
    assert "is canceling" in _error(result)
    assert (stand.scene.key().owner, stand.scene.key().offset) == (None, 0)


def test_a_step_that_begins_in_a_canceled_run_claims_nothing(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancellation came after the first attempt had failed."""
    monkeypatch.setattr(BatchExecution, "_forbid_retries", lambda *_: None)
    calls = _cancel_in_the_work(stand, ZeroDivisionError())
    result = stand.run(retry_policy=RETRIES)
    assert calls == [0]
    assert _status(stand, result) is dg.DagsterRunStatus.CANCELED
    assert "no batch was started: Dagster reports that run" in _error(result)
    assert sum(value.startswith("ClaimingPartition/") for value in stand.scene.values()) == 3, (
        "one claim for each partition"
    )


def _cancel_in_the_work(stand: Stand, error: BaseException) -> list[int]:
    """Let the user's function cancel its run; return the numbers of the attempts that called it."""
    calls: list[int] = []

    def cancel(context: dg.OpExecutionContext, *_: object) -> None:
        calls.append(context.retry_number)
        stand.instance.report_run_canceling(context.run)
        raise error

    stand.process = cancel
    return calls


def _status(stand: Stand, result: dg.ExecuteInProcessResult) -> dg.DagsterRunStatus:
    run = stand.instance.get_run_by_id(result.run_id)
    assert run is not None
    return run.status


# Failures


@pytest.mark.slow
def test_a_run_that_repeats_a_plan_is_linked_with_the_run_that_left_it(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier run failed and released its claims; the plan is repeated, so both pages show the other run."""
    linked: list[tuple[set[str], str]] = []
    monkeypatch.setattr(execution, "link_repeated_runs", lambda _, run_ids, batch: linked.append((set(run_ids), batch)))
    work, stand.process = stand.process, _fail
    assert not stand.run(max_records=12).success
    stand.process = work
    assert stand.run(max_records=12).success
    (first_runs, _), (later_runs, _), *_ = linked
    assert first_runs == set()
    assert later_runs == {"run1"}


def test_a_failing_function_commits_nothing_and_releases(stand: Stand) -> None:
    """An error of the user's function fails the run; the plan stays open, without an owner."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of the user")

    stand.process = fail
    result = stand.run()
    assert "of the user" in _error(result)
    key = stand.scene.key()
    assert (key.owner, key.offset, key.plan_end) == (None, 0, 10)


def test_an_interrupt_releases_at_once(stand: Stand) -> None:
    """An interrupt, such as a cancellation, releases the batch without a commit and does not count as an attempt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    stand.process = interrupt
    assert "KeyboardInterrupt" in _error(stand.run())
    key = stand.scene.key()
    assert (key.owner, key.offset, key.plan_end) == (None, 0, None)


def test_a_lost_claim_fails_the_run_naming_the_holder(stand: Stand) -> None:
    """If another member takes over the claim while the function works, the run's commit fails and names that member."""

    def lose(*_: object) -> None:
        owner = stand.scene.key().owner
        assert owner is not None
        stand.scene.about(RevokingClaim, "other.1", epoch=owner.epoch)
        stand.scene.about(ClaimingPartition, "other.1")

    stand.process = lose
    stand.mode = AT_LEAST_ONCE
    result = stand.run()
    assert not result.success
    assert ClaimLostError.__name__ in _error(result)
    assert "\"other.1's client\", instance 'other.1'" in _error(result)
    assert stand.scene.key().offset == 0


def test_rows_without_a_sink_are_refused_before_the_commit(stand: Stand) -> None:
    """If the function returns rows but there is no sink, the rows would be lost: the run fails."""
    stand.mode = AT_LEAST_ONCE
    result = stand.run()
    assert "but the op has no sink" in _error(result)
    assert stand.scene.key().offset == 0


class _Totals(list[Any]):
    columns = ["carrier", "flights"]  # noqa: RUF012 - like a DataFrame's


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "has_claimed"), [("LazyPySparkResource", True), ("PySparkResource", False)])
def test_a_pyspark_resource_starts_spark_after_the_claim_if_it_is_lazy(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, kind: str, has_claimed: bool
) -> None:
    """With a `LazyPySparkResource` the claim comes first, with a `PySparkResource` the session."""
    import dagster_pyspark

    claimed: list[bool] = []

    def start(settings: dict[str, str]) -> object:
        assert settings == {"spark.app.name": "shops"}
        claimed.append(stand.scene.key(0).owner is not None)
        return object()

    monkeypatch.setattr("dagster_pyspark.resources.spark_session_from_config", start)
    monkeypatch.setattr(session, "find_java", lambda: None)
    resource = getattr(dagster_pyspark, kind)(spark_config={"spark.app.name": "shops"})
    monkeypatch.setattr(Stand, "spark", lambda _: resource.get_resource_definition())
    assert stand.run().success
    assert claimed == [has_claimed]


@pytest.mark.slow
def test_a_lazy_resource_never_starts_spark_if_there_is_nothing_to_read(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run finds the topic drained."""
    from dagster_pyspark import LazyPySparkResource

    assert stand.run().success
    monkeypatch.setattr("dagster_pyspark.resources.spark_session_from_config", lambda _: 1 / 0)
    monkeypatch.setattr(Stand, "spark", lambda _: LazyPySparkResource(spark_config={}).get_resource_definition())
    assert stand.run().success


def test_a_lazy_resource_whose_spark_does_not_start_fails_the_run_in_one_line(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's own error is the cause. Nothing is planned, so the failure is not an attempt."""
    from dagster_pyspark import LazyPySparkResource

    def start(_: object) -> object:
        raise RuntimeError("Could not parse Master URL: 'locl'\nat org.apache.spark")

    monkeypatch.setattr("dagster_pyspark.resources.spark_session_from_config", start)
    monkeypatch.setattr(session, "find_java", lambda: None)
    monkeypatch.setattr(Stand, "spark", lambda _: LazyPySparkResource(spark_config={}).get_resource_definition())
    failed = stand.run().failure_data_for_node("work")
    assert failed is not None
    assert failed.error is not None
    cause = failed.error.cause or failed.error
    assert "Spark does not start: Could not parse Master URL: 'locl'. Check the settings" in cause.message
    assert [stand.scene.key(number).plan_attempts for number in range(3)] == [0, 0, 0]


def test_without_spark_an_op_fails_before_it_claims(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    failed = stand.run(spark_key=None).failure_data_for_node("work")
    assert failed is not None
    assert failed.error is not None
    cause = failed.error.cause or failed.error
    assert "op 'work' needs pyspark, which is not installed: pip install 'marshal-dagster[spark]'" in cause.message
    assert stand.scene.key(0).owner is None


_MISTAKES = {
    "None": (None, "returned None, but the sink writes the rows that the function returns"),
    "a list": ([(0, 0)], "returned a builtins.list, but the sink needs a Spark DataFrame"),
    "no partition": (_Totals(), "returned rows without the column 'partition'"),
}


@pytest.mark.parametrize("mode", DeliveryMode)
def test_a_function_that_stops_the_session_is_named_before_the_next_batch_is_read(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, mode: DeliveryMode
) -> None:
    """The first batch is committed. Nothing of the second is, in at most once either."""
    stopped: list[Any] = []

    def process(_context: object, _batch: object, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        stopped.append(True)
        return frame if mode is EFFECTIVELY_ONCE else None

    stand.mode, stand.process = mode, process
    monkeypatch.setattr(execution, "is_stopped", lambda _: bool(stopped))
    result = stand.run(max_records=3)
    assert "must not call stop()" in _error(result)
    assert "test_dagster_ops.py:" in _error(result)
    assert [stand.scene.key(n).offset for n in range(3)] == [1, 1, 1]
    assert len(stand.seen) == 1


def test_a_resource_without_a_spark_session_is_refused_by_name(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the resource and its type. Nothing is planned, so the failure is not an attempt."""
    monkeypatch.setattr(Stand, "spark", lambda _: dg.ResourceDefinition.hardcoded_resource({}))
    failed = stand.run().failure_data_for_node("work")
    assert failed is not None
    assert failed.error is not None
    cause = failed.error.cause or failed.error
    assert (
        "resource 'spark' of op 'work' is a dict, which has no spark_session: use a LazyPySparkResource"
        in cause.message
    )
    assert [stand.scene.key(number).plan_attempts for number in range(3)] == [0, 0, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_result_that_no_sink_can_take_is_no_attempt(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """One line names the function, before any Spark job.

    Once the function is fixed, even after many failed runs, one run processes all.
    """
    result, text = _MISTAKES[mistake]
    stand.process = lambda *_: result

    def no_job(_: object) -> None:
        raise AssertionError("a Spark job was started")

    with monkeypatch.context() as patched:
        patched.setattr(reader, "count_records", no_job)
        for _ in range(7):
            error = _error(stand.run(count_records=True))
            assert f"function 'Stand.job.<locals>.process' ({__file__}:" in error
            assert text in error
            assert "nothing was written or committed" in error
    keys = [stand.scene.key(n) for n in range(3)]
    assert [(key.owner, key.offset, key.plan_end, key.plan_attempts) for key in keys] == [(None, 0, None, 0)] * 3
    stand.process = lambda _context, _batch, frame: frame
    assert stand.run(count_records=True).success
    assert [stand.scene.key(n).offset for n in range(3)] == [10, 10, 10]


def test_a_function_that_hands_the_sink_its_rows_itself_returns_none(stand: Stand) -> None:
    """There is nothing left to check or to write."""

    def write(_context: object, batch: ClaimedBatch, frame: Any) -> None:  # noqa: ANN401 - a stand-in
        batch.write(frame)
        assert stand.scene.key().plan_end == 10

    stand.process = write
    assert stand.run().success
    assert stand.scene.key().offset == 10


def test_a_group_paused_while_the_function_works_is_no_failure(stand: Stand) -> None:
    """Nothing is planned, so nothing has failed: the run ends as it would in a paused group."""

    def pause(_context: object, _batch: ClaimedBatch, frame: Any) -> Any:  # noqa: ANN401 - a stand-in
        stand.scene.pause(60)
        return frame

    stand.process = pause
    result = stand.run()
    assert result.success
    assert stand.tags(result)["marshal/outcome"] == "paused"
    assert (stand.scene.key().owner, stand.scene.key().offset, stand.scene.key().plan_end) == (None, 0, None)
    assert stand.scene.sink.counts() == {}


def _two(_context: object, _batch: object) -> None: ...


def _four(_context: object, _batch: object, _frame: object, _more: object) -> None: ...


def _named(_context: object, _batch: object, *, frame: object) -> object:
    return frame


def _yields(_context: object, _batch: object, frame: object) -> Iterator[object]:
    yield frame


async def _waits(_context: object, _batch: object, _frame: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (
            _two,
            r"function '_two' \(.*test_dagster_ops.py:\d+\) takes .*, but a run calls it with \(context, batch, f",
        ),
        (_four, "missing a required argument: '_more'"),
        (_named, "too many positional arguments"),
        (_yields, "is a generator"),
        (_waits, "is async"),
        ("rows", "'rows' is not a function"),
    ],
)
def test_a_function_that_no_run_can_call_is_refused_at_load(function: Any, text: str) -> None:  # noqa: ANN401 - wrong on purpose
    """Such a function is refused for an op and for an asset."""
    with pytest.raises(ConfigurationError, match=text):
        build_claimed_batch_op(function, name="work", topic=TOPIC)
    with pytest.raises(ConfigurationError, match=text):
        marshal_asset(topic=TOPIC, name="work")(function)


@pytest.mark.parametrize(
    ("sink", "text"),
    [(lambda: None, r"but a run calls it with \(context\)"), (MemorySink, "sink is the class MemorySink")],
)
def test_a_sink_that_no_run_can_make_is_refused_at_load(sink: Any, text: str) -> None:  # noqa: ANN401 - wrong on purpose
    """A function without the argument `context` is refused, and so is a class."""
    with pytest.raises(ConfigurationError, match=text):
        build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC, sink=sink)


def test_a_function_that_makes_no_sink_is_named(stand: Stand) -> None:
    """The function returns no sink: one line states that, before anything is claimed."""
    error = _error(stand.run(sink=lambda _: None))
    assert "is the option `sink`, but it returned None" in error
    assert "ClaimingPartition" not in "".join(stand.scene.values())


@pytest.mark.slow
def test_ranges_that_the_sink_has_are_committed_without_spark(stand: Stand) -> None:
    """If a dead run had written its ranges but not committed them, the next run commits without reading."""
    with suppress(ZeroDivisionError), stand.scene.batch(stand.scene.delivery(stand.mode)) as batch:
        stand.scene.process(batch)
        raise ZeroDivisionError
    assert stand.scene.key().offset == 0
    result = stand.run()
    assert (result.success, stand.sessions, stand.scene.key().offset) == (True, 0, 10)
    (record,) = stand.materializations(result)
    states = {row.data["state"] for row in cast("dg.TableMetadataValue", record.metadata["ranges"]).records}
    assert states == {"skipped"}


# At most once


@pytest.mark.slow
def test_at_most_once_announces_before_it_commits(stand: Stand) -> None:
    """The Spark session starts first; the run's events have the ranges before the offsets move."""
    stand.mode = AT_MOST_ONCE
    offsets = []
    stand.on_session = lambda: offsets.append(stand.scene.key().offset)
    stand.process = lambda *_: offsets.append(stand.scene.key().offset)
    result = stand.run()
    assert offsets == [0, 10]
    rows = [(row.partition, row.start, row.end) for row, _ in announced_ranges(stand.instance, result.run_id)]
    assert rows == [(n, 0, 10) for n in range(3)]


@pytest.mark.slow
def test_a_failing_at_most_once_run_says_what_it_dropped(stand: Stand) -> None:
    """Nothing is repeated after the commit: the run's log names the offsets that were possibly not processed."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    stand.mode, stand.process = AT_MOST_ONCE, fail
    result = stand.run()
    assert not result.success
    assert f"possibly dropped, not repeated in at most once: {TOPIC}/0 [0, 10)" in "\n".join(stand.lines(result))
    assert _reported_dropped(stand, result) == [(n, 0, 10, "possibly dropped") for n in range(3)]
    assert stand.run().success
    assert len(stand.seen) == 1


def _reported_dropped(stand: Stand, result: dg.ExecuteInProcessResult) -> list[tuple[object, ...]]:
    """Return the ranges that a run reported as dropped, after checking that it reported them at most once."""
    events = stand.instance.all_logs(result.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    observed = [event.dagster_event.asset_observation_data.asset_observation for event in events if event.dagster_event]
    reported = [each.metadata for each in observed if "dropped" in each.metadata]
    assert len(reported) <= 1
    rows = [row.data for each in reported for row in cast("dg.TableMetadataValue", each["dropped"]).records]
    offsets = sum(cast("int", row["offsets"]) for row in rows)
    assert [each["dropped_offsets"].value for each in reported] == ([offsets] if reported else [])
    return [(row["partition"], row["start"], row["end"], row["state"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [InterruptError(), KeyboardInterrupt()], ids=repr)
def test_a_drop_is_reported_when_the_commit_is_interrupted(stand: Stand, interrupt: BaseException) -> None:
    """The interrupt comes after the commit: offsets have moved, nothing was processed, and the run reports that."""
    stand.mode = AT_MOST_ONCE
    log = FaultyLog(stand.scene.log())
    stand.log = log

    def raise_once() -> None:
        if log.types()[-1] == "Heartbeat" and stand.scene.key().offset == 10:
            log.after_append = lambda: None
            raise interrupt

    log.after_append = raise_once
    result = stand.run()
    assert not result.success
    assert stand.seen == []
    assert [stand.scene.key(n).offset for n in range(3)] == [10, 10, 10]
    assert _reported_dropped(stand, result) == [(n, 0, 10, "possibly dropped") for n in range(3)]
    assert f"possibly dropped, not repeated in at most once: {TOPIC}/0 [0, 10)" in "\n".join(stand.lines(result))


def test_a_drop_is_reported_when_the_frame_cannot_be_made(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commit, the read fails: nothing was processed, and the run reports that."""
    stand.mode = AT_MOST_ONCE
    monkeypatch.setattr(reader, "read_ranges", lambda *_, **__: 1 / 0)
    result = stand.run()
    assert "ZeroDivisionError" in _error(result)
    assert _reported_dropped(stand, result) == [(n, 0, 10, "dropped") for n in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "state", "lag"), [(Fault.LOST_ACK, "dropped", 0), (Fault.FAILED, "possibly dropped", 10)]
)
def test_a_drop_is_reported_when_the_run_goes_on(stand: Stand, fault: Fault, state: str, lag: int) -> None:
    """One partition's acknowledgement is lost: the run processes the others, succeeds, and reports both.

    The number of offsets counts what was processed. What is perhaps not committed is unread.
    """
    stand.mode = AT_MOST_ONCE
    stand.process = lambda *_: None
    log = FaultyLog(stand.scene.log())
    stand.log = log
    stand.on_session = lambda: log.fail(fault, of_type("Heartbeat", partition=2), times=1)
    result = stand.run(max_batches=1)
    assert result.success
    assert _reported_dropped(stand, result) == [(2, 0, 10, state)]
    assert {partition for partition, _ in stand.seen[0]} == {0, 1}
    (record,) = stand.materializations(result)
    states = [row.data["state"] for row in cast("dg.TableMetadataValue", record.metadata["ranges"]).records]
    assert states == ["committed", "committed", state]
    assert (record.metadata["offsets"].value, record.metadata["lag"].value) == (20, lag)
    done = result.output_for_node("after")
    assert (done.offsets, done.lag) == (20, lag)


@pytest.mark.slow
def test_nothing_is_reported_where_nothing_was_dropped(stand: Stand) -> None:
    """A successful at-most-once run reports no drops, nor does one whose session fails to start."""
    stand.mode = AT_MOST_ONCE
    stand.process = lambda *_: None
    stand.on_session = lambda: 1 / 0
    assert _reported_dropped(stand, stand.run()) == []
    stand.on_session = lambda: None
    assert _reported_dropped(stand, stand.run()) == []
    assert len(stand.seen) == 1


# Building and its errors


@pytest.mark.parametrize(
    ("settings", "reported"),
    [
        ({"topic": "no topic"}, "topic: 'no topic' is not a name that Kafka allows"),
        ({"max_records": 0}, "max_records is 0; it must be above 0"),
        ({"time_budget_s": -1}, "time_budget_s is -1; it must be above 0"),
        ({"start": "yesterday"}, "start: 'yesterday'; give earliest or latest or fail"),
        ({"spark_key": "spark", "spark_config": {}}, "spark_config does not apply to the session of resource 'spark'"),
    ],
)
def test_settings_that_no_batch_could_keep_to_are_refused(settings: dict[str, Any], reported: str) -> None:
    """The error is raised when the op is built; it names the setting and shows which values are accepted."""
    with pytest.raises(ConfigurationError, match=reported):
        build_claimed_batch_op(lambda *_: None, **{"name": "work", "topic": TOPIC, **settings})


def test_a_wrong_limit_in_run_config_is_refused_by_name(stand: Stand) -> None:
    """A wrong limit fails the step before anything is claimed."""
    result = stand.run(ClaimedBatchConfig.model_construct(max_records=0))
    assert "max_records" in _error(result)
    assert "greater than or equal to 1" in _error(result)
    assert stand.scene.values() == []


def test_jobs_are_of_one_op_and_tagged_with_its_topic() -> None:
    """The scheduled job and the reprocess job share the op; the latter processes one batch by default."""
    op = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC)
    scheduled, reprocess = build_claimed_batch_job(op, tags={"team": "flights"}), build_reprocess_job(op)
    assert [(job.name, job.tags["marshal/topic"]) for job in (scheduled, reprocess)] == [
        ("work_job", TOPIC),
        ("reprocess_work", TOPIC),
    ]
    assert scheduled.tags["team"] == "flights"
    assert reprocess.run_config is not None
    assert reprocess.run_config["ops"]["work"]["config"]["max_batches"] == 1
    assert build_claimed_batch_schedule(scheduled).cron_schedule == "* * * * *"


def test_a_batch_jobs_launchpad_opens_with_what_an_operator_may_change() -> None:
    """The limits of the op or the job, and two choices; resources have no part in it."""
    op = build_claimed_batch_op(lambda *_: None, name="work", topic=TOPIC, max_records=7)
    choices = {"on_idle": "skip", "retry_exhausted": False}
    opened = {
        build_claimed_batch_job(op): {"max_records": 7, **choices},
        build_claimed_batch_job(op, config=ClaimedBatchConfig(max_batches=3, partitions="1", on_idle="fail")): {
            "max_records": 7,
            "max_batches": 3,
            "partitions": "1",
            "on_idle": "fail",
            "retry_exhausted": False,
        },
        build_reprocess_job(op): {"max_records": 7, "max_batches": 1, **choices},
    }
    for job, config in opened.items():
        assert job.run_config == {"ops": {"work": {"config": config}}}
        bound = dg.Definitions(jobs=[job], resources={"claimer": dg.ResourceDefinition.none_resource()})
        assert dg.validate_run_config(bound.resolve_job_def(job.name), job.run_config)


def test_a_job_of_another_op_is_refused() -> None:
    """Only an op of the factory has a topic."""

    @dg.op
    def other() -> None: ...

    @dg.graph_asset
    def graph() -> object:
        return other()

    own = build_claimed_batch_op(lambda _context, _batch: None, name="own", topic=TOPIC, with_frame=False)
    wrong: list[Any] = [other, graph, dg.AssetsDefinition(specs=[dg.AssetSpec("spec")]), own.alias("second"), "text"]
    for build in (build_claimed_batch_job, build_reprocess_job, build_claim_checks):
        for definition in wrong:
            with pytest.raises(ConfigurationError, match="has no topic: build it with"):
                build(definition)
        with pytest.raises(ConfigurationError, match="'fewer' was made by `configured`"):
            build(own.configured({"max_batches": 1}, name="fewer"))


@pytest.mark.slow
def test_what_the_sensor_saw_is_in_the_metadata(stand: Stand) -> None:
    """The metadata of a reprocessing run show the state that its request expected, next to what it did."""
    seen = ExpectedKeyState(partition=2, generation=0, offset=4, epoch=17, instance="dead.1")
    result = stand.run(ClaimedBatchConfig(partitions="2", seen=[seen]))
    (output,) = [event for event in result.all_events if event.event_type == dg.DagsterEventType.STEP_OUTPUT][:1]
    (row,) = cast("dg.TableMetadataValue", output.step_output_data.metadata["seen"]).records
    assert (row.data["partition"], row.data["epoch"], row.data["instance"]) == (2, 17, "dead.1")


def test_a_resource_of_another_kind_is_an_error_that_names_it(stand: Stand) -> None:
    """A claimer key of another resource is an error at once."""
    result = stand.run(claimer_key="spark")
    assert "resource 'spark' is of type Session; it must be ClaimerResource" in _error(result)


@pytest.mark.slow
def test_what_a_reader_of_the_output_should_know_is_recorded(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink's note about a batch is part of the metadata; a sink without a note adds nothing."""
    assert "output" not in stand.materializations(stand.run(max_records=12, max_batches=1))[0].metadata
    write = MemorySink.write
    monkeypatch.setattr(MemorySink, "write", lambda *given: replace(write(*given), note="read what is committed"))
    (record,) = stand.materializations(stand.run(max_records=12, max_batches=1))
    assert record.metadata["output"].value == "read what is committed"


@pytest.mark.slow
def test_a_sink_may_be_made_for_each_run(stand: Stand) -> None:
    """A function of the context may return the sink, so that the sink can use the run's resources."""
    made: list[MemorySink] = []

    def make(context: dg.OpExecutionContext) -> MemorySink:
        assert context.run_id
        made.append(stand.scene.sink)
        return made[-1]

    assert stand.run(sink=make).success
    assert len(made) == 1
    assert len(stand.scene.sink.rows) == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (ZeroDivisionError("of the data"), [2, 2, 2]),
        (DecodeError(1, []), [2, 2, 2]),
        (UnavailableError("the database is away"), [2, 1, 1]),
        (ConfigurationError("a setting is wrong"), [2, 1, 1]),
        (dg.RetryRequested(max_retries=0), [2, 1, 1]),
    ],
)
def test_an_outage_or_a_mistake_ends_the_run_before_other_parts_lose_an_attempt(
    stand: Stand, error: Exception, tried: list[int]
) -> None:
    """A run continues only after errors that may come from the records; if the sink is down, every part would fail."""
    stand.mode = AT_LEAST_ONCE

    def fail(*_: object) -> None:
        raise error

    stand.process = _fail
    for _ in range(2):
        stand.run()
    stand.process = fail
    stand.run(max_claims=1)
    assert _attempts(stand, 3) == tried


@pytest.mark.slow
def test_parts_count_as_one_batch_and_keep_to_the_time_budget(stand: Stand) -> None:
    """Together, the parts of a batch count as one batch; no part starts after the time budget."""
    good = stand.process
    stand.process = _fail
    for _ in range(2):
        stand.run()
    stand.process = good
    stand.scene.data.append(0, 5)
    assert stand.run(max_batches=1).success
    assert _offsets(stand, 3) == [10, 10, 10]
    assert stand.run().success
    assert _offsets(stand, 3) == [15, 10, 10]


@pytest.mark.thorough
def test_a_partition_that_the_sink_refuses_keeps_no_other_from_being_done(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink may refuse ranges before they are read and planned.

    That counts as an attempt, so the parts are tried.
    """
    stand.mode = EFFECTIVELY_ONCE
    stand.scene.data.make(partitions=4, messages=10)
    verdicts = stand.scene.sink.verdicts

    def refuse(ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        if any(range_.partition == 2 for range_ in ranges):
            raise SinkRejectedError("the output has offsets past the end of the log")
        return verdicts(ranges)

    monkeypatch.setattr(stand.scene.sink, "verdicts", refuse)
    for _ in range(6):
        assert "the output has offsets past the end of the log" in _error(stand.run())
    assert _offsets(stand) == [10, 10, 0, 10]
    assert f"{TOPIC}/2 [0, 10) of group '{GROUP}' was tried 6 times" in _error(stand.run())


@pytest.mark.slow
def test_parts_that_are_not_tried_count_as_no_batch(stand: Stand) -> None:
    """In a paused group, a run for one batch ends as paused, not as if it had processed a batch."""
    stand.process = _fail
    for _ in range(2):
        stand.run()
    stand.scene.pause(60)
    result = stand.run(max_batches=1)
    assert stand.tags(result)["marshal/outcome"] == "paused"
    (reported,) = stand.recorded_observations(result)
    assert "is paused" in str(reported.metadata["reason"].value)
