"""The function that processes the messages of a batch."""

from typing import TYPE_CHECKING

import dagster as dg

from marshal_dagster import ClaimedBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def orders(
    context: dg.AssetExecutionContext, batch: ClaimedBatch, frame: "DataFrame"
) -> "DataFrame":
    """Number of orders of each shop."""
    context.log.info("batch %s", batch.batch_id)
    shop = "CAST(value AS STRING) AS shop"
    return frame.selectExpr("partition", shop).groupBy("partition", "shop").count()
