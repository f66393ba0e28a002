"""Transaction notes: no record in a topic of notes may stop a harvester, and each real note is read.

The bytes write records among real notes: noise, notes with changed bytes, and notes with unusual fields. A record is a
note or is skipped. Each row of a note can be looked up in the database. The notes of a Kafka sink are read too: a value
is such a note, or is rejected with an error that names it.
"""

import json
from typing import Any, Final

from marshal_dagster.errors import MarshalError, SinkRejectedError
from marshal_dagster.outbox.backoff import MOST_IN_FLIGHT_RECORDS
from marshal_dagster.outbox.interfaces import PublishedBatch, Row
from marshal_dagster.outbox.publisher import is_note, read_note, render_note
from marshal_dagster.protocol.idempotence import StoredPosition
from marshal_dagster.sinks.kafka.notes import PositionNote
from tests.fuzz.promises import hold, in_time
from tests.fuzz.supply import Supply

INT64_END: Final = 2**63
NUMBERS: Final = (0, 1, 2, 7, -1, 2**31, INT64_END - 1, INT64_END, -INT64_END, 10**18, 10**400)
ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    1.0,
    1e308,
    "1",
    [],
    {},
    [1],
    [[1, 2]],
    [[2, 1]],
    [[1, 2, 3]],
    [["1", "2"]],
)
FIELDS: Final = ("version", "rows", "created_from_us", "created_until_us")
ROWS_PER_RECORD: Final = 1_000
"""A note of this many rows may take as long to list as one record may take."""


def check(data: bytes) -> int:
    """Write the records that the bytes describe, and read each; return their number."""
    supply, records = Supply(data), 0
    while supply:
        check_value(WRITERS[supply.byte() % len(WRITERS)](supply))
        records += 1
    return records


def check_value(value: bytes | None) -> None:
    """Check that a value is a note, or is ignored."""
    _check_position(value)
    is_one = in_time("judging a record", lambda: is_note(value))
    allowed = 1 + (MOST_IN_FLIGHT_RECORDS if is_one else 0) // ROWS_PER_RECORD
    try:
        batch = in_time("reading a record", lambda: read_note(value), allowed)
    except MarshalError as error:
        version = json.loads(value or b"")["version"]
        hold(is_one and version > 1, "only a note of a newer version is refused", value, error)
        return
    hold(is_one or batch == PublishedBatch(), "what is no note has no rows", value, batch)
    hold(batch.row_count <= MOST_IN_FLIGHT_RECORDS, "a note has no more rows than a batch", value)
    for rows in batch.ranges:
        hold(all(-INT64_END <= number < INT64_END for number in rows), "each row can be looked up", value, rows)
    ends = [number for rows in batch.ranges for number in (rows.first, rows.last + 1)]
    hold(ends == sorted(ends), "ranges are sorted and do not overlap", value, batch)


def _check_position(text: bytes | None) -> None:
    is_one = in_time("judging a sink's record", lambda: PositionNote.is_note(text))
    try:
        note = PositionNote.from_json(text or b"", "the note")
    except SinkRejectedError as error:
        hold(not is_one or "has version" in str(error), "what is no note is refused", text, error)
        return
    hold(is_one and PositionNote.from_json(note.to_json(), "again") == note, "what was read can be written", text)


def _position(supply: Supply) -> bytes:
    position = StoredPosition("c" * 22, "d" * 22, supply.byte(), supply.byte(), supply.byte())
    note = PositionNote("o" * 22, position, ((supply.byte(), supply.byte()),), "attempt")
    hold(PositionNote.from_json(note.to_json(), "here") == note, "what a sink wrote is read", note)
    fields: dict[str, Any] = json.loads(note.to_json())
    for _ in range(supply.byte() % 4):
        fields[supply.choose(tuple(fields))] = supply.choose((*ODD, *NUMBERS))
    return json.dumps(fields).encode()


def _real(supply: Supply) -> bytes:
    numbers = sorted({supply.byte() for _ in range(1 + supply.byte() % 8)})
    rows = [Row(number, "t", None, b"v", None, supply.byte()) for number in numbers]
    value = render_note(PublishedBatch.of(rows))
    times = min(row.created_us for row in rows), max(row.created_us for row in rows)
    read = read_note(value).ranges
    hold([number for found in read for number in range(found[0], found[1] + 1)] == numbers, "its rows are read", value)
    hold({found[2:] for found in read} == {times}, "the times of its rows are read", value)
    return value


def _changed(supply: Supply) -> bytes:
    value = bytearray(_real(supply))
    for _ in range(1 + supply.byte() % 4):
        at, size = supply.byte() % (len(value) + 1), supply.byte() % 4
        value[at : at + size] = supply.take(supply.byte() % 12)
    return bytes(value)


def _odd(supply: Supply) -> bytes:
    note: dict[str, Any] = {"version": 1, "rows": [[1, 2]], "created_from_us": 1, "created_until_us": 2}
    for _ in range(1 + supply.byte() % 4):
        name = supply.choose(FIELDS)
        match supply.byte() % 4:
            case 0:
                note.pop(name, None)
            case 1:
                note[name] = supply.choose(ODD)
            case 2:
                note[name] = supply.choose(NUMBERS)
            case _:
                note[name] = [[supply.choose(NUMBERS), supply.choose(NUMBERS)] for _ in range(supply.byte() % 3)]
    return json.dumps(note).encode()


def _nested(supply: Supply) -> bytes:
    return supply.choose((b"[", b'{"rows":', b'{"version":1,"rows":[')) * (supply.byte() * 256)


def _noise(supply: Supply) -> bytes | None:
    return supply.take(supply.byte()) or None


WRITERS: Final = (_real, _changed, _odd, _nested, _noise, _position)
