"""Assets that claimed batches materialize, and how they and their data topics look in Dagster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Unpack

from dagster import (
    AssetExecutionContext,
    AssetsDefinition,
    AssetSpec,
    BackfillPolicy,
    DynamicPartitionsDefinition,
    Failure,
    MaterializeResult,
    OpExecutionContext,
    RetryPolicy,
    multi_asset,
)

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.ops.config import WorkOptions, batch_spec, config_of
from marshal_dagster.ops.execution import BatchExecution
from marshal_dagster.ops.metadata import ExecutionOutcome
from marshal_dagster.ops.user_function import PROCESS_ARGUMENTS, check_arguments
from marshal_dagster.runs.names import topic_asset_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from marshal_dagster.batches import ClaimedBatch

_BACKFILL_TAG: Final = "dagster/backfill"
_IDLE: Final = frozenset({ExecutionOutcome.DRAINED.value, ExecutionOutcome.HELD.value})
"""Outcomes after which a backfill has nothing left to do: nothing was unread, or other runs process it."""

Process = Callable[[AssetExecutionContext, "ClaimedBatch", "DataFrame"], "DataFrame | None"]
"""What `marshal_asset` decorates: as `marshal_dagster.ops.config.Process`, with the context of an asset."""


@dataclass(frozen=True, slots=True)
class ClaimedAsset:
    """What a translator receives of an asset: its function's name and docstring, and its data topic."""

    name: str
    topic: str
    description: str | None = None


class DagsterMarshalTranslator:
    """Says how assets and data topics look in Dagster.

    Override a method, and change what it gives with `AssetSpec.replace_attributes` or `merge_attributes`: key, group,
    owners, tags, metadata, automation condition, freshness policy. Give one translator to all that name a topic.
    """

    def get_topic_spec(self, topic: str) -> AssetSpec:
        """Describe a data topic, by default as `kafka/<topic>`."""
        return AssetSpec(topic_asset_key(topic), description=f"Topic {topic!r} in Kafka.", kinds={"kafka"})

    def get_asset_spec(self, asset: ClaimedAsset) -> AssetSpec:
        """Describe an asset: named as its function, it depends on its data topic."""
        return AssetSpec(
            asset.name,
            deps=[self.get_topic_spec(asset.topic).key],
            description=asset.description,
            kinds={"kafka", "spark"},
            metadata={"topic": asset.topic},
        )


def kafka_partitions_def(topic: str) -> DynamicPartitionsDefinition:
    """Give the Dagster partitions that stand for the partitions of `topic`; its topic asset adds what is there."""
    return DynamicPartitionsDefinition(name=f"kafka/{topic}")


def marshal_asset(
    *,
    topic: str,
    name: str | None = None,
    translator: DagsterMarshalTranslator | None = None,
    per_partition: bool = False,
    required_resource_keys: Sequence[str] = (),
    retry_policy: RetryPolicy | None = None,
    pool: str | None = None,
    **options: Unpack[WorkOptions],
) -> Callable[[Process], AssetsDefinition]:
    """Make an asset of the function that works on claimed batches of `topic` with Spark.

    The function gets context, batch and frame, as that of `build_claimed_batch_op` does; `options` and what a run does
    are the same too. Each batch is one materialization, with its ranges and numbers. Where there was nothing to do an
    observation says why, and what depends on the asset is skipped. A Dagster backfill ends only when each of its
    partitions is materialized or has failed. So in a backfill a run without a batch materializes the asset if the topic
    was drained or held by other runs, and fails otherwise. With `per_partition` each partition of the topic is a
    Dagster partition (`kafka_partitions_def`), and a run claims only its own. Name and description of the asset are
    those of the function unless `name` or `translator` says otherwise.

    Raises `ConfigurationError` for settings that no batch could keep to.
    """
    translator = translator or DagsterMarshalTranslator()
    if per_partition and options.get("claim_entire_topic"):
        raise ConfigurationError("claim_entire_topic: with per_partition a run claims one partition alone")

    def decorate(process: Process) -> AssetsDefinition:
        check_arguments(process, PROCESS_ARGUMENTS)
        own_name = name or getattr(process, "__name__", None)
        if own_name is None:
            raise ConfigurationError(f"{process!r} has no name: give the asset a `name`")
        asset = ClaimedAsset(own_name, topic, process.__doc__)
        described = translator.get_asset_spec(asset).replace_attributes(skippable=True)
        spec = batch_spec(process, topic, described.key, options)  # type: ignore[arg-type] # see `handed`
        config_class = config_of(options)

        def claimed_batches(
            context: AssetExecutionContext,
            config: config_class,  # type: ignore[valid-type]
        ) -> Iterator[MaterializeResult[Any]]:
            def handed(_: OpExecutionContext, batch: "ClaimedBatch", frame: "DataFrame") -> "DataFrame | None":
                return process(context, batch, frame)

            work = BatchExecution(
                replace(spec, process=handed, asset_key=context.asset_key),  # which may have got a prefix since
                context.op_execution_context,
                config,
                partition=_partition(context) if per_partition else None,
                keeps_last=True,
            )
            if work.run():
                result = _result(work, context)
                # Once more: it comes before what the function added itself, and checks and sensors read it.
                context.add_asset_metadata(result.metadata or {}, asset_key=context.asset_key)
                yield result
            elif _BACKFILL_TAG in context.run.tags:
                yield _idle_result(work, context)

        return multi_asset(
            name=asset.name,
            specs=[described],
            partitions_def=kafka_partitions_def(topic) if per_partition else None,
            backfill_policy=BackfillPolicy.multi_run(1) if per_partition else None,
            required_resource_keys={*spec.resource_keys, *required_resource_keys},
            op_tags=spec.op_tags,
            retry_policy=retry_policy,
            pool=pool,
        )(claimed_batches)

    return decorate


def _idle_result(work: BatchExecution, context: AssetExecutionContext) -> MaterializeResult[Any]:
    """Materialize the asset although there was nothing to do: a backfill waits for each of its partitions."""
    metadata = work.idle_metadata or {}
    if metadata.get("state") not in _IDLE:
        raise Failure(f"nothing was done in this backfill: {work.ended}", metadata=metadata)
    return MaterializeResult(asset_key=context.asset_key, metadata=metadata)


def _partition(context: AssetExecutionContext) -> int:
    if not context.partition_key.isdecimal():
        raise ConfigurationError(f"Dagster partition {context.partition_key!r} is no number of a Kafka partition")
    return int(context.partition_key)


def _result(work: BatchExecution, context: AssetExecutionContext) -> MaterializeResult[Any]:
    """Give the last batch, with what the run did before it.

    Where this attempt found nothing to do, all batches have been recorded: then only which, without their numbers.
    """
    summary, names = work.sum(), {"batches", "batches_of_earlier_attempts", "ended", "seen"}
    if work.last is None:
        names |= {"batch_ids", "delivery", "group"}
    metadata = {name: value for name, value in summary.items() if name in names}
    if work.last is None:
        return MaterializeResult(asset_key=context.asset_key, metadata=metadata)
    return MaterializeResult(asset_key=work.last.asset_key, metadata={**work.last.metadata, **metadata})
