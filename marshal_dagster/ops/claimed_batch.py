"""The factory of the op that claims partitions, processes batches of their messages, and commits.

The op runs a `BatchExecution`. Use it for a job of your own; `marshal_asset` builds an asset on the same code.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from dagster import AssetKey, OpDefinition, OpExecutionContext, Out, Output, RetryPolicy, op

from marshal_dagster.ops.config import BatchSpec, FramelessProcess, Process, WorkOptions, batch_spec, config_of
from marshal_dagster.ops.execution import BatchExecution
from marshal_dagster.ops.metadata import BatchesResult
from marshal_dagster.runs.names import ASSET_KEY_TAG

Rebuild = Callable[[Callable[..., Any], WorkOptions], Any]
"""Builds an op or asset again, with another function and with some other options."""


class ClaimedBatchOp(OpDefinition):
    """The op of `build_claimed_batch_op`, with the function that it calls for each batch."""

    def __init__(self, built: OpDefinition, spec: BatchSpec, rebuild: Rebuild) -> None:
        """Copy an op that Dagster's decorator has built.

        Args:
            built: The op.
            spec: Its checked options.
            rebuild: Builds the same op, or its asset, with another function and other options.
        """
        self.__dict__.update(built.__dict__)
        self.spec = spec
        self.rebuild = rebuild

    @property
    def fn(self) -> Callable[..., Any]:
        """The function that the op calls for each batch, for example to call it in a test."""
        return self.spec.process

    def replace(self, process: Callable[..., Any] | None = None, **changes: Unpack[WorkOptions]) -> "ClaimedBatchOp":
        """Return the same op with another function or other options.

        Args:
            process: The function (default: the same).
            **changes: The options to change.

        Returns:
            The new op.

        Raises:
            ConfigurationError: An option is invalid, or `process` does not take the arguments.

        Example:
            ```python
            in_test = count_op.replace(sink=FileSink(tmp_path))
            ```
        """
        made: ClaimedBatchOp = self.rebuild(process or self.fn, changes)
        return made


def build_claimed_batch_op(
    process: Process | FramelessProcess,
    *,
    name: str,
    topic: str,
    asset_key: AssetKey | None = None,
    required_resource_keys: Sequence[str] = (),
    description: str | None = None,
    tags: Mapping[str, str] | None = None,
    retry_policy: RetryPolicy | None = None,
    pool: str | None = None,
    **options: Unpack[WorkOptions],
) -> ClaimedBatchOp:
    """Build an op that claims partitions of `topic`, processes their messages with `process`, and commits.

    The op processes batch after batch until the topic is drained or a limit is reached. It claims partitions before it
    starts a Spark session. Each batch is recorded as a materialization of `asset_key`.

    The op has one output, a `BatchesResult`. The output is left out if there was nothing to do, so Dagster skips the
    ops that depend on it. If the step is retried or re-executed, the output includes the batches of failed attempts.

    Args:
        process: Called as `process(context, batch, frame)` for each batch. `frame` has the columns key, value, topic,
            partition, offset, timestamp and headers of exactly the offsets of the batch. In `effectively_once` the
            function returns the rows for the sink. In the other modes it writes its results itself and returns None.
            With the option `with_frame=False` it is called as `process(context, batch)`, without a Spark session.
        name: The name of the op.
        topic: The data topic.
        asset_key: The asset that each batch materializes (default: the name of the op).
        required_resource_keys: Further resources that `process` uses.
        description: The description of the op (default: the docstring of `process`).
        tags: Further tags of the op.
        retry_policy: Dagster's retry policy of the op.
        pool: Dagster's concurrency pool of the op.
        **options: How batches are claimed and processed, see `WorkOptions`.

    Returns:
        The op, for a job or a graph. It requires the resource `claimer` (or the one named by `claimer_key`). Its
        `fn` is `process`.

    Raises:
        ConfigurationError: An option is invalid, or `process` does not take these arguments.

    Example:
        ```python
        def count_shops(context, batch, frame):
            return frame.groupBy("partition", "key").count()


        count_op = build_claimed_batch_op(
            count_shops, name="count_shops", topic="orders", sink=FileSink("/data/shops"), max_records=1_000_000
        )
        ```
    """
    spec = batch_spec(process, topic, asset_key or AssetKey([name]), options)
    config_class = config_of(options)

    def claimed_batches(context: OpExecutionContext, config: config_class) -> Iterator[Output[BatchesResult]]:  # type: ignore[valid-type]
        work = BatchExecution(spec, context, config)
        if work.run():
            yield Output(work.result(), metadata=work.sum())

    built = op(
        name=name,
        description=description or process.__doc__,
        out=Out(
            BatchesResult, is_required=False, description="The completed batches. Left out if there was nothing to do."
        ),
        required_resource_keys={*spec.resource_keys, *required_resource_keys},
        tags={
            **spec.op_tags,
            **({} if asset_key is None else {ASSET_KEY_TAG: asset_key.to_user_string()}),
            **(tags or {}),
        },
        retry_policy=retry_policy,
        pool=pool,
    )(claimed_batches)

    def rebuild(other: Callable[..., Any], changes: WorkOptions) -> ClaimedBatchOp:
        changed: WorkOptions = {**options, **changes}
        return build_claimed_batch_op(
            other,
            name=name,
            topic=topic,
            asset_key=asset_key,
            required_resource_keys=required_resource_keys,
            description=description or process.__doc__,
            tags=tags,
            retry_policy=retry_policy,
            pool=pool,
            **changed,
        )

    return ClaimedBatchOp(built, spec, rebuild)
