"""Judges a run by its coordination log and its processes' journals; it shares no code with the library.

The reference reader and `tests.simulator.checkers.LogJudge` read the log.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from marshal_dagster.protocol.messages import coordination_partition
from tests.coordinator_faults.journal import Did, Line
from tests.simulator.checkers import LogJudge, ViolationError

Place = tuple[str, int]
Record = tuple[int, int, int, bytes]
"""Coordination partition, offset, timestamp, value."""

MOST_TOLD: Final = 5


@dataclass(slots=True)
class Verdict:
    """The result of the checks: counts for the table, and violations."""

    two_owners: int = 0
    lost: int = 0
    foreign: int = 0
    violations: list[ViolationError] = field(default_factory=list)

    def fail(self, promise: str, text: str) -> None:
        """Add a violation."""
        self.violations.append(ViolationError(promise, text))


def judge(
    group: str, coordination_partitions: int, records: Iterable[Record], journals: Mapping[str, Sequence[Line]]
) -> Verdict:
    """Compare the beliefs of the processes, by run id, with the log."""
    verdict = Verdict()
    log = LogJudge(coordination_partitions, _counting(verdict))
    for record in records:
        log.read(*record)
    lines = [line for journal in journals.values() for line in journal]
    _check_works(verdict, group, log, lines)
    _check_committed(verdict, group, log, lines)
    _check_offsets(verdict, log)
    return verdict


def _counting(verdict: Verdict) -> Callable[[str, str], None]:
    def fail(promise: str, text: str) -> None:
        if promise == "a commit is only ever by the owner":
            verdict.foreign += 1
        verdict.fail(promise, text)

    return fail


def _check_works(verdict: Verdict, group: str, log: LogJudge, lines: Iterable[Line]) -> None:
    """A process that works has won its claim; no process works under a claim after another works under a later one."""
    works: dict[Place, list[Line]] = defaultdict(list)
    for line in lines:
        if line.did is Did.WORKS:
            works[line.place].append(line)
    for place, found in works.items():
        found.sort(key=lambda line: line.at_ms)
        wrong = [(one, other) for one, other in pairwise(found) if other.epoch < one.epoch]
        verdict.two_owners += len(wrong)
        for one, other in wrong[:MOST_TOLD]:
            verdict.fail("never two owners", f"{place}: {other} after {one}")
        partition = coordination_partition(place[0], log.coordination_partitions)
        for epoch, instance in {(line.epoch, line.instance) for line in found}:
            state = log.state(partition, (group, *place), epoch + 1)
            if (state[0], state[2]) != (instance, epoch):
                verdict.fail("who works has won its claim", f"{place}: {instance} at {epoch}, the log has {state}")


def _check_committed(verdict: Verdict, group: str, log: LogJudge, lines: Iterable[Line]) -> None:
    """A commit that a process believes in is in the log, and is not lost later."""
    for line in lines:
        if line.did is not Did.COMMITTED:
            continue
        place = (group, *line.place)
        if line.instance not in log.committed.get((place, 0, line.offset), set()):
            verdict.fail("a commit that is believed in is in the log", str(line))
        stands = log.state(coordination_partition(line.topic, log.coordination_partitions), place)[4]
        if stands is None or int(str(stands)) < line.offset:
            verdict.lost += 1
            verdict.fail("no offset is lost", f"{line}, in the end the log has {stands}")


def _check_offsets(verdict: Verdict, log: LogJudge) -> None:
    for history in log.history.values():
        for place, states in history.items():
            offsets = [int(str(state[4])) for _, state in states if state[4] is not None]
            back = [(one, other) for one, other in pairwise(offsets) if other < one]
            if back:
                verdict.fail("offsets only grow", f"{place}: {back[:MOST_TOLD]}")


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owner of each partition by the log: its run id, and the epoch of its claim."""

    owners: Mapping[Place, tuple[str, int]]

    def names(self) -> dict[Place, str]:
        """Return the run that owns each partition, under any claim."""
        return {place: run_id for place, (run_id, _) in self.owners.items()}

    def counts(self, run_ids: Iterable[str]) -> dict[str, int]:
        """Return how many partitions each of these runs owns."""
        counted = dict.fromkeys(run_ids, 0)
        for run_id, _ in self.owners.values():
            if run_id in counted:
                counted[run_id] += 1
        return counted

    def what_is_wrong(self, places: Iterable[Place], run_ids: Sequence[str]) -> str | None:
        """Return why these partitions are not spread evenly over these runs, or None if they are."""
        counts = self.counts(run_ids)
        wanted = set(places)
        homeless = {place for place in wanted if self.owners.get(place, ("", 0))[0] not in counts}
        if homeless:
            return f"of {len(wanted)} partitions {sorted(homeless)[:MOST_TOLD]} have no owner among {run_ids}"
        if max(counts.values()) - min(counts.values()) > 1:
            return f"spread {counts}"
        return None


def gap_ms(journals: Mapping[str, Sequence[Line]], since_ms: float, until_ms: float) -> float:
    """Return the longest time since `since_ms` without a leader: from the end of a term to the next line of one."""
    lines = sorted(
        (line for journal in journals.values() for line in journal if line.did in {Did.LEADS, Did.FOLLOWS}),
        key=lambda line: line.at_ms,
    )
    ended_ms, longest_ms = None, 0.0
    for line in [each for each in lines if each.at_ms >= since_ms]:
        if line.did is Did.LEADS:
            longest_ms = max(longest_ms, 0.0 if ended_ms is None else line.at_ms - ended_ms)
            ended_ms = None
        else:
            ended_ms = line.at_ms
    return max(longest_ms, 0.0 if ended_ms is None else until_ms - ended_ms)


def needless_stops(
    journals: Mapping[str, Sequence[Line]], since_ms: float, after: Ownership, leaving: Iterable[str] = ()
) -> list[str]:
    """Return the stops since `since_ms` of partitions that belong to the same owner in the end."""
    return [
        f"{run_id}: {line}"
        for run_id, lines in journals.items()
        for line in lines
        if line.did is Did.STOPS and line.at_ms >= since_ms and line.place != ("", 0) and run_id not in leaving
        if after.owners.get(line.place, ("", 0))[0] == run_id
    ]
