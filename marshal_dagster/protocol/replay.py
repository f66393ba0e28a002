"""Read a stored coordination log from JSON lines, and show the state that it leads to as one JSON object.

The command `marshal-dagster replay` is built on this module; `tail --json` writes the lines that it reads.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from marshal_dagster.protocol.messages import INT64_MAX
from marshal_dagster.protocol.pause_reason import is_reason
from marshal_dagster.protocol.state import DataPartitionId, Key, Range
from marshal_dagster.protocol.world import World


class MalformedLogError(ValueError):
    """A line of a stored log cannot be parsed or has an offset that does not rise; the message has the line number."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record of a stored log; `partition` is the coordination partition."""

    partition: int
    offset: int
    timestamp_ms: int
    value: bytes | None
    reason: str | None = None
    """The reason that the header of a pause gives, for people."""


def parse_lines(lines: Iterable[str]) -> Iterator[StoredRecord]:
    """Parse JSON lines of the form `{"partition","offset","timestamp","value"}`; empty lines are skipped.

    Raises:
        MalformedLogError: a line does not have that form, or its offset does not rise within its coordination
            partition.
    """
    last: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse_line(number, line)
        if record.offset <= last.get(record.partition, -1):
            raise MalformedLogError(
                f"line {number}: offset {record.offset} of coordination partition {record.partition} follows "
                f"{last[record.partition]}, but offsets must rise within a partition"
            )
        last[record.partition] = record.offset
        yield record


def _parse_line(number: int, line: str) -> StoredRecord:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # not only JSONDecodeError: numbers can be too long, nesting too deep
        raise MalformedLogError(f"line {number}: not JSON ({error})") from None
    form = '{"partition": int, "offset": int, "timestamp": ms, "value": text or null}'
    if not isinstance(fields, dict):
        raise MalformedLogError(f"line {number}: not a JSON object; expected {form}")
    for name in ("partition", "offset", "timestamp"):
        at_least = None if name == "timestamp" else 0
        if type(fields.get(name)) is not int or (at_least is not None and fields[name] < at_least):
            raise MalformedLogError(f"line {number}: {name!r} is missing or not a whole number; expected {form}")
        if abs(fields[name]) > INT64_MAX:
            raise MalformedLogError(f"line {number}: {name!r} has more than 64 bits, so no record of Kafka has it")
    value = fields.get("value")
    if "value" not in fields or not isinstance(value, str | None):
        raise MalformedLogError(f"line {number}: 'value' is missing, or is neither text nor null; expected {form}")
    encoded = None if value is None else encode_value(value)
    reason = fields.get("reason")
    known = reason if isinstance(reason, str) and is_reason(reason) else None
    return StoredRecord(fields["partition"], fields["offset"], fields["timestamp"], encoded, known)


def encode_value(text: str) -> bytes:
    """Return the bytes of a stored value; lone surrogates become the bytes from which `decode_value` made them.

    A text whose lone surrogates form valid UTF-8 never comes from `decode_value`. Its bytes are not valid UTF-8.
    """
    try:
        value = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return value if decode_value(value) == text else text.encode("utf-8", "surrogatepass")


def decode_value(value: bytes | None) -> str | None:
    """Return a record's bytes as text that JSON can carry; `encode_value` is the inverse."""
    return None if value is None else value.decode("utf-8", "surrogateescape")


def render_record(record: StoredRecord) -> str:
    """Return one record as the JSON line that `parse_lines` parses."""
    value = decode_value(record.value)
    fields = {"partition": record.partition, "offset": record.offset, "timestamp": record.timestamp_ms, "value": value}
    return json.dumps(fields if record.reason is None else fields | {"reason": record.reason})


def summary(world: World) -> dict[str, Any]:
    """Return the state as `replay --json` prints it; stale owners and expired pauses are shown as they are stored."""
    partitions = [world.partitions[number] for number in sorted(world.partitions)]
    names = sorted({name for partition in partitions for name in partition.groups})
    return {
        "invalid": sum(partition.invalid.total() for partition in partitions),
        "refused": sum(partition.refused.total() for partition in partitions),
        "groups": {name: _group_summary(world, name) for name in names},
    }


def _group_summary(world: World, name: str) -> dict[str, Any]:
    parts = [partition.groups[name] for partition in world.partitions.values() if name in partition.groups]
    pauses = [part.paused_until_s for part in parts if part.paused_until_s is not None]
    keys = sorted(((place, key) for part in parts for place, key in part.keys.items()), key=lambda named: named[0])
    return {
        "paused_until": max(pauses, default=None),
        "partitions": [_key_summary(place, key) for place, key in keys],
    }


def _key_summary(place: DataPartitionId, key: Key) -> dict[str, Any]:
    owner = key.owner
    shown = {
        "topic": place[0],
        "partition": place[1],
        "owner_instance": owner and owner.instance,
        "owner_client": owner and owner.client,
        "epoch": owner and owner.epoch,
        "offset": key.offset,
        "plan_end": key.plan_end,
        "plan_attempts": key.plan_attempts,
        "generation": key.generation,
        "data_topic_id": key.data_topic_id,
        "last_beat_ms": None if owner is None else key.last_beat_ms,
        "provisional": key.provisional,
    }
    if key.ranges:
        shown["ranges"] = [_range_summary(range_) for range_ in key.ranges]
    return shown


def _range_summary(each: Range) -> dict[str, Any]:
    owner = each.owner
    return {
        "start": each.start,
        "end": each.end,
        "phase": each.phase.value,
        "attempts": each.attempts,
        "owner_instance": owner and owner.instance,
        "owner_client": owner and owner.client,
        "epoch": owner and owner.epoch,
        "last_beat_ms": owner and each.last_beat_ms,
    }
