"""Announcements of at-most-once batches: before a run commits, it records the ranges in Dagster and reads them back.

If the run dies, sensors find in its announcements which ranges it possibly dropped (protocol.md, section 6, "At most
once").
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dagster import AssetObservation, DagsterEventType, DagsterInstance, EventLogEntry, TableMetadataValue

from marshal_dagster.errors import BatchAbortedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.runs.names import announcements_key
from marshal_dagster.runs.tables import Column, table

if TYPE_CHECKING:
    from marshal_dagster.runs.names import RunContext


ANNOUNCED: Final = "announced"
"""The metadata key for announced ranges in an observation of a data topic."""
DROPPED: Final = "possibly_dropped"
"""The metadata key for ranges that were reported as possibly dropped."""
_EVENTS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class AnnouncedRange:
    """A range that an at-most-once batch was going to commit before processing it."""

    group: str
    topic: str
    partition: int
    epoch: int
    start: int
    end: int


_COLUMNS: Final = ("group", "topic", "partition", "epoch", "start", "end")


def announcer(context: "RunContext") -> Callable[[Sequence[ClaimedRange]], None]:
    """Return a function that records the ranges of an at-most-once batch in Dagster's events of the run.

    The events outlive this process. See protocol.md, section 6.
    """

    def announce(ranges: Sequence[ClaimedRange]) -> None:
        """Record the ranges and read them back.

        Raises `BatchAbortedError` if they cannot be read back. Nothing is committed then.
        """
        rows = [AnnouncedRange(*(getattr(range_, name) for name in _COLUMNS)) for range_ in ranges]
        context.log_event(
            AssetObservation(
                asset_key=announcements_key(ranges[0].topic),
                description="At most once: the run commits these offsets before it processes them. If it dies now, "
                "they are possibly dropped.",
                metadata={ANNOUNCED: announcement_table(rows)},
            )
        )
        if context.instance.has_run(context.run_id) and not _is_announced(context.instance, context.run_id, rows):
            raise BatchAbortedError(
                f"group {rows[0].group!r}, topic {rows[0].topic!r}: the ranges of this at-most-once batch are "
                "recorded in the run's events but cannot be read back, so nothing was committed. If "
                "DAGSTER_EVENT_BATCH_SIZE is set, unset it: Dagster must store events at once"
            )

    return announce


def _is_announced(instance: DagsterInstance, run_id: str, rows: Sequence[AnnouncedRange]) -> bool:
    """Return whether the run's events have all of `rows`. The newest events are read first."""
    missing, cursor = set(rows), None
    while missing:
        page = instance.get_records_for_run(
            run_id, cursor, DagsterEventType.ASSET_OBSERVATION, limit=_EVENTS_AT_ONCE, ascending=False
        )
        missing -= {row for record in page.records for row in rows_in(record.event_log_entry)}
        if not page.has_more:
            break
        cursor = page.cursor
    return not missing


def announcement_table(rows: Sequence[AnnouncedRange]) -> TableMetadataValue:
    """Return the ranges as a table."""
    return table([Column(name, "string" if name in {"group", "topic"} else "int") for name in _COLUMNS], rows)


def announced_ranges(instance: DagsterInstance, run_id: str) -> Iterator[tuple[AnnouncedRange, float]]:
    """Yield the announced ranges of a run, oldest first, with their times (unix s); skip events of another form."""
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.ASSET_OBSERVATION):
        yield from ((row, entry.timestamp) for row in rows_in(entry))


def rows_in(entry: EventLogEntry, name: str = ANNOUNCED) -> Iterator[AnnouncedRange]:
    """Yield the ranges in table `name` of an observation: `ANNOUNCED`, or `DROPPED` for reported ones."""
    event = entry.dagster_event
    if event is None or event.event_type is not DagsterEventType.ASSET_OBSERVATION:
        return
    found = event.asset_observation_data.asset_observation.metadata.get(name)
    if isinstance(found, TableMetadataValue):
        yield from (row for record in found.records if (row := _announced(record.data)) is not None)


def _announced(data: Mapping[str, object]) -> AnnouncedRange | None:
    group, topic, *numbers = (data.get(name) for name in _COLUMNS)
    if isinstance(group, str) and isinstance(topic, str) and all(isinstance(number, int) for number in numbers):
        return AnnouncedRange(group, topic, *numbers)  # type: ignore[arg-type] # each number is an int
    return None
