"""Detection of ranges that at-most-once runs possibly dropped.

These are ranges that a run announced and committed, but did not record as processed. Announcements are observations in
Dagster's event log (protocol.md, section 6, "At most once"), so they are found even if other members hold the
partitions now. Reports are observations too, so no sensor repeats the report of another one.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dagster import (
    AssetObservation,
    AssetRecordsFilter,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    EventLogEntry,
    EventLogRecord,
    MetadataValue,
    RunsFilter,
)

from marshal_dagster.protocol.range_set import is_done
from marshal_dagster.protocol.state import DataPartitionId, Key
from marshal_dagster.protocol.world import World
from marshal_dagster.runs.abandoned_work import first_ten
from marshal_dagster.runs.announcements import (
    DROPPED,
    AnnouncedRange,
    announced_ranges,
    announcement_table,
    rows_in,
)
from marshal_dagster.runs.names import GROUP_TAG, announcements_key, run_of
from marshal_dagster.runs.recorded_batches import committed_ranges
from marshal_dagster.runs.status import FINISHED

OBSERVATIONS_A_TICK: Final = 500
"""The maximum number of observations that a tick reads of each topic."""
RUNS_A_TICK: Final = 20
"""The maximum number of runs that a tick examines for dropped ranges."""
MOST_WATCHED: Final = 200
"""The maximum number of runs that a sensor watches."""
TIME_TO_RECORD_S: Final = 60
"""After this time without a claim, in seconds, an unfinished run counts as dead.

The time is needed because a run records a batch only after it has released the claims of the batch.
"""
_PAGE: Final = 200
_MOST_PAGES: Final = 10


@dataclass(frozen=True, slots=True)
class DroppedRanges:
    """The ranges that one run possibly dropped."""

    run: DagsterRun
    rows: Sequence[AnnouncedRange]

    def describe(self) -> str:
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
) -> DroppedRanges:
    """Return the ranges that `run`, which has ended, announced and committed, but possibly did not process.

    The group's keys show which ranges were committed. They are read only if the run announced something. Claimed-batch
    ops record each batch after it is processed. Other ops record nothing: for them only the last range of each
    partition counts, and none if the run succeeded. Two kinds of ranges are left out: those that a later owner
    announced again, because then they were not committed, and those that were reported before.
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
    return DroppedRanges(run, [row for rows in committed.values() for row in _not_settled(instance, rows)])


def _not_settled(instance: DagsterInstance, rows: Sequence[tuple[float, AnnouncedRange]]) -> list[AnnouncedRange]:
    """Return the ranges without those that later observations of the topic announce again or report."""
    lost = [row for _, row in rows]
    for entry in _observations(instance, lost[0].topic, min(at_s for at_s, _ in rows)):
        reported, announced = set(rows_in(entry, DROPPED)), list(rows_in(entry))
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


@dataclass(frozen=True, slots=True)
class KeysView:
    """A copy of a group's keys at one moment, used after the lock on the world state is released."""

    keys: dict[DataPartitionId, Key]
    live: set[str]
    """The ids of runs that hold a live claim."""
    stale: set[str]
    """The ids of runs that hold a stale claim."""

    @classmethod
    def of(cls, world: World, group: str, wall_ms: int) -> "KeysView":
        """Copy all keys of `group`; live and stale are decided as in `abandoned_partitions`."""
        view = cls({}, set(), set())
        for name, place, state, key in world.keys():  # noqa: SIM118 - `world` is not a dict
            if name != group:
                continue
            view.keys[place] = replace(key)
            now_ms = world.advice_time_ms(group, place[0], wall_ms)
            interval_ms = state.settings.heartbeat_interval_ms
            claims = [(key.owner, state.is_live(key, now_ms))]
            claims += [(range_.owner, range_.is_live(now_ms, interval_ms)) for range_ in key.ranges]
            for owner, is_live in claims:
                if owner is not None:
                    (view.live if is_live else view.stale).add(run_of(owner.instance))
        return view


@dataclass(slots=True)
class DroppedRangeWatcher:
    """Watches the runs of a group that announce ranges, tick by tick, until each has been examined once."""

    instance: DagsterInstance
    group: str
    looked_at: dict[str, int]
    """For each data topic, Dagster's storage id of the last observation that was searched for announcements."""
    looked_at_runs: dict[str, str]
    """For each data topic, the id of the run that made this observation."""
    watched: dict[str, int]
    """The runs that announced ranges and are not examined yet, by their ids.

    The value is the time at which the run was first seen without a claim, in unix seconds; 0 if it holds a claim.
    """
    given_up: list[str] = field(default_factory=list)
    """The ids of unfinished runs that are no longer watched, because too many newer ones are."""

    def look(self, topics: Sequence[str], view: KeysView) -> list[DroppedRanges]:
        """Read new announcements, and return what up to 20 ended or vanished runs possibly dropped."""
        for topic in topics:
            self._find_announcements(topic)
        found = []
        for run in self._over(view)[:RUNS_A_TICK]:
            del self.watched[run.run_id]
            drops = possibly_dropped(self.instance, self.group, run, lambda: view.keys, topics)
            if drops.rows:
                found.append(drops)
        while len(self.watched) > MOST_WATCHED:
            oldest = next(iter(self.watched))
            del self.watched[oldest]
            self.given_up.append(oldest)
        return found

    def _find_announcements(self, topic: str) -> None:
        room = min(OBSERVATIONS_A_TICK, max(1, MOST_WATCHED - len(self.watched)))
        for record in self._observations_after(topic, self._last_seen(topic), room):
            entry = record.event_log_entry
            self.looked_at[topic], self.looked_at_runs[topic] = record.storage_id, entry.run_id
            if entry.run_id and any(row.group == self.group for row in rows_in(entry)):
                self.watched.setdefault(entry.run_id, 0)

    def _last_seen(self, topic: str) -> int | None:
        """Return the storage id of the last observation that was read; None if Dagster has deleted it.

        SQLite reuses the ids of deleted events, so all observations are then read again. Reports are not repeated.
        """
        last = self.looked_at.get(topic)
        if last is None:
            return None
        for found in self._observations_after(topic, last - 1, 1):
            run_id = found.event_log_entry.run_id
            if found.storage_id == last and self.looked_at_runs.get(topic, run_id) == run_id:
                return last
        del self.looked_at[topic]
        self.looked_at_runs.pop(topic, None)
        return None

    def _observations_after(self, topic: str, storage_id: int | None, most: int) -> Sequence[EventLogRecord]:
        wanted = AssetRecordsFilter(announcements_key(topic), after_storage_id=storage_id)
        return self.instance.fetch_observations(wanted, most, ascending=True).records

    def _over(self, view: KeysView) -> list[DagsterRun]:
        """Return the watched runs that have ended. Runs that Dagster has deleted are no longer watched."""
        if not self.watched:
            return []
        known = {run.run_id: run for run in self.instance.get_runs(RunsFilter(run_ids=list(self.watched)))}
        self.watched = {run_id: since_s for run_id, since_s in self.watched.items() if run_id in known}
        return [known[run_id] for run_id in list(self.watched) if self._is_over(known[run_id], view)]

    def _is_over(self, run: DagsterRun, view: KeysView) -> bool:
        """Return whether the run has ended. Besides Dagster the log decides it, because Dagster may miss a dead run."""
        if run.run_id in view.live:
            self.watched[run.run_id] = 0
            return False
        if run.status in FINISHED or run.run_id in view.stale:
            return True
        if GROUP_TAG not in run.tags:
            return False
        now_s = int(time.time())
        self.watched[run.run_id] = self.watched[run.run_id] or now_s
        return now_s - self.watched[run.run_id] >= TIME_TO_RECORD_S
