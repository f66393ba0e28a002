"""Tests with a local Spark session, and without Kafka."""

from collections.abc import Iterator

import pytest
from orders_asset import orders_per_shop
from pyspark.sql import SparkSession

from marshal_dagster.testing import CrashPoint, run_in_memory

ORDERS = {"orders": ["north", "south", "north"]}
COUNTS = [
    {"partition": 0, "shop": "north", "count": 2},
    {"partition": 0, "shop": "south", "count": 1},
]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small session for all tests."""
    builder = SparkSession.builder.master("local[1]").config(
        "spark.sql.shuffle.partitions", "1"
    )
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


@pytest.mark.parametrize("point", [None, CrashPoint.AFTER_WRITE])
def test_each_order_is_counted_once(
    spark: SparkSession, point: CrashPoint | None
) -> None:
    """Effectively once: a crash loses and repeats nothing."""
    result = run_in_memory(orders_per_shop, ORDERS, crash_at=point, spark=spark)
    assert sorted(result.rows, key=lambda row: str(row["shop"])) == COUNTS
    assert result.positions == {"orders": {0: 3}}
