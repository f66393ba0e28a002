"""Create the topics and tables, and write 12,000 orders."""

import json

from confluent_kafka import Producer
from pyspark.sql.types import StructType
from shop_orders import KAFKA, outbox, sink

from marshal_dagster.kafka.admin_client import Topics

with Topics(KAFKA.to_connection("connection")) as topics:
    for name in ("orders", "order-events"):
        topics.create(name, partitions=4, replication=1)

columns = StructType().add("partition", "integer").add("offset", "long")
sink.create_tables(columns.add("shop", "string").add("amount", "integer"))
outbox.create()

producer = Producer({"bootstrap.servers": KAFKA.bootstrap_servers})
for number in range(12_000):
    order = {"shop": ("north", "south", "west")[number % 3], "amount": number % 10}
    producer.produce("orders", json.dumps(order), partition=number % 4)
    producer.poll(0)
producer.flush()
print("12,000 orders written")
