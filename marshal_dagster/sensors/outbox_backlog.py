"""The sensor that requests a run of the drain job when rows wait in an outbox."""

from typing import Final

from dagster import (
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

OUTBOX_TAG: Final = "marshal/outbox"


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
    """Build the sensor that asks for a run of `drain_job` when rows wait, and none is under way.

    It asks when more than `max_backlog_rows` wait, or when the oldest has waited for longer than `max_backlog_age_s`
    seconds. Raises `ConfigurationError`.
    """
    if max_backlog_rows < 0 or (max_backlog_age_s is not None and max_backlog_age_s < 0):
        raise ConfigurationError(
            f"max_backlog_rows is {max_backlog_rows}, max_backlog_age_s is {max_backlog_age_s}; they must be 0 or more"
        )

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def evaluate(context: SensorEvaluationContext, **_resources: object) -> SensorResult | SkipReason:
        """Look at the backlog once."""
        status = resource_of(OutboxResource, context.resources, outbox_key).status()
        text = backlog_text(status)
        age_s = status.oldest_age_s or 0.0
        if status.rows <= max_backlog_rows and (max_backlog_age_s is None or age_s <= max_backlog_age_s):
            return SkipReason(text)
        under_way = RunsFilter(job_name=drain_job.name, statuses=list(UNFINISHED))
        if context.instance.get_run_records(under_way, limit=1):
            return SkipReason(f"{text}; a run of {drain_job.name!r} is under way")
        context.log.info("%s: asking for a run", text)
        return SensorResult(run_requests=[RunRequest(tags={OUTBOX_TAG: status.registration.name})])

    return SensorDefinition(
        name=name,
        evaluation_fn=evaluate,
        minimum_interval_seconds=minimum_interval_s,
        description="Asks for a run that drains the outbox when rows wait.",
        job=drain_job,
        default_status=default_status,
        required_resource_keys={outbox_key},
    )
