"""Process one batch in a process of its own: `python -m benchmarks.run_batch`, with `Orders` as JSON on stdin.

The process claims, starts a Spark session or connects to a server, counts the records of the batch, and commits. It
prints `done` after the commit.
"""

import sys
from typing import TYPE_CHECKING

from pydantic import BaseModel

from benchmarks.bare import DONE
from marshal_dagster.batches import BatchRequest, BatchSession
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.spark.connect_session import connect, disconnect
from marshal_dagster.spark.session import spark_settings, start_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Orders(BaseModel):
    """The batch to process, with the Connect server at `url` or, without one, in a new Spark session."""

    servers: str
    coordination_topic: str
    topic: str
    group: str
    records: int
    url: str | None = None
    token: str | None = None
    settings: dict[str, str] = {}


def open_session(orders: Orders) -> "SparkSession":
    """Return the Spark session."""
    if orders.url is not None:
        return connect(orders.url, token=orders.token)
    return start_session(spark_settings(app_name="benchmark", extra=orders.settings))


def main() -> None:
    """Process the batch and print `done`."""
    orders = Orders.model_validate_json(sys.stdin.read())
    connection = KafkaConnection(bootstrap_servers=orders.servers)
    log, data = KafkaLog(connection, orders.coordination_topic), Topics(connection)
    delivery = BatchSession(
        log=log,
        data=data,
        connection=connection,
        group=orders.group,
        client="benchmark",
        run_id="3b0e6b5c-6f64-4a4e-9d1b-0c8f6a2d7e11",
        settings=GroupSettings(),
    )
    with delivery.claimed_batch(BatchRequest(topic=orders.topic, max_records=orders.records)) as batch:
        spark = open_session(orders)
        processed = batch.read(spark).count()
    if not batch.committed or processed != orders.records:
        sys.exit(f"{processed} of {orders.records} records were processed, committed: {batch.committed}")
    print(DONE, flush=True)
    data.close()
    log.close()
    if orders.url is None:
        spark.stop()
    else:
        disconnect(spark)


if __name__ == "__main__":
    main()
