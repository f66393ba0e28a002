"""The job that publishes the rows of an outbox and then ends.

Use it where no harvester runs as a service, or to empty an outbox before maintenance.
"""

import time
from collections.abc import Mapping

from dagster import ExecutorDefinition, Failure, JobDefinition, OpExecutionContext, in_process_executor, job, op

from marshal_dagster.errors import MarshalError
from marshal_dagster.resources.claimer import resource_of
from marshal_dagster.resources.outbox import OutboxResource, backlog_metadata, backlog_text, parked_advice, parked_text
from marshal_dagster.runs.log_forwarding import logs_to_run


def build_outbox_drain_job(
    *,
    name: str = "drain_outbox",
    outbox_key: str = "outbox",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that publishes the rows that an outbox has when the run starts.

    If a harvester service publishes at the same time, the run waits until the service has published these rows. If rows
    are set aside because they cannot be published, the run fails after all other rows are published. This includes rows
    that a service sets aside meanwhile. If rows were set aside before, the run logs a warning, or fails if it published
    nothing. The counts are in the metadata of the run.

    Args:
        name: The name of the job.
        outbox_key: The key of the `OutboxResource`.
        executor_def: The executor (default: rows are published in the run worker itself).
        tags: Tags of the job's runs.

    Returns:
        The job, for `Definitions(jobs=[...])`.

    Example:
        ```python
        drain = build_outbox_drain_job()
        sensor = build_outbox_backlog_sensor(drain, max_backlog_age_s=60)
        ```
    """

    def drain(context: OpExecutionContext) -> None:
        """Publish the rows of the outbox."""
        outbox = resource_of(OutboxResource, context.resources, outbox_key)
        harvester, start_s = outbox.harvester(), time.monotonic()
        try:
            with logs_to_run(context):
                before = outbox.status()
                context.log.info(backlog_text(outbox, before))
                published = harvester.drain()
                after = outbox.status()
        except MarshalError as error:
            raise Failure(str(error)) from None  # without a traceback
        parked = max(harvester.counts.parked, after.parked - before.parked)
        context.add_output_metadata(
            {
                "published": published,
                "set aside": parked,
                "seconds": round(time.monotonic() - start_s, 3),
                **backlog_metadata(after),
            }
        )
        if parked:
            raise Failure(
                f"outbox {outbox.outbox!r}: {parked} rows cannot be published and are set aside; all others are "
                f"published. {parked_advice(outbox)}",
                allow_retries=False,
            )
        if after.parked and not published:
            raise Failure(f"outbox {outbox.outbox!r}: {parked_text(outbox, after.parked)}", allow_retries=False)
        if after.parked:
            context.log.warning("outbox %r: %s", outbox.outbox, parked_text(outbox, after.parked))

    work = op(name=f"{name}_op", required_resource_keys={outbox_key})(drain)

    def do() -> None:
        work()

    about = "Publishes the rows of the outbox, then ends."
    return job(name=name, description=about, executor_def=executor_def, tags=dict(tags or {}))(do)
