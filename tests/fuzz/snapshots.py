"""The reader of snapshots: the bytes damage the records of two snapshots of one log; each is read whole or not at all.

This module decides by itself what may be read, from the names and checksums alone. The bytes may also forge a snapshot
with a valid checksum. Then the reader must skip it, or compute a state that can be written and read again.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

from marshal_dagster.protocol import snapshots
from marshal_dagster.protocol.messages import WITHOUT_SETTINGS
from marshal_dagster.protocol.snapshots import Record, SnapshotChoice
from marshal_dagster.protocol.world import PartitionWorld, World
from tests.fuzz.promises import PromiseError, hold, in_time
from tests.fuzz.supply import Supply
from tests.fuzz.world import hold_equal
from tests.log_generator import generate

TOPIC_ID: Final = "A" * 22
LOGS: Final = 4
LOG_RECORDS: Final = 120
PART_BYTES: Final = (64, 300, 500_000)
NAME: Final = re.compile(rf"[1-4]/{TOPIC_ID}/1/0/(?:0|[1-9][0-9]{{0,18}})/[A-Za-z0-9_-]{{1,64}}")
FORGED: Final = f"3/{TOPIC_ID}/1/0/{{offset}}/forged"

Spoilt = tuple[bytes | None, bytes | None]


@lru_cache
def states(seed: int) -> tuple[PartitionWorld, PartitionWorld]:
    """Return the state of a log in its middle and at its end."""
    return _state(seed, LOG_RECORDS // 2), _state(seed, LOG_RECORDS)


def _state(seed: int, records: int) -> PartitionWorld:
    world = World(1)
    for record in generate(seed, records, coordination_partitions=1, profile="go" if seed == 1 else "mixed"):
        world.apply(*record)
    return world.partitions[0]


@lru_cache
def written(seed: int, part_bytes: int) -> tuple[Record, ...]:
    """Return the records of both snapshots of a log."""
    older, newer = states(seed)
    return (
        *snapshots.render(older, TOPIC_ID, "older", part_bytes),
        *snapshots.render(newer, TOPIC_ID, "newer", part_bytes),
    )


def check(data: bytes) -> int:
    """Damage the records of two snapshots as the bytes describe, and read them; return the number of records read."""
    supply = Supply(data)
    seed = supply.byte() % LOGS
    records: list[Spoilt] = list(written(seed, supply.choose(PART_BYTES)))
    end = states(seed)[1].next_offset + 1
    while supply:
        SPOILERS[supply.byte() % len(SPOILERS)](supply, records, end)
    choice = in_time("reading snapshots", lambda: read(records, end), 1 + len(records))
    if choice.world is not None:
        hold_usable(choice.world)
    expected = readable(records, end)
    if any(name.endswith("/forged") for name in expected):
        return len(records)
    found = choice.world and choice.world.next_offset
    offsets = [int(name.split("/")[4]) for name in expected]
    hold(found == max(offsets, default=None), "the newest whole snapshot is read, and no other", found, expected)
    if choice.world is not None:
        [written_state] = [state for state in states(seed) if state.next_offset == found]
        hold_equal(choice.world, written_state, "what is read is what was written")
    return len(records)


def read(records: Iterable[Spoilt], end: int) -> SnapshotChoice:
    """Read the newest snapshot."""
    return snapshots.choose(
        records, topic_id=TOPIC_ID, number=0, partitions=1, start=0, end=end, defaults=WITHOUT_SETTINGS
    )


def hold_usable(world: PartitionWorld) -> None:
    """Check that a state from a snapshot can be written and read again, and that a reader can continue from it."""
    again = read(snapshots.render(world, TOPIC_ID, "again"), world.next_offset).world
    if again is None:
        raise PromiseError("what was read can be written and read again")
    hold_equal(again, world, "what was read can be written and read again")
    for name, group in world.groups.items():
        for (topic, partition), key in group.keys.items():
            sender = "a" if key.owner is None else key.owner.instance
            beat = f"Heartbeat/1/1/{sender}/c/{name}/{topic}/{partition}/{key.offset or 0}"
            again.apply(again.next_offset, again.log_time_ms or 0, beat.encode())


def readable(records: Iterable[Spoilt], end: int) -> list[str]:
    """Return the names of the snapshots that are whole by their checksums."""
    parts: dict[str, dict[str, bytes]] = {}
    for key, value in records:
        name, _, part = (key or b"").decode(errors="replace").rpartition("/")
        if NAME.fullmatch(name) is None:
            continue
        if value is None:
            parts.get(name, {}).pop(part, None)
        else:
            parts.setdefault(name, {})[part] = value
    return [name for name, by_part in parts.items() if int(name.split("/")[4]) <= end and is_whole(name, by_part)]


def is_whole(name: str, parts: dict[str, bytes]) -> bool:
    """Return whether the closing part, the count and the checksum are right."""
    try:
        closing: dict[str, Any] = json.loads(parts["end"])
        count, log_time_ms = closing["parts"], closing["log_time_ms"]
        if type(count) is not int or count < 0 or not (log_time_ms is None or type(log_time_ms) is int):
            return False
        text = b"".join(parts[str(number)] for number in range(count))
        return bool(closing["sha256"] == hashlib.sha256(f"{name}\n".encode() + text).hexdigest())
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return False


def forged(text: bytes, offset: int) -> list[Spoilt]:
    """Return the records of a snapshot with that text, with the checksum that its writer would compute."""
    name = FORGED.format(offset=offset)
    closing = {"parts": 1, "sha256": hashlib.sha256(f"{name}\n".encode() + text).hexdigest(), "log_time_ms": 5}
    return [(f"{name}/0".encode(), text), (f"{name}/end".encode(), json.dumps(closing).encode())]


# Damage to the records


def _at(supply: Supply, records: Sequence[Spoilt]) -> int:
    return (supply.byte() * 256 + supply.byte()) % max(1, len(records))


def _change_byte(supply: Supply, records: list[Spoilt], _: int) -> None:
    at = _at(supply, records)
    if not records or not records[at][1]:
        return
    key, value = records[at]
    where, byte = (supply.byte() * 256 + supply.byte()) % len(value or b""), supply.take(1)
    records[at] = (key, (value or b"")[:where] + byte + (value or b"")[where + 1 :])


def _cut_value(supply: Supply, records: list[Spoilt], _: int) -> None:
    at = _at(supply, records)
    if records:
        key, value = records[at]
        records[at] = (key, (value or b"")[: supply.byte()])


def _change_key(supply: Supply, records: list[Spoilt], _: int) -> None:
    at = _at(supply, records)
    if records:
        key, value = records[at]
        where, byte = supply.byte() % (1 + len(key or b"")), supply.take(1)
        records[at] = ((key or b"")[:where] + byte + (key or b"")[where + 1 :], value)


def _lose(supply: Supply, records: list[Spoilt], _: int) -> None:
    at = _at(supply, records)
    if records:
        del records[at]


def _delete(supply: Supply, records: list[Spoilt], _: int) -> None:
    at = _at(supply, records)
    if records:
        records.append((records[at][0], None))


def _repeat(supply: Supply, records: list[Spoilt], _: int) -> None:
    at = _at(supply, records)
    if records:
        records.insert(_at(supply, records), records[at])


def _swap_values(supply: Supply, records: list[Spoilt], _: int) -> None:
    one, other = _at(supply, records), _at(supply, records)
    if records:
        (key, value), (others_key, others_value) = records[one], records[other]
        records[one], records[other] = (key, others_value), (others_key, value)


def _add_noise(supply: Supply, records: list[Spoilt], _: int) -> None:
    records.append((supply.take(supply.byte()) or None, supply.take(supply.byte()) or None))


def _close_otherwise(supply: Supply, records: list[Spoilt], _: int) -> None:
    closings = [at for at, (key, _) in enumerate(records) if (key or b"").endswith(b"/end")]
    if closings:
        at = supply.choose(closings)
        records[at] = (records[at][0], supply.take(supply.byte()))


def _forge(supply: Supply, records: list[Spoilt], end: int) -> None:
    """Add a snapshot with a text from the bytes and a valid checksum."""
    text = supply.take(supply.byte() * 4)
    if supply.byte() % 2:
        defaults = b'{"defaults":"60000/go/at_least_once/","log_time_ms":5,"invalid":{},"refused":{},"noted":{}}'
        text = defaults + b"\n" + text
    records += forged(text, end)


def _forge_rows(supply: Supply, records: list[Spoilt], end: int) -> None:
    """Change bytes of a real snapshot's text, and correct its checksum."""
    texts = [text for text in (_text(records, "older"), _text(records, "newer")) if text]
    if not texts:
        return
    text = bytearray(supply.choose(texts))
    for _ in range(supply.byte() % 8):
        at, size = (supply.byte() * 256 + supply.byte()) % (len(text) + 1), supply.byte() % 8
        text[at : at + size] = supply.take(supply.byte() % 24)
    records += forged(bytes(text), end)


def _text(records: Iterable[Spoilt], snapshot_id: str) -> bytes:
    own = [(key, value) for key, value in records if f"/{snapshot_id}/".encode() in (key or b"")]
    return b"".join(value or b"" for key, value in own if not (key or b"").endswith(b"/end"))


SPOILERS: Final = (
    _change_byte,
    _cut_value,
    _change_key,
    _lose,
    _delete,
    _repeat,
    _swap_values,
    _add_noise,
    _close_otherwise,
    _forge,
    _forge_rows,
)
