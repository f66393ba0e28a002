"""The search for runs of at most once that have ended and possibly dropped ranges (`ops.dropped_ranges`)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dagster import (
    AssetRecordsFilter,
    DagsterInstance,
    DagsterRun,
    EventLogRecord,
    RunsFilter,
)

from marshal_dagster.ops.dropped_ranges import DroppedRanges, possibly_dropped
from marshal_dagster.protocol.state import DataPartitionId, Key
from marshal_dagster.protocol.world import World
from marshal_dagster.runs.announcements import (
    rows_in,
)
from marshal_dagster.runs.names import GROUP_TAG, announcements_key, run_of
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
