"""Makes what the example needs, where it is missing: the topics, the tables of the result, and the outbox."""

from delays import KAFKA, outbox, sink
from pyspark.sql.types import StructType

from marshal_dagster.kafka.topics import Topics
from marshal_dagster.outbox.harvester import OutboxTopics

PARTITIONS = 4

connection = KAFKA.to_connection("connection")
with Topics(connection) as topics:
    copies = min(3, topics.broker_count())
    for name in ("flights", "delays"):
        topics.create(name, PARTITIONS, copies)
columns = StructType().add("partition", "integer").add("offset", "long")
sink.create_tables(columns.add("carrier", "string").add("flight", "integer").add("arr_delay", "double"))
OutboxTopics.of(outbox.tables().create().uid).create(connection)
