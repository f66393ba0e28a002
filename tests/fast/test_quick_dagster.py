"""What the tests use in place of Dagster's slow steps gives the same results."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import dagster
import pytest
import sqlalchemy
from dagster._config.snap import snap_from_config_type
from dagster._core.storage.event_log import in_memory as events
from dagster._core.storage.event_log.schema import SqlEventLogStorageMetadata
from dagster._core.storage.runs import in_memory as runs
from dagster._core.storage.runs.schema import RunStorageSqlMetadata
from dagster._core.storage.sql import get_alembic_config, stamp_alembic_rev

from marshal_dagster import ClaimerResource
from tests.quick_dagster import COLUMNS_ARE_THERE, QuickTables, note_newest_version, start_dagster_quickly

start_dagster_quickly()


def contents(connection: sqlalchemy.Connection) -> tuple[set[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the tables and indexes of a database, each with its columns, and its version."""
    looked = sqlalchemy.inspect(connection)
    found: set[tuple[str, ...]] = {
        (table, str(column["name"]), str(column["type"]), str(column["nullable"]), str(column["default"]))
        for table in looked.get_table_names()
        for column in looked.get_columns(table)
    }
    found |= {
        (table, str(index["name"]), str(index["unique"]), *map(str, index["column_names"]))
        for table in looked.get_table_names()
        for index in looked.get_indexes(table)
    }
    return found, [tuple(row) for row in connection.exec_driver_sql("SELECT * FROM alembic_version")]


@pytest.mark.parametrize(
    ("module", "metadata"),
    [(runs, RunStorageSqlMetadata), (events, SqlEventLogStorageMetadata)],
    ids=["runs", "events"],
)
def test_the_databases_are_those_of_dagster(module: object, metadata: sqlalchemy.MetaData) -> None:
    """Tables, columns, indexes and the version are the same."""
    config = get_alembic_config(str(module.__file__), "sqlite/alembic/alembic.ini")  # type: ignore[attr-defined]
    own, quick = (sqlalchemy.create_engine("sqlite://").connect() for _ in range(2))
    with own, quick, own.begin(), quick.begin():
        metadata.create_all(own)
        stamp_alembic_rev(config, own)
        QuickTables(metadata).create_all(quick)
        note_newest_version(config, quick)
        assert contents(quick) == contents(own)
        assert len(contents(own)[0]) > 20


@pytest.mark.parametrize("method", COLUMNS_ARE_THERE)
def test_the_columns_are_there(method: str) -> None:
    """What is not looked up is what Dagster finds in a new database."""
    with dagster.DagsterInstance.ephemeral() as instance:
        storages: tuple[Any, ...] = (instance.run_storage, instance.event_log_storage)
        for storage in storages:
            look_up = getattr(type(storage).__base__, method, None)
            if look_up is None:
                continue
            if method.endswith("_on_connection"):
                with storage._connect() as connection:
                    assert look_up(storage, connection)
            else:
                assert look_up(storage)


def test_a_connection_serves_one_after_another() -> None:
    """The next thread uses the same one, a nested transaction another one, and each enforces foreign keys."""
    with dagster.DagsterInstance.ephemeral() as instance, ThreadPoolExecutor(1) as thread:
        storage: Any = instance.run_storage
        instance.add_run(dagster.DagsterRun("job", run_id="first"))
        thread.submit(instance.add_run, dagster.DagsterRun("job", run_id="second")).result()
        with storage.connect() as outer, storage.connect() as inner:
            assert outer.connection.dbapi_connection is not inner.connection.dbapi_connection
            for connection in (outer, inner):
                assert connection.exec_driver_sql("SELECT count(*) FROM runs").scalar() == 2
                assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1


def test_a_transaction_that_fails_leaves_nothing() -> None:
    """The next one to use the connection finds neither its rows nor its locks."""
    with dagster.DagsterInstance.ephemeral() as instance:
        storage: Any = instance.run_storage
        with suppress(ZeroDivisionError), storage.connect() as connection:
            connection.exec_driver_sql("INSERT INTO kvs (key, value) VALUES ('a', 'b')")
            raise ZeroDivisionError
        assert storage.get_cursor_values({"a"}) == {}
        storage.set_cursor_values({"a": "c"})
        assert storage.get_cursor_values({"a"}) == {"a": "c"}


def test_a_schema_is_inferred_once_for_each_set_of_fields() -> None:
    """The schema of a class is kept, and one without some of the fields is another one."""
    from dagster._config.pythonic_config import config

    whole, again = (config.infer_schema_from_config_class(ClaimerResource) for _ in range(2))
    part = config.infer_schema_from_config_class(ClaimerResource, fields_to_omit={"group"})
    assert whole is again
    assert "group" in snap_from_config_type(whole.config_type).field_names
    assert "group" not in snap_from_config_type(part.config_type).field_names
