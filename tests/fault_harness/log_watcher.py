"""Reads a coordination log during a run, for checkers and fault scripts."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition

from tests.conditions import wait_until
from tests.reference_reader import PlainReader

LOOK_S: Final = 0.02
MOST_AT_ONCE: Final = 500
ANSWER_WITHIN_S: Final = 10
METADATA_WITHIN_S: Final = 20


class LogWatcher:
    """Reads every record of a coordination log as soon as it is written, before retention can delete it."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        self.records: list[tuple[int, int, int, bytes]] = []
        """Coordination partition, offset, timestamp, value."""
        self.reader = PlainReader(partitions)
        self._topic = topic
        self._next = dict.fromkeys(range(partitions), 0)
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": f"watcher-{os.urandom(4).hex()}",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 50,
                "topic.metadata.refresh.interval.ms": 1_000,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])

    def look(self) -> None:
        """Read the new records."""
        for message in self._consumer.consume(MOST_AT_ONCE, 0.0):
            if message.error() is not None:
                continue
            partition, offset, value = message.partition() or 0, message.offset() or 0, message.value() or b""
            self._next[partition] = offset + 1
            self.records.append((partition, offset, message.timestamp()[1], value))
            self.reader.read(partition, offset, message.timestamp()[1], value)

    def is_at_end(self) -> bool:
        """Return whether all records that the brokers have now were read."""
        self.look()
        return all(self._next[number] >= self._bounds(self._topic, number, ANSWER_WITHIN_S)[1] for number in self._next)

    def read_to_end(self, within_s: float) -> None:
        """Read until all records were read or the time is over."""
        deadline_s = time.monotonic() + within_s
        while not self.is_at_end() and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)

    def start(self, partition: int) -> int:
        """Return the first offset that retention has not deleted."""
        return self._bounds(self._topic, partition, ANSWER_WITHIN_S)[0]

    def bounds(self, topic: str, partitions: int) -> dict[int, tuple[int, int]]:
        """Return the offsets of each partition of a topic: the first, and the next one to be written."""
        self._consumer.list_topics(topic, timeout=METADATA_WITHIN_S)  # otherwise it does not know new partitions
        return {number: self._bounds(topic, number, METADATA_WITHIN_S) for number in range(partitions)}

    def keys(self, group: str) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
        """Return each topic and partition of a group, with its state."""
        for log in self.reader.logs.values():
            yield from log["groups"].get(group, {"keys": {}})["keys"].items()

    def offsets(self, group: str) -> dict[tuple[str, int], int]:
        """Return the offset of each topic and partition of a group."""
        return {place: key["offset"] for place, key in self.keys(group) if key["offset"] is not None}

    def write(self, path: Path) -> None:
        """Write the records in the format that `marshal-dagster replay` reads."""
        with path.open("w") as file:
            for partition, offset, timestamp, value in self.records:
                text = value.decode("utf-8", "replace")
                line = {"partition": partition, "offset": offset, "timestamp": timestamp, "value": text}
                file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def _bounds(self, topic: str, partition: int, within_s: float) -> tuple[int, int]:
        """Ask until a leader answers: while leaders change, the brokers' answer is an error."""
        place = TopicPartition(topic, partition)
        low, high = wait_until(
            lambda: self._consumer.get_watermark_offsets(place, within_s),
            f"the offsets of {topic}/{partition} are known",
            within_s,
            ignored=KafkaException,
        )
        return low, high
