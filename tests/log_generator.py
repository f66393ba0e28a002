"""Seeded logs that lead readers of docs/reference/protocol.md into deep states.

Random records are refused nearly always: a plan needs a live owner that knows its offset, and a settings change needs a
pause and stale owners. So the author runs a reference reader over the log that it writes, looks at the state, and picks
records that matter there: the owner's own id, the epoch in force, the end of the open plan, a time on the last
millisecond of a lease. Scripts (a takeover, a set position, ...) run interleaved with random records. Between them are
records with exactly one error.
"""

import copy
import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeAlias

from tests.reference_reader import DELIVERIES, INT32_MAX, INT64_MAX, PlainReader, is_paused, new_group, new_key

Profile: TypeAlias = Literal["mixed", "steady", "hostile", "go", "ranges"]
LogRecord: TypeAlias = tuple[int, int, int, bytes | None]
"""Coordination partition, log offset, broker timestamp in ms, value."""

MAX_VALUE_BYTES = 2048
START_MS = 1_795_230_000_000
FAR_S = 4_000_000_000  # a pause that is longer than any log, unix seconds
GROUPS = ("etl", "größe", "audit.daily")
FEATURES = ("-", "ranges", "ranges,a", "x" * 32, ",".join(f"f{n}" for n in range(20)))
DATA_TOPIC_IDS = ("AAAAAAAAAAAAAAAAAAAAAA", "Zk3_-0987654321abcdefg", "----------------------")
# Ids that a careless reader would confuse.
ODD_INSTANCES = (
    "\u00e9",
    "e\u0301",
    "id",
    "ID",
    " id",
    "id ",
    "\ufeffid",
    "\uffff",
    "\u2028",
    "𝄞" * 255,
    "0",
    "-",
)

# Each is invalid as a number (section 1).
BAD_NUMBERS = (
    "", " ", "-", "+1", "-1", "-0", "00", "01", "1 ", " 1", "1.0", "1e3", "1_0", "0x1", "1\n", "x", "None",
    "\u0661", "\uff11", "\u00b2", "\u0967", "9" * 40,
)  # fmt: skip
# Each is invalid as an instance, client or group.
BAD_NAMES = (
    "",
    "a" * 256,
    "\u00e9" * 256,
    "a\nb",
    "\t",
    "a\x00",
    "\x1b[31m",
    "a\x7f",
    "\x80",
    "a\x85",
    "\x9f",
    "a\n",
)
# Each is invalid as a topic.
BAD_TOPICS = ("", ".", "..", "a" * 250, "a b", "gr\u00fc\u00df", "a:b", "a\n", "*", "a,b")
BAD_TYPES = (
    "",
    "heartbeat",
    "Heartbeats",
    " Mark",
    "Mark ",
    "Mark\n",
    "ClaimingPartitions",
    "RangeClaim",
    "\ufeffMark",
)
BAD_DATA_TOPIC_IDS = (
    "",
    "A" * 21,
    "A" * 23,
    "A" * 21 + "=",
    "A" * 21 + "+",
    "A" * 21 + ".",
    "A" * 22 + "\n",
    "\u00e4" * 22,
)
BAD_RULE_SETS = ("", "Native", "GO", "go ", "none", "native\n")
BAD_DELIVERIES = ("", "exactly_once", "at_least_once ", "AT_MOST_ONCE", "at-least-once")
BAD_FEATURES = (
    "", ",", "a,", ",a", "a,,b", "a,a", "a,b,a", "A", "1a", "_a", "a b", "a-b", "-,a", "a,-", "--", "x" * 33,
    "a\n", "\u00e9",
)  # fmt: skip
BAD_BYTES = (b"\xff", b"\xc3", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82")

TYPE, VERSION, TIME, INSTANCE, CLIENT, GROUP, TOPIC, PARTITION, TAIL = range(9)
NUMBER_TAILS = (
    "Heartbeat",
    "ReleasingPartition",
    "ClaimingMessages",
    "ReleaseGroup",
    "RevokingClaim",
    "RangeHeartbeat",
    "RangeDone",
    "ReleasingRange",
    "RevokingRange",
)
TWO_NUMBER_TAILS = ("ClaimingRange", "PlanningRange")
GROUP_TYPES = ("ReleaseGroup", "GroupSettings", "Mark")


def generate(
    seed: int,
    records: int,
    *,
    keys: int | None = None,
    heartbeat_interval_ms: int = 60_000,
    coordination_partitions: int = 4,
    profile: Profile = "mixed",
) -> Iterator[LogRecord]:
    """Yield the records of a log, the same for the same arguments, with coordination partitions interleaved.

    `heartbeat_interval_ms` must be passed to the readers of this log; with the profile `go` they also need that rule
    set. `keys` is the approximate number of (group, topic, partition): 12, for `steady` 10,000. `steady` is what a
    large group writes on a quiet day, 97 % heartbeats, and is generated fast enough for a benchmark.
    """
    if profile == "steady":
        return _steady(seed, records, keys or 10_000, heartbeat_interval_ms, coordination_partitions)
    return _Author(seed, keys or 12, heartbeat_interval_ms, coordination_partitions, profile).write(records)


@functools.lru_cache
def topics_by_coordination_partition(coordination_partitions: int, each: int, *, odd: bool) -> list[list[str]]:
    """Return `each` topics for each coordination partition; with `odd`, some names are long and unusual."""
    found: list[list[str]] = [[] for _ in range(coordination_partitions)]
    number = 0
    while min(len(topics) for topics in found) < each:
        shapes = [f"events{number}"]
        if odd:
            shapes = [f"{number}".rjust(249, "x"), "." * (3 + number), f"-_{number}", f"events{number}"]
        for topic in shapes:
            digest = hashlib.md5(topic.encode(), usedforsecurity=False).digest()
            topics = found[int.from_bytes(digest[:8], "little") % coordination_partitions]
            if len(topics) < each and len(topic) <= 249:
                topics.append(topic)
        number += 1
    return found


# Values: valid ones, and every possible error in one of them.


def value_of(fields: Sequence[str]) -> bytes:
    """Return the value with these fields."""
    return "/".join(fields).encode()


def spoiled(fields: Sequence[str], foreign_topic: str | None) -> Iterator[tuple[str, bytes | None]]:
    """Yield a description and the value for each way to be invalid by section 1, one error at a time.

    `fields` are those of a valid value; `foreign_topic` is one that lies in another coordination partition.
    """
    yield "null", None
    yield "empty", b""
    yield "oversized", padded(fields, MAX_VALUE_BYTES + 1)
    yield "field missing", value_of(fields[:-1])
    yield "slash at the end", value_of([*fields, ""])
    yield "field too many", value_of([*fields, "0"])
    yield "slash at the start", b"/" + value_of(fields)
    yield "byte order mark", b"\xef\xbb\xbf" + value_of(fields)
    for wrong in BAD_BYTES:
        yield "not UTF-8 inside", value_of(fields[:INSTANCE]) + b"/a" + wrong + b"/" + value_of(fields[CLIENT:])
        yield "not UTF-8 at the end", value_of(fields) + wrong
    for position, wrongs in _wrong_fields(fields, foreign_topic):
        for text in wrongs:
            yield (
                f"field {position}: {text[:40]!r}",
                value_of([*fields[:position], text, *fields[position + 1 :]]),
            )


def _wrong_fields(fields: Sequence[str], foreign_topic: str | None) -> Iterator[tuple[int, Sequence[str]]]:
    kind = fields[TYPE]
    too_large = (str(INT64_MAX + 1), str(2**64))
    yield TYPE, BAD_TYPES
    yield VERSION, (*BAD_NUMBERS, *too_large)
    yield TIME, (*BAD_NUMBERS, *too_large)
    for position in (INSTANCE, CLIENT, GROUP):
        yield position, BAD_NAMES
    if kind in GROUP_TYPES:
        yield TOPIC, ("events0", "-", " ", ".")
        yield PARTITION, (*BAD_NUMBERS, "1", str(INT32_MAX), str(INT32_MAX + 1))
    else:
        yield TOPIC, BAD_TOPICS if foreign_topic is None else (*BAD_TOPICS, foreign_topic)
        yield PARTITION, (*BAD_NUMBERS, str(INT32_MAX + 1), str(INT64_MAX))
    if kind in NUMBER_TAILS:
        yield TAIL, (*BAD_NUMBERS, *too_large)
    if kind in TWO_NUMBER_TAILS:
        yield TAIL, (*BAD_NUMBERS, *too_large)
        yield TAIL + 1, (*BAD_NUMBERS, *too_large)
    if kind == "DataTopic":
        yield TAIL, BAD_DATA_TOPIC_IDS
    if kind == "GroupSettings":
        not_for_go = ("59999", "60001", "1", "120000") if fields[TAIL + 1] == "go" else ()
        yield TAIL, (*BAD_NUMBERS, *too_large, "0", *not_for_go)
        yield TAIL + 1, BAD_RULE_SETS if fields[TAIL] == "60000" else (*BAD_RULE_SETS, "go")
        yield TAIL + 2, BAD_DELIVERIES
        yield TAIL + 3, BAD_FEATURES


def stretched(fields: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield a description and the value for each way to be at a limit of section 1 and still valid."""
    yield "2,048 bytes", padded(fields, MAX_VALUE_BYTES)
    for position in (VERSION, TIME):
        for text in ("0", str(INT64_MAX)):
            yield f"field {position} {text}", value_of([*fields[:position], text, *fields[position + 1 :]])
    for position in (INSTANCE, CLIENT):
        for text in ODD_INSTANCES:
            yield (
                f"field {position} {text[:20]!r}",
                value_of([*fields[:position], text, *fields[position + 1 :]]),
            )
    if fields[TYPE] not in GROUP_TYPES:
        yield "largest partition", value_of([*fields[:PARTITION], str(INT32_MAX), *fields[TAIL:]])
    if fields[TYPE] in NUMBER_TAILS:
        yield "largest number", value_of([*fields[:TAIL], str(INT64_MAX)])
        yield "smallest number", value_of([*fields[:TAIL], "0"])
    if fields[TYPE] in TWO_NUMBER_TAILS:
        for first, second in (("0", str(INT64_MAX)), (str(INT64_MAX), "0")):
            yield f"numbers {first}, {second}", value_of([*fields[:TAIL], first, second])


def padded(fields: Sequence[str], size: int) -> bytes:
    """Return the value with an instance and a client that make it exactly `size` bytes long."""
    rest = len(value_of([*fields[:INSTANCE], "", "", *fields[GROUP:]]))
    first = (size - rest) // 2
    return value_of([*fields[:INSTANCE], _filler(first), _filler(size - rest - first), *fields[GROUP:]])


def _filler(size: int) -> str:
    """Return a name of `size` bytes in as few code points as possible."""
    return "𝄞" * (size // 4) + ("", "a", "é", "€")[size % 4]


# The author.


@dataclass(slots=True)
class _Lane:
    """A coordination partition that is being written."""

    partition: int
    keys: list[tuple[str, str, int]]
    next_offset: int
    key: tuple[str, str, int]
    script: "Iterator[_Draft] | None" = None
    past: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    epochs: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    range_epochs: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    written: bool = False


@dataclass(frozen=True, slots=True)
class _Draft:
    """A record that has no offset yet."""

    timestamp_ms: int
    fields: list[str]


@dataclass(frozen=True, slots=True)
class _Habits:
    """The probability of each choice of an author."""

    stranger: float
    spoil: float
    stretch: float
    cut_log: float
    extreme: float
    script: float


_HABITS: dict[str, _Habits] = {
    "mixed": _Habits(stranger=0.3, spoil=0.04, stretch=0.02, cut_log=0.05, extreme=0.002, script=0.08),
    "hostile": _Habits(stranger=0.5, spoil=0.25, stretch=0.1, cut_log=0.3, extreme=0.02, script=0.05),
    "go": _Habits(stranger=0.4, spoil=0.03, stretch=0.02, cut_log=0.05, extreme=0.002, script=0.08),
    "ranges": _Habits(stranger=0.2, spoil=0.02, stretch=0.01, cut_log=0.03, extreme=0.002, script=0.12),
}
_RANGE_WEIGHTS = {
    "ClaimingRange": 4,
    "PlanningRange": 3,
    "RangeHeartbeat": 3,
    "RangeDone": 3,
    "ReleasingRange": 1,
    "RevokingRange": 1,
}
_WEIGHTS = {
    **_RANGE_WEIGHTS,
    "ClaimingPartition": 26,
    "Heartbeat": 30,
    "ReleasingPartition": 8,
    "ClaimingMessages": 14,
    "RevokingClaim": 7,
    "ReleaseGroup": 6,
    "DataTopic": 5,
    "GroupSettings": 5,
    "Mark": 2,
}


class _Author:
    """Writes one log, and chooses records by the state that its own reference reader computes."""

    def __init__(
        self, seed: int, keys: int, heartbeat_interval_ms: int, coordination_partitions: int, profile: str
    ) -> None:
        self.rng = Random(f"{profile}:{seed}")
        self.profile = profile
        self.habits = _HABITS[profile]
        self.weights, self.scripts = _WEIGHTS, (*_SCRIPTS, _Author._by_ranges)
        if profile == "ranges":
            self.weights = _WEIGHTS | {kind: 8 * weight for kind, weight in _RANGE_WEIGHTS.items()}
            self.weights |= {"Heartbeat": 14, "ClaimingPartition": 14, "ReleaseGroup": 4, "GroupSettings": 3}
            self.scripts = (*_SCRIPTS, *_RANGE_SCRIPTS, *_RANGE_SCRIPTS)
        self.reader = PlainReader(
            coordination_partitions, heartbeat_interval_ms, rules="go" if profile == "go" else "native"
        )
        self.instances = 0
        self.lanes = self._lanes(keys, coordination_partitions)

    def _lanes(self, keys: int, coordination_partitions: int) -> list[_Lane]:
        topics = topics_by_coordination_partition(coordination_partitions, 2, odd=self.profile == "hostile")
        in_each_lane = max(1, keys // coordination_partitions)
        lanes = []
        for partition in range(coordination_partitions):
            lane_keys: list[tuple[str, str, int]] = []
            for number in range(in_each_lane):
                # Neighbours share a topic but not the group, or the group but not the topic.
                group = GROUPS[number % len(GROUPS)]
                lane_keys.append((group, topics[partition][number // 3 % 2], number // 6))
            cut = self.rng.random() < self.habits.cut_log
            first_offset = self.rng.choice((1, 7, 10**12)) if cut else 0
            lanes.append(_Lane(partition, lane_keys, first_offset, lane_keys[0]))
        return lanes

    def write(self, records: int) -> Iterator[LogRecord]:
        """Yield that many records."""
        left = records
        while left > 0:
            lane = self.rng.choice(self.lanes)
            for _ in range(self.rng.randrange(1, 12)):
                for timestamp_ms, value in self._next(lane):
                    if left > 0:
                        left -= 1
                        yield self._append(lane, timestamp_ms, value)

    def _append(self, lane: _Lane, timestamp_ms: int, value: bytes | None) -> LogRecord:
        if lane.written and self.rng.random() < 0.1:
            lane.next_offset += self.rng.choice((1, 1, 2, 5, 1000))  # gaps that transactions and compaction leave
        offset = lane.next_offset
        self.reader.read(lane.partition, offset, timestamp_ms, value)
        lane.next_offset = offset + 1
        lane.written = True
        owner = self._key(lane, lane.key)["owner"]
        if owner is not None and owner["instance"] not in lane.past:
            lane.past.append(owner["instance"])
        if owner is not None and owner["epoch"] is not None and owner["epoch"] not in lane.epochs:
            lane.epochs.append(owner["epoch"])
        for held in self._held(lane):
            if held["owner"]["epoch"] not in lane.range_epochs:
                lane.range_epochs.append(held["owner"]["epoch"])
                lane.past.append(held["owner"]["instance"])
        return lane.partition, offset, timestamp_ms, value

    def _next(self, lane: _Lane) -> list[tuple[int, bytes | None]]:
        """Return the next record, with similar ones before or after it that are invalid, unusual or duplicates."""
        draft = self._draft(lane)
        out: list[tuple[int, bytes | None]] = []
        if self.rng.random() < self.habits.spoil:
            wrong = draft
            if self.rng.random() < 0.3:  # types with the most fields are otherwise rare
                wrong = self._random_draft(lane, self.rng.choice(("GroupSettings", "DataTopic")))
            foreign = next((other.keys[0][1] for other in self.lanes if other is not lane), None)
            ways: dict[str, list[bytes | None]] = {}
            for what, value in spoiled(wrong.fields, foreign):
                ways.setdefault(what.split(":")[0], []).append(value)
            out.append((wrong.timestamp_ms, self.rng.choice(ways[self.rng.choice(list(ways))])))
        if self.rng.random() < self.habits.stretch:
            values = [value for _, value in stretched(draft.fields)]
            out.append((draft.timestamp_ms, self.rng.choice(values)))
        out.append((draft.timestamp_ms, value_of(draft.fields)))
        if self.rng.random() < 0.04:
            out.append((draft.timestamp_ms, value_of(draft.fields)))
        return out

    def _draft(self, lane: _Lane) -> _Draft:
        if lane.script is None and self.profile == "ranges" and not self._is_begun(lane) and self.rng.random() < 0.3:
            lane.script = self._by_ranges(lane)
        if lane.script is None and self.rng.random() < self.habits.script:
            lane.key = self.rng.choice(lane.keys)
            lane.script = self.rng.choice(self.scripts)(self, lane)
        if lane.script is not None and self.rng.random() < 0.85:
            draft = next(lane.script, None)
            if draft is not None:
                return draft
            lane.script = None
        if lane.script is None and self.rng.random() < 0.25:
            lane.key = self.rng.choice(lane.keys)
        kind = self.rng.choices(list(self.weights), weights=list(self.weights.values()))[0]
        return self._random_draft(lane, kind)

    # Questions about the state.

    def _group(self, lane: _Lane, name: str) -> dict[str, Any]:
        log = self.reader.logs.get(lane.partition)
        found: dict[str, Any] = new_group() if log is None else log["groups"].get(name, new_group())
        return found

    def _key(self, lane: _Lane, key: tuple[str, str, int]) -> dict[str, Any]:
        found: dict[str, Any] = self._group(lane, key[0])["keys"].get(key[1:], new_key())
        return found

    def _is_begun(self, lane: _Lane) -> bool:
        """Return whether ranges of the key can be claimed, apart from a pause and an owner."""
        key, group = self._key(lane, lane.key), self._group(lane, lane.key[0])
        return key["offset"] is not None and "ranges" in self.reader._settings_of(group)["features"]

    def _held(self, lane: _Lane) -> list[dict[str, Any]]:
        """Return a copy of the ranges that have owners now, because the reader continues to change them."""
        return copy.deepcopy([each for each in self._key(lane, lane.key)["ranges"] if each["owner"] is not None])

    def _now_ms(self, lane: _Lane) -> int:
        log = self.reader.logs.get(lane.partition)
        return START_MS if log is None else log["log_time"]

    def _interval_ms(self, lane: _Lane) -> int:
        interval: int = self.reader._settings_of(self._group(lane, lane.key[0]))["heartbeat_interval_ms"]
        return interval

    def _pauser(self, lane: _Lane) -> str | None:
        paused_by: str | None = self._group(lane, lane.key[0])["paused_by"]
        return paused_by

    def _paused(self, lane: _Lane) -> bool:
        log = self.reader.logs.get(lane.partition)
        return log is not None and is_paused(log, self._group(lane, lane.key[0]))

    # Choices: who, when, how far.

    def _new_instance(self) -> str:
        self.instances += 1
        return f"run-{self.instances}.{self.rng.randrange(16**4):04x}"

    def _instance(self, lane: _Lane, stranger: float) -> str:
        owner = self._key(lane, lane.key)["owner"]
        if owner is not None and self.rng.random() >= stranger:
            instance: str = owner["instance"]
            return instance
        pauser = self._pauser(lane)
        if pauser is not None and self.rng.random() < (0.5 if self._paused(lane) else 0.1):
            return pauser
        if lane.past and self.rng.random() < 0.5:
            return self.rng.choice(lane.past)
        if self.rng.random() < self.habits.stretch:
            return self.rng.choice(ODD_INSTANCES)
        return self._new_instance()

    def _lease_edge_ms(self, lane: _Lane) -> int | None:
        """Return the last millisecond at which the owner of the key, or of one of its ranges, is live."""
        owner = self._key(lane, lane.key)["owner"]
        held = self._held(lane)
        if held and (owner is None or self.rng.random() < 0.5):
            owner = self.rng.choice(held)["owner"]
        if owner is None:
            return None
        edge: int = owner["last_beat"] + 2 * self._interval_ms(lane)
        return edge

    def _near(self, lane: _Lane, edge_ms: int | None, *, otherwise_ms: int) -> int:
        """Return a time on the edge or within 1 ms of it, if the edge is near enough."""
        reachable = edge_ms is not None and edge_ms < self._now_ms(lane) + 10**10
        if edge_ms is None or not reachable:
            return otherwise_ms
        return edge_ms + self.rng.choice((-1, 0, 1))

    def _soon_ms(self, lane: _Lane) -> int:
        step_ms = min(self._interval_ms(lane), 600_000)
        return self._now_ms(lane) + self.rng.choice((0, 0, 1, self.rng.randrange(step_ms // 8 + 2)))

    def _time_ms(self, lane: _Lane, *, edge: float = 0.12) -> int:
        now_ms = self._now_ms(lane)
        if not lane.written and self.rng.random() < 0.1:
            return -1  # what a broker returns if it has no timestamp for it
        roll = self.rng.random()
        if roll < edge:
            return self._near(lane, self._lease_edge_ms(lane), otherwise_ms=now_ms)
        if roll < edge + 0.05:
            until = self._group(lane, lane.key[0])["paused_until"]
            return self._near(lane, None if until is None else until * 1000, otherwise_ms=now_ms)
        if roll < edge + 0.10:
            return max(-1, now_ms - self.rng.choice((1, 1000, 130_000, 10**12)))
        if roll < edge + 0.12:
            return now_ms + 2 * min(self._interval_ms(lane), 600_000) + self.rng.randrange(3)
        if roll < edge + 0.12 + self.habits.extreme:
            return self.rng.choice((-1, 0, now_ms + 10**9, now_ms + 10**11))
        return self._soon_ms(lane)

    def _number(self, likely: Sequence[int]) -> int:
        if self.rng.random() < self.habits.extreme:
            return self.rng.choice((0, INT64_MAX, INT64_MAX - 1, 2**53 + 1, 2**63 - 2**10))
        return min(INT64_MAX, max(0, self.rng.choice(likely)))

    def _commit(self, lane: _Lane) -> int:
        key = self._key(lane, lane.key)
        offset = key["offset"] or 0
        likely = [offset, offset, offset + 1, offset + self.rng.randrange(1, 500), offset - 1, 0]
        if key["plan_end"] is not None:
            end = key["plan_end"]
            likely += [end, end, end, end - 1, end + 1, (offset + end) // 2]
        return self._number(likely)

    def _proposal(self, lane: _Lane) -> int:
        key = self._key(lane, lane.key)
        offset = key["offset"] or 0
        likely = [offset + 1, offset + self.rng.randrange(1, 500), offset + 100, offset, offset - 1]
        if key["plan_end"] is not None:
            end = key["plan_end"]
            likely += [end, end, end, end + 1, end - 1]
        return self._number(likely)

    def _epoch(self, lane: _Lane) -> int:
        owner = self._key(lane, lane.key)["owner"]
        likely = [*lane.epochs, 0, lane.next_offset, lane.next_offset - 1]
        if owner is not None and owner["epoch"] is not None:
            likely += [owner["epoch"]] * len(likely) + [owner["epoch"] + 1, owner["epoch"] - 1]
        return self._number(likely)

    def _expiry_s(self, lane: _Lane) -> int:
        now_s = self._now_ms(lane) // 1000
        return self._number([0, now_s, now_s + 1, now_s + 2, now_s + self.rng.randrange(1, 200), FAR_S, now_s - 1])

    def _settings(self) -> list[str]:
        default_ms = self.reader.heartbeat_interval_ms
        if self.profile == "ranges" and self.rng.random() < 0.85:
            features = self.rng.choice(("ranges", "ranges", "ranges,a", "a,ranges", "-", "xranges", "ranges_"))
            delivery = self.rng.choice((*DELIVERIES, "at_least_once", "at_least_once", "at_least_once"))
            rules = "go" if default_ms == 60_000 and self.rng.random() < 0.3 else "native"
            return [str(default_ms), rules, delivery, features]
        rules = "go" if self.rng.random() < (0.6 if self.profile == "go" else 0.15) else "native"
        interval_ms = self.rng.choice((default_ms, default_ms, default_ms, 60_000, 1, 2, 1000, default_ms + 1))
        if self.rng.random() < self.habits.extreme:
            interval_ms = INT64_MAX
        if rules == "go":
            interval_ms = 60_000
        return [str(interval_ms), rules, self.rng.choice(DELIVERIES), self.rng.choice(FEATURES)]

    # Records.

    def _make(self, lane: _Lane, timestamp_ms: int, kind: str, instance: str, tail: Sequence[object] = ()) -> _Draft:
        group, topic, number = lane.key
        sent_s = max(0, timestamp_ms // 1000 + self.rng.randrange(-1, 2))
        client = self.rng.choice(("spark", "spark", "nächtlich", "id"))
        where = ["", "0"] if kind in GROUP_TYPES else [topic, str(number)]
        version = "0" if kind == "ReleaseGroup" else "1"
        return _Draft(
            timestamp_ms,
            [kind, version, str(sent_s), instance, client, group, *where, *(str(part) for part in tail)],
        )

    def _random_draft(self, lane: _Lane, kind: str) -> _Draft:
        strange = self.habits.stranger
        if kind == "ClaimingPartition":
            return self._make(lane, self._time_ms(lane, edge=0.35), kind, self._instance(lane, 0.85))
        if kind == "Heartbeat":
            return self._make(lane, self._time_ms(lane), kind, self._instance(lane, strange), [self._commit(lane)])
        if kind == "ReleasingPartition":
            return self._make(lane, self._time_ms(lane), kind, self._instance(lane, strange), [self._commit(lane)])
        if kind == "ClaimingMessages":
            return self._make(lane, self._time_ms(lane), kind, self._instance(lane, strange), [self._proposal(lane)])
        if kind == "RevokingClaim":
            return self._make(lane, self._time_ms(lane), kind, self._instance(lane, 0.9), [self._epoch(lane)])
        if kind == "ReleaseGroup":
            return self._make(lane, self._time_ms(lane), kind, self._instance(lane, 0.8), [self._expiry_s(lane)])
        if kind == "DataTopic":
            data_topic_id = self.rng.choice(DATA_TOPIC_IDS)
            return self._make(lane, self._time_ms(lane), kind, self._instance(lane, strange), [data_topic_id])
        if kind == "GroupSettings":
            return self._make(lane, self._time_ms(lane), kind, self._instance(lane, 0.9), self._settings())
        if kind in _RANGE_WEIGHTS:
            return self._of_a_range(lane, kind)
        return self._make(lane, self._time_ms(lane), "Mark", self._instance(lane, 1.0))

    def _bounds(self, lane: _Lane) -> list[int]:
        """Return the bounds for a claim of a range: an existing range, one next to it, or one that is off by one."""
        key = self._key(lane, lane.key)
        offset = key["offset"] or 0
        edges = [offset, *(edge for each in key["ranges"] for edge in (each["start"], each["end"]))]
        if key["ranges"] and self.rng.random() < 0.55:
            found = self.rng.choice(key["ranges"])
            start, end = found["start"], found["end"]
            if self.rng.random() < 0.3:
                start, end = end, end + self.rng.randrange(1, 40)
            elif self.rng.random() < 0.2:
                start, end = max(offset, start - self.rng.randrange(1, 40)), start
            if self.rng.random() < 0.25:
                start += self.rng.choice((-1, 0, 1))
                end += self.rng.choice((-1, 0, 1))
            return [self._number([start]), self._number([end])]
        start = self.rng.choice((offset, offset, offset - 1, self.rng.choice(edges), max(edges), max(edges) + 3))
        return [self._number([start]), self._number([start + self.rng.choice((-1, 0, 1, 1, 10, 10, 40))])]

    def _of_a_range(self, lane: _Lane, kind: str) -> _Draft:
        if kind == "ClaimingRange":
            return self._make(lane, self._time_ms(lane, edge=0.35), kind, self._instance(lane, 0.9), self._bounds(lane))
        held = self._held(lane)
        epochs = [*lane.range_epochs, *lane.epochs, 0, lane.next_offset, lane.next_offset - 1]
        epoch, instance, end = self._number(epochs), self._instance(lane, 0.3), self._commit(lane)
        if held and self.rng.random() >= self.habits.stranger / 2:
            found = self.rng.choice(held)
            epoch = found["owner"]["epoch"] + self.rng.choice((0,) * 14 + (-1, 1))
            likely = [found["end"], found["end"], (found["start"] + found["end"] + 1) // 2]
            end = self._number([*likely, *likely, found["end"] + 1, found["start"], found["start"] + 1])
            if self.rng.random() >= self.habits.stranger / 2:
                instance = found["owner"]["instance"]
        tail = [epoch, end] if kind == "PlanningRange" else [epoch]
        return self._make(lane, self._time_ms(lane), kind, instance, tail)

    # Scripts: each looks at the state again before each of its records, because other records come in between.

    def _free(self, lane: _Lane, instance: str) -> Iterator[_Draft]:
        """Take the key from its owner, by a revocation or by waiting."""
        owner = self._key(lane, lane.key)["owner"]
        edge_ms = self._lease_edge_ms(lane)
        if owner is None or edge_ms is None:
            return
        if self.rng.random() < 0.5 or edge_ms > self._now_ms(lane) + 10**10:
            yield self._make(lane, self._soon_ms(lane), "RevokingClaim", instance, [owner["epoch"] or 0])
        else:
            yield self._make(lane, edge_ms + self.rng.choice((0, 1, 1)), "Mark", instance)

    def _set_position(self, lane: _Lane) -> Iterator[_Draft]:
        instance = self._new_instance()
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [FAR_S])
        yield from self._free(lane, instance)
        yield self._make(lane, self._soon_ms(lane), "ClaimingPartition", instance)
        if self.rng.random() < 0.5:
            data_topic_id = self.rng.choice(DATA_TOPIC_IDS)
            yield self._make(lane, self._soon_ms(lane), "DataTopic", instance, [data_topic_id])
        if self.rng.random() < 0.3:
            yield self._make(lane, self._soon_ms(lane), "Heartbeat", instance, [self._commit(lane)])
        if self.rng.random() < 0.2:  # another instance pauses in between
            yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", self._new_instance(), [FAR_S])
        yield self._make(lane, self._time_ms(lane), "ReleasingPartition", instance, [self._commit(lane)])
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [0])

    def _change_settings(self, lane: _Lane) -> Iterator[_Draft]:
        instance = self._new_instance()
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [FAR_S])
        for key in [each for each in lane.keys if each[0] == lane.key[0]]:
            lane.key = key
            yield from self._free(lane, instance)
        yield self._make(lane, self._soon_ms(lane), "GroupSettings", instance, self._settings())
        if self.rng.random() < 0.4:
            yield self._make(lane, self._soon_ms(lane), "GroupSettings", instance, self._settings())
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", self._new_instance(), [0])

    def _take_over(self, lane: _Lane) -> Iterator[_Draft]:
        first, second = self._new_instance(), self._new_instance()
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", first, [0])
        yield from self._free(lane, first)
        yield self._make(lane, self._soon_ms(lane), "ClaimingPartition", first)
        yield self._make(lane, self._soon_ms(lane), "Heartbeat", first, [self._commit(lane)])
        yield self._make(lane, self._soon_ms(lane), "ClaimingMessages", first, [self._proposal(lane)])
        for past_edge_ms in (-1, 0, 1):
            edge_ms = self._lease_edge_ms(lane)
            if edge_ms is None or edge_ms > self._now_ms(lane) + 10**10:
                return
            yield self._make(lane, edge_ms + past_edge_ms, "ClaimingPartition", second)
        yield self._make(lane, self._soon_ms(lane), "Heartbeat", first, [self._commit(lane)])
        end = self._key(lane, lane.key)["plan_end"]
        if end is None:
            return
        yield self._make(lane, self._soon_ms(lane), "ClaimingMessages", second, [end])
        yield self._make(lane, self._soon_ms(lane), "Heartbeat", second, [end])
        yield self._make(lane, self._soon_ms(lane), "ReleasingPartition", second, [self._commit(lane)])
        yield self._make(lane, self._soon_ms(lane), "Heartbeat", second, [end + 1])

    def _keep_failing(self, lane: _Lane) -> Iterator[_Draft]:
        instance = self._new_instance()
        yield from self._free(lane, instance)
        yield self._make(lane, self._soon_ms(lane), "ClaimingPartition", instance)
        yield self._make(lane, self._soon_ms(lane), "Heartbeat", instance, [self._commit(lane)])
        yield self._make(lane, self._soon_ms(lane), "ClaimingMessages", instance, [self._proposal(lane)])
        for _ in range(self.rng.randrange(1, 4)):
            yield from self._free(lane, self._new_instance())
            yield self._make(lane, self._soon_ms(lane), "ClaimingPartition", self._new_instance())
        owner = self._key(lane, lane.key)["owner"]
        if owner is not None:
            offset = self._key(lane, lane.key)["offset"] or 0
            yield self._make(lane, self._soon_ms(lane), "Heartbeat", owner["instance"], [offset])
            yield self._make(lane, self._soon_ms(lane), "ReleasingPartition", owner["instance"], [offset])
        # An open plan without an owner: may the group get settings?
        yield self._make(lane, self._soon_ms(lane), "GroupSettings", self._new_instance(), self._settings())

    def _pause_ends(self, lane: _Lane) -> Iterator[_Draft]:
        pauser, other = self._new_instance(), self._new_instance()
        expiry_s = self._now_ms(lane) // 1000 + self.rng.randrange(1, 4)
        yield self._make(lane, self._now_ms(lane), "ReleaseGroup", pauser, [expiry_s])
        yield from self._free(lane, pauser)
        for past_edge_ms in (-1, 0, 1):
            kind = self.rng.choice(("ClaimingPartition", "ClaimingMessages", "GroupSettings", "ClaimingPartition"))
            tail: list[Any] = self._settings() if kind == "GroupSettings" else []
            instance = other if past_edge_ms <= 0 else pauser
            if kind == "ClaimingMessages":
                tail, instance = [self._proposal(lane)], self._instance(lane, 0.1)
            yield self._make(lane, expiry_s * 1000 + past_edge_ms, kind, instance, tail)
        yield self._make(lane, self._soon_ms(lane), "ReleasingPartition", pauser, [self._commit(lane)])

    def _remake_data_topic(self, lane: _Lane) -> Iterator[_Draft]:
        instance = self._new_instance()
        yield from self._free(lane, instance)
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [FAR_S])
        yield self._make(lane, self._soon_ms(lane), "ClaimingPartition", instance)
        for _ in range(self.rng.randrange(1, 4)):
            data_topic_id = self.rng.choice(DATA_TOPIC_IDS)
            yield self._make(lane, self._time_ms(lane), "DataTopic", instance, [data_topic_id])
        if self.rng.random() < 0.5:
            yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", self._new_instance(), [0])
        yield self._make(lane, self._soon_ms(lane), "ClaimingMessages", instance, [self._proposal(lane)])
        yield self._make(lane, self._soon_ms(lane), "DataTopic", instance, [self.rng.choice(DATA_TOPIC_IDS)])
        yield self._make(lane, self._soon_ms(lane), "Heartbeat", instance, [self._commit(lane)])

    def _steal_back(self, lane: _Lane) -> Iterator[_Draft]:
        """Let two instances send heartbeats for one key in turn: under `go` each takes it from the other."""
        instances = [self._instance(lane, 0.0), self._new_instance()]
        for _ in range(self.rng.randrange(2, 7)):
            offset = self._commit(lane)
            kind = self.rng.choice(("Heartbeat", "Heartbeat", "Heartbeat", "ClaimingMessages", "ReleasingPartition"))
            yield self._make(lane, self._time_ms(lane), kind, self.rng.choice(instances), [offset])

    def _by_ranges(self, lane: _Lane) -> Iterator[_Draft]:
        """Bring the key from any state to claims by ranges."""
        instance = self._new_instance()
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [FAR_S])
        for key in [each for each in lane.keys if each[0] == lane.key[0]]:
            lane.key = key
            yield from self._free(lane, instance)
            yield from self._free_ranges(lane, instance)
        delivery = self.reader._settings_of(self._group(lane, lane.key[0]))["delivery"]
        settings = [self._interval_ms(lane), "native", delivery, "ranges"]
        yield self._make(lane, self._soon_ms(lane), "GroupSettings", instance, settings)
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [0])
        first = self._new_instance()
        yield self._make(lane, self._soon_ms(lane), "ClaimingPartition", first)
        yield self._make(lane, self._soon_ms(lane), "DataTopic", first, [DATA_TOPIC_IDS[0]])
        end = self._key(lane, lane.key)["plan_end"]
        yield self._make(lane, self._soon_ms(lane), "Heartbeat", first, [self._commit(lane) if end is None else end])
        if self.rng.random() < 0.8:
            yield self._make(lane, self._soon_ms(lane), "ReleasingPartition", first, [0])
        yield from self._work_by_ranges(lane)

    def _free_ranges(self, lane: _Lane, instance: str) -> Iterator[_Draft]:
        for held in self._held(lane):
            yield self._make(lane, self._soon_ms(lane), "RevokingRange", instance, [held["owner"]["epoch"]])

    def _work_by_ranges(self, lane: _Lane) -> Iterator[_Draft]:
        """Claim adjacent ranges, plan some of them, shorter or whole, and finish them in any order."""
        first, second = self._new_instance(), self._new_instance()
        start = self._key(lane, lane.key)["offset"] or 0
        for _ in range(self.rng.randrange(2, 5)):
            end = start + self.rng.randrange(2, 40)
            owner = self.rng.choice((first, second))
            yield self._make(lane, self._soon_ms(lane), "ClaimingRange", owner, [start, end])
            start = end + self.rng.choice((0, 0, 0, 1, 5))
        for held in self._held(lane):
            tail = [held["owner"]["epoch"], held["end"] - self.rng.choice((0, 0, 0, 1))]
            yield self._make(lane, self._soon_ms(lane), "PlanningRange", held["owner"]["instance"], tail)
        for held in self.rng.sample(self._held(lane), len(self._held(lane))):
            if self.rng.random() < 0.8:
                tail = [held["owner"]["epoch"]]
                yield self._make(lane, self._soon_ms(lane), "RangeDone", held["owner"]["instance"], tail)

    def _take_a_range_over(self, lane: _Lane) -> Iterator[_Draft]:
        held = self._held(lane)
        if not held:
            yield from self._work_by_ranges(lane)
            return
        found, second = self.rng.choice(held), self._new_instance()
        bounds, first, epoch = [found["start"], found["end"]], found["owner"]["instance"], found["owner"]["epoch"]
        edge_ms = found["owner"]["last_beat"] + 2 * self._interval_ms(lane)
        if edge_ms > self._now_ms(lane) + 10**10:
            return
        kind, tail = self.rng.choice((("ClaimingRange", bounds), ("ClaimingPartition", [])))
        for past_edge_ms in (-1, 0, 1):
            yield self._make(lane, edge_ms + past_edge_ms, kind, second, tail)
        yield self._make(lane, self._soon_ms(lane), "RangeHeartbeat", first, [epoch])
        yield self._make(lane, self._soon_ms(lane), "RangeDone", first, [epoch])
        for held_now in self._held(lane):
            tail = [held_now["owner"]["epoch"]]
            yield self._make(lane, self._soon_ms(lane), "RangeDone", held_now["owner"]["instance"], tail)

    def _pause_ranges(self, lane: _Lane) -> Iterator[_Draft]:
        """Pause, and do with ranges what is allowed then; the pausing instance claims the key, or its pause ends."""
        pauser = self._new_instance()
        expiry_s = self._now_ms(lane) // 1000 + self.rng.randrange(1, 4)
        until_s = self.rng.choice((expiry_s, FAR_S))
        yield self._make(lane, self._now_ms(lane), "ReleaseGroup", pauser, [until_s])
        for held in self._held(lane):
            kind = self.rng.choice(("PlanningRange", "RangeHeartbeat", "RangeDone", "ReleasingRange", "RevokingRange"))
            tail = [held["owner"]["epoch"], held["end"]] if kind == "PlanningRange" else [held["owner"]["epoch"]]
            yield self._make(lane, self._soon_ms(lane), kind, held["owner"]["instance"], tail)
        before = [(each["owner"]["epoch"], each["owner"]["instance"]) for each in self._held(lane)]
        if self.rng.random() < 0.6:
            yield from self._free_ranges(lane, pauser)
        else:
            edge_ms = max((each["owner"]["last_beat"] for each in self._held(lane)), default=0)
            edge_ms += 2 * self._interval_ms(lane)
            if edge_ms < self._now_ms(lane) + 10**10:
                yield self._make(lane, max(self._now_ms(lane), edge_ms + self.rng.choice((0, 1))), "Mark", pauser)
        if self.rng.random() < 0.7:
            claimer = self.rng.choice((pauser, pauser, "other"))
            yield self._make(lane, self._soon_ms(lane), "ClaimingPartition", claimer)
        for epoch, instance in before:
            kind = self.rng.choice(("RangeHeartbeat", "RangeDone"))
            yield self._make(lane, self._soon_ms(lane), kind, instance, [epoch])
        yield from self._whole_beside_ranges(lane, pauser, expiry_s, may_end=until_s == expiry_s)
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", pauser, [0])
        yield self._make(lane, self._soon_ms(lane), "ClaimingRange", self._new_instance(), self._bounds(lane))

    def _whole_beside_ranges(self, lane: _Lane, pauser: str, expiry_s: int, *, may_end: bool) -> Iterator[_Draft]:
        time_ms = self._soon_ms(lane)
        if may_end and self.rng.random() < 0.7:
            time_ms = max(time_ms, expiry_s * 1000 + self.rng.choice((-1, 0, 1)))
        if self.rng.random() < 0.8:
            yield self._make(lane, time_ms, "Heartbeat", pauser, [self._commit(lane)])
            yield self._make(lane, self._soon_ms(lane), "ClaimingMessages", pauser, [self._proposal(lane)])
        if self.rng.random() < 0.3:
            yield self._make(lane, self._soon_ms(lane), "DataTopic", pauser, [self.rng.choice(DATA_TOPIC_IDS)])
        if self.rng.random() < 0.5:
            yield self._make(lane, self._soon_ms(lane), "ReleasingPartition", pauser, [self._commit(lane)])
        if self.rng.random() < 0.5:
            yield self._make(lane, self._soon_ms(lane), "GroupSettings", pauser, self._settings())

    def _settle_ranges(self, lane: _Lane) -> Iterator[_Draft]:
        """Change the settings at the end of the last lease, and let the owners of the ranges send records again."""
        instance, own = self._new_instance(), lane.key
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [FAR_S])
        edge_ms, before = 0, self._held(lane)
        for key in [each for each in lane.keys if each[0] == own[0]]:
            lane.key = key
            owner = self._key(lane, key)["owner"]
            if owner is not None:
                yield self._make(lane, self._soon_ms(lane), "RevokingClaim", instance, [owner["epoch"] or 0])
            edge_ms = max([edge_ms, *(each["owner"]["last_beat"] for each in self._held(lane))])
        lane.key = own
        edge_ms += 2 * self._interval_ms(lane)
        if edge_ms > self._now_ms(lane) + 10**10:
            return
        settings = self._settings()
        if self.rng.random() < 0.5:
            delivery = self.reader._settings_of(self._group(lane, own[0]))["delivery"]
            settings = [str(self._interval_ms(lane)), "native", delivery, "ranges"]
        time_ms = max(self._now_ms(lane), edge_ms + self.rng.choice((0, 1, 1)))
        yield self._make(lane, time_ms, "GroupSettings", instance, settings)
        for held in before:
            kind = self.rng.choice(("RangeHeartbeat", "RangeDone", "ReleasingRange"))
            tail = [held["owner"]["epoch"]]
            yield self._make(lane, self._now_ms(lane), kind, held["owner"]["instance"], tail)
        yield self._make(lane, self._soon_ms(lane), "ReleaseGroup", instance, [0])
        for _ in range(2):
            yield self._make(lane, self._soon_ms(lane), "ClaimingRange", instance, self._bounds(lane))


_SCRIPTS: tuple[Callable[[_Author, _Lane], Iterator[_Draft]], ...] = (
    _Author._set_position,
    _Author._change_settings,
    _Author._take_over,
    _Author._keep_failing,
    _Author._pause_ends,
    _Author._remake_data_topic,
    _Author._steal_back,
)
_RANGE_SCRIPTS: tuple[Callable[[_Author, _Lane], Iterator[_Draft]], ...] = (
    _Author._by_ranges,
    _Author._by_ranges,
    _Author._work_by_ranges,
    _Author._take_a_range_over,
    _Author._pause_ranges,
    _Author._settle_ranges,
)


# A quiet day of a large group.


def _steady(
    seed: int, records: int, keys: int, heartbeat_interval_ms: int, coordination_partitions: int
) -> Iterator[LogRecord]:
    """Yield a log in which each key beats a little more often than it must; in the long run 97 % are heartbeats.

    The rest are claims, plans, releases and 0.5 % invalid records. No state is read: the meaning of each record is
    known when it is written.
    """
    rng = Random(f"steady:{seed}")
    topics = topics_by_coordination_partition(coordination_partitions, 4, odd=False)
    where = [(number % coordination_partitions, number // coordination_partitions) for number in range(keys)]
    rng.shuffle(where)
    paths = [f"clients/{GROUPS[0]}/{topics[lane][n % 4]}/{n // 4}" for lane, n in where]
    next_offset = [0] * coordination_partitions
    owner: list[str | None] = [None] * keys
    offset = [rng.randrange(10**6) for _ in range(keys)]
    plan_end: list[int | None] = [None] * keys
    tenures = 0
    random = rng.random
    for number in range(records):
        index = number % keys
        lane, path = where[index][0], paths[index]
        timestamp_ms = START_MS + number * heartbeat_interval_ms * 9 // (keys * 10)
        head = f"/1/{timestamp_ms // 1000}/"
        instance = owner[index]
        roll = random()
        if roll < 0.005:
            value = _spoiled_beat(rng, f"Heartbeat{head}{instance}/{path}/{offset[index]}".encode())
        elif instance is None:
            tenures += 1
            owner[index] = f"{tenures:08x}.{tenures % 65536:04x}"
            value = f"ClaimingPartition{head}{owner[index]}/{path}".encode()
        elif roll < 0.009:
            owner[index] = None
            value = f"ReleasingPartition{head}{instance}/{path}/{offset[index]}".encode()
        elif roll < 0.013 and plan_end[index] is None:
            end = offset[index] + rng.randrange(1, 1000)
            plan_end[index] = end
            value = f"ClaimingMessages{head}{instance}/{path}/{end}".encode()
        else:
            open_end = plan_end[index]
            if open_end is not None and roll < 0.5:
                offset[index], plan_end[index] = open_end, None
            value = f"Heartbeat{head}{instance}/{path}/{offset[index]}".encode()
        yield lane, next_offset[lane], timestamp_ms, value
        next_offset[lane] += 1


def _spoiled_beat(rng: Random, value: bytes) -> bytes | None:
    """Return a heartbeat with one error."""
    return rng.choice(
        (None, b"", value[1:], value + b"/", value + b"x", value + b"\xff", value.replace(b"/1/", b"/01/", 1))
    )
