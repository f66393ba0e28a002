"""The op that claims, processes and commits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Unpack

from dagster import AssetKey, OpDefinition, OpExecutionContext, Out, Output, RetryPolicy, op

from marshal_dagster.ops.config import Process, WorkOptions, batch_spec, config_of
from marshal_dagster.ops.execution import BatchExecution
from marshal_dagster.ops.metadata import BatchesResult
from marshal_dagster.runs.names import ASSET_KEY_TAG


def build_claimed_batch_op(
    process: Process,
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
    """Build the op `name`, which claims partitions of `topic`, has `process` work on them with Spark, and commits.

    `process(context, batch, frame)` gets key, value, topic, partition, offset, timestamp and headers of exactly the
    offsets that it holds.

    It works batch after batch until the topic is drained or a limit is reached; `options` are those of `WorkOptions`.
    In effectively once `process` returns the rows for the sink, in the other modes it does its work itself and returns
    None. The claim comes first, then the Spark session. Each batch is recorded as a materialization of `asset_key`
    (default: the op's name). The one output, a `BatchesResult`, is left out when there was nothing to do, so that what
    depends on it is skipped. A step that is tried again, by `retry_policy` or by re-execution, gives what its failed
    attempts did too.

    Raises `ConfigurationError` for settings that no batch could keep to.
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
        out=Out(BatchesResult, is_required=False, description="What was done; left out when there was nothing to do."),
        required_resource_keys={*spec.resource_keys, *required_resource_keys},
        tags={
            **spec.op_tags,
            **({} if asset_key is None else {ASSET_KEY_TAG: asset_key.to_user_string()}),
            **(tags or {}),
        },
        retry_policy=retry_policy,
        pool=pool,
    )(claimed_batches)
