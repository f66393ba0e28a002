"""A code location for tests of executors and restarts: a claimed-batch op without Spark, followed by another op.

Environment variables set topic, group and batch size. Tags of a run set where it halts until the test releases it, or
how its first attempt fails. Run workers are real processes, started as Dagster's code server starts them, but forked
from a process that has already imported everything.
"""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast
from unittest.mock import MagicMock

import dagster as dg
import pyspark
from dagster._core.instance.ref import InstanceRef
from dagster._core.launcher import LaunchRunContext, RunLauncher
from dagster._grpc.impl import start_run_in_subprocess
from dagster._grpc.types import ExecuteExternalJobArgs
from dagster._serdes import ConfigurableClass, ConfigurableClassData, serialize_value
from dagster._utils.hosted_user_process import recon_job_from_origin

from marshal_dagster.batches import BatchSession, ClaimedBatch, RangeOptions
from marshal_dagster.jobs.batch import build_claimed_batch_schedule
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.ops.metadata import BatchesResult
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.runs.names import TOPIC_TAG
from marshal_dagster.sensors.run_failure import build_run_failure_sensors
from tests.conditions import WITHIN_S
from tests.real.forked_runs import FORKED
from tests.real.kill_points import die, read_messages
from tests.sink_outputs import FakeFileSink, FakeFrame, hook

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HALT: Final = "test/halt"
"""A tag: the phase in which the run halts, once."""
FAIL: Final = "test/fail"
"""A tag: `raise` or `kill` fails the second batch of the first attempt, `after` fails the op after the batches."""
GOT: Final = "test/got"
"""A tag that the run sets: the offsets that the op after the batches received."""
TAKES: Final = "test/takes_s"
"""A tag: the duration of a batch, in seconds."""
POOL: Final = "kafka"
_FORKSERVER: Final = {"start_method": {"forkserver": {"preload_modules": [__name__]}}}


# The code location


def _folder() -> Path:
    return Path(os.environ["TEST_FOLDER"])


def halted(run_id: str) -> Path:
    """Return the file that shows that a run has halted."""
    return _folder() / f"halted-{run_id}"


def going_on() -> Path:
    """Return the file that releases all halted runs."""
    return _folder() / "go"


def _reach(run: dg.DagsterRun, phase: str) -> None:
    mark = halted(run.run_id)
    if run.tags.get(HALT) != phase or mark.exists():
        return
    mark.touch()
    while not going_on().exists():
        time.sleep(0.02)


class HaltingClaimer(ClaimerResource):
    """A claimer whose run may halt before a step that is tried again claims."""

    def open_delivery(self, context: Any) -> BatchSession:  # noqa: ANN401 - the context of an op or an asset
        """Open a session, after the halt."""
        if context.retry_number:
            _reach(context.run, "retrying")
        return super().open_delivery(context)


def _sink(context: dg.OpExecutionContext) -> FakeFileSink:
    sink = FakeFileSink(_folder() / "out")
    hook(sink, lambda step: _reach(context.run, "writing") if step == "rows written" else None)
    return sink


def _work(context: dg.OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> "DataFrame":  # noqa: ARG001 - the op's signature
    _reach(context.run, "processing")
    _fail_if_requested(context, batch)
    connection = KafkaConnection(bootstrap_servers=os.environ["TEST_SERVERS"])
    rows = [(*place, context.run_id) for place in read_messages(connection, batch.ranges)]
    time.sleep(float(context.run.tags.get(TAKES, 0)))
    return cast("DataFrame", FakeFrame(["partition", "offset", "value"], tuple(rows)))


def _fail_if_requested(context: dg.OpExecutionContext, batch: ClaimedBatch) -> None:
    if context.retry_number or context.run.parent_run_id or not all(range_.start for range_ in batch.ranges):
        return
    if context.run.tags.get(FAIL) == "raise":
        raise ZeroDivisionError
    if context.run.tags.get(FAIL) == "kill":
        die()


@dg.op
def after(context: dg.OpExecutionContext, done: BatchesResult) -> None:
    """Store the offsets that the claimed-batch op reported."""
    if context.run.tags.get(FAIL) == "after" and context.run.parent_run_id is None:
        raise ZeroDivisionError
    context.instance.add_run_tags(context.run_id, {GOT: str(done.offsets)})


def _job(name: str, executor: dg.ExecutorDefinition, **settings: Any) -> dg.JobDefinition:  # noqa: ANN401 - the op's parameters
    topic = os.environ["TEST_TOPIC"]
    work = build_claimed_batch_op(_work, name=f"{name}_work", topic=topic, sink=_sink, spark_key="spark", **settings)

    @dg.job(name=name, executor_def=executor, tags={TOPIC_TAG: topic})
    def both() -> None:
        after(work())

    return both


@dg.definitions
def defs() -> dg.Definitions:
    """Return what is deployed, in each of two code locations."""
    retries = dg.RetryPolicy(max_retries=2)
    few: dict[str, Any] = {"max_records": int(os.environ["TEST_MAX_RECORDS"])}
    size = int(os.environ["TEST_RANGE_SIZE"])
    if size:
        few["ranges"] = RangeOptions(size=size)
    plain = _job("plain", dg.in_process_executor, **few)
    servers, group = os.environ["TEST_SERVERS"], os.environ["TEST_GROUP"]
    claimer = HaltingClaimer(
        connection=KafkaConnectionConfig(bootstrap_servers=servers),
        coordination_topic=os.environ["TEST_COORDINATION_TOPIC"],
        group=group,
        heartbeat_interval_s=float(os.environ["TEST_HEARTBEAT_INTERVAL_S"]),
        delivery="effectively_once",
        claim_ranges=bool(size),
    )
    return dg.Definitions(
        jobs=[
            plain,
            _job("retrying", dg.in_process_executor, retry_policy=retries, **few),
            _job("forkserver", dg.multiprocess_executor.configured(_FORKSERVER), retry_policy=retries, **few),
            _job("pooled", dg.in_process_executor, pool=POOL, **few),
            _job("one_each", dg.in_process_executor, max_claims=1, max_batches=1, **few),
        ],
        schedules=[build_claimed_batch_schedule(plain, name="each_minute")],
        sensors=build_run_failure_sensors(group=group, monitor_all_code_locations=True, minimum_interval_s=1),
        resources={"claimer": claimer, "spark": dg.ResourceDefinition.hardcoded_resource(_Session())},
    )


class _Session:
    spark_session = MagicMock(version=pyspark.__version__)


# Run workers


def run_worker(environment: Mapping[str, str], reported: Any, arguments: tuple[Any, ...]) -> None:  # noqa: ANN401 - a queue
    """Run one Dagster run in this process."""
    os.environ.update(environment)
    serialized, job_code_origin, termination = arguments
    start_run_in_subprocess(serialized, recon_job_from_origin(job_code_origin), reported, termination)  # type: ignore[no-untyped-call] # Dagster's


@dataclass(slots=True)
class Worker:
    """The process of a run, and the event that requests its termination."""

    process: ForkServerProcess
    termination: Any

    @property
    def is_at_work(self) -> bool:
        """Whether the process still runs."""
        return self.process.exitcode is None


@dataclass(slots=True)
class _StartUpEvents:
    """A collector of the start-up events of a run worker. No test reads them."""

    events: list[Any] = field(default_factory=list)

    def put(self, event: Any) -> None:  # noqa: ANN401 - Dagster's
        self.events.append(event)


class RunWorkers(RunLauncher[Any], ConfigurableClass):
    """A launcher that starts, terminates and watches run workers as Dagster's code server does."""

    def __init__(self, inst_data: ConfigurableClassData | None = None) -> None:
        self._inst_data = inst_data
        self.workers: dict[str, Worker] = {}
        super().__init__()  # type: ignore[no-untyped-call] # Dagster's

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        """The configuration of the instance."""
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        """Return an empty schema: there is nothing to configure."""
        return {}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Self:
        """Create the launcher."""
        return cls(inst_data=inst_data, **config_value)

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start the process of a run."""
        run, ref = context.dagster_run, self._instance.get_ref()
        assert isinstance(ref, InstanceRef)
        assert run.remote_job_origin is not None
        arguments = ExecuteExternalJobArgs(job_origin=run.remote_job_origin, run_id=run.run_id, instance_ref=ref)
        termination = FORKED.Event()
        environment = {name: value for name, value in os.environ.items() if name.startswith("TEST_")}
        process = FORKED.Process(
            target=run_worker,
            args=(environment, _StartUpEvents(), (serialize_value(arguments), context.job_code_origin, termination)),
        )
        process.start()
        self.workers[run.run_id] = Worker(process, termination)

    def terminate(self, run_id: str) -> bool:
        """Request a run's termination, as the button in the UI does."""
        run = self._instance.get_run_by_id(run_id)
        assert run is not None
        self._instance.report_run_canceling(run)
        self.workers[run_id].termination.set()
        return True

    def kill(self, run_id: str) -> None:
        """Kill the process of a run."""
        pid = self.workers[run_id].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def look(self) -> None:
        """Report each run as failed whose process ended without a final status."""
        for run_id, worker in self.workers.items():
            run = self._instance.get_run_by_id(run_id)
            if not worker.is_at_work and run is not None and not run.is_finished:
                self._instance.report_run_failed(run, f"the process of the run ended: {worker.process.exitcode}")

    def dispose(self) -> None:
        """Kill the remaining processes."""
        for worker in self.workers.values():
            worker.process.kill()
            worker.process.join(WITHIN_S)
            worker.process.close()
        self.workers.clear()
