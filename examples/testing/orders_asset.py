"""A code location whose asset and op are tested without Kafka."""

from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

import marshal_dagster as marshal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KAFKA = marshal.KafkaConnectionConfig(bootstrap_servers="kafka:9092")


class Webhook(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Notifies a shop of an order."""

    url: str

    def send(self, order: str) -> None:
        """Post the order."""
        raise NotImplementedError


@marshal.marshal_asset(
    topic="orders", sink=marshal.FileSink("/data/orders_per_shop"), spark_key="pyspark"
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


def notify(
    context: dg.OpExecutionContext,
    batch: marshal.ClaimedBatch,
    frame: "DataFrame | list[dict[str, Any]]",
) -> None:
    """Send each order; `frame` is a list in tests, which then need no Spark."""
    context.log.info("batch %s", batch.batch_id)
    for row in frame if isinstance(frame, list) else frame.collect():
        context.resources.webhook.send(row["value"].decode())


notify_shops = marshal.build_claimed_batch_op(
    notify,
    name="notify_shops",
    topic="orders",
    required_resource_keys=["webhook"],
    claimer_key="notifier",
)
defs = dg.Definitions(
    assets=[orders_per_shop],
    jobs=[
        marshal.build_claimed_batch_job(orders_per_shop),
        marshal.build_claimed_batch_job(notify_shops),
    ],
    resources={
        "claimer": marshal.ClaimerResource(
            connection=KAFKA, group="shops", delivery="effectively_once"
        ),
        "notifier": marshal.ClaimerResource(
            connection=KAFKA, group="notifier", delivery="at_least_once"
        ),
        "webhook": Webhook(url="https://shops.example"),
        "pyspark": LazyPySparkResource(
            spark_config=marshal.spark_settings(app_name="shops")
        ),
    },
)
