"""The runs that a stale-claim sensor asked for before, by Dagster's run storage."""

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
"""What a run was asked for, as a digest: all runs that were asked for the same, ever, are found by it."""
ASKED_AT_TAG: Final = "marshal/asked_at"
"""When, in unix seconds by the clock of the code server that asked."""

OPEN_RUN_PATIENCE_S: Final = 600.0
"""After so long a run that left its partition untouched, and is not queued, no longer keeps others from it."""
FIRST_WAIT_S: Final = 30.0
LONGEST_WAIT_S: Final = 3_600.0
"""After a run that failed, changed nothing or could not even try, the next one is asked for after so long.

Doubled with each such run, up to an hour.
"""

_KEY_LENGTH: Final = 13
_RUNS_LOOKED_AT: Final = 200
_DIGESTS_AT_ONCE: Final = 900
"""Older versions of SQLite take no more than 999 values in a query."""
_EXPECTED_DEFAULTS: Final = {"plan_attempts": 0}
_COULD_NOT_TRY: Final = frozenset({ExecutionOutcome.HELD, ExecutionOutcome.PAUSED})


class ExpectedState(NamedTuple):
    """What a run expected of a partition: the fields of `ExpectedKeyState` that are compared, cheap by the thousand."""

    partition: int
    generation: int
    offset: int | None
    plan_attempts: int
    epoch: int | None


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """One partition of one run."""

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
        """Return whether the run may still redo what is left: it is not over, and has not shown itself dead.

        Dagster alone does not know: without run monitoring a run whose host died always stays STARTED. One that
        claimed itself, and went stale, has left another epoch than it saw.
        """
        return self.status not in FINISHED and self.saw_same_state(left) and may_begin(self.record, now_s)

    def was_blocked(self, left: AbandonedPartition) -> bool:
        """Return whether the run saw what is there now, and found it held after all, or the group paused."""
        return self.status is DagsterRunStatus.SUCCESS and self.outcome in _COULD_NOT_TRY and self.saw_same_state(left)

    def was_futile(self, left: AbandonedPartition, now_s: float) -> bool:
        """Return whether the run failed, died, or changed nothing of what it saw."""
        if self.status in NOT_LAUNCHED:
            return not may_begin(self.record, now_s)
        if self.status not in FINISHED:
            return not self.may_still_run(left, now_s)
        if self.status is not DagsterRunStatus.SUCCESS:
            return True
        return self.saw_same_state(left) and not self.was_blocked(left)


@dataclass(slots=True)
class PreviousRuns:
    """The earlier runs that matter for what is left now."""

    instance: DagsterInstance
    now_s: float
    _runs: defaultdict[tuple[int, int, int | None], dict[str, PreviousRun]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """For each partition, generation and offset the runs by their ids."""

    def add(self, records: Sequence[RunRecord], op_name: str) -> None:
        """Take what these runs of op `op_name` expected."""
        for record in records:
            for expected in _expected_states(record.dagster_run.run_config, op_name):
                runs = self._runs[expected.partition, expected.generation, expected.offset]
                runs[record.dagster_run.run_id] = PreviousRun(record, expected)

    def pending_run(self, left: AbandonedPartition) -> str | None:
        """Return the id of a run that was requested and may still redo it."""
        return next((run.run_id for run in self._of(left) if run.may_still_run(left, self.now_s)), None)

    def futile_runs(self, left: AbandonedPartition) -> list[str]:
        """Return the runs, newest first, for it where it stands that failed, died, or changed nothing."""
        runs = [run for run in self._of(left) if run.was_futile(left, self.now_s)]
        return [run.run_id for run in sorted(runs, key=lambda run: requested_at_s(run.record), reverse=True)]

    def wait_s(self, left: AbandonedPartition, first_wait_s: float) -> float:
        """Return how long no run is requested, after runs in vain: what hinders them may take time to pass.

        A run that could not try may only mean that the sensor's clock is fast.
        """
        vain = [run.record for run in self._of(left) if run.was_blocked(left) or run.was_futile(left, self.now_s)]
        if not vain:
            return 0.0
        return max(map(ended_at_s, vain)) + retry_backoff_s(first_wait_s, len(vain)) - self.now_s

    def is_settled(self, left: AbandonedPartition) -> bool:
        """Return whether a run that saw what is there now has found nothing to redo."""
        return any(run.outcome == ExecutionOutcome.DRAINED and run.saw_same_state(left) for run in self._of(left))

    def _of(self, left: AbandonedPartition) -> Sequence[PreviousRun]:
        return list(self._runs[left.partition, left.generation, left.offset].values())


def next_key(instance: DagsterInstance, digest: str) -> str:
    """Return the last part of the next run key for `digest`: the start of the id of its newest run, "0" without any.

    Dagster never starts a run whose key is that of a run it still has. A key that counts runs would repeat after some
    of them were deleted, and no run would start any more. A run with this key would be newer than the newest run, so
    none exists, whatever was deleted. The key stays the same until there is such a run.
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
    """Give when a run was asked for: by the code server's clock, or by Dagster's where that was not noted."""
    noted = record.dagster_run.tags.get(ASKED_AT_TAG, "")
    return float(noted) if noted.isdecimal() else record.create_timestamp.timestamp()


def ended_at_s(record: RunRecord) -> float:
    """Give when a run ended, as far as Dagster knows, else when it was asked for."""
    return max(requested_at_s(record), record.end_time or 0.0)


def may_begin(record: RunRecord, now_s: float) -> bool:
    """Return whether a run that is not over may still come to its claim: it waits in the queue, or it is young."""
    changed_s = max(requested_at_s(record), record.update_timestamp.timestamp())
    return record.dagster_run.status is DagsterRunStatus.QUEUED or now_s - changed_s <= OPEN_RUN_PATIENCE_S


def retry_backoff_s(first_wait_s: float, times: int) -> float:
    """Give the pause after the `times`th run in vain: doubled each time, up to an hour."""
    return min(LONGEST_WAIT_S, first_wait_s * 2.0 ** min(times - 1, 16))


def previous_runs(
    instance: DagsterInstance, group: str, *, job: str, op_name: str, found: Sequence[AbandonedPartition]
) -> PreviousRuns:
    """Look up earlier runs of `job`: the newest 200, and all that were requested for one of `found` alone."""
    runs = PreviousRuns(instance, time.time())
    tags = {GROUP_TAG: group, TOPIC_TAG: found[0].topic, REASON_TAG: STALE_CLAIM}
    newest = instance.get_run_records(RunsFilter(job_name=job, tags=tags), limit=_RUNS_LOOKED_AT)
    runs.add(newest, op_name)
    if len(newest) < _RUNS_LOOKED_AT:
        return runs
    digests = iter([digest_of(group, [partition]) for partition in found])
    while some := list(islice(digests, _DIGESTS_AT_ONCE)):
        # Not limited: the attempts of each are, and an older one that were left out would be tried again.
        runs.add(instance.get_run_records(RunsFilter(job_name=job, tags={ASKED_TAG: some})), op_name)
    return runs


def place_of(partition: int, generation: int, offset: int | None) -> str:
    """Name partition, generation and offset."""
    return f"{partition}.{generation}.{offset}"


def digest_of(group: str, bundle: Sequence[AbandonedPartition]) -> str:
    """Name what a run is requested for, always the same: group, topic, and each partition, generation and offset.

    Not the epoch: how often redoing a place has been tried is counted over all of its owners.
    """
    parts = [group, bundle[0].topic, *(place_of(left.partition, left.generation, left.offset) for left in bundle)]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:24]


def _expected_states(run_config: Mapping[str, Any], op_name: str) -> Iterator[ExpectedState]:
    """Yield what a run expected; what an older version wrote otherwise is passed over."""
    config = run_config.get("ops", {}).get(op_name, {}).get("config", {})
    for fields in config.get("seen") or []:
        if isinstance(fields, Mapping):
            state = ExpectedState(*(fields.get(name, _EXPECTED_DEFAULTS.get(name)) for name in ExpectedState._fields))
            numbers = (state.partition, state.generation, state.plan_attempts)
            if None not in numbers and all(isinstance(value, int | None) for value in state):
                yield state
