"""Events that a claimed batch writes into an outbox, in the same transaction as its ranges."""

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql

from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.schema import OutboxTables
from tests.sink_conformance import deliver, part, rows_of
from tests.sink_outputs import DATABASE_STEPS, TABLE, FakePostgresSink, PostgresOutput, hook, own_schema

Event = tuple[int, str, str | None, Any]


class KilledError(BaseException):
    """A process dies here."""


@pytest.fixture
def output(postgres: str) -> PostgresOutput:
    """A separate schema with an outbox."""
    output = PostgresOutput(postgres, own_schema())
    OutboxTables(Database(postgres), schema=output.schema).create()
    return output


def sink_of(
    output: PostgresOutput, events: OutgoingEvents | None = None, reached: Callable[[str], None] | None = None
) -> FakePostgresSink:
    """Open the output with events of its rows: the column `value` is the key, and the whole row is the event."""
    events = events or OutgoingEvents("orders.done", key="value", schema=output.schema)
    sink = FakePostgresSink(output.dsn, TABLE, schema=output.schema, companion=events, lock_timeout_s=30)
    hook(sink, reached)
    return sink


def stashed(output: PostgresOutput) -> list[Event]:
    """Return the events in the outbox."""
    with psycopg.connect(output.dsn, options=f"-c search_path={output.schema}") as connection:
        found = connection.execute("SELECT id, topic, key, value FROM outbox ORDER BY id").fetchall()
    return [(number, topic, key and key.decode(), json.loads(value)) for number, topic, key, value in found]


def offsets(output: PostgresOutput) -> list[tuple[int, int]]:
    """Return the source messages of the events in the outbox, in order."""
    return [(event["kafka_partition"], event["kafka_offset"]) for *_, event in stashed(output)]


def test_each_row_is_an_event_in_the_order_of_its_partition(output: PostgresOutput) -> None:
    """The event is the row without the sink's own columns. A repeated delivery stashes nothing more."""
    ranges = part(0, 0, 3), part(1, 5, 7)
    backwards = rows_of("a", *ranges)[::-1]

    deliver(output, "a", *ranges, rows=backwards, sink=sink_of(output))
    deliver(output, "a", *ranges, sink=sink_of(output))

    assert offsets(output) == [(0, 0), (0, 1), (0, 2), (1, 5), (1, 6)]
    assert {(topic, key) for _, topic, key, _ in stashed(output)} == {("orders.done", "a")}
    assert stashed(output)[0][3] == {"kafka_partition": 0, "kafka_offset": 0, "value": "a"}


def test_events_of_one_message_are_in_the_order_of_its_rows(output: PostgresOutput) -> None:
    """The rows of a message may have the same key, whose events have an order."""
    rows = [(partition, 0, f"{number:02}") for partition in (1, 0) for number in range(50)]
    deliver(output, "a", part(0, 0, 1), part(1, 0, 1), rows=rows, sink=sink_of(output))

    found = [(event["kafka_partition"], key) for _, _, key, event in stashed(output)]
    assert found == [(partition, f"{number:02}") for partition in (0, 1) for number in range(50)]


@pytest.mark.parametrize("step", DATABASE_STEPS)
def test_rows_and_events_are_there_together_or_not_at_all(output: PostgresOutput, step: str) -> None:
    """A writer dies at a step. The next one writes the missing rows and events, and nothing twice."""

    def die(reached: str) -> None:
        if reached == step:
            raise KilledError

    ranges = part(0, 0, 3), part(1, 5, 7)
    with pytest.raises(KilledError):
        deliver(output, "a", *ranges, sink=sink_of(output, reached=die))
    assert [row[:2] for row in output.rows()] == sorted(offsets(output))
    deliver(output, "a", *ranges, sink=sink_of(output))

    assert sorted(offsets(output)) == [row[:2] for row in rows_of("a", *ranges)] == [row[:2] for row in output.rows()]


def test_what_another_took_meanwhile_stashes_nothing(output: PostgresOutput) -> None:
    """The events of a range that another writer took before this write are those of the other writer."""
    mine, others = part(0, 0, 3), part(1, 5, 7)

    def meanwhile(reached: str) -> None:
        if reached == "copied":
            deliver(output, "b", others, sink=sink_of(output))

    deliver(output, "a", mine, others, sink=sink_of(output, reached=meanwhile))

    assert [(key, event["kafka_partition"]) for _, _, key, event in stashed(output)] == [("b", 1)] * 2 + [("a", 0)] * 3


def test_a_new_generation_stashes_anew(output: PostgresOutput) -> None:
    """Replaced rows produce events again, so consumers of the events get the second result."""
    deliver(output, "a", part(0, 0, 3), sink=sink_of(output))
    deliver(output, "b", part(0, 1, 3, generation=7), sink=sink_of(output))

    assert [(key, event["kafka_offset"]) for _, _, key, event in stashed(output)] == [
        *(("a", offset) for offset in range(3)),
        *(("b", offset) for offset in range(1, 3)),
    ]


def test_a_column_can_be_the_event(output: PostgresOutput) -> None:
    """The event's value is the column's text. Without a key column the event has no key."""
    events = OutgoingEvents("orders.done", value="value", schema=output.schema)
    deliver(output, "5", part(0, 0, 1), sink=sink_of(output, events))

    assert [event[1:] for event in stashed(output)] == [("orders.done", None, 5)]


_TYPES = """
    CREATE DOMAIN {schema}.packed AS bytea;
    CREATE DOMAIN {schema}.packed_again AS {schema}.packed CHECK (octet_length(VALUE) < 9);
    CREATE DOMAIN {schema}.named AS text;
    CREATE DOMAIN {schema}.host AS inet;
    CREATE DOMAIN {schema}.listed AS integer[];
    CREATE TYPE {schema}.mood AS ENUM ('sad', 'glad');
    CREATE TYPE {schema}.pair AS (a integer, b bytea)
    """
_HOSTILE = {
    "TimeZone": "Asia/Tokyo",
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
}


def with_hostile_settings(output: PostgresOutput) -> str:
    """Return the connection string of a role with settings, in this database, that change how values are shown."""
    role = f"r{output.schema}"
    with psycopg.connect(output.dsn) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN SUPERUSER").format(sql.Identifier(role)))
        for name, value in _HOSTILE.items():
            connection.execute(
                sql.SQL("ALTER ROLE {} IN DATABASE {} SET {} = {}").format(
                    *map(sql.Identifier, (role, connection.info.dbname, name)), sql.Literal(value)
                )
            )
    dsn = output.dsn.replace("postgres:", f"{role}:", 1)
    with psycopg.connect(dsn) as connection:
        for name, value in _HOSTILE.items():
            assert connection.execute("SELECT current_setting(%s)", (name,)).fetchone() == (value,)
    return dsn


def event_of(output: PostgresOutput, kind: str, literal: str, **events: Any) -> bytes:  # noqa: ANN401 - the fields of the events
    """Return the event of a row with a column `it`, written by a role with such settings."""
    schema = sql.Identifier(output.schema)
    with Database(with_hostile_settings(output)).connect(is_one_transaction=True) as connection:
        connection.execute(sql.SQL(_TYPES).format(schema=schema))
        connection.execute(sql.SQL("SET LOCAL search_path = {}").format(schema))
        connection.execute(
            "CREATE TEMPORARY TABLE marshal_rows (marshal_range bigint, kafka_partition integer, kafka_offset bigint, "
            f"it {kind}) ON COMMIT DROP".encode()
        )
        connection.execute("INSERT INTO marshal_rows VALUES (1, 0, 5, %s)", (literal,))
        written = OutgoingEvents("t", schema=output.schema, **events)
        written.write(connection, ["marshal_range", "kafka_partition", "kafka_offset", "it"], [1])
        found = connection.execute("SELECT key, value FROM outbox").fetchone()
        assert found is not None
        return bytes(found[0] if "key" in events else found[1])


@pytest.mark.parametrize("field", ["key", "value"])
@pytest.mark.parametrize(
    ("kind", "literal", "content"),
    [
        ("bytea", "\\x00ff", b"\x00\xff"),
        ("packed", "\\x00ff", b"\x00\xff"),
        ("packed_again", "\\x00ff", b"\x00\xff"),
        ("named", "größe", "größe".encode()),
        ("mood", "glad", b"glad"),
        ("boolean", "t", b"true"),
        ("numeric", "NaN", b"NaN"),
        ("numeric", "-Infinity", b"-Infinity"),
        ("numeric(9, 2)", "1.5", b"1.50"),
        ("double precision", "0.1", b"0.1"),
        ("double precision", "1234567.8901234567", b"1234567.8901234567"),
        ("real", "NaN", b"NaN"),
        ("date", "infinity", b"infinity"),
        ("date", "0044-03-15 BC", b"0044-03-15 BC"),
        ("date", "5874897-12-31", b"5874897-12-31"),
        ("timestamp", "2024-02-01 12:00:00.000001", b"2024-02-01 12:00:00.000001"),
        ("timestamptz", "2024-01-01 00:30:00+01", b"2023-12-31 23:30:00+00"),
        ("timestamptz", "-infinity", b"-infinity"),
        ("interval", "1 mon -2 days 03:00", b"1 mon -2 days +03:00:00"),
        ("jsonb", '{"a": [1]}', b'{"a": [1]}'),
        ("inet", "10.0.0.1", b"10.0.0.1"),
        ("inet", "10.1.0.0/16", b"10.1.0.0/16"),
        ("host", "::1", b"::1"),
        ("cidr", "10.0.0.0/8", b"10.0.0.0/8"),
        ("uuid", "00000000-0000-0000-0000-00000000000A", b"00000000-0000-0000-0000-00000000000a"),
    ],
)
def test_each_type_of_a_column_is_one_text_or_its_bytes(
    output: PostgresOutput, field: str, kind: str, literal: str, content: bytes
) -> None:
    """Settings of role and database do not change the result. A domain behaves like its base type."""
    assert event_of(output, kind, literal, **{field: "it"}) == content


@pytest.mark.parametrize(
    ("kind", "literal", "content"),
    [
        ("packed_again", "\\x00ff", "\\x00ff"),
        ("bytea[]", '{"\\\\x00ff"}', ["\\x00ff"]),
        ("pair", '(1,"\\\\x00ff")', {"a": 1, "b": "\\x00ff"}),
        ("mood[]", "{sad,NULL}", ["sad", None]),
        ("numeric", "NaN", "NaN"),
        ("double precision", "-Infinity", "-Infinity"),
        ("double precision", "1234567.8901234567", 1234567.8901234567),
        ("date", "0044-03-15 BC", "0044-03-15 BC"),
        ("timestamptz", "2024-01-01 00:30:00+01", "2023-12-31T23:30:00+00:00"),
        ("timestamptz", "12024-01-01 00:30:00+01", "12023-12-31T23:30:00+00:00"),
        ("interval", "1 mon -2 days 03:00", "1 mon -2 days +03:00:00"),
    ],
)
def test_each_type_of_a_row_is_one_json(output: PostgresOutput, kind: str, literal: str, content: object) -> None:
    """Settings of role and database do not change the result."""
    row = json.loads(event_of(output, kind, literal))
    assert row == {"kafka_partition": 0, "kafka_offset": 5, "it": content}


@pytest.mark.parametrize(
    ("kind", "literal"),
    [("integer[]", "{1}"), ("listed", "{1}"), ("bytea[]", "{}"), ("pair", "(1,)"), ("int4range", "[1,2)")],
)
@pytest.mark.parametrize("field", ["key", "value"])
def test_a_column_of_several_values_is_no_event(output: PostgresOutput, field: str, kind: str, literal: str) -> None:
    """Their text has PostgreSQL's own format, which consumers do not know."""
    with pytest.raises(SinkRejectedError, match=f"^{field}: column 'it' has type .*, so nothing was written. Use a"):
        event_of(output, kind, literal, **{field: "it"})


def test_an_event_too_large_refuses_the_batch(output: PostgresOutput) -> None:
    """Neither rows nor events are written."""
    events = OutgoingEvents("orders.done", schema=output.schema, max_bytes=100)
    with pytest.raises(SinkRejectedError, match="max_bytes=100"):
        deliver(output, "x" * 101, part(0, 0, 1), sink=sink_of(output, events))

    assert (output.rows(), stashed(output)) == ([], [])


@pytest.mark.parametrize(
    ("events", "match"),
    [
        (lambda schema: OutgoingEvents("t", key="carrier", schema=schema), "no column 'carrier'; it has .*value"),
        (lambda schema: OutgoingEvents("t", value="delay", schema=schema), "no column 'delay'"),
        (lambda schema: OutgoingEvents("t", outbox="other", schema=schema), "'other' .*outbox init"),
    ],
)
def test_what_is_missing_is_reported_before_the_frame_is_evaluated(
    output: PostgresOutput, events: Callable[[str], OutgoingEvents], match: str
) -> None:
    """The error names the field, or the command that creates the outbox."""
    reached: list[str] = []
    with pytest.raises(ConfigurationError, match=match):
        deliver(output, "a", part(0, 0, 1), sink=sink_of(output, events(output.schema), reached.append))
    assert "evaluated" not in reached
