"""An output topic in at-least-once mode: its readers recognise repeated records by their headers."""

from typing import TYPE_CHECKING

import pytest

from marshal_dagster.sinks import with_source_headers
from marshal_dagster.sinks.conformance.target import part
from tests.real.conftest import MakeTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_repeated_records_are_reported_by_their_headers(spark: "SparkSession", kafka: str, topic: MakeTopic) -> None:
    """A reader that keeps one record of each source message and generation gets each once.

    Existing headers are kept.
    """
    output = topic()
    frame = spark.range(6).selectExpr(
        "CAST(id % 2 AS int) AS partition",
        "id AS offset",
        "CAST(id AS string) AS value",
        "IF(id < 3, array(named_struct('key', 'mine', 'value', binary('x'))), NULL) AS headers",
    )
    for epoch, generation in ((10, 0), (11, 0), (21, 20)):
        ranges = [part(number, 0, 6, epoch=epoch, generation=generation) for number in (0, 1)]
        written = with_source_headers(frame, ranges).select("value", "headers")
        written.write.format("kafka").options(**{"kafka.bootstrap.servers": kafka, "topic": output}).save()
    options = {"kafka.bootstrap.servers": kafka, "subscribe": output, "includeHeaders": "true"}
    found = spark.read.format("kafka").options(**options).load().selectExpr("string(value)", "headers").collect()
    reported = [(row.value, {header.key: bytes(header.value).decode() for header in row.headers}) for row in found]
    assert len(reported) == 18
    assert all(headers.get("mine") == ("x" if int(value) < 3 else None) for value, headers in reported)
    names = ("marshal-group", "marshal-topic", "marshal-partition", "marshal-offset", "marshal-generation")
    once = {tuple(headers[name] for name in names): value for value, headers in reported}
    sources = {("g", "t", str(n % 2), str(n), generation): str(n) for n in range(6) for generation in ("0", "20")}
    assert once == sources
    assert {headers["marshal-epoch"] for _, headers in reported} == {"10", "11", "21"}


def test_ranges_are_of_one_topic(spark: "SparkSession") -> None:
    """The headers cannot distinguish equal partitions of two topics, so this is an error."""
    frame = spark.range(1).selectExpr("0 AS partition", "'x' AS value")
    with pytest.raises(ValueError, match="more than one group or topic"):
        with_source_headers(frame, [part(0, 0, 1), part(1, 0, 1, topic="u")])


@pytest.mark.parametrize("partition", ["7", "NULL"])
def test_a_row_of_no_range_fails_the_write(spark: "SparkSession", partition: str) -> None:
    """Without the error the row's record would be missing although the batch is committed.

    A column name may have a dot.
    """
    frame = spark.range(1).selectExpr(f"CAST({partition} AS int) AS partition", "'x' AS value", "1 AS `a.b`")
    with pytest.raises(Exception, match="a partition that this batch did not read"):
        with_source_headers(frame, [part(0, 0, 1)]).collect()
