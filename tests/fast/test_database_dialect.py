"""The rules of database sinks with the dialect of the documentation, which needs no server."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.sinks.conformance import Case, Row, Target
from marshal_dagster.sinks.conformance.target import LocalFrame, ahead, deliver, never, part, rows_of
from marshal_dagster.sinks.database.dialect import TransactionConflictError
from sqlite_dialect import SqliteDialectSink
from tests.sink_kit import GROUP_CHECKS, SHORT_CASES


class SqliteOutput(Target):
    """A table in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "output.db")
        self.sink().create_tables(LocalFrame(["partition", "offset", "value"], ()).schema)

    def sink(self) -> SqliteDialectSink:
        """Open it like another process."""
        return SqliteDialectSink(self.path, "orders")

    def shared_sink(self) -> SqliteDialectSink:
        """Open it like a process whose output several groups share."""
        return SqliteDialectSink(self.path, "orders", shared_by_groups=True)

    def rows(self) -> list[Row]:
        """Read all rows of the table."""
        with closing(sqlite3.connect(self.path)) as database:
            return database.execute("SELECT kafka_partition, coalesce(kafka_offset, -1), value FROM orders").fetchall()


@pytest.fixture
def output(tmp_path: Path) -> SqliteOutput:
    """An empty table."""
    return SqliteOutput(tmp_path)


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_the_dialect_conforms(case: Case, output: SqliteOutput) -> None:
    """Each case of the conformance kit passes that is quick."""
    case.check(output)


@pytest.mark.parametrize("check", GROUP_CHECKS[:2])
def test_another_group(check: object, output: SqliteOutput) -> None:
    """An output belongs to one group, or to groups that follow each other."""
    check(output)  # type: ignore[operator]


def test_a_conflict_begins_again_up_to_ten_times(output: SqliteOutput) -> None:
    """After that the error of the last conflict is raised, and nothing is written."""
    deliver(output, "a", part(0, 0, 2))
    for conflicts in (10, 11):
        left = [1] * conflicts
        sink = output.sink()
        real = sink._set_positions

        def set_positions(connection: sqlite3.Connection, taken: object, left=left, real=real) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
            if left:
                left.pop()
                raise TransactionConflictError("a deadlock")
            real(connection, taken)

        sink._set_positions = set_positions  # type: ignore[method-assign]
        frame = output.frame(rows_of("b", part(0, 2, 4)))
        if conflicts == 10:
            assert sink.write(frame, [part(0, 2, 4)], never).taken
            continue
        with pytest.raises(UnavailableError, match="a deadlock"):
            sink.write(output.frame(rows_of("c", part(0, 4, 6))), [part(0, 4, 6)], never)
    assert output.found() == rows_of("a", part(0, 0, 2)) + rows_of("b", part(0, 2, 4))


def test_a_range_between_others_is_found(output: SqliteOutput) -> None:
    """A range in any order that overlaps a stored one is refused, and one that fills a gap is taken."""
    for start in (20, 0):
        deliver(output, "a", ahead(0, start, start + 10))
    with pytest.raises(SinkRejectedError):
        output.sink().verdicts([ahead(0, 5, 15)])
    assert deliver(output, "b", ahead(0, 10, 20)).taken
    assert len(output.found()) == 30


def test_missing_tables_columns_and_other_types_are_refused(output: SqliteOutput) -> None:
    """The error comes before the frame is evaluated."""
    unreadable = LocalFrame(["partition", "offset", "value"], None)

    def refused(table: str, match: str) -> None:
        with pytest.raises(ConfigurationError, match=match):
            SqliteDialectSink(output.path, table).write(unreadable, [part(0, 0, 2)], never)  # type: ignore[arg-type]

    refused("missing", r"table main\.missing does not exist.*create_tables")
    with closing(sqlite3.connect(output.path)) as database:
        database.execute("ALTER TABLE orders DROP COLUMN value")
        refused("orders", "lacks the columns value: add them, or give the sink add_columns=True")
        database.execute("ALTER TABLE orders ADD COLUMN value INTEGER")
    refused("orders", "column 'value' is INTEGER: make it TEXT")
    with pytest.raises(ConfigurationError, match="cast it to string"):
        output.sink().create_tables(
            t.StructType([t.StructField("partition", t.IntegerType()), t.StructField("v", t.DateType())])
        )


def test_columns_are_added_if_the_sink_may(output: SqliteOutput) -> None:
    """Rows that are older have null there. A column of the sink, and one that is spelt otherwise, are not added."""

    def alter(change: str) -> None:
        with closing(sqlite3.connect(output.path)) as database:
            database.execute(f"ALTER TABLE orders {change}")

    alter("DROP COLUMN value")
    sink = SqliteDialectSink(output.path, "orders", add_columns=True)
    sink.write(output.frame([(0, 0)], ["partition", "offset"]), [part(0, 0, 1)], never)
    sink.write(output.frame([(0, 1, "a")]), [part(0, 1, 2)], never)
    assert output.rows() == [(0, 0, None), (0, 1, "a")]
    alter("RENAME COLUMN value TO Value")
    with pytest.raises(ConfigurationError, match="lacks the columns value, but has Value, spelt otherwise"):
        sink.write(output.frame([(0, 2, "a")]), [part(0, 2, 3)], never)
    alter("DROP COLUMN kafka_offset")
    with pytest.raises(ConfigurationError, match="add kafka_offset, by which the sink finds rows, yourself"):
        sink.write(output.frame([(0, 2, "a")]), [part(0, 2, 3)], never)
