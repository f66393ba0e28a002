"""Log time that passes at once, so that claims of dead members become stale while no lease of a live one ends.

With a short heartbeat interval a claim would also become stale if the machine is slow for some seconds. So tests use a
long one, and do not wait for two of them.
"""

import time
from contextlib import suppress
from functools import partial
from typing import Final

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, KafkaException, Message, Producer

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import Mark, render
from marshal_dagster.protocol.staleness import stale_after_ms
from tests.conditions import WITHIN_S, wait_until
from tests.topics import alter

_LATEST_MS: Final = 2**63 - 1
_STORED_AS: Final = {"CreateTime": TIMESTAMP_CREATE_TIME, "LogAppendTime": TIMESTAMP_LOG_APPEND_TIME}
_latest_ms: dict[tuple[str, str], int] = {}
"""The log time of each coordination topic, if this process has moved it."""


def let_claims_become_stale(connection: KafkaConnection, topic: str, heartbeat_interval_ms: int) -> None:
    """Move the log time of a coordination topic past the time at which each present claim becomes stale.

    A `Mark` with a later timestamp does that, and log time never goes back (protocol.md, section 2). The topic stores
    senders' timestamps for a moment, so no member may write meanwhile.
    """
    place = connection.bootstrap_servers, topic
    now_ms = max(time.time_ns() // 1_000_000, _latest_ms.get(place, 0))
    _latest_ms[place] = at_ms = now_ms + stale_after_ms(heartbeat_interval_ms) + 1
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    with suppress(KafkaException):  # brokers before Kafka 3.6 have no such limit
        alter(connection, topic, "message.timestamp.after.max.ms", str(_LATEST_MS))
    for name, stored_as in _STORED_AS.items():
        alter(connection, topic, "message.timestamp.type", name)
        for partition in producer.list_topics(topic, WITHIN_S).topics[topic].partitions:
            is_in_effect = partial(_is_mark_stored, producer, topic, partition, at_ms, stored_as)
            wait_until(is_in_effect, f"partition {partition} of {topic} stores {name}")


def _is_mark_stored(producer: Producer, topic: str, partition: int, at_ms: int, stored_as: int) -> bool:
    """Write a `Mark` with a timestamp. Return whether the broker has stored this type of timestamp."""
    stored: list[int] = []

    def note(error: object, message: Message) -> None:
        assert error is None, error
        stored.append(message.timestamp()[0])

    mark = Mark(instance="clock", client="test", group="clock", time_s=at_ms // 1_000)
    producer.produce(topic, render(mark), partition=partition, timestamp=at_ms, on_delivery=note)
    assert producer.flush(WITHIN_S) == 0
    return stored == [stored_as]
