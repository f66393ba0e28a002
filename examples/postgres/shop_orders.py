"""Write each order as a row in PostgreSQL and an event (docs/tutorials/postgres.md)."""

import os
import signal
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

import marshal_dagster as marshal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KAFKA = marshal.KafkaConnectionConfig.from_environment()


class CrashingSink(marshal.PostgresSink):
    """Kills the process after PostgreSQL's commit, if the variable `CRASH` is set."""

    def write(self, *args: Any, **kwargs: Any) -> marshal.WriteResult:
        """Write the rows as `PostgresSink` does."""
        result = super().write(*args, **kwargs)
        if os.environ.get("CRASH"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result


events = marshal.OutgoingEvents("order-events", key="shop")
sink = CrashingSink(os.environ["SHOP_DSN"], "shop_orders", companion=events)
outbox = marshal.OutboxResource(connection=KAFKA, dsn=dg.EnvVar("SHOP_DSN"))


@marshal.marshal_asset(
    topic="orders", sink=sink, spark_key="pyspark", max_records=3_000
)
def shop_orders(
    _: dg.AssetExecutionContext, __: marshal.ClaimedBatch, frame: "DataFrame"
) -> "DataFrame":
    """Shop and amount of each order."""
    parsed = "from_json(string(value), 'shop STRING, amount INT') AS parsed"
    return frame.selectExpr("partition", "offset", parsed).select(
        "partition", "offset", "parsed.*"
    )


defs = dg.Definitions(
    assets=[shop_orders],
    jobs=[
        marshal.build_claimed_batch_job(shop_orders),
        marshal.build_outbox_drain_job(),
    ],
    resources={
        "claimer": marshal.ClaimerResource(
            connection=KAFKA,
            group="shop-orders",
            delivery="effectively_once",
            heartbeat_interval_s=2,
        ),
        "outbox": outbox,
        "pyspark": LazyPySparkResource(
            spark_config=marshal.spark_settings(app_name="shop_orders")
        ),
    },
)
