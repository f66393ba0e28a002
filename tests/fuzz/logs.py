"""A coordination log that a fuzzer's bytes write.

The first three bytes choose the rules, the start and the size of the pieces that are read. Then one byte each chooses
of every record: its kind (or noise, a value with changed bytes, a huge value), its sender and key, its time (such as
the millisecond at which the owner becomes stale), and its tail (the state's own offset, epoch, plan, ...). So deep
states are only a few bytes away. The kinds that are not assigned repeat the value before.
"""

from collections.abc import Callable
from typing import Any, Final

from tests.fuzz.supply import Supply
from tests.log_generator import BAD_NAMES, BAD_NUMBERS, ODD_INSTANCES, topics_by_coordination_partition
from tests.reference_reader import DELIVERIES, INT32_MAX, INT64_MAX, PlainReader, new_group, new_key

START_MS: Final = 1_795_230_000_000
INTERVALS_MS: Final = (60_000, 1_000, 7, 1)
STARTS: Final = (0, 0, 0, 7)
GROUPS: Final = ("etl", "größe")
INSTANCES: Final = ("a", "b")
DATA_TOPIC_IDS: Final = ("A" * 22, "B" * 22, "-" * 22, "A" * 21)
FEATURES: Final = ("-", "ranges", "a,b", "a,a")

FOREIGN: Final = 0xF8
GAP: Final = 0xC0
"""Bits of the byte for the sender: the topic lies in another coordination partition; log offsets are skipped."""

State = dict[str, Any]


class Log:
    """A log that is written while it is read."""

    def __init__(self, supply: Supply) -> None:
        """Choose from the bytes how the log is read."""
        self.supply = supply
        head = supply.byte()
        self.partitions = 1 + head % 2
        self.rules = "go" if head & 2 else "native"
        self.interval_ms = 60_000 if head & 2 else INTERVALS_MS[head >> 2 & 3]
        self.start = STARTS[head >> 4 & 3]
        self.piece = 1 + supply.byte() % 16
        self.snapshot_at = supply.byte()
        self.plain = PlainReader(self.partitions, self.interval_ms, self.rules)
        self.offset = self.start
        self.value: bytes | None = None
        (self.topics, *others) = topics_by_coordination_partition(self.partitions, 2, odd=False)
        self.foreign = others[0][0] if others else ".."

    # Questions about the state; before the first record there is none.

    @property
    def log(self) -> State | None:
        """The reference reader's log of coordination partition 0."""
        return self.plain.logs.get(0)

    @property
    def now_ms(self) -> int:
        """Log time."""
        return START_MS if self.log is None else self.log["log_time"]

    def group(self, name: str) -> State:
        """Return a group's state."""
        found: State = new_group() if self.log is None else self.log["groups"].get(name, new_group())
        return found

    def next_record(self) -> tuple[int, int, bytes | None]:
        """Write the next record: log offset, broker timestamp in ms, value."""
        what, who, when, tail = (self.supply.byte() for _ in range(4))
        name = GROUPS[who >> 2 & 1]
        group = self.group(name)
        place = (self.foreign if who & 0xF8 == FOREIGN else self.topics[who >> 3 & 1], who >> 4 & 1)
        key = group["keys"].get(place, new_key())
        timestamp_ms = INT64_MAX if when == LAST_TIME else TIMES[when % len(TIMES)](self, group, key)
        kind, oddity = what & 15, what >> 4
        if kind < len(WRITERS):
            instance = (self._owner(key), group["paused_by"] or "a", *INSTANCES)[who & 3]
            fields = WRITERS[kind](self, group, key, tail)
            self.value = value_of(fields, instance, name, place, oddity, tail)
        elif kind == CHANGED:
            self.value = self._changed(self.value or b"Mark/1/1/a/c/g//0", tail)
        elif kind == NOISE:
            self.value = self.supply.take(tail)
        elif kind == NOTHING:
            self.value = None
        elif kind == HUGE:
            self.value = (self.value or b"Heartbeat/")[: 1 + oddity * 8] * (1 + tail * 64)
        elif kind == RANGE and oddity < ODD:
            by = self._range_owner(key, tail) if who & 3 == 0 else INSTANCES[who & 1]
            fields = _range(self, key, RANGE_TYPES[oddity % len(RANGE_TYPES)], tail)
            self.value = value_of(fields, by, name, place, 0, tail)
        gap = 1 + tail * 1_000 if self.log is not None and who & 0xE0 == GAP else 0
        offset = self.offset + gap
        self.offset = offset + 1
        return offset, timestamp_ms, self.value

    @staticmethod
    def _owner(key: State) -> str:
        return "a" if key["owner"] is None else str(key["owner"]["instance"])

    @staticmethod
    def _range_owner(key: State, tail: int) -> str:
        """Return the owner of the range that `_range` will name."""
        ranges = key["ranges"]
        owner = ranges[(tail >> 4) % len(ranges)]["owner"] if ranges else None
        return "a" if owner is None else str(owner["instance"])

    def _changed(self, value: bytes, tail: int) -> bytes:
        at = tail % (len(value) + 1)
        way, byte = self.supply.byte(), self.supply.take(1)
        return (
            value[:at] + byte + value[at + 1 :],
            value[:at] + byte + value[at:],
            value[:at] + value[at + 1 :],
            value[:at],
        )[way & 3]


def value_of(  # noqa: PLR0917 - what a record is made of
    fields: tuple[str, ...], instance: str, group: str, place: tuple[str, int], oddity: int, tail: int
) -> bytes:
    """Return a value; most values of `oddity` change nothing, so that most records are valid."""
    kind, *rest = fields
    head = [kind, "1", "1795230000", instance, "c", group]
    head += ["", "0"] if kind in {"ReleaseGroup", "GroupSettings", "Mark"} else [place[0], str(place[1])]
    values = [*head, *rest]
    if oddity >= ODD:
        position, among = ODDITIES[(tail >> 4) % len(ODDITIES)]
        values[position % len(values)] = among[tail % len(among)]
    return "/".join(values).encode()


ODD: Final = 12
ODDITIES: Final[tuple[tuple[int, tuple[str, ...]], ...]] = (
    (1, ("0", "2", str(INT64_MAX), "9" * 19)),
    (2, ("0", str(INT64_MAX), "999999999", "1795230001")),
    (3, ODD_INSTANCES),
    (3, BAD_NAMES),
    (4, ODD_INSTANCES),
    (7, (str(INT32_MAX), str(INT32_MAX + 1), "00", "1")),
    (-1, BAD_NUMBERS),
    (-1, ("0", str(INT64_MAX), str(INT64_MAX + 1), "1" + "0" * 17, "1" + "0" * 18)),
    (6, ("", ".", "a b", "t" * 249, "t" * 250)),
)
"""The fields that get another text, and the texts."""


def _interval_ms(log: Log, group: State) -> int:
    return int(log.plain._settings_of(group)["heartbeat_interval_ms"])


def _of_lease(log: Log, group: State, key: State, after_ms: int) -> int:
    beat_ms = log.now_ms if key["owner"] is None else key["owner"]["last_beat"]
    return int(beat_ms) + 2 * _interval_ms(log, group) + after_ms


def _of_pause(log: Log, group: State, after_ms: int) -> int:
    until_s = group["paused_until"]
    return log.now_ms if until_s is None or until_s > 10**12 else until_s * 1_000 + after_ms


LAST_TIME: Final = 255
TIMES: Final[tuple[Callable[[Log, State, State], int], ...]] = (
    lambda log, _, __: log.now_ms,
    lambda log, _, __: log.now_ms + 1,
    lambda log, group, _: log.now_ms + _interval_ms(log, group),
    lambda log, group, key: _of_lease(log, group, key, -1),
    lambda log, group, key: _of_lease(log, group, key, 0),
    lambda log, group, key: _of_lease(log, group, key, 1),
    lambda log, group, _: _of_pause(log, group, -1),
    lambda log, group, _: _of_pause(log, group, 0),
    lambda log, _, __: log.now_ms - 1,
    lambda log, group, _: log.now_ms - 2 * _interval_ms(log, group),
    lambda _, __, ___: -1,
    lambda _, __, ___: 0,
    lambda log, _, __: log.now_ms,
    lambda log, _, __: log.now_ms + 1,
    lambda log, _, __: log.now_ms + 999,
    lambda log, group, _: log.now_ms + 10 * _interval_ms(log, group),
)


def _offsets(key: State) -> tuple[int, ...]:
    offset = key["offset"] or 0
    end = key["plan_end"]
    return (
        offset, offset + 1, offset + 10, max(0, offset - 1), offset + 11 if end is None else end,
        offset + 5 if end is None else end + 1, 0, INT64_MAX,
    )  # fmt: skip


def _offset(key: State, tail: int) -> str:
    return str(_offsets(key)[tail % 8])


def _settings(tail: int) -> tuple[str, ...]:
    rules = ("native", "native", "native", "go")[tail & 3]
    interval = (60_000, 1_000, 7, 60_000)[tail >> 2 & 3]
    return (str(interval), rules, DELIVERIES[(tail >> 4 & 3) % 3], FEATURES[tail >> 6])


def _expiry(log: Log, tail: int) -> str:
    now_s = log.now_ms // 1_000
    return str((now_s + 1, now_s, now_s + 100, 0, max(0, now_s - 1), now_s + 2, INT64_MAX, now_s + 10)[tail % 8])


def _epoch(log: Log, key: State, tail: int) -> str:
    epoch = log.offset if key["owner"] is None else key["owner"]["epoch"] or 0
    return str((epoch, epoch, epoch + 1, max(0, epoch - 1), 0, INT64_MAX)[tail % 6])


def _claim(_: Log, __: State, ___: State, ____: int) -> tuple[str, ...]:
    return ("ClaimingPartition",)


def _beat(_: Log, __: State, key: State, tail: int) -> tuple[str, ...]:
    return ("Heartbeat", _offset(key, tail))


WRITERS: Final[tuple[Callable[[Log, State, State, int], tuple[str, ...]], ...]] = (
    _claim,
    _beat,
    lambda _, __, key, tail: ("ReleasingPartition", _offset(key, tail)),
    lambda _, __, key, tail: ("ClaimingMessages", _offset(key, tail)),
    lambda log, _, __, tail: ("ReleaseGroup", _expiry(log, tail)),
    lambda log, _, key, tail: ("RevokingClaim", _epoch(log, key, tail)),
    lambda _, __, ___, tail: ("GroupSettings", *_settings(tail)),
    lambda _, __, ___, tail: ("DataTopic", DATA_TOPIC_IDS[tail % 4]),
    lambda _, __, ___, ____: ("Mark",),
    _beat,
    _claim,
)
CHANGED, NOISE, NOTHING, HUGE, RANGE = range(len(WRITERS), len(WRITERS) + 5)
"""Records that are not messages, and those about ranges."""
RANGE_TYPES: Final = (
    "ClaimingRange",
    "PlanningRange",
    "RangeHeartbeat",
    "RangeDone",
    "ReleasingRange",
    "RevokingRange",
)


def _range(log: Log, key: State, kind: str, tail: int) -> tuple[str, ...]:
    ranges = key["ranges"] or [{"start": key["offset"] or 0, "end": (key["offset"] or 0) + 10, "owner": None}]
    named = ranges[(tail >> 4) % len(ranges)]
    start, end = named["start"], named["end"]
    if kind == "ClaimingRange":
        offset = key["offset"] or 0
        starts = (start, end, offset, ranges[-1]["end"], start + 1, max(0, offset - 1), start, end)
        begin = starts[tail & 7]
        ends = (end, begin + 10, begin + 1, begin)
        return (kind, str(begin), str(ends[tail >> 3 & 3]))
    owner = named["owner"]
    epoch = log.offset if owner is None else owner["epoch"]
    epoch = epoch if tail & 3 else max(0, epoch - 1)
    planned = (str((end, end - 1, start + 1, end + 1)[tail >> 2 & 3]),) if kind == "PlanningRange" else ()
    return (kind, str(epoch), *planned)
