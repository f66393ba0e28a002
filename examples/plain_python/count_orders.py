"""Count the orders of each shop in a plain Python process, each order once."""

import os

import marshal_dagster as marshal


def count_orders(run_id: str | None = None) -> int:
    """Process claimed batches until there is nothing to do; return how many."""
    connection = marshal.KafkaConnection.from_environment()
    settings = marshal.GroupSettings(
        10_000, delivery=marshal.DeliveryMode.EFFECTIVELY_ONCE
    )
    request = marshal.BatchRequest(topic="orders", max_records=100_000, late_plan=True)
    sink = marshal.FileSink(os.environ.get("ORDERS_OUTPUT", "output"))
    spark, batches = None, 0
    with marshal.BatchSession.open(
        connection, "plain-orders", settings=settings, run_id=run_id
    ) as session:
        for claimed in session.batches(request, sink):
            with claimed as batch:
                if batch.idle is not None:
                    if batch.idle.reason is marshal.IdleReason.GIVEN_UP:
                        raise SystemExit(batch.idle.text)
                    print(f"{batches} batches; now nothing to do: {batch.idle.text}")
                    continue
                spark = spark or marshal.start_session(
                    marshal.spark_settings(app_name="count orders")
                )
                orders = batch.read(spark).selectExpr(
                    "partition", "CAST(value AS STRING) AS shop"
                )
                batch.write(orders.groupBy("partition", "shop").count())
                batches += 1
    return batches


if __name__ == "__main__":
    count_orders()
