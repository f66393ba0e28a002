"""A code location with assets, in addition to the demo's, which has none: orders per shop, and claim checks."""

import os
from typing import TYPE_CHECKING

import dagster as dg

from marshal_dagster.assets.checks import build_claim_checks
from marshal_dagster.assets.decorator import marshal_asset
from marshal_dagster.assets.topics import build_topic_asset
from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TOPIC = os.environ["TEST_TOPIC"]


@marshal_asset(
    topic=TOPIC,
    max_records=100,
    max_batches=3,
    spark_config={"spark.master": "local[1]", "spark.driver.memory": "512m"},
)
def orders_per_shop(context: dg.AssetExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> None:
    """Orders of each shop."""
    shops = frame.groupBy("key").count().count()
    context.log.info("batch %s: %d shops", batch.batch_id, shops)


defs = dg.Definitions(
    assets=[build_topic_asset(TOPIC), orders_per_shop],
    asset_checks=[build_claim_checks(orders_per_shop, max_lag=0)],
    executor=dg.in_process_executor,
    resources={
        "claimer": ClaimerResource(
            connection=KafkaConnectionConfig(bootstrap_servers=os.environ["MARSHAL_BOOTSTRAP_SERVERS"]),
            coordination_topic="__marshal",
            group="shops",
            heartbeat_interval_s=5,
        )
    },
)
