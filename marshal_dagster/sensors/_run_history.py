"""The runs that a sensor requested before, read from Dagster's run storage.

The stale-claim sensor uses it to avoid duplicate requests, to wait after failed runs, and to stop after too many. The
lag sensor shares the run keys, tags and waiting times.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from marshal_dagster.ops.metadata import ExecutionOutcome
from marshal_dagster.runs.abandoned_work import AbandonedPartition
from marshal_dagster.runs.names import GROUP_TAG, OUTCOME_TAG, TOPIC_TAG
from marshal_dagster.runs.status import FINISHED, NOT_LAUNCHED

REASON_TAG: Final = "marshal/reason"
STALE_CLAIM: Final = "stale claim"
ASKED_TAG: Final = "marshal/asked"
"""Tag with a digest of what a run was requested for. It finds all runs that were ever requested for the same."""
ASKED_AT_TAG: Final = "marshal/asked_at"
"""Tag with the time of the request, in unix seconds by the clock of the code server."""

OPEN_RUN_PATIENCE_S: Final = 600.0
"""After this time, in seconds, an unfinished run that claimed nothing and is not queued no longer blocks a new run."""
FIRST_WAIT_S: Final = 30.0
"""How long no run is requested after a run that failed, changed nothing or could not claim, in seconds.

Each further run of this kind doubles the time.
"""
LONGEST_WAIT_S: Final = 3_600.0
"""The maximum waiting time, in seconds."""

_KEY_LENGTH: Final = 13
_RUNS_LOOKED_AT: Final = 200
_DIGESTS_AT_ONCE: Final = 900
"""Older versions of SQLite accept at most 999 values in a query."""
_EXPECTED_DEFAULTS: Final = {"plan_attempts": 0}
_COULD_NOT_TRY: Final = frozenset({ExecutionOutcome.HELD, ExecutionOutcome.PAUSED})


class ExpectedState(NamedTuple):
    """The state of a partition that a run expected: the compared fields of `ExpectedKeyState`, as a light tuple."""

    partition: int
    generation: int
    offset: int | None
    plan_attempts: int
    epoch: int | None


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """An earlier run and one of its partitions."""

    record: RunRecord
    expected: ExpectedState

    @property
    def run_id(self) -> str:
        return self.record.dagster_run.run_id

    @property
    def status(self) -> DagsterRunStatus:
        return self.record.dagster_run.status

    @property
    def outcome(self) -> str | None:
        return self.record.dagster_run.tags.get(OUTCOME_TAG)

    def saw_same_state(self, left: AbandonedPartition) -> bool:
        """Return whether no member has claimed the partition since."""
        return (self.expected.epoch, self.expected.plan_attempts) == (left.epoch, left.plan_attempts)

    def may_still_run(self, left: AbandonedPartition, now_s: float) -> bool:
        """Return whether the run may still process the partition: it has not ended, and shows no sign of being dead.

        Dagster's status alone does not decide it, because without run monitoring a run whose host died stays STARTED.
        If the run claimed the partition before it died, the epoch has changed, so the run no longer saw the same state.
        """
        return self.status not in FINISHED and self.saw_same_state(left) and may_begin(self.record, now_s)

    def was_blocked(self, left: AbandonedPartition) -> bool:
        """Return whether the run saw the current state, and found the partition held or the group paused."""
        return self.status is DagsterRunStatus.SUCCESS and self.outcome in _COULD_NOT_TRY and self.saw_same_state(left)

    def was_futile(self, left: AbandonedPartition, now_s: float) -> bool:
        """Return whether the run failed, died, or changed nothing in the partition."""
        if self.status in NOT_LAUNCHED:
            return not may_begin(self.record, now_s)
        if self.status not in FINISHED:
            return not self.may_still_run(left, now_s)
        if self.status is not DagsterRunStatus.SUCCESS:
            return True
        return self.saw_same_state(left) and not self.was_blocked(left)


@dataclass(slots=True)
class PreviousRuns:
    """The earlier runs for abandoned partitions."""

    instance: DagsterInstance
    now_s: float
    _runs: defaultdict[tuple[int, int, int | None], dict[str, PreviousRun]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """The runs by their ids, for each partition, generation and offset."""

    def add(self, records: Sequence[RunRecord], op_name: str) -> None:
        """Add these runs of op `op_name`."""
        for record in records:
            for expected in _expected_states(record.dagster_run.run_config, op_name):
                runs = self._runs[expected.partition, expected.generation, expected.offset]
                runs[record.dagster_run.run_id] = PreviousRun(record, expected)

    def pending_run(self, left: AbandonedPartition) -> str | None:
        """Return the id of a requested run that may still process the partition; None without one."""
        return next((run.run_id for run in self._of(left) if run.may_still_run(left, self.now_s)), None)

    def futile_runs(self, left: AbandonedPartition) -> list[str]:
        """Return the ids of runs for its current offset that failed, died, or changed nothing, newest first."""
        runs = [run for run in self._of(left) if run.was_futile(left, self.now_s)]
        return [run.run_id for run in sorted(runs, key=lambda run: requested_at_s(run.record), reverse=True)]

    def wait_s(self, left: AbandonedPartition, first_wait_s: float) -> float:
        """Return how many seconds to wait before the next request, because of unsuccessful runs; 0 or less if none.

        The wait gives the cause of a failure time to pass. It also helps if a run could not claim because the sensor's
        clock is fast.
        """
        vain = [run.record for run in self._of(left) if run.was_blocked(left) or run.was_futile(left, self.now_s)]
        if not vain:
            return 0.0
        return max(map(ended_at_s, vain)) + retry_backoff_s(first_wait_s, len(vain)) - self.now_s

    def is_settled(self, left: AbandonedPartition) -> bool:
        """Return whether a run that saw the current state found nothing to process."""
        return any(run.outcome == ExecutionOutcome.DRAINED and run.saw_same_state(left) for run in self._of(left))

    def _of(self, left: AbandonedPartition) -> Sequence[PreviousRun]:
        return list(self._runs[left.partition, left.generation, left.offset].values())


def next_key(instance: DagsterInstance, digest: str) -> str:
    """Return the last part of the next run key for `digest`: the start of the id of its newest run, or "0".

    Dagster starts no run whose key an existing run already has. A key that counts runs would repeat after some runs
    were deleted, and then no run would start any more. The key returned here names the newest run. It changes as soon
    as a newer run exists, and it was never used before, even if runs were deleted.
    """
    newest = instance.get_run_records(RunsFilter(tags={ASKED_TAG: digest}), limit=1)
    return newest[0].dagster_run.run_id[:_KEY_LENGTH] if newest else "0"


def request_tags(group: str, topic: str, reason: str, digest: str, at_s: float) -> dict[str, str]:
    """Return the tags of a run that a sensor requests."""
    return {
        GROUP_TAG: group,
        TOPIC_TAG: topic,
        REASON_TAG: reason,
        ASKED_TAG: digest,
        ASKED_AT_TAG: str(int(at_s)),
    }


def requested_at_s(record: RunRecord) -> float:
    """Return when a run was requested, in unix seconds, by its tag or else by Dagster."""
    noted = record.dagster_run.tags.get(ASKED_AT_TAG, "")
    return float(noted) if noted.isdecimal() else record.create_timestamp.timestamp()


def ended_at_s(record: RunRecord) -> float:
    """Return when a run ended according to Dagster, or else when it was requested, in unix seconds."""
    return max(requested_at_s(record), record.end_time or 0.0)


def may_begin(record: RunRecord, now_s: float) -> bool:
    """Return whether an unfinished run may still claim: it is queued, or it was requested or updated recently."""
    is_queued = record.dagster_run.status is DagsterRunStatus.QUEUED
    return is_queued or now_s - changed_at_s(record) <= OPEN_RUN_PATIENCE_S


def changed_at_s(record: RunRecord) -> float:
    """Return when Dagster last changed a run, for example its status, or when it was requested, in unix seconds."""
    return max(requested_at_s(record), record.update_timestamp.timestamp())


def retry_backoff_s(first_wait_s: float, times: int) -> float:
    """Return the waiting time, in seconds, after `times` unsuccessful runs: doubled each time, up to an hour."""
    return min(LONGEST_WAIT_S, first_wait_s * 2.0 ** min(times - 1, 16))


def previous_runs(
    instance: DagsterInstance, group: str, *, job: str, op_name: str, found: Sequence[AbandonedPartition]
) -> PreviousRuns:
    """Return earlier runs of `job`: the newest 200, and all that were requested for a single one of `found`."""
    runs = PreviousRuns(instance, time.time())
    tags = {GROUP_TAG: group, TOPIC_TAG: found[0].topic, REASON_TAG: STALE_CLAIM}
    newest = instance.get_run_records(RunsFilter(job_name=job, tags=tags), limit=_RUNS_LOOKED_AT)
    runs.add(newest, op_name)
    if len(newest) < _RUNS_LOOKED_AT:
        return runs
    digests = iter([digest_of(group, [partition]) for partition in found])
    while some := list(islice(digests, _DIGESTS_AT_ONCE)):
        # No limit here: without its older runs a partition would be tried again, and its runs are few.
        runs.add(instance.get_run_records(RunsFilter(job_name=job, tags={ASKED_TAG: some})), op_name)
    return runs


def place_of(partition: int, generation: int, offset: int | None) -> str:
    """Return partition, generation and offset as text."""
    return f"{partition}.{generation}.{offset}"


def digest_of(group: str, bundle: Sequence[AbandonedPartition]) -> str:
    """Return a stable digest of what a run is requested for: group, topic, and each partition, generation and offset.

    The epoch is not part of it, because attempts are counted over all owners of a partition.
    """
    parts = [group, bundle[0].topic, *(place_of(left.partition, left.generation, left.offset) for left in bundle)]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:24]


def _expected_states(run_config: Mapping[str, Any], op_name: str) -> Iterator[ExpectedState]:
    """Yield the states that a run expected; skip those that an older version wrote in another form."""
    config = run_config.get("ops", {}).get(op_name, {}).get("config", {})
    for fields in config.get("seen") or []:
        if isinstance(fields, Mapping):
            state = ExpectedState(*(fields.get(name, _EXPECTED_DEFAULTS.get(name)) for name in ExpectedState._fields))
            numbers = (state.partition, state.generation, state.plan_attempts)
            if None not in numbers and all(isinstance(value, int | None) for value in state):
                yield state
