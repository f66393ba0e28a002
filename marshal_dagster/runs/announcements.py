"""Announcements of at-most-once batches: written into a run before the commit, and read back.

Dagster's word is advice to the protocol: it lets a member revoke early or stop early, and never decides who owns what.
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
DROPPED: Final = "possibly_dropped"
"""Names of tables of ranges in observations of a data topic."""
_EVENTS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class AnnouncedRange:
    """A range that an at-most-once batch was about to commit before it processed it."""

    group: str
    topic: str
    partition: int
    epoch: int
    start: int
    end: int


_COLUMNS: Final = ("group", "topic", "partition", "epoch", "start", "end")


def announcer(context: "RunContext") -> Callable[[Sequence[ClaimedRange]], None]:
    """Return what writes an at-most-once batch's ranges into the run, where they outlive this process.

    See protocol.md, section 6.
    """

    def announce(ranges: Sequence[ClaimedRange]) -> None:
        """Write and read back.

        Raises `BatchAbortedError`, before anything is committed, when it cannot be read back.
        """
        rows = [AnnouncedRange(*(getattr(range_, name) for name in _COLUMNS)) for range_ in ranges]
        context.log_event(
            AssetObservation(
                asset_key=announcements_key(ranges[0].topic),
                description="At most once: about to commit these offsets before they are processed. Should the run die "
                "now, they are possibly dropped.",
                metadata={ANNOUNCED: announcement_table(rows)},
            )
        )
        if context.instance.has_run(context.run_id) and not _is_announced(context.instance, context.run_id, rows):
            raise BatchAbortedError(
                "the ranges of this at-most-once batch were written into the run's events but cannot be read back, so "
                "it would not be known afterwards what was dropped; nothing was committed. Is Dagster's event storage "
                "writing in batches (DAGSTER_EVENT_BATCH_SIZE)?"
            )

    return announce


def _is_announced(instance: DagsterInstance, run_id: str, rows: Sequence[AnnouncedRange]) -> bool:
    """Return whether the run's events have all of `rows`; the newest are read first, of a long run only those."""
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
    """Show `rows` as a table."""
    return table([Column(name, "string" if name in {"group", "topic"} else "int") for name in _COLUMNS], rows)


def announced_ranges(instance: DagsterInstance, run_id: str) -> Iterator[tuple[AnnouncedRange, float]]:
    """Yield what a run announced, oldest first, and when (unix seconds); events of another form are passed over."""
    for entry in instance.all_logs(run_id, of_type=DagsterEventType.ASSET_OBSERVATION):
        yield from ((row, entry.timestamp) for row in rows_in(entry))


def rows_in(entry: EventLogEntry, name: str = ANNOUNCED) -> Iterator[AnnouncedRange]:
    """Give the ranges in table `name` of an observation, what was announced or (`DROPPED`) reported as dropped."""
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
