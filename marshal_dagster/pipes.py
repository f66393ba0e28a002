"""Processing of a claimed batch by a script on another machine, which a client of Dagster Pipes starts.

The run holds the claims, sends the heartbeats while the client waits for the script, and commits what the script has
reported. The script's side is `marshal_dagster.batches.submitted`.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.batches.manifest import EXTRAS_KEY, judge_outcomes
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import DeliveryMode

if TYPE_CHECKING:
    from dagster import AssetExecutionContext, OpExecutionContext, PipesClient, PipesClientCompletedInvocation


def run_with_pipes(
    context: "OpExecutionContext | AssetExecutionContext",
    batch: ClaimedBatch,
    client: "PipesClient | Callable[[], PipesClient]",
    *,
    extras: Mapping[str, Any] | None = None,
    **arguments: Any,  # noqa: ANN401 - each client has its own
) -> "PipesClientCompletedInvocation | None":
    """Process a claimed batch with a script that a client of Dagster Pipes starts, and wait for it.

    The batch goes to the script in the extras of the context of Pipes, without secrets. The script uses
    `submitted_batch`, and its outcome comes back as a message of Pipes. The batch is committed at the end of its own
    `with` block, as one that the run has processed itself. What the script added to its `batch.metadata` is in
    `batch.metadata` here.

    Args:
        context: The context of the op or asset.
        batch: The batch, inside its own `with` block.
        client: Any client of Pipes, for example `PipesEMRClient`, `PipesGlueClient`, `PipesDatabricksClient` or
            `PipesK8sClient`. Or a class or function that makes one, because readers of messages in an object store
            serve one script only, and a run may process several batches.
        extras: Further extras for the script.
        **arguments: The client's own arguments of `run`, for example `run_job_flow_params`.

    Returns:
        What the client returned, or None if the batch has nothing to process: then no script is started.

    Raises:
        ConfigurationError: The delivery mode is `at_most_once`, which must check the Spark session before the commit.
        BatchAbortedError: The script reported no outcome, or one that cannot be used. Nothing is committed.
        Exception: The error with which the client reports that the script failed.
        MarshalError: As in `ClaimedBatch.plan` and `ClaimedBatch.check`.

    Example:
        ```python
        @marshal_asset(topic="orders", sink=RemoteSink("s3a://lake/orders"), with_frame=False)
        def orders(context, batch):
            run_with_pipes(context, batch, context.resources.emr, run_job_flow_params=JOB_FLOW)
        ```
    """
    if batch.mode is DeliveryMode.AT_MOST_ONCE:
        raise ConfigurationError(
            f"batch {batch.batch_id}: a script cannot process a batch in at_most_once, because the Spark session must "
            "be checked before the commit. Process the batch in the run (batch.read)"
        )
    if EXTRAS_KEY in (extras or {}):
        raise ConfigurationError(f"extras has the key {EXTRAS_KEY!r}, which is that of the batch: use another key")
    if batch.idle is not None or not batch.ranges:
        context.log.info(batch.idle.text if batch.idle else "the sink already has all ranges, so no script is started")
        return None
    batch.check()
    batch.plan()  # from now on a failure counts as an attempt, and a retry has the same ranges
    manifest = batch.manifest()
    # By its method, because a check of its class would import Dagster.
    is_made = hasattr(client, "run") and not isinstance(client, type)
    made: PipesClient = client if is_made else client()  # type: ignore[assignment,operator]
    invocation: PipesClientCompletedInvocation = made.run(
        context=context,
        extras={**(extras or {}), **manifest.to_extras()},
        # Some clients add the parameters of Pipes to these dictionaries, and a run may process several batches.
        **{name: deepcopy(value) if isinstance(value, dict | list) else value for name, value in arguments.items()},
    )
    outcome = judge_outcomes(manifest, invocation.get_custom_messages())
    batch.begin_processing()
    batch.metadata.update(outcome.metadata)
    if batch.mode is DeliveryMode.EFFECTIVELY_ONCE:
        batch.outcome = outcome.result
    return invocation
