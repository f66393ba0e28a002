"""Runs in memory with a real Spark session, without Kafka."""

import runpy
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from test_orders_asset_spark import test_each_order_is_counted_once

import marshal_dagster as marshal
from marshal_dagster.spark.reader import read_schema
from marshal_dagster.testing import CrashPoint, MemoryRecord, run_in_memory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["test_each_order_is_counted_once"]


def test_a_frame_is_like_that_of_kafka(spark: "SparkSession") -> None:
    """The frame has the schema of a read from Kafka, and the records; the run also works without a session passed."""
    seen: list[Any] = []

    def see(context: dg.OpExecutionContext, batch: marshal.ClaimedBatch, frame: "DataFrame") -> None:  # noqa: ARG001
        assert frame.schema == read_schema()
        seen.extend(frame.collect())

    op = marshal.build_claimed_batch_op(see, name="see", topic="orders", min_partitions=2, count_records=True)
    record = {"key": "k", "value": b"\xff", "headers": {"trace": "7"}, "partition": 1}
    result = run_in_memory(op, {"orders": [record, "second"]}, partitions=2)
    assert {row["partition"] for row in seen} == {0, 1}
    (row,) = [row for row in seen if row["key"] is not None]
    assert bytes(row["value"]) == b"\xff"
    assert [(header["key"], bytes(header["value"])) for header in row["headers"]] == [("trace", b"7")]
    assert isinstance(result.records[0], MemoryRecord)
    assert spark.range(1).count() == 1  # the session still works


def test_the_file_of_the_readme_counts_each_order_once(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between the write and the commit changes nothing, and the definitions load without Kafka."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", "kafka:9092")
    quick_start = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "quick_start" / "orders_per_shop.py"))
    dg.Definitions.validate_loadable(quick_start["defs"])
    orders = ['{"shop": "north"}', '{"shop": "south"}', '{"shop": "north"}']
    result = run_in_memory(
        quick_start["orders_per_shop"], {"orders": orders}, crash_at=CrashPoint.AFTER_WRITE, spark=spark
    )
    counts: Counter[Any] = Counter()
    for row in result.rows:
        counts[row["shop"]] += int(str(row["count"]))
    assert counts == {"north": 2, "south": 1}
