"""The Postgres sink and its database: tables, constraints, timeouts, lost connections, secrets."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
import pytest
from psycopg import sql

from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks import PostgresSink
from tests.conditions import WITHIN_S, wait_until
from tests.sink_conformance import CrashConformance, Frame, ahead, deliver, never, part, rows_of
from tests.sink_outputs import TABLE, FakeCopyRows, FakePostgresSink, PostgresOutput, own_schema

NOWHERE = "postgresql://user:hunter2@127.0.0.1:1/db"


@pytest.fixture
def output(postgres: str) -> PostgresOutput:
    """A separate schema."""
    return PostgresOutput(postgres, own_schema())


def execute(output: PostgresOutput, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement in the output's schema."""
    with psycopg.connect(output.dsn, options=f"-c search_path={output.schema}") as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


class Sealed:
    """A secret, as pydantic has them."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def get_secret_value(self) -> str:
        """Return the secret."""
        return self._secret


def test_a_database_that_is_down_is_one_line(output: PostgresOutput) -> None:
    """Every method reports it in one line without the password."""
    sink = FakePostgresSink(Sealed(NOWHERE), TABLE, connect_timeout_s=3)
    frame = output.frame(rows_of("a", part(0, 0, 2)))
    for use in (
        lambda: sink.verdicts([part(0, 0, 2)]),
        lambda: sink.can_replace([part(0, 0, 2)]),
        lambda: sink.write(frame, [part(0, 0, 2)], never),  # type: ignore[arg-type]
        sink.create_tables,
    ):
        with pytest.raises(UnavailableError, match="Connection refused") as raised:
            use()
        assert "\n" not in str(raised.value)
        assert "hunter2" not in str(raised.value) + repr(sink)
        assert raised.value.__cause__ is None


@pytest.mark.parametrize("dsn", ["postgres//u:hunter2@h/db", "host=h password=hunter2 nonsense", "hunter2"])
def test_a_connection_string_that_cannot_be_read(dsn: str) -> None:
    """The error describes the problem without the connection string."""
    with pytest.raises(ConfigurationError, match="dsn: not a PostgreSQL connection string") as raised:
        PostgresSink(dsn, TABLE).verdicts([part(0, 0, 2)])
    assert "hunter2" not in str(raised.value)


def test_what_the_server_says_is_scrubbed(output: PostgresOutput) -> None:
    """A server message that contains the password is shown without it."""
    sink = PostgresSink(f"{output.dsn}&dbname=p%40ss+word&password=p%40ss+word", TABLE)
    with pytest.raises(UnavailableError, match=r'database "\*\*\*" does not exist'):
        sink.verdicts([part(0, 0, 2)])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"table": ""}, "table"),
        ({"table": "x" * 64}, "table"),
        ({"schema": "a\0b"}, "schema"),
        ({"lock_timeout_s": 0}, "lock_timeout_s"),
        ({"connect_timeout_s": -1}, "connect_timeout_s"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], field: str) -> None:
    """The error names the field."""
    with pytest.raises(ConfigurationError, match=rf"^{field}(:| is) "):
        PostgresSink(NOWHERE, **{"table": "t"} | settings)


def test_missing_tables_and_columns_are_named(output: PostgresOutput) -> None:
    """If its tables are missing, the sink names the command that creates them.

    It lists missing columns of the user's table.
    """
    frame = output.frame(rows_of("a", part(0, 0, 2)))
    execute(output, f"ALTER TABLE {TABLE} DROP COLUMN kafka_offset, DROP COLUMN value")
    with pytest.raises(ConfigurationError, match="lacks the columns kafka_offset, value"):
        output.sink().write(frame, [part(0, 0, 2)], never)  # type: ignore[arg-type]
    execute(output, f"DROP TABLE {TABLE}")
    with pytest.raises(ConfigurationError, match=r"does not exist.*create_tables"):
        output.sink().write(frame, [part(0, 0, 2)], never)  # type: ignore[arg-type]
    execute(output, "DROP TABLE marshal_taken_ranges")
    with pytest.raises(ConfigurationError, match=r"marshal_taken_ranges.*create_tables"):
        output.sink().verdicts([ahead(0, 0, 2)])
    execute(output, "DROP TABLE marshal_ranges")
    with pytest.raises(ConfigurationError, match=r"marshal_ranges.*create_tables"):
        output.sink().verdicts([part(0, 0, 2)])


@pytest.mark.parametrize("table", [TABLE, "marshal_ranges", "marshal_taken_ranges"])
def test_tables_that_a_crash_empties_are_refused(output: PostgresOutput, table: str) -> None:
    """After a crash, rows and positions could be inconsistent."""
    execute(output, f"ALTER TABLE {table} SET UNLOGGED")
    with pytest.raises(ConfigurationError, match=rf"{table} is unlogged"):
        output.sink().write(output.poison(), [part(0, 0, 2)], never)  # type: ignore[arg-type]
    execute(output, f"ALTER TABLE {table} SET LOGGED")
    assert deliver(output, "a", part(0, 0, 2)).taken


class Looking(FakePostgresSink):
    """A sink that records the `synchronous_commit` setting of its transaction."""

    setting = ""

    def _set_positions(self, connection: psycopg.Connection[tuple[Any, ...]], taken: Sequence[ClaimedRange]) -> None:
        super()._set_positions(connection, taken)
        self.setting = str(connection.execute("SHOW synchronous_commit").fetchall()[0][0])


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("off", "on"),
        ("local", "local"),
        ("remote_write", "remote_write"),
        ("on", "on"),
        ("remote_apply", "remote_apply"),
    ],
)
def test_a_commit_waits_for_the_disk(output: PostgresOutput, given: str, used: str) -> None:
    """If the server would confirm earlier, the sink's transaction waits for the disk. A stronger setting is kept."""
    dsn = f"{output.dsn}&options=-c%20synchronous_commit%3D{given}"
    sink = Looking(dsn, TABLE, schema=output.schema)
    assert deliver(output, "a", part(0, 0, 2), sink=sink).taken
    assert sink.setting == used


def test_tables_can_be_made_by_many_at_once_and_again(postgres: str) -> None:
    """Runs that start together all find the tables, and so does a later call."""
    schema = own_schema()
    output = PostgresOutput(postgres, schema)
    execute(output, f"DROP TABLE {TABLE}, marshal_ranges, marshal_taken_ranges")
    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(output.sink().create_tables, output.frame([]).schema) for _ in range(6)]:
            future.result(WITHIN_S)
    output.sink().create_tables(output.frame([]).schema)
    assert deliver(output, "a", part(0, 0, 2)).taken


def test_tables_that_are_there_are_made_again_beside_open_writers(output: PostgresOutput) -> None:
    """Each run may create the tables. A transaction that stays open must stop neither that nor other writers."""
    sink = PostgresSink(output.dsn, TABLE, schema=output.schema, lock_timeout_s=0.5)
    places = [sql.Identifier(output.schema, name) for name in (TABLE, "marshal_ranges", "marshal_taken_ranges")]
    with psycopg.connect(output.dsn) as idle:
        for place in places:
            idle.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(place))
        sink.create_tables(output.frame([]).schema)


def test_two_tables_of_one_database_keep_apart(output: PostgresOutput) -> None:
    """A batch that is written to two tables is taken by both."""
    other = FakePostgresSink(output.dsn, "other", schema=output.schema)
    other.create_tables(output.frame([]).schema)
    for sink in (output.sink(), other):
        assert deliver(output, "a", part(0, 0, 3), sink=sink).taken
    assert output.rows() == rows_of("a", part(0, 0, 3))
    assert execute(output, "SELECT count(*) FROM other") == [(3,)]
    without_offsets = output.frame([(0, "sum")], ("partition", "value"))
    other.write(without_offsets, [part(0, 3, 9)], never)  # type: ignore[arg-type]
    newer = part(0, 3, 9, generation=20, epoch=21)
    assert "no column 'offset'" in (other.can_replace([newer]) or "")
    assert output.sink().can_replace([newer]) is None
    assert deliver(output, "b", newer).taken == (newer,)


def test_names_need_no_care(postgres: str) -> None:
    """Names may contain capitals, quotes, percent signs and braces."""
    schema, table = f'S "q" {own_schema()}', "Table; %s {x}"
    output = PostgresOutput(postgres, schema)
    sink = FakePostgresSink(postgres, table, schema=schema)
    sink.create_tables(output.frame([]).schema)
    assert deliver(output, "a", part(0, 0, 2), sink=sink).taken
    assert deliver(output, "b", part(0, 1, 3, generation=20, epoch=21), sink=sink).taken
    assert set(sink.verdicts([part(0, 1, 3, generation=20, epoch=22)]).values()) == {"skip"}


def test_a_key_on_message_offsets_suits_the_sink(output: PostgresOutput) -> None:
    """With a unique key a new generation can still replace rows.

    Duplicate rows are rejected, and nothing is written.
    """
    execute(output, f"ALTER TABLE {TABLE} ADD PRIMARY KEY (kafka_partition, kafka_offset)")
    deliver(output, "old", part(0, 0, 5))
    deliver(output, "new", part(0, 2, 4, generation=20, epoch=21))
    assert [value for _, _, value in output.rows()] == ["old", "old", "new", "new", "old"]
    with pytest.raises(SinkRejectedError, match=r"partition 1, offset [01]: duplicate key.*nothing was written"):
        deliver(output, "twice", part(1, 0, 2), rows=[(1, 0, "x"), (1, 0, "y")])
    assert deliver(output, "once", part(1, 0, 2)).taken


def test_values_that_do_not_fit_are_refused_whole(output: PostgresOutput) -> None:
    """A value that the column cannot hold rejects the whole batch, and the error does not show the row."""
    execute(output, f"ALTER TABLE {TABLE} ALTER COLUMN value TYPE integer USING 0")
    with pytest.raises(SinkRejectedError, match="offset 0, column 'value': invalid input syntax for type integer"):
        deliver(output, "words", part(0, 0, 2))
    assert output.rows() == []
    assert deliver(output, "7", part(0, 0, 2)).taken


def test_a_newer_version_is_refused(output: PostgresOutput) -> None:
    """Positions of a newer marshal-dagster version are not interpreted."""
    deliver(output, "a", part(0, 0, 2))
    execute(output, "UPDATE marshal_ranges SET version = 3")
    with pytest.raises(SinkRejectedError, match="has version 3, but this marshal-dagster supports only 2"):
        deliver(output, "b", part(0, 2, 4))


@pytest.fixture
def held(output: PostgresOutput) -> Iterator[psycopg.Connection]:
    """A transaction that holds partition 0's position."""
    deliver(output, "a", part(0, 0, 2))
    with psycopg.connect(output.dsn, options=f"-c search_path={output.schema}") as connection:
        connection.execute("SELECT 1 FROM marshal_ranges FOR UPDATE")
        yield connection
        connection.rollback()


@pytest.mark.usefixtures("held")
def test_a_position_held_too_long_is_reported(output: PostgresOutput) -> None:
    """A writer waits for another one only for the timeout. Then it raises an error that can be retried."""
    sink = FakePostgresSink(output.dsn, TABLE, schema=output.schema, lock_timeout_s=0.2)
    with pytest.raises(UnavailableError, match=r"another writer has locked these ranges for 0\.2 s"):
        deliver(output, "b", part(0, 2, 4), sink=sink)
    assert output.rows() == rows_of("a", part(0, 0, 2))


class Stalling(FakePostgresSink):
    """A sink whose rows arrive slowly."""

    @contextmanager
    def _evaluated(self, frame: Frame, done: Sequence[int], ids: Mapping[int, int]) -> Iterator[FakeCopyRows]:
        with super()._evaluated(frame, done, ids) as lines:
            yield SlowLines(lines.rows)


class SlowLines(FakeCopyRows):
    """Rows one second apart."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(super().__iter__()):
            if number:
                time.sleep(1)
            yield line


def test_rows_that_do_not_come_in_time_are_reported(output: PostgresOutput) -> None:
    """The server ends a statement that takes too long, or an idle transaction, and nothing is written."""
    sink = Stalling(output.dsn, TABLE, schema=output.schema, statement_timeout_s=0.4)
    with pytest.raises(UnavailableError, match=r"did not finish within statement_timeout_s=0\.4|idle-in-transaction"):
        deliver(output, "a", part(0, 0, 2), sink=sink)
    assert output.rows() == []


def test_a_server_that_is_read_only_is_unavailable(output: PostgresOutput) -> None:
    """This happens with a server that was a standby a moment ago. The rows are not at fault."""
    dsn = psycopg.conninfo.make_conninfo(output.dsn, options="-c default_transaction_read_only=on")
    with pytest.raises(UnavailableError, match=r"cannot execute \w+ in a read-only transaction"):
        deliver(output, "a", part(0, 0, 3), sink=FakePostgresSink(dsn, TABLE, schema=output.schema))


@pytest.mark.parametrize("step", ["copied", "locked", "moved", "committing"])
def test_a_lost_connection_is_reported(output: PostgresOutput, step: str) -> None:
    """If the server ends the session at any point of the transaction, nothing is written. The next attempt works."""

    def reached(at: str) -> None:
        if at == step:
            statement = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'marshal-dagster' AND state LIKE 'idle in transaction%'"
            )
            assert execute(output, statement) == [(True,)]

    with pytest.raises(UnavailableError, match="the next attempt of the batch finds out") as raised:
        deliver(output, "a", part(0, 0, 2), sink=output.sink(reached))
    assert "\n" not in str(raised.value)
    assert output.rows() == []
    assert deliver(output, "b", part(0, 0, 2)).taken


def test_a_writer_that_stalls_before_its_last_step_holds_nobody_up(output: PostgresOutput) -> None:
    """While a writer stalls after copying its rows, another one can take the range at once."""

    def reached(at: str) -> None:
        if at == "copied":
            assert deliver(output, "b", part(0, 0, 2, epoch=20), sink=output.sink()).taken

    with pytest.raises(SinkRejectedError, match="fencing token"):
        deliver(output, "a", part(0, 0, 2), sink=output.sink(reached))
    assert output.rows() == rows_of("b", part(0, 0, 2))


def test_what_was_taken_is_entered_once(output: PostgresOutput) -> None:
    """Of two writers with partly overlapping ranges, only the one that takes a range has an entry for it."""
    batches = {"a": [part(0, 0, 5), part(1, 0, 5)], "b": [part(1, 0, 5), part(2, 0, 5)]}
    CrashConformance.race(output, batches)
    found = execute(output, "SELECT partition, row_count FROM marshal_taken_ranges ORDER BY partition")
    assert found == [(0, 5), (1, 5), (2, 5)]
    statement = f"SELECT count(*) FROM {TABLE} JOIN marshal_taken_ranges AS t ON marshal_range = t.id"  # noqa: S608
    assert execute(output, statement) == [(15,)]


# Ranges in any order


@pytest.fixture
def with_ranges(output: PostgresOutput) -> PostgresOutput:
    """An output with ranges of partition 0 that arrived in any order, in two generations."""
    deliver(output, "old", ahead(0, 0, 100))
    deliver(output, "new", ahead(0, 90, 100, generation=20))
    return output


@pytest.mark.parametrize("step", ["locked", "replaced", "moved"])
def test_neighbours_do_not_wait_for_each_other(with_ranges: PostgresOutput, step: str) -> None:
    """While a writer replaces older rows of its range, another one does so with the next range and commits first."""
    stalled: list[str] = []

    def reached(at: str) -> None:
        if at == step and not stalled:
            stalled.append(at)
            sink = FakePostgresSink(with_ranges.dsn, TABLE, schema=with_ranges.schema, lock_timeout_s=2)
            assert deliver(with_ranges, "b", ahead(0, 20, 30, generation=20), sink=sink).taken

    assert deliver(with_ranges, "a", ahead(0, 10, 20, generation=20), sink=with_ranges.sink(reached)).taken
    assert stalled
    values = [value for _, _, value in with_ranges.rows()]
    assert values == ["old"] * 10 + ["a"] * 10 + ["b"] * 10 + ["old"] * 60 + ["new"] * 10


@pytest.mark.parametrize(
    ("step", "other", "waits"),
    [
        ("copied", ahead(0, 10, 20, generation=20), False),
        ("locked", ahead(0, 10, 20, generation=20), True),
        ("locked", ahead(0, 20, 30, generation=20), False),
        ("locked", ahead(0, 20, 30, generation=30), True),
        ("locked", ahead(1, 10, 20, generation=20), False),
        ("set", ahead(0, 20, 30, generation=20), True),
        ("committing", ahead(1, 20, 30, generation=20), False),
    ],
    ids=str,
)
def test_what_is_held_when(with_ranges: PostgresOutput, step: str, other: ClaimedRange, *, waits: bool) -> None:
    """From the check on, the same range and new generations wait.

    During the commit, all ranges of the partition wait.
    """
    deliver(with_ranges, "new", ahead(1, 90, 100, generation=20))
    outcomes: list[str] = []

    def reached(at: str) -> None:
        if at == step and not outcomes:
            sink = FakePostgresSink(with_ranges.dsn, TABLE, schema=with_ranges.schema, lock_timeout_s=0.3)
            with pytest.raises(UnavailableError, match="another writer has locked") if waits else nullcontext():
                assert deliver(with_ranges, "b", other, sink=sink).taken
            outcomes.append(at)

    deliver(with_ranges, "a", ahead(0, 10, 20, generation=20), sink=with_ranges.sink(reached))
    assert outcomes == [step]


def test_many_neighbours_at_once(with_ranges: PostgresOutput) -> None:
    """Writers of dozens of ranges, each delivered twice and in overlapping batches, end without a deadlock."""
    deliver(with_ranges, "new", *(ahead(number, 1000, 1010, generation=20) for number in (1, 2)))
    batches = [
        [ahead(number, start, start + 5, generation=20) for number in numbers]
        for start in range(100, 150, 5)
        for numbers in ((0, 1), (2, 0), (1, 2))
    ]
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(deliver, with_ranges, "x", *batch, sink=with_ranges.sink()) for batch in batches]
        outcomes = [future.result(WITHIN_S) for future in running]
    assert sum(len(outcome.taken) for outcome in outcomes) == 30
    expected = rows_of("x", *(part(number, 100, 150) for number in range(3)))
    assert [row for row in with_ranges.rows() if row[2] == "x"] == expected


def test_what_a_person_removes_meanwhile_is_written_anew(with_ranges: PostgresOutput) -> None:
    """If an operator deletes the row that a writer wants to lock, the writer starts again as in an empty output."""
    mine = ahead(0, 10, 20, generation=20)
    with psycopg.connect(with_ranges.dsn, options=f"-c search_path={with_ranges.schema}") as person:

        def commits_when_waited_for() -> None:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            wait_until(lambda: execute(with_ranges, waiting) != [(0,)], "the writer waits for a lock")
            person.commit()

        with ThreadPoolExecutor(1) as pool:

            def reached(step: str) -> None:
                if step == "copied" and not removed:
                    person.execute("DELETE FROM marshal_ranges")
                    removed.append(pool.submit(commits_when_waited_for))

            removed: list[Future[None]] = []
            assert deliver(with_ranges, "a", mine, sink=with_ranges.sink(reached)).taken
            removed[0].result(WITHIN_S)
    assert execute(with_ranges, "SELECT version, generation FROM marshal_ranges") == [(2, 20)]
    assert deliver(with_ranges, "b", mine).skipped


def test_a_batch_of_very_many_partitions_takes_few_locks(output: PostgresOutput) -> None:
    """The server's lock table is small, so for more than some dozens of ranges the partitions are locked instead."""
    most: list[int] = []

    def reached(step: str) -> None:
        if step == "set":
            held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM "
            most.append(execute(output, held + "pg_database WHERE datname = current_database())")[0][0])

    for start in (10, 0):
        batch = [ahead(number, start, start + 2) for number in range(65)]
        assert len(deliver(output, "a", *batch, sink=output.sink(reached)).taken) == 65
        assert deliver(output, "b", *batch).skipped
    assert deliver(output, "a", ahead(0, 5, 7), ahead(1, 5, 7), sink=output.sink(reached)).taken
    assert most == [1, 1, 5]  # one of them is for the topic's groups


def test_ranges_that_meet_under_a_key_on_message_offsets(output: PostgresOutput) -> None:
    """The second of two writers of a range waits and then skips it, without a conflict with the first one's rows."""
    execute(output, f"ALTER TABLE {TABLE} ADD PRIMARY KEY (kafka_partition, kafka_offset)")
    deliver(output, "old", ahead(0, 0, 100))
    deliver(output, "new", ahead(0, 90, 100, generation=20))
    for start in (20, 0, 10):
        mine = ahead(0, start, start + 10, generation=20)
        outcomes = CrashConformance.race(output, {"a": [mine], "b": [mine]}, replacing=True)
        assert sorted(len(outcome.taken) for outcome in outcomes.values()) == [0, 1]
    assert len(output.rows()) == 100


def test_an_older_version_does_not_misread_ranges(output: PostgresOutput) -> None:
    """A partition has version 2 while ranges of its generation arrived in any order, and version 1 otherwise."""
    versions = "SELECT version, position, generation FROM marshal_ranges"
    deliver(output, "a", part(0, 0, 10))
    assert execute(output, versions) == [(1, 10, 0)]
    deliver(output, "b", ahead(0, 30, 40))
    assert execute(output, versions) == [(2, 10, 0)]
    deliver(output, "b", ahead(0, 10, 30, epoch=99))
    assert execute(output, versions) == [(2, 10, 0)]
    deliver(output, "b", part(0, 40, 50, epoch=99))
    assert execute(output, versions) == [(2, 50, 0)]
    deliver(output, "c", ahead(0, 30, 40, generation=20))
    assert execute(output, versions) == [(2, None, 20)]
    deliver(output, "d", part(0, 5, 10, generation=30, epoch=99))
    assert execute(output, versions) == [(1, 10, 30)]


def test_ranges_are_found_by_an_index(output: PostgresOutput) -> None:
    """Overlapping ranges are found without a scan of all taken ranges."""
    execute(
        output,
        "INSERT INTO marshal_taken_ranges (output, member_group, topic, partition, coordination_topic_id, "
        "data_topic_id, generation, epoch, start_offset, first_readable, end_offset, row_count, has_offsets, version) "
        "SELECT current_schema() || '.results', 'g', 't', 0, 'l', 't', g, 1, n * 10, n * 10, n * 10 + 10, 1, true, 1 "
        "FROM generate_series(1, 20000) AS n, generate_series(7, 9) AS g",
    )
    execute(output, "ANALYZE marshal_taken_ranges")
    sink = output.sink()
    with sink._transaction() as connection:
        real, plans = connection.execute, []

        def explained(statement: Any, values: Any) -> Any:  # noqa: ANN401 - psycopg's signature
            plans.extend(real("EXPLAIN ANALYZE " + statement.as_string(connection), values).fetchall())
            return real(statement, values)

        connection.execute = explained  # type: ignore[method-assign,assignment]
        found = sink._ranges._overlapping(connection, [ahead(0, 100_005, 100_007, generation=8)], ())
    assert found == {0: (100_000, 100_010)}
    plan = "\n".join(line for (line,) in plans)
    assert "marshal_taken_ranges_by_generation" in plan
    assert "Seq Scan" not in plan
