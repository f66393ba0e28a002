"""The outcome of an execution, and the metadata that records batches in Dagster.

The numbers and tables here appear on Dagster's pages. A retried step reads them back to learn which batches its earlier
attempts completed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dagster import AssetObservation, MetadataValue, TableMetadataValue

from marshal_dagster.batches import ClaimedBatch, PartitionReport
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.runs.abandoned_work import ExpectedKeyState
from marshal_dagster.runs.tables import Column, table


class ExecutionOutcome(StrEnum):
    """The outcome of one execution of the op: that it completed batches, or why it completed none."""

    DONE = "done"
    """At least one batch was completed."""
    PAUSED = "paused"
    """An operator paused the group."""
    HELD = "held"
    """Other members hold all partitions that have unread messages."""
    DRAINED = "drained"
    """There are no unread messages."""
    GIVEN_UP = "given_up"
    """Only exhausted plans are left, which failed too many times."""
    NOT_ASSIGNED = "not_assigned"
    """The coordinator of the group assigned no partition to this member."""
    TOPIC_MISSING = "topic_missing"
    """The data topic does not exist."""


@dataclass(frozen=True, slots=True)
class CompletedBatch:
    """One completed batch."""

    batch_id: str
    delivery: DeliveryMode
    ranges: TableMetadataValue
    numbers: Mapping[str, float]
    """The seconds of each phase, offsets, lag, and the rows written if the sink reports them."""


@dataclass(frozen=True, slots=True)
class BatchesResult:
    """The output of the op, for ops that depend on it.

    Example:
        ```python
        @op
        def report(context, result: BatchesResult):
            context.log.info(f"{result.offsets} offsets in {len(result.batch_ids)} batches, lag {result.lag}")
        ```
    """

    topic: str
    """The data topic."""
    group: str
    """The group for which the batches were committed."""
    outcome: ExecutionOutcome
    """Always `done`, because the op has no output if there was nothing to do."""
    batch_ids: tuple[str, ...]
    """The ids of the completed batches, in their order."""
    offsets: int
    """The number of offsets of all batches together."""
    lag: int
    """The number of unread offsets after the last batch."""


_NUMBERS: Final = (
    "offsets",
    "lag",
    "lost_offsets",
    "records",
    "waiting_s",
    "starting_spark_s",
    "reading_s",
    "processing_s",
    "committing_s",
    "rows",
)
"""The numbers in the metadata of a batch, which Dagster plots over time."""

OF_RUN: Final = ("batches", "batches_of_earlier_attempts", "ended", "seen")
"""The names that only the last batch of an asset's run has, because they are about the whole run."""
_OTHERS: Final = ("assigned", "batch_id", "batch_ids", "delivery", "group", "output", "ranges", "topic", *OF_RUN)
"""The other names in the metadata of a batch."""


def own_metadata(batch: ClaimedBatch) -> dict[str, Any]:
    """Return what the function or the script of a batch has added; names of the library get the prefix `own/`.

    What Dagster cannot store becomes text, because the batch is committed already and has to be recorded.
    """
    taken = {*_NUMBERS, *_OTHERS}
    return {
        f"own/{name}" if name in taken else str(name): value if _is_storable(value) else str(value)
        for name, value in batch.metadata.items()
    }


def _is_storable(value: object) -> bool:
    try:
        AssetObservation("any", metadata={"any": value})  # type: ignore[dict-item] # it may have any type
    except Exception:  # noqa: BLE001 - any object has been passed, and the batch is committed
        return False
    return True


_DONE: Final = frozenset({"committed", "skipped"})
"""The states of ranges that are in the number of offsets. The others are at most committed, but not processed."""


def completed_batch(batch: ClaimedBatch, records: Mapping[int, int] | None) -> CompletedBatch:
    """Return the numbers and ranges of a completed batch; `records` has the count of each partition, or is None."""
    reports, phases = tuple(batch.report()), batch.phases
    undone = [report for report in reports if report.state not in _DONE]
    numbers: dict[str, float] = {
        "offsets": sum(report.range.width for report in reports if report.state in _DONE),
        "lag": batch.lag_after + sum(report.range.width for report in undone if report.state != "dropped"),
        "lost_offsets": lost_offsets(reports),
        **({} if records is None else {"records": sum(records.values())}),
        "waiting_s": round(phases.waiting_s, 3),
        "starting_spark_s": round(phases.starting_spark_s, 3),
        "reading_s": round(phases.reading_s, 3),
        "processing_s": round(max(0.0, phases.processing_s - phases.starting_spark_s), 3),
        "committing_s": round(phases.committing_s, 3),
    }
    if batch.outcome is not None and len(batch.outcome.rows) == len(batch.outcome.taken):
        numbers["rows"] = sum(batch.outcome.rows.values())
    return CompletedBatch(batch.batch_id, batch.mode, ranges_table(reports, records), numbers)


def parse_completed_batch(metadata: Mapping[str, MetadataValue[Any]]) -> CompletedBatch | None:
    """Return the batch that this metadata records; None if the metadata has another form."""
    batch_id, delivery, ranges = (metadata.get(name) for name in ("batch_id", "delivery", "ranges"))
    numbers = {name: metadata[name].value for name in _NUMBERS if name in metadata}
    if batch_id is None or delivery is None or not isinstance(ranges, TableMetadataValue):
        return None
    if not {"offsets", "lag"} <= numbers.keys():
        return None
    return CompletedBatch(str(batch_id.value), DeliveryMode(delivery.value), ranges, numbers)


_COLUMNS: Final[Sequence[Column[PartitionReport]]] = (
    Column("partition", "int", "The partition.", lambda report: report.range.partition),
    Column("start", "int", "The first offset of the range.", lambda report: report.range.start),
    Column("end", "int", "The next offset after the range.", lambda report: report.range.end),
    Column(
        "offsets",
        "int",
        "Number of offsets. There are fewer records after compaction or transactions.",
        lambda report: report.range.width,
    ),
    Column(
        "lost",
        "int",
        "Number of offsets at the start of the range that retention deleted before they were read.",
        lambda report: report.range.first_readable - report.range.start,
    ),
    Column("state", "string", "What happened to the range."),
    Column("lag_before", "int", "Offsets from the position to the end of the partition when the batch was planned."),
    Column("lag_after", "int", "Offsets from the position to the end of the partition after the batch."),
    Column("epoch", "int", "The fencing token of the claim.", lambda report: report.range.epoch),
    Column(
        "generation",
        "int",
        "The generation of the position. It changes when an operator sets the position.",
        lambda report: report.range.generation,
    ),
    Column(
        "replay", "bool", "Whether the range was the open plan of an earlier owner.", lambda report: report.is_replay
    ),
    Column("topic", "string", "The data topic.", lambda report: report.range.topic),
)


def ranges_table(reports: Sequence[PartitionReport], counts: Mapping[int, int] | None = None) -> TableMetadataValue:
    """Return the ranges of a batch as a table; `counts` has the number of records of each partition, or is None."""
    if counts is None:
        return table(_COLUMNS, reports)
    about = "Number of records in the range, 0 if it was not read."
    records: Column[PartitionReport] = Column(
        "records", "int", about, lambda report: counts.get(report.range.partition, 0)
    )
    return table([*_COLUMNS, records], reports)


def lost_offsets(reports: Sequence[PartitionReport]) -> int:
    """Return how many offsets of the ranges retention deleted before they were read."""
    return sum(report.range.first_readable - report.range.start for report in reports)


def seen_table(seen: Sequence[ExpectedKeyState]) -> TableMetadataValue:
    """Return what the stale-claim sensor saw as a table."""
    names = ExpectedKeyState.model_fields
    return table([Column(name, "string" if name == "instance" else "int") for name in names], seen)
