"""Create the topics, the tables of the sink and the outbox, if they do not exist."""

from delays import KAFKA, outbox, sink
from pyspark.sql.types import StructType

from marshal_dagster.kafka.admin_client import Topics

PARTITIONS = 4

with Topics(KAFKA.to_connection("connection")) as topics:
    copies = min(3, topics.broker_count())
    for name in ("flights", "delays"):
        topics.create(name, PARTITIONS, copies)
columns = StructType().add("partition", "integer").add("offset", "long")
sink.create_tables(
    columns.add("carrier", "string").add("flight", "integer").add("arr_delay", "double")
)
outbox.create()
