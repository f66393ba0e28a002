"""Count the orders of each shop, each order once (docs/tutorials/first-batch.md)."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
from dagster_pyspark import LazyPySparkResource

import marshal_dagster as marshal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KAFKA = marshal.KafkaConnectionConfig.from_environment()
sink = marshal.FileSink(Path(__file__).with_name("output"))


@marshal.marshal_asset(
    topic="orders", sink=sink, spark_key="pyspark", max_records=20_000
)
def orders_per_shop(
    context: dg.AssetExecutionContext, batch: marshal.ClaimedBatch, frame: "DataFrame"
) -> "DataFrame":
    """Number of orders of each shop."""
    batch.plan()  # the sink would do this just before it writes
    context.log.info("the plan of batch %s is recorded", batch.batch_id)
    time.sleep(10)  # leaves time to kill the run
    return (
        frame.selectExpr("partition", "CAST(value AS STRING) AS shop")
        .groupBy("partition", "shop")
        .count()
    )


job = marshal.build_claimed_batch_job(orders_per_shop)
redo = marshal.build_reprocess_job(orders_per_shop)
defs = dg.Definitions(
    assets=[marshal.build_topic_asset("orders"), orders_per_shop],
    asset_checks=[marshal.build_claim_checks(orders_per_shop, max_lag=100_000)],
    jobs=[job, redo],
    sensors=[
        marshal.build_stale_claim_sensor(
            redo, group="shops", default_status=dg.DefaultSensorStatus.RUNNING
        )
    ],
    resources={
        "claimer": marshal.ClaimerResource(
            connection=KAFKA, group="shops", delivery="effectively_once"
        ),
        "rationalizer": marshal.RationalizerResource(connection=KAFKA),
        "pyspark": LazyPySparkResource(
            spark_config=marshal.spark_settings(app_name="shops")
        ),
    },
)
