"""The job that publishes what an outbox has, and ends."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
        _drain(context, resource_of(OutboxResource, context.resources, outbox_key))

    work = op(name=f"{name}_op", required_resource_keys={outbox_key})(drain)

    def do() -> None:
        work()

    about = "Publishes what is in the outbox, and ends."
    return job(name=name, description=about, executor_def=executor_def, tags=dict(tags or {}))(do)


def _drain(context: OpExecutionContext, outbox: OutboxResource) -> None:
    harvester, start_s = outbox.harvester(), time.monotonic()
    with logs_to_run(context), _in_one_line():
        before = outbox.status()
        context.log.info(backlog_text(before))
        published = harvester.drain()
        after = outbox.status()
    context.add_output_metadata(
        {
            "published": published,
            "set aside": harvester.counts.parked,
            "seconds": round(time.monotonic() - start_s, 3),
            **backlog_metadata(after),
        }
    )
    if harvester.counts.parked:
        raise Failure(
            f"{harvester.counts.parked} rows of outbox {outbox.outbox!r} were set aside: `marshal-dagster outbox "
            "parked list` shows why, `outbox parked retry` puts them back; all else is published",
            allow_retries=False,
        )


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except MarshalError as error:
        raise Failure(str(error)) from None
