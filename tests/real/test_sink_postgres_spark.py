"""Spark's values in PostgreSQL: they are written as computed, whatever the session's settings, or rejected."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks import PostgresSink
from marshal_dagster.sinks.database import frame_lines
from marshal_dagster.sinks.database.pg_copy import evaluated
from marshal_dagster.sinks.row_writer import RowWriter
from marshal_dagster.spark.lazy_pyspark import has
from marshal_dagster.spark.local_batches import local_batches
from tests.session_settings import USUAL_PLANS, session_settings
from tests.sink_conformance import never, part
from tests.sink_outputs import TABLE, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SESSIONS = [
    {"spark.sql.session.timeZone": "UTC"} | USUAL_PLANS,
    {"spark.sql.session.timeZone": "Europe/Berlin"},
    {"spark.sql.session.timeZone": "Asia/Kolkata", "spark.sql.legacy.timeParserPolicy": "LEGACY"},
    {"spark.sql.session.timeZone": "America/St_Johns", "spark.sql.ansi.enabled": "false"},
]


@pytest.fixture(
    params=SESSIONS, ids=lambda settings: " ".join(settings[name] for name in settings if name not in USUAL_PLANS)
)
def any_session(request: pytest.FixtureRequest, spark: "SparkSession") -> Iterator["SparkSession"]:
    """The session with a user's settings."""
    with session_settings(spark, request.param):
        yield spark


def written(
    dsn: str, frame: "DataFrame", *what: str, written_by: RowWriter = RowWriter.EXECUTORS
) -> list[tuple[Any, ...]]:
    """Write a frame of partition 0 to a new table. Return columns as text, ordered by offset."""
    schema = own_schema()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    sink = PostgresSink(dsn, TABLE, schema=schema, written_by=written_by)
    sink.create_tables(frame.schema)
    sink.write(frame, [part(0, 0, 1_000)], never)
    with psycopg.connect(dsn, options="-c TimeZone=UTC") as connection:
        columns = ", ".join(what)
        statement = f'SELECT {columns} FROM "{schema}"."{TABLE}" ORDER BY kafka_offset'  # noqa: S608 - the tests' own
        return connection.execute(statement.encode()).fetchall()


def instants(spark: "SparkSession", micros: Sequence[int], *columns: str) -> "DataFrame":
    """Return a row for each instant `us`, with `columns` computed from it."""
    rows = spark.createDataFrame([(0, offset, us) for offset, us in enumerate(micros)], "p int, o long, us long")
    return rows.selectExpr("p AS partition", "o AS offset", *columns)


def micros_of(*moments: str) -> list[int]:
    """Return instants as microseconds."""
    return [(datetime.fromisoformat(moment) - EPOCH) // timedelta(microseconds=1) for moment in moments]


# Both sides of the end of daylight saving time in Berlin and in St. John's; before 1970; before 1582.
MOMENTS = (
    "2024-10-27T00:30:00.123456+00:00",
    "2024-10-27T01:30:00.123456+00:00",
    "2024-11-03T03:30:00.000001+00:00",
    "2024-11-03T04:30:00.000001+00:00",
    "1969-12-31T23:59:59.999999+00:00",
    "1500-02-28T12:00:00.100000+00:00",
    "0001-01-01T00:00:00.000000+00:00",
    "9999-12-31T23:59:59.999999+00:00",
)


def test_instants_are_written_as_they_are(any_session: "SparkSession", postgres: str) -> None:
    """This holds in columns, arrays, maps and structs, to the microsecond."""
    given = micros_of(*MOMENTS)
    frame = instants(
        any_session,
        given,
        "timestamp_micros(us) AS at",
        "array(timestamp_micros(us), NULL) AS listed",
        "map(timestamp_micros(us), timestamp_micros(us)) AS mapped",
        "named_struct('at', timestamp_micros(us), 'n', us) AS nested",
        "IF(us > 0, named_struct('at', array(timestamp_micros(us))), NULL) AS sometimes",
    )
    found = written(
        postgres,
        frame,
        "extract(epoch FROM at) * 1000000",
        "listed",
        "mapped",
        "nested",
        "sometimes IS NULL",
        "at::text",
    )
    texts = [moment.removesuffix("+00:00") + "Z" for moment in MOMENTS]
    assert [int(row[0]) for row in found] == given
    assert [row[1] for row in found] == [[text, None] for text in texts]
    assert [row[2] for row in found] == [{text: text} for text in texts]
    assert [row[3] for row in found] == [{"at": text, "n": us} for text, us in zip(texts, given, strict=True)]
    assert [row[4] for row in found] == [us <= 0 for us in given]


def test_instants_in_variants_are_in_utc(any_session: "SparkSession", postgres: str) -> None:
    """A variant in a struct is JSON, and the time zone of the session does not matter."""
    frame = instants(any_session, micros_of(MOMENTS[0]), "named_struct('v', timestamp_micros(us)::variant) AS v")
    assert written(postgres, frame, "v") == [({"v": "2024-10-27 00:30:00.123456+00:00"},)]


def test_dates_and_local_times_are_written_as_they_are(any_session: "SparkSession", postgres: str) -> None:
    """This includes dates before year 1 and after 9999, which PostgreSQL and Spark write differently."""
    days = [0, -1, 19_000, -719_162, -719_163, -719_163 - 366, -1_000_000, 2_932_896, 2_932_897, 4_000_000]
    frame = any_session.createDataFrame(
        [(0, offset, day) for offset, day in enumerate(days)], "p int, o long, d int"
    ).selectExpr(
        "p AS partition",
        "o AS offset",
        "date_from_unix_date(d) AS day",
        "CAST(date_from_unix_date(d) AS timestamp_ntz) + INTERVAL '0 23:59:59.000001' DAY TO SECOND AS moment",
        "named_struct('day', date_from_unix_date(d)) AS nested",
        "array(TIMESTAMP_NTZ '2024-03-31 02:30:00.000001') AS missing",
    )
    found = written(postgres, frame, "day - DATE '1970-01-01'", "moment - day", "nested->>'day'", "missing")
    assert [row[0] for row in found] == days
    assert {row[1] for row in found} == {timedelta(hours=23, minutes=59, seconds=59, microseconds=1)}
    assert [row[2] for row in found][:5] == ["1970-01-01", "1969-12-31", "2022-01-08", "0001-01-01", "0000-12-31"]
    assert [row[2] for row in found][7:9] == ["9999-12-31", "+10000-01-01"]
    assert {row[3][0] for row in found} == {"2024-03-31T02:30:00.000001"}


def test_decimals_are_texts_with_all_their_digits(any_session: "SparkSession", postgres: str) -> None:
    """In a text column, without ANSI, a cast would write zeros and small numbers with exponents."""
    numbers = ["0", "0.0000001", "-0.0000001", "1", "-123.45", "99999999999999999999", "-0.000000000000000012"]
    frame = any_session.createDataFrame(
        [(0, at, number) for at, number in enumerate(numbers)], "p int, o long, n string"
    )
    frame = frame.selectExpr(
        "p AS partition", "o AS offset", "CAST(n AS decimal(38, 18)) AS n", "IF(o < 9, NULL, 1.5) AS x"
    )
    schema = own_schema()
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        sink = PostgresSink(postgres, TABLE, schema=schema)
        sink.create_tables(frame.schema)
        table = sql.Identifier(schema, TABLE)
        connection.execute(sql.SQL("ALTER TABLE {} ALTER COLUMN n TYPE text").format(table))
        sink.write(frame, [part(0, 0, 1_000)], never)
        found = connection.execute(sql.SQL("SELECT n, x FROM {} ORDER BY kafka_offset").format(table)).fetchall()
    assert found == [(f"{Decimal(number):.18f}", None) for number in numbers]


def test_instants_beyond_pythons_years_are_written_as_they_are(spark: "SparkSession", postgres: str) -> None:
    """This holds for the range of PostgreSQL. Other instants are rejected, and the error names the row."""
    given = [-(10**16) * 6, -(10**17), 10**18, 9 * 10**18]
    found = written(postgres, instants(spark, given, "timestamp_micros(us) AS at"), "extract(epoch FROM at) * 1000000")
    assert [int(row[0]) for row in found] == given
    for us in (-3 * 10**17, -(9 * 10**18)):
        with pytest.raises(SinkRejectedError, match=r"partition 0, offset 1, column 'at': \S*.*out of range"):
            written(postgres, instants(spark, [0, us], "timestamp_micros(us) AS at"), "at")


BAD = "string(X'4DFC6C6C6572')"


PLACES = [
    "{} AS c",
    "array('a', NULL, {}) AS c",
    "map('k', {}) AS c",
    "map({}, 'v') AS c",
    "map('k', map('k', array({}))) AS c",
    "named_struct('a', 'a', 'b.c', {}) AS c",
    "array(named_struct('n', 1L, 's', {})) AS c",
    "{} AS `c.d e`",
]


def texts(spark: "SparkSession", column: str, bad: str) -> "DataFrame":
    """Return nine rows with texts in a column. From the sixth row on the text is `bad`."""
    good_or_bad = f"IF(id > 4, {bad}, 'Müller \U0001f600 \ufffd')"
    return spark.range(9).selectExpr("0 AS partition", "id AS offset", "'fine' AS a", column.format(good_or_bad))


@pytest.mark.parametrize("column", PLACES)
@pytest.mark.parametrize(
    ("bad", "why"), [(BAD, "bytes that are not UTF-8"), ("'a\\0b'", "NUL character"), ("string(X'610062')", "NUL")]
)
def test_a_text_that_cannot_be_is_named(spark: "SparkSession", postgres: str, column: str, bad: str, why: str) -> None:
    """The error names partition and offset of the first such message, and the column."""
    rows = texts(spark, column, bad)
    name = rows.columns[-1]
    with pytest.raises(SinkRejectedError, match=rf"topic 't', partition 0, offset 5, column '{name}': it has .*{why}"):
        written(postgres, rows, "1")


@pytest.mark.parametrize("column", PLACES)
def test_the_texts_before_it_are_written(spark: "SparkSession", postgres: str, column: str) -> None:
    """Texts beyond ASCII are no reason to refuse a row."""
    assert written(postgres, texts(spark, column, BAD).where("offset < 5"), "1") == [(1,)] * 5


def test_rows_without_offsets_are_named_by_their_range(spark: "SparkSession", postgres: str) -> None:
    """The row of an aggregation has no message offset."""
    rows = spark.range(1).selectExpr("0 AS partition", "0L AS offset", f"{BAD} AS who").drop("offset")
    with pytest.raises(SinkRejectedError, match=r"partition 0, offsets 0 to 999 .*column 'who': it has bytes"):
        written(postgres, rows, "1")


def test_a_value_that_postgres_refuses_is_named(spark: "SparkSession", postgres: str) -> None:
    """PostgreSQL's error has a line number, from which the sink finds the row."""
    schema = own_schema()
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    sink = PostgresSink(postgres, TABLE, schema=schema)
    rows = spark.range(10_000, numPartitions=4).selectExpr("0 AS partition", "id AS offset", "string(id) AS text")
    rows = rows.selectExpr("partition", "offset", "IF(offset = 7777, repeat('x', 10), text) AS text")
    sink.create_tables(rows.schema)
    with psycopg.connect(postgres, autocommit=True) as connection:
        table = sql.Identifier(schema, TABLE)
        connection.execute(sql.SQL("ALTER TABLE {} ALTER COLUMN text TYPE varchar(9)").format(table))
    with pytest.raises(SinkRejectedError, match=r"partition 0, offset 7777, column 'text': value too long"):
        sink.write(rows, [part(0, 0, 10_000)], never)


def test_a_large_partition_passes_through_this_process_in_pieces(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are then in the order of their messages. The frame may have columns of any names."""
    monkeypatch.setattr(frame_lines, "_LARGE_BYTES", 50_000)
    monkeypatch.setattr(frame_lines, "_BYTES_AT_ONCE", 20_000)
    pieces = []

    def noted(frame: "DataFrame", most_rows: int, *, at_once: bool) -> Any:  # noqa: ANN401 - batches
        pieces.append(frame.rdd.getNumPartitions())
        return local_batches(frame, most_rows, at_once=at_once)

    monkeypatch.setattr(frame_lines, "local_batches", noted)
    rows = spark.range(6_000, numPartitions=2).selectExpr(
        "int(id % 3) AS partition", "id AS offset", "id AS Marshal_Sequence"
    )
    with evaluated(rows, []) as lines:
        found = [(partition, *map(int, line.split("\t"))) for partition, line in lines]
    assert found == [(each, each, id_, id_) for each in range(3) for id_ in range(each, 6_000, 3)]
    with evaluated(rows.where("offset < 2000"), [1]) as lines:
        assert [partition for partition, _ in lines] == [number % 3 for number in range(2_000) if number % 3 != 1]
    assert pieces == [9, 2]


def test_chars_are_written_as_spark_has_them(spark: "SparkSession", postgres: str) -> None:
    """A session may keep their types; PySpark knows no Arrow types for them."""
    with session_settings(spark, {"spark.sql.preserveCharVarcharTypeInfo": "true"}):
        rows = instants(spark, [0], "cast('ab' || us as char(3)) AS fixed", "cast('x' || us as varchar(4)) AS short")
        assert written(postgres, rows, "fixed", "short", written_by=RowWriter.DRIVER) == [("ab0", "x0")]


@pytest.mark.skipif(not has("collate"), reason="Spark 3.5 has no collations")
def test_strings_with_a_collation_are_escaped(spark: "SparkSession") -> None:
    """To Unicode's collations a character that an accent follows is another one, so `replace` would not find it."""
    rows = spark.createDataFrame([("\\\u0301\t\u0301",)], "v string")
    with evaluated(rows.selectExpr("0 AS partition", "0L AS offset", "collate(v, 'UNICODE') AS v"), []) as lines:
        assert list(lines) == [(0, "0\t0\t\\\\\u0301\\t\u0301")]


def test_a_frame_that_its_user_has_persisted_stays_so(spark: "SparkSession") -> None:
    """The rows that this process reads are those that the user's code reads afterwards."""
    rows = spark.range(2).selectExpr("int(id) AS partition", "id AS offset").persist()
    with evaluated(rows, []) as lines:
        assert len(list(lines)) == 2
    assert rows.storageLevel.useMemory
    rows.unpersist()


def test_tasks_that_pass_batches_know_the_settings_of_the_session(spark: "SparkSession") -> None:
    """Rows that were lost are computed again as they were: `u` is the day of the week only by the older rules."""
    rows = spark.range(2, numPartitions=2).selectExpr(
        "date_format(timestamp_seconds(43200 + id), if(id >= 0, 'u', 'y')) AS day", "id"
    )
    for at_once in (True, False):
        with session_settings(spark, {"spark.sql.legacy.timeParserPolicy": "LEGACY"}):
            batches = local_batches(rows, 10, at_once=at_once)
            assert batches is not None
            assert [row for batch in batches for row in batch.to_pylist()] == [
                {"day": "4", "id": 0},
                {"day": "4", "id": 1},
            ]
