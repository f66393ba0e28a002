"""Render the state of a coordination partition as snapshot records, and load it again (protocol.md, section 5).

A snapshot is a text of JSON lines. It is cut into parts that fit into records. A closing part has the number of parts
and the checksum. The key of a record names the snapshot and the part:

    version/topic id/partition count/coordination partition/log offset/snapshot id/part

The snapshot id is random, so two writers at the same time do not damage each other's snapshots. A snapshot is whole if
its closing part and all parts exist, and the checksum of name and text is right. The reader uses the whole snapshot
with the highest log offset.

A snapshot stores the identity of the last log record before it. If the log has another record at that offset, the log
was truncated and has grown again, and the reader skips the snapshot. A writer deletes old parts, by records without a
value, only after it has read a whole snapshot at a higher log offset.

Version 3 has no ranges. Version 4 has them; members write it once the settings of any group have named `ranges`.
Versions 1 and 2 were written when the rule set `native` judged groups without settings. A reader starts from one of
these only if every group with keys in it has settings. No member deletes them.

No content of a record raises an exception: the reader skips a snapshot that it cannot use, with a reason.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    InvalidError,
    RuleSet,
    coordination_partition,
    is_name,
    is_topic,
    settings_of,
    settings_text,
    shared_name,
    shared_topic_id,
)
from marshal_dagster.protocol.pause_reason import is_reason
from marshal_dagster.protocol.rules import RecordNote, Refusal
from marshal_dagster.protocol.state import RANGES, Group, Key, Owner, Phase, Range
from marshal_dagster.protocol.world import LastRecord, PartitionWorld

VERSION: Final = 3
VERSION_WITH_RANGES: Final = 4
WRITTEN_VERSIONS: Final = frozenset({VERSION, VERSION_WITH_RANGES})
"""The versions that members write."""
_WITH_RANGES: Final = frozenset({2, VERSION_WITH_RANGES})
_FORMER_VERSIONS: Final = frozenset({1, 2})
_FORMER_WITHOUT_SETTINGS: Final = GroupSettings(60_000, RuleSet.NATIVE)
"""The settings in force in a group without settings when snapshots of the former versions were written."""
_VERSIONS: Final = {str(version): version for version in WRITTEN_VERSIONS | _FORMER_VERSIONS}
_KNOWN: Final = [RANGES]
"""The features that this writer knows. If they are not in a snapshot, its writer may have skipped records of ranges."""
PART_BYTES: Final = 500_000
"""The size of a part, at most. Two parts fit into a batch of the client library, and one into a broker's default."""
SNAPSHOT_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CLOSING: Final = "end"
_KEY_FIELDS: Final = 7
_RANGES_AT: Final = 7
"""The index of the ranges in the row of a key."""


class RejectedSnapshot(StrEnum):
    """Why a reader skips a snapshot."""

    NEWER_VERSION = "it was written by another version of marshal-dagster"
    OTHER_LOG = "it belongs to a coordination topic with another topic id"
    OTHER_PARTITION_COUNT = "it was written for another number of coordination partitions"
    INCOMPLETE = "its closing part or another part is missing"
    CHECKSUM = "its checksum is wrong"
    OTHER_DEFAULTS = "it was written with other default settings for groups without settings"
    MALFORMED = "its content is malformed"
    RANGES_SKIPPED = "its writer did not know range claims and may have skipped some"
    BEFORE_START = "its log offset is before the first offset of the log"
    BEYOND_END = "its log offset is after the end of the log"
    OTHER_RECORDS = "the log lost records after it was written, and holds other records at their offsets"


class Record(NamedTuple):
    """A record of the snapshot topic; a record without value deletes the part that its key names."""

    key: bytes
    value: bytes | None


class SnapshotName(NamedTuple):
    """The identity of a snapshot: its state includes all records of coordination partition `number` before `offset`."""

    topic_id: str
    partitions: int
    number: int
    offset: int
    snapshot_id: str
    version: int = VERSION

    def __str__(self) -> str:
        """Return the beginning of the keys of its parts."""
        return "/".join((str(self.version), *map(str, self[:-1])))

    def key(self, part: str | int) -> bytes:
        """Return the key of a part."""
        return f"{self}/{part}".encode()


@dataclass(slots=True)
class StoredSnapshot:
    """The parts of one snapshot that were read, by the last field of their keys."""

    name: SnapshotName
    parts: dict[str, bytes] = field(default_factory=dict)

    @property
    def closing(self) -> "ClosingPart | None":
        """The content of the closing part; None if it or one of the parts that it counts is missing."""
        closing = _closing_of(self.parts.get(_CLOSING))
        if closing is None or not all(str(part) in self.parts for part in range(closing.parts)):
            return None
        return closing

    @property
    def text(self) -> bytes | RejectedSnapshot:
        """The joined text of the parts, or the reason why it is not whole."""
        closing = self.closing
        if closing is None:
            return RejectedSnapshot.INCOMPLETE
        text = b"".join(self.parts[str(part)] for part in range(closing.parts))
        return text if _checksum(self.name, text) == closing.checksum else RejectedSnapshot.CHECKSUM

    @property
    def is_whole(self) -> bool:
        """Whether all parts exist and the checksum is right; the content may still be malformed."""
        return isinstance(self.text, bytes)


class ClosingPart(NamedTuple):
    """The content of a closing part. `log_time_ms` is the log time of the state; it shows the snapshot's age."""

    parts: int
    checksum: str
    log_time_ms: int | None


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """The state of the newest snapshot that fits, or None, and the reason for each snapshot that was skipped.

    `passed_over` maps the beginning of a snapshot's keys to the reason.
    """

    world: PartitionWorld | None
    passed_over: Mapping[str, RejectedSnapshot]


def render(world: PartitionWorld, topic_id: str, snapshot_id: str, part_bytes: int = PART_BYTES) -> list[Record]:
    """Return the snapshot of `world` as records; the closing part is the last.

    Args:
        world: The state of a coordination partition.
        topic_id: Kafka's id of the coordination topic.
        snapshot_id: A random id that no other snapshot has.
        part_bytes: The size of a part in bytes, at most.

    Raises:
        ValueError: the state is not certain, or an id is not allowed in a key.
    """
    if not world.certain:
        raise ValueError(
            f"no snapshot of coordination partition {world.number} was written: it is only observed, because it was "
            "not read from its start or from a snapshot"
        )
    if SNAPSHOT_ID.fullmatch(snapshot_id) is None or TOPIC_ID.fullmatch(topic_id) is None:
        raise ValueError(
            f"snapshot id {snapshot_id!r} or topic id {topic_id!r} is not allowed in the key of a snapshot"
        )
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
    """Group records of the snapshot topic by snapshot; the snapshot with the highest log offset comes first.

    Args:
        records: Keys and values, in the order in which they were read.

    Returns:
        The snapshots of known versions, and the reason for each one of another version, by the beginning of its keys.
        Records that are no part of a snapshot are skipped.
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
    """Load the newest snapshot that fits the log (protocol.md, section 5.3).

    Args:
        records: Keys and values of the snapshot topic, in the order in which they were read.
        topic_id: Kafka's id of the coordination topic.
        number: The coordination partition.
        partitions: The partition count of the coordination topic.
        start: The first offset of the log.
        end: The end (exclusive) of the log.
        defaults: The settings in force in groups without settings.
        foreign: Last records, as snapshots name them, that the log does not hold at their offsets.
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
    """Return the state in a snapshot, or the reason why it cannot be loaded."""
    text = stored.text
    if isinstance(text, RejectedSnapshot):
        return text
    try:
        return _read_rows(stored.name, [json.loads(line) for line in text.split(b"\n")], defaults)
    except _RejectedError as rejected:
        return rejected.reason
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, AttributeError, InvalidError):
        return RejectedSnapshot.MALFORMED


def outdated(stored: Sequence[StoredSnapshot], newest: SnapshotName) -> list[Record]:
    """Return the records that delete all snapshots of the same log at a lower log offset than `newest`.

    The caller has read `newest` whole. Snapshots at the same log offset stay, because two writers would delete each
    other's. Snapshots of another version stay too, because there may be members that read only those.
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
    """Return the snapshot and the part that a key names.

    For a key of another version return its beginning, and for any other key None.
    """
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
        fields = json.loads(value or b"")
        parts, log_time_ms = _whole_number(fields["parts"]), fields["log_time_ms"]
        return ClosingPart(parts, str(fields["sha256"]), None if log_time_ms is None else _time(log_time_ms))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None


def _checksum(name: SnapshotName, text: bytes) -> str:
    return sha256(f"{name}\n".encode() + text).hexdigest()


# The text: a line for the coordination partition, then a line for each group, each of its topics, each key of a topic


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
            **_pause_texts(group),
        }
        topic = None
        for (named, partition), key in sorted(group.keys.items()):
            if named != topic:
                topic = named
                yield {"topic": topic}
            state = (key.offset, key.plan_end, key.plan_attempts, key.generation, key.data_topic_id, key.last_beat_ms)
            ranges = (list(map(_range_row, key.ranges)),) if world.had_ranges else ()
            yield (partition, *state, *ranges, *(key.owner or ()))


def _pause_texts(group: Group) -> dict[str, str]:
    """Return the optional fields of a group, which are for people. An older reader does not look at them."""
    texts = {"pause_client": group.pause_client, "pause_reason": group.pause_reason}
    return {name: text for name, text in texts.items() if text is not None}


def _range_row(each: Range) -> tuple[object, ...]:
    return (each.start, each.end, each.phase, each.attempts, each.last_beat_ms, *(each.owner or ()))


def _defaults_text(defaults: GroupSettings) -> str:
    features = ",".join(defaults.features)
    return f"{defaults.heartbeat_interval_ms}/{defaults.rule_set}/{defaults.delivery}/{features}"


class _RejectedError(Exception):
    def __init__(self, reason: RejectedSnapshot) -> None:
        self.reason = reason


def _read_rows(name: SnapshotName, rows: Iterable[Any], defaults: GroupSettings) -> PartitionWorld:
    """Return the state. Rows that `_rows` would not write raise exceptions of several types; `load` catches them."""
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


def _may_lack_ranges(world: PartitionWorld, knows: Any) -> bool:  # noqa: ANN401 - any JSON value
    """Return whether the writer of a snapshot without ranges may have skipped records of ranges."""
    groups = world.groups.values()
    if any(RANGES in group.settings.features for group in groups):
        return True
    skipped = world.invalid[Invalid.UNKNOWN_TYPE] > 0 and any(group.settings_accepted for group in groups)
    return skipped and knows != _KNOWN


def _read_last(last: Any, name: SnapshotName) -> LastRecord | None:  # noqa: ANN401 - checks the type itself
    """Return the last record before the snapshot, or None if the writer did not store it."""
    if last is None:
        return None
    offset, timestamp_ms, digest = last
    if type(digest) is not str or _whole_number(offset) >= name.offset:
        raise ValueError(last)
    return LastRecord(offset, _time(timestamp_ms), digest)


_Reason = TypeVar("_Reason", Invalid, Refusal, RecordNote)


def _read_counts(counts: dict[str, Any], reasons: type[_Reason]) -> Counter[_Reason]:
    """Return the counts without reasons that this version does not know; only people read them."""
    known = frozenset(reasons)
    return Counter({reasons(reason): _whole_number(count) for reason, count in counts.items() if reason in known})


def _read_group(row: dict[str, Any], defaults: GroupSettings) -> Group:
    accepted = row["settings"] is not None
    return Group(
        settings_of(row["settings"]) if accepted else defaults,
        accepted,
        None if row["paused_until_s"] is None else _whole_number(row["paused_until_s"]),
        None if row["paused_by"] is None else _name(row["paused_by"]),
        pause_client=_optional(row.get("pause_client"), is_name),
        pause_reason=_optional(row.get("pause_reason"), is_reason),
    )


def _optional(text: Any, is_valid: Callable[[str], bool]) -> str | None:  # noqa: ANN401 - any JSON value
    """Return a text that only people read, or None if it is missing or not valid."""
    return text if isinstance(text, str) and is_valid(text) else None


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
    return Key(
        offset=None if offset is None else _whole_number(offset),
        owner=_read_owner(*owner) if owner else None,
        last_beat_ms=_time(last_beat_ms),
        plan_end=None if plan_end is None else _whole_number(plan_end),
        plan_attempts=_whole_number(plan_attempts),
        generation=_whole_number(generation),
        data_topic_id=None if data_topic_id is None else shared_topic_id(data_topic_id),
    )


def _read_owner(instance: str, client: str, epoch: int) -> Owner:
    return Owner(_name(instance), _name(client), _whole_number(epoch))


def _whole_number(value: Any, most: int = INT64_MAX) -> int:  # noqa: ANN401 - checks the type itself
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(value)
    return value


def _time(value: Any) -> int:  # noqa: ANN401 - as above
    """Return a broker's timestamp, which is -1 if the record had none."""
    if type(value) is not int:
        raise ValueError(value)
    return value


def _name(value: Any) -> str:  # noqa: ANN401 - as above
    if type(value) is not str:
        raise ValueError(value)
    return shared_name(value)


def _topic(value: Any, name: SnapshotName) -> str:  # noqa: ANN401 - as above
    if type(value) is not str or not is_topic(value) or coordination_partition(value, name.partitions) != name.number:
        raise ValueError(value)
    return value
