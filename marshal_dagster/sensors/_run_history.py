"""The runs that a stale-claim sensor asked for before, by Dagster's run storage."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from marshal_dagster.ops import ExecutionOutcome
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

_RUNS_LOOKED_AT: Final = 200
_DIGESTS_AT_ONCE: Final = 900
"""Older versions of SQLite take no more than 999 values in a query."""
_COULD_NOT_TRY: Final = frozenset({ExecutionOutcome.HELD, ExecutionOutcome.PAUSED})


class ExpectedState(NamedTuple):
    """What a run was told of a partition: the fields of `ExpectedKeyState` that are compared, cheap by the thousand."""

    partition: int
    generation: int
    offset: int | None
    plan_attempts: int
    epoch: int | None


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """One partition of one run."""

    record: RunRecord
    seen: ExpectedState

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.record.dagster_run.run_id

    @property
    def status(self) -> DagsterRunStatus:
        """What Dagster says of the run."""
        return self.record.dagster_run.status

    @property
    def outcome(self) -> str | None:
        """What the op said of itself."""
        return self.record.dagster_run.tags.get(OUTCOME_TAG)

    @property
    def asked_at_s(self) -> float:
        """When it was asked for."""
        return requested_at_s(self.record)

    @property
    def ended_at_s(self) -> float:
        """When it ended."""
        return ended_at_s(self.record)

    def saw_same_state(self, left: AbandonedPartition) -> bool:
        """Tell whether nobody has claimed the partition since."""
        return (self.seen.epoch, self.seen.plan_attempts) == (left.epoch, left.plan_attempts)

    def may_still_run(self, left: AbandonedPartition, now_s: float) -> bool:
        """Tell whether the run may still redo what is left: it is not over, and has not shown itself dead.

        Dagster alone cannot say so: without run monitoring a run whose host died stays STARTED for ever. One that
        claimed itself, and went stale, has left another epoch than it saw.
        """
        return self.status not in FINISHED and self.saw_same_state(left) and may_begin(self.record, now_s)

    def was_blocked(self, left: AbandonedPartition) -> bool:
        """Tell whether the run saw what is there now, and found it held after all, or the group paused."""
        return self.status is DagsterRunStatus.SUCCESS and self.outcome in _COULD_NOT_TRY and self.saw_same_state(left)

    def was_futile(self, left: AbandonedPartition, now_s: float) -> bool:
        """Tell whether the run failed, died, or changed nothing of what it saw."""
        if self.status in NOT_LAUNCHED:
            return not may_begin(self.record, now_s)
        if self.status not in FINISHED:
            return not self.may_still_run(left, now_s)
        if self.status is not DagsterRunStatus.SUCCESS:
            return True
        return self.saw_same_state(left) and not self.was_blocked(left)


@dataclass(slots=True)
class PreviousRuns:
    """What was asked for before, as far as it matters for what is left now."""

    instance: DagsterInstance
    now_s: float
    _asks: defaultdict[tuple[int, int, int | None], dict[str, PreviousRun]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """For each partition, generation and offset the runs by their ids."""

    def add(self, records: Sequence[RunRecord], op_name: str) -> None:
        """Take what these runs of op `op_name` were told."""
        for record in records:
            for seen in _expected_states(record.dagster_run.run_config, op_name):
                self._asks[seen.partition, seen.generation, seen.offset][record.dagster_run.run_id] = PreviousRun(
                    record, seen
                )

    def pending_run(self, left: AbandonedPartition) -> str | None:
        """Give the id of a run that was asked for and may still redo it."""
        return next((ask.run_id for ask in self._of(left) if ask.may_still_run(left, self.now_s)), None)

    def futile_runs(self, left: AbandonedPartition) -> list[str]:
        """Give the runs, newest first, that were asked for it where it stands and failed, died, or changed nothing."""
        runs = [ask for ask in self._of(left) if ask.was_futile(left, self.now_s)]
        return [ask.run_id for ask in sorted(runs, key=lambda ask: ask.asked_at_s, reverse=True)]

    def wait_s(self, left: AbandonedPartition, first_wait_s: float) -> float:
        """Give for how long it is not asked for, after runs that were in vain: what hinders them may take time to pass.

        A run that could not try may only mean that the sensor's clock is ahead.
        """
        vain = [ask.ended_at_s for ask in self._of(left) if ask.was_blocked(left) or ask.was_futile(left, self.now_s)]
        if not vain:
            return 0.0
        return max(vain) + retry_backoff_s(first_wait_s, len(vain)) - self.now_s

    def is_settled(self, left: AbandonedPartition) -> bool:
        """Tell whether a run that saw what is there now has found nothing to redo."""
        return any(ask.outcome == ExecutionOutcome.DRAINED and ask.saw_same_state(left) for ask in self._of(left))

    def count(self, digest: str) -> int:
        """Count all runs that were ever asked for this: Dagster compares run keys with all of its history too."""
        return self.instance.get_runs_count(RunsFilter(tags={ASKED_TAG: digest}))

    def _of(self, left: AbandonedPartition) -> Sequence[PreviousRun]:
        return list(self._asks[left.partition, left.generation, left.offset].values())


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
    """Look up what runs of `job` were asked for: the newest 200, and all that were asked for one of `found` alone."""
    asked = PreviousRuns(instance, time.time())
    if not found:
        return asked
    tags = {GROUP_TAG: group, TOPIC_TAG: found[0].topic, REASON_TAG: STALE_CLAIM}
    newest = instance.get_run_records(RunsFilter(job_name=job, tags=tags), limit=_RUNS_LOOKED_AT)
    asked.add(newest, op_name)
    if len(newest) < _RUNS_LOOKED_AT:
        return asked
    digests = iter([digest_of(group, [one]) for one in found])
    while some := list(islice(digests, _DIGESTS_AT_ONCE)):
        # Not limited: the attempts of each are, and an older one that were left out would be tried again.
        asked.add(instance.get_run_records(RunsFilter(job_name=job, tags={ASKED_TAG: some})), op_name)
    return asked


def place_of(partition: int, generation: int, offset: int | None) -> str:
    """Name partition, generation and offset."""
    return f"{partition}.{generation}.{offset}"


def digest_of(group: str, bundle: Sequence[AbandonedPartition]) -> str:
    """Name what a run is asked for, the same for ever: group, topic, and each partition, generation and offset.

    Not the epoch: how often redoing a place has been tried is counted over all of its owners.
    """
    parts = [group, bundle[0].topic, *(place_of(one.partition, one.generation, one.offset) for one in bundle)]
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:24]


def _expected_states(run_config: Mapping[str, Any], op_name: str) -> Iterator[ExpectedState]:
    """Give what a run was told; what an older version wrote otherwise is passed over."""
    config = run_config.get("ops", {}).get(op_name, {}).get("config", {})
    for each in config.get("seen") or []:
        if not isinstance(each, Mapping):
            continue
        partition, generation, attempts = each.get("partition"), each.get("generation"), each.get("plan_attempts", 0)
        offset, epoch = each.get("offset"), each.get("epoch")
        if (
            isinstance(partition, int)
            and isinstance(generation, int)
            and isinstance(attempts, int)
            and isinstance(offset, int | None)
            and isinstance(epoch, int | None)
        ):
            yield ExpectedState(partition, generation, offset, attempts, epoch)
