"""Which batches a run or an earlier attempt of a step recorded."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dagster import DagsterEventType, DagsterInstance, MetadataValue, TableMetadataValue

if TYPE_CHECKING:
    from dagster import OpExecutionContext


_NOT_PROCESSED: Final = frozenset({"dropped", "possibly dropped"})


def committed_ranges(instance: DagsterInstance, run_id: str, group: str) -> set[tuple[str, object, object]]:
    """Give topic, partition and epoch of what a run recorded as done, as claimed-batch ops do behind each batch."""
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


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """What an attempt of a step recorded of a batch: in which run, and the metadata."""

    run_id: str
    metadata: Mapping[str, MetadataValue[Any]]


def batches_of_earlier_attempts(context: "OpExecutionContext", group: str, topic: str) -> list[RecordedBatch]:
    """Give each batch that earlier attempts of this step recorded, the oldest first.

    These are the attempts in this run, those of an earlier run worker of it too, and those in the runs that it
    re-executes, back to the last one in which the step succeeded: what that did was handed on.
    """
    instance, step_key = context.instance, context.get_step_execution_context().step.key
    found, run_id = _recorded(instance, context.run_id, step_key), context.run.parent_run_id
    while run_id is not None and not _has_succeeded(instance, run_id, step_key):
        found = [*_recorded(instance, run_id, step_key), *found]
        run = instance.get_run_by_id(run_id)
        run_id = None if run is None else run.parent_run_id
    wanted = {"group": group, "topic": topic}
    return [
        one for one in found if {name: one.metadata[name].value for name in wanted if name in one.metadata} == wanted
    ]


def _recorded(instance: DagsterInstance, run_id: str, step_key: str) -> list[RecordedBatch]:
    events = (entry.dagster_event for entry in instance.all_logs(run_id, DagsterEventType.ASSET_MATERIALIZATION))
    return [
        RecordedBatch(run_id, event.step_materialization_data.materialization.metadata)
        for event in events
        if event is not None and event.step_key == step_key
    ]


def _has_succeeded(instance: DagsterInstance, run_id: str, step_key: str) -> bool:
    events = (entry.dagster_event for entry in instance.all_logs(run_id, DagsterEventType.STEP_SUCCESS))
    return any(event is not None and event.step_key == step_key for event in events)
