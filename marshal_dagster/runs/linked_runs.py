"""Links between a run that did not finish a batch and the run that repeats it, in the tags and logs of both."""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from dagster import DagsterInstance, DagsterRun, MetadataValue

if TYPE_CHECKING:
    from marshal_dagster.runs.names import RunContext

REPEATS_TAG: Final = "marshal/repeats"
"""Tag of a run: the ids of the runs whose unfinished batches it repeats, joined with commas."""
REPEATED_BY_TAG: Final = "marshal/repeated_by"
"""Tag of a run that did not finish a batch: the id of the run that repeats it."""
_MOST_RUNS: Final = 20
_LOG: Final = logging.getLogger(__name__)


def link_repeated_runs(context: "RunContext", run_ids: Collection[str], batch: str) -> None:
    """Link this run with the runs whose unfinished plans `batch` repeats, on the pages of both. Never fails.

    A run that is not in Dagster's storage, and this run itself, are left out. Each page gets a tag, and a line in the
    run's events with a link to the other run.

    Args:
        context: The context of this run's op.
        run_ids: The ids of the earlier runs.
        batch: The id of the batch.
    """
    instance = context.instance
    try:
        if not instance.has_run(context.run_id):
            return
        others = [run_id for run_id in sorted(set(run_ids) - {context.run_id})[:_MOST_RUNS] if instance.has_run(run_id)]
        if others:
            _link(instance, context.run, others, batch)
    except Exception:  # noqa: BLE001 - a link is only for people, so it must not end a batch
        _LOG.warning("batch %s: the links to the runs %s cannot be stored", batch, sorted(run_ids), exc_info=True)


def _link(instance: DagsterInstance, run: DagsterRun, others: Collection[str], batch: str) -> None:
    instance.add_run_tags(run.run_id, {REPEATS_TAG: ",".join(others)})
    for run_id in others:
        earlier = instance.get_run_by_id(run_id)
        if earlier is None:
            continue
        instance.add_run_tags(run_id, {REPEATED_BY_TAG: run.run_id})
        _report(instance, earlier, f"Run {run.run_id} repeats a batch that this run did not finish.", run.run_id, batch)
        _report(instance, run, f"Repeats a batch that run {run_id} did not finish.", run_id, batch)


def _report(instance: DagsterInstance, run: DagsterRun, text: str, other: str, batch: str) -> None:
    """Add a line with a link to the events of `run`."""
    from dagster._core.events import EngineEventData  # has no public name

    metadata = {
        "run": MetadataValue.dagster_run(other),
        "path": MetadataValue.text(f"/runs/{other}"),
        "batch": MetadataValue.text(batch),
    }
    instance.report_engine_event(text, run, EngineEventData(metadata=metadata))
