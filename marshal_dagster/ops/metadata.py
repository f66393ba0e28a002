"""What executions come to, and how batches are recorded as metadata that Dagster's pages show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dagster import MetadataValue, TableMetadataValue

from marshal_dagster.batches import ClaimedBatch, PartitionReport
from marshal_dagster.protocol.messages import DeliveryMode
from marshal_dagster.runs.abandoned_work import ExpectedKeyState
from marshal_dagster.runs.tables import Column, table


class ExecutionOutcome(StrEnum):
    """What an execution of the op came to: batches were done, or why there was none."""

    DONE = "done"
    PAUSED = "paused"
    HELD = "held"
    DRAINED = "drained"
    GIVEN_UP = "given_up"
    NOT_ASSIGNED = "not_assigned"
    TOPIC_MISSING = "topic_missing"


@dataclass(frozen=True, slots=True)
class CompletedBatch:
    """One batch that was carried out."""

    batch_id: str
    delivery: DeliveryMode
    ranges: TableMetadataValue
    numbers: Mapping[str, float]
    """Seconds of each phase, offsets, lag, and the rows written where the sink reports them."""


@dataclass(frozen=True, slots=True)
class BatchesResult:
    """What the op gives to ops that depend on it."""

    topic: str
    group: str
    outcome: ExecutionOutcome
    batch_ids: tuple[str, ...]
    offsets: int
    lag: int


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
"""What a batch is recorded with that plots over time."""


def completed_batch(batch: ClaimedBatch, records: Mapping[int, int] | None) -> CompletedBatch:
    """Return the numbers and ranges of a batch that is over; `records` has the count of each partition, if counted."""
    reports, phases = tuple(batch.report()), batch.phases
    numbers: dict[str, float] = {
        "offsets": sum(report.range.width for report in reports),
        "lag": batch.lag_after,
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
    """Read what a batch was recorded with; None for what is of another form."""
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
    Column("end", "int", "The next offset to read after it.", lambda report: report.range.end),
    Column(
        "offsets",
        "int",
        "How many offsets it spans; compaction and transactions leave fewer records.",
        lambda report: report.range.width,
    ),
    Column(
        "lost",
        "int",
        "How many of these, from the start, retention had deleted before they were read.",
        lambda report: report.range.first_readable - report.range.start,
    ),
    Column("state", "string", "What happened to the range."),
    Column("lag_before", "int", "Offsets up to the end of the topic when the batch was planned."),
    Column("lag_after", "int", "The same after the batch."),
    Column("epoch", "int", "The fencing token of the claim.", lambda report: report.range.epoch),
    Column(
        "generation",
        "int",
        "The generation of the position: another one once a person has set it.",
        lambda report: report.range.generation,
    ),
    Column("replay", "bool", "Whether it was the open plan of an earlier owner.", lambda report: report.is_replay),
    Column("topic", "string", "The data topic.", lambda report: report.range.topic),
)


def ranges_table(reports: Sequence[PartitionReport], counts: Mapping[int, int] | None = None) -> TableMetadataValue:
    """Show the ranges of a batch; `counts` has how many records each partition's held."""
    if counts is None:
        return table(_COLUMNS, reports)
    about = "How many records the offsets of the range held, where it was read."
    records: Column[PartitionReport] = Column(
        "records", "int", about, lambda report: counts.get(report.range.partition, 0)
    )
    return table([*_COLUMNS, records], reports)


def lost_offsets(reports: Sequence[PartitionReport]) -> int:
    """Count what retention has deleted of all ranges."""
    return sum(report.range.first_readable - report.range.start for report in reports)


def seen_table(seen: Sequence[ExpectedKeyState]) -> TableMetadataValue:
    """Show what a sensor saw."""
    names = ExpectedKeyState.model_fields
    return table([Column(name, "string" if name == "instance" else "int") for name in names], seen)
