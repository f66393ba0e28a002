"""Jobs and schedules round the claimed-batch op."""

from collections.abc import Mapping
from typing import Final, TypedDict, Unpack, overload

from dagster import (
    AssetsDefinition,
    AssetSelection,
    DefaultScheduleStatus,
    ExecutorDefinition,
    JobDefinition,
    OpDefinition,
    RunConfig,
    ScheduleDefinition,
    define_asset_job,
    in_process_executor,
    job,
)
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition  # has no public name

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.ops.config import ClaimedBatchConfig
from marshal_dagster.runs.names import TOPIC_TAG

EVERY_MINUTE: Final = "* * * * *"


OP_TAG: Final = "marshal/op"
"""Names, on a job of an asset, the op that materializes it."""

PER_PARTITION_TAG: Final = "marshal/per_partition"
"""Is on a job of an asset whose runs are each for one Dagster partition."""

AnyJob = JobDefinition | UnresolvedAssetJobDefinition


def claimed_batch_ops(definition: AnyJob) -> dict[str, str]:
    """Give the name of the claimed-batch op of each data topic that a job works on.

    Raises `ConfigurationError` for a job whose runs need a Dagster partition, as none that a sensor asks for has.
    """
    _require_whole(definition)
    if isinstance(definition, UnresolvedAssetJobDefinition):
        tags = definition.tags or {}
        return {tags[TOPIC_TAG]: tags[OP_TAG]} if OP_TAG in tags else {}
    return {
        node.definition.tags[TOPIC_TAG]: node.name
        for node in definition.graph.nodes
        if TOPIC_TAG in node.definition.tags
    }


class ReprocessJobOptions(TypedDict, total=False):
    """How a job of claimed batches is built."""

    name: str | None
    """The job's name."""
    executor_def: ExecutorDefinition
    """By default the work is done in the run worker itself."""
    tags: Mapping[str, str] | None
    """Tags of the job's runs, beside that of the data topic."""


class ClaimedBatchJobOptions(ReprocessJobOptions, total=False):
    """How `build_claimed_batch_job` builds a job."""

    config: ClaimedBatchConfig | None
    """What a run gets that is given none."""
    description: str | None
    """By default that of the op or asset."""


@overload
def build_claimed_batch_job(claimed: OpDefinition, **options: Unpack[ClaimedBatchJobOptions]) -> JobDefinition: ...


@overload
def build_claimed_batch_job(
    claimed: AssetsDefinition, **options: Unpack[ClaimedBatchJobOptions]
) -> UnresolvedAssetJobDefinition: ...


def build_claimed_batch_job(
    claimed: OpDefinition | AssetsDefinition, **options: Unpack[ClaimedBatchJobOptions]
) -> AnyJob:
    """Build a job of what `build_claimed_batch_op` or `marshal_asset` made.

    The work is done in the run worker itself unless another executor is given: there is no child process that would
    start later and might outlive its run. An asset's checks are carried out too. Default name: `<op>_job`. Raises
    `ConfigurationError`.
    """
    op = claimed.op if isinstance(claimed, AssetsDefinition) else claimed
    if TOPIC_TAG not in op.tags:
        raise ConfigurationError(f"{op.name!r} has no topic: make it with build_claimed_batch_op or marshal_asset")
    name, config = options.get("name") or f"{op.name}_job", options.get("config")
    run_config = RunConfig(ops={op.name: config}) if config else None  # an empty one would empty the launchpad
    tags = {TOPIC_TAG: op.tags[TOPIC_TAG], **(options.get("tags") or {})}
    executor_def = options.get("executor_def", in_process_executor)
    if isinstance(claimed, AssetsDefinition):
        per_partition = {} if claimed.partitions_def is None else {PER_PARTITION_TAG: "true"}
        return define_asset_job(
            name,
            AssetSelection.assets(claimed),
            config=run_config,
            tags={OP_TAG: op.name, **per_partition, **tags},
            executor_def=executor_def,
            description=options.get("description") or claimed.descriptions_by_key.get(claimed.key),
        )

    def work() -> None:
        op()

    return job(
        name=name,
        description=options.get("description") or op.description,
        config=run_config,  # type: ignore[arg-type] # None is its own default
        tags=tags,
        executor_def=executor_def,
    )(work)


def _require_whole(definition: AnyJob) -> None:
    if PER_PARTITION_TAG in (definition.tags or {}):
        raise ConfigurationError(
            f"runs of job {definition.name!r} need a Dagster partition, which nothing gives them here: start them by "
            "an automation condition of the asset, by a backfill, or by a schedule of your own that names partition_key"
        )


def build_claimed_batch_schedule(
    claimed_batch_job: AnyJob,
    *,
    name: str | None = None,
    cron_schedule: str = EVERY_MINUTE,
    execution_timezone: str | None = None,
    default_status: DefaultScheduleStatus = DefaultScheduleStatus.STOPPED,
    tags: Mapping[str, str] | None = None,
) -> ScheduleDefinition:
    """Build a schedule that asks for a run at each tick, of which cron allows one a minute.

    A run that finds everything claimed by the one before says so and ends. Default name: `<job>_schedule`. Raises
    `ConfigurationError` for a job whose runs need a Dagster partition.
    """
    _require_whole(claimed_batch_job)
    return ScheduleDefinition(
        name=name or f"{claimed_batch_job.name}_schedule",
        job=claimed_batch_job,
        cron_schedule=cron_schedule,
        execution_timezone=execution_timezone,
        default_status=default_status,
        tags=dict(tags or {}),
    )


@overload
def build_reprocess_job(claimed: OpDefinition, **options: Unpack[ReprocessJobOptions]) -> JobDefinition: ...


@overload
def build_reprocess_job(
    claimed: AssetsDefinition, **options: Unpack[ReprocessJobOptions]
) -> UnresolvedAssetJobDefinition: ...


def build_reprocess_job(claimed: OpDefinition | AssetsDefinition, **options: Unpack[ReprocessJobOptions]) -> AnyJob:
    """Build the job that redoes what a dead run left: the same work, one batch, the partitions named in run config.

    An open plan of these partitions is taken over exactly as it is. The stale-claim sensor asks for its runs; a person
    can too, with `partitions` and, for a plan that was given up, `retry_exhausted`. Default name: `reprocess_<op>`.

    Raises `ConfigurationError`, also for an asset with a Dagster partition for each Kafka partition: its own runs take
    over what dead ones left.
    """
    if isinstance(claimed, AssetsDefinition) and claimed.partitions_def is not None:
        raise ConfigurationError(f"{claimed.op.name!r} has partitions: materialize the one that a dead run left")
    op = claimed.op if isinstance(claimed, AssetsDefinition) else claimed
    made: ClaimedBatchJobOptions = {
        **options,
        "name": options.get("name") or f"reprocess_{op.name}",
        "config": ClaimedBatchConfig(max_batches=1),
        "description": f"Redoes what a run of {op.name!r} left undone when it died.",
    }
    return build_claimed_batch_job(claimed, **made)
