"""Count the orders of each shop, each order once (docs/tutorials/first-batch.md)."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

import marshal_dagster as marshal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KAFKA = marshal.KafkaConnectionConfig.from_environment()


class SlowSink(marshal.FileSink):
    """Waits before it writes, which leaves time to kill the run."""

    def write(self, *args: Any, **kwargs: Any) -> marshal.WriteResult:
        """Write the rows as `FileSink` does."""
        dg.get_dagster_logger().info("the plan is recorded, writing begins in 10 s")
        time.sleep(10)
        return super().write(*args, **kwargs)


sink = SlowSink(Path(__file__).with_name("output"))


@marshal.marshal_asset(
    topic="orders", sink=sink, spark_key="pyspark", max_records=20_000
)
def orders_per_shop(
    context: dg.AssetExecutionContext, batch: marshal.ClaimedBatch, frame: "DataFrame"
) -> "DataFrame":
    """Number of orders of each shop."""
    context.log.info("batch %s", batch.batch_id)
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
