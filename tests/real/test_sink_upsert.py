"""Upserts on a real PostgreSQL and a real MariaDB, with rows of plain Python instead of Spark."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.sinks.conformance.target import part
from tests.conditions import WITHIN_S
from tests.sink_outputs import TABLE, FakeMariaDBSink, FakePostgresSink, MariaDBOutput, hook, own_schema
from tests.sink_typed_frames import TypedFrame
from tests.upserts import KeyedRow, UpsertTarget, check_history, keyed_frame

if TYPE_CHECKING:
    from marshal_dagster.sinks import WriteResult

ROWS = "SELECT kafka_partition, kafka_offset, {key}, value, version FROM {table} ORDER BY {key}"


class PostgresUpserts(UpsertTarget):
    """A table in a schema of its own."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.schema = dsn, own_schema()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self.schema)))
        self.create()

    def sink(self, reached: Callable[[str], None] | None = None, **options: Any) -> FakePostgresSink:  # noqa: ANN401
        """Return a sink, as another process would have it."""
        sink = FakePostgresSink(self.dsn, TABLE, schema=self.schema, **options)
        hook(sink, reached)
        return sink

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, and return the rows of the last one."""
        with psycopg.connect(self.dsn, options=f"-c search_path={self.schema}", autocommit=True) as connection:
            cursors = [connection.execute(statement.encode()) for statement in statements]
            return cursors[-1].fetchall() if cursors[-1].description else []

    def rows(self) -> list[KeyedRow]:
        """Read all rows of the table."""
        return self.execute(ROWS.format(key='"key"', table=TABLE))


class MariaDBUpserts(UpsertTarget):
    """A table in a database of its own."""

    def __init__(self, server: str) -> None:
        self.server, self.schema = server, own_schema()
        self.database = MariaDBOutput(server, self.schema, create=False)
        self.database.execute(f"CREATE DATABASE {self.schema}", database=None)
        self.create()

    def sink(self, reached: Callable[[str], None] | None = None, **options: Any) -> FakeMariaDBSink:  # noqa: ANN401
        """Return a sink, as another process would have it."""
        sink = FakeMariaDBSink(f"{self.server}/{self.schema}", TABLE, **options)
        hook(sink, reached)
        return sink

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, and return the rows of the last one."""
        return self.database.execute(*statements)

    def rows(self) -> list[KeyedRow]:
        """Read all rows of the table."""
        return self.execute(ROWS.format(key="`key`", table=TABLE))


Table = PostgresUpserts | MariaDBUpserts


@pytest.fixture(params=["postgres", "mariadb"])
def table(request: pytest.FixtureRequest) -> Table:
    """An empty table of each database."""
    server = request.getfixturevalue(request.param)
    return PostgresUpserts(server) if request.param == "postgres" else MariaDBUpserts(server)


@pytest.mark.parametrize("in_any_order", [False, True], ids=["in order", "in any order"])
@pytest.mark.parametrize("has_versions", [False, True], ids=["by offset", "by version"])
def test_the_table_holds_the_newest_rows(table: Table, has_versions: bool, in_any_order: bool) -> None:
    """After each batch of a random history, with deaths and replays, the table is that of the model."""
    check_history(table, 1, has_versions=has_versions, in_any_order=in_any_order)


A, B = part(0, 0, 10), part(1, 0, 10)


def test_what_no_order_decides_is_refused(table: Table) -> None:
    """Keys of two partitions, null keys, two rows of a message, and a value that another unique index refuses."""
    table.write([(0, 3, 1, "a", 1)], A)
    table.execute(f"CREATE UNIQUE INDEX other ON {TABLE} (version)")
    before = table.rows()
    for row, match in (
        ((1, 2, 1, "b", 2), "offset 2: the stored row of its key is from partition 0 of topic 't'"),
        ((1, 2, None, "b", 2), "offset 2: one of key is null"),
        ((1, 2, 2, "b", 1), "offset 2: (another unique index|duplicate key value violates unique constraint)"),
    ):
        with pytest.raises(SinkRejectedError, match=match) as raised:
            table.write([row], B)
        assert "\n" not in str(raised.value)
    with pytest.raises(SinkRejectedError, match="offset 2: the message has two rows"):
        table.write([(1, 2, 5, "b", 2), (1, 2, 5, "c", 3)], B)
    assert table.rows() == before


def test_a_new_generation_rebuilds_the_table(table: Table) -> None:
    """It begins where the first one began."""
    table.write([(0, 1, 1, "first", 0), (0, 7, 1, "second", 0), (0, 8, 2, "wrong", 0)], A)
    table.write([(0, 1, 1, "again", 0)], part(0, 0, 5, generation=1, epoch=20))
    table.write([(0, 9, 3, "new", 0)], part(0, 5, 10, generation=1, epoch=20))
    assert [row[3] for row in table.rows()] == ["again", "new"]
    with pytest.raises(SinkRejectedError, match="replaced rows from offset 0 on"):
        table.write([], part(0, 5, 10, generation=2, epoch=30))


def test_writers_of_different_partitions_meet(table: Table) -> None:
    """Each waits for the other's row of a key that both insert, and the greater value stays."""
    table.write([], A, B, order_by="version")
    results: list[WriteResult] = []
    rows = {0: [(0, 10, k, "a", k % 2) for k in range(8)], 1: [(1, 10, k, "b", (k + 1) % 2) for k in range(8)]}
    barrier = threading.Barrier(2, timeout=WITHIN_S)

    def write(partition: int) -> None:
        met: list[str] = []

        def meet(step: str) -> None:
            if step == "locked" and step not in met:
                met.append(step)
                barrier.wait()

        wanted = part(partition, 10, 20)
        results.append(table.write(rows[partition], wanted, reached=meet, order_by="version"))

    threads = [threading.Thread(target=write, args=(partition,)) for partition in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert sorted(range_.partition for result in results for range_ in result.taken) == [0, 1]
    assert [(key, value) for _, _, key, value, _ in table.rows()] == [(key, "ba"[key % 2]) for key in range(8)]


def test_the_index_is_checked(table: Table) -> None:
    """The error has the statement that creates it, and after it the batch is written."""
    sink = table.sink(mode="upsert", keys=["value"], order_by="version")
    frame = keyed_frame([(0, 1, 1, "a", 1), (0, 2, 2, "a", 2)])
    if isinstance(table, MariaDBUpserts):
        table.execute(
            f"ALTER TABLE {TABLE} MODIFY value varchar(20)", f"CREATE UNIQUE INDEX short ON {TABLE} (value(3))"
        )
    else:
        table.execute(f"CREATE UNIQUE INDEX partial ON {TABLE} (value) WHERE version > 0")
    with pytest.raises(ConfigurationError, match="no unique index on \\(value\\)") as raised:
        sink.write(frame, [A], dict)
    table.execute(str(raised.value).partition(" Run ")[2])
    sink.write(frame, [A], dict)
    assert [row[2] for row in table.rows()] == [2]


def test_an_order_column_of_text_is_refused(table: Table) -> None:
    """Text would put 10 before 9."""
    text = "longtext" if isinstance(table, MariaDBUpserts) else "text USING version::text"
    verb = "MODIFY version" if isinstance(table, MariaDBUpserts) else "ALTER version TYPE"
    table.execute(f"ALTER TABLE {TABLE} {verb} {text}")
    with pytest.raises(ConfigurationError, match="column 'version' is not a number or a time"):
        table.upserting(order_by="version").write(keyed_frame([]), [A], dict)


def test_runs_that_add_columns_at_once(table: Table) -> None:
    """Both add the same column, and their rows have it. Upserts set it too. Another type is refused."""
    table.write([(0, 1, 1, "a", 1)], A)
    table.write([(1, 1, 2, "b", 2)], B)
    table.execute(f"ALTER TABLE {TABLE} DROP COLUMN value, DROP COLUMN version")
    barrier = threading.Barrier(2, timeout=WITHIN_S)
    results: list[int] = []

    def write(partition: int) -> None:
        sink = table.upserting(add_columns=True)
        add = sink._dialect.add_columns

        def add_together(*given: Any) -> None:  # noqa: ANN401 - its arguments
            barrier.wait()
            add(*given)

        sink._dialect.add_columns = add_together
        frame = keyed_frame([(partition, 11, partition + 1, "new", 3)])
        results.extend(sink.write(frame, [part(partition, 10, 20)], dict).rows.values())

    threads = [threading.Thread(target=write, args=(partition,)) for partition in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert results == [1, 1]
    assert [row[3:] for row in table.rows()] == [("new", 3), ("new", 3)]
    table.execute(f"ALTER TABLE {TABLE} DROP COLUMN value", f"ALTER TABLE {TABLE} ADD COLUMN value date")
    with pytest.raises(ConfigurationError, match=r"column 'value' is .*make it"):
        table.upserting(add_columns=True).write(keyed_frame([(0, 21, 1, "x", 4)]), [part(0, 20, 30)], dict)


NAME = 'A "key".{%} of %(topic)s'


def test_names_with_capitals_quotes_dots_and_braces(table: Table) -> None:
    """The key and the order may have any name, in the statements and in the error for the index."""
    renamed = {"key": NAME, "version": NAME + " or more"}
    fields = keyed_frame([]).schema
    schema = t.StructType([t.StructField(renamed.get(f.name, f.name), f.dataType) for f in fields])

    def odd(rows: list[KeyedRow]) -> Any:  # noqa: ANN401 - has the parts of a DataFrame that sinks use
        given = keyed_frame(rows).rows
        return TypedFrame(schema, [{renamed.get(name, name): value for name, value in row.items()} for row in given])

    options: dict[str, Any] = {"mode": "upsert", "keys": [NAME], "order_by": renamed["version"]}
    table.execute(f"DROP TABLE {TABLE}")
    table.sink().create_tables(schema)
    with pytest.raises(ConfigurationError, match="no unique index on") as raised:
        table.sink(**options).write(odd([]), [A], dict)
    statement = str(raised.value).partition(" Run ")[2]
    table.execute(statement)
    table.sink(**options).write(odd([(0, 1, 1, "a", 1), (0, 2, 1, "b", 2), (0, 3, 1, "c", 0)]), [A], dict)
    assert table.execute(f"SELECT value FROM {TABLE}") == [("b",)]  # noqa: S608 - a constant
    table.sink(**options).write(odd([(0, 11, 1, "d", 3), (0, 12, 1, "e", 1)]), [part(0, 10, 20)], dict)
    assert table.execute(f"SELECT value FROM {TABLE}") == [("d",)]  # noqa: S608 - a constant


def test_a_partitioned_table_has_a_row_for_each_key(postgres: str) -> None:
    """Rows go through the parent. A row for which there is no partition is named."""
    table = PostgresUpserts(postgres)
    table.execute(
        f"DROP TABLE {TABLE}",
        f"CREATE TABLE {TABLE} (marshal_range bigint, kafka_partition int, kafka_offset bigint, "
        "key int UNIQUE, value text, version bigint) PARTITION BY RANGE (key)",
        f"CREATE TABLE first PARTITION OF {TABLE} FOR VALUES FROM (0) TO (10)",
        f"CREATE TABLE second PARTITION OF {TABLE} FOR VALUES FROM (10) TO (20)",
    )
    table.write([(0, 1, 1, "a", 1), (0, 2, 11, "b", 1)], A)
    table.write([(0, 11, 11, "c", 2)], part(0, 10, 20))
    assert [row[2:4] for row in table.rows()] == [(1, "a"), (11, "c")]
    with pytest.raises(SinkRejectedError, match="partition 0, offset 21: no partition of relation"):
        table.write([(0, 20, 2, "d", 3), (0, 21, 20, "e", 3)], part(0, 20, 30))


def test_a_key_whose_column_ignores_case_or_spaces_is_refused(table: Table) -> None:
    """Two keys would be one row there. The PostgreSQL of the tests has no collation that ignores case."""
    if isinstance(table, MariaDBUpserts):
        table.execute(f"ALTER TABLE {TABLE} MODIFY value varchar(20) COLLATE utf8mb4_general_ci")
    else:
        table.execute(f"ALTER TABLE {TABLE} ALTER value TYPE char(20)")
    table.execute(f"CREATE UNIQUE INDEX by_value ON {TABLE} (value)")
    sink = table.sink(mode="upsert", keys=["value"])
    with pytest.raises(ConfigurationError, match="different values of value would be the same key there"):
        sink.write(keyed_frame([(0, 1, 1, "a", 1), (0, 2, 2, "A ", 2)]), [A], dict)
    assert table.rows() == []


def test_a_column_that_changes_while_a_batch_is_processed_is_noticed(table: Table) -> None:
    """Its values would be cast. The next attempt checks the new type."""
    is_mariadb = isinstance(table, MariaDBUpserts)

    def change(step: str) -> None:
        if step == "evaluated":
            verb = "MODIFY version smallint" if is_mariadb else "ALTER version TYPE real"
            table.execute(f"ALTER TABLE {TABLE} {verb}")

    with pytest.raises(UnavailableError, match="its columns were changed while the batch was processed"):
        table.write([(0, 1, 1, "a", 1)], A, reached=change)
    assert table.rows() == []
