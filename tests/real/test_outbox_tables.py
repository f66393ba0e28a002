"""What an outbox's harvester does when its table does not do what is asked, on a real PostgreSQL."""

import psycopg
import pytest
from psycopg import sql

from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.interfaces import BatchTransaction, PublishedBatch
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.store import PostgresStore
from marshal_dagster.outbox.writer import Outbox, OutboxRecord
from tests.sink_outputs import own_schema


def test_a_trigger_that_keeps_published_rows_is_an_error(postgres: str) -> None:
    """They would be published again; a row that another session has deleted is no error."""
    schema = own_schema()
    with psycopg.connect(postgres, autocommit=True, options=f"-c search_path={schema}") as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        tables = OutboxTables(Database(postgres), "outbox", schema)
        tables.create(notifies=False)
        with connection.transaction():
            Outbox("outbox", schema=schema).stash(connection, [OutboxRecord("orders", str(n)) for n in range(3)])
        store = PostgresStore(tables)
        session = store.begin()
        rows = store.turn(session, BatchTransaction(limit=10, limit_bytes=1_000)).rows
        assert len(rows) == 3

        connection.execute("DELETE FROM outbox WHERE value = '0'")
        assert store.turn(session, BatchTransaction(PublishedBatch.of(rows[:2]))).struck == 1

        connection.execute("CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$")
        connection.execute("CREATE TRIGGER keeps BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION skip()")
        with pytest.raises(ConfigurationError, match="1 published rows were to be deleted and are still there"):
            store.turn(session, BatchTransaction(PublishedBatch.of(rows[2:])))
        store.close()
