"""What tests do with topics beyond the library."""

from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined] # its hints do not export it

from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.errors import Request


def grow(topics: Topics, topic: str, partitions: int) -> None:
    """Give a topic more partitions, `partitions` in all, and wait until they can be used."""
    more = NewPartitions(topic, partitions)
    topics._ask_for_one(
        Request(f"give topic {topic!r} {partitions} partitions", on_topic(topic, Right.ALTER), topic),
        lambda client, left_s: client.create_partitions([more], request_timeout=left_s, operation_timeout=left_s),
    )
    topics._await_usable(topic, partitions)
