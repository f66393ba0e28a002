"""Judges of what members believe and do; they share no code with the library.

The reference reader (`tests.reference_reader`) computes what each record did. All else is counted here from what the
simulated world saw: records when they entered the log, messages when they were processed, rows when they were written.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, cast

from tests.reference_reader import PlainReader, parse
from tests.simulator.data import Attempt, Output

T = TypeVar("T")
Place = tuple[str, str, int]
"""Group, topic, partition."""
KeyState = tuple[object, ...]
"""Owner's instance, client, epoch and last beat; offset, plan end, plan attempts, generation, data topic id; ranges."""
RangeState = tuple[int, int, str, str | None, str | None, int | None, int | None, int]
"""Start and end; phase; owner's instance, client, epoch and last beat; attempts."""
GroupState = tuple[object, ...]
"""Paused until, paused by; if settings were accepted: heartbeat interval, rule set, delivery, features."""
NOBODY: KeyState = (None, None, None, None)
UNKNOWN: KeyState = (*NOBODY, None, None, 0, 0, None, ())
UNHEARD_OF: GroupState = (None, None)
WITHOUT_SETTINGS: GroupState = (60_000, "go", "at_least_once", ())
"""The settings in force until settings are accepted."""
KNOWN_TO_GO = frozenset({"ClaimingPartition", "Heartbeat", "ReleasingPartition", "ClaimingMessages"})
"""The types of records that every version of the Go library knows."""
GO_DATED_BACK_S = 2
GO_PATIENCE_MS = 1_000
"""How much longer than the rules require members wait in a Go group."""
FORMER_SNAPSHOTS = frozenset({"1", "2"})
"""The versions of snapshots whose writers judged a group without settings as a native one."""


@dataclass(frozen=True, slots=True)
class ViolationError:
    """A broken promise, with its details."""

    promise: str
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


class Belief(NamedTuple):
    """The offsets [start, end) of a place that a process believes to hold under a lease that has not ended."""

    process: str
    place: Place
    epoch: int
    start: float
    end: float
    lease_ends_ms: float
    """By the broker's clock if the process's own clock has the same rate, else 0."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The state that a certain reader has of a coordination partition that it has read up to `next_offset`."""

    next_offset: int
    log_time_ms: int | None
    groups: Mapping[str, GroupState]
    keys: Mapping[Place, KeyState]


@dataclass(slots=True)
class LogJudge:
    """Reads every record when it enters the log, and remembers each key's state after each of them."""

    coordination_partitions: int
    fail: Callable[[str, str], None]
    reader: PlainReader = field(init=False)
    records: list[tuple[int, int, int, str, str]] = field(default_factory=list)
    """Coordination partition, offset, timestamp, value, verdict."""
    history: dict[int, dict[Place, list[tuple[int, KeyState]]]] = field(init=False)
    groups: dict[int, dict[str, list[tuple[int, GroupState]]]] = field(init=False)
    log_times: dict[int, list[tuple[int, int]]] = field(init=False)
    now_ms: Callable[[], float] = field(default=lambda: 0.0)
    """Virtual time."""
    over_ms: dict[tuple[Place, object], float] = field(default_factory=dict)
    """By place and epoch: the time at which that claim ended."""
    unplanned: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By group: coordination partition and log offset of the last heartbeat that moved an offset without a plan."""
    highest_epoch: dict[Place, int] = field(default_factory=dict)
    committed: defaultdict[tuple[Place, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """By place, generation and offset: the instances that moved the key there or finished a range that ends there."""
    committed_at: dict[tuple[Place, int, int], int] = field(default_factory=dict)
    """By the same key: the log offset of the first record that did so."""
    revoked_ms: dict[tuple[Place, int], int] = field(default_factory=dict)
    """By place and epoch: the timestamp of the revocation."""
    is_truncated: bool = False
    """Whether the log has lost records on which members may rely."""
    owned_at: dict[Place, int] = field(default_factory=dict)
    """Log time of the last accepted record of an owner."""
    renewed_ms: dict[tuple[Place, object], int] = field(default_factory=dict)
    """By place and epoch: the log time of the last record that renewed that claim."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Reset the state, because the log was deleted and re-created."""
        self.reader = PlainReader(self.coordination_partitions, 60_000, "go")
        self.history = {number: defaultdict(list) for number in range(self.coordination_partitions)}
        self.groups = {number: defaultdict(list) for number in range(self.coordination_partitions)}
        self.log_times = {number: [] for number in range(self.coordination_partitions)}
        self.highest_epoch.clear()
        self.renewed_ms.clear()
        self.over_ms.clear()
        self.unplanned.clear()

    def read(self, partition: int, offset: int, timestamp_ms: int, value: bytes) -> None:
        """Judge a record."""
        record = parse(value, partition, self.coordination_partitions)
        place = None if record is None else (record["group"], record["topic"], record["partition"])
        before = UNKNOWN if place is None else self.state(partition, place)
        verdict = self.reader.read(partition, offset, timestamp_ms, value)
        self.records.append((partition, offset, timestamp_ms, value.decode("utf-8", "replace"), verdict))
        log_time_ms = self.log_time_ms(partition)
        self.log_times[partition].append((offset, log_time_ms))
        if verdict != "accepted" or record is None or place is None or record["type"] == "Mark":
            return
        group = _group_state_of(self.reader.logs[partition]["groups"][record["group"]])
        states = self.groups[partition][record["group"]]
        if not states or states[-1][1] != group:
            states.append((offset, group))
        if record["type"] == "GroupSettings":
            for each in self.history[partition]:
                self._remember(partition, each, offset)
            return
        if not record["topic"]:
            return
        after = self._remember(partition, place, offset)
        is_go = _rules_in_force(group)[1] == "go"
        self._judge(record, place, before, after, offset, is_go=is_go)
        if record["type"] == "Heartbeat" and not is_go and _is_moved_without_plan(before, after):
            self.unplanned[place[0]] = (partition, offset)
        if record["type"] not in {"RevokingClaim", "RevokingRange"}:
            self.owned_at[place] = log_time_ms

    def state(self, partition: int, place: Place, before_offset: int | None = None) -> KeyState:
        """Return a key's state after the records below `before_offset`, or after all."""
        return _before(self.history[partition].get(place, []), before_offset, UNKNOWN)

    def has_settings(self, partition: int, group: str) -> bool:
        """Return whether settings of a group were accepted in a coordination partition."""
        states = self.groups[partition].get(group, [])
        return bool(states) and len(states[-1][1]) > len(UNHEARD_OF)

    def log_time_ms(self, partition: int) -> int:
        """Return the log time of a coordination partition; 0 before its first record."""
        log = self.reader.logs.get(partition)
        return int(log["log_time"]) if log is not None else 0

    def log_time_before(self, partition: int, offset: int) -> int:
        """Return the log time after the records below `offset`."""
        return _before(self.log_times[partition], offset, 0)

    def settings_in_force(self, partition: int, group: str, before_offset: int | None = None) -> GroupState:
        """Return interval, rule set, delivery and features in force, after the records below `before_offset` or all."""
        return _rules_in_force(_before(self.groups[partition].get(group, []), before_offset, UNHEARD_OF))

    def is_usable_to_former(self, partition: int) -> bool:
        """Return whether every group with keys has settings, so that a snapshot of a former version is valid."""
        groups = {place[0] for place, states in self.history[partition].items() if states}
        return all(self.has_settings(partition, group) for group in groups)

    def _remember(self, partition: int, place: Place, offset: int) -> KeyState:
        group, topic, number = place
        state = _state_of(self.reader.logs[partition]["groups"][group]["keys"][topic, number])
        states = self.history[partition][place]
        if states and states[-1][1][2] not in {None, state[2]}:
            self.over_ms[place, states[-1][1][2]] = self.now_ms()
        states.append((offset, state))
        for epoch, beat_ms in (state[2:4], *(one[5:7] for one in ranges_of(state))):
            if beat_ms is not None:
                self.renewed_ms[place, epoch] = int(str(beat_ms))
        return state

    def _judge(
        self, record: dict[str, Any], place: Place, before: KeyState, after: KeyState, offset: int, *, is_go: bool
    ) -> None:
        kind, sender = record["type"], record["instance"]
        if after[2] is not None and after[2] != before[2]:
            if offset <= self.highest_epoch.get(place, -1) or after[2] != offset:
                self.fail("epochs only grow", f"{place}: {after[2]} at {offset} after {self.highest_epoch.get(place)}")
            self.highest_epoch[place] = offset
        is_release = kind == "ReleasingPartition" and is_go and "." in sender and before[7] == after[7]
        if is_release and before[4] != after[4] and not self.is_truncated:
            self.fail("a release moves no offset", f"{place}: {sender} released at {after[4]}, it was {before[4]}")
        if kind == "RevokingClaim":
            self.revoked_ms[place, int(str(before[2]))] = self.records[-1][2]
        if kind == "Heartbeat" and before[4] != after[4]:
            if (after if is_go else before)[0] != sender:
                self.fail("a commit is only ever by the owner", f"{place}: {sender} committed, {before[0]} owned")
            self._note_commit((place, int(str(after[7])), int(str(after[4]))), sender, offset)
        if before[9] != after[9]:
            self._judge_ranges(record, place, before, after, offset)

    def _note_commit(self, what: tuple[Place, int, int], sender: str, offset: int) -> None:
        self.committed[what].add(sender)
        self.committed_at.setdefault(what, offset)

    def _judge_ranges(
        self, record: dict[str, Any], place: Place, before: KeyState, after: KeyState, offset: int
    ) -> None:
        old, new = ranges_of(before), ranges_of(after)
        for one, other in pairwise(new):
            if other[0] < one[1]:
                self.fail("ranges do not overlap", f"{place}: {one} and {other}")
        if new and new[0][0] < int(str(after[4])):
            self.fail("no range begins below the offset", f"{place}: {new[0]}, the offset is {after[4]}")
        fresh = {one[5] for one in new} - {one[5] for one in old} - {None}
        if fresh:
            if fresh != {offset} or offset <= self.highest_epoch.get(place, -1):
                self.fail("epochs only grow", f"{place}: {fresh} at {offset} after {self.highest_epoch.get(place)}")
            self.highest_epoch[place] = offset
        if record["type"] == "RevokingRange":
            self.revoked_ms[place, record["epoch"]] = self.records[-1][2]
        if record["type"] == "RangeDone":
            self._judge_done(record, place, before, after, offset)

    def _judge_done(self, record: dict[str, Any], place: Place, before: KeyState, after: KeyState, offset: int) -> None:
        """A range is done by its owner after it was planned; the offset passes only what is done."""
        done = [one for one in ranges_of(before) if one[5] == record["epoch"]]
        if [(one[2], one[3]) for one in done] != [("planned", record["instance"])]:
            self.fail("a commit is only ever by the owner", f"{place}: {record['instance']} ended {done}")
            return
        self._note_commit((place, int(str(before[7])), done[0][1]), record["instance"], offset)
        at = int(str(before[4]))
        for one in sorted([*done, *(one for one in ranges_of(before) if one[2] == "done")]):
            at = one[1] if one[0] == at else at
        if after[4] != at:
            self.fail("the offset moves over what is done only", f"{place}: {after[4]} instead of {at}")


@dataclass(slots=True)
class SnapshotJudge:
    """Watches the snapshot topic: only a newer snapshot may replace a coordination partition's newest whole one."""

    fail: Callable[[str, str], None]
    parts: dict[tuple[str, ...], dict[str, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """By all fields of a key except the part."""
    newest: dict[int, int] = field(default_factory=dict)

    def read(self, partition: int, key: bytes, value: bytes | None) -> None:
        """Judge a record."""
        *name, part = key.decode().split("/")
        parts = self.parts[tuple(name)]
        if value is None:
            parts.pop(part, None)
            if name[0] in FORMER_SNAPSHOTS:
                self.fail("former snapshots stay", key.decode())
        else:
            parts[part] = value
        if name[0] in FORMER_SNAPSHOTS:
            return
        stands = max(
            (
                int(of[4])
                for of, each in self.parts.items()
                if int(of[3]) == partition and of[0] not in FORMER_SNAPSHOTS and _is_whole(each)
            ),
            default=-1,
        )
        if stands < self.newest.get(partition, -1):
            self.fail("the newest snapshot stays", f"partition {partition}: {stands} after {self.newest[partition]}")
        self.newest[partition] = stands


def _is_whole(parts: Mapping[str, bytes]) -> bool:
    return "end" in parts and all(str(number) in parts for number in range(json.loads(parts["end"])["parts"]))


def _rules_in_force(group: GroupState) -> GroupState:
    """Return the settings in force in a group."""
    return group[2:] or WITHOUT_SETTINGS


def _is_moved_without_plan(before: KeyState, after: KeyState) -> bool:
    return before[4] is not None and before[4] != after[4] and before[5] is None


def _before(states: Sequence[tuple[int, T]], offset: int | None, nothing: T) -> T:
    """Return the last of `states` below `offset`, or the last of all; `nothing` if there is none."""
    count = len(states) if offset is None else bisect_left(states, offset, key=itemgetter(0))
    return states[count - 1][1] if count else nothing


def _group_state_of(group: Mapping[str, Any]) -> GroupState:
    pause = (group["paused_until"], group["paused_by"])
    settings = group["settings"]
    if settings is None:
        return pause
    how = (settings["heartbeat_interval_ms"], settings["rules"], settings["delivery"])
    return (*pause, *how, tuple(settings["features"]))


def _state_of(key: Mapping[str, Any]) -> KeyState:
    owner = key["owner"]
    held = NOBODY if owner is None else (owner["instance"], owner["client"], owner["epoch"], owner["last_beat"])
    return (
        *held,
        key["offset"],
        key["plan_end"],
        key["plan_attempts"],
        key["generation"],
        key["data_topic_id"],
        tuple([_range_state_of(each) for each in key["ranges"]]),
    )


def _range_state_of(each: Mapping[str, Any]) -> RangeState:
    owner = each["owner"] or dict.fromkeys(("instance", "client", "epoch", "last_beat"))
    held = (owner["instance"], owner["client"], owner["epoch"], owner["last_beat"])
    return (each["start"], each["end"], each["phase"], *held, each["attempts"])


def ranges_of(state: KeyState) -> tuple[RangeState, ...]:
    """Return the ranges of a key."""
    return cast("tuple[RangeState, ...]", state[9])


def check_readers_agree(judge: LogJudge, partition: int, seen: Seen) -> None:
    """Compare the state of a certain reader with that of the reference reader at the same log offset."""
    at = seen.next_offset
    log_time_ms = _before(judge.log_times[partition], at, None)
    if seen.log_time_ms != log_time_ms:
        judge.fail("readers agree", f"log time up to offset {at}: {seen.log_time_ms} instead of {log_time_ms}")
    check_keys_agree(judge, partition, at, seen.keys)
    for group in seen.groups.keys() | judge.groups[partition].keys():
        known = _before(judge.groups[partition].get(group, []), at, UNHEARD_OF)
        if seen.groups.get(group, UNHEARD_OF) != known:
            judge.fail("readers agree", f"group {group} up to offset {at}: {seen.groups.get(group)} instead of {known}")


def check_keys_agree(judge: LogJudge, partition: int, at: int, keys: Mapping[Place, KeyState]) -> None:
    """Compare the state of all keys of a certain reader that has read up to log offset `at`."""
    for place in keys.keys() | judge.history[partition].keys():
        wanted, found = judge.state(partition, place, at), keys.get(place, UNKNOWN)
        if found != wanted:
            judge.fail("readers agree", f"{place} up to offset {at}: {found} instead of {wanted}")


def check_beliefs(judge: LogJudge, home: int, beliefs: Iterable[Belief], now_ms: int, hi_ms: int) -> None:
    """Two processes may have valid leases on the same offsets only for a while, if one claim was revoked.

    A process whose claim was revoked two heartbeat intervals of `hi_ms` before broker time `now_ms` must have noticed:
    a heartbeat was due, or the lease is over. No lease lasts longer than two intervals of silence. A process may
    believe in no more of a range than the coordination partition `home` gives to that claim.
    """
    holders: dict[Place, list[Belief]] = defaultdict(list)
    for belief in beliefs:
        renewed_ms = judge.renewed_ms.get((belief.place, belief.epoch), now_ms)
        if belief.lease_ends_ms > renewed_ms + 2 * hi_ms:
            judge.fail("a lease ends within two intervals of silence", f"{belief}, silent since {renewed_ms}")
        for start, end, _, _, _, epoch, *_ in ranges_of(judge.state(home, belief.place)):
            if epoch == belief.epoch and belief.start < belief.end and not start <= belief.start < belief.end <= end:
                judge.fail("no more of a range is counted on than is held", f"{belief}, it is [{start}, {end})")
        if judge.revoked_ms.get((belief.place, belief.epoch), 0) > now_ms - 2 * hi_ms:
            continue
        for other in holders[belief.place]:
            shared = max(other.start, belief.start) < min(other.end, belief.end)
            if shared and other.process != belief.process:
                judge.fail("one owner at a time", f"{belief} and {other}")
        holders[belief.place].append(belief)


def check_attempts(judge: LogJudge, output: Output, *, at_most_once: bool) -> None:
    """Judge what was processed without a sink, separately in each generation."""
    by_key: dict[tuple[int, int], list[Attempt]] = defaultdict(list)
    for attempt in output.attempts:
        by_key[attempt.range.partition, attempt.range.generation].append(attempt)
    for (partition, generation), attempts in by_key.items():
        if at_most_once:
            times: dict[int, int] = defaultdict(int)
            for attempt in attempts:
                for offset in attempt.done:
                    times[offset] += 1
            twice = sorted(offset for offset, count in times.items() if count > 1)
            if twice:
                judge.fail("at most once", f"partition {partition}, generation {generation}: {twice} more than once")
            continue
        for attempt in attempts:
            _check_not_committed_before(judge, attempt)
        ranges = sorted({(one.range.start, one.range.end) for one in attempts})
        for (start, end), (next_start, next_end) in pairwise(ranges):
            if next_start < end:
                judge.fail(
                    "repeats are one uncommitted batch",
                    f"partition {partition}, generation {generation}: [{start}, {end}) and [{next_start}, {next_end})",
                )


def _check_not_committed_before(judge: LogJudge, attempt: Attempt) -> None:
    """Check that a message is not processed again after its commit, if the process could know of the commit."""
    one = attempt.range
    what = attempt.place, one.generation, one.end
    at = judge.committed_at.get(what)
    if at is None or (at > one.epoch and (at >= attempt.began_at or attempt.sender not in judge.committed[what])):
        return
    judge.fail("what is committed is not done again", f"{one}, committed at log offset {at}")


def check_nothing_twice(judge: LogJudge, output: Output) -> None:
    """In effectively once no message is in the output twice, whatever happened to the log."""
    for message, rows in sorted(output.rows.items()):
        if sum(rows.values()) > 1:
            judge.fail("effectively once", f"message {message} is {sum(rows.values())} times in the output")


def check_takes(judge: LogJudge, output: Output) -> None:
    """An output accepts no lower generation than before, and no lower token if ranges come in order."""
    tokens: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for one in output.taken:
        generation, epoch = tokens[one.partition]
        if one.generation < generation or (one.epoch < epoch and not one.in_any_order):
            judge.fail(
                "outputs fence", f"{one} of generation {one.generation}, token {one.epoch}, after {generation}, {epoch}"
            )
        tokens[one.partition] = (one.generation, one.epoch)


def check_nothing_lost(
    judge: LogJudge, output: Output, messages: Iterable[tuple[int, int]], *, effectively_once: bool
) -> None:
    """Judge the output after everything was processed."""
    done = {
        (attempt.range.partition, offset) for attempt in output.attempts for offset in attempt.done
    } | output.elsewhere
    for message in sorted(messages):
        if effectively_once:
            count = sum(output.rows[message].values())
            if count != 1:
                judge.fail("effectively once", f"message {message} is {count} times in the output")
        elif message not in done:
            judge.fail("at least once", f"message {message} was never processed")
