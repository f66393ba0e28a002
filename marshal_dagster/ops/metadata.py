"""Tables of metadata, as Dagster's pages show them."""

from collections.abc import Mapping, Sequence
from typing import Final

from dagster import MetadataValue, TableColumn, TableMetadataValue, TableRecord, TableSchema

from marshal_dagster.batches import PartitionReport
from marshal_dagster.runs.abandoned_work import ExpectedKeyState

_COLUMNS: Final = (
    TableColumn("partition", "int", "The partition."),
    TableColumn("start", "int", "The first offset of the range."),
    TableColumn("end", "int", "The next offset to read after it."),
    TableColumn("offsets", "int", "How many offsets it spans; compaction and transactions leave fewer records."),
    TableColumn("lost", "int", "How many of these, from the start, retention had deleted before they were read."),
    TableColumn("state", "string", "What happened to the range."),
    TableColumn("lag_before", "int", "Offsets up to the end of the topic when the batch was planned."),
    TableColumn("lag_after", "int", "The same after the batch."),
    TableColumn("epoch", "int", "The fencing token of the claim."),
    TableColumn("generation", "int", "The generation of the position: another one once a person has set it."),
    TableColumn("replay", "bool", "Whether it was the open plan of an earlier owner."),
    TableColumn("topic", "string", "The data topic."),
)
_RANGES: Final = TableSchema([*_COLUMNS])
_COUNTED: Final = TableSchema(
    [*_COLUMNS, TableColumn("records", "int", "How many records the offsets of the range held, where it was read.")]
)


def ranges_table(reports: Sequence[PartitionReport], counts: Mapping[int, int] | None = None) -> TableMetadataValue:
    """Show the ranges of a batch; `counts` says how many records each partition's held."""
    records = [
        TableRecord(
            {
                "partition": report.range.partition,
                "start": report.range.start,
                "end": report.range.end,
                "offsets": report.range.width,
                "lost": report.range.first_readable - report.range.start,
                "state": report.state,
                "lag_before": report.lag_before,
                "lag_after": report.lag_after,
                "epoch": report.range.epoch,
                "generation": report.range.generation,
                "replay": report.is_replay,
                "topic": report.range.topic,
                **({} if counts is None else {"records": counts.get(report.range.partition, 0)}),
            }
        )
        for report in reports
    ]
    return MetadataValue.table(records, _RANGES if counts is None else _COUNTED)


def lost_offsets(reports: Sequence[PartitionReport]) -> int:
    """Count what retention has deleted of all ranges."""
    return sum(report.range.first_readable - report.range.start for report in reports)


def seen_table(seen: Sequence[ExpectedKeyState]) -> TableMetadataValue:
    """Show what a sensor saw."""
    names = tuple(ExpectedKeyState.model_fields)
    schema = TableSchema([TableColumn(name, "string" if name == "instance" else "int") for name in names])
    return MetadataValue.table([TableRecord({name: getattr(state, name) for name in names}) for state in seen], schema)
