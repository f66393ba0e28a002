"""Dagster's code location of the benchmark `queued_runs`: a sensor that queues runs, each of which has one batch.

The environment names the broker, the group, and the folder through which the benchmark and the runs exchange files.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.queued_runs import FOLDER, GROUP, SERVERS, SETTINGS, TOPIC, Report, Wanted
from marshal_dagster import BatchRequest, ClaimerResource, KafkaConnectionConfig
from marshal_dagster.coordination.appender import AppendResult
from marshal_dagster.coordination.base_claimer import is_accepted
from marshal_dagster.protocol.messages import ClaimingPartition


@dataclass(slots=True)
class TriesObserver:
    """Counts the appends of claims, and passes all events on."""

    report: Report
    observer: Any

    def sent(self, claimer: Any, sent: AppendResult) -> None:  # noqa: ANN401 - as `Observer`
        """Count an append of claims."""
        results = [is_accepted(outcome) for message, outcome in sent if isinstance(message, ClaimingPartition)]
        if results:
            self.report.tries.append((len(results), sum(results)))
        self.observer.sent(claimer, sent)

    def lost(self, claimer: Any, claim: Any, why: str) -> None:  # noqa: ANN401 - as `Observer`
        """Pass the loss on."""
        self.observer.lost(claimer, claim, why)

    def left(self, batch: Any) -> None:  # noqa: ANN401 - as `BatchObserver`
        """Pass the end of the batch on."""
        self.observer.left(batch)


@dg.op
def claimed_batch(context: dg.OpExecutionContext, claimer: ClaimerResource) -> None:
    """Claim partitions, hold them for a while, commit, and write a report."""
    folder = Path(os.environ[FOLDER])
    wanted = Wanted(**json.loads(context.run.tags["wanted"]))
    report = Report(context.run_id, wanted.number)
    session = claimer.open_delivery(context)
    session.observer = TriesObserver(report, session.observer)
    with session.claimed_batch(BatchRequest(topic=TOPIC, max_claims=wanted.partitions)) as batch:
        if batch.idle is None:
            batch.begin_processing()
            time.sleep(wanted.hold_s)
        report.partitions, report.waiting_s = len(batch.ranges), batch.phases.waiting_s
    unfinished = folder / f"{context.run_id}.unfinished"
    unfinished.write_text(json.dumps(asdict(report)), encoding="utf-8")
    unfinished.rename(folder / f"{context.run_id}.json")


@dg.job(executor_def=dg.in_process_executor)
def batch_job() -> None:
    """Run one batch."""
    claimed_batch()


@dg.sensor(job=batch_job, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def queue_runs(context: dg.SensorEvaluationContext) -> Iterator[dg.RunRequest | dg.SkipReason]:
    """Request the runs of the next round once."""
    file = Path(os.environ[FOLDER]) / "wanted"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if not text or text == context.cursor:
        yield dg.SkipReason("no round is wanted")
        return
    context.update_cursor(text)
    wanted = Wanted(**json.loads(text))
    for run in range(wanted.runs):
        yield dg.RunRequest(run_key=f"{wanted.number}-{run}", tags={"wanted": text})


claimer = ClaimerResource(
    connection=KafkaConnectionConfig(bootstrap_servers=os.environ.get(SERVERS, "127.0.0.1:1")),
    group=GROUP,
    heartbeat_interval_s=SETTINGS.heartbeat_interval_ms / 1_000,
)
defs = dg.Definitions(jobs=[batch_job], sensors=[queue_runs], resources={"claimer": claimer})
