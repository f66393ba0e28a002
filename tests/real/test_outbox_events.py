"""Events that a claimed batch writes into an outbox, in the transaction that takes its ranges."""

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.schema import OutboxTables
from tests.sink_conformance import deliver, part, rows_of
from tests.sink_outputs import POSTGRES_STEPS, TABLE, FakePostgresSink, PostgresOutput, hook, own_schema

Event = tuple[int, str, str | None, Any]


class KilledError(BaseException):
    """A process dies here."""


@pytest.fixture
def output(postgres: str) -> PostgresOutput:
    """A schema of its own, with an outbox."""
    output = PostgresOutput(postgres, own_schema())
    OutboxTables(Database(postgres), schema=output.schema).create()
    return output


def sink_of(
    output: PostgresOutput, events: OutgoingEvents | None = None, reached: Callable[[str], None] | None = None
) -> FakePostgresSink:
    """Open the output with events of its rows: the value is the key, the whole row the event."""
    events = events or OutgoingEvents("orders.done", key="value", schema=output.schema)
    sink = FakePostgresSink(output.dsn, TABLE, schema=output.schema, companion=events, lock_timeout_s=30)
    hook(sink, reached)
    return sink


def stashed(output: PostgresOutput) -> list[Event]:
    """Give what is in the outbox."""
    with psycopg.connect(output.dsn, options=f"-c search_path={output.schema}") as connection:
        found = connection.execute("SELECT id, topic, key, value FROM outbox ORDER BY id").fetchall()
    return [(number, topic, key and key.decode(), json.loads(value)) for number, topic, key, value in found]


def offsets(output: PostgresOutput) -> list[tuple[int, int]]:
    """Give of which messages events are in the outbox, in its order."""
    return [(event["kafka_partition"], event["kafka_offset"]) for *_, event in stashed(output)]


def test_each_row_is_an_event_in_the_order_of_its_partition(output: PostgresOutput) -> None:
    """The whole row is the event, without what is the sink's own; a delivery that is repeated stashes nothing more."""
    ranges = part(0, 0, 3), part(1, 5, 7)
    backwards = rows_of("a", *ranges)[::-1]

    deliver(output, "a", *ranges, rows=backwards, sink=sink_of(output))
    deliver(output, "a", *ranges, sink=sink_of(output))

    assert offsets(output) == [(0, 0), (0, 1), (0, 2), (1, 5), (1, 6)]
    assert {(topic, key) for _, topic, key, _ in stashed(output)} == {("orders.done", "a")}
    assert stashed(output)[0][3] == {"kafka_partition": 0, "kafka_offset": 0, "value": "a"}


@pytest.mark.parametrize("step", POSTGRES_STEPS)
def test_rows_and_events_are_there_together_or_not_at_all(output: PostgresOutput, step: str) -> None:
    """A writer dies at a step; the next one writes what is missing, and nothing twice."""

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
    """A range that was taken between the look and the write has its events from who took it."""
    mine, others = part(0, 0, 3), part(1, 5, 7)

    def meanwhile(reached: str) -> None:
        if reached == "copied":
            deliver(output, "b", others, sink=sink_of(output))

    deliver(output, "a", mine, others, sink=sink_of(output, reached=meanwhile))

    assert [(key, event["kafka_partition"]) for _, _, key, event in stashed(output)] == [("b", 1)] * 2 + [("a", 0)] * 3


def test_a_new_generation_stashes_anew(output: PostgresOutput) -> None:
    """Rows that are replaced have events once more: consumers of the events see the second result."""
    deliver(output, "a", part(0, 0, 3), sink=sink_of(output))
    deliver(output, "b", part(0, 1, 3, generation=7), sink=sink_of(output))

    assert [(key, event["kafka_offset"]) for _, _, key, event in stashed(output)] == [
        *(("a", offset) for offset in range(3)),
        *(("b", offset) for offset in range(1, 3)),
    ]


def test_a_column_can_be_the_event(output: PostgresOutput) -> None:
    """Its text is the value; without a key there is none."""
    events = OutgoingEvents("orders.done", value="value", schema=output.schema)
    deliver(output, "5", part(0, 0, 1), sink=sink_of(output, events))

    assert [event[1:] for event in stashed(output)] == [("orders.done", None, 5)]


def test_an_event_too_large_refuses_the_batch(output: PostgresOutput) -> None:
    """Nothing is written, neither rows nor events."""
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
def test_what_is_missing_is_told_before_the_frame_is_evaluated(
    output: PostgresOutput, events: Callable[[str], OutgoingEvents], match: str
) -> None:
    """The error names the field, or the command that makes the outbox."""
    reached: list[str] = []
    with pytest.raises(ConfigurationError, match=match):
        deliver(output, "a", part(0, 0, 1), sink=sink_of(output, events(output.schema), reached.append))
    assert "evaluated" not in reached
