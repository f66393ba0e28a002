"""The PostgreSQL sink, whose rows Spark's tasks copy into staging tables."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from pyspark.sql import functions as f

from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.outbox.events import OutgoingEvents
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.sinks import PostgresSink
from marshal_dagster.sinks.conformance.target import never, part
from marshal_dagster.sinks.database import task_rows
from marshal_dagster.sinks.database.task_rows import PREFIX
from tests.sink_outputs import TABLE, hook, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SECURITY = Path(__file__).parents[2] / "docs" / "how-to" / "security.md"
RANGES = [part(0, 0, 10), part(1, 0, 10), part(2, 0, 10)]
"""Three ranges, the last one without rows."""
ROWS = sorted((partition, offset, f"message {offset}") for partition in range(2) for offset in range(10))


class Output:
    """A table in a schema of its own."""

    def __init__(self, dsn: str, frame: "DataFrame") -> None:
        self.dsn, self.schema = dsn, own_schema()
        self.execute("CREATE SCHEMA {schema}")
        self.sink().create_tables(frame.schema)

    def sink(self, **options: Any) -> PostgresSink:  # noqa: ANN401 - the sink's options
        """Return a sink, as another process opens it."""
        return PostgresSink(self.dsn, TABLE, schema=self.schema, **options)

    def execute(self, statement: str, **names: str) -> list[tuple[Any, ...]]:
        """Execute a statement with the names of the schema and the table."""
        given = {"schema": self.schema, "table": TABLE, **names}
        composed = sql.SQL(statement).format(**{name: sql.Identifier(value) for name, value in given.items()})
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(composed)
            return cursor.fetchall() if cursor.description else []

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows."""
        return sorted(self.execute("SELECT kafka_partition, kafka_offset, value FROM {schema}.{table}"))

    def staging_tables(self) -> list[str]:
        """Return the names of the staging tables."""
        found = self.execute("SELECT schemaname, tablename FROM pg_tables")
        return [table for schema, table in found if schema == self.schema and table.startswith(PREFIX)]


@pytest.fixture
def frame(spark: "SparkSession") -> "DataFrame":
    """The rows of two partitions, in four tasks."""
    rows = spark.range(0, 20, numPartitions=4)
    return rows.selectExpr("int(id % 2) partition", "id div 2 offset", "concat('message ', id div 2) value")


@pytest.fixture
def output(postgres: str, frame: "DataFrame") -> Output:
    """An empty table."""
    return Output(postgres, frame)


def test_rows_come_from_tasks_and_nothing_else_is_left(output: Output, frame: "DataFrame") -> None:
    """The driver evaluates no lines of its own. Each task has a staging table until the rows are moved."""
    seen: dict[str, list[str]] = {}
    sink = output.sink()
    hook(sink, lambda step: seen.update({step: output.staging_tables()}))
    sink._dialect.evaluated = never  # type: ignore[method-assign,assignment]

    written = sink.write(frame, RANGES, never)

    assert (set(written.taken), dict(written.rows)) == (set(RANGES), {0: 10, 1: 10, 2: 0})
    assert [len(seen[step]) for step in ("evaluated", "copied", "moved", "committed")] == [4, 4, 4, 0]
    assert output.staging_tables() == []
    assert output.rows() == ROWS
    assert set(output.sink().write(frame, RANGES, never).skipped) == set(RANGES)
    assert output.rows() == ROWS


def killing(column: Any, mark: Path, when: Callable[[str], bool]) -> Any:  # noqa: ANN401 - columns of either kind
    """Return a column whose computation kills the worker process once."""
    path = str(mark)

    def compute(value: str) -> str:
        if when(value):
            try:
                open(path, "x").close()  # noqa: PTH123 - the code runs without this module's imports
            except FileExistsError:
                return value
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    compute.__module__ = when.__module__ = "__main__"
    return f.udf(compute, "string", useArrow=False)(column)


def test_a_killed_task_leaves_nothing_that_counts(output: Output, frame: "DataFrame", tmp_path: Path) -> None:
    """The batch fails with Spark's error, and the next one writes each row once."""
    mark = tmp_path / "killed"
    dying = frame.withColumn("value", killing(f.col("value"), mark, lambda value: value == "message 7"))
    with pytest.raises(Exception, match="Python worker exited unexpectedly"):
        output.sink().write(dying, RANGES, never)
    assert mark.exists()
    assert (output.rows(), output.staging_tables()) == ([], [])

    output.sink().write(dying, RANGES, never)

    assert output.rows() == ROWS


def test_rows_of_a_task_that_does_not_count_are_not_moved(
    output: Output, frame: "DataFrame", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of a task has copied all rows, but Spark has lost its result and counts those of the next process."""
    run_tasks = task_rows._copy

    def with_another_attempt(*arguments: Any) -> Any:  # noqa: ANN401 - those of the function
        results = run_tasks(*arguments)
        table = output.staging_tables()[0]
        again = f"{table[:-16]}{'0' * 16}"
        output.execute("CREATE UNLOGGED TABLE {schema}.{again} AS TABLE {schema}.{staging}", again=again, staging=table)
        return results

    monkeypatch.setattr(task_rows, "_copy", with_another_attempt)
    output.sink().write(frame, RANGES, never)
    assert (output.rows(), output.staging_tables()) == (ROWS, [])


def test_events_of_one_message_are_in_the_order_of_its_rows(spark: "SparkSession", postgres: str) -> None:
    """The rows are in several tasks. The events' key decides in which order their readers see them."""
    values = [f"{number:02}" for number in range(40)]
    rows = spark.range(0, 40, numPartitions=4).selectExpr("0 partition", "0L offset", "lpad(id, 2, '0') value")
    output = Output(postgres, rows)
    OutboxTables(Database(output.dsn), "outbox", output.schema).create()
    events = OutgoingEvents("orders.done", key="value", schema=output.schema)
    output.sink(companion=events).write(rows, [part(0, 0, 1)], never)
    found = output.execute("SELECT convert_from(key, 'UTF8') FROM {schema}.outbox ORDER BY id")
    assert [key for (key,) in found] == values
    assert (len(output.rows()), output.staging_tables()) == (40, [])


def test_the_table_of_a_dead_run_is_dropped_by_the_next(output: Output, frame: "DataFrame") -> None:
    """That of a living run stays: the run holds its lock. A vacuum drops tables too, if no batch by tasks follows."""
    seen: list[str] = []
    sink = output.sink()

    def look(step: str) -> None:
        if step == "evaluated":
            seen.extend(output.staging_tables())

    hook(sink, look)
    sink.write(frame, RANGES, never)
    prefix = seen[0][: len(PREFIX) + 9]
    dead, alive = f"{prefix}{'d' * 16}", f"{prefix}{'a' * 16}"
    for attempt in (dead, alive):
        output.execute("CREATE UNLOGGED TABLE {schema}.{name} (a int)", name=f"{attempt}_{'0' * 16}")
    of_another_table = f"{PREFIX}{'0' * 8}_{'e' * 16}_{'0' * 16}"
    output.execute("CREATE UNLOGGED TABLE {schema}.{name} (a int)", name=of_another_table)
    with holding(output.dsn, alive):
        output.sink().write(frame, [part(0, 10, 20), part(1, 10, 20)], never)
    assert output.staging_tables() == [f"{alive}_{'0' * 16}"]
    sink = output.sink(written_by="driver")
    sink.vacuum(dry_run=True)
    assert output.staging_tables() == [f"{alive}_{'0' * 16}"]
    sink.vacuum(dry_run=False)
    assert output.staging_tables() == []


@contextmanager
def holding(dsn: str, attempt: str) -> Iterator[None]:
    """Hold the lock of an attempt, as its run does."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (attempt,))
        yield


def test_a_batch_that_has_lost_its_claim_writes_nothing(output: Output, frame: "DataFrame") -> None:
    """The claims are checked after the rows are staged, and before they are moved."""

    def lost() -> None:
        assert output.staging_tables()
        raise SinkRejectedError("the claim is lost")

    with pytest.raises(SinkRejectedError, match="the claim is lost"):
        output.sink().write(frame, RANGES, never, lost)
    assert (output.rows(), output.staging_tables()) == ([], [])


def test_a_crash_of_the_server_that_empties_the_staging_table_is_noticed(output: Output, frame: "DataFrame") -> None:
    """PostgreSQL empties unlogged tables after a crash. Nothing is written then."""

    def crash(step: str) -> None:
        if step == "evaluated":
            output.execute("TRUNCATE {schema}.{staging}", staging=output.staging_tables()[0])

    sink = output.sink()
    hook(sink, crash)
    with pytest.raises(UnavailableError, match="the staging table of this batch was dropped or emptied"):
        sink.write(frame, RANGES, never)
    assert output.rows() == []
    output.sink().write(frame, RANGES, never)
    assert output.rows() == ROWS


@pytest.mark.parametrize(
    ("declared", "value", "reason"),
    [
        ("varchar(9)", "if(offset = 7 and partition = 1, 'message 10', value)", "too long"),
        ("varchar(9)", "if(offset = 7 and partition = 1, 'message 7 ', value)", "ends with spaces"),
        ("text CHECK (value <> 'bad')", "if(offset = 7 and partition = 1, 'bad', value)", "check constraint"),
        ("text", "if(offset = 7 and partition = 1, 'a\\0b', value)", "NUL"),
        ("text", "if(offset = 7 and partition = 1, string(X'61FF'), value)", "not UTF-8"),
    ],
)
def test_a_row_that_the_table_rejects_is_named(
    output: Output, frame: "DataFrame", declared: str, value: str, reason: str
) -> None:
    """The driver finds the row, whether COPY, the move or the sink itself rejects it."""
    output.execute("ALTER TABLE {schema}.{table} DROP COLUMN value")
    output.execute(f"ALTER TABLE {{schema}}.{{table}} ADD COLUMN value {declared}")
    with pytest.raises(SinkRejectedError, match=reason) as error:
        output.sink().write(frame.withColumn("value", f.expr(value)), RANGES, never)
    assert "partition 1, offset 7" in str(error.value)
    assert (output.rows(), output.staging_tables()) == ([], [])


def test_empty_texts_nulls_and_signs_of_csv_are_kept(spark: "SparkSession", postgres: str) -> None:
    """Neither a quote nor a line break ends a field, and an empty text is not null."""
    texts = ["", None, '"', '""', "a,b", "a\nb", "a\r\nb", "\\N", "\\.", " ", "NULL", "é\U0001f600", "a\tb", "'", "\\"]
    rows = spark.createDataFrame(list(enumerate(texts)), "offset bigint, value string")
    rows = rows.select(f.lit(0).alias("partition"), "offset", "value")
    output = Output(postgres, rows)
    output.sink().write(rows, [part(0, 0, 100)], never)
    assert [
        value for *_, value in output.execute("SELECT kafka_offset, value FROM {schema}.{table} ORDER BY kafka_offset")
    ] == texts


@pytest.mark.parametrize("more", ["0.1 AS x", "decimal(0.1) AS x"])
def test_values_of_each_type_are_those_that_the_driver_writes(spark: "SparkSession", postgres: str, more: str) -> None:
    """Tasks send bytes in PostgreSQL's form if each column has one; with a number of decimals they send text."""
    rows = spark.range(1, 9, numPartitions=2).selectExpr(
        "0 partition",
        "id offset",
        *(
            f"if(id = {number}, null, {value})"
            for number, value in enumerate(
                (
                    "id % 2 = 0",
                    "tinyint(id)",
                    "smallint(-id)",
                    "int(id)",
                    "float(id) / 3",
                    "if(id = 7, double('NaN'), -double(id) / 3)",
                    "concat('\u00e9 \t\\N,\"\n', id)",
                    "binary(concat('\\x', id))",
                    "date_add(date'0001-01-01', int(id))",
                    "timestamp'1969-12-31 23:59:59.999999+01:00' + make_interval(0, 0, 0, int(id))",
                    "timestamp_ntz'9999-12-31 00:00:00.1'",
                    "array(id, null)",
                    "named_struct('a', timestamp'2020-01-01 00:00:00Z', 'b', null)",
                )
            )
        ),
        f"{more}",
    )
    rows = rows.toDF("partition", "offset", *(f"column_{number}" for number in range(len(rows.columns) - 2)))
    found = []
    for writer in ("driver", "executors"):
        output = Output(postgres, rows)
        output.sink(written_by=writer).write(rows, [part(0, 0, 100)], never)
        found.append(
            output.execute("SELECT to_jsonb(r) - 'marshal_range' FROM {schema}.{table} r ORDER BY kafka_offset")
        )
    assert len(found[0]) == 8
    assert found[1] == found[0]


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("smallint", "32768"),
        ("date", "date_from_unix_date(2147483647)"),
        ("timestamptz", "timestamp_micros(-9000000000000000000)"),
    ],
)
def test_a_number_or_a_time_that_the_column_cannot_store_is_named(
    output: Output, frame: "DataFrame", declared: str, value: str
) -> None:
    """It would become another one if its lowest bytes were sent."""
    output.execute(f"ALTER TABLE {{schema}}.{{table}} ADD COLUMN more {declared}")
    rows = frame.withColumn("more", f.expr(f"if(offset = 7 and partition = 1, {value}, null)"))
    with pytest.raises(SinkRejectedError, match=r"partition 1, offset 7.*out of range"):
        output.sink().write(rows, RANGES, never)
    assert (output.rows(), output.staging_tables()) == ([], [])


@pytest.fixture
def role(output: Output) -> Iterator[str]:
    """A role with exactly the rights of docs/how-to/security.md, also on the database."""
    role = f"writer_{output.schema}"
    output.execute("CREATE ROLE {role} LOGIN", role=role)
    output.execute("REVOKE TEMPORARY ON DATABASE postgres FROM PUBLIC")
    for grant in granted(output, role):
        output.execute(grant)
    yield role
    output.execute("GRANT TEMPORARY ON DATABASE postgres TO PUBLIC")


def granted(output: Output, role: str) -> list[str]:
    """Return the statements of the page, for an output and a role."""
    page = SECURITY.read_text().partition("## The rights in PostgreSQL")[2].partition("## ")[0]
    statements = re.findall(r"^(GRANT .*);$", page, re.MULTILINE)
    names = {"shop": "postgres", "public.orders": f"public.{TABLE}", "public": output.schema, "marshal": role}
    for name, own in names.items():
        statements = [re.sub(rf"\b{name}\b", own, statement) for statement in statements]
    return statements


def sink_of(output: Output, role: str, **options: Any) -> PostgresSink:  # noqa: ANN401 - the sink's options
    """Return a sink that connects as a role."""
    dsn = psycopg.conninfo.make_conninfo(output.dsn, user=role)
    return PostgresSink(dsn, TABLE, schema=output.schema, **options)


def test_the_rights_of_the_role_are_enough_and_needed(output: Output, frame: "DataFrame", role: str) -> None:
    """The role can write and replace rows. Without each right the error is a line with the statement that grants it."""
    sink = sink_of(output, role)
    sink.write(frame, RANGES, never)
    for newer, grant in enumerate(granted(output, role), 1):
        output.execute(grant.replace("GRANT", "REVOKE").replace(" TO ", " FROM "))
        ranges = [part(number, 0, 10, generation=newer, epoch=10 + newer) for number in range(3)]
        with pytest.raises(ConfigurationError) as error:
            sink.write(frame, ranges, lambda: {key: [(0, 10)] for key in range(3)})
        assert f"execute `{grant}`" in str(error.value)
        assert "\n" not in str(error.value)
        assert (output.rows(), output.staging_tables()) == (ROWS, [])
        output.execute(grant)
        sink.write(frame, ranges, lambda: {key: [(0, 10)] for key in range(3)})
        assert output.rows() == ROWS


def test_a_role_without_delete_writes_until_rows_must_be_replaced(
    output: Output, frame: "DataFrame", role: str
) -> None:
    """Then the error has the right, and nothing is changed."""
    output.execute("REVOKE DELETE ON {schema}.{table} FROM {role}", role=role)
    sink = sink_of(output, role)
    sink.write(frame, RANGES, never)
    newer = [part(number, 0, 10, generation=1, epoch=20) for number in range(3)]
    with pytest.raises(ConfigurationError, match=f"execute `GRANT DELETE ON {output.schema}.{TABLE} TO {role}`"):
        sink.write(frame, newer, lambda: {key: [(0, 10)] for key in range(3)})
    assert (output.rows(), output.staging_tables()) == (ROWS, [])


def test_upserts_need_one_more_right(output: Output, frame: "DataFrame", role: str) -> None:
    """The error comes before the frame is evaluated, and has the right."""
    output.execute("CREATE UNIQUE INDEX ON {schema}.{table} (kafka_partition, kafka_offset)")
    sink = sink_of(output, role, mode="upsert", keys=["partition", "offset"])
    grant = f"GRANT UPDATE ON {output.schema}.{TABLE} TO {role}"
    unreadable = frame.withColumn("value", f.raise_error(f.lit("evaluated")).cast("string"))
    with pytest.raises(ConfigurationError, match=f"execute `{grant}`"):
        sink.write(unreadable, RANGES, never)
    output.execute(grant)
    sink.write(frame, RANGES, never)
    assert output.rows() == ROWS


def test_only_the_owner_may_add_columns(output: Output, frame: "DataFrame", role: str) -> None:
    """The error names the owner and the columns, and comes before the frame is evaluated. A member of the owner may."""
    unreadable = frame.withColumn("more", f.raise_error(f.lit("evaluated")).cast("string"))
    sink = sink_of(output, role, add_columns=True)
    ((owner,),) = output.execute("SELECT current_user")
    with pytest.raises(ConfigurationError, match=f"only its owner {owner} may add the columns more. Let that role"):
        sink.write(unreadable, RANGES, never)
    owners = f"owners_{output.schema}"
    output.execute("CREATE ROLE {owners}", owners=owners)
    output.execute("ALTER TABLE {schema}.{table} OWNER TO {owners}", owners=owners)
    output.execute("GRANT {owners} TO {role}", owners=owners, role=role)
    output.execute("GRANT CREATE, USAGE ON SCHEMA {schema} TO {owners}", owners=owners)
    sink.write(frame.selectExpr("*", "value AS more"), RANGES, never)
    assert output.rows() == ROWS


def test_staged_rows_cannot_be_read_by_others(output: Output, frame: "DataFrame", role: str) -> None:
    """Also not by roles that get rights on the writer's tables by default."""
    reader = f'reader %s "{output.schema}"'
    output.execute("CREATE ROLE {reader}", reader=reader)
    default = "ALTER DEFAULT PRIVILEGES FOR ROLE {role} IN SCHEMA {schema} GRANT SELECT, INSERT ON TABLES TO "
    output.execute(default + "PUBLIC, {reader}", role=role, reader=reader)
    readable: list[tuple[Any, ...]] = []

    def look(step: str) -> None:
        if step == "evaluated":
            assert output.staging_tables()
            readable.extend(
                output.execute(
                    "SELECT relname, grantee FROM pg_class, aclexplode(relacl) "
                    "WHERE relnamespace = '{schema}'::regnamespace AND relname LIKE 'marshal_staging_%' "
                    "AND grantee <> relowner"
                )
            )

    sink = sink_of(output, role)
    hook(sink, look)
    sink.write(frame, RANGES, never)
    assert (readable, output.rows()) == ([], ROWS)


def test_the_driver_writes_for_a_role_that_may_not_create_tables(output: Output, frame: "DataFrame", role: str) -> None:
    """Tasks cannot, and the error names the other way. Others can set up the output."""
    output.execute("REVOKE CREATE ON SCHEMA {schema} FROM {role}", role=role)
    with pytest.raises(ConfigurationError, match="or use written_by='driver', which needs no such right"):
        sink_of(output, role).write(frame, RANGES, never)
    with pytest.raises(ConfigurationError, match=r"TO [a-z0-9_]+`, or let another role call `create_tables`"):
        sink_of(output, role).create_tables(frame.schema)
    assert output.rows() == []
    sink_of(output, role, written_by="driver").write(frame, RANGES, never)
    assert output.rows() == ROWS


def test_an_older_generation_is_replaced_from_the_staging_table(output: Output, frame: "DataFrame") -> None:
    """Rows of the offsets that the new batch has read or that it has rows for are replaced."""
    output.sink().write(frame, RANGES, never)
    newer = [part(number, 0, 10, generation=1, epoch=20) for number in range(3)]
    rows = frame.withColumn("value", f.concat(f.lit("new "), "value"))
    output.sink().write(rows, newer, lambda: {number: [(0, 10)] for number in range(3)})
    assert output.rows() == [(partition, offset, f"new {value}") for partition, offset, value in ROWS]


@pytest.mark.parametrize("written_by", ["executors", "driver"])
def test_the_newest_row_of_each_key_stays(output: Output, frame: "DataFrame", written_by: str) -> None:
    """Tasks and the driver write the same upserts; a key that another partition has is refused."""
    output.execute("CREATE UNIQUE INDEX ON {schema}.{table} (value)")
    keyed = frame.withColumn("value", f.concat("partition", f.lit(" "), f.col("offset") % 4))
    sink = output.sink(mode="upsert", keys=["value"], written_by=written_by)
    sink.write(keyed, RANGES, never)
    newest = sorted(
        (partition, offset, f"{partition} {offset % 4}") for partition in range(2) for offset in range(6, 10)
    )
    assert output.rows() == newest
    later = keyed.withColumn("offset", f.col("offset") + 10).where("offset < 12")
    sink.write(later, [part(number, 10, 20) for number in range(3)], never)
    moved = {(0, 8): 10, (0, 9): 11, (1, 8): 10, (1, 9): 11}
    assert output.rows() == sorted((at, moved.get((at, offset), offset), value) for at, offset, value in newest)
    crossing = keyed.where("partition = 0").withColumn("partition", f.lit(2)).withColumn("offset", f.col("offset") + 20)
    with pytest.raises(SinkRejectedError, match="the stored row of its key is from partition 0"):
        sink.write(crossing, [part(2, 20, 30)], never)
    assert output.staging_tables() == []
