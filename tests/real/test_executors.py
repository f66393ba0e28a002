"""Executors, retries, re-execution, cancellation, queues and schedules, on a real Kafka and a real Dagster instance."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
from dagster._core.execution.plan.resume_retry import ReexecutionStrategy
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.remote_representation.external import RemoteJob
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster._daemon.auto_run_reexecution.event_log_consumer import EventLogConsumerDaemon
from dagster._daemon.run_coordinator.queued_run_coordinator_daemon import QueuedRunCoordinatorDaemon
from dagster._daemon.sensor import execute_sensor_iteration
from dagster._scheduler.scheduler import launch_scheduled_runs

from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.state import Key
from marshal_dagster.runs.names import sensor_name
from tests.conditions import wait_until
from tests.real.conftest import MakeTopic
from tests.real.executor_location import GOT, HALT, POOL, RunWorkers, going_on, halted
from tests.real.forked_runs import ROOT, fork_server
from tests.real.log_time import let_claims_become_stale
from tests.sink_outputs import FileOutput

PARTITIONS, MESSAGES = 4, 40
HEARTBEAT_INTERVAL_S = 30
"""So long that no lease ends, even if processes are stopped for a while. Log time passes when a test lets it."""
FAILURE, SUCCESS, CANCELED = dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.CANCELED
LOCATIONS = ("one", "two")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Property `ScheduleDefinition.environment_vars`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning"),
]
"""Warnings of Dagster itself when it loads a schedule, and when its daemon starts to follow runs."""


@dataclass(slots=True)
class Site:
    """A group on a topic, and a deployment with a queue and two code locations."""

    connection: KafkaConnection
    coordination_topic: str
    topic: str
    group: str
    folder: Path
    partitions: int
    instance: dg.DagsterInstance
    workspace: WorkspaceProcessContext
    _reader: Rationalizer | None = None
    _daemons: dict[type[Any], Any] = field(default_factory=dict)

    @property
    def workers(self) -> RunWorkers:
        """The processes of the runs."""
        return cast("RunWorkers", self.instance.run_launcher)

    def job(self, name: str, location: str = "one") -> RemoteJob:
        """Return a job as the daemon sees it."""
        (repository,) = self.workspace.create_request_context().get_code_location(location).get_repositories().values()
        return repository.get_full_job(name)

    def start(self, name: str, location: str = "one", *, run_config: Any = None, **tags: str) -> str:  # noqa: ANN401 - Dagster's type
        """Start a run without the queue and return its id."""
        run = self.create(name, location, run_config=run_config, **tags)
        self.instance.launch_run(run.run_id, self.workspace.create_request_context())
        return run.run_id

    def create(self, name: str, location: str = "one", *, run_config: Any = None, **tags: str) -> dg.DagsterRun:  # noqa: ANN401 - Dagster's type
        """Create a run."""
        from tests.real.executor_location import defs

        job = self.job(name, location)
        return self.instance.create_run_for_job(
            job_def=defs().resolve_job_def(name),
            run_config=run_config,
            tags={tag if "/" in tag else f"test/{tag}": value for tag, value in tags.items()},
            remote_job_origin=job.get_remote_origin(),
            job_code_origin=job.get_python_origin(),
        )

    def run(self, run_id: str) -> dg.DagsterRun:
        """Return the current state of a run."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def wait(self, *run_ids: str) -> list[dg.DagsterRun]:
        """Wait until runs are over and their processes have ended."""

        def is_over(run_id: str) -> bool:
            worker = self.workers.workers.get(run_id)
            if worker is not None and worker.is_at_work:
                return False
            self.workers.look()
            return self.run(run_id).is_finished

        for run_id in run_ids:
            wait_until(lambda run_id=run_id: is_over(run_id), f"run {run_id} is over")  # type: ignore[misc]
        return [self.run(run_id) for run_id in run_ids]

    def work(self, name: str, location: str = "one", **tags: str) -> dg.DagsterRun:
        """Start a run and wait until it is over."""
        (run,) = self.wait(self.start(name, location, **tags))
        return run

    def wait_until_halted(self, run_id: str) -> None:
        """Wait until a run has halted."""
        worker = self.workers.workers[run_id]
        wait_until(lambda: halted(run_id).exists() or not worker.is_at_work, "the run has halted")
        assert worker.is_at_work, self.said(run_id)

    def said(self, run_id: str) -> str:
        """Return all log messages of a run."""
        return "\n".join(entry.message or entry.user_message for entry in self.instance.all_logs(run_id))

    def error(self, run_id: str) -> str:
        """Return the error of the failed step of a run."""
        (entry,) = self.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        assert entry.dagster_event is not None
        error = entry.dagster_event.step_failure_data.error
        assert error is not None
        return error.to_string()

    def steps(self, run_id: str, kind: dg.DagsterEventType) -> list[str | None]:
        """Return the steps for which a run has an event."""
        return [entry.step_key for entry in self.instance.all_logs(run_id, of_type=kind)]

    def iterate(self, daemon: type[Any], **settings: Any) -> None:  # noqa: ANN401 - the daemon's
        """Run one iteration of one of Dagster's daemons."""
        made = self._daemons.setdefault(daemon, daemon(**settings))
        list(made.run_iteration(self.workspace))

    def tick(self, sensor: str, location: str) -> None:
        """Switch a sensor on, and have the daemon evaluate all sensors that are on."""
        (repository,) = self.workspace.create_request_context().get_code_location(location).get_repositories().values()
        self.instance.start_sensor(repository.get_sensor(sensor))
        list(execute_sensor_iteration(self.workspace, logging.getLogger("sensors"), None, None))

    def states(self) -> list[Key]:
        """Read the state of the topic's keys."""
        if self._reader is None:
            self._reader = Rationalizer(KafkaLog(self.connection, self.coordination_topic))
        world = self._reader.catch_up()
        return [world.key(self.group, self.topic, number) for number in range(self.partitions)]

    def owners(self) -> set[str]:
        """Return the runs that hold a partition or a range."""
        owners = [owner for key in self.states() for owner in (key.owner, *(range_.owner for range_ in key.ranges))]
        return {owner.instance.rpartition(".")[0] for owner in owners if owner is not None}

    def plan_ends(self) -> set[int | None]:
        """Return the ends of all plans, of partitions and of ranges."""
        keys = self.states()
        return {key.plan_end for key in keys if not key.ranges} | {range_.end for key in keys for range_ in key.ranges}

    def check_all_done(self, messages: int = MESSAGES) -> None:
        """Check that each message is in the output once, that all is committed, and that nothing is held or planned."""
        rows = Counter((partition, offset) for partition, offset, _ in FileOutput(self.folder / "out").rows())
        each = messages // self.partitions
        assert rows == Counter({(number, offset): 1 for number in range(self.partitions) for offset in range(each)})
        assert [(key.owner, key.offset, key.plan_end, key.ranges) for key in self.states()] == [
            (None, each, None, ())
        ] * self.partitions

    def close(self) -> None:
        """Kill the remaining processes and close the log."""
        self.workers.dispose()
        if self._reader is not None:
            self._reader.close()


MakeSite = Callable[..., Site]


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """The process from which run workers are forked."""
    with fork_server(RunWorkers.__module__):
        yield


@pytest.fixture
def make_site(
    connection: KafkaConnection,
    topic: MakeTopic,
    fill: Callable[[str, int, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeSite]:
    """A function that creates the test's only site."""
    stack = ExitStack()

    def make(
        *,
        partitions: int = PARTITIONS,
        messages: int = MESSAGES,
        heartbeat_interval_s: int = HEARTBEAT_INTERVAL_S,
        concurrent: int = 4,
        range_size: int = 0,
    ) -> Site:
        coordination_topic = topic(4, {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"})
        name, group = topic(partitions), new_instance_id("group")
        fill(name, partitions, messages)
        environment = {
            "SERVERS": connection.bootstrap_servers,
            "COORDINATION_TOPIC": coordination_topic,
            "TOPIC": name,
            "GROUP": group,
            "HEARTBEAT_INTERVAL_S": str(heartbeat_interval_s),
            "MAX_RECORDS": str(messages // 2),
            "RANGE_SIZE": str(range_size),
            "FOLDER": str(tmp_path),
        }
        for each, value in environment.items():
            monkeypatch.setenv(f"TEST_{each}", value)
        home = tmp_path / "dagster"
        home.mkdir()
        instance = stack.enter_context(dg.DagsterInstance.local_temp(str(home), overrides=_configured(concurrent)))
        target = InProcessWorkspaceLoadTarget([_origin(location) for location in LOCATIONS])
        workspace = stack.enter_context(create_test_daemon_workspace_context(target, instance))
        site = Site(connection, coordination_topic, name, group, tmp_path, partitions, instance, workspace)
        stack.callback(site.close)
        return site

    with stack:
        yield make


def _configured(concurrent: int) -> dict[str, Any]:
    launcher = {"module": RunWorkers.__module__, "class": RunWorkers.__name__}
    return {
        "run_launcher": launcher,
        "run_coordinator": {"module": "dagster", "class": "QueuedRunCoordinator"},
        "concurrency": {"runs": {"max_concurrent_runs": concurrent}},
        "run_retries": {"enabled": True, "max_retries": 0},
        "telemetry": {"enabled": False},
    }


def _origin(location: str) -> InProcessCodeLocationOrigin:
    target = LoadableTargetOrigin(module_name=RunWorkers.__module__, attribute="defs", working_directory=str(ROOT))
    return InProcessCodeLocationOrigin(target, location_name=location)


# Steps


def test_a_step_that_fails_is_tried_again_in_its_run(make_site: MakeSite) -> None:
    """The step fails in its second batch. The retry takes that batch over at once, and reports both batches."""
    site = make_site()
    run = site.work("retrying", fail="raise")
    assert run.status is SUCCESS, site.said(run.run_id)
    assert len(site.steps(run.run_id, dg.DagsterEventType.STEP_RESTARTED)) == 1
    assert run.tags[GOT] == str(MESSAGES)
    site.check_all_done()


def test_a_step_whose_process_is_killed_is_tried_again_in_its_run(make_site: MakeSite) -> None:
    """The retry gets the killed process's claims once they are stale. No process can know before that they are dead."""
    site = make_site()
    run_id = site.start("forkserver", fail="kill", halt="retrying")
    site.wait_until_halted(run_id)
    let_claims_become_stale(site.connection, site.coordination_topic, HEARTBEAT_INTERVAL_S * 1_000)
    going_on().touch()
    (run,) = site.wait(run_id)
    assert run.status is SUCCESS, site.said(run.run_id)
    assert len(site.steps(run.run_id, dg.DagsterEventType.STEP_RESTARTED)) == 1
    assert run.tags[GOT] == str(MESSAGES)
    site.check_all_done()


# Runs


def _re_execute(site: Site, parent: dg.DagsterRun) -> dg.DagsterRun:
    """Re-execute a run from its failure, as the button in the UI does."""
    context = site.workspace.create_request_context()
    run = site.instance.create_reexecuted_run(
        request_context=context,
        parent_run=parent,
        code_location=context.get_code_location("one"),
        remote_job=site.job(parent.job_name),
        strategy=ReexecutionStrategy.FROM_FAILURE,
        use_parent_run_tags=True,
    )
    site.instance.launch_run(run.run_id, context)
    (run,) = site.wait(run.run_id)
    return run


def test_a_run_re_executed_from_failure_goes_on_where_its_parent_failed(make_site: MakeSite) -> None:
    """The failed step's plan is taken over at once. The next op also gets the batches of the parent's step."""
    site = make_site(range_size=5)
    parent = site.work("plain", fail="raise")
    assert parent.status is FAILURE
    assert (site.owners(), site.plan_ends()) == (set(), {10})
    run = _re_execute(site, parent)
    assert run.status is SUCCESS, site.said(run.run_id)
    assert "(an open plan)" in site.said(run.run_id)
    assert run.tags[GOT] == str(MESSAGES)
    site.check_all_done()


def test_a_run_re_executed_behind_its_batches_claims_nothing(make_site: MakeSite) -> None:
    """The claimed-batch step succeeded, so only the failed op after it is repeated, with the same report."""
    site = make_site()
    parent = site.work("plain", fail="after")
    assert parent.status is FAILURE
    run = _re_execute(site, parent)
    assert run.status is SUCCESS, site.said(run.run_id)
    assert site.steps(run.run_id, dg.DagsterEventType.STEP_START) == ["after"]
    assert run.tags[GOT] == str(MESSAGES)
    site.check_all_done()


def test_a_killed_run_is_tried_again_by_dagsters_run_retries(make_site: MakeSite) -> None:
    """Once Dagster knows that the run is dead, the retry revokes its claims and continues without waiting."""
    site = make_site()
    site.iterate(EventLogConsumerDaemon)
    (failed,) = site.wait(site.start("plain", fail="kill", **{"dagster/max_retries": "1"}))
    assert failed.status is FAILURE
    assert site.owners() == {failed.run_id}
    site.iterate(EventLogConsumerDaemon)
    site.iterate(QueuedRunCoordinatorDaemon, interval_seconds=1)
    retry = site.instance.get_runs(limit=1)[0]
    assert retry.parent_run_id == failed.run_id
    (retry,) = site.wait(retry.run_id)
    assert retry.status is SUCCESS, site.said(retry.run_id)
    assert retry.tags[GOT] == str(MESSAGES)
    site.check_all_done()


# Cancellation


@pytest.mark.parametrize(("job", "phase"), [("plain", "writing"), ("retrying", "processing")])
def test_a_canceled_run_lets_go_at_once(make_site: MakeSite, job: str, phase: str) -> None:
    """A terminated run ends as canceled and holds nothing. The next run does the rest.

    `tests/fast/test_batches_ranges_attacks.py` interrupts a batch at any line.
    """
    site = make_site()
    run_id = site.start(job, halt=phase)
    site.wait_until_halted(run_id)
    site.workers.terminate(run_id)
    wait_until(lambda: not site.owners(), "no claim is left")
    (canceled,) = site.wait(run_id)
    assert canceled.status is CANCELED, site.said(run_id)
    assert site.steps(run_id, dg.DagsterEventType.STEP_UP_FOR_RETRY) == []
    run = site.work("plain")
    assert run.status is SUCCESS, site.said(run.run_id)
    site.check_all_done()


def test_a_run_that_is_canceled_by_force_commits_nothing_more(make_site: MakeSite) -> None:
    """Forced cancellation sends no signal. Heartbeats end, later records are rejected, and nothing is retried."""
    site = make_site(heartbeat_interval_s=20)  # the heartbeats look every 5 s whether the run is over
    run_id = site.start("retrying", halt="processing")
    site.wait_until_halted(run_id)
    site.instance.report_run_canceled(site.run(run_id))
    wait_until(lambda: "the heartbeats have ended" in site.said(run_id), "its heartbeats end")
    going_on().touch()
    (run,) = site.wait(run_id)
    assert f"Dagster reports that run {run_id} is canceled: BatchAbortedError" in site.error(run_id)
    assert site.steps(run_id, dg.DagsterEventType.STEP_RESTARTED) == []
    assert run.status is not SUCCESS
    assert {(key.owner, key.offset) for key in site.states()} == {(None, 0)}
    assert not FileOutput(site.folder / "out").rows()


# Several runs


def test_a_run_that_waits_for_its_pool_has_claimed_nothing(make_site: MakeSite) -> None:
    """The pool has one slot.

    The second run's step does not start while the first works, although partitions are free.
    """
    site = make_site()
    site.instance.event_log_storage.set_concurrency_slots(POOL, 1)
    only_one = {"ops": {"pooled_work": {"config": {"partitions": "0"}}}}
    first = site.start("pooled", run_config=only_one, halt="processing")
    site.wait_until_halted(first)
    second = site.start("pooled")

    def waits() -> bool:
        pending = site.instance.event_log_storage.get_concurrency_info(POOL).pending_steps
        return any(step.run_id == second for step in pending)

    wait_until(waits, "the second run waits for the pool")
    assert site.owners() == {first}
    assert [key.owner is not None for key in site.states()] == [True, False, False, False]
    going_on().touch()
    assert [run.status for run in site.wait(first, second)] == [SUCCESS, SUCCESS]
    site.check_all_done()


def test_two_code_locations_share_a_group(make_site: MakeSite) -> None:
    """Each location processes what the other does not hold.

    The sensor of one frees the claims of a dead run of the other.
    """
    site = make_site()
    site.tick(sensor_name(site.group, "failed_runs"), "two")
    some = {"ops": {"plain_work": {"config": {"partitions": "0-1"}}}}
    ours = site.start("plain", "one", run_config=some, halt="processing")
    site.wait_until_halted(ours)
    theirs = site.work("plain", "two")
    assert (theirs.status, theirs.tags[GOT]) == (SUCCESS, str(MESSAGES // 2))
    site.workers.kill(ours)
    site.wait(ours)
    assert site.owners() == {ours}
    site.tick(sensor_name(site.group, "failed_runs"), "two")
    assert site.owners() == set()
    assert site.work("plain", "two").status is SUCCESS
    site.check_all_done()


def test_a_schedule_that_overlaps_its_own_last_run_says_so(make_site: MakeSite) -> None:
    """The second run finds all partitions held, reports by which run, skips the dependent op and succeeds."""
    site = make_site()
    (repository,) = site.workspace.create_request_context().get_code_location("one").get_repositories().values()
    site.instance.start_schedule(repository.get_schedule("each_minute"))
    now = datetime.now(UTC)
    first = _scheduled(site, now + timedelta(minutes=1))
    site.instance.add_run_tags(first.run_id, {HALT: "processing"})
    site.iterate(QueuedRunCoordinatorDaemon, interval_seconds=1)
    site.wait_until_halted(first.run_id)
    second = _scheduled(site, now + timedelta(minutes=2))
    site.iterate(QueuedRunCoordinatorDaemon, interval_seconds=1)
    (second,) = site.wait(second.run_id)
    assert second.run_id != first.run_id
    assert (second.status, second.tags["marshal/outcome"]) == (SUCCESS, "held")
    assert site.steps(second.run_id, dg.DagsterEventType.STEP_SKIPPED) == ["after"]
    (entry,) = site.instance.all_logs(second.run_id, of_type=dg.DagsterEventType.ASSET_OBSERVATION)
    assert entry.asset_observation is not None
    assert f"all are held by {first.run_id}" in str(entry.asset_observation.metadata["reason"].value)
    going_on().touch()
    assert [run.status for run in site.wait(first.run_id)] == [SUCCESS]
    site.check_all_done()


def _scheduled(site: Site, at: datetime) -> dg.DagsterRun:
    """Run the scheduler's daemon at this time, and return the run that it queued."""
    list(launch_scheduled_runs(site.workspace, logging.getLogger("scheduler"), at, {}))
    run = site.instance.get_runs(limit=1)[0]
    assert run.status is dg.DagsterRunStatus.QUEUED
    return run


def test_twelve_queued_runs_share_eight_partitions(make_site: MakeSite) -> None:
    """Each run succeeds, whether or not messages are left for it. Together they process every message once."""
    at_once = 6
    site = make_site(partitions=8, messages=160, concurrent=at_once)
    queued = [site.create("one_each", takes_s="0.3") for _ in range(12)]
    context = site.workspace.create_request_context()
    for run in queued:
        site.instance.submit_run(run.run_id, context)

    def are_begun() -> bool:
        workers = site.workers.workers.values()
        if sum(worker.is_at_work for worker in workers) < at_once:
            site.iterate(QueuedRunCoordinatorDaemon, interval_seconds=1)
        return len(workers) == len(queued)

    wait_until(are_begun, "all runs are started")
    runs = site.wait(*(run.run_id for run in queued))
    assert {run.status for run in runs} == {SUCCESS}
    outcomes = Counter(run.tags["marshal/outcome"] for run in runs)
    assert outcomes.keys() <= {"done", "held", "drained"}
    assert outcomes["done"] >= 8
    assert sum(int(run.tags.get(GOT, 0)) for run in runs) == 160
    site.check_all_done(160)
