"""Count the orders of each shop, each order once (the example of README.md)."""

from pathlib import Path

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import DataFrame

import marshal_dagster as marshal

sink = marshal.FileSink(Path(__file__).with_name("output").absolute())


@marshal.marshal_asset(
    topic="orders", sink=sink, spark_key="pyspark", max_records=1_000_000
)
def orders_per_shop(
    context: dg.AssetExecutionContext, batch: marshal.ClaimedBatch, frame: DataFrame
) -> DataFrame:
    """Number of orders of each shop; `frame` has exactly the offsets of this batch."""
    context.log.info("batch %s", batch.batch_id)
    shop = "get_json_object(CAST(value AS STRING), '$.shop') AS shop"
    return frame.selectExpr("partition", shop).groupBy("partition", "shop").count()


job = marshal.build_claimed_batch_job(orders_per_shop)
redo = marshal.build_reprocess_job(orders_per_shop)
kafka = marshal.KafkaConnectionConfig.from_environment()
settings = marshal.spark_settings(app_name="shops")

defs = dg.Definitions(
    assets=[orders_per_shop],
    jobs=[job, redo],
    schedules=[marshal.build_claimed_batch_schedule(job, cron_schedule="*/5 * * * *")],
    # The sensor starts a run of `redo` when a run has died.
    sensors=[marshal.build_stale_claim_sensor(redo, group="shops")],
    resources={
        "claimer": marshal.ClaimerResource(
            connection=kafka, group="shops", delivery="effectively_once"
        ),
        "rationalizer": marshal.RationalizerResource(connection=kafka),
        "pyspark": LazyPySparkResource(spark_config=settings),
    },
)
