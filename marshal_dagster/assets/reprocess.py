"""The asset whose partitions are windows of time: its backfill has a group process the messages of a window again."""

import warnings
from collections.abc import Iterator
from typing import Any, Final

from dagster import (
    AssetExecutionContext,
    AssetObservation,
    AssetsDefinition,
    BackfillPolicy,
    BetaWarning,
    Failure,
    MaterializeResult,
    TimeWindowPartitionsDefinition,
    asset,
)
from pydantic import Field

from marshal_dagster.admin.position_spec import partitions_of
from marshal_dagster.admin.reprocess import TimeWindow
from marshal_dagster.assets.decorator import BACKFILL_TAG
from marshal_dagster.jobs._admin_action import AdminAction, reprocess
from marshal_dagster.jobs.admin import ReprocessConfig
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.resources.claimer import claimer_of
from marshal_dagster.runs.log_forwarding import logs_to_run
from marshal_dagster.runs.names import GROUP_TAG, as_name, tag_run

_SECOND_MS: Final = 1_000


class ReprocessWindowConfig(ReprocessConfig):
    """The run config of the asset of `build_reprocess_asset`."""

    partitions: str | None = Field(
        default=None, description="Kafka partitions of the topic, such as '0,2-4' (default: all)."
    )


def build_reprocess_asset(
    topic: str,
    *,
    partitions_def: TimeWindowPartitionsDefinition,
    name: str | None = None,
    claimer_key: str = "claimer",
    group_name: str | None = None,
    pool: str | None = None,
) -> AssetsDefinition:
    """Build an asset whose backfill makes the claimer's group process the messages of windows of time again.

    Its Dagster partitions are windows of time, such as days. To materialize one has the group's own scheduled runs
    process the messages of that window again, as the job of `build_reprocess_range_job` does. So do not stop those
    runs. A backfill over adjacent windows is one run.

    A window has, in each Kafka partition, the messages from the first one with the timestamp of its start or a later
    one, up to the first one with the timestamp of its end or a later one (exclusive). Each message is in exactly one of
    several adjacent windows, also if timestamps are out of order. Messages that the group has not processed yet are
    left to its next runs.

    A dry run records an observation of each window, so Dagster does not show the window as materialized. In a backfill,
    which would wait for it, a dry run fails.

    Only one run of a group may reprocess at a time; another one fails. If a backfill has windows that are not adjacent,
    limit the pool to 1.

    Args:
        topic: The data topic.
        partitions_def: The windows, such as `DailyPartitionsDefinition(start_date="2026-01-01")`.
        name: The name of the asset (default: `reprocess_<topic>`).
        claimer_key: The key of the `ClaimerResource`.
        group_name: Dagster's group of the asset.
        pool: Dagster's concurrency pool of the asset (default: the name of the asset).

    Returns:
        The asset, for `Definitions(assets=[...])`. Its run config is `ReprocessWindowConfig`.

    Raises:
        ConfigurationError: `topic` is no valid name of a topic.

    Example:
        ```python
        days = DailyPartitionsDefinition(start_date="2026-01-01")
        again = build_reprocess_asset("orders", partitions_def=days)
        ```
    """
    require_topic_name("topic", topic)
    name = name or f"reprocess_{as_name(topic)}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BetaWarning)  # users cannot avoid this warning
        decorate = asset(
            name=name,
            description=f"Has the group process the messages of topic {topic!r} in a window of time again.",
            partitions_def=partitions_def,
            output_required=False,
            backfill_policy=BackfillPolicy.single_run(),
            required_resource_keys={claimer_key},
            group_name=group_name,
            pool=pool or name,
            kinds={"kafka"},
        )

    def reprocess_window(
        context: AssetExecutionContext, config: ReprocessWindowConfig
    ) -> Iterator[MaterializeResult[Any]]:
        claimer = claimer_of(context.resources, claimer_key)
        run = context.op_execution_context
        tag_run(run, {GROUP_TAG: claimer.group})
        action, chosen = AdminAction(run, claimer), config.partitions
        start, end = context.partition_time_window
        window = TimeWindow(round(start.timestamp() * _SECOND_MS), round(end.timestamp() * _SECOND_MS))
        numbers = None if chosen is None else partitions_of(chosen, "partitions")
        with logs_to_run(run):
            action.require_allowed(config)
            table = reprocess(action, config, topic, lambda work: work.look_at_window(window, numbers))
        metadata = {
            "group": claimer.group,
            "dry_run": config.dry_run,
            "from": start.isoformat(),
            "to": end.isoformat(),
            "before_and_after": table,
        }
        if not config.dry_run:
            yield MaterializeResult(metadata=metadata)
            return
        if BACKFILL_TAG in context.run.tags:
            raise Failure(
                "nothing was processed again, because this is a dry run: launch the backfill without dry_run",
                metadata=metadata,
                allow_retries=False,
            )
        for key in context.partition_keys:
            context.log_event(AssetObservation(context.asset_key, partition=key, metadata=metadata))

    return decorate(reprocess_window)
