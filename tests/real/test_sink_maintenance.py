"""Reports and the vacuum of database sinks on a real PostgreSQL and a real MariaDB."""

import threading

import psycopg
import pytest
from psycopg import sql

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks.conformance.target import Target, ahead, deliver, part, rows_of
from marshal_dagster.sinks.database import maintenance
from tests.conditions import WITHIN_S
from tests.sink_kit import OutputTarget
from tests.sink_outputs import TABLE, MariaDBOutput, PostgresOutput, own_schema

Output = PostgresOutput | MariaDBOutput


@pytest.fixture(params=["postgres", "mariadb"])
def output(request: pytest.FixtureRequest) -> Output:
    """Two partitions in order, and one in any order."""
    server = request.getfixturevalue(request.param)
    kind = PostgresOutput if request.param == "postgres" else MariaDBOutput
    output: Output = kind(server, own_schema())
    target = OutputTarget(output)
    for start in range(0, 50, 10):
        deliver(target, "a", part(0, start, start + 10), part(1, start, start + 10))
        if start != 20:
            deliver(target, "a", ahead(2, start, start + 10))
    return output


@pytest.fixture
def target(output: Output) -> Target:
    """The output for the helpers of the kit."""
    return OutputTarget(output)


def execute(output: Output, statement: str) -> None:
    """Run a statement in the output's schema."""
    if isinstance(output, MariaDBOutput):
        output.execute(statement)
        return
    with psycopg.connect(output.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("SET search_path TO {}").format(sql.Identifier(output.schema)))
        connection.execute(statement.encode())


def test_a_vacuum_changes_no_row_and_no_verdict(output: Output, target: Target) -> None:
    """Ranges that come again are skipped, new ones taken, and a new generation replaces rows of merged ranges."""
    sink, before = output.sink(), output.rows()
    assert [(stored.ranges, stored.gaps) for stored in sink.describe().generations] == [(5, 0), (5, 0), (4, 1)]
    assert sink.vacuum(dry_run=True).merged == 7
    done = sink.vacuum(dry_run=False)
    assert (done.entries, done.merged, done.moved_rows) == (14, 7, 70)
    assert [stored.ranges for stored in sink.describe().generations] == [2, 2, 3]
    assert output.rows() == before
    assert sink.check() == []
    for again in (part(0, 40, 50), ahead(2, 10, 20), ahead(2, 0, 10)):
        assert deliver(target, "b", again).skipped
    with pytest.raises(SinkRejectedError):
        sink.verdicts([ahead(2, 15, 25)])
    deliver(target, "b", part(0, 10, 50, generation=1, epoch=20))
    expected = rows_of("a", part(0, 0, 10)) + rows_of("b", part(0, 10, 50)) + [row for row in before if row[0]]
    assert output.rows() == sorted(expected)
    assert sink.check() == []
    assert sink.vacuum(dry_run=False).obsolete == 1


def test_a_check_finds_what_is_wrong(output: Output) -> None:
    """Ranges with a gap, a wrong position, and rows of no range, of other offsets, or that are there twice."""
    other = "kafka_partition = 1 AND kafka_offset = 3"
    columns = "marshal_range, kafka_partition, kafka_offset, value"
    for statement in (
        "DELETE FROM marshal_taken_ranges WHERE start_offset = 10",
        "UPDATE marshal_ranges SET position = 60 WHERE version = 1",
        f"UPDATE {TABLE} SET kafka_offset = 77 WHERE kafka_partition = 0 AND kafka_offset = 7",  # noqa: S608
        f"INSERT INTO {TABLE} ({columns}) SELECT {columns} FROM {TABLE} WHERE {other}",  # noqa: S608
    ):
        execute(output, statement)
    text = "\n".join(output.sink().check())
    for found in (
        "come in order: 1",
        "position is 60",
        "no range: 30",
        "of their range: 1",
        "has 11 rows",
    ):
        assert found in text


def test_writers_and_a_vacuum_at_the_same_time(output: Output, target: Target) -> None:
    """Each range is written once, and nothing is lost."""
    before, done = output.rows(), threading.Event()
    merged: list[int] = []

    def vacuum() -> None:
        while True:
            is_last = done.is_set()
            merged.append(output.sink().vacuum(dry_run=False).merged)
            if is_last:
                return

    thread = threading.Thread(target=vacuum)
    thread.start()
    ranges = [part(0, start, start + 10) for start in range(50, 150, 10)]
    for range_ in ranges:
        deliver(target, "b", range_, ahead(2, range_.start, range_.end))
    done.set()
    thread.join(WITHIN_S)
    expected = [*before, *rows_of("b", *ranges), *rows_of("b", *[part(2, one.start, one.end) for one in ranges])]
    assert output.rows() == sorted(expected)
    assert output.sink().check() == []
    assert sum(merged) == 27
    assert [stored.ranges for stored in output.sink().describe().generations] == [2, 2, 3]


def test_a_vacuum_changes_no_time_that_updates_change(mariadb: str) -> None:
    """Some servers give the first TIMESTAMP of a table the attribute ON UPDATE, which a vacuum does not follow."""
    output = MariaDBOutput(mariadb, own_schema())
    deliver(target := OutputTarget(output), "a", part(0, 0, 10))
    execute(
        output,
        f"ALTER TABLE {TABLE} ADD written timestamp(6) NOT NULL DEFAULT '2001-02-03 04:05:06' "
        "ON UPDATE current_timestamp(6)",
    )
    for start in (10, 20, 30):
        deliver(target, "a", part(0, start, start + 10))
    assert output.sink().vacuum(dry_run=False).moved_rows == 20
    assert {str(written) for (written,) in output.execute(f"SELECT written FROM {TABLE}")} == {"2001-02-03 04:05:06"}  # noqa: S608


def test_a_transaction_of_a_vacuum_updates_a_limited_number_of_rows(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is that of one transaction."""
    before = output.rows()
    monkeypatch.setattr(maintenance, "_MOST_ROWS", 15)
    done = output.sink().vacuum(dry_run=False)
    assert (done.merged, done.moved_rows) == (7, 70)
    assert output.rows() == before
    assert output.sink().check() == []
