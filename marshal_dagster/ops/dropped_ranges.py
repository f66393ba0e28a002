"""Ranges that at-most-once runs possibly dropped.

These are ranges that a run announced and committed, but did not record as processed. Announcements are observations in
Dagster's event log (protocol.md, section 6, "At most once"), so they are found even if other members hold the
partitions now. Reports are observations too, so no sensor repeats the report of another one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dagster import (
    AssetObservation,
    AssetRecordsFilter,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    EventLogEntry,
    MetadataValue,
    OpExecutionContext,
)

from marshal_dagster.protocol.range_set import is_done
from marshal_dagster.protocol.state import DataPartitionId, Key
from marshal_dagster.runs.abandoned_work import first_ten
from marshal_dagster.runs.announcements import (
    DROPPED,
    AnnouncedRange,
    announced_ranges,
    announcement_table,
    rows_in,
)
from marshal_dagster.runs.names import GROUP_TAG, announcements_key
from marshal_dagster.runs.recorded_batches import committed_ranges

_PAGE: Final = 200
_MOST_PAGES: Final = 10


@dataclass(frozen=True, slots=True)
class DroppedRanges:
    """The ranges that one run possibly dropped."""

    run: DagsterRun
    rows: Sequence[AnnouncedRange]

    def describe(self) -> str:
        """Return the first ranges, and the run."""
        ranges = [f"{row.topic}/{row.partition}: possibly dropped [{row.start}, {row.end})" for row in self.rows]
        return (
            f"{first_ten(ranges)}: run {self.run.run_id} ({self.run.status.value}) committed these offsets and has no "
            "record of processing them"
        )

    def observations(self) -> list[AssetObservation]:
        """Return the observations that report the ranges, one for each partition."""
        by_partition: dict[tuple[str, int], list[AnnouncedRange]] = {}
        for row in self.rows:
            by_partition.setdefault((row.topic, row.partition), []).append(row)
        return [
            AssetObservation(
                announcements_key(topic),
                description="At most once: these offsets were committed, but possibly not processed.",
                metadata={
                    DROPPED: announcement_table(rows),
                    "possibly_dropped_offsets": sum(row.end - row.start for row in rows),
                    "group": rows[0].group,
                    "run": MetadataValue.dagster_run(self.run.run_id),
                },
            )
            for (topic, _), rows in by_partition.items()
        ]


def possibly_dropped(
    instance: DagsterInstance,
    group: str,
    run: DagsterRun,
    read_keys: Callable[[], Mapping[DataPartitionId, Key]],
    topics: Collection[str] | None = None,
    *,
    also_reported: bool = False,
) -> DroppedRanges:
    """Return the ranges that `run` announced and committed, but possibly did not process. It must not work on them now.

    The group's keys show which ranges were committed. They are read only if the run announced something. Claimed-batch
    ops record each batch after it is processed. Other ops record nothing: for them only the last range of each
    partition counts, and none if the run succeeded. Two kinds of ranges are left out: those that a later owner
    announced again, because then they were not committed, and those that were reported before unless `also_reported`.
    """
    rows = [(at_s, row) for row, at_s in announced_ranges(instance, run.run_id) if row.group == group]
    if GROUP_TAG not in run.tags:
        last = {(row.topic, row.partition): (at_s, row) for at_s, row in rows}
        rows = [] if run.status is DagsterRunStatus.SUCCESS else list(last.values())
    done = committed_ranges(instance, run.run_id, group) if rows else set()
    keys: Mapping[DataPartitionId, Key] | None = None
    committed: dict[str, list[tuple[float, AnnouncedRange]]] = {}
    for at_s, row in rows:
        if (row.topic, row.partition, row.epoch) in done or (topics is not None and row.topic not in topics):
            continue
        keys = read_keys() if keys is None else keys
        key = keys.get((row.topic, row.partition))
        if key is not None and is_done(key, row.start, row.end):
            committed.setdefault(row.topic, []).append((at_s, row))
    unsettled = (_not_settled(instance, rows, also_reported=also_reported) for rows in committed.values())
    return DroppedRanges(run, [row for rows in unsettled for row in rows])


def dropped_by_earlier_attempts(
    context: OpExecutionContext, group: str, topic: str, read_keys: Callable[[], Mapping[DataPartitionId, Key]]
) -> DroppedRanges | None:
    """Return what earlier attempts of this step possibly dropped, such as one that was killed; None if nothing."""
    step_key = context.get_step_execution_context().step.key
    observed = context.instance.all_logs(context.run_id, of_type=DagsterEventType.ASSET_OBSERVATION)
    own = {row for entry in observed if entry.step_key == step_key for row in rows_in(entry)}
    if not own:
        return None
    found = possibly_dropped(context.instance, group, context.run, read_keys, {topic}, also_reported=True)
    rows = [row for row in found.rows if row in own]
    return DroppedRanges(context.run, rows) if rows else None


def _not_settled(
    instance: DagsterInstance, rows: Sequence[tuple[float, AnnouncedRange]], *, also_reported: bool
) -> list[AnnouncedRange]:
    """Return the ranges without those that later observations of the topic announce again or report."""
    lost = [row for _, row in rows]
    for entry in _observations(instance, lost[0].topic, min(at_s for at_s, _ in rows)):
        reported, announced = set() if also_reported else set(rows_in(entry, DROPPED)), list(rows_in(entry))
        lost = [
            row for row in lost if row not in reported and not any(_was_repositioned(row, later) for later in announced)
        ]
        if not lost:
            break
    return list(dict.fromkeys(lost))


def _was_repositioned(row: AnnouncedRange, later: AnnouncedRange) -> bool:
    same = (row.group, row.topic, row.partition) == (later.group, later.topic, later.partition)
    return same and later.epoch > row.epoch and later.start < row.end and row.start < later.end


def _observations(instance: DagsterInstance, topic: str, after_s: float) -> Iterator[EventLogEntry]:
    """Yield up to 2,000 observations of a topic after a time (unix seconds), oldest first."""
    wanted = AssetRecordsFilter(announcements_key(topic), after_timestamp=after_s)
    cursor = None
    for _ in range(_MOST_PAGES):
        page = instance.fetch_observations(wanted, _PAGE, cursor, ascending=True)
        yield from (record.event_log_entry for record in page.records)
        if not page.has_more:
            return
        cursor = page.cursor
