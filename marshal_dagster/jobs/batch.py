"""Jobs and schedules that process claimed batches.

They run an op of `build_claimed_batch_op` or an asset of `marshal_asset`. Sensors request runs of these jobs.
"""

from collections.abc import Mapping
from typing import Any, Final, TypedDict, Unpack, cast, overload

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
from marshal_dagster.ops.config import LIMITS, ClaimedBatchConfig
from marshal_dagster.runs.names import TOPIC_TAG

EVERY_MINUTE: Final = "* * * * *"


OP_TAG: Final = "marshal/op"
"""Tag of an asset's job: the name of the op that materializes the asset."""

PER_PARTITION_TAG: Final = "marshal/per_partition"
"""Tag of an asset's job whose runs are each for one Dagster partition."""

_SHOWN: Final = (*LIMITS, "on_idle", "retry_exhausted")
"""The fields of the run config with which a launchpad opens, if they have a value."""

AnyJob = JobDefinition | UnresolvedAssetJobDefinition


def claimed_op(claimed: object) -> OpDefinition:
    """Return the op of a claimed op or asset. Raises `ConfigurationError` if it is neither, or is configured."""
    has_op = isinstance(claimed, AssetsDefinition) and claimed.is_executable
    op = cast("AssetsDefinition", claimed).node_def if has_op else claimed
    if not isinstance(op, OpDefinition) or TOPIC_TAG not in op.tags:
        name = getattr(op, "name", type(op).__name__)
        raise ConfigurationError(
            f"{name!r} has no topic: build it with build_claimed_batch_op or marshal_asset, and pass what they return"
        )
    if not hasattr(op.get_config_field().config_type, "fields"):
        raise ConfigurationError(
            f"{op.name!r} was made by `configured`, so its run config cannot be set: pass the op itself, and the "
            "option `config` of build_claimed_batch_job"
        )
    return op


def claimed_batch_ops(definition: AnyJob) -> dict[str, str]:
    """Return the name of the claimed-batch op for each data topic of a job.

    Raises `ConfigurationError` for a job whose runs need a Dagster partition, because sensors cannot request these.
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
    """Keyword arguments of `build_reprocess_job`, such as `name="redo_orders"`."""

    name: str | None
    """The name of the job."""
    executor_def: ExecutorDefinition
    """The executor (default: `in_process_executor`, so that batches are processed in the run worker itself)."""
    tags: Mapping[str, str] | None
    """Further tags of the job's runs."""


class ClaimedBatchJobOptions(ReprocessJobOptions, total=False):
    """Keyword arguments of `build_claimed_batch_job`, in addition to those of `ReprocessJobOptions`."""

    config: ClaimedBatchConfig | None
    """The default run config of the op or asset."""
    description: str | None
    """The description of the job (default: the description of the op or asset)."""


@overload
def build_claimed_batch_job(claimed: OpDefinition, **options: Unpack[ClaimedBatchJobOptions]) -> JobDefinition: ...


@overload
def build_claimed_batch_job(
    claimed: AssetsDefinition, **options: Unpack[ClaimedBatchJobOptions]
) -> UnresolvedAssetJobDefinition: ...


def build_claimed_batch_job(
    claimed: OpDefinition | AssetsDefinition, **options: Unpack[ClaimedBatchJobOptions]
) -> AnyJob:
    """Build a job from an op of `build_claimed_batch_op` or an asset of `marshal_asset`.

    By default batches are processed in the run worker itself, so no child process can outlive its run. The job of an
    asset also evaluates the asset's checks.

    Args:
        claimed: The op or asset.
        **options: See `ClaimedBatchJobOptions`. The default name is `<op>_job`.

    Returns:
        The job, for `Definitions(jobs=[...])`.

    Raises:
        ConfigurationError: `claimed` was not built by one of these two factories.

    Example:
        ```python
        job = build_claimed_batch_job(orders_per_shop, config=ClaimedBatchConfig(max_batches=10))
        ```
    """
    op = claimed_op(claimed)
    name = options.get("name") or f"{op.name}_job"
    run_config = _opens_with(op, options.get("config"))
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
        config=run_config,
        tags=tags,
        executor_def=executor_def,
    )(work)


def _opens_with(op: OpDefinition, config: ClaimedBatchConfig | None) -> dict[str, Any]:
    """Return the default run config, with which the launchpad opens: what an operator may want to change.

    Without it a launchpad opens with all defaults of the job, resources included.
    """
    config_type: Any = op.get_config_field().config_type  # a Shape
    defaults = {name: field.default_value for name, field in config_type.fields.items() if field.default_provided}
    shown = {name: defaults[name] for name in _SHOWN if defaults.get(name) is not None}
    given = {} if config is None else _as_config(op, config)
    other = {name: value for name, value in given.items() if value not in (defaults.get(name), [])}
    return {"ops": {op.name: {"config": {**shown, **other}}}}


def _as_config(op: OpDefinition, config: ClaimedBatchConfig) -> dict[str, Any]:
    run_config: dict[str, Any] = RunConfig(ops={op.name: config}).to_config_dict()  # type: ignore[no-untyped-call]
    values: dict[str, Any] = run_config["ops"][op.name]["config"]
    return values


def _require_whole(definition: AnyJob) -> None:
    if PER_PARTITION_TAG in (definition.tags or {}):
        raise ConfigurationError(
            f"runs of job {definition.name!r} need a Dagster partition, which this schedule or sensor cannot choose: "
            "start them by an automation condition, a backfill, or a schedule of your own that sets partition_key"
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
    """Build a schedule that requests a run of a claimed-batch job at each tick.

    If an earlier run still holds all partitions, the new run records that and ends.

    Args:
        claimed_batch_job: A job of `build_claimed_batch_job`.
        name: The name of the schedule (default: `<job>_schedule`).
        cron_schedule: When runs start, as a cron expression (default: every minute).
        execution_timezone: The time zone of `cron_schedule`, such as `Europe/Berlin` (default: Dagster's, UTC).
        default_status: `RUNNING` starts the schedule with the code location, `STOPPED` leaves that to Dagster's UI.
        tags: Tags of the requested runs.

    Returns:
        The schedule, for `Definitions(schedules=[...])`.

    Raises:
        ConfigurationError: Runs of the job need a Dagster partition.

    Example:
        ```python
        schedule = build_claimed_batch_schedule(job, cron_schedule="*/5 * * * *")
        ```
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
    """Build the job that repeats batches which dead runs did not finish.

    A run processes one batch of the partitions in its run config. If they have an open plan, the batch has exactly the
    offsets of that plan. The stale-claim sensor requests the runs. An operator can launch one too, with `partitions`
    and, for an exhausted plan, `retry_exhausted`.

    Args:
        claimed: The op of `build_claimed_batch_op` or the asset of `marshal_asset`.
        **options: See `ReprocessJobOptions`. The default name is `reprocess_<op>`.

    Returns:
        The job, for `Definitions(jobs=[...])` and for `build_stale_claim_sensor`.

    Raises:
        ConfigurationError: `claimed` was not built by one of these two factories, or it is an asset with
            `per_partition`. The asset's own runs then repeat what dead runs left.

    Example:
        ```python
        redo = build_reprocess_job(orders_per_shop)
        sensor = build_stale_claim_sensor(redo, group="shops")
        ```
    """
    op = claimed_op(claimed)
    if isinstance(claimed, AssetsDefinition) and claimed.partitions_def is not None:
        raise ConfigurationError(
            f"asset {op.name!r} has Dagster partitions, so it needs no reprocess job: materialize the "
            "partition that a dead run left"
        )
    made: ClaimedBatchJobOptions = {
        **options,
        "name": options.get("name") or f"reprocess_{op.name}",
        "config": ClaimedBatchConfig(max_batches=1),
        "description": f"Repeats the batches that dead runs of {op.name!r} did not finish.",
    }
    return build_claimed_batch_job(claimed, **made)
