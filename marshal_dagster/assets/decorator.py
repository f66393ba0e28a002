"""The decorator `marshal_asset` and the translator that defines how assets and data topics appear in Dagster.

An asset processes claimed batches like the op of `marshal_dagster.ops`. Each batch is one materialization of the asset.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Unpack, cast

from dagster import (
    AssetExecutionContext,
    AssetsDefinition,
    AssetSpec,
    BackfillPolicy,
    BetaWarning,
    DynamicPartitionsDefinition,
    Failure,
    MaterializeResult,
    OpExecutionContext,
    RetryPolicy,
    multi_asset,
)

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.ops.claimed_batch import ClaimedBatchOp
from marshal_dagster.ops.config import BatchSpec, WorkOptions, batch_spec, config_of
from marshal_dagster.ops.execution import BatchExecution
from marshal_dagster.ops.metadata import OF_RUN, ExecutionOutcome
from marshal_dagster.ops.user_function import check_arguments, process_arguments
from marshal_dagster.runs.names import topic_asset_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from marshal_dagster.batches import ClaimedBatch

BACKFILL_TAG: Final = "dagster/backfill"
"""Dagster's tag of the runs of a backfill, which waits for each of its partitions."""
_IDLE: Final = frozenset({ExecutionOutcome.DRAINED.value, ExecutionOutcome.HELD.value})
"""Outcomes after which a backfill has nothing left to do: no message is unread, or other runs process them."""

Process = (
    Callable[[AssetExecutionContext, "ClaimedBatch", "DataFrame"], "DataFrame | None"]
    | Callable[[AssetExecutionContext, "ClaimedBatch"], object]
)
"""The function that `marshal_asset` decorates: like those of `marshal_dagster.ops.config`, with an asset's context."""


@dataclass(frozen=True, slots=True)
class ClaimedAsset:
    """The description of an asset, from which `DagsterMarshalTranslator.get_asset_spec` makes its spec."""

    name: str
    """The `name` argument of `marshal_asset`, or the name of the decorated function."""
    topic: str
    """The data topic."""
    description: str | None = None
    """The docstring of the decorated function."""


class ClaimedAssetsDefinition(AssetsDefinition):
    """The asset of `marshal_asset`, with the function that it calls for each batch."""

    @property
    def fn(self) -> Callable[..., Any]:
        """The decorated function, for example to call it in a test."""
        return self.spec.process

    @property
    def spec(self) -> BatchSpec:
        """The checked options of the asset."""
        return self._claimed_op.spec

    @property
    def _claimed_op(self) -> ClaimedBatchOp:
        return cast("ClaimedBatchOp", self.op)

    def replace(
        self, process: Callable[..., Any] | None = None, **changes: Unpack[WorkOptions]
    ) -> "ClaimedAssetsDefinition":
        """Return the same asset with another function or other options.

        Args:
            process: The function (default: the same).
            **changes: The options to change.

        Returns:
            The new asset.

        Raises:
            ConfigurationError: An option is invalid, or `process` does not take the arguments.

        Example:
            ```python
            in_test = orders_per_shop.replace(sink=FileSink(tmp_path))
            ```
        """
        made: ClaimedAssetsDefinition = self._claimed_op.rebuild(process or self.fn, changes)
        return made


class DagsterMarshalTranslator:
    """Defines how assets and data topics appear in Dagster.

    Override a method to change key, group, owners, tags, metadata, automation condition or freshness policy. Pass the
    same translator to every builder that uses a topic: assets, topic asset and topic sensor.

    Example:
        ```python
        class Translator(DagsterMarshalTranslator):
            def get_asset_spec(self, asset):
                return super().get_asset_spec(asset).replace_attributes(group_name="shops")
        ```
    """

    def get_topic_spec(self, topic: str) -> AssetSpec:
        """Return the spec of a data topic.

        Args:
            topic: The name of the data topic.

        Returns:
            The spec. By default its key is `kafka/<topic>`.
        """
        return AssetSpec(topic_asset_key(topic), description=f"Topic {topic!r} in Kafka.", kinds={"kafka"})

    def get_asset_spec(self, asset: ClaimedAsset) -> AssetSpec:
        """Return the spec of an asset.

        Args:
            asset: Name, data topic and description of the asset.

        Returns:
            The spec. By default its key is the name, and it depends on the asset of its data topic.
        """
        return AssetSpec(
            asset.name,
            deps=[self.get_topic_spec(asset.topic).key],
            description=asset.description,
            kinds={"kafka", "spark"},
            metadata={"topic": asset.topic},
        )


def kafka_partitions_def(topic: str) -> DynamicPartitionsDefinition:
    """Return the Dagster partitions definition for the partitions of a data topic.

    Args:
        topic: The data topic. Observations of its topic asset with `per_partition` add the partitions that exist.

    Returns:
        Dynamic partitions, each named by the number of the Kafka partition.

    Example:
        ```python
        @asset(partitions_def=kafka_partitions_def("orders"), deps=["orders_per_shop"])
        def report(context): ...
        ```
    """
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
) -> Callable[[Process], ClaimedAssetsDefinition]:
    """Build an asset from a function that processes claimed batches of `topic` with Spark.

    The function takes context, batch and frame, like `process` of `build_claimed_batch_op`; with the option
    `with_frame=False` it takes context and batch, for example to process the batch with `run_with_pipes`. A run
    processes batch after batch as that op does. Each batch is one materialization with its ranges and numbers. If there
    was nothing to do, an observation records the reason, and Dagster skips the assets that depend on this one.

    In a backfill, a run that had nothing to do also materializes the asset if the topic was drained or held by other
    runs; otherwise it fails. Without that the backfill would never end, because Dagster waits for each partition.

    Args:
        topic: The data topic.
        name: The name of the asset (default: the name of the function).
        translator: Defines key, group, tags and dependencies of the asset.
        per_partition: Whether each partition of the topic is a Dagster partition (`kafka_partitions_def`). A run then
            claims only its own partition.
        required_resource_keys: Further resources that the function uses.
        retry_policy: Dagster's retry policy of the asset.
        pool: Dagster's concurrency pool of the asset.
        **options: How batches are claimed and processed, see `WorkOptions`.

    Returns:
        A decorator that turns the function into an `AssetsDefinition`, whose `fn` is the function. The asset requires
        the resource `claimer` (or the one named by `claimer_key`).

    Raises:
        ConfigurationError: An option is invalid, or the function does not take these arguments.

    Example:
        ```python
        @marshal_asset(topic="orders", sink=FileSink("/data/orders_per_shop"), max_records=1_000_000)
        def orders_per_shop(context, batch, frame):
            return frame.groupBy("partition", "key").count()
        ```
    """
    translator = translator or DagsterMarshalTranslator()
    if per_partition and options.get("claim_entire_topic"):
        raise ConfigurationError(
            f"topic {topic!r}: claim_entire_topic does not work with per_partition, because each run then claims one "
            "partition: remove one of the two"
        )

    def decorate(process: Process) -> ClaimedAssetsDefinition:
        check_arguments(process, process_arguments(options))
        own_name = name or getattr(process, "__name__", None)
        if own_name is None:
            raise ConfigurationError(f"{process!r} has no name: pass `name` to marshal_asset")
        asset = ClaimedAsset(own_name, topic, process.__doc__)
        described = translator.get_asset_spec(asset).replace_attributes(skippable=True)
        spec = batch_spec(process, topic, described.key, options)  # type: ignore[arg-type] # see `handed`
        config_class = config_of(options)

        def claimed_batches(
            context: AssetExecutionContext,
            config: config_class,  # type: ignore[valid-type]
        ) -> Iterator[MaterializeResult[Any]]:
            def handed(_: OpExecutionContext, batch: "ClaimedBatch", *frame: "DataFrame") -> Any:  # noqa: ANN401
                return process(context, batch, *frame)

            work = BatchExecution(
                replace(spec, process=handed, asset_key=context.asset_key),  # Dagster may have prefixed it
                context.op_execution_context,
                config,
                partition=_partition(context) if per_partition else None,
                keeps_last=True,
            )
            if work.run():
                result = _result(work, context)
                # Added here too, so that it precedes metadata that the function added: checks and sensors read it.
                context.add_asset_metadata(result.metadata or {}, asset_key=context.asset_key)
                yield result
            elif BACKFILL_TAG in context.run.tags:
                yield _idle_result(work, context)

        built = multi_asset(
            name=asset.name,
            specs=[described],
            partitions_def=kafka_partitions_def(topic) if per_partition else None,
            backfill_policy=BackfillPolicy.multi_run(1) if per_partition else None,
            required_resource_keys={*spec.resource_keys, *required_resource_keys},
            op_tags=spec.op_tags,
            retry_policy=retry_policy,
            pool=pool,
        )(claimed_batches)

        def rebuild(other: Callable[..., Any], changes: WorkOptions) -> ClaimedAssetsDefinition:
            changed: WorkOptions = {**options, **changes}
            return marshal_asset(
                topic=topic,
                name=own_name,
                translator=translator,
                per_partition=per_partition,
                required_resource_keys=required_resource_keys,
                retry_policy=retry_policy,
                pool=pool,
                **changed,
            )(other)

        attributes = {**built.get_attributes_dict(), "node_def": ClaimedBatchOp(built.op, spec, rebuild)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BetaWarning)  # of the argument `execution_type`
            return ClaimedAssetsDefinition(**attributes)

    return decorate


def _idle_result(work: BatchExecution, context: AssetExecutionContext) -> MaterializeResult[Any]:
    """Return a materialization although there was nothing to do, because a backfill waits for each partition."""
    metadata = work.idle_metadata or {}
    if metadata.get("state") not in _IDLE:
        raise Failure(f"this run of a backfill processed no batch: {work.ended}", metadata=metadata)
    return MaterializeResult(asset_key=context.asset_key, metadata=metadata)


def _partition(context: AssetExecutionContext) -> int:
    if not context.partition_key.isdecimal():
        raise ConfigurationError(
            f"Dagster partition {context.partition_key!r} is not the number of a Kafka partition: delete it, and "
            "launch a run of another one"
        )
    return int(context.partition_key)


def _result(work: BatchExecution, context: AssetExecutionContext) -> MaterializeResult[Any]:
    """Return the materialization of the last batch, with a summary of the earlier ones.

    If this attempt had nothing to do, all batches are already recorded. Then the result names them, without numbers.
    """
    summary, names = work.sum(), set(OF_RUN)
    if work.last is None:
        names |= {"batch_ids", "delivery", "group"}
    metadata = {name: value for name, value in summary.items() if name in names}
    if work.last is None:
        return MaterializeResult(asset_key=context.asset_key, metadata=metadata)
    return MaterializeResult(asset_key=work.last.asset_key, metadata={**work.last.metadata, **metadata})
