"""Write 60,000 orders to topic `orders`, and create the topic if it is missing.

An order is the name of its shop.
"""

import os

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

ORDERS, PARTITIONS, SHOPS = 60_000, 4, ("north", "south", "west")
SERVERS = os.environ["MARSHAL_BOOTSTRAP_SERVERS"]

admin = AdminClient({"bootstrap.servers": SERVERS})
if "orders" not in admin.list_topics(timeout=10).topics:
    admin.create_topics([NewTopic("orders", PARTITIONS)])["orders"].result()

producer = Producer({"bootstrap.servers": SERVERS})
for number in range(ORDERS):
    producer.produce(
        "orders", SHOPS[number % len(SHOPS)], partition=number % PARTITIONS
    )
    producer.poll(0)
producer.flush()
print(f"{ORDERS:,} orders written")
