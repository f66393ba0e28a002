"""Spark's values in MariaDB: they are written as computed, whatever the session's settings, or rejected."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks import MariaDBSink
from marshal_dagster.spark.lazy_pyspark import has
from tests.session_settings import USUAL_PLANS, session_settings
from tests.sink_conformance import never, part
from tests.sink_outputs import TABLE, MariaDBOutput, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SESSIONS = [
    {"spark.sql.session.timeZone": "Europe/Berlin"} | USUAL_PLANS,
    {"spark.sql.session.timeZone": "America/St_Johns", "spark.sql.ansi.enabled": "false"},
]


@pytest.fixture(
    params=SESSIONS, ids=lambda settings: " ".join(settings[name] for name in settings if name not in USUAL_PLANS)
)
def any_session(request: pytest.FixtureRequest, spark: "SparkSession") -> Iterator["SparkSession"]:
    """The session with a user's settings."""
    with session_settings(spark, request.param):
        yield spark


def written(server: str, frame: "DataFrame", what: str, *, alter: str = "") -> list[tuple[Any, ...]]:
    """Write a frame of partition 0 to a new table, which `alter` changes. Return columns, ordered by offset."""
    output = MariaDBOutput(server, own_schema())
    output.execute(f"DROP TABLE {TABLE}")
    sink = MariaDBSink(output.dsn, TABLE)
    sink.create_tables(frame.schema)
    if alter:
        output.execute(f"ALTER TABLE {TABLE} {alter}")
    sink.write(frame, [part(0, 0, 1_000)], never)
    return output.execute("SET time_zone = '+00:00'", f"SELECT {what} FROM {TABLE} ORDER BY kafka_offset")  # noqa: S608


MOMENTS = (
    "1970-01-01T00:00:00.000001+00:00",
    "2024-10-27T00:30:00.123456+00:00",
    "2024-10-27T01:30:00.123456+00:00",
    "2024-11-03T03:30:00.000001+00:00",
    "2038-01-19T03:14:07.999999+00:00",
)


def test_values_of_each_type_are_written_as_they_are(any_session: "SparkSession", mariadb: str) -> None:
    """This includes instants on both sides of a change of the clock, and texts with each character that is escaped."""
    given = [(datetime.fromisoformat(moment) - EPOCH) // timedelta(microseconds=1) for moment in MOMENTS[1:]]
    rows = any_session.createDataFrame([(0, at, us) for at, us in enumerate(given)], "p int, o long, us long")
    frame = rows.selectExpr(
        "p AS partition",
        "o AS offset",
        "timestamp_micros(us) AS at",
        "TIMESTAMP_NTZ '0001-03-31 02:30:00.000001' AS local",
        "DATE '9999-12-31' AS day",
        "CAST('-0.000000000000000012' AS decimal(38, 18)) AS small",
        "CAST('99999999999999999999999999999999999999' AS decimal(38, 0)) AS large",
        "CAST(0.1 AS float) AS f",
        "CAST(3.4028234663852886E38 AS float) AS most",
        "CAST('4.9E-324' AS double) AS least",
        "CAST(0.1 AS double) AS d",
        *("-128Y AS b", "32767S AS s", "CAST(-2147483648 AS int) AS i", "9223372036854775807L AS l", "o = 0 AS yes"),
        "concat('M\u00fcller \U0001f600 \\'q\\' \"d\" % %s {x} \\\\ ', char(0), '\t\n\r ') AS text",
        "unhex('00FF275C') AS bytes",
        "named_struct('at', timestamp_micros(us), 'q', '\"\\'\\\\') AS nested",
        "array(1L, NULL) AS listed",
        "CAST(NULL AS string) AS missing",
    )
    what = "at, local, day, small, large, most, least, d, b, s, i, l, yes, text, bytes, missing, f = CAST(0.1 AS FLOAT)"
    found = written(mariadb, frame, f"{what}, CAST(f AS DOUBLE), listed, JSON_VALUE(nested, '$.at')")
    for index, (moment, row) in enumerate(zip(MOMENTS[1:], found, strict=True)):
        assert row[:5] == (
            datetime.fromisoformat(moment).replace(tzinfo=None),
            datetime(1, 3, 31, 2, 30, 0, 1),  # noqa: DTZ001 - a local time
            date(9999, 12, 31),
            Decimal("-0.000000000000000012"),
            Decimal("9" * 38),
        )
        assert row[6:13] == (5e-324, 0.1, -128, 32767, -(2**31), 2**63 - 1, int(index == 0))
        assert row[13] == "M\u00fcller \U0001f600 'q' \"d\" % %s {x} \\ \0\t\n\r "
        assert row[14:16] == (b"\x00\xff'\\", None)
        assert row[17] == pytest.approx(0.10000000149011612, rel=1e-12)
        assert row[18].replace(" ", "") == "[1,null]"
        assert row[19] == moment.removesuffix("+00:00") + "Z"


@pytest.mark.skipif(not has("collate"), reason="Spark 3.5 has no collations")
def test_strings_with_a_collation_are_written_as_they_are(spark: "SparkSession", mariadb: str) -> None:
    """To Unicode's collations a character that an accent follows is another one, and NUL is none.

    A quote that is not escaped would end the literal.
    """
    text = "a\\\u0301'\u0301\0,\u0301\\"
    rows = spark.createDataFrame([(text,)], "v string")
    frame = rows.selectExpr("0 AS partition", "0L AS offset", "collate(v, 'UNICODE') AS v")
    assert written(mariadb, frame, "v") == [(text,)]


BAD = [
    ("string(X'4DFC6C6C6572')", "bytes that are not UTF-8"),
    ("array('a', string(X'4DFC6C6C6572'))", "bytes that are not UTF-8"),
    ("double('NaN')", "NaN or infinite"),
    ("float('-Infinity')", "NaN or infinite"),
    ("date_from_unix_date(2932897)", "its year is not one of 1 to 9999"),
    ("date_from_unix_date(-719529)", "its year is not one of 1 to 9999"),
    ("timestamp_micros(0)", "Incorrect datetime value"),
    ("timestamp_micros(2147483648000000)", "Incorrect datetime value"),
    ("timestamp_micros(253402300800000000)", "its year is not one of 1 to 9999"),
]


def test_values_that_mariadb_cannot_store_are_named(spark: "SparkSession", mariadb: str) -> None:
    """The error names partition and offset of the message, and the column. Nothing is written."""
    for bad, why in BAD:
        rows = spark.range(7, numPartitions=1).selectExpr(
            "0 AS partition", "id AS offset", f"IF(id = 5, {bad}, NULL) AS v"
        )
        with pytest.raises(SinkRejectedError, match=rf"partition 0, offset 5, column 'v': .*{why}"):
            written(mariadb, rows, "1")


def test_many_rows_are_inserted_in_pieces(spark: "SparkSession", mariadb: str) -> None:
    """A row that MariaDB rejects is found among those of its statement."""
    rows = spark.range(3_000, numPartitions=3).selectExpr("0 AS partition", "id AS offset", "repeat('x', 1000) AS v")
    assert written(mariadb, rows.where("offset < 1000"), "v")[-1] == ("x" * 1000,)
    bad = rows.selectExpr("partition", "offset", "IF(offset = 777, concat(v, ' '), v) AS v").where("offset < 1000")
    with pytest.raises(SinkRejectedError, match=r"partition 0, offset 777, column 'v': Data truncated"):
        written(mariadb, bad, "1", alter="MODIFY v varchar(1000) CHARACTER SET utf8mb4")


def test_a_result_with_many_columns_of_strings_is_written(spark: "SparkSession", mariadb: str) -> None:
    """Each is checked for bytes that are not UTF-8. With nested conditions Spark would plan for many minutes."""
    columns = [f"concat('text ', id + {number}) AS c{number}" for number in range(30)]
    rows = spark.range(2, numPartitions=1).selectExpr("0 AS partition", "id AS offset", *columns)
    assert written(mariadb, rows, "c0, c29") == [("text 0", "text 29"), ("text 1", "text 30")]
