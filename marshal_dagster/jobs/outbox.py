"""The job that publishes what an outbox has, and ends."""

import time
from collections.abc import Mapping

from dagster import ExecutorDefinition, Failure, JobDefinition, OpExecutionContext, in_process_executor, job, op

from marshal_dagster.errors import MarshalError
from marshal_dagster.resources.claimer import resource_of
from marshal_dagster.resources.outbox import OutboxResource, backlog_metadata, backlog_text
from marshal_dagster.runs.log_forwarding import logs_to_run


def build_outbox_drain_job(
    *,
    name: str = "drain_outbox",
    outbox_key: str = "outbox",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that publishes what the outbox of resource `outbox_key` has when it starts, and ends.

    Where a service publishes at the same time, it waits until that has done it. Rows that were set aside meanwhile fail
    the run once all else is published; how many of what stands in its metadata.
    """

    def drain(context: OpExecutionContext) -> None:
        """Publish what is in the outbox."""
        outbox = resource_of(OutboxResource, context.resources, outbox_key)
        harvester, start_s = outbox.harvester(), time.monotonic()
        try:
            with logs_to_run(context):
                context.log.info(backlog_text(outbox.status()))
                published = harvester.drain()
                after = outbox.status()
        except MarshalError as error:
            raise Failure(str(error)) from None  # in one line
        parked = harvester.counts.parked
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
                f"{parked} rows of outbox {outbox.outbox!r} were set aside: `marshal-dagster outbox parked list` shows "
                "why, `outbox parked retry` puts them back; all else is published",
                allow_retries=False,
            )

    work = op(name=f"{name}_op", required_resource_keys={outbox_key})(drain)

    def do() -> None:
        work()

    about = "Publishes what is in the outbox, and ends."
    return job(name=name, description=about, executor_def=executor_def, tags=dict(tags or {}))(do)
