"""The outbox on a real PostgreSQL and a real Kafka: its tables, rows written into it, and rows published from it."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest
import sqlalchemy
from confluent_kafka import Producer
from psycopg import sql
from sqlalchemy.orm import Session as OrmSession

from marshal_dagster._internal.postgres import Database
from marshal_dagster.election import elector
from marshal_dagster.errors import ConfigurationError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox import schema as outbox_tables
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvester import Harvester
from marshal_dagster.outbox.interfaces import (
    ID_HEADER,
    BatchTransaction,
    BatchUnsettledError,
    Parked,
    PublishedBatch,
    PublisherFencedError,
    RowRange,
    SessionSupersededError,
    TransactionResult,
)
from marshal_dagster.outbox.schema import DEFAULT_MAX_BYTES, OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.outbox.store import PostgresStore
from marshal_dagster.outbox.writer import Outbox, OutboxRecord
from tests.conditions import WITHIN_S, wait_until
from tests.outbox_faults.worker import Orders
from tests.outbox_fixtures import LONG_MS, Site, values
from tests.outbox_process import STEPS
from tests.real.conftest import MakeTopic

MEGABYTE = 1_000_000


@pytest.fixture
def site(postgres: str, connection: KafkaConnection) -> Site:
    """An outbox for this test."""
    return Site(postgres, connection)


@pytest.fixture
def named(postgres: str) -> OutboxTables:
    """Tables that do not exist yet."""
    return OutboxTables(Database(postgres), f"outbox_{time.monotonic_ns()}")


@contextmanager
def running(site: Site) -> Iterator[Harvester]:
    """Run a harvester that leads and harvests."""
    harvester = site.harvester()
    thread = threading.Thread(target=harvester.run)
    thread.start()
    try:
        wait_until(
            lambda: harvester.term is not None and harvester.counts.sessions > 0,
            "the harvester leads and has begun a session",
        )
        yield harvester
    finally:
        harvester.stop()
        thread.join(WITHIN_S)
        assert not thread.is_alive()


# Tables


def test_tables_are_made_once(site: Site) -> None:
    """Creating the tables again keeps the outbox and its rows."""
    site.stash(OutboxRecord("somewhere", "value"))
    again = site.tables.create()
    assert (again.uid, again.version) == (site.uid, outbox_tables.VERSION)
    assert [row.value for row in site.rows()] == [b"value"]


def test_two_that_make_the_tables_at_once_do_not_hinder_each_other(named: OutboxTables) -> None:
    """All simultaneous calls succeed and find the same outbox."""
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(named.create().uid)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert len(found) == 4
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("step", "said"),
    [(1, "update marshal-dagster"), (-1, "`marshal-dagster outbox init` upgrades it")],
    ids=["newer", "older"],
)
def test_another_version_is_reported(site: Site, step: int, said: str) -> None:
    """Tables that are newer than this code, or not upgraded yet, are not harvested."""
    with psycopg.connect(site.dsn) as connection:
        statement = site.tables.named("UPDATE {registry} SET version = version + %s WHERE name = %s")
        connection.execute(statement, (step, site.name))
    with site.session() as session, pytest.raises(ConfigurationError, match=said):
        session.harvest.begin()
    if step > 0:
        with pytest.raises(ConfigurationError, match=said):
            site.tables.create()


def migrate(monkeypatch: pytest.MonkeyPatch, *steps: tuple[LiteralString, ...]) -> None:
    """Add later versions to the schema."""
    migrations = (*outbox_tables.MIGRATIONS, *steps)
    monkeypatch.setattr(outbox_tables, "MIGRATIONS", migrations)
    monkeypatch.setattr(outbox_tables, "VERSION", len(migrations))


def test_tables_are_brought_to_a_later_version(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each missing migration runs once, and rows are kept."""
    site.stash(OutboxRecord("somewhere", "value"))
    more: LiteralString = "ALTER TABLE {rows} ADD COLUMN more integer"
    migrate(monkeypatch, (more,), ("ALTER TABLE {rows} RENAME COLUMN more TO yet_more",))
    assert site.tables.create().version == outbox_tables.VERSION
    assert site.tables.create().uid == site.uid
    with psycopg.connect(site.dsn) as connection:
        found = connection.execute(site.tables.named("SELECT value, yet_more FROM {rows}"), ()).fetchall()
    assert found == [(b"value", None)]


def test_a_version_is_reached_as_a_whole_or_not_at_all(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a migration fails, the ones before it are rolled back too."""
    with monkeypatch.context() as patch:
        migrate(patch, ("ALTER TABLE {rows} ADD COLUMN more integer",), ("ALTER TABLE {rows} DROP COLUMN nothing",))
        with pytest.raises(ConfigurationError, match='column "nothing"'):
            site.tables.create()
    with psycopg.connect(site.dsn) as connection:
        assert site.tables.registration(connection).version == outbox_tables.VERSION
        with pytest.raises(psycopg.errors.UndefinedColumn):
            connection.execute(site.tables.named("SELECT more FROM {rows}"), ())


def test_outboxes_of_one_database_are_apart(postgres: str, connection: KafkaConnection, topic: MakeTopic) -> None:
    """Each harvester publishes only the rows of its own outbox. Another schema may have an outbox of the same name."""
    with psycopg.connect(postgres) as made:
        made.execute("CREATE SCHEMA IF NOT EXISTS elsewhere")
    sites = [Site(postgres, connection, "Ours 100%"), Site(postgres, connection, "theirs")]
    sites.append(Site(postgres, connection, "theirs", schema="elsewhere"))
    goal = topic()
    for number, site in enumerate(sites):
        site.stash(OutboxRecord(goal, str(number)))
    assert len({site.uid for site in sites}) == 3
    assert sites[2].harvest().published == 1
    assert values(sites[2].read(goal)) == ["2"]
    assert [len(site.rows()) for site in sites] == [1, 1, 0]
    assert sites[0].harvest().published == 1
    assert [len(site.rows()) for site in sites] == [0, 1, 0]


def test_an_outbox_that_is_not_there_is_reported(named: OutboxTables) -> None:
    """The error names the command that creates the outbox."""
    with pytest.raises(ConfigurationError, match="`marshal-dagster outbox init` creates it"):
        PostgresStore(named).begin()


@pytest.mark.parametrize("notifies", [True, False])
def test_rows_wake_the_harvester_where_they_notify(site: Site, notifies: bool) -> None:
    """Without notifications, the harvester polls after some time."""
    site.tables.create(notifies=notifies)
    store = PostgresStore(site.tables)
    store.begin()
    began_s, longest_s = time.monotonic(), 10_000.0 if notifies else 1.0
    waiting = threading.Thread(target=store.wait, args=(longest_s,), daemon=True)
    waiting.start()
    site.stash(OutboxRecord("somewhere", "value"))
    waiting.join(WITHIN_S)
    assert not waiting.is_alive()
    assert notifies or time.monotonic() - began_s >= longest_s
    store.close()


def test_dead_rows_are_not_read_again_and_again(site: Site) -> None:
    """A table with deleted rows is read by its index, also after PostgreSQL knows that it is almost empty."""
    site.stash(*(OutboxRecord("somewhere", "x" * 200) for _ in range(20_000)))
    with psycopg.connect(site.dsn, autocommit=True) as connection:
        connection.execute(site.tables.named("ALTER TABLE {rows} SET (autovacuum_enabled = off)"))
        connection.execute(site.tables.named("DELETE FROM {rows}"))
        site.stash(*(OutboxRecord("somewhere", "value") for _ in range(100)))
        connection.execute(site.tables.named("ANALYZE {rows}"))
        store = PostgresStore(site.tables)
        session = store.begin()
        # A session reports its scans only once a second: those until now must not be counted as later ones.
        connection.execute("SELECT pg_stat_force_next_flush()")
        before = scans(connection, site)
        for _ in range(10):
            assert len(store.turn(session, BatchTransaction(limit=1_000, limit_bytes=MEGABYTE)).rows) == 100
        store.close()
        wait_until(
            lambda: sum(scans(connection, site)) >= sum(before) + 10,
            "PostgreSQL has counted the scans of ten queries",
        )
        assert scans(connection, site)[0] == before[0]


def scans(connection: "psycopg.Connection[tuple[int, int]]", site: Site) -> tuple[int, int]:
    """Return the number of sequential scans and index scans of an outbox's table."""
    found = connection.execute(
        "SELECT seq_scan, idx_scan FROM pg_stat_user_tables WHERE relname = %s", (site.name,)
    ).fetchone()
    assert found is not None
    return found


# Stash

Way = Callable[[Site, Sequence[OutboxRecord], bool], None]


def by_psycopg(site: Site, records: Sequence[OutboxRecord], commits: bool) -> None:
    """Write over a synchronous connection."""
    with psycopg.connect(site.dsn) as connection:
        assert site.outbox.stash(connection, iter(records)) == len(records)
        if not commits:
            connection.rollback()


def by_async_psycopg(site: Site, records: Sequence[OutboxRecord], commits: bool) -> None:
    """Write over an asynchronous connection."""

    async def write() -> None:
        async with await psycopg.AsyncConnection.connect(site.dsn) as connection:
            assert await site.outbox.stash_async(connection, records) == len(records)
            if not commits:
                await connection.rollback()

    asyncio.run(write())


def by_session(site: Site, records: Sequence[OutboxRecord], commits: bool) -> None:
    """Write over a session of SQLAlchemy."""
    engine = sqlalchemy.create_engine(site.dsn.replace("postgresql://", "postgresql+psycopg://"))
    with OrmSession(engine) as session:
        assert site.outbox.stash_sqlalchemy(session, records) == len(records)
        if commits:
            session.commit()
    engine.dispose()


def by_sqlalchemy(site: Site, records: Sequence[OutboxRecord], commits: bool) -> None:
    """Write over a connection of SQLAlchemy."""
    engine = sqlalchemy.create_engine(site.dsn.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        assert site.outbox.stash_sqlalchemy(connection, records) == len(records)
        if commits:
            connection.commit()
    engine.dispose()


def by_async_session(site: Site, records: Sequence[OutboxRecord], commits: bool) -> None:
    """Write over an asynchronous session of SQLAlchemy."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def write() -> None:
        engine = create_async_engine(site.dsn.replace("postgresql://", "postgresql+psycopg://"))
        async with AsyncSession(engine) as session:
            await session.run_sync(lambda session: site.outbox.stash_sqlalchemy(session, records))
            if commits:
                await session.commit()
        await engine.dispose()

    asyncio.run(write())


WAYS: list[Way] = [by_psycopg, by_async_psycopg, by_session, by_sqlalchemy, by_async_session]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_rows_are_what_was_given(site: Site, way: Way) -> None:
    """Text, bytes, null and empty values are stored unchanged and in order, over each kind of connection."""
    records = [
        OutboxRecord("topic.one", "täxt", "key"),
        OutboxRecord("topic_two", b"\x00\xff", b"\x00key", {"one": "ü", "none": None, "bytes": b"\x00"}),
        OutboxRecord("topic-3", None, "tombstone", [("same", "1"), ("same", None)]),
        OutboxRecord("t", b"", ""),
        OutboxRecord("t", "%s {braces} '; --", None),
    ]
    way(site, records, True)
    assert [tuple(row)[1:5] for row in site.rows()] == [
        ("topic.one", b"key", "täxt".encode(), None),
        ("topic_two", b"\x00key", b"\x00\xff", [("one", "ü".encode()), ("none", None), ("bytes", b"\x00")]),
        ("topic-3", b"tombstone", None, [("same", b"1"), ("same", None)]),
        ("t", b"", b"", None),
        ("t", None, b"%s {braces} '; --", None),
    ]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_rollback_leaves_nothing(site: Site, way: Way) -> None:
    """Rows belong to the caller's transaction, over each kind of connection, also if there are many."""
    way(site, [OutboxRecord("t", str(number)) for number in range(2_500)], False)
    assert site.rows() == []
    way(site, [OutboxRecord("t", str(number)) for number in range(2_500)], True)
    assert [row.value for row in site.rows()] == [str(number).encode() for number in range(2_500)]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (OutboxRecord("t", "x" * 90, "y" * 8, {"h": "z" * 2}), "has 101 bytes, more than max_bytes=100"),
        (OutboxRecord("no topic", "x"), "'no topic' is not a name that Kafka allows"),
        (OutboxRecord("", "x"), "is not a name that Kafka allows"),
        (OutboxRecord("..", "x"), "is not a name that Kafka allows"),
        (OutboxRecord("t" * 250, "x"), "is not a name that Kafka allows"),
        (OutboxRecord("t", "x", headers={ID_HEADER: "1"}), "is reserved for the harvester"),
        (OutboxRecord("t", 7), "value is of type int; it must be bytes, text or None"),  # type: ignore[arg-type]
    ],
    ids=["large", "space", "empty", "dots", "long", "header", "number"],
)
def test_what_cannot_be_published_is_not_written(site: Site, record: OutboxRecord, said: str) -> None:
    """The error names the record and the reason. None of the records is written."""
    outbox = Outbox(site.name, max_bytes=100)
    with psycopg.connect(site.dsn) as connection:
        with pytest.raises(ConfigurationError, match=said):
            outbox.stash(connection, [OutboxRecord("t", "good"), record])
        assert outbox.stash(connection, [OutboxRecord("t", "x" * 100)]) == 1
    assert [row.value for row in site.rows()] == [b"x" * 100]


@pytest.mark.parametrize(
    "wrong",
    [
        "header_keys = '{{a,b}}', header_values = '{{x,y}}'",
        "header_keys = '{NULL}', header_values = '{x}'",
        "header_keys = '{a}', header_values = NULL",
        "create_time = 'infinity'",
        "topic = 'no such/topic'",
    ],
)
def test_no_writer_can_write_what_no_harvester_can_read(site: Site, wrong: LiteralString) -> None:
    """The table rejects such a row from any writer, because it would block all other rows."""
    site.stash(OutboxRecord("t", "good"))
    with psycopg.connect(site.dsn) as connection, pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(site.tables.named("UPDATE {rows} SET {wrong}", wrong=sql.SQL(wrong)), ())


def test_no_header_name_is_other_than_utf8(postgres: str, connection: KafkaConnection, topic: MakeTopic) -> None:
    """A SQL_ASCII database accepts any bytes as text. One invalid name would make its whole batch unreadable."""
    name, goal = f"ascii_{time.monotonic_ns()}", topic()
    with psycopg.connect(postgres, autocommit=True) as made:
        statement = sql.SQL("CREATE DATABASE {} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        made.execute(statement.format(sql.Identifier(name)))
    site = Site(psycopg.conninfo.make_conninfo(postgres, dbname=name), connection)
    site.stash(OutboxRecord(goal, "good", headers={"größe": "1"}), OutboxRecord(goal, "none"))
    latin = site.tables.named(
        "UPDATE {rows} SET header_keys[1] = convert_from('\\xff41'::bytea, 'SQL_ASCII') WHERE header_keys IS NOT NULL"
    )
    with psycopg.connect(site.dsn) as writer, pytest.raises(psycopg.errors.CharacterNotInRepertoire):
        writer.execute(latin, ())
    assert site.harvest().published == 2
    assert [record.headers for record in site.read(goal)] == [[("größe", b"1")], []]


# Harvest


def test_rows_are_published_in_order(site: Site, topic: MakeTopic) -> None:
    """Keys keep their order and their partition. Values, headers and ids are unchanged, also those of tombstones."""
    goal = topic(3)
    records = [OutboxRecord(goal, f"{number}", f"k{number % 7}", {"n": str(number)}) for number in range(300)]
    site.stash(*records, OutboxRecord(goal, None, "k0", {"none": None}))
    ids = [row.id for row in site.rows()]
    assert site.harvest(max_in_flight_records=37).published == 301
    found = site.read(goal)
    assert sorted(each.row for each in found) == ids
    for number in range(7):
        lane = [each for each in found if each.key == f"k{number}".encode()]
        assert [each.row for each in lane] == ids[number:300:7] + ([ids[300]] if number == 0 else [])
        assert len({each.partition for each in lane}) == 1
    by_row = {each.row: each for each in found}
    assert [by_row[one].value for one in ids] == [f"{number}".encode() for number in range(300)] + [None]
    assert by_row[ids[8]].headers == [("n", b"8")]
    assert by_row[ids[300]].headers == [("none", None)]
    assert site.rows() == []


def test_no_more_than_the_limit_is_in_flight(site: Site, topic: MakeTopic) -> None:
    """A turn takes at most the limit of rows, and the next turns take the rest."""
    goal = topic()
    site.stash(*(OutboxRecord(goal, str(number)) for number in range(12)))
    with site.session(max_in_flight_records=5) as session:
        assert session.turns()[:3] == [5, 5, 2]
        assert session.counts.published == 12


def test_rows_that_are_rolled_back_are_not_published(site: Site, topic: MakeTopic) -> None:
    """Uncommitted rows are published only after their commit, and rolled-back ones never."""
    goal = topic()
    with psycopg.connect(site.dsn) as slow, psycopg.connect(site.dsn) as gone, site.session() as session:
        site.outbox.stash(slow, [OutboxRecord(goal, "late", "k1")])
        site.outbox.stash(gone, [OutboxRecord(goal, "never", "k2")])
        site.stash(OutboxRecord(goal, "early", "k3"))
        session.turns()
        assert values(site.read(goal)) == ["early"]
        gone.rollback()
        slow.commit()
        session.harvest.turn()
        session.harvest.finish()
    found = site.read(goal)
    assert values(found) == ["early", "late"]
    assert found[0].row > found[1].row
    assert site.rows() == []


def test_a_value_too_large_for_the_client_is_set_aside(site: Site, topic: MakeTopic) -> None:
    """Later rows of the same ordering key wait until it is set aside. All other rows are published."""
    goal = topic()
    site.stash(
        OutboxRecord(goal, "x" * (MEGABYTE + 100_000), "k1"),
        OutboxRecord(goal, "behind", "k1"),
        OutboxRecord(goal, "beside", "k2"),
    )
    with site.session(max_attempts=3) as session:
        session.harvest.begin()
        session.harvest.turn()
        assert values(site.read(goal)) == ["beside"]
        session.harvest.turn()
        session.harvest.turn()
        assert values(site.read(goal)) == ["beside"]
        for _ in range(3):
            session.now_ms += LONG_MS
            session.harvest.turn()
        session.harvest.finish()
        assert (session.counts.refused, session.counts.parked) == (3, 1)
    assert values(site.read(goal)) == ["beside", "behind"]
    (parked,) = site.parked()
    assert (parked.topic, parked.key, parked.size) == (goal, b"k1", MEGABYTE + 100_000)
    assert "too large" in parked.reason
    assert "tried 3 times" in parked.reason
    assert site.rows() == []


def test_the_largest_record_that_a_writer_accepts_is_published(site: Site, topic: MakeTopic) -> None:
    """The client's own limit is not below that of `Outbox` and that of brokers by default."""
    goal = topic()
    site.outbox = Outbox(site.name)
    site.stash(OutboxRecord(goal, "x" * (DEFAULT_MAX_BYTES - 4), "k", {"h": "12"}))
    site.harvest(max_attempts=1)
    assert [len(value) for value in values(site.read(goal))] == [DEFAULT_MAX_BYTES - 4]


def test_a_wrong_clock_sets_no_row_aside(site: Site, topic: MakeTopic) -> None:
    """The brokers then refuse the time of each record. The rows wait until the clock is right."""
    goal, strict = topic(), topic(1, {"message.timestamp.before.max.ms": "0"})
    site.stash(OutboxRecord(strict, "1", "k"), OutboxRecord(goal, "2", "k"))
    with site.session(max_attempts=1) as session:
        session.harvest.begin()
        with pytest.raises(BatchUnsettledError, match=f"topic '{strict}' refuses records with the present time"):
            session.harvest.turn()
    assert (len(site.rows()), site.parked(), site.read(goal)) == (2, [], [])


def test_a_batch_too_large_for_its_topic_is_published_in_parts(site: Site, topic: MakeTopic) -> None:
    """If no single row is too large, nothing is set aside, and the order is kept."""
    goal = topic(1, {"max.message.bytes": "5000"})
    site.stash(*(OutboxRecord(goal, f"{number:04}".ljust(1_000), f"k{number % 2}") for number in range(20)))
    counts = site.harvest(max_attempts=1)
    assert (counts.published, counts.parked, counts.refused) == (20, 0, 0)
    assert [int(value) for value in values(site.read(goal))] == list(range(20))


def test_a_row_too_large_for_its_topic_is_set_aside(site: Site, topic: MakeTopic) -> None:
    """Only the rows that are too large are set aside. The others of the batch are published."""
    goal = topic(1, {"max.message.bytes": "5000"})
    sizes = [100, 100, 6_000, 100, 100, 100, 7_000]
    site.stash(*(OutboxRecord(goal, f"{n}".ljust(size), "k") for n, size in enumerate(sizes)))
    site.harvest(max_attempts=2)
    assert [value.strip() for value in values(site.read(goal))] == ["0", "1", "3", "4", "5"]
    assert [parked.size for parked in site.parked()] == [6_000, 7_000]


def test_rows_of_a_missing_topic_are_set_aside_while_the_rest_flows(site: Site, topic: MakeTopic) -> None:
    """The rows first wait for the topic. If it is created later and they are put back, they are published."""
    goal, missing = topic(), f"missing-{site.name}"
    site.stash(OutboxRecord(missing, "first", "k"), OutboxRecord(goal, "flows"), OutboxRecord(missing, "second", "k"))
    with site.session(max_attempts=3) as session:
        session.harvest.begin()
        session.harvest.turn()
        assert values(site.read(goal)) == ["flows"]
        assert site.parked() == []
        for _ in range(3):
            session.now_ms += LONG_MS
            session.harvest.turn()
        session.harvest.finish()
        parked = site.parked()
        assert [each.topic for each in parked] == [missing, missing]
        assert missing in parked[0].reason
        assert "tried 3 times" in parked[0].reason
        with Topics(site.connection) as topics:
            topics.create(missing, 1, 1)
        backlog = OutboxInspector(site.tables)
        assert backlog.retry([parked[1].id, parked[1].id + 100]) == [parked[1].id]
        assert backlog.retry(None) == [parked[0].id]
        backlog.close()
        session.now_ms += LONG_MS
        session.harvest.turn()
        session.harvest.finish()
    assert values(site.read(missing)) == ["first", "second"]
    assert site.status().parked == 0


COPY_BACK = """
    INSERT INTO {rows} (id, create_time, topic, key, value, header_keys, header_values)
    SELECT id, create_time, topic, key, coalesce(%s, value), header_keys, header_values FROM {parked}
    """


def test_a_row_that_was_copied_back_is_set_aside_again(site: Site) -> None:
    """The copy was not deleted from the parked rows. It keeps its first reason, and the outbox continues."""
    site.stash(OutboxRecord(f"missing-{site.name}", "value", "k", {"none": None}))
    with site.session(max_attempts=1) as session:
        session.turns()
        (first,) = site.parked()
        with psycopg.connect(site.dsn) as connection:
            connection.execute(site.tables.named(COPY_BACK), (None,))
        session.turns()
        assert (session.counts.parked, site.rows(), site.parked()) == (1, [], [first])


def test_another_row_under_the_id_of_one_set_aside_waits(site: Site, topic: MakeTopic) -> None:
    """Neither row is lost: the new one is published once possible, and the one that is set aside stays there."""
    missing, goal = f"missing-{site.name}", topic()
    site.stash(OutboxRecord(missing, "before", "k"))
    with site.session(max_attempts=1) as session:
        session.turns()
        (first,) = site.parked()
        with psycopg.connect(site.dsn) as connection:
            connection.execute(site.tables.named(COPY_BACK), (b"mended",))
        site.stash(OutboxRecord(goal, "flows"), OutboxRecord(missing, "aside"))
        session.harvest.begin()
        for _ in range(4):
            session.harvest.turn()
            session.now_ms += LONG_MS
        assert values(site.read(goal)) == ["flows"]
        assert [row.value for row in site.rows()] == [b"mended"]
        assert (site.parked()[0], len(site.parked()), session.counts.parked) == (first, 2, 2)
        with Topics(site.connection) as topics:
            topics.create(missing, 1, 1)
        session.now_ms += LONG_MS
        session.harvest.turn()
        session.harvest.finish()
    assert values(site.read(missing)) == ["mended"]
    assert site.parked()[0] == first


def test_rows_set_aside_can_be_dropped(site: Site) -> None:
    """Exactly the given rows are deleted."""
    site.stash(*(OutboxRecord(f"missing-{site.name}", str(number)) for number in range(3)))
    site.harvest(max_attempts=1)
    ids = [parked.id for parked in site.parked()]
    backlog = OutboxInspector(site.tables)
    assert backlog.drop([ids[0], ids[2] + 1]) == [ids[0]]
    backlog.close()
    assert [parked.id for parked in site.parked()] == ids[1:]


def test_a_row_that_the_broker_refuses_is_set_aside(site: Site, topic: MakeTopic) -> None:
    """A compacted topic rejects records without a key. The other rows are published."""
    goal = topic(1, {"cleanup.policy": "compact"})
    site.stash(OutboxRecord(goal, "1", "k"), OutboxRecord(goal, "2"), OutboxRecord(goal, "3", "k"))
    site.harvest(max_attempts=2)
    assert values(site.read(goal)) == ["1", "3"]
    (parked,) = site.parked()
    assert parked.key is None
    assert "tried 2 times" in parked.reason


def test_large_values_respect_the_limit_of_bytes(site: Site, topic: MakeTopic) -> None:
    """The rows in flight stay below the limit in total. A row above the limit is in flight alone."""
    large = {"message.max.bytes": str(12 * MEGABYTE)}
    site.connection = replace(site.connection, client_settings=large)
    goal = topic(1, {"max.message.bytes": str(12 * MEGABYTE)})
    sizes = [3, 3, 3, 10, 1, 1, 1]
    site.stash(*(OutboxRecord(goal, bytes([n]) * (size * MEGABYTE - 100), "k") for n, size in enumerate(sizes)))
    with site.session(max_in_flight_bytes=7 * MEGABYTE) as session:
        assert session.turns()[:4] == [2, 1, 1, 3]
    found = site.read(goal)
    assert [(each.value or b"")[0] for each in found] == list(range(7))
    assert [len(each.value or b"") for each in found] == [size * MEGABYTE - 100 for size in sizes]


def test_the_status_reports_the_backlog(site: Site, topic: MakeTopic) -> None:
    """The status has the number of waiting rows, the oldest age, the parked rows, and the harvester."""
    empty = site.status()
    assert (empty.rows, empty.oldest_age_s, empty.parked, empty.led_since) == (0, None, 0, None)
    site.stash(OutboxRecord(f"missing-{site.name}", "1"))
    site.harvest(max_attempts=1)
    site.stash(OutboxRecord(topic(), "2"), OutboxRecord(topic(), "3"))
    status = site.status()
    assert (status.rows, status.parked, status.registration.session) == (2, 1, 1)
    assert 0 <= (status.oldest_age_s or -1) < WITHIN_S
    assert status.led_since is not None
    assert status.registration.leader


# Harvesters


def test_a_drain_ends(site: Site, topic: MakeTopic) -> None:
    """The drain ends when all rows are published or set aside, and returns the number of published rows."""
    goal = topic()
    records = [OutboxRecord(goal, str(number)) for number in range(50)]
    site.stash(*records, OutboxRecord(f"missing-{site.name}", "x"))
    assert site.harvester(limits=HarvestLimits(topic_patience_s=0)).drain() == 50
    assert site.harvester().drain() == 0
    assert len(values(site.read(goal))) == 50
    assert (site.status().rows, site.status().parked) == (0, 1)


def test_a_drain_ends_while_another_leads(site: Site, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain waits for the rows that the leader publishes."""
    monkeypatch.setattr(elector, "_SESSION_MS", 60_000)  # so that no member is replaced on a busy machine
    goal = topic()
    with running(site) as leader:
        site.stash(*(OutboxRecord(goal, str(number)) for number in range(500)))
        assert site.harvester().drain() == 0
        assert len(site.read(goal)) == 500
    assert site.status().registration.session == leader.counts.sessions


def test_a_harvester_that_cannot_reach_the_database_says_so(connection: KafkaConnection) -> None:
    """The error comes at the start of the harvester."""
    site = object.__new__(Site)
    site.tables, site.connection = OutboxTables(Database("postgresql://u:hush@127.0.0.1:1/x")), connection
    with pytest.raises(UnavailableError, match="PostgreSQL of outbox 'outbox'") as raised:
        site.harvester().run()
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("step", STEPS)
def test_a_harvester_is_killed_at_its_worst(site: Site, topic: MakeTopic, tmp_path: Path, step: str) -> None:
    """Whether or not the batch was committed, the next session publishes the remaining rows, and none twice."""
    goal = topic(2)
    site.stash(*(OutboxRecord(goal, str(number), f"k{number % 3}") for number in range(20)))
    orders = Orders(
        bootstrap_servers=site.connection.bootstrap_servers,
        dsn=site.dsn,
        name=site.name,
        journal=tmp_path / "journal",
        max_in_flight_records=8,
    )
    child = subprocess.run(
        [sys.executable, "-m", "tests.outbox_process", step, orders.model_dump_json()], timeout=WITHIN_S, check=False
    )
    assert child.returncode == -9
    left = len(site.rows())
    assert left == {"before_commit": 20, "before_strike": 20, "after_strike": 12}[step]
    counts = site.harvest()
    assert counts.published == left
    assert sorted(map(int, values(site.read(goal)))) == list(range(20))
    assert len(site.read(goal, committed=False)) == (28 if step == "before_commit" else 20)
    assert site.rows() == []


def test_ids_that_a_restored_database_gives_again_are_not_struck(site: Site, topic: MakeTopic) -> None:
    """The newest note has the ids and the time range of its rows. Later rows with these ids are published."""
    goal = topic()
    site.stash(*(OutboxRecord(goal, str(number), "k") for number in range(3)))
    with site.session() as before:
        before.harvest.begin()
        assert before.harvest.turn() == 3
        before.harvest.finish()
    with psycopg.connect(site.dsn) as connection:
        connection.execute(site.tables.named("ALTER TABLE {rows} ALTER COLUMN id RESTART WITH 1"))
    site.stash(OutboxRecord(goal, "late", "k"))
    with site.session() as after:
        after.harvest.begin()
        assert after.harvest.turn() == 1
        after.harvest.finish()
    assert [message.value for message in site.read(goal)] == [b"0", b"1", b"2", b"late"]


@pytest.mark.parametrize("is_same_session", [True, False])
def test_a_row_with_an_id_that_truncate_gave_again_is_published(
    site: Site, topic: MakeTopic, is_same_session: bool
) -> None:
    """Neither the session's memory of its last batch nor the note that another session reads deletes such a row."""
    goal = topic()
    site.stash(*(OutboxRecord(goal, str(number), "k") for number in range(5)))
    with site.session() as first, site.session() as second:
        first.harvest.begin()
        assert first.harvest.turn() == 5
        with psycopg.connect(site.dsn) as connection:
            connection.execute(site.tables.named("TRUNCATE {rows} RESTART IDENTITY"))
        site.stash(OutboxRecord(goal, "late", "k"))
        assert site.rows()[0].id == 1
        session = first if is_same_session else second
        if session is second:
            session.harvest.begin()
        assert session.harvest.turn() == 1
        session.harvest.finish()
    assert values(site.read(goal)) == ["0", "1", "2", "3", "4", "late"]
    assert site.rows() == []


def test_a_row_with_the_id_of_one_that_was_refused_is_not_set_aside(site: Site) -> None:
    """The row got the same id again and was never tried."""
    site.stash(OutboxRecord("t", "before"))
    with site.session() as session:
        number = session.store.begin()
        (taken,) = session.store.turn(number, BatchTransaction(limit=1, limit_bytes=MEGABYTE)).rows
        with psycopg.connect(site.dsn) as connection:
            connection.execute(site.tables.named("TRUNCATE {rows} RESTART IDENTITY"))
        site.stash(OutboxRecord("t", "late"))
        (late,) = session.store.turn(number, BatchTransaction(limit=1, limit_bytes=MEGABYTE)).rows
        assert (late.id, late.value) == (taken.id, b"late")
        refused = BatchTransaction(parked=[Parked(RowRange.of(taken), "too large")])
        assert session.store.turn(number, refused).parked == 0
        assert site.parked() == []
        refused = BatchTransaction(parked=[Parked(RowRange.of(late), "too large")])
        assert session.store.turn(number, refused).parked == 1
    assert (site.rows(), [each.id for each in site.parked()]) == ([], [late.id])


def test_a_row_of_any_time_is_published_and_struck(site: Site, topic: MakeTopic) -> None:
    """This holds from PostgreSQL's first year to its last one, whose microseconds do not fit into a bigint."""
    goal = topic()
    times = ["4713-01-01 00:00:00+00 BC", "0001-01-01+00", "1970-01-01+00", "9999-12-31+00", "294276-12-31+00"]
    with psycopg.connect(site.dsn) as connection:
        for number, at in enumerate(times):
            connection.execute(
                site.tables.named("INSERT INTO {rows} (create_time, topic, key, value) VALUES (%s, %s, 'k', %s)"),
                (at, goal, str(number).encode()),
            )
    assert site.harvest().published == len(times)
    assert values(site.read(goal)) == [str(number) for number in range(len(times))]
    assert site.rows() == []


@pytest.mark.parametrize("value", [None, b"{}", b"not json", b'{"version":1,"rows":[[0,1000000000000000]]}'])
@pytest.mark.parametrize("has_own_key", [True, False])
def test_a_foreign_record_among_the_notes_stops_no_harvester(
    site: Site, topic: MakeTopic, value: bytes | None, has_own_key: bool
) -> None:
    """The record is skipped, the note before it applies, and nothing is published twice."""
    goal = topic()
    site.stash(*(OutboxRecord(goal, str(number), "k") for number in range(3)))
    with site.session() as before:
        before.harvest.begin()
        assert before.harvest.turn() == 3
    producer = Producer({"bootstrap.servers": site.connection.bootstrap_servers})
    producer.produce(site.topics.notes, value, site.uid if has_own_key else "x", partition=0)
    assert producer.flush(WITHIN_S) == 0
    site.stash(OutboxRecord(goal, "late", "k"))
    assert site.harvest().published == 4
    assert values(site.read(goal)) == ["0", "1", "2", "late"]


def test_a_topic_of_notes_that_forgets_in_time_is_refused(site: Site) -> None:
    """Without the notes, published rows would be published again, and the leader could be forgotten."""
    with Topics(site.connection) as topics:
        topics.delete(site.topics.notes)
        topics.create(site.topics.notes, 1, 1, {"cleanup.policy": "compact,delete"})
    for begin in (site.harvester().run, site.harvester().drain):
        with pytest.raises(ConfigurationError, match=rf"{site.topics.notes}' has cleanup.policy compact,delete, so it"):
            begin()


def test_a_zombie_can_do_nothing(site: Site, topic: MakeTopic) -> None:
    """After a later session has started, an old one can neither delete nor take rows, nor publish rows that it took."""
    goal = topic()
    site.stash(OutboxRecord(goal, "1", "k"), OutboxRecord(goal, "2", "k"))
    with site.session() as old, site.session() as new:
        old.harvest.begin()
        taken = old.store.turn(1, BatchTransaction(limit=10, limit_bytes=MEGABYTE)).rows
        assert len(taken) == 2
        new.harvest.begin()
        for turn in (BatchTransaction(done=PublishedBatch.of(taken)), BatchTransaction(limit=10)):
            with pytest.raises(SessionSupersededError):
                old.store.turn(1, turn)
        with pytest.raises(PublisherFencedError):
            old.publisher.publish(taken, lambda: None)
        with pytest.raises(SessionSupersededError):
            old.harvest.turn()
        assert len(site.rows()) == 2
        assert new.harvest.turn() == 2
        new.harvest.finish()
    assert values(site.read(goal)) == ["1", "2"]
    assert site.rows() == []


def test_a_fenced_publisher_says_so_whatever_it_has_sent(site: Site, topic: MakeTopic) -> None:
    """This holds with many records in flight, whose results arrive in the same poll as the client's fatal error."""
    goal = topic(3)
    site.stash(*(OutboxRecord(goal, "x" * 10_000, str(number)) for number in range(2_000)))
    with site.session() as old, site.session() as new:
        old.harvest.begin()
        new.harvest.begin()
        with pytest.raises(PublisherFencedError):
            old.publisher.publish(site.rows(), lambda: None)
    assert site.read(goal) == []


def test_a_patient_connection_may_wait_longer_than_a_transaction_lasts(site: Site, topic: MakeTopic) -> None:
    """The timeouts of connection and transaction need not be coordinated."""
    goal = topic()
    site.connection = replace(site.connection, timeout_s=60.0)
    site.stash(OutboxRecord(goal, "value"))
    assert site.harvest().published == 1
    assert values(site.read(goal)) == ["value"]


def test_a_leader_that_is_frozen_in_a_turn_holds_nobody_up_for_long(site: Site, topic: MakeTopic) -> None:
    """The database ends the frozen leader's transaction, and that session cannot continue."""
    goal = topic()
    site.stash(OutboxRecord(goal, "value"))
    with site.session() as frozen, site.session() as next_one:
        frozen.harvest.begin()
        frozen.harvest.turn()
        connection = frozen.store._connection
        assert connection is not None
        connection.execute(site.tables.named("SELECT session FROM {registry} WHERE name = %s FOR SHARE"), (site.name,))
        next_one.harvest.begin()  # would wait forever, because the frozen leader does not end its transaction
        next_one.turns()
        with pytest.raises((UnavailableError, SessionSupersededError)):
            frozen.harvest.turn()
    assert values(site.read(goal)) == ["value"]
    assert site.rows() == []


def test_a_zombie_that_begins_anew_at_kafka_is_stopped_by_the_database(
    site: Site, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the rejection the old session publishes nothing, although its producer is the newest.

    The other one continues.
    """
    goal = topic()
    site.stash(OutboxRecord(goal, "x" * 2 * MEGABYTE, "k1"), OutboxRecord(goal, "good", "k2"))
    with site.session() as old, site.session(max_attempts=1) as new:
        old.harvest.begin()
        turn = old.store.turn

        def overtaken(session: int, given: BatchTransaction) -> TransactionResult:
            turned = turn(session, given)
            if given.limit:
                new.harvest.begin()
            return turned

        monkeypatch.setattr(old.store, "turn", overtaken)
        with pytest.raises(SessionSupersededError):
            old.harvest.turn()
        assert site.read(goal) == []
        with pytest.raises(PublisherFencedError):
            new.publisher.publish(site.rows()[1:], lambda: None)
        new.turns()
    assert values(site.read(goal)) == ["good"]
    assert len(site.parked()) == 1
