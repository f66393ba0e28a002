"""Create topic `orders` if it is missing, and write 60,000 orders (README.md)."""

import json
import os

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

SERVERS = os.environ["MARSHAL_BOOTSTRAP_SERVERS"]

admin = AdminClient({"bootstrap.servers": SERVERS})
if "orders" not in admin.list_topics(timeout=10).topics:
    admin.create_topics([NewTopic("orders", 4)])["orders"].result()

producer = Producer({"bootstrap.servers": SERVERS})
for number in range(60_000):
    order = {"shop": ("north", "south", "west")[number % 3]}
    producer.produce("orders", json.dumps(order))
    producer.poll(0)
producer.flush()
print("60,000 orders written")
