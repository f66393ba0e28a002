"""Information about the demo's runs from the Dagster instance."""

import re
from dataclasses import dataclass

import dagster as dg

_PID = re.compile(r"\(pid: (\d+)\)")


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one Dagster instance."""

    instance: dg.DagsterInstance

    def all(self) -> list[dg.DagsterRun]:
        """Return every run, the newest first."""
        return list(self.instance.get_runs())

    def get(self, run_id: str) -> dg.RunRecord:
        """Return a run with its times."""
        record = self.instance.get_run_record_by_id(run_id)
        if record is None:
            raise LookupError(f"Dagster has no run {run_id}")
        return record

    def running(self) -> list[str]:
        """Return the ids of the runs that have started and not ended."""
        at_work = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED])
        return [run.run_id for run in self.instance.get_runs(at_work)]

    def all_ended(self) -> bool:
        """Return whether every run has ended."""
        return all(run.is_finished for run in self.all())

    def worker_pid(self, run_id: str) -> int:
        """Return the process id of the run's worker, from Dagster's log."""
        for entry in self.instance.all_logs(run_id):
            if (found := _PID.search(entry.message)) is not None:
                return int(found[1])
        raise LookupError(f"Dagster's log of run {run_id} has no process id")

    def found_by(self, successor: dg.DagsterRun, last_heartbeat_ms: float, heartbeat_interval_s: float) -> str:
        """Return how the dead run was found: its claims were stale, or Dagster reported it before that."""
        sensor = successor.tags.get("dagster/sensor_name")
        how = f"sensor {sensor!r}" if sensor else "the schedule"
        requested_s = self.get(successor.run_id).create_timestamp.timestamp() - last_heartbeat_ms / 1_000
        was_stale = requested_s > 2 * heartbeat_interval_s
        return f"{'stale' if was_stale else 'reported by Dagster'}, by {how}"
