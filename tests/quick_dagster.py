"""Lets Dagster start quickly in the tests of a process: what is the same in each test is computed once.

Half of the time of a test with an ephemeral instance went into this: the migrations and tables of the instance's
databases in memory, and the configuration schemas of resources. The databases and schemas are those of Dagster.
For each event, such an instance also opened some three connections, and asked again for the columns of its tables.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.dialects import sqlite
from sqlalchemy.pool import QueuePool
from sqlalchemy.schema import CreateIndex, CreateTable

COLUMNS_ARE_THERE: Final = (
    "has_run_stats_index_cols",
    "has_backfill_id_column",
    "has_asset_key_index_cols",
    "_has_asset_key_index_cols_on_connection",
)
"""Methods that ask a database whether it has columns that each new one has."""

_VERSIONS: Final = "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"

_load_migrations = ScriptDirectory.from_config
_migrations: dict[str | None, ScriptDirectory] = {}


class QuickTables:
    """Used in place of the metadata of a database; creates its tables by statements that are compiled once."""

    def __init__(self, metadata: sqlalchemy.MetaData) -> None:
        self._metadata = metadata
        self._statements: Sequence[str] = ()

    def create_all(self, connection: sqlalchemy.Connection) -> None:
        """Create all tables and their indexes in an empty database."""
        if not self._statements:
            self._statements = statements_of(self._metadata)
        for statement in self._statements:
            connection.exec_driver_sql(statement)


def statements_of(metadata: sqlalchemy.MetaData) -> list[str]:
    """Return the statements that create the tables and indexes in SQLite."""
    made: list[CreateTable | CreateIndex] = []
    for table in metadata.sorted_tables:
        made += [
            CreateTable(table),
            *(CreateIndex(index) for index in sorted(table.indexes, key=lambda i: str(i.name))),
        ]
    return [str(statement.compile(dialect=sqlite.dialect())) for statement in made]


def note_newest_version(config: Config, connection: sqlalchemy.Connection) -> None:
    """Note in an empty database that it has the newest version, as Alembic's `stamp` does."""
    connection.exec_driver_sql(_VERSIONS)
    newest = ScriptDirectory.from_config(config).get_current_head()
    connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (newest,))


def engine_that_keeps_connections(url: str, **_: object) -> sqlalchemy.Engine:
    """Return the engine of a database in memory, whose connections are used again by any thread."""
    engine = sqlalchemy.create_engine(url, poolclass=QueuePool, connect_args={"check_same_thread": False})
    sqlalchemy.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys = ON"))
    return engine


def import_migrations_once() -> None:
    """Let each instance of Dagster use the migrations that the first one imported."""
    ScriptDirectory.from_config = _migrations_of  # type: ignore[method-assign]


def start_dagster_quickly() -> None:
    """Let ephemeral instances and resources be made quickly. Imports Dagster."""
    from dagster._config.pythonic_config import config, resource
    from dagster._core.storage.event_log import in_memory as events
    from dagster._core.storage.runs import in_memory as runs

    storages: dict[Any, tuple[str, Any]] = {
        runs: ("RunStorageSqlMetadata", runs.InMemoryRunStorage),
        events: ("SqlEventLogStorageMetadata", events.InMemoryEventLogStorage),
    }
    for storage, (name, used) in storages.items():
        metadata = getattr(storage, name)
        if isinstance(metadata, QuickTables):
            return
        setattr(storage, name, QuickTables(metadata))
        storage.stamp_alembic_rev = note_newest_version
        storage.create_engine = engine_that_keeps_connections
        for method in COLUMNS_ARE_THERE:
            if hasattr(used, method):
                setattr(used, method, _yes)
    changed: Any = runs.InMemoryRunStorage
    changed.connect = _connected
    changed = events.InMemoryEventLogStorage
    changed._connect = _connected_in_turn
    modules: tuple[Any, ...] = (config, resource)
    schema_of = _once(config.infer_schema_from_config_class)
    for module in modules:
        module.infer_schema_from_config_class = schema_of


def _yes(*_: object) -> bool:
    return True


@contextmanager
def _connected(storage: Any) -> Iterator[sqlalchemy.Connection]:  # noqa: ANN401 - either storage
    with storage._engine.begin() as connection:
        yield connection


@contextmanager
def _connected_in_turn(storage: Any) -> Iterator[sqlalchemy.Connection]:  # noqa: ANN401 - events
    with storage._db_lock, storage._engine.begin() as connection:
        yield connection


def _migrations_of(config: Config) -> ScriptDirectory:
    folder = config.get_main_option("script_location")
    if folder not in _migrations:
        _migrations[folder] = _load_migrations(config)
    return _migrations[folder]


def _once(infer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that infers the schema of each class of resources or configurations once."""
    known: dict[tuple[type, str | None, frozenset[str]], Any] = {}

    def schema_of(
        model: type, description: str | None = None, fields_to_omit: set[str] | None = None, default: object = None
    ) -> Any:  # noqa: ANN401 - Dagster's own type
        if default is not None:
            return infer(model, description, fields_to_omit, default)
        key = model, description, frozenset(fields_to_omit or ())
        if key not in known:
            known[key] = infer(model, description, fields_to_omit)
        return known[key]

    return schema_of
