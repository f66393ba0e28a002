"""The Postgres sink with values, tables and statements that could silently change or lose rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import types as t

from marshal_dagster._internal.postgres import SETTINGS, Database, check_tables_keep_rows
from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.outbox.store import PostgresStore
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks import PostgresSink
from tests.sink_conformance import Frame, deliver, never, part, rows_of
from tests.sink_outputs import TABLE, FakeCopyRows, FakePostgresSink, PostgresOutput, own_schema
from tests.sink_typed_frames import TypedFrame, frame_of


@pytest.fixture
def output(postgres: str) -> PostgresOutput:
    """A separate schema."""
    return PostgresOutput(postgres, own_schema())


def execute(output: PostgresOutput, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements in the output's schema. Return the rows of the last one."""
    with psycopg.connect(output.dsn, options=f"-c search_path={output.schema}") as connection:
        *before, last = statements
        for statement in before:
            connection.execute(statement.encode())
        cursor = connection.execute(last.encode())
        return cursor.fetchall() if cursor.description else []


def write(output: PostgresOutput, frame: TypedFrame, sink: PostgresSink | None = None) -> None:
    """Write a frame with the first hundred offsets of partition 0."""
    (sink or output.sink()).write(frame, [part(0, 0, 100)], never)  # type: ignore[arg-type]


# Types


MISFITS = [
    ("timestamp", t.TimestampType(), "timestamptz"),
    ("timestamp(3) without time zone", t.TimestampType(), "timestamptz"),
    ("timestamptz(3)", t.TimestampType(), "timestamptz"),
    ("date", t.TimestampType(), "timestamptz"),
    ("time", t.TimestampType(), "timestamptz"),
    ("timestamptz", t.TimestampNTZType(), "timestamp"),
    ("timestamp(0)", t.TimestampNTZType(), "timestamp"),
    ("timestamptz", t.DateType(), "date"),
    ("timestamptz", t.StringType(), "text"),
    ("timestamp", t.StringType(), "text"),
    ("date", t.StringType(), "text"),
    ("interval", t.StringType(), "text"),
    ("bytea", t.StringType(), "text"),
    ("money", t.StringType(), "text"),
    ("boolean", t.StringType(), "text"),
    ("double precision", t.StringType(), "text"),
    ("numeric(9,2)", t.StringType(), "text"),
    ("timestamptz[]", t.StringType(), "text"),
    ("regclass", t.StringType(), "text"),
    ("oid", t.StringType(), "text"),
    ("xid", t.StringType(), "text"),
    ("xid8", t.StringType(), "text"),
    ("cid", t.StringType(), "text"),
    ("name", t.StringType(), "text"),
    ("tsvector", t.StringType(), "text"),
    ("tsquery", t.StringType(), "text"),
    ("numeric(9,2)", t.DecimalType(9, 3), r"numeric\(9,3\)"),
    ("double precision", t.DecimalType(9, 3), r"numeric\(9,3\)"),
    ("integer", t.DecimalType(9, 3), r"numeric\(9,3\)"),
    ("money", t.DecimalType(9, 2), r"numeric\(9,2\)"),
    ("real", t.DoubleType(), "double precision"),
    ("numeric(9,2)", t.DoubleType(), "double precision"),
    ("double precision", t.LongType(), "bigint"),
    ("real", t.IntegerType(), "integer"),
    ("date", t.IntegerType(), "integer"),
    ("boolean", t.IntegerType(), "integer"),
    ("text", t.BinaryType(), "bytea"),
    ("integer", t.BooleanType(), "boolean"),
    ("bigint[]", t.ArrayType(t.LongType()), "jsonb"),
    ("local_time", t.TimestampType(), "timestamptz"),
]


@pytest.mark.parametrize(("there", "kind", "better"), MISFITS)
def test_a_column_that_would_hold_other_values_is_refused(
    output: PostgresOutput, there: str, kind: t.DataType, better: str
) -> None:
    """The error comes before the frame is evaluated. It has both types and the one that the column should have."""
    execute(output, "CREATE DOMAIN local_time AS timestamp", f"ALTER TABLE {TABLE} ADD COLUMN v {there}")
    with pytest.raises(ConfigurationError, match=rf"column 'v' is .*, and the result's is .*: make it {better}"):
        write(output, TypedFrame(frame_of("v", kind).schema, None))


@pytest.mark.parametrize(
    "declared", ["bigint GENERATED ALWAYS AS (kafka_offset) STORED", "bigint GENERATED ALWAYS AS IDENTITY"]
)
def test_a_generated_column_is_refused(output: PostgresOutput, declared: str) -> None:
    """The error comes before the frame is evaluated."""
    execute(output, f"ALTER TABLE {TABLE} ADD COLUMN v {declared}")
    with pytest.raises(ConfigurationError, match=r"column 'v' is generated.*make it a plain column"):
        write(output, TypedFrame(frame_of("v", t.LongType()).schema, None))
    execute(output, f"ALTER TABLE {TABLE} DROP COLUMN v, ADD COLUMN v bigint GENERATED BY DEFAULT AS IDENTITY")
    write(output, frame_of("v", t.LongType(), 7))
    assert [row[-1] for row in execute(output, f"TABLE {TABLE}")] == [7]


SPACES = [
    ("varchar(3)", "ab   ", r"character varying\(3\)"),
    ("varchar(3)", "\\\\   ", "character varying"),
    ("char(3)", "a ", r"character\(3\)"),
    ("char(3)", "abc ", r"character\(3\)"),
    ("code", "abc  ", "code"),
]


@pytest.mark.parametrize(("there", "value", "shown"), SPACES)
def test_spaces_that_a_column_would_drop_or_add_are_refused(
    output: PostgresOutput, there: str, value: str, shown: str
) -> None:
    """PostgreSQL cuts spaces off at the length of a column without an error. Nothing is written."""
    execute(output, "CREATE DOMAIN code AS varchar(3)", f"ALTER TABLE {TABLE} ADD COLUMN v {there}")
    with pytest.raises(
        SinkRejectedError, match=rf"partition 0, offset 1, column 'v': it ends with spaces, .*({shown})"
    ):
        write(output, frame_of("v", t.StringType(), "a", value))
    assert output.rows() == []


KEPT = [
    ("varchar(3)", ["ab ", "   ", "", "a", None]),
    ("varchar(5)", ["\\ab  "]),
    ("varchar", ["ab     "]),
    ("char(3)", ["ab ", "abc", "   "]),
    ("text", ["ab     "]),
]


@pytest.mark.parametrize(("there", "values"), KEPT)
def test_spaces_that_a_column_keeps_are_stored(output: PostgresOutput, there: str, values: Sequence[str]) -> None:
    """A string as long as the column allows is stored with its spaces."""
    execute(output, f"ALTER TABLE {TABLE} ADD COLUMN v {there}")
    write(output, frame_of("v", t.StringType(), *values))
    found = execute(output, f"TABLE {TABLE} ORDER BY kafka_offset")
    assert [row[-1] for row in found] == values


NOT_JSON = [
    (t.MapType(t.BinaryType(), t.LongType()), "maps with keys of type binary"),
    (t.ArrayType(t.MapType(t.ArrayType(t.LongType()), t.LongType())), "maps with keys of type array<bigint>"),
    (
        t.StructType([t.StructField("m", t.MapType(t.StructType([t.StructField("a", t.LongType())]), t.LongType()))]),
        "maps with keys of type struct<a:bigint>",
    ),
    (t.MapType(t.DayTimeIntervalType(), t.LongType()), "maps with keys of type interval day to second"),
    (t.StructType([t.StructField("a", t.LongType()), t.StructField("a", t.LongType())]), "its fields 'a' and 'a' are"),
]


@pytest.mark.parametrize(("kind", "why"), NOT_JSON)
def test_values_that_json_does_not_hold_are_refused(output: PostgresOutput, kind: t.DataType, why: str) -> None:
    """A key would become Java's text of an object, or one of two fields would be lost."""
    execute(output, f"ALTER TABLE {TABLE} ADD COLUMN v jsonb")
    with pytest.raises(ConfigurationError, match=f"^column 'v.*{re.escape(why)}"):
        write(output, TypedFrame(frame_of("v", kind).schema, None))
    with pytest.raises(ConfigurationError, match=f"^column 'v.*{re.escape(why)}"):
        PostgresSink(output.dsn, "other", schema=output.schema).create_tables(frame_of("v", kind).schema)


@pytest.mark.parametrize(
    ("column", "there", "better"),
    [
        ("marshal_range", "real", "bigint"),
        ("marshal_range", "text", "bigint"),
        ("kafka_partition", "text", "integer"),
        ("kafka_offset", "text", "bigint"),
        ("kafka_offset", "double precision", "bigint"),
    ],
)
def test_a_column_of_the_sinks_own_has_whole_numbers(
    output: PostgresOutput, column: str, there: str, better: str
) -> None:
    """The sink finds rows by these columns when a new generation replaces some."""
    execute(output, f"ALTER TABLE {TABLE} ALTER COLUMN {column} TYPE {there}")
    with pytest.raises(ConfigurationError, match=f"column '{column}' is {there}.*: make it {better}"):
        write(output, TypedFrame(frame_of("value", t.StringType()).schema, None))


@pytest.mark.parametrize("kind", ["smallint", "integer", "bigint", "numeric(20)", "numeric", "place"])
def test_older_rows_are_replaced_whatever_whole_numbers_the_columns_have(output: PostgresOutput, kind: str) -> None:
    """The columns may have other integer types than `create_tables` gives them."""
    columns = ", ".join(
        f"ALTER COLUMN {name} TYPE {kind}" for name in ("marshal_range", "kafka_partition", "kafka_offset")
    )
    execute(output, "CREATE DOMAIN place AS bigint", f"ALTER TABLE {TABLE} {columns}")
    assert deliver(output, "a", part(0, 0, 4)).taken
    assert deliver(output, "b", part(0, 1, 3, generation=20, epoch=21)).taken
    assert [value for *_, value in output.rows()] == ["a", "b", "b", "a"]


FITS = [
    ("timestamptz", t.TimestampType(), "2024-10-27 00:30:00.000001+00"),
    ("text", t.TimestampType(), "2024-10-27 00:30:00.000001+00"),
    ("timestamp", t.TimestampNTZType(), "2024-10-27 02:30:00.000001"),
    ("timestamp", t.DateType(), "2024-10-27"),
    ("numeric", t.DecimalType(38, 18), "0.1"),
    ("numeric(20,4)", t.DecimalType(9, 3), "0.123"),
    ("bigint", t.DecimalType(9, 0), "17"),
    ("numeric(9)", t.IntegerType(), "17"),
    ("double precision", t.FloatType(), "0.5"),
    ("numeric", t.DoubleType(), "0.1"),
    ("smallint", t.LongType(), "17"),
    ("text", t.LongType(), "17"),
    ("varchar(9)", t.StringType(), "text"),
    ("uuid", t.StringType(), "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    ("jsonb", t.StringType(), '{"a": 1}'),
    ("integer", t.StringType(), "17"),
    ("json", t.MapType(t.StringType(), t.LongType()), '{"a": 1}'),
    ("mood", t.StringType(), "fine"),
    ("positive", t.IntegerType(), "17"),
]


@pytest.mark.parametrize(("there", "kind", "value"), FITS)
def test_a_column_that_holds_the_values_is_written(
    output: PostgresOutput, there: str, kind: t.DataType, value: str
) -> None:
    """Wider types, text, and types that text represents exactly are allowed."""
    execute(
        output,
        "CREATE TYPE mood AS ENUM ('fine')",
        "CREATE DOMAIN positive AS integer CHECK (value > 0)",
        f"ALTER TABLE {TABLE} ADD COLUMN v {there}",
    )
    write(output, frame_of("v", kind, value))
    assert len(output.rows()) == 1


# Percent signs, counts


@pytest.mark.parametrize("name", ["10%", "%s", "a%%b", '%(x)s "q" {y}'])
def test_a_column_with_a_percent_sign_is_written(output: PostgresOutput, name: str) -> None:
    """The column is written like any other, and can be the key of an event."""
    frame = frame_of(name, t.StringType(), "a", None)
    sink = FakePostgresSink(output.dsn, "percent%", schema=output.schema)
    sink.create_tables(frame.schema)
    write(output, frame, sink=sink)
    with psycopg.connect(output.dsn) as connection:
        statement = sql.SQL("SELECT {} FROM {}").format(sql.Identifier(name), sql.Identifier(output.schema, "percent%"))
        assert connection.execute(statement).fetchall() == [("a",), (None,)]


def test_an_outbox_with_a_percent_sign_takes_events(output: PostgresOutput) -> None:
    """The outbox is found by its name."""
    OutboxTables(Database(output.dsn), "out%", output.schema).create(notifies=False)
    events = OutgoingEvents("orders.done", outbox="out%", schema=output.schema)
    sink = FakePostgresSink(output.dsn, TABLE, schema=output.schema, companion=events)
    assert deliver(output, "a", part(0, 0, 2), sink=sink).taken
    assert execute(output, 'SELECT count(*) FROM "out%"') == [(2,)]


class Losing(FakePostgresSink):
    """A sink that fetches fewer rows than it counted."""

    @contextmanager
    def _evaluated(self, frame: Frame, done: Sequence[int], ids: Mapping[int, int]) -> Iterator[FakeCopyRows]:
        with super()._evaluated(frame, done, ids) as lines:
            yield FewerLines(lines.rows)


class FewerLines(FakeCopyRows):
    """All rows but the last one."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        yield from list(super().__iter__())[:-1]


def test_rows_that_are_fewer_when_they_are_fetched_are_refused(output: PostgresOutput) -> None:
    """The copy compares the number of rows before any range is checked."""
    reached: list[str] = []
    sink = Losing(output.dsn, TABLE, schema=output.schema)
    sink._reached = reached.append  # type: ignore[method-assign,assignment]
    with pytest.raises(SinkRejectedError, match="the result had 3 rows, and 2 when they were fetched"):
        deliver(output, "a", part(0, 0, 3), sink=sink)
    assert "copied" not in reached
    assert output.rows() == []


# Row-level security


def owned_by_others(output: PostgresOutput, *statements: str) -> str:
    """Run statements about `{role}`, and return the connection string of this role, which owns nothing."""
    role = f"r{output.schema}"
    execute(
        output,
        f"CREATE ROLE {role}",
        f"GRANT USAGE ON SCHEMA {output.schema} TO {role}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA {output.schema} TO {role}",
        *(statement.format(role=role) for statement in statements),
    )
    return f"{output.dsn}&options=-c%20role%3D{role}"


def test_a_policy_that_hides_the_positions_is_an_error(output: PostgresOutput) -> None:
    """PostgreSQL hides the position from the update, but a repeated range must not be taken again."""
    dsn = owned_by_others(
        output,
        "ALTER TABLE marshal_ranges ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY reads ON marshal_ranges FOR SELECT TO {role} USING (true)",
        "CREATE POLICY writes ON marshal_ranges FOR INSERT TO {role} WITH CHECK (true)",
    )
    sink = FakePostgresSink(dsn, TABLE, schema=output.schema)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"marshal_ranges.*BYPASSRLS"):
            deliver(output, "a", part(0, 0, 2), sink=sink)
    assert output.rows() == []


def test_a_policy_that_hides_what_was_taken_is_an_error(output: PostgresOutput) -> None:
    """The error comes before a batch is processed or a position is set back, because the sink cannot see all rows."""
    deliver(output, "a", part(0, 0, 2))
    dsn = owned_by_others(
        output,
        *(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY" for table in ("marshal_ranges", "marshal_taken_ranges")),
    )
    sink = FakePostgresSink(dsn, TABLE, schema=output.schema)
    for use in (sink.verdicts, sink.can_replace):
        with pytest.raises(ConfigurationError, match=r"row-level security policy.*BYPASSRLS"):
            use([part(0, 0, 2)])


@pytest.mark.parametrize("table", [TABLE, "marshal_taken_ranges"])
def test_a_table_with_policies_is_refused_before_rows_are_read(output: PostgresOutput, table: str) -> None:
    """This holds even if the policies hide nothing at present."""
    dsn = owned_by_others(
        output,
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
        f"CREATE POLICY everything ON {table} TO {{role}} USING (true)",
    )
    with pytest.raises(ConfigurationError, match=r"row-level security.*BYPASSRLS") as raised:
        FakePostgresSink(dsn, TABLE, schema=output.schema).write(output.poison(), [part(0, 0, 2)], never)  # type: ignore[arg-type]
    assert table in str(raised.value)


def test_a_role_that_policies_do_not_bind_writes(output: PostgresOutput) -> None:
    """The owner and a role with BYPASSRLS can write."""
    dsn = owned_by_others(output, f"ALTER TABLE {TABLE} ENABLE ROW LEVEL SECURITY", "ALTER ROLE {role} BYPASSRLS")
    assert deliver(output, "a", part(0, 0, 2), sink=FakePostgresSink(dsn, TABLE, schema=output.schema)).taken
    assert deliver(output, "b", part(0, 2, 4)).taken


def test_every_connection_sees_all_rows_or_an_error(output: PostgresOutput) -> None:
    """This holds for connections of the sink, the harvester and the inspector, in each of their transactions."""
    tables = OutboxTables(Database(output.dsn), "outbox", output.schema)
    tables.create()
    seen: list[dict[str, str]] = []

    def look(connection: psycopg.Connection[Any]) -> None:
        seen.append({name: connection.execute(f"SHOW {name}".encode()).fetchall()[0][0] for name in SETTINGS})

    store, inspector = PostgresStore(tables), OutboxInspector(tables)
    for _ in range(2):
        with store._using() as connection:
            look(connection)
            connection.commit()
        with inspector._connected() as connection:
            look(connection)
    store.close()
    inspector.close()
    with output.sink()._transaction() as connection:
        look(connection)
    assert seen == [dict(SETTINGS)] * 5


@pytest.mark.parametrize("is_one_transaction", [True, False])
def test_settings_hold_whatever_the_role_has(output: PostgresOutput, is_one_transaction: bool) -> None:
    """The library's settings override the role's. Those for one transaction end with it."""
    role = f"r{output.schema}"
    execute(output, f"CREATE ROLE {role} LOGIN SUPERUSER", f"ALTER ROLE {role} SET TimeZone = 'Asia/Kolkata'")
    dsn = output.dsn.replace("postgres:", f"{role}:", 1)
    with Database(dsn).connect(is_one_transaction=is_one_transaction) as connection:
        assert connection.execute("SHOW TimeZone").fetchall() == [("UTC",)]
        connection.commit()
        after = "Asia/Kolkata" if is_one_transaction else "UTC"
        assert connection.execute("SHOW TimeZone").fetchall() == [(after,)]


# Tables that lose rows


UNSAFE = [
    (
        "an unlogged partition",
        [
            "CREATE TABLE p (LIKE results) PARTITION BY RANGE (kafka_partition)",
            "CREATE TABLE p0 PARTITION OF p FOR VALUES FROM (0) TO (1) PARTITION BY RANGE (kafka_offset)",
            "CREATE UNLOGGED TABLE p00 PARTITION OF p0 FOR VALUES FROM (0) TO (100)",
        ],
        r"p: its partition or child table \S*p00 is unlogged",
    ),
    (
        "an unlogged table that inherits",
        ["CREATE TABLE p (LIKE results)", "CREATE UNLOGGED TABLE c () INHERITS (p)"],
        r"p: its partition or child table \S*c is unlogged",
    ),
    (
        "a partition on another server",
        [
            "CREATE TABLE p (LIKE results) PARTITION BY LIST (kafka_partition)",
            "CREATE FOREIGN DATA WRAPPER {schema}",
            "CREATE SERVER {schema} FOREIGN DATA WRAPPER {schema}",
            "CREATE FOREIGN TABLE p0 PARTITION OF p FOR VALUES IN (0) SERVER {schema}",
        ],
        r"p: its partition or child table \S*p0 is a foreign table",
    ),
    ("a view", ["CREATE TABLE q (LIKE results)", "CREATE VIEW p AS SELECT * FROM q"], "p is a view"),
    (
        "a rule",
        [
            "CREATE TABLE p (LIKE results)",
            "CREATE TABLE q (LIKE results)",
            "CREATE RULE aside AS ON INSERT TO p DO INSTEAD INSERT INTO q SELECT NEW.*",
        ],
        "p has the INSTEAD rule 'aside'",
    ),
]


@pytest.mark.parametrize(("statements", "match"), [case[1:] for case in UNSAFE], ids=[case[0] for case in UNSAFE])
def test_a_table_that_would_lose_rows_is_refused(output: PostgresOutput, statements: list[str], match: str) -> None:
    """The error names the unsafe part, and comes before the frame is evaluated."""
    execute(output, *(statement.format(schema=output.schema) for statement in statements))
    sink = FakePostgresSink(output.dsn, "p", schema=output.schema)
    with pytest.raises(ConfigurationError, match=match):
        sink.write(output.poison(), [part(0, 0, 2)], never)  # type: ignore[arg-type]


def test_what_is_not_a_table_is_refused(output: PostgresOutput) -> None:
    """A sequence has columns too, like a table."""
    execute(output, "CREATE SEQUENCE numbers")
    with (
        Database(output.dsn).connect() as connection,
        pytest.raises(ConfigurationError, match="numbers is not a table"),
    ):
        check_tables_keep_rows(connection, output.schema, ["numbers"])


def test_a_temporary_table_is_refused(output: PostgresOutput) -> None:
    """The table's rows would end with the session.

    Temporary tables that inherit from the sink's table do not matter.
    """
    with Database(output.dsn).connect() as connection:
        connection.execute("CREATE TEMPORARY TABLE gone (a integer)")
        found = connection.execute("SELECT nspname FROM pg_namespace WHERE oid = pg_my_temp_schema()").fetchall()
        with pytest.raises(ConfigurationError, match="gone is temporary"):
            check_tables_keep_rows(connection, found[0][0], ["gone"])
        name = sql.Identifier(output.schema, TABLE)
        connection.execute(sql.SQL("CREATE TEMPORARY TABLE mine () INHERITS ({})").format(name))
        check_tables_keep_rows(connection, output.schema, [TABLE])


def test_a_partitioned_table_takes_rows(output: PostgresOutput) -> None:
    """A table whose partitions are all logged is accepted. A row without a partition is named in the error."""
    execute(
        output,
        "CREATE TABLE p (LIKE results) PARTITION BY LIST (kafka_partition)",
        "CREATE TABLE p0 PARTITION OF p FOR VALUES IN (0)",
    )
    sink = FakePostgresSink(output.dsn, "p", schema=output.schema)
    assert deliver(output, "a", part(0, 0, 3), sink=sink).taken
    assert execute(output, "SELECT count(*) FROM p0") == [(3,)]
    with pytest.raises(SinkRejectedError, match=r"partition 1, offset 5: no partition of relation .p. found"):
        deliver(output, "a", part(0, 3, 9), part(1, 5, 7), sink=sink)


SKIPPING = "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$"


@pytest.mark.parametrize(
    ("table", "event"),
    [
        (TABLE, "INSERT"),
        ("marshal_ranges", "INSERT"),
        ("marshal_ranges", "UPDATE"),
        ("marshal_taken_ranges", "INSERT"),
    ],
)
def test_a_trigger_that_skips_rows_is_an_error(output: PostgresOutput, table: str, event: str) -> None:
    """No statement may change fewer rows than expected, and nothing is written."""
    execute(output, SKIPPING, f"CREATE TRIGGER skips BEFORE {event} ON {table} FOR EACH ROW EXECUTE FUNCTION skip()")
    with pytest.raises(SinkRejectedError, match=rf"{table}: a statement affected 0 rows instead of \d"):
        deliver(output, "a", part(0, 0, 2))
    assert output.rows() == []
    assert execute(output, "SELECT count(*) FROM marshal_taken_ranges") == [(0,)]


def test_an_entry_that_a_trigger_keeps_is_an_error(output: PostgresOutput) -> None:
    """Otherwise a range that another run took meanwhile would have two entries."""
    execute(
        output,
        SKIPPING,
        "CREATE TRIGGER keeps BEFORE DELETE ON marshal_taken_ranges FOR EACH ROW EXECUTE FUNCTION skip()",
    )

    def meanwhile(step: str) -> None:
        if step == "copied":
            deliver(output, "b", part(1, 0, 2))

    with pytest.raises(SinkRejectedError, match="marshal_taken_ranges: a statement affected 0 rows instead of 1"):
        deliver(output, "a", part(0, 0, 2), part(1, 0, 2), sink=output.sink(meanwhile))
    assert output.rows() == rows_of("b", part(1, 0, 2))


def test_a_trigger_that_keeps_older_rows_is_an_error(output: PostgresOutput) -> None:
    """Without the deletes, a new generation would duplicate the rows."""
    deliver(output, "a", part(0, 0, 5))
    execute(output, SKIPPING, f"CREATE TRIGGER keeps BEFORE DELETE ON {TABLE} FOR EACH ROW EXECUTE FUNCTION skip()")
    with pytest.raises(SinkRejectedError, match="2 rows of an older generation still exist after they were deleted"):
        deliver(output, "b", part(0, 1, 3, generation=20, epoch=21))
    assert output.rows() == rows_of("a", part(0, 0, 5))


def test_events_that_a_trigger_skips_are_an_error(output: PostgresOutput) -> None:
    """Rows and events are written together or not at all."""
    OutboxTables(Database(output.dsn), "outbox", output.schema).create()
    execute(output, SKIPPING, "CREATE TRIGGER skips BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION skip()")
    events = OutgoingEvents("orders.done", schema=output.schema)
    sink = FakePostgresSink(output.dsn, TABLE, schema=output.schema, companion=events)
    with pytest.raises(SinkRejectedError, match=r"outbox 'outbox': only 0 of 2 events"):
        deliver(output, "a", part(0, 0, 2), sink=sink)
    assert output.rows() == []


@pytest.mark.parametrize("table", ["outbox", "outbox_parked", "marshal_outboxes"])
def test_an_outbox_that_a_crash_empties_is_refused(output: PostgresOutput, table: str) -> None:
    """The sink with events, `outbox init` and the harvester all reject it."""
    tables = OutboxTables(Database(output.dsn), "outbox", output.schema)
    tables.create()
    execute(output, f"ALTER TABLE {table} SET UNLOGGED")
    events = OutgoingEvents("orders.done", schema=output.schema)
    sink = FakePostgresSink(output.dsn, TABLE, schema=output.schema, companion=events)
    for use in (
        lambda: sink.write(output.poison(), [part(0, 0, 2)], never),  # type: ignore[arg-type]
        tables.create,
        PostgresStore(tables).begin,
    ):
        with pytest.raises(ConfigurationError, match=rf"{table} is unlogged"):
            use()


# Values that PostgreSQL rejects


def rejected(output: PostgresOutput, rows: list[tuple[int, int, str]], *ranges: ClaimedRange) -> str:
    """Return the error of a batch with an invalid row. Check that nothing is written."""
    with pytest.raises(SinkRejectedError) as raised:
        deliver(output, "", *ranges, rows=rows)
    assert output.rows() == []
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None
    return str(raised.value)


def test_a_value_that_the_column_does_not_take_is_named(output: PostgresOutput) -> None:
    """The error has the message's partition and offset, the column, and how to continue."""
    execute(output, f"ALTER TABLE {TABLE} ALTER COLUMN value TYPE integer USING 0")
    rows = [(0, 5, "1"), (0, 6, "2"), (1, 7, "3"), (1, 8, "words"), (1, 9, "5")]
    assert rejected(output, rows, part(0, 5, 7), part(1, 7, 10)) == (
        f"table {output.schema}.results cannot store the row of topic 't', partition 1, offset 8, column 'value': "
        'invalid input syntax for type integer: "words"; nothing was written. Correct the code that makes the row, or '
        "skip the message: `marshal-dagster position reset g t --to-offset 1=9`, which also skips the one offset of "
        "the batch before it: process it first (docs/operate/reprocess.md)"
    )


def test_a_nul_in_a_text_is_named(output: PostgresOutput) -> None:
    """PostgreSQL's own message names no column."""
    found = rejected(output, [(0, 5, "a"), (0, 6, "b\0c")], part(0, 5, 7))
    assert "partition 0, offset 6, column 'value': invalid byte sequence" in found


@pytest.mark.parametrize("bad", [0, 1, 17, 39, 40])
def test_a_row_that_a_constraint_refuses_is_named(output: PostgresOutput, bad: int) -> None:
    """The row is found among valid ones, also if it violates a unique constraint."""
    execute(output, f"ALTER TABLE {TABLE} ADD CONSTRAINT good CHECK (value <> 'bad')")
    rows = [(0, number, "bad" if number == bad else "good") for number in range(41)]
    assert f'partition 0, offset {bad}: new row for relation "results" violates check constraint "good"' in rejected(
        output, rows, part(0, 0, 41)
    )
    execute(output, f"CREATE UNIQUE INDEX once ON {TABLE} (value)")
    rows = [(0, number, f"{0 if number == bad else number}") for number in range(41)]
    if bad:
        assert f'partition 0, offset {bad}: duplicate key value violates unique constraint "once"' in rejected(
            output, rows, part(0, 0, 41)
        )


def test_a_missing_value_is_named_with_its_column(output: PostgresOutput) -> None:
    """The column does not allow null."""
    execute(output, f"ALTER TABLE {TABLE} ALTER COLUMN kafka_offset SET NOT NULL")
    found = rejected(output, [(0, 5, "a"), (0, None, "b")], part(0, 5, 8))  # type: ignore[list-item]
    assert "partition 0, offsets 5 to 7 (the row has no offset), column 'offset': null value" in found
    assert found.endswith("--to-offset 0=8`")


def test_what_a_trigger_raises_is_named(output: PostgresOutput) -> None:
    """The row is named as for PostgreSQL's own errors."""
    execute(
        output,
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.value = 'bad' THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$",
        f"CREATE TRIGGER refuses BEFORE INSERT ON {TABLE} FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    found = rejected(output, [(0, 5, "a"), (1, 0, "b"), (1, 1, "bad"), (1, 2, "c")], part(0, 5, 6), part(1, 0, 3))
    assert "partition 1, offset 1: not this one" in found


def test_a_value_too_large_for_an_index_is_refused_and_named(output: PostgresOutput) -> None:
    """This error is not treated as a failure of the database that a retry could solve."""
    execute(output, f"CREATE INDEX ON {TABLE} (value)")
    large = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(20_000))
    assert "partition 0, offset 1: index row" in rejected(output, [(0, 0, "a"), (0, 1, large)], part(0, 0, 2))
