"""Jobs and schedules round the claimed-batch op."""

from collections.abc import Mapping
from typing import Final

from dagster import (
    DefaultScheduleStatus,
    ExecutorDefinition,
    JobDefinition,
    OpDefinition,
    RunConfig,
    ScheduleDefinition,
    in_process_executor,
    job,
)

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.ops import ClaimedBatchConfig
from marshal_dagster.runs import TOPIC_TAG

EVERY_MINUTE: Final = "* * * * *"


def claimed_batch_ops(definition: JobDefinition) -> dict[str, str]:
    """Give the name of the claimed-batch op of each data topic that a job works on."""
    return {
        node.definition.tags[TOPIC_TAG]: node.name
        for node in definition.graph.nodes
        if TOPIC_TAG in node.definition.tags
    }


def build_claimed_batch_job(
    claimed_batch_op: OpDefinition,
    *,
    name: str | None = None,
    config: ClaimedBatchConfig | None = None,
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
    description: str | None = None,
) -> JobDefinition:
    """Build a job of one op made by `build_claimed_batch_op`; `config` is what a run gets that is given none.

    The op works in the run worker itself unless another executor is given: there is one step, and no child process that
    would start later and might outlive its run. Default name: `<op>_job`. Raises `ConfigurationError`.
    """
    if TOPIC_TAG not in claimed_batch_op.tags:
        raise ConfigurationError(f"op {claimed_batch_op.name!r} has no topic: make it with build_claimed_batch_op")

    def work() -> None:
        claimed_batch_op()

    return job(
        name=name or f"{claimed_batch_op.name}_job",
        description=description or claimed_batch_op.description,
        config=RunConfig(ops={claimed_batch_op.name: config} if config else {}),
        tags={TOPIC_TAG: claimed_batch_op.tags[TOPIC_TAG], **(tags or {})},
        executor_def=executor_def,
    )(work)


def build_claimed_batch_schedule(
    claimed_batch_job: JobDefinition,
    *,
    name: str | None = None,
    cron_schedule: str = EVERY_MINUTE,
    execution_timezone: str | None = None,
    default_status: DefaultScheduleStatus = DefaultScheduleStatus.STOPPED,
    tags: Mapping[str, str] | None = None,
) -> ScheduleDefinition:
    """Build a schedule that asks for a run at each tick, of which cron allows one a minute.

    A run that finds everything claimed by the one before says so and ends. Default name: `<job>_schedule`.
    """
    return ScheduleDefinition(
        name=name or f"{claimed_batch_job.name}_schedule",
        job=claimed_batch_job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        tags=dict(tags or {}),
    )


def build_reprocess_job(
    claimed_batch_op: OpDefinition,
    *,
    name: str | None = None,
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that redoes what a dead run left: the same op, one batch, the partitions named in run config.

    An open plan of these partitions is taken over exactly as it is. The stale-claim sensor asks for its runs; a person
    can too, with `partitions` and, for a plan that was given up, `one_more_attempt`. Default name: `reprocess_<op>`.
    """
    return build_claimed_batch_job(
        claimed_batch_op,
        name=name or f"reprocess_{claimed_batch_op.name}",
        config=ClaimedBatchConfig(max_batches=1),
        executor_def=executor_def,
        tags=tags,
        description=f"Redoes what a run of {claimed_batch_op.name!r} left undone when it died.",
    )
