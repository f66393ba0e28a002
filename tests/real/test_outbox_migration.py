"""`outbox migrate` on a real PostgreSQL, from tables as goharvest and Debezium's users make them."""

import json
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg import errors, sql

from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.interfaces import ID_HEADER
from marshal_dagster.outbox.migration import OutboxMigration
from marshal_dagster.outbox.old_tables import DebeziumTable, GoharvestTable, KeyConverter, Level, OldTable
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.writer import Outbox, OutboxRecord
from tests.cli import Answer, call
from tests.conditions import WITHIN_S, wait_until
from tests.outbox_fixtures import Site as OutboxSite
from tests.real.conftest import MakeTopic
from tests.sink_outputs import own_schema

GOHARVEST: Final[LiteralString] = """
    CREATE TABLE IF NOT EXISTS outbox (
        id BIGSERIAL PRIMARY KEY,
        create_time TIMESTAMP WITH TIME ZONE NOT NULL,
        kafka_topic VARCHAR(249) NOT NULL,
        kafka_key VARCHAR(100) NOT NULL,
        kafka_value VARCHAR(10000),
        kafka_header_keys TEXT[] NOT NULL,
        kafka_header_values TEXT[] NOT NULL,
        leader_id UUID
    )
    """
STASH: Final[LiteralString] = """
    INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
    VALUES (NOW(), %s, %s, %s, %s, %s)
    """
MARK: Final[LiteralString] = """
-- mark query
UPDATE outbox SET leader_id = %s
WHERE id IN (SELECT id FROM outbox WHERE leader_id IS NULL OR leader_id != %s ORDER BY id LIMIT 100)
RETURNING id
"""
DEBEZIUM: Final[LiteralString] = """
    CREATE TABLE outboxevent (
        id uuid NOT NULL PRIMARY KEY DEFAULT gen_random_uuid(),
        aggregatetype character varying(255) NOT NULL,
        aggregateid character varying(255) NOT NULL,
        type character varying(255) NOT NULL,
        payload jsonb
    )
    """
EVENT: Final[LiteralString] = """
    INSERT INTO outboxevent (id, aggregatetype, aggregateid, type, payload) VALUES (%s, 'order', %s, 'OrderPaid', %s)
    """
KEYS: Final = ("a", "b", "c")
Moved = tuple[str, bytes | None, bytes | None, list[tuple[str, bytes | None]]]


@dataclass(frozen=True, slots=True)
class Site:
    """A schema with an outbox `events`, and a connection that finds its tables."""

    dsn: str
    schema: str
    connection: "psycopg.Connection[tuple[Any, ...]]"

    @property
    def tables(self) -> OutboxTables:
        """The outbox."""
        return OutboxTables(Database(self.dsn), "events", self.schema)

    def connect(self, **options: Any) -> "psycopg.Connection[tuple[Any, ...]]":  # noqa: ANN401 - psycopg's
        """Open another connection, which finds the same tables."""
        return psycopg.connect(self.dsn, options=f"-c search_path={self.schema}", **options)

    def migration(
        self, old: OldTable | None = None, table: str = "outbox", *, lock_timeout_s: float = 5.0
    ) -> OutboxMigration:
        """Return the migration of a table."""
        return OutboxMigration(self.tables, old or GoharvestTable(), table, lock_timeout_s=lock_timeout_s)

    def moved(self) -> list[Moved]:
        """Return the rows of the outbox in the order of their ids."""
        found = self.connection.execute("SELECT topic, key, value, header_keys, header_values FROM events ORDER BY id")
        return [
            (topic, key, value, list(zip(names or (), values or (), strict=True)))
            for topic, key, value, names, values in found
        ]

    def kinds(self) -> dict[str, str]:
        """Return the tables and views of the schema, each with its kind."""
        found = self.connection.execute(
            "SELECT relname, relkind::text FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind IN "
            "('r', 'v')",
            (self.schema,),
        )
        return dict(found.fetchall())


@pytest.fixture
def site(postgres: str) -> Iterator[Site]:
    """An outbox `events` in its own schema, beside tables `outbox` and `outboxevent` of the old software."""
    schema = own_schema()
    with psycopg.connect(postgres, autocommit=True, options=f"-c search_path={schema}") as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        connection.execute(GOHARVEST)
        connection.execute(DEBEZIUM)
        site = Site(postgres, schema, connection)
        site.tables.create()
        yield site


def stash(connection: "psycopg.Connection[tuple[Any, ...]]", key: str, value: str | None) -> None:
    """Write a row as goharvest's stasher does."""
    connection.execute(STASH, ("orders", key, value, ["source"], ["shop"]))


@dataclass(slots=True)
class Writer:
    """A thread that writes numbered rows of one key as goharvest's stasher does, each in its own transaction."""

    site: Site
    key: str
    written: int = 0
    failures: list[BaseException] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Write until it is stopped; each third transaction is rolled back."""
        try:
            with self.site.connect(prepare_threshold=1) as connection:
                while not self.stopping.is_set():
                    stash(connection, self.key, "undone")
                    connection.rollback()
                    stash(connection, self.key, str(self.written))
                    connection.commit()
                    self.written += 1
        except BaseException as error:
            self.failures.append(error)
            raise


@contextmanager
def writing(site: Site) -> Iterator[list[Writer]]:
    """Run a writer for each key."""
    writers = [Writer(site, key) for key in KEYS]
    threads = [threading.Thread(target=writer.run) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stopping.set()
        for thread in threads:
            thread.join(WITHIN_S)


def wait_for_more(writers: list[Writer]) -> None:
    """Wait until each writer has written more rows."""
    before = [writer.written for writer in writers]
    wait_until(
        lambda: all(writer.written > count + 20 for writer, count in zip(writers, before, strict=True)),
        "each writer has written more",
    )


# goharvest


def test_old_and_new_writers_keep_the_order_of_each_key(site: Site) -> None:
    """No row is lost, repeated or out of order, whether it was written before, during or after the switch."""
    outbox = Outbox("events", schema=site.schema)
    with writing(site) as writers:
        wait_for_more(writers)
        plan = site.migration(lock_timeout_s=WITHIN_S).apply()
        assert plan.rows > 0
        with site.connect() as new:
            for number in range(20):
                outbox.stash(new, [OutboxRecord("orders", str(number), key="new")])
                new.commit()
        wait_for_more(writers)
        assert site.connection.execute("SELECT count(*) FROM outbox_migrated").fetchone() == (0,)
        site.migration(lock_timeout_s=WITHIN_S).undo()
        wait_for_more(writers)
    assert [writer.failures for writer in writers] == [[]] * len(KEYS)
    by_key: dict[str, list[str]] = defaultdict(list)
    for _, key, value, headers in site.moved():
        by_key[(key or b"").decode()].append((value or b"").decode())
        assert headers == ([] if key == b"new" else [("source", b"shop")])
    for key, value in site.connection.execute("SELECT kafka_key, kafka_value FROM outbox ORDER BY id"):
        by_key[key].append(value)
    expected = {writer.key: [str(number) for number in range(writer.written)] for writer in writers}
    assert by_key == {**expected, "new": [str(number) for number in range(20)]}


def test_each_value_arrives_as_goharvest_would_publish_it(site: Site) -> None:
    """The view writes what the move writes, refuses what the table refused, and returns the id of the row."""
    rows = [
        ("orders", "k", "ü", ["a", "b"], ["1", ""]),
        ("orders.paid", "", None, [], []),
        ("orders", "ключ", "", ["a"], [None]),
    ]
    for row in rows:
        site.connection.execute(STASH, row)
    site.migration().apply()
    for row in rows:
        site.connection.execute(STASH, row)
    expected = [
        ("orders", b"k", "ü".encode(), [("a", b"1"), ("b", b"")]),
        ("orders.paid", b"", None, []),
        ("orders", "ключ".encode(), b"", [("a", None)]),
    ]
    assert site.moved() == expected * 2
    returned = site.connection.execute(STASH + " RETURNING id", rows[0]).fetchone()
    assert returned == site.connection.execute("SELECT max(id) FROM events").fetchone()
    with pytest.raises(errors.StringDataRightTruncation):
        site.connection.execute(STASH, ("orders", "k" * 101, "", [], []))
    with pytest.raises(errors.CheckViolation):
        site.connection.execute(STASH, ("orders", "k", "", ["a"], []))


def test_a_transaction_that_uses_the_table_is_waited_for_and_named(site: Site) -> None:
    """Nothing is changed after the timeout, and other writers continue. Its row moves once it has committed."""
    with site.connect() as holder:
        stash(holder, "k", "1")
        pid = holder.info.backend_pid
        checks = {check.name: check for check in site.migration().plan().checks}
        assert (checks["locks"].level, f"process {pid} (idle in transaction" in checks["locks"].text) == (
            Level.WARNING,
            True,
        )
        with pytest.raises(UnavailableError, match=rf"not locked within 0.2 s.*: process {pid} \(idle in transaction"):
            site.migration(lock_timeout_s=0.2).apply()
        assert site.kinds()["outbox"] == "r"
        stash(site.connection, "other", "2")
        holder.commit()
    assert site.migration().apply().rows == 2
    assert [value for _, _, value, _ in site.moved()] == [b"1", b"2"]


def test_a_second_run_changes_nothing(site: Site) -> None:
    """Neither of the migration nor of its undo; both can follow each other."""
    stash(site.connection, "k", "1")
    with pytest.raises(ConfigurationError, match="was not moved by"):
        site.migration(table="missing").undo()
    for _ in range(2):
        assert [site.migration().apply().is_done for _ in range(2)] == [False, True]
        assert site.kinds() | {"outbox": "v", "outbox_migrated": "r"} == site.kinds()
        assert [site.migration().undo().is_done for _ in range(2)] == [False, True]
        assert site.kinds() | {"outbox": "r"} == site.kinds()
        assert "outbox_migrated" not in site.kinds()
    assert [value for _, _, value, _ in site.moved()] == [b"1"]


def test_a_connected_goharvest_prevents_the_migration(site: Site) -> None:
    """Its statements are recognized. One that comes back after the switch can mark nothing."""
    stash(site.connection, "k", "1")
    leader = uuid.uuid4()
    with site.connect(autocommit=True) as harvester:
        harvester.execute(MARK, (leader, leader))
        pid = harvester.info.backend_pid
        plan = site.migration().plan()
        assert [check.text for check in plan.problems] == [
            f"goharvest is connected to the database (processes {pid}): stop it, also its standbys"
        ]
        with pytest.raises(MarshalError, match="nothing was changed: goharvest is connected"):
            site.migration().apply()
    wait_until(lambda: not site.migration().plan().problems, "the harvester's session has ended")
    marks = next(check for check in site.migration().plan().checks if check.name == "marks")
    assert (marks.level, marks.text[:6]) == (Level.WARNING, "1 rows")
    site.migration().apply()
    with pytest.raises(psycopg.Error, match="cannot update view"):
        site.connection.execute(MARK, (leader, leader))
    assert len(site.moved()) == 1


@pytest.mark.parametrize(("old", "table"), [(GoharvestTable(), "outbox"), (DebeziumTable(), "outboxevent")])
def test_a_harvester_that_may_run_is_named(site: Site, old: OldTable, table: str) -> None:
    """It could place keys by another partitioner, or publish before Debezium has."""
    site.connection.execute("UPDATE marshal_outboxes SET leader = 'host:17'")
    found = [check.text for check in site.migration(old, table).plan().checks if check.level is Level.WARNING]
    assert sum(text.startswith("process host:17 has harvested: ") for text in found) == 1


def test_rows_that_the_outbox_refuses_are_found_before(site: Site) -> None:
    """The check names their ids, and nothing is changed."""
    for topic, keys in (("good", []), ("not a topic", []), ("good", ["a", "b"]), ("..", [])):
        site.connection.execute(STASH, (topic, "k", "v", keys, ["1"] if keys else []))
    problems = site.migration().plan().problems
    assert [check.text.partition(";")[0] for check in problems] == ["rows that the outbox refuses, by id: 2, 3, 4"]
    with pytest.raises(MarshalError, match="nothing was changed"):
        site.migration().apply()
    assert site.moved() == []


def test_a_row_that_a_trigger_drops_undoes_everything(site: Site) -> None:
    """The whole migration is one transaction."""
    stash(site.connection, "k", "1")
    site.connection.execute("CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$")
    site.connection.execute("CREATE TRIGGER skips BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION skip()")
    before = site.kinds()
    with pytest.raises(ConfigurationError, match="1 of 1 rows would be lost"):
        site.migration().apply()
    assert site.kinds() == before
    assert site.connection.execute("SELECT kafka_value FROM outbox").fetchall() == [("1",)]


def test_writers_need_no_new_right(site: Site) -> None:
    """A role that may only insert into the old table writes through the view, and may not write to the outbox."""
    role = f"r{uuid.uuid4().hex[:8]}"
    for statement in (
        "CREATE ROLE {role}",
        "GRANT USAGE ON SCHEMA {schema} TO {role}",
        "GRANT INSERT ON outbox TO {role}",
    ):
        site.connection.execute(
            sql.SQL(statement).format(role=sql.Identifier(role), schema=sql.Identifier(site.schema))
        )
    site.migration().apply()
    with site.connect() as writer:
        writer.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
        stash(writer, "k", "1")
        writer.commit()
        with pytest.raises(errors.InsufficientPrivilege):
            writer.execute("INSERT INTO events (topic) VALUES ('orders')")
    assert [value for _, _, value, _ in site.moved()] == [b"1"]


def test_what_cannot_be_moved_is_said(site: Site) -> None:
    """Each error names the table and what to do."""
    for table, said in (("missing", "does not exist"), ("outboxevent", "it has no column create_time, kafka_topic")):
        with pytest.raises(ConfigurationError, match=said):
            site.migration(table=table).plan()
    with pytest.raises(ConfigurationError, match="another --name"):
        site.migration(table="events")
    site.connection.execute("CREATE TABLE outbox_migrated ()")
    with pytest.raises(ConfigurationError, match="cannot be renamed to 'outbox_migrated'"):
        site.migration().plan()


def test_keys_stay_in_their_partitions(site: Site, connection: KafkaConnection, topic: MakeTopic) -> None:
    """With goharvest's partitioner the records of a key are in one partition, in order, across the move."""
    output, keys = topic(8), [f"key {number}" for number in range(20)]
    outbox = OutboxSite(site.dsn, connection, "events", site.schema)
    goharvest = Producer({"bootstrap.servers": connection.bootstrap_servers})  # librdkafka's own partitioner
    for number in range(2):
        for key in keys:
            goharvest.produce(output, str(number), key=key, headers=[(ID_HEADER, b"-0")])
    assert goharvest.flush(WITHIN_S) == 0
    for number, moves in ((2, site.migration().apply), (3, None)):
        for key in keys:
            site.connection.execute(STASH, (output, key, str(number), [], []))
        if moves is not None:
            assert moves().rows == len(keys)
    assert outbox.harvester(partitioner=GoharvestTable().partitioner).drain() == 2 * len(keys)
    found: dict[bytes | None, list[tuple[int, bytes | None]]] = defaultdict(list)
    for record in outbox.read(output):
        found[record.key].append((record.partition, record.value))
    for key in keys:
        (partition, _), *_ = found[key.encode()]
        assert found[key.encode()] == [(partition, str(number).encode()) for number in range(4)]


# Debezium


def test_debezium_events_have_the_routers_topic_key_and_header(site: Site) -> None:
    """The rows of the table stay, because the connector reads them from the database's log."""
    first, second = uuid.uuid4(), uuid.uuid4()
    site.connection.execute(EVENT, (first, "17", json.dumps({"order": 17})))
    plan = site.migration(DebeziumTable(headers=[("type", "eventType")]), "outboxevent").apply()
    assert (plan.rows, plan.position is not None) == (0, True)
    site.connection.execute(EVENT, (second, "18", json.dumps({"order": 18})))
    site.connection.execute("INSERT INTO outboxevent (aggregatetype, aggregateid, type) VALUES ('order', '19', 't')")
    written, default = site.moved()
    headers = [("id", str(second).encode()), ("eventType", b"OrderPaid")]
    assert written == ("outbox.event.order", b"18", b'{"order": 18}', headers)
    assert default[:3] == ("outbox.event.order", b"19", None)
    assert uuid.UUID((dict(default[3])["id"] or b"").decode()).version == 4
    assert site.connection.execute("SELECT id FROM outboxevent_migrated").fetchall() == [(first,)]


def test_debezium_writers_may_delete_what_they_have_inserted(site: Site) -> None:
    """Object mappers check that a DELETE finds its row. The event is published all the same."""
    site.migration(DebeziumTable(), "outboxevent").apply()
    ids = [uuid.uuid4() for _ in range(3)]
    with site.connect() as writer:
        for event in ids:
            writer.execute(EVENT, (event, "17", "{}"))
        counts = [writer.execute("DELETE FROM outboxevent WHERE id = %s", (event,)).rowcount for event in ids]
        assert counts == [1, 1, 1]
        writer.commit()
        assert writer.execute("DELETE FROM outboxevent WHERE id = %s", (ids[0],)).rowcount == 0
        writer.commit()
        writer.execute(EVENT, (uuid.uuid4(), "17", "{}"))
        writer.rollback()
    assert len(site.moved()) == len(ids)


def test_debezium_columns_and_converters_are_options(site: Site) -> None:
    """Columns of other names, bytes, a JSON key, a template, and rows that no connector has read."""
    site.connection.execute(
        "CREATE TABLE messages (number bigint PRIMARY KEY, kind text, aggregate int, body bytea, destination text)"
    )
    insert: LiteralString = "INSERT INTO messages VALUES (%s, %s, %s, %s, %s)"
    rows = [(2, "t", 7, b"\x00\xff", "b"), (1, "t", 7, None, "a")]
    for row in rows:
        site.connection.execute(insert, row)
    old = DebeziumTable(
        event_id="number",
        routed_by="destination",
        event_key="aggregate",
        payload="body",
        topic_template="shop.${routedByValue}.v1",
        key_converter=KeyConverter.JSON,
        order_by="number",
    )
    assert site.migration(old, "messages").apply().rows == 2
    site.connection.execute(insert, (3, "t", 8, b"x", "a"))
    assert site.moved() == [
        ("shop.a.v1", b"7", None, [("id", b"1")]),
        ("shop.b.v1", b"7", b"\x00\xff", [("id", b"2")]),
        ("shop.a.v1", b"8", b"x", [("id", b"3")]),
    ]


RENDERED: Final = ("TimeZone=Asia/Tokyo", "DateStyle=German", "IntervalStyle=iso_8601", "extra_float_digits=-5")
"""Settings of a writer's session with which PostgreSQL renders values as other texts."""


def test_the_text_of_a_value_is_the_same_for_each_writer(site: Site) -> None:
    """Rows that are moved, and rows of writers with settings of their own, have the same keys and headers."""
    names = ("at", "day", "took", "weight", "price")
    site.connection.execute(
        "ALTER TABLE outboxevent ADD number bigserial, ADD at timestamptz, ADD day date, ADD took interval, "
        "ADD weight double precision, ADD price real"
    )
    insert: LiteralString = (
        "INSERT INTO outboxevent (aggregatetype, aggregateid, type, payload, at, day, took, weight, price) VALUES "
        "('order', '7', 'OrderPaid', '{}', '2026-01-31 10:11:12.5+00', '2026-01-31', '1 day 02:03:04', 0.1, 0.1)"
    )
    site.connection.execute(insert)
    old = DebeziumTable(order_by="number", event_key="weight", headers=[(name, name) for name in names])
    site.migration(old, "outboxevent").apply()
    options = "".join(f" -c {setting}" for setting in RENDERED)
    with psycopg.connect(site.dsn, options=f"-c search_path={site.schema}{options}") as connection:
        connection.execute(insert)
    expected = {
        "at": b"2026-01-31 10:11:12.5+00",
        "day": b"2026-01-31",
        "took": b"1 day 02:03:04",
        "weight": b"0.1",
        "price": b"0.1",
    }
    for _, key, _, headers in site.moved():
        assert key == b"0.1"
        assert {name: content for name, content in headers if name != "id"} == expected
    assert len(site.moved()) == 2


# The command


def ask(site: Site, capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Run `outbox migrate` in this process."""
    options = ("--dsn", site.dsn, "--schema", site.schema, "--name", "events")
    return call(capsys, "outbox", "migrate", *options, *arguments)


def test_the_command_shows_its_sql_before_it_changes_anything(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SQL of the dry run does the same when it is run by hand, and the way back too."""
    stash(site.connection, "k", "1")
    table = ("--from", "goharvest", "--table", "outbox")
    dry = ask(site, capsys, *table, "--dry-run", "--json")
    assert (dry.code, dry.json["rows"], dry.json["partitioner"]) == (0, 1, "consistent_random")
    shown = ask(site, capsys, *table, "--dry-run")
    assert all(f"{statement};" in shown.out for statement in dry.json["statements"])
    assert "A dry run: nothing was written." in shown.out
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert (ask(site, capsys, *table).code, site.moved()) == (1, [])

    with site.connection.transaction():
        for statement in dry.json["statements"]:
            site.connection.execute(statement.encode())
    stash(site.connection, "k", "2")
    assert [value for _, _, value, _ in site.moved()] == [b"1", b"2"]
    assert "was moved before" in ask(site, capsys, *table, "--yes").out

    back = ask(site, capsys, *table, "--undo", "--yes")
    command = f"outbox drain --schema {site.schema} --name events --partitioner consistent_random"
    assert (back.code, command in back.out) == (0, True)
    done = ask(site, capsys, *table, "--yes")
    command = f"outbox harvest --schema {site.schema} --name events --partitioner consistent_random"
    assert (done.code, command in done.out) == (0, True)
    tables = OutboxTables(Database(site.dsn), "events", site.schema)
    with pytest.raises(ConfigurationError, match="--partitioner consistent_random"):
        Harvester(tables, KafkaConnection(bootstrap_servers="127.0.0.1:1")).drain()


def test_the_command_moves_debezium_by_its_options(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The output has the position in the database's log and the next command."""
    options = ("--columns", "aggregateid=type", "--header", "type", "--topic-template", "shop")
    done = ask(site, capsys, "--from", "debezium", "--table", f"{site.schema}.outboxevent", *options, "--yes")
    command = f"harvest --schema {site.schema} --name events`"
    assert (done.code, "in the database's log" in done.out, command in done.out) == (0, True, True)
    event = uuid.uuid4()
    site.connection.execute(EVENT, (event, "17", "{}"))
    assert site.moved() == [("shop", b"OrderPaid", b"{}", [("id", str(event).encode()), ("type", b"OrderPaid")])]


def test_a_problem_is_exit_code_1(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The command does not ask then."""
    site.connection.execute(STASH, ("not a topic", "k", "v", [], []))
    refused = ask(site, capsys, "--from", "goharvest", "--table", "outbox")
    assert (refused.code, "a check found a problem" in refused.out, site.moved()) == (1, True, [])
