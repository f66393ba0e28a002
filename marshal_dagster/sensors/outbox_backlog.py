"""The sensor that requests runs of the drain job if rows wait in an outbox.

It is an alternative to a harvester that runs as a service.
"""

import time
from typing import Final

from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultSensorStatus,
    JobDefinition,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
)

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.resources.claimer import resource_of
from marshal_dagster.resources.outbox import OutboxResource, backlog_text
from marshal_dagster.runs.names import DEFAULT_INTERVAL_S
from marshal_dagster.runs.status import UNFINISHED
from marshal_dagster.sensors._run_history import OPEN_RUN_PATIENCE_S, changed_at_s, retry_backoff_s

OUTBOX_TAG: Final = "marshal/outbox"
_RUNS_LOOKED_AT: Final = 100


def build_outbox_backlog_sensor(
    drain_job: JobDefinition,
    *,
    max_backlog_rows: int = 0,
    max_backlog_age_s: float | None = None,
    name: str = "outbox_backlog",
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    outbox_key: str = "outbox",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build a sensor that requests a run of `drain_job` if too many rows wait, or rows wait too long.

    It requests no run while another run of the job is unfinished. An unfinished run that is not queued no longer counts
    after ten minutes, because Dagster may not notice that its host died. Each further one doubles the time, up to an
    hour. Runs that are alive share the work: one publishes, and the others wait.

    Args:
        drain_job: The job of `build_outbox_drain_job`.
        max_backlog_rows: Request a run if more rows than this wait.
        max_backlog_age_s: Request a run if the oldest row is older than this, in seconds (default: no limit).
        name: The name of the sensor.
        minimum_interval_s: The minimum time between two ticks, in seconds.
        outbox_key: The key of the `OutboxResource`.
        default_status: `RUNNING` starts the sensor with the code location, `STOPPED` leaves that to Dagster's UI.

    Returns:
        The sensor, for `Definitions(sensors=[...])`.

    Raises:
        ConfigurationError: A limit is negative.

    Example:
        ```python
        sensor = build_outbox_backlog_sensor(build_outbox_drain_job(), max_backlog_rows=1_000, max_backlog_age_s=60)
        ```
    """
    if max_backlog_rows < 0 or (max_backlog_age_s is not None and not max_backlog_age_s >= 0):
        raise ConfigurationError(
            f"max_backlog_rows is {max_backlog_rows}, max_backlog_age_s is {max_backlog_age_s}: both must be 0 or more"
        )

    # Dagster also passes resources by keyword if a test calls the sensor directly.
    def evaluate(context: SensorEvaluationContext, **_resources: object) -> SensorResult | SkipReason:
        """Request a run if the backlog is above a limit."""
        outbox = resource_of(OutboxResource, context.resources, outbox_key)
        status = outbox.status()
        text = backlog_text(outbox, status)
        age_s = status.oldest_age_s or 0.0
        if status.rows <= max_backlog_rows and (max_backlog_age_s is None or age_s <= max_backlog_age_s):
            return SkipReason(text)
        if _is_in_progress(context.instance, drain_job.name):
            return SkipReason(f"{text}; a run of {drain_job.name!r} is in progress")
        context.log.info("%s: requesting a run", text)
        return SensorResult(run_requests=[RunRequest(tags={OUTBOX_TAG: status.registration.name})])

    return SensorDefinition(
        name=name,
        evaluation_fn=evaluate,
        minimum_interval_seconds=minimum_interval_s,
        description="Requests a run that publishes the rows of the outbox if rows wait.",
        job=drain_job,
        default_status=default_status,
        required_resource_keys={outbox_key},
    )


def _is_in_progress(instance: DagsterInstance, job: str) -> bool:
    """Return whether a run of the job is queued, or unfinished and not yet taken for dead."""
    unfinished = instance.get_run_records(RunsFilter(job_name=job, statuses=list(UNFINISHED)), limit=_RUNS_LOOKED_AT)
    if not unfinished or any(record.dagster_run.status is DagsterRunStatus.QUEUED for record in unfinished):
        return bool(unfinished)
    wait_s = retry_backoff_s(OPEN_RUN_PATIENCE_S, len(unfinished))
    return time.time() <= max(map(changed_at_s, unfinished)) + wait_s
