"""Changes of topics that tests need and the library does not offer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from confluent_kafka import admin
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined] # its hints do not export it

from marshal_dagster.errors import ConfigurationError, TopicNotFoundError
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.errors import Request
from tests.conditions import WITHIN_S

API: Any = admin
"""The module as Any, for names that the client library's type hints do not export."""
BROKERS_WITHIN_S: Final = 120.0


def alter(connection: KafkaConnection, topic: str, setting: str, value: str) -> None:
    """Change one setting of a topic."""
    client = admin.AdminClient({"bootstrap.servers": connection.bootstrap_servers})
    entry = API.ConfigEntry(setting, value, incremental_operation=API.AlterConfigOpType.SET)
    resource = API.ConfigResource(API.ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in client.incremental_alter_configs([resource]).values():
        future.result(WITHIN_S)


@contextmanager
def reserved(topics: Topics, topic: str) -> Iterator[str]:
    """Reserve a name that an example uses, on a broker that tests share: no topic has it before and after."""
    with suppress(TopicNotFoundError):
        topics.delete(topic)
    try:
        yield topic
    finally:
        with suppress(TopicNotFoundError):
            topics.delete(topic)


def grow(topics: Topics, topic: str, partitions: int) -> None:
    """Increase the number of partitions of a topic to `partitions`, and wait until they can be used.

    While a broker restarts there are too few brokers for the topic's replicas; this function waits for them.
    """
    deadline_s = time.monotonic() + BROKERS_WITHIN_S
    while True:
        try:
            _grow(topics, topic, partitions)
            break
        except ConfigurationError as error:
            if "replication factor" not in str(error) or time.monotonic() > deadline_s:
                raise
        time.sleep(0.2)
    topics._await_usable(topic, partitions)


def _grow(topics: Topics, topic: str, partitions: int) -> None:
    more = NewPartitions(topic, partitions)
    topics._ask_for_one(
        Request(f"give topic {topic!r} {partitions} partitions", on_topic(topic, Right.ALTER), topic),
        lambda client, left_s: client.create_partitions([more], request_timeout=left_s, operation_timeout=left_s),
    )
