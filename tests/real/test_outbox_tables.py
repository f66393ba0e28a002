"""Outbox tables with triggers that skip statements, on a real PostgreSQL."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import LiteralString, NamedTuple
from urllib.parse import quote

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from sqlalchemy.orm import Session as OrmSession

from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.outbox import schema as schema_module
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.interfaces import BatchTransaction, OrderingKey, Parked, PublishedBatch, Row, RowRange
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.outbox.store import PostgresStore
from marshal_dagster.outbox.writer import Outbox, OutboxRecord
from tests.sink_outputs import own_schema


class Site(NamedTuple):
    """An outbox with three rows, which a session has taken."""

    connection: psycopg.Connection
    tables: OutboxTables
    store: PostgresStore
    session: int
    rows: list[Row]

    def add_trigger(self, before: LiteralString, when: LiteralString = "true") -> None:
        """Add a trigger that skips rows. `before` has the statement and the table."""
        self.connection.execute(
            "CREATE OR REPLACE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"
        )
        self.connection.execute(
            sql.SQL("CREATE TRIGGER skips BEFORE {} FOR EACH ROW WHEN ({}) EXECUTE FUNCTION skip()").format(
                sql.SQL(before), sql.SQL(when)
            )
        )

    def values(self, table: str) -> list[bytes]:
        """Return the values in a table."""
        found = self.connection.execute(sql.SQL("SELECT value FROM {} ORDER BY id").format(sql.Identifier(table)))
        return [value for (value,) in found]

    def set_aside(self) -> int:
        """Set all rows aside."""
        parked = [Parked(RowRange.of(row), "too large") for row in self.rows]
        return self.store.turn(self.session, BatchTransaction(parked=parked)).parked


@pytest.fixture
def site(postgres: str) -> Iterator[Site]:
    """An outbox in its own schema."""
    schema = own_schema()
    with psycopg.connect(postgres, autocommit=True, options=f"-c search_path={schema}") as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        tables = OutboxTables(Database(postgres), "outbox", schema)
        tables.create(notifies=False)
        with connection.transaction():
            Outbox("outbox", schema=schema).stash(connection, [OutboxRecord("orders", str(n)) for n in range(3)])
        with closing(PostgresStore(tables)) as store:
            session = store.begin()
            yield Site(
                connection, tables, store, session, store.turn(session, BatchTransaction(limit=10, limit_bytes=99)).rows
            )


def test_tables_that_are_there_are_made_again_beside_open_writers(
    site: Site, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each deployment may create the tables. A transaction that stays open must stop neither that nor other writers."""
    monkeypatch.setattr(schema_module, "_LOCK_TIMEOUT", "300ms")
    outbox = Outbox("outbox", schema=site.tables.schema)
    with psycopg.connect(postgres) as idle:
        outbox.stash(idle, [OutboxRecord("orders", "open")])
        site.tables.create(notifies=False)
        with pytest.raises(UnavailableError, match=r"'outbox': an open transaction has locked .* \(pg_stat_activity"):
            site.tables.create(notifies=True)
        site.connection.execute("SET lock_timeout = '5s'")
        outbox.stash(site.connection, [OutboxRecord("orders", "beside")])
        idle.rollback()
    for notifies in (True, False, True):
        site.tables.create(notifies=notifies)
        state = site.connection.execute(
            "SELECT tgenabled FROM pg_trigger WHERE tgrelid = 'outbox'::regclass"
        ).fetchone()
        assert state == ("O" if notifies else "D",)


def test_ids_that_are_cached_by_sessions_are_refused(site: Site) -> None:
    """A row that is written later could have a smaller id, although its transaction has waited for the other one."""
    site.connection.execute("ALTER TABLE outbox ALTER COLUMN id SET CACHE 10")
    with closing(PostgresStore(site.tables)) as store:
        events = OutgoingEvents("orders", schema=site.tables.schema)
        for use in (site.tables.create, store.begin, lambda: events.check(site.connection, [])):
            with pytest.raises(ConfigurationError, match=r"ALTER TABLE .*\"outbox\" ALTER COLUMN id SET CACHE 1"):
                use()
        site.connection.execute("ALTER TABLE outbox ALTER COLUMN id SET CACHE 1")
        store.begin()


def test_tables_of_version_0_1_get_the_check_that_they_lack(postgres: str) -> None:
    """A SQL_ASCII database accepts any bytes as text. Rows that the table has stay, and new ones are checked."""
    name = own_schema()
    with psycopg.connect(postgres, autocommit=True) as server:
        statement = sql.SQL("CREATE DATABASE {} ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        server.execute(statement.format(sql.Identifier(name)))
    database = psycopg.conninfo.make_conninfo(postgres, dbname=name)
    tables = OutboxTables(Database(database))
    tables.create()
    wrong = (
        "INSERT INTO outbox (topic, header_keys, header_values) "
        "VALUES ('orders', ARRAY[convert_from('\\xff41'::bytea, 'SQL_ASCII')], ARRAY[''::bytea])"
    )
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_header_keys_check1")
        connection.execute(wrong)
        for _ in range(2):
            tables.create()
            with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
                connection.execute(wrong)
        assert connection.execute("SELECT count(*) FROM outbox").fetchone() == (1,)


def test_a_trigger_that_drops_new_rows_is_an_error(site: Site, postgres: str) -> None:
    """Otherwise the caller would commit its change without the record. In a pipeline the number is not known yet."""
    outbox, records = (
        Outbox("outbox", schema=site.tables.schema),
        [OutboxRecord("orders", str(n)) for n in range(2_001)],
    )
    engine = sqlalchemy.create_engine(postgres.replace("postgresql://", "postgresql+psycopg://"))
    assert outbox.stash(site.connection, records) == 2_001
    with OrmSession(engine) as session:
        assert outbox.stash_sqlalchemy(session, records) == 2_001
    with site.connection.pipeline():
        assert outbox.stash(site.connection, records) == 2_001

    async def stash() -> int:
        async with await psycopg.AsyncConnection.connect(postgres) as connection:
            return await outbox.stash_async(connection, records)

    assert asyncio.run(stash()) == 2_001
    site.add_trigger("INSERT ON outbox", "new.value = '1500'")
    said = "outbox 'outbox': 1 of 1000 records were not written, because a trigger"
    with pytest.raises(ConfigurationError, match=said):
        outbox.stash(site.connection, records)
    with pytest.raises(ConfigurationError, match=said), OrmSession(engine) as session:
        outbox.stash_sqlalchemy(session, records)
    with pytest.raises(ConfigurationError, match=said):
        asyncio.run(stash())
    engine.dispose()


@pytest.mark.parametrize("option", ["array_nulls=off", "standard_conforming_strings=off", "bytea_output=escape"])
def test_settings_of_a_session_change_no_record(site: Site, postgres: str, option: str) -> None:
    """The caller's session reads and writes arrays and bytes in its own way."""
    site.connection.execute("TRUNCATE outbox")
    headers = [("a\\b'\"NULL", None), ("NULL", b"NULL"), ("x", bytes(range(256))), ("y", b"")]
    records = [
        OutboxRecord("orders", bytes(range(256)), "k\\", headers),
        OutboxRecord("orders", None, None, [("z", None)]),
    ]
    outbox, session_options = Outbox("outbox", schema=site.tables.schema), f"-c {option}"
    for cursors in (psycopg.Cursor, psycopg.ClientCursor):
        with psycopg.connect(postgres, options=session_options, cursor_factory=cursors) as connection:
            outbox.stash(connection, records)
    engine = sqlalchemy.create_engine(
        postgres.replace("postgresql://", "postgresql+psycopg://"), connect_args={"options": session_options}
    )
    with OrmSession(engine) as session:
        outbox.stash_sqlalchemy(session, records)
        session.commit()
    engine.dispose()
    rows = site.store.turn(site.session, BatchTransaction(limit=10, limit_bytes=100_000)).rows
    assert [(row.value, row.key, row.headers) for row in rows] == [
        (bytes(range(256)), b"k\\", headers),
        (None, None, [("z", None)]),
    ] * 3


def test_only_the_rows_of_a_batch_are_struck(site: Site) -> None:
    """A row between two ranges of a batch stays, and so does a row with such an id that was written at another time."""
    first, _, third = site.rows
    done = PublishedBatch([RowRange.of(first), RowRange.of(third._replace(created_us=third.created_us + 1))])
    assert site.store.turn(site.session, BatchTransaction(done)).struck == 1
    assert site.values("outbox") == [b"1", b"2"]
    assert site.store.turn(site.session, BatchTransaction(PublishedBatch.of(site.rows))).struck == 2
    assert site.values("outbox") == []


def test_headers_count_in_full_towards_the_limit_of_bytes(site: Site) -> None:
    """PostgreSQL compresses the headers of a row, but a harvester that takes the row has them in full."""
    headers = {"x" * 50_000: b"x" * 50_000}
    records = [OutboxRecord("orders", str(n), headers=headers) for n in range(3, 9)]
    Outbox("outbox", schema=site.tables.schema).stash(site.connection, records)
    rows = site.store.turn(site.session, BatchTransaction(limit=10, limit_bytes=250_000)).rows
    assert [row.value for row in rows] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(
    "option", ["array_nulls=off", "standard_conforming_strings=off", "default_transaction_isolation=serializable"]
)
def test_settings_of_a_role_change_no_harvest(site: Site, postgres: str, option: str) -> None:
    """A key that waits is recognized, and no transaction of the outbox's users makes a turn fail."""
    key = bytes(range(256))
    outbox = Outbox("outbox", schema=site.tables.schema)
    outbox.stash(site.connection, [OutboxRecord("orders", "held", key)])
    separator = "&" if "?" in postgres else "?"
    dsn = f"{postgres}{separator}options={quote(f'-c {option}')}"
    with closing(PostgresStore(OutboxTables(Database(dsn), "outbox", site.tables.schema))) as store:
        held = [OrderingKey("orders", key, None)]
        session = store.begin()
        rows = store.turn(session, BatchTransaction(limit=10, limit_bytes=10_000, held_lanes=held)).rows
        assert [row.value for row in rows] == [b"0", b"1", b"2"]
        connection = store._connection
        assert connection is not None
        assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


@pytest.mark.parametrize("name", ["a:b", "50%", 'the "x"', "%(topic)s"])
def test_an_outbox_may_have_any_name(postgres: str, name: str) -> None:
    """The name is quoted in the statements of all drivers."""
    tables = OutboxTables(Database(postgres), name, own_schema())
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(tables.schema)))
        tables.create(notifies=False)
        outbox = Outbox(name, schema=tables.schema)
        assert outbox.stash(connection, [OutboxRecord("orders", "1")]) == 1
    engine = sqlalchemy.create_engine(postgres.replace("postgresql://", "postgresql+psycopg://"))
    with OrmSession(engine) as session:
        assert outbox.stash_sqlalchemy(session, [OutboxRecord("orders", "2", headers={"h": None})]) == 1
        session.commit()
    engine.dispose()
    with closing(OutboxInspector(tables)) as inspector:
        assert inspector.status().rows == 2


def test_rows_that_cannot_be_set_aside_are_reported(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Other rows with their ids are set aside, so they wait in the outbox. The log shows that once."""
    assert site.set_aside() == 3
    site.connection.execute("TRUNCATE outbox RESTART IDENTITY")
    Outbox("outbox", schema=site.tables.schema).stash(
        site.connection, [OutboxRecord("orders", f"new {n}") for n in "123"]
    )
    rows = site.store.turn(site.session, BatchTransaction(limit=10, limit_bytes=99)).rows
    again = BatchTransaction(parked=[Parked(RowRange.of(row), "too large") for row in rows])
    assert [site.store.turn(site.session, again).parked for _ in range(2)] == [0, 0]
    assert caplog.text.count("rows 1, 2, 3 can neither be published nor set aside") == 1
    with closing(OutboxInspector(site.tables)) as inspector:
        assert inspector.drop([1, 2, 3]) == [1, 2, 3]
    assert site.store.turn(site.session, again).parked == 3
    assert (site.values("outbox"), site.values("outbox_parked")) == ([], [b"new 1", b"new 2", b"new 3"])


def test_a_trigger_that_keeps_published_rows_is_an_error(site: Site) -> None:
    """Otherwise the rows would be published again. A row that another session deleted is no error."""
    site.connection.execute("DELETE FROM outbox WHERE value = '0'")
    assert site.store.turn(site.session, BatchTransaction(PublishedBatch.of(site.rows[:2]))).struck == 1

    site.add_trigger("DELETE ON outbox")
    with pytest.raises(
        ConfigurationError, match=r"1 published rows could not be deleted .* remove the trigger or rule$"
    ):
        site.store.turn(site.session, BatchTransaction(PublishedBatch.of(site.rows[2:])))


def test_a_trigger_that_drops_rows_set_aside_is_an_error(site: Site) -> None:
    """Otherwise the rows would be lost from both tables. Rows that are already set aside or deleted are no error."""
    site.connection.execute("INSERT INTO outbox_parked SELECT *, 'before' FROM outbox WHERE value = '0'")
    site.connection.execute("DELETE FROM outbox WHERE value = '1'")
    site.add_trigger("INSERT ON outbox_parked")

    with pytest.raises(
        ConfigurationError,
        match=r"1 rows to set aside would be lost.* skips the insert\. .* remove the trigger or rule$",
    ):
        site.set_aside()
    assert (site.values("outbox"), site.values("outbox_parked")) == ([b"0", b"2"], [b"0"])

    site.connection.execute("DROP TRIGGER skips ON outbox_parked")
    assert site.set_aside() == 1
    assert (site.values("outbox"), site.values("outbox_parked")) == ([], [b"0", b"2"])


def test_a_row_that_also_waits_is_not_put_back(site: Site) -> None:
    """The error names the rows, so that an operator can delete these and retry the others."""
    turn = BatchTransaction(parked=[Parked(RowRange.of(row), "no topic") for row in site.rows])
    site.store.turn(site.session, turn)
    site.connection.execute("INSERT INTO outbox (id, topic) VALUES (%s, 'orders')", (site.rows[1].id,))
    with closing(OutboxInspector(site.tables)) as inspector:
        for ids in (None, [row.id for row in site.rows]):
            with pytest.raises(MarshalError, match=rf"the ids {site.rows[1].id} wait in the outbox already"):
                inspector.retry(ids)
        assert inspector.retry([site.rows[0].id]) == [site.rows[0].id]


def test_a_trigger_that_drops_rows_put_back_is_an_error(site: Site) -> None:
    """Otherwise the rows would be lost from both tables."""
    assert site.set_aside() == 3
    site.add_trigger("INSERT ON outbox", "NEW.value = '1'")

    with closing(OutboxInspector(site.tables)) as inspector:
        with pytest.raises(ConfigurationError, match=r"1 of the 3 rows to retry .* remove the trigger or rule$"):
            inspector.retry(None)
        assert (site.values("outbox"), site.values("outbox_parked")) == ([], [b"0", b"1", b"2"])

        site.connection.execute("DROP TRIGGER skips ON outbox")
        assert inspector.retry([site.rows[1].id]) == [site.rows[1].id]
    assert (site.values("outbox"), site.values("outbox_parked")) == ([b"1"], [b"0", b"2"])
