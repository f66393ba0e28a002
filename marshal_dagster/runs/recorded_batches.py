"""Batches that a run, or an earlier attempt of a step, recorded in Dagster's event log."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from dagster import DagsterEvent, DagsterEventType, DagsterInstance, MetadataValue, TableMetadataValue

if TYPE_CHECKING:
    from dagster import OpExecutionContext


_NOT_PROCESSED: Final = frozenset({"dropped", "possibly dropped"})


def committed_ranges(instance: DagsterInstance, run_id: str, group: str) -> set[tuple[str, object, object]]:
    """Return topic, partition and epoch of the ranges that a run recorded as processed."""
    found: set[tuple[str, object, object]] = set()
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.ASSET_MATERIALIZATION):
        event = entry.dagster_event
        metadata = event.step_materialization_data.materialization.metadata if event else {}
        of_group, table = metadata.get("group"), metadata.get("ranges")
        if of_group is None or of_group.value != group or not isinstance(table, TableMetadataValue):
            continue
        rows = [record.data for record in table.records if record.data.get("state") not in _NOT_PROCESSED]
        found |= {(str(row.get("topic")), row.get("partition"), row.get("epoch")) for row in rows}
    return found


def batches_of_earlier_attempts(
    context: "OpExecutionContext", group: str, topic: str
) -> list[tuple[str, Mapping[str, MetadataValue[Any]]]]:
    """Return the run id and metadata of each batch that earlier attempts of this step recorded, oldest first.

    Earlier attempts are those in this run, including attempts of an earlier run worker, and those in the runs that it
    re-executes. Runs up to the last one in which the step succeeded do not count, because its output had their batches.
    """
    instance, step_key = context.instance, context.get_step_execution_context().step.key

    def events(run_id: str, kind: DagsterEventType) -> list[DagsterEvent]:
        logged = (entry.dagster_event for entry in instance.all_logs(run_id, kind))
        return [event for event in logged if event is not None and event.step_key == step_key]

    run_ids, run_id = [context.run_id], context.run.parent_run_id
    while run_id is not None and not events(run_id, DagsterEventType.STEP_SUCCESS):
        run_ids.insert(0, run_id)
        run = instance.get_run_by_id(run_id)
        run_id = None if run is None else run.parent_run_id
    recorded = [
        (run_id, event.step_materialization_data.materialization.metadata)
        for run_id in run_ids
        for event in events(run_id, DagsterEventType.ASSET_MATERIALIZATION)
    ]
    wanted = {"group": group, "topic": topic}
    return [
        (run_id, metadata)
        for run_id, metadata in recorded
        if {name: metadata[name].value for name in wanted if name in metadata} == wanted
    ]
