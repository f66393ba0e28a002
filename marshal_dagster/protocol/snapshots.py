"""The whole state of a coordination partition as numbered records, and back (protocol.md, section 5).

A snapshot is a text of JSON lines, cut into parts that fit into records, and a closing part that counts them and
carries the checksum of all. The record's key names the snapshot and the part:

    version/topic id/partition count/coordination partition/log offset/snapshot id/part

The snapshot id makes every snapshot's keys its own: no writer, however late, replaces a part of another's, and of two
that write at once neither breaks the other's. A snapshot counts when its closing part and all parts are there and the
checksum, taken over name and text, is right. Of those the one at the highest log offset is used, unless the last record
before it, which it names, is another one in the log by now: then the log has lost records and grown again. Parts are
deleted, by records without value, only when a whole snapshot at a higher log offset has been read.

Version 3 has no ranges. From the first settings that name `ranges` on a snapshot has version 4, which holds them too.
Versions 1 and 2 were written when a group without settings was judged by the rule set `native`: a reader starts from
one only if every group with keys in it has settings, and no member deletes it.

Whatever is odd in a record is a reason to pass it over, never an exception.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

from marshal_dagster.protocol.messages import (
    INT32_MAX,
    INT64_MAX,
    NUMBER,
    TOPIC_ID,
    GroupSettings,
    Invalid,
    RuleSet,
    coordination_partition,
    is_name,
    is_topic,
    settings_of,
    settings_text,
)
from marshal_dagster.protocol.rules import RecordNote, Refusal
from marshal_dagster.protocol.state import RANGES, Group, Key, Owner, Phase, Range
from marshal_dagster.protocol.world import LastRecord, PartitionWorld

VERSION: Final = 3
VERSION_WITH_RANGES: Final = 4
WRITTEN_VERSIONS: Final = frozenset({VERSION, VERSION_WITH_RANGES})
"""The versions that members write now."""
_WITH_RANGES: Final = frozenset({2, VERSION_WITH_RANGES})
_FORMER_VERSIONS: Final = frozenset({1, 2})
_FORMER_WITHOUT_SETTINGS: Final = GroupSettings(60_000, RuleSet.NATIVE)
"""What held in a group without settings when snapshots of former versions were written."""
_VERSIONS: Final = {str(version): version for version in WRITTEN_VERSIONS | _FORMER_VERSIONS}
_KNOWN: Final = [RANGES]
"""What the writer of a snapshot without ranges says that it knew, or it would have passed over records."""
PART_BYTES: Final = 500_000
"""The largest part: two fit into one of the client library's batches, and one into what brokers take by default."""
SNAPSHOT_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLOSING: Final = "end"
_KEY_FIELDS: Final = 7
_RANGES_AT: Final = 7
"""Where the ranges stand in the row of a key."""


class RejectedSnapshot(StrEnum):
    """Why a snapshot is passed over."""

    NEWER_VERSION = "it was written by another version of marshal-dagster"
    OTHER_LOG = "it is of another coordination topic, one with another id"
    OTHER_PARTITION_COUNT = "it was taken under another number of coordination partitions"
    INCOMPLETE = "its closing part or another one is missing"
    CHECKSUM = "its checksum is wrong"
    OTHER_DEFAULTS = "it was taken with other settings for groups that have none"
    MALFORMED = "it cannot be understood"
    RANGES_SKIPPED = "its writer did not know range claims and may have passed over some"
    BEFORE_START = "the log begins only after it"
    BEYOND_END = "the log ends before it"
    OTHER_RECORDS = "the log has lost records since it was taken, and holds others in their place"


class Record(NamedTuple):
    """A record of the snapshot topic; one without value deletes the part that its key names."""

    key: bytes
    value: bytes | None


class SnapshotName(NamedTuple):
    """What a snapshot is of, and which it is: all records before `offset` of coordination partition `number` count."""

    topic_id: str
    partitions: int
    number: int
    offset: int
    snapshot_id: str
    version: int = VERSION

    def __str__(self) -> str:
        """Give it as the keys of its parts begin."""
        return "/".join((str(self.version), *map(str, self[:-1])))

    def key(self, part: str | int) -> bytes:
        """Give the key of a part."""
        return f"{self}/{part}".encode()


@dataclass(slots=True)
class StoredSnapshot:
    """What was read of one snapshot: its parts by the last field of their keys."""

    name: SnapshotName
    parts: dict[str, bytes] = field(default_factory=dict)

    @property
    def closing(self) -> "ClosingPart | None":
        """What the closing part says, if it is there and all that it counts are too."""
        closing = _closing_of(self.parts.get(_CLOSING))
        if closing is None or not all(str(part) in self.parts for part in range(closing.parts)):
            return None
        return closing

    @property
    def text(self) -> bytes | RejectedSnapshot:
        """What the parts say together, if all are there and none was changed."""
        closing = self.closing
        if closing is None:
            return RejectedSnapshot.INCOMPLETE
        text = b"".join(self.parts[str(part)] for part in range(closing.parts))
        return text if _checksum(self.name, text) == closing.checksum else RejectedSnapshot.CHECKSUM

    @property
    def is_whole(self) -> bool:
        """Whether it can be read; nothing is said of what it holds."""
        return isinstance(self.text, bytes)


class ClosingPart(NamedTuple):
    """What a closing part says; `log_time_ms` is that of the state, for those who ask how old it is."""

    parts: int
    checksum: str
    log_time_ms: int | None


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """The state of the newest snapshot that fits, and which ones at a higher log offset do not, by key's beginning."""

    world: PartitionWorld | None
    passed_over: Mapping[str, RejectedSnapshot]


def render(world: PartitionWorld, topic_id: str, snapshot_id: str, part_bytes: int = PART_BYTES) -> list[Record]:
    """Write `world`, of the coordination topic with that id, as records; the closing part is the last.

    Raises `ValueError` for a state that is not certain, or an id that cannot stand in a key.
    """
    if not world.certain:
        raise ValueError(f"coordination partition {world.number} is only observed: nobody may start from its state")
    if SNAPSHOT_ID.fullmatch(snapshot_id) is None or TOPIC_ID.fullmatch(topic_id) is None:
        raise ValueError(f"{snapshot_id!r} or {topic_id!r} cannot stand in the key of a snapshot")
    version = VERSION_WITH_RANGES if world.had_ranges else VERSION
    name = SnapshotName(topic_id, world.coordination_partitions, world.number, world.next_offset, snapshot_id, version)
    text = "\n".join(map(_line, _rows(world))).encode()
    parts = [text[begin : begin + part_bytes] for begin in range(0, len(text), part_bytes)]
    closing = {"parts": len(parts), "sha256": _checksum(name, text), "log_time_ms": world.log_time_ms}
    records = [Record(name.key(number), part) for number, part in enumerate(parts)]
    return [*records, Record(name.key(_CLOSING), _line(closing).encode())]


def collect(
    records: Iterable[tuple[bytes | None, bytes | None]],
) -> tuple[list[StoredSnapshot], dict[str, RejectedSnapshot]]:
    """Put records of the snapshot topic together, in the order in which they were read; highest log offset first.

    Those of another version are told apart; what is no part of a snapshot is passed over.
    """
    found: dict[SnapshotName, StoredSnapshot] = {}
    newer: dict[str, RejectedSnapshot] = {}
    for key, value in records:
        named = _read_name(key)
        if isinstance(named, str):
            newer[named] = RejectedSnapshot.NEWER_VERSION
        elif named is not None:
            name, part = named
            stored = found.setdefault(name, StoredSnapshot(name))
            if value is not None:
                stored.parts[part] = value
            else:
                stored.parts.pop(part, None)
    kept = [stored for stored in found.values() if stored.parts]
    return sorted(kept, key=lambda stored: stored.name.offset, reverse=True), newer


def choose(
    records: Iterable[tuple[bytes | None, bytes | None]],
    *,
    topic_id: str,
    number: int,
    partitions: int,
    start: int,
    end: int,
    defaults: GroupSettings,
    foreign: Collection[LastRecord] = (),
) -> SnapshotChoice:
    """Read the newest snapshot from which the log of that id, which holds the offsets [start, end), can be read on.

    `foreign` are last records before a snapshot of which it is known that the log holds others there.
    """
    stored, passed_over = collect(records)
    for snapshot in stored:
        if snapshot.name.number != number:
            continue
        loaded = _rejection(snapshot.name, topic_id, partitions, start, end) or load(snapshot, defaults)
        if isinstance(loaded, PartitionWorld) and loaded.last in foreign:
            loaded = RejectedSnapshot.OTHER_RECORDS
        if isinstance(loaded, PartitionWorld):
            return SnapshotChoice(loaded, passed_over)
        passed_over[f"{snapshot.name}"] = loaded
    return SnapshotChoice(None, passed_over)


def load(stored: StoredSnapshot, defaults: GroupSettings) -> PartitionWorld | RejectedSnapshot:
    """Read the state back, or say why it cannot be."""
    text = stored.text
    if isinstance(text, RejectedSnapshot):
        return text
    try:
        return _read_rows(stored.name, [json.loads(line) for line in text.split(b"\n")], defaults)
    except _RejectedError as rejected:
        return rejected.reason
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError):
        return RejectedSnapshot.MALFORMED


def outdated(stored: Sequence[StoredSnapshot], newest: SnapshotName) -> list[Record]:
    """Give the records that delete all of the same log at a lower log offset than `newest`, which was read whole.

    What lies at the same one stays: of two writers that both did this, each would delete the other's. What is of
    another version stays too: there may be members that read only that.
    """
    log = (*newest[:3], newest.version)
    return [
        Record(name.key(part), None)
        for name, parts in ((snapshot.name, snapshot.parts) for snapshot in stored)
        if (*name[:3], name.version) == log and name.offset < newest.offset
        for part in parts
    ]


def _rejection(name: SnapshotName, topic_id: str, partitions: int, start: int, end: int) -> RejectedSnapshot | None:
    if name.topic_id != topic_id:
        return RejectedSnapshot.OTHER_LOG
    if name.partitions != partitions:
        return RejectedSnapshot.OTHER_PARTITION_COUNT
    if name.offset < start:
        return RejectedSnapshot.BEFORE_START
    return RejectedSnapshot.BEYOND_END if name.offset > end else None


# Keys and closing parts


def _read_name(key: bytes | None) -> tuple[SnapshotName, str] | str | None:
    """Give the snapshot and the part; the beginning of a key of another version; None for what is no key of ours."""
    fields = (key or b"").decode("utf-8", "replace").split("/")
    if NUMBER.fullmatch(fields[0]) is None:
        return None
    version = _VERSIONS.get(fields[0])
    if version is None:
        return "/".join(fields[:-1])[:200]
    if len(fields) != _KEY_FIELDS:
        return None
    _, topic_id, *numbers, snapshot_id, part = fields
    if not all(NUMBER.fullmatch(number) for number in numbers) or not (part == _CLOSING or NUMBER.fullmatch(part)):
        return None
    partitions, number, offset = map(int, numbers)
    if number >= partitions or offset > INT64_MAX or SNAPSHOT_ID.fullmatch(snapshot_id) is None:
        return None
    return SnapshotName(topic_id, partitions, number, offset, snapshot_id, version), part


def _closing_of(value: bytes | None) -> ClosingPart | None:
    try:
        said = json.loads(value or b"")
        parts, log_time_ms = _whole_number(said["parts"]), said["log_time_ms"]
        return ClosingPart(parts, str(said["sha256"]), None if log_time_ms is None else _time(log_time_ms))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None


def _checksum(name: SnapshotName, text: bytes) -> str:
    return sha256(f"{name}\n".encode() + text).hexdigest()


# The text: a line for the partition, then one for each group, each topic in it, each key of that


def _line(row: object) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


def _rows(world: PartitionWorld) -> Iterator[object]:
    yield {
        "defaults": _defaults_text(world.defaults),
        "log_time_ms": world.log_time_ms,
        "invalid": world.invalid,
        "refused": world.refused,
        "noted": world.noted,
        "knows": _KNOWN,
        "last": world.last,
    }
    for name, group in world.groups.items():
        yield {
            "group": name,
            "settings": settings_text(group.settings) if group.settings_accepted else None,
            "paused_until_s": group.paused_until_s,
            "paused_by": group.paused_by,
        }
        topic = None
        for (named, partition), key in sorted(group.keys.items()):
            if named != topic:
                topic = named
                yield {"topic": topic}
            state = (key.offset, key.plan_end, key.plan_attempts, key.generation, key.data_topic_id, key.last_beat_ms)
            ranges = (list(map(_range_row, key.ranges)),) if world.had_ranges else ()
            yield (partition, *state, *ranges, *(key.owner or ()))


def _range_row(each: Range) -> tuple[object, ...]:
    return (each.start, each.end, each.phase, each.attempts, each.last_beat_ms, *(each.owner or ()))


def _defaults_text(defaults: GroupSettings) -> str:
    features = ",".join(defaults.features)
    return f"{defaults.heartbeat_interval_ms}/{defaults.rule_set}/{defaults.delivery}/{features}"


class _RejectedError(Exception):
    def __init__(self, reason: RejectedSnapshot) -> None:
        self.reason = reason


def _read_rows(name: SnapshotName, rows: Iterable[Any], defaults: GroupSettings) -> PartitionWorld:
    """Build the state. Raises whatever comes of rows that are not as `_rows` writes them."""
    remaining = iter(rows)
    first = next(remaining)
    is_former = name.version in _FORMER_VERSIONS
    if first["defaults"] != _defaults_text(_FORMER_WITHOUT_SETTINGS if is_former else defaults):
        raise _RejectedError(RejectedSnapshot.OTHER_DEFAULTS)
    world = PartitionWorld(name.number, name.partitions, defaults, 0)
    world.had_ranges = name.version in _WITH_RANGES
    world.resume_at(name.offset, None if first["log_time_ms"] is None else _time(first["log_time_ms"]))
    world.invalid = _read_counts(first["invalid"], Invalid)
    world.refused = _read_counts(first["refused"], Refusal)
    world.noted = _read_counts(first["noted"], RecordNote)
    world.set_last_record(_read_last(first.get("last"), name))
    group, topic = Group(defaults), None
    for row in remaining:
        if isinstance(row, list):
            if topic is None:
                raise ValueError("a key without a topic")
            group.keys[topic, _whole_number(row[0], INT32_MAX)] = _read_key(row, with_ranges=world.had_ranges)
        elif "group" in row:
            group, topic = _read_group(row, defaults), None
            world.groups[_name(row["group"])] = group
        else:
            topic = _topic(row["topic"], name)
    if is_former and any(group.keys and not group.settings_accepted for group in world.groups.values()):
        raise _RejectedError(RejectedSnapshot.OTHER_DEFAULTS)
    if not world.had_ranges and _may_lack_ranges(world, knows=first.get("knows", [])):
        raise _RejectedError(RejectedSnapshot.RANGES_SKIPPED)
    return world


def _may_lack_ranges(world: PartitionWorld, knows: Any) -> bool:  # noqa: ANN401 - what was read
    """Tell whether the writer of a snapshot without ranges may have passed over range records, now or earlier."""
    groups = world.groups.values()
    if any(RANGES in group.settings.features for group in groups):
        return True
    skipped = world.invalid[Invalid.UNKNOWN_TYPE] > 0 and any(group.settings_accepted for group in groups)
    return skipped and knows != _KNOWN


def _read_last(last: Any, name: SnapshotName) -> LastRecord | None:  # noqa: ANN401 - this is what judges it
    """Read the last record before the snapshot, which older writers did not note."""
    if last is None:
        return None
    offset, timestamp_ms, digest = last
    if type(digest) is not str or _whole_number(offset) >= name.offset:
        raise ValueError(last)
    return LastRecord(offset, _time(timestamp_ms), digest)


_Reason = TypeVar("_Reason", Invalid, Refusal, RecordNote)


def _read_counts(counts: dict[str, Any], reasons: type[_Reason]) -> Counter[_Reason]:
    """Read counts that are there for people; a reason that this version does not know is left out."""
    known = frozenset(reasons)
    return Counter({reasons(reason): _whole_number(count) for reason, count in counts.items() if reason in known})


def _read_group(row: dict[str, Any], defaults: GroupSettings) -> Group:
    accepted = row["settings"] is not None
    return Group(
        settings_of(row["settings"]) if accepted else defaults,
        accepted,
        None if row["paused_until_s"] is None else _whole_number(row["paused_until_s"]),
        None if row["paused_by"] is None else _name(row["paused_by"]),
    )


def _read_key(row: list[Any], *, with_ranges: bool) -> Key:
    ranges = row.pop(_RANGES_AT) if with_ranges else []
    key = _read_key_row(*row[1:])
    if type(ranges) is not list:
        raise ValueError(row)
    key.ranges = tuple(_read_range(*range_) for range_ in ranges)
    if key.ranges and (key.offset is None or key.offset > key.ranges[0].start):
        raise ValueError(key)
    if not all(before.end <= after.start for before, after in pairwise(key.ranges)):
        raise ValueError(key)
    return key


def _read_range(
    start: int,
    end: int,
    phase: str,
    attempts: int,
    last_beat_ms: int,
    *owner: Any,  # noqa: ANN401 - instance, client and epoch, or nothing
) -> Range:
    if not _whole_number(start) < _whole_number(end):
        raise ValueError(start)
    held = _read_owner(*owner) if owner else None
    if (phase == Phase.CLAIMED and held is None) or (phase == Phase.DONE and held is not None):
        raise ValueError(phase)
    return Range(start, end, Phase(phase), held, _time(last_beat_ms), _whole_number(attempts))


def _read_key_row(  # noqa: PLR0917 - the fields of a row, in their order
    offset: int | None,
    plan_end: int | None,
    plan_attempts: int,
    generation: int,
    data_topic_id: str | None,
    last_beat_ms: int,
    *owner: Any,  # noqa: ANN401 - instance, client and epoch, or nothing
) -> Key:
    if data_topic_id is not None and TOPIC_ID.fullmatch(data_topic_id) is None:
        raise ValueError(data_topic_id)
    return Key(
        offset=None if offset is None else _whole_number(offset),
        owner=_read_owner(*owner) if owner else None,
        last_beat_ms=_time(last_beat_ms),
        plan_end=None if plan_end is None else _whole_number(plan_end),
        plan_attempts=_whole_number(plan_attempts),
        generation=_whole_number(generation),
        data_topic_id=data_topic_id,
    )


def _read_owner(instance: str, client: str, epoch: int) -> Owner:
    return Owner(_name(instance), _name(client), _whole_number(epoch))


def _whole_number(value: Any, most: int = INT64_MAX) -> int:  # noqa: ANN401 - this is what judges it
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(value)
    return value


def _time(value: Any) -> int:  # noqa: ANN401 - as above
    """Read a broker's timestamp, which is -1 where there was none."""
    if type(value) is not int:
        raise ValueError(value)
    return value


def _name(value: Any) -> str:  # noqa: ANN401 - as above
    if type(value) is not str or not is_name(value):
        raise ValueError(value)
    return value


def _topic(value: Any, name: SnapshotName) -> str:  # noqa: ANN401 - as above
    if type(value) is not str or not is_topic(value) or coordination_partition(value, name.partitions) != name.number:
        raise ValueError(value)
    return value
