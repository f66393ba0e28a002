"""The MariaDB sink with values, tables and servers that could change or lose rows, and its errors."""

import pickle
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.sinks import MariaDBSink
from tests.conditions import WITHIN_S
from tests.sink_conformance import ahead, deliver, never, part, rows_of
from tests.sink_outputs import TABLE, FakeMariaDBSink, MariaDBOutput, own_schema
from tests.sink_typed_frames import TypedFrame, frame_of

SECURITY = Path(__file__).parents[2] / "docs" / "how-to" / "security.md"
NOWHERE = "mariadb://user:hunter2@127.0.0.1:1/shop"


@pytest.fixture
def output(mariadb: str) -> MariaDBOutput:
    """A separate database."""
    return MariaDBOutput(mariadb, own_schema())


def add_columns(output: MariaDBOutput, *declared: str) -> None:
    """Add columns `v0`, `v1` and so on to the output."""
    added = ", ".join(f"ADD COLUMN v{number} {column}" for number, column in enumerate(declared))
    output.execute(f"ALTER TABLE {TABLE} {added}")


def write(output: MariaDBOutput, frame: TypedFrame) -> None:
    """Write a frame with the first hundred offsets of partition 0."""
    output.sink().write(frame, [part(0, 0, 100)], never)  # type: ignore[arg-type]


MISFITS = [
    ("datetime(6)", t.TimestampType(), r"timestamp\(6\)"),
    ("timestamp(3) NULL", t.TimestampType(), r"timestamp\(6\)"),
    ("longtext", t.TimestampType(), r"timestamp\(6\)"),
    ("timestamp(6) NULL", t.TimestampNTZType(), r"datetime\(6\)"),
    ("datetime(3)", t.TimestampNTZType(), r"datetime\(6\)"),
    ("date", t.TimestampNTZType(), r"datetime\(6\)"),
    ("timestamp(6) NULL", t.DateType(), "date"),
    ("year", t.IntegerType(), "int"),
    ("bit(8)", t.IntegerType(), "int"),
    ("float", t.IntegerType(), "int"),
    ("double", t.LongType(), "bigint"),
    ("float", t.DoubleType(), "double"),
    ("double(10,2)", t.DoubleType(), "double"),
    ("decimal(9,2)", t.DoubleType(), "double"),
    ("decimal(9,2)", t.DecimalType(9, 3), r"decimal\(9,3\)"),
    ("int", t.DecimalType(9, 3), r"decimal\(9,3\)"),
    ("double", t.DecimalType(9, 3), r"decimal\(9,3\)"),
    ("int", t.StringType(), "longtext"),
    ("enum('fine')", t.StringType(), "longtext"),
    ("set('fine')", t.StringType(), "longtext"),
    ("datetime(6)", t.StringType(), "longtext"),
    ("varchar(9) CHARACTER SET latin1", t.StringType(), "longtext"),
    ("varbinary(9)", t.StringType(), "longtext"),
    ("binary(4)", t.BinaryType(), "longblob"),
    ("longtext", t.BinaryType(), "longblob"),
    ("longtext", t.BooleanType(), "boolean"),
    ("int", t.ArrayType(t.LongType()), "json"),
]


def test_columns_that_would_hold_other_values_are_refused(output: MariaDBOutput) -> None:
    """The error comes before the frame is evaluated. It has both types and the one that the column should have."""
    add_columns(output, *(there for there, _, _ in MISFITS))
    for number, (_, kind, better) in enumerate(MISFITS):
        match = rf"column 'v{number}' is .*, and the result's is .*: make it {better}"
        with pytest.raises(ConfigurationError, match=match):
            write(output, TypedFrame(frame_of(f"v{number}", kind).schema, None))


FITS: list[tuple[str, t.DataType, Any, Any]] = [
    ("timestamp(6) NULL", t.TimestampType(), "2024-10-27 00:30:00.000001", "2024-10-27 00:30:00.000001"),
    ("datetime(6)", t.TimestampNTZType(), "0001-01-01 02:30:00.000001", "0001-01-01 02:30:00.000001"),
    ("datetime", t.DateType(), "2024-10-27", "2024-10-27 00:00:00"),
    ("decimal(20,4)", t.DecimalType(9, 3), "0.123", "0.1230"),
    ("bigint", t.DecimalType(9, 0), "17", "17"),
    ("tinyint unsigned", t.LongType(), "255", "255"),
    ("varchar(9)", t.LongType(), "17", "17"),
    ("double", t.FloatType(), "0.5", "0.5"),
    ("varchar(3)", t.StringType(), "ab ", "ab "),
    ("char(3)", t.StringType(), "abc", "abc"),
    ("json", t.StringType(), '{"a": 1}', '{"a": 1}'),
    ("varbinary(3)", t.BinaryType(), b"\0\xff'", None),
    ("boolean", t.BooleanType(), "1", "1"),
]


def test_columns_that_hold_the_values_are_written(output: MariaDBOutput) -> None:
    """Wider types, text, and whole numbers of each size are allowed."""
    add_columns(output, *(there for there, _, _, _ in FITS))
    for number, (_, kind, value, shown) in enumerate(FITS):
        frame = frame_of(f"v{number}", kind, value, None, partition=number)
        output.sink().write(frame, [part(number, 0, 2)], never)  # type: ignore[arg-type]
        rows = f"FROM {TABLE} WHERE kafka_partition = {number} ORDER BY kafka_offset"
        found = output.execute("SET time_zone = '+00:00'", f"SELECT CAST(v{number} AS CHAR) {rows}")
        assert found[1] == (None,)
        assert shown is None or found[0] == (shown,)


REJECTED: list[tuple[str, t.DataType, Any, str]] = [
    ("varchar(3)", t.StringType(), "abc  ", "Data truncated"),
    ("varchar(3)", t.StringType(), "abcd", "Data too long"),
    ("tinytext", t.StringType(), "a" * 255 + " ", "Data truncated"),
    ("char(3)", t.StringType(), "a ", r"it ends with spaces, which char\(3\) would not store unchanged"),
    ("char(3)", t.StringType(), "abc ", "Data truncated|it ends with spaces"),
    ("tinyint unsigned", t.IntegerType(), "-1", "Out of range"),
    ("tinyint", t.LongType(), "128", "Out of range"),
    ("decimal(5,3)", t.DecimalType(9, 3), "123456.000", "Out of range"),
    ("timestamp(6) NULL", t.TimestampType(), "2038-01-19 03:14:08.000000", "Incorrect datetime value"),
    ("varbinary(3)", t.BinaryType(), b"abcd", "Data too long"),
    (
        "timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
        t.TimestampType(),
        None,
        "it is null, and the column is NOT NULL",
    ),
    ("bigint AUTO_INCREMENT UNIQUE", t.LongType(), None, "it is null, and the column is NOT NULL"),
    ("json", t.StringType(), "{a", "failed"),
    ("varchar(9) CHECK (v13 <> 'bad')", t.StringType(), "bad", "CONSTRAINT"),
]
GOOD = {"timestamp": "2024-01-01 00:00:00.000000", "bigint": "7", "json": "{}", "varchar": "a", "char": "abc"}


def test_values_that_a_column_would_change_or_rejects_are_named(output: MariaDBOutput) -> None:
    """The error has the message's offset and the column, whether MariaDB raises an error, warns, or is silent."""
    add_columns(output, *(there for there, _, _, _ in REJECTED))
    for number, (there, kind, value, why) in enumerate(REJECTED):
        good: object = b"'" if "binary" in there else GOOD.get(there.partition("(")[0].partition(" ")[0], "1")
        with pytest.raises(SinkRejectedError, match=rf"partition 0, offset 1.*({why})") as raised:
            write(output, frame_of(f"v{number}", kind, good, value))
        assert "\n" not in str(raised.value)
        assert raised.value.__cause__ is None
        assert output.rows() == []


def test_a_unique_key_that_ignores_case_names_the_row(output: MariaDBOutput) -> None:
    """The second spelling is rejected, and not written in place of the first one."""
    add_columns(output, "varchar(9) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci UNIQUE")
    with pytest.raises(SinkRejectedError, match=r"offset 2: Duplicate entry 'A'"):
        write(output, frame_of("v0", t.StringType(), "a", "b", "A", "c"))
    assert output.rows() == []


def test_what_a_trigger_raises_is_named(output: MariaDBOutput) -> None:
    """The row is found by a search, because the trigger's error has no number of a row."""
    output.execute(
        f"CREATE TRIGGER refuses BEFORE INSERT ON {TABLE} FOR EACH ROW "
        "IF NEW.value = 'bad' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF"
    )
    rows = [(0, 5, "a"), (1, 0, "b"), (1, 1, "bad"), (1, 2, "c")]
    with pytest.raises(SinkRejectedError, match="partition 1, offset 1: not this one"):
        deliver(output, "", part(0, 5, 6), part(1, 0, 3), rows=rows)
    assert output.rows() == []


@pytest.mark.parametrize("table", [TABLE, "marshal_topic_locks"])
def test_an_engine_without_transactions_is_refused(output: MariaDBOutput, table: str) -> None:
    """The error comes before the frame is evaluated, and has the command that changes the engine."""
    output.execute(f"ALTER TABLE {TABLE} MODIFY value varchar(9)")
    for engine in ("MyISAM", "Aria", "MEMORY") if table == TABLE else ("MEMORY",):
        output.execute(f"ALTER TABLE {table} ENGINE = {engine} ROW_FORMAT = DEFAULT")
        with pytest.raises(ConfigurationError, match=rf"{table} has the engine {engine}, .*{table} ENGINE = InnoDB"):
            output.sink().write(output.poison(), [part(0, 0, 2)], never)  # type: ignore[arg-type]
    output.execute(f"ALTER TABLE {table} ENGINE = InnoDB")
    assert deliver(output, "a", part(0, 0, 2)).taken


def test_other_tables_are_refused(output: MariaDBOutput) -> None:
    """These are views, generated columns, tables without the index, and tables or columns that are missing."""

    def refused(table: str, match: str) -> None:
        with pytest.raises(ConfigurationError, match=match):
            FakeMariaDBSink(output.dsn, table).write(output.poison(), [part(0, 0, 2)], never)  # type: ignore[arg-type]

    output.execute(f"CREATE VIEW seen AS SELECT * FROM {TABLE}")  # noqa: S608
    refused("seen", "seen is a view")
    refused("missing", "does not exist, or the role has no right.*create_tables")
    output.execute(f"CREATE TABLE plain SELECT * FROM {TABLE}")  # noqa: S608
    refused("plain", r"has no index that begins with marshal_range.*ADD INDEX")
    output.execute("ALTER TABLE plain ADD INDEX (marshal_range), DROP COLUMN value")
    refused("plain", "lacks the columns value")
    output.execute("ALTER TABLE plain ADD COLUMN value text AS ('x') VIRTUAL")
    refused("plain", "column 'value' is generated")
    output.execute("DROP TABLE marshal_ranges")
    refused(TABLE, "marshal_ranges.*create_tables")


def test_a_partitioned_table_takes_rows(output: MariaDBOutput) -> None:
    """A row without a partition of the table is named in the error."""
    output.execute(f"ALTER TABLE {TABLE} PARTITION BY LIST (kafka_partition) (PARTITION p0 VALUES IN (0))")
    assert deliver(output, "a", part(0, 0, 3)).taken
    assert deliver(output, "b", part(0, 1, 3, generation=20, epoch=21)).taken
    with pytest.raises(SinkRejectedError, match=r"partition 1, offset 5: Table has no partition"):
        deliver(output, "a", part(0, 3, 9, generation=20, epoch=21), part(1, 5, 7))


def test_a_server_that_can_lose_commits_is_refused(output: MariaDBOutput) -> None:
    """With the setting 2 a power failure undoes commits of the last second."""
    output.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        with pytest.raises(ConfigurationError, match=r"innodb_flush_log_at_trx_commit=2.*Set it to 1"):
            output.sink().write(output.poison(), [part(0, 0, 2)], never)  # type: ignore[arg-type]
    finally:
        output.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")


def test_the_session_is_strict_whatever_the_server_is(output: MariaDBOutput) -> None:
    """Settings of the server and of `init_connect` do not matter."""
    output.execute("SET GLOBAL sql_mode = '', GLOBAL time_zone = '+05:30', GLOBAL tx_isolation = 'SERIALIZABLE'")
    try:
        with output.sink()._transaction() as connection, connection.cursor() as cursor:
            cursor.execute("SELECT @@sql_mode, @@time_zone, @@tx_isolation, @@autocommit, @@character_set_client")
            ((mode, zone, isolation, autocommit, charset),) = cursor.fetchall()
        assert {"STRICT_ALL_TABLES", "NO_ZERO_DATE", "NO_AUTO_VALUE_ON_ZERO"} <= set(mode.split(","))
        assert (zone, isolation, autocommit, charset) == ("+00:00", "READ-COMMITTED", 0, "utf8mb4")
        assert deliver(output, "a", part(0, 0, 2)).taken
    finally:
        output.execute("SET GLOBAL sql_mode = DEFAULT, GLOBAL time_zone = DEFAULT, GLOBAL tx_isolation = DEFAULT")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://h/shop",
        "mariadb://user:hunter2@h",
        "mariadb://user:hunter2@h:port/shop",
        "mariadb:///shop",
        "mariadb://user:hunter2@h/shop?sslmode=require",
    ],
)
def test_a_url_that_cannot_be_read(dsn: str) -> None:
    """The error describes the problem without the URL."""
    with pytest.raises(ConfigurationError, match=r"^dsn: ") as raised:
        MariaDBSink(dsn, TABLE)
    assert "hunter2" not in str(raised.value)


def test_settings_are_checked() -> None:
    """The error names the field."""
    wrong: list[dict[str, Any]] = [{"table": ""}, {"table": "x" * 65}, {"lock_timeout_s": 0}, {"connect_timeout_s": -1}]
    for settings in wrong:
        with pytest.raises(ConfigurationError, match=rf"^{next(iter(settings))}(:| is) "):
            MariaDBSink(NOWHERE, **{"table": "t"} | settings)
    sink = MariaDBSink(NOWHERE, "t")
    assert "hunter2" not in repr(pickle.loads(pickle.dumps(sink)))  # noqa: S301 - our own bytes


def test_a_database_that_is_down_or_refuses_is_one_line(output: MariaDBOutput) -> None:
    """The password is not shown."""
    server = output.server.replace("root@", "nobody:hunter2@")
    cases: list[tuple[str, type[Exception], str]] = [
        (NOWHERE, UnavailableError, "Can't connect"),
        (f"{server}/{output.schema}", ConfigurationError, "Access denied"),
        (f"{output.server}/absent", ConfigurationError, "Unknown database"),
    ]
    for dsn, kind, match in cases:
        with pytest.raises(kind, match=match) as raised:
            MariaDBSink(dsn, TABLE).verdicts([part(0, 0, 2)])
        assert "\n" not in str(raised.value)
        assert "hunter2" not in str(raised.value)
        assert raised.value.__cause__ is None


def test_tables_can_be_made_by_many_at_once_and_beside_open_writers(output: MariaDBOutput) -> None:
    """Runs that start together all find the tables. A transaction that stays open stops none of them."""
    schema = output.frame([]).schema

    def reached(step: str) -> None:
        if step == "set":
            MariaDBSink(output.dsn, TABLE, lock_timeout_s=1).create_tables(schema)

    assert deliver(output, "a", part(0, 0, 2), sink=output.sink(reached)).taken
    output.execute(f"DROP TABLE {TABLE}, marshal_ranges, marshal_taken_ranges, marshal_topic_locks")
    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(output.sink().create_tables, schema) for _ in range(6)]:
            future.result(WITHIN_S)
    assert deliver(output, "a", part(0, 0, 2)).taken


def test_names_need_no_care(mariadb: str) -> None:
    """Names of tables and columns may contain capitals, quotes, percent signs and braces."""
    output = MariaDBOutput(mariadb, own_schema())
    sink = FakeMariaDBSink(output.dsn, 'Table; %s {x} "q" `b`')
    name = '10% %s "q" {y} `b`'
    frame = frame_of(name, t.StringType(), "a", None)
    sink.create_tables(frame.schema)
    assert sink.write(frame, [part(0, 0, 2)], never).taken  # type: ignore[arg-type]
    again = part(0, 1, 3, generation=20, epoch=21)
    assert sink.write(frame, [again], lambda: {0: [(1, 3)]}).taken  # type: ignore[arg-type]
    assert set(sink.verdicts([again]).values()) == {"skip"}
    table = '`Table; %s {x} "q" ``b```'
    output.execute(f"DELETE FROM {table}", f'ALTER TABLE {table} MODIFY `10% %s "q" {{y}} ``b``` char(3) NOT NULL')  # noqa: S608
    with pytest.raises(SinkRejectedError, match=r"offset 1, column '10% %s .*it is null, and the column is NOT NULL"):
        sink.write(frame_of(name, t.StringType(), "a", None, partition=1), [part(1, 0, 2)], never)  # type: ignore[arg-type]


def test_names_are_compared_exactly(output: MariaDBOutput) -> None:
    """Groups that differ in case, an accent or a space at the end are different groups."""
    deliver(output, "a", part(0, 0, 5, group="Shop"))
    for group in ("shop", "Sh\u00f6p", "Shop "):
        with pytest.raises(SinkRejectedError, match="has ranges of topic 't' from group 'Shop'"):
            output.sink().verdicts([part(0, 0, 5, group=group)])


def locked(output: MariaDBOutput, step: str, use: Callable[[], None]) -> None:
    """Run `use` while a writer of partition 0 is at a step."""

    def reached(at: str) -> None:
        if at == step:
            use()

    deliver(output, "a", part(0, 0, 2), sink=output.sink(reached))


def test_a_position_held_too_long_is_reported(output: MariaDBOutput) -> None:
    """A writer waits for another one only for the timeout. Writers of other partitions do not wait."""
    deliver(output, "a", part(1, 0, 2))

    def others() -> None:
        sink = FakeMariaDBSink(output.dsn, TABLE, lock_timeout_s=1)
        assert deliver(output, "b", part(1, 2, 4), sink=sink).taken
        with pytest.raises(UnavailableError, match="another writer has locked these ranges for 1 s"):
            deliver(output, "b", part(0, 0, 2, epoch=20), sink=sink)

    locked(output, "moved", others)
    assert output.rows() == [*rows_of("a", part(0, 0, 2), part(1, 0, 2)), *rows_of("b", part(1, 2, 4))]


@pytest.mark.parametrize("step", ["copied", "moved", "committing"])
def test_a_lost_connection_is_reported(output: MariaDBOutput, step: str) -> None:
    """If the server ends the session, nothing is written. The next attempt works."""

    def reached(at: str) -> None:
        if at == step:
            listed = "SELECT id FROM information_schema.processlist WHERE command = 'Sleep' AND db = "
            for (number,) in output.execute(f"{listed}'{output.schema}'"):
                output.execute(f"KILL {number}")

    with pytest.raises(UnavailableError, match="the next attempt of the batch finds out") as raised:
        deliver(output, "a", part(0, 0, 2), sink=output.sink(reached))
    assert "\n" not in str(raised.value)
    assert output.rows() == []
    assert deliver(output, "b", part(0, 0, 2)).taken


def test_a_deadlock_begins_again(output: MariaDBOutput) -> None:
    """The transaction that the server ends as a victim is repeated, and its range is written once."""
    deliver(output, "a", part(0, 0, 2), part(1, 0, 2))
    victims: list[int] = []
    sink = output.sink()
    real = sink._set_positions

    def set_positions(connection: Any, taken: Sequence[Any]) -> None:  # noqa: ANN401 - pymysql's
        if len(victims) < 2:
            victims.append(1)
            with connection.cursor() as cursor:
                cursor.execute("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found'")
        real(connection, taken)

    sink._set_positions = set_positions  # type: ignore[method-assign]
    assert deliver(output, "b", part(0, 2, 4), sink=sink).taken
    assert len(victims) == 2
    assert [value for _, _, value in output.rows()] == ["a", "a", "b", "b", "a", "a"]


def test_many_writers_of_many_partitions_end(output: MariaDBOutput) -> None:
    """Overlapping batches of ranges in any order, each delivered twice, end without an error."""
    batches = [[ahead(number, start, start + 5) for number in (0, 1)] for start in range(0, 30, 5)] * 2
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(deliver, output, "x", *batch, sink=output.sink()) for batch in batches]
        outcomes = [future.result(WITHIN_S) for future in running]
    assert sum(len(outcome.taken) for outcome in outcomes) == 12
    assert output.rows() == rows_of("x", part(0, 0, 30), part(1, 0, 30))


def granted(output: MariaDBOutput, role: str) -> list[str]:
    """Return the statements of docs/how-to/security.md, for an output and a role."""
    page = SECURITY.read_text().partition("## The rights in MariaDB")[2].partition("## ")[0]
    statements = re.findall(r"^(GRANT .*);$", page, re.MULTILINE)
    names = {"shop.orders": f"shop.{TABLE}", "shop": output.schema, "'marshal'": f"'{role}'"}
    for name, own in names.items():
        statements = [statement.replace(name, own) for statement in statements]
    return statements


def test_the_rights_of_the_role_are_enough_and_needed(output: MariaDBOutput) -> None:
    """The role can write and replace. It can neither create tables nor read others."""
    role = f"r{output.schema}"
    grants = granted(output, role)
    output.execute(f"CREATE USER '{role}'@'%' IDENTIFIED BY 'secret'", *grants)
    dsn = output.dsn.replace("root@", f"{role}:secret@")
    sink = FakeMariaDBSink(dsn, TABLE)
    assert deliver(output, "a", part(0, 0, 4), sink=sink).taken
    assert deliver(output, "b", part(0, 1, 3, generation=20, epoch=21), sink=sink).taken
    assert deliver(output, "c", ahead(0, 4, 6, generation=20, epoch=21), sink=sink).taken
    with pytest.raises(ConfigurationError, match="CREATE command denied"):
        FakeMariaDBSink(dsn, "other").create_tables(output.frame([]).schema)
    for number, grant in enumerate(grants):
        output.execute(grant.replace("GRANT", "REVOKE").replace(" TO ", " FROM "))
        fresh = part(7 + number, 0, 2, generation=20, epoch=21)
        with pytest.raises(ConfigurationError) as error:
            deliver(output, "d", fresh, sink=sink)
        said = str(error.value)
        assert "\n" not in said
        missing = re.search(r"Execute GRANT (.+) ON (\S+) TO", said)
        assert missing is not None, said
        rights, place = grant.removeprefix("GRANT ").partition(" TO ")[0].split(" ON ")
        assert set(missing[1].split(", ")) <= set(rights.split(", "))
        assert missing[2].replace("`", "") == place
        output.execute(grant)
    assert deliver(output, "e", part(20, 0, 2, generation=20, epoch=21), sink=sink).taken
