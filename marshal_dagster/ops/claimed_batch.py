"""The factory of the op that claims partitions, processes batches of their messages, and commits.

The op runs a `BatchExecution`. Use it for a job of your own; `marshal_asset` builds an asset on the same code.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

from dagster import AssetKey, OpDefinition, OpExecutionContext, Out, Output, RetryPolicy, op

from marshal_dagster.ops.config import FramelessProcess, Process, WorkOptions, batch_spec, config_of
from marshal_dagster.ops.execution import BatchExecution
from marshal_dagster.ops.metadata import BatchesResult
from marshal_dagster.runs.names import ASSET_KEY_TAG


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
) -> OpDefinition:
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
        The op, for a job or a graph. It requires the resource `claimer` (or the one named by `claimer_key`).

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

    return op(
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
