"""Judges a run by its recorded log, its members' journals and its output; it shares no rule with the library.

`tests.simulator.checkers.LogJudge` reads the log, and the simulator's checkers judge what was processed. A simulator
can compare all members at one moment; here the times in the journals are compared instead.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, TypeVar, cast

from marshal_dagster.protocol.messages import DeliveryMode
from tests.faults.journal import Claimed, Entry, Known, Left, Part, Processed, Refused
from tests.simulator.checkers import (
    LogJudge,
    Place,
    RangeState,
    ViolationError,
    check_attempts,
    check_keys_agree,
    check_nothing_lost,
    ranges_of,
)
from tests.simulator.data import Attempt, Output

ON_MS: Final = 300.0
"""How long a member may still work without a lease: until the thread that checks leases runs."""
CLOCKS_MS: Final = 50.0
"""How far the broker's clock and the members' may have drifted apart during a run."""

T = TypeVar("T", bound=Entry)
Work = tuple[str, Part, list[Processed]]
"""An instance's work on a part, in order."""


@dataclass(slots=True)
class Evidence:
    """The files and facts of a run; `messages` are those that must have been processed."""

    mode: DeliveryMode
    group: str
    topic: str
    home: int
    """The coordination partition of the topic."""
    coordination_partitions: int
    clock_offset_ms: float
    """The difference that converts a time since boot to the broker's time."""
    journals: dict[str, list[Entry]] = field(default_factory=dict)
    """The journal of each run id."""
    messages: set[tuple[int, int]] = field(default_factory=set)
    rows: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How often each message is in the output of a sink."""
    is_drained: bool = True
    observers: set[str] = field(default_factory=set)
    """The runs that cannot have been certain readers of the log."""
    deserted: set[str] = field(default_factory=set)
    """The runs during which the coordination topic was deleted."""
    is_log_safe: bool = True
    """Whether no fault has truncated or deleted the log."""

    def place(self, partition: int) -> Place:
        """Return the key of a partition."""
        return self.group, self.topic, partition

    def lines(self, kind: type[T]) -> Iterator[T]:
        """Yield all lines of a kind."""
        for entries in self.journals.values():
            for entry in entries:
                if isinstance(entry, kind):
                    yield entry


@dataclass(slots=True)
class WonRange:
    """What the log contains about one claim of a range; times are the broker's."""

    instance: str
    start: int
    end: int
    """The end of the claim; a plan may end earlier."""
    plan_end: int | None = None
    planned_ms: int | None = None
    """When it was planned, or when it was claimed if it was planned before."""
    done_ms: int | None = None


@dataclass(slots=True)
class Tally:
    """The result of a run."""

    violations: list[ViolationError] = field(default_factory=list)
    takeovers_ms: list[int] = field(default_factory=list)
    """For each takeover, the time since the last record of the former owner, in log time."""
    refused_commits: int = 0
    """Commits that the log or a sink refused, or that a member did not send because it lost its claim."""
    lost: int = 0
    dropped: int = 0
    """Messages that at most once left out, as it may."""
    twice: int = 0
    repeated: int = 0
    """Messages that at least once processed again, as it may."""
    records: int = 0
    together: int = 0
    """The highest number of members that worked at the same time on ranges of one partition and committed them."""


class Trial:
    """The data of one run, with the checkers that judge it."""

    def __init__(self, evidence: Evidence, records: Iterable[tuple[int, int, int, bytes]]) -> None:
        """Read the log: coordination partition, offset, timestamp and value of each record."""
        self.evidence = evidence
        self.tally = Tally()
        self.log = LogJudge(evidence.coordination_partitions, self._fail)
        self.timestamps: dict[int, int] = {}
        for partition, offset, timestamp_ms, value in records:
            self.log.read(partition, offset, timestamp_ms, value)
            if partition == evidence.home:
                self.timestamps[offset] = timestamp_ms
        self.won_ranges = self._won_ranges()
        self.output = Output()
        for part, done in self._done().items():
            place = evidence.place(part.partition)
            self.output.attempts.append(Attempt(part, place, done=done))  # type: ignore[arg-type] # it has the fields that are needed
        for message, count in evidence.rows.items():
            self.output.rows[message] = Counter({0: count})

    def judge(self) -> Tally:
        """Run all checkers."""
        self._check_claims()
        self._check_commits()
        self._check_leases()
        self._check_alone()
        self._check_readers()
        self._check_observers()
        self._check_deserted()
        self._check_alarms()
        self._check_output()
        self._count()
        return self.tally

    def _fail(self, promise: str, text: str) -> None:
        self.tally.violations.append(ViolationError(promise, text))

    def _won_ranges(self) -> dict[tuple[Place, int], WonRange]:
        """Return every range that was won, by place and epoch."""
        found: dict[tuple[Place, int], WonRange] = {}
        for place, states in self.log.history[self.evidence.home].items():
            for offset, state in states:
                for start, end, phase, instance, _, epoch, _, _ in ranges_of(state):
                    if epoch is None:
                        continue
                    won = found.setdefault((place, epoch), WonRange(str(instance), start, end))
                    if phase == "planned" and won.plan_end is None:
                        won.plan_end, won.planned_ms = end, self.timestamps[offset]
        for number, _, timestamp_ms, value, verdict in self.log.records:
            if number == self.evidence.home and verdict == "accepted" and value.startswith("RangeDone/"):
                *_, group, topic, partition, done = value.split("/")
                found[(group, topic, int(partition)), int(done)].done_ms = timestamp_ms
        return found

    def _won_range(self, part: Part) -> WonRange | None:
        """Return what the log contains about a part: None if it is a whole partition or was never won."""
        return self.won_ranges.get((self.evidence.place(part.partition), part.epoch))

    # Beliefs of members

    def _check_claims(self) -> None:
        """A claim that a member believes in was won in the log, and what it processes was planned under that claim."""
        for claimed in self.evidence.lines(Claimed):
            for part in claimed.parts:
                state = self.log.state(self.evidence.home, self.evidence.place(part.partition), part.epoch + 1)
                won = self._won_range(part)
                if won is None:
                    is_there = (state[0], state[2]) == (claimed.instance, part.epoch)
                else:
                    is_there = (won.instance, won.start) == (claimed.instance, part.start) and part.end <= won.end
                if not is_there:
                    self._fail("a claim that is believed in is in the log", f"{part} of {claimed.instance}: {state}")
        self._check_plans()

    def _check_plans(self) -> None:
        planned = {
            (place[2], state[2], state[4], state[5])
            for place, states in self.log.history[self.evidence.home].items()
            for _, state in states
        }
        for instance, part, lines in self._works():
            won = self._won_range(part)
            if won is None:
                is_planned = (part.partition, part.epoch, part.start, part.end) in planned
            else:
                is_planned = (won.start, won.plan_end) == (part.start, part.end) and self._is_behind(
                    won.planned_ms, lines
                )
            if not is_planned:
                self._fail("what is processed was planned", f"{part} of {instance}: {won}")

    def _is_behind(self, at_ms: int | None, lines: Sequence[Processed]) -> bool:
        """Return whether work started after a record with this timestamp."""
        return at_ms is not None and lines[0].at_ms + self.evidence.clock_offset_ms >= at_ms - CLOCKS_MS

    def _check_commits(self) -> None:
        """A commit that a member believes in is in the log; in at most once it is there before the processing."""
        for left in self.evidence.lines(Left):
            for part in left.committed:
                by = self.log.committed[self.evidence.place(part.partition), part.generation, part.end]
                if left.instance not in by and not self._is_done_by_another(part, left):
                    self._fail(
                        "a commit that is believed in is in the log",
                        f"{part} of {left.instance} is of {sorted(by) or 'no instance'} there",
                    )
        if self.evidence.mode is not DeliveryMode.AT_MOST_ONCE:
            return
        for instance, part, lines in self._works():
            at_ms = self._committed_ms(instance, part)
            if not self._is_behind(at_ms, lines):
                began_ms = lines[0].at_ms + self.evidence.clock_offset_ms
                self._fail(
                    "at most once commits before it processes",
                    f"{part} of {instance}: processed at {began_ms:.0f}, committed at {at_ms}",
                )

    def _is_done_by_another(self, part: Part, left: Left) -> bool:
        """Return whether another instance finished the range. Then a member may count it as committed."""
        if self.evidence.mode is DeliveryMode.AT_MOST_ONCE or self._won_range(part) is None:
            return False
        left_ms = left.at_ms + self.evidence.clock_offset_ms
        return any(
            place == self.evidence.place(part.partition)
            and epoch > part.epoch
            and (won.start, won.plan_end) == (part.start, part.end)
            and won.done_ms is not None
            and won.done_ms - CLOCKS_MS <= left_ms
            for (place, epoch), won in self.won_ranges.items()
        )

    def _committed_ms(self, instance: str, part: Part) -> int | None:
        """Return the broker's time at which an instance moved the key to a part's end or finished a range."""
        won = self._won_range(part)
        if won is not None:
            return won.done_ms if won.instance == instance else None
        for offset, state in self.log.history[self.evidence.home].get(self.evidence.place(part.partition), ()):
            if state[4] == part.end:
                return self.timestamps[offset] if state[0] == instance else None
        return None

    def _check_leases(self) -> None:
        """No member works without a lease; work that is committed needs none."""
        for instance, part, lines in self._works():
            began_ms = None
            for line in lines:
                if _is_leased(line) or self._needs_no_lease(part, line):
                    began_ms = None
                    continue
                began_ms = line.at_ms if began_ms is None else began_ms
                if line.at_ms - began_ms > ON_MS:
                    self._fail(
                        "no work without a lease", f"{part} by {instance} at {line.offset}, {line.at_ms - began_ms} ms"
                    )
                    break

    def _needs_no_lease(self, part: Part, line: Processed) -> bool:
        """Return whether a range was done before a message was processed. In at most once it needs no lease then."""
        won = self._won_range(part)
        is_at_most_once = self.evidence.mode is DeliveryMode.AT_MOST_ONCE
        return is_at_most_once and won is not None and self._is_behind(won.done_ms, [line])

    def _check_alone(self) -> None:
        """No member works under a lease while another works on a later claim, unless the claim was revoked."""
        by_partition: dict[int, list[Work]] = defaultdict(list)
        for work in self._works():
            by_partition[work[1].partition].append(work)
        for works in by_partition.values():
            for one, other in combinations(sorted(works, key=lambda work: work[1].epoch), 2):
                if one[0] != other[0] and self._are_of_same(one[1], other[1]):
                    self._check_apart(one, other)

    def _are_of_same(self, one: Part, other: Part) -> bool:
        """Return whether two claims exclude each other. Two ranges exclude each other only if they overlap."""
        if self._won_range(one) is None or self._won_range(other) is None:
            return True
        return one.start < other.end and other.start < one.end

    def _check_apart(self, one: Work, other: Work) -> None:
        if (self.evidence.place(one[1].partition), one[1].epoch) in self.log.revoked_ms:
            return
        began_ms = other[2][0].at_ms
        for line in one[2]:
            if line.at_ms > began_ms and _is_leased(line) and not self._needs_no_lease(one[1], line):
                self._fail("one owner at a time", f"{one[1]} of {one[0]} at {line.at_ms}, {other[1]} of {other[0]} too")
                return

    def _check_readers(self) -> None:
        """Every certain reader has the same state as the reference reader."""
        reported: dict[tuple[str, int, int], dict[Place, tuple[object, ...]]] = defaultdict(dict)
        for line in self.evidence.lines(Known):
            place = (line.group, line.topic, line.partition)
            reported[line.instance, line.coordination_partition, line.next_offset][place] = (*line.state, line.ranges)
        for (_, number, next_offset), states in reported.items():
            check_keys_agree(self.log, number, next_offset, states)

    def _check_observers(self) -> None:
        """A reader that cannot be certain of the log claims nothing and reports the reason."""
        for run_id in self.evidence.observers:
            entries = self.evidence.journals.get(run_id, [])
            if any(isinstance(entry, Claimed) for entry in entries):
                self._fail("an observing reader never claims", run_id)
            errors = {entry.error for entry in entries if isinstance(entry, Refused)}
            if "IncompleteLogError" not in errors:
                self._fail("an observing reader reports that", f"{run_id} reported {errors}")

    def _check_deserted(self) -> None:
        """A member whose coordination topic was deleted reports that."""
        for run_id in self.evidence.deserted:
            entries = self.evidence.journals.get(run_id, [])
            errors = [entry for entry in entries if isinstance(entry, Left | Refused) and entry.error]
            last = errors[-1] if errors else None
            if last is None or last.error not in {"CoordinationLogChangedError", "TopicNotFoundError"}:
                self._fail("a deleted log is a clear error", f"{run_id} reported {last}")

    def _check_alarms(self) -> None:
        """No member reports a topic as re-created if it is not, because then an operator must stop all members."""
        alarms = (
            {"CoordinationLogChangedError", "DataTopicChangedError"}
            if self.evidence.is_log_safe
            else {"DataTopicChangedError"}
        )
        for run_id, entries in self.evidence.journals.items():
            for entry in entries:
                if isinstance(entry, Left | Refused) and entry.error in alarms:
                    self._fail("no false alarm", f"{run_id}: {entry.error}: {entry.text}")

    # What was processed

    def _check_output(self) -> None:
        mode, messages = self.evidence.mode, self.evidence.messages
        if mode is not DeliveryMode.EFFECTIVELY_ONCE:
            check_attempts(self.log, self.output, at_most_once=mode is DeliveryMode.AT_MOST_ONCE)
        if not self.evidence.is_drained:
            return
        if mode is DeliveryMode.AT_MOST_ONCE:
            self._check_dropped()
            return
        check_nothing_lost(self.log, self.output, messages, effectively_once=mode is DeliveryMode.EFFECTIVELY_ONCE)

    def _check_dropped(self) -> None:
        """At most once leaves out only messages of a run that failed."""
        missing = self._missing()
        for left in self.evidence.lines(Left):
            for part in left.committed:
                left_out = sorted(offset for number, offset in missing if _has(part, number, offset))
                if left_out:
                    self._fail("what is committed at most once is processed", f"{part} of {left.instance}: {left_out}")
        parts = [part for claimed in self.evidence.lines(Claimed) for part in claimed.parts]
        unclaimed = sorted(each for each in missing if not any(_has(part, *each) for part in parts))
        if unclaimed:
            self._fail("what is committed at most once is processed", f"no member claimed {unclaimed}")

    def _missing(self) -> set[tuple[int, int]]:
        done = {(part.partition, offset) for part, offsets in self._done().items() for offset in offsets}
        return self.evidence.messages - done

    def _works(self) -> Iterator[Work]:
        """Yield each instance's work on each part, in order."""
        found: dict[tuple[str, Part], list[Processed]] = defaultdict(list)
        for line in self.evidence.lines(Processed):
            found[line.instance, line.part].append(line)
        for (instance, part), lines in found.items():
            yield instance, part, lines

    def _done(self) -> Mapping[Part, list[int]]:
        """Return the offsets that were processed in each part, with repetitions."""
        done: dict[Part, list[int]] = defaultdict(list)
        for line in self.evidence.lines(Processed):
            done[line.part].append(line.offset)
        return done

    # Counts

    def _count(self) -> None:
        tally, mode = self.tally, self.evidence.mode
        more = sum(count - 1 for count in self._times().values() if count > 1)
        if mode is DeliveryMode.AT_LEAST_ONCE:
            tally.repeated = more
        else:
            tally.twice = more
        missing = self.evidence.messages - set(self._times()) if self.evidence.is_drained else set()
        if mode is DeliveryMode.AT_MOST_ONCE:
            tally.dropped = len(missing)
        else:
            tally.lost = len(missing)
        tally.records = len(self.log.records)
        tally.refused_commits = self._refused_commits()
        tally.takeovers_ms = [
            time_ms
            for number in self._numbers()
            for takeovers in (self._takeovers, self._takeovers_of_ranges)
            for time_ms in takeovers(self.evidence.place(number))
        ]
        tally.together = max((self._together(number) for number in self._numbers()), default=0)

    def _times(self) -> Counter[tuple[int, int]]:
        """Return how often each message was processed or is in the output."""
        done = [(part.partition, offset) for part, offsets in self._done().items() for offset in offsets]
        return Counter(done) + self.evidence.rows

    def _numbers(self) -> list[int]:
        return sorted(place[2] for place in self.log.history[self.evidence.home] if place[1] == self.evidence.topic)

    def _takeovers(self, place: Place) -> Iterator[int]:
        """Yield the duration of each takeover of a claim that was not released."""
        last_epoch, last_beat = None, 0
        for _, state in self.log.history[self.evidence.home][place]:
            epoch, beat = state[2], state[3]
            if epoch is not None and epoch != last_epoch:
                if last_epoch is not None:
                    yield cast("int", beat) - last_beat
                last_epoch = epoch
            if beat is not None:
                last_beat = cast("int", beat)
            elif last_epoch is not None and (place, cast("int", last_epoch)) not in self.log.revoked_ms:
                last_epoch = None

    def _takeovers_of_ranges(self, place: Place) -> Iterator[int]:
        """Yield the same for ranges of another instance that it neither finished nor released."""
        before: dict[int, RangeState] = {}
        left: list[RangeState] = []
        for offset, state in self.log.history[self.evidence.home][place]:
            held = {each[5]: each for each in ranges_of(state) if each[5] is not None}
            won = held.get(offset)
            left += [
                each
                for epoch, each in before.items()
                if epoch not in held and (won is not None or (place, epoch) in self.log.revoked_ms)
            ]
            taken = [] if won is None else [each for each in left if each[0] < won[1] and won[0] < each[1]]
            if won is not None and taken:
                yield cast("int", won[6]) - max(cast("int", each[6]) for each in taken)
            left = [each for each in left if each not in taken]
            before = held

    def _together(self, number: int) -> int:
        """Return how many members worked at the same time on ranges of a partition that they committed."""
        began_ms = {claimed.instance: claimed.at_ms for claimed in self.evidence.lines(Claimed)}
        spans = [
            (began_ms[left.instance], left.at_ms)
            for left in self.evidence.lines(Left)
            for part in left.committed
            if part.partition == number and self._won_range(part) is not None and left.instance in began_ms
        ]
        return max((sum(start <= at < end for start, end in spans) for at, _ in spans), default=0)

    def _refused_commits(self) -> int:
        """Count batches that were processed but not committed because of the log or the lease."""
        worked = {line.instance for line in self.evidence.lines(Claimed)}
        refusals = {
            "ClaimLostError",
            "CommitFailedError",
            "SinkRejectedError",
            "PlanRejectedError",
            "CoordinationLogChangedError",
        }
        return sum(left.instance in worked and left.error in refusals for left in self.evidence.lines(Left))


def _is_leased(line: Processed) -> bool:
    return line.lease_ends_ms is not None and line.at_ms < line.lease_ends_ms


def _has(part: Part, number: int, offset: int) -> bool:
    return part.partition == number and part.start <= offset < part.end
