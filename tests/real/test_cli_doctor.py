"""`doctor` on a real broker: findings about data topics, brokers and quotas that only a broker can show."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka import Producer, TopicPartition

from marshal_dagster._internal.java import find_java
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.log import Append
from marshal_dagster.devkafka import ensure_jars
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.acls import Right
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.inspection import FROM_4, KafkaInspector, Replicas
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    DataTopic,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    Message,
    coordination_partition,
    render,
)
from tests.cli import start
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic

PARTITIONS = 4
HOUR_MS = 3_600_000

Fill = Callable[[str, int, int], None]


def about(kind: type[Message], topic: str, **fields: int | str) -> Message:
    """Return a record of group g on partition 0 of a data topic, with the current time."""
    now_s = time.time_ns() // 1_000_000_000
    return kind(instance=f"i-{topic}", client="c", group="g", topic=topic, partition=0, time_s=now_s, **fields)  # type: ignore[arg-type]


def stand_at(connection: KafkaConnection, coordination_topic: str, offsets: dict[str, tuple[str, int]]) -> None:
    """Have group g, a native one, claim partition 0 of each topic, with the given topic id and position."""
    log = KafkaLog(connection, coordination_topic)
    settings = GroupSettingsRecord(instance="i", client="c", group="g", time_s=1, settings=GroupSettings())
    first = [Append(number, render(settings)) for number in range(PARTITIONS)]
    messages = [
        message
        for topic, (topic_id, offset) in offsets.items()
        for message in (
            about(ClaimingPartition, topic),
            about(DataTopic, topic, topic_id=topic_id),
            about(Heartbeat, topic, offset=offset),
        )
    ]
    records = [Append(coordination_partition(each.topic, PARTITIONS), render(each)) for each in messages]
    acks = log.append([*first, *records])
    assert all(ack.offset is not None for ack in acks)
    log.close()


def test_what_becomes_of_data_is_found(
    connection: KafkaConnection, topics: Topics, coordination_topic: str, topic: MakeTopic, fill: Fill
) -> None:
    """`doctor` finds for each data topic of a log what happens to its unread messages.

    One topic has deleted unread messages, and retention will soon delete those of another. The others are a re-created
    topic, a compacted one and a good one.
    """
    lost, old = topic(), topic(1, {"retention.ms": str(HOUR_MS)})
    anew, compacted, fine = topic(), topic(1, {"cleanup.policy": "compact"}), topic()
    for name in (lost, anew, fine):
        fill(name, 1, 10)
    delete_up_to(connection, lost, 5)
    write_aged(connection, old, [50 * 60, 40 * 60, 60])
    ids = {name: topics.describe(name).topic_id for name in (lost, old, compacted, fine)}
    at = {lost: (ids[lost], 3), old: (ids[old], 1), compacted: (ids[compacted], 0), fine: (ids[fine], 10)}
    stand_at(connection, coordination_topic, at | {anew: (ids[fine], 4)})
    with open_transaction(connection, fine, 3):
        answer = doctor(connection, coordination_topic)
    findings = {each["name"]: each for each in answer if each["name"].startswith("data topic")}
    assert {name: finding["state"] for name, finding in findings.items()} == {
        f"data topic {lost}": "problem",
        f"data topic {old}": "warning",
        f"data topic {anew}": "problem",
        f"data topic {compacted}": "warning",
        "data topics": "ok",
    }
    assert "2 offsets were deleted unread" in findings[f"data topic {lost}"]["found"]
    assert "have 1 unread records older than half" in findings[f"data topic {old}"]["found"]
    assert f"the id {topics.describe(anew).topic_id}" in findings[f"data topic {anew}"]["found"]
    assert "open transactions hold back 3 offsets" in findings["data topics"]["found"]
    states = {each["name"]: each["state"] for each in answer}
    assert (states["clocks"], states["members"], states["rights"], states["replicas"]) == ("ok", "ok", "ok", "ok")


def doctor(connection: KafkaConnection, coordination_topic: str) -> list[dict[str, str]]:
    """Run `doctor` with a separate connection for the data topics, and return its findings."""
    environment = {
        "MARSHAL_BOOTSTRAP_SERVERS": connection.bootstrap_servers,
        "MARSHAL_COORDINATION_TOPIC": coordination_topic,
        "MARSHAL_DATA_BOOTSTRAP_SERVERS": connection.bootstrap_servers,
        "MARSHAL_DATA_TIMEOUT_S": "9",
    }
    answer = start("doctor", "--json", environment=environment)
    assert answer.err == ""
    findings: list[dict[str, str]] = answer.json["findings"]
    return findings


def delete_up_to(connection: KafkaConnection, topic: str, offset: int) -> None:
    """Delete the records before `offset`, as retention does."""
    client, _ = clients.admin(connection, client_id="test")
    (future,) = client.delete_records([TopicPartition(topic, 0, offset)]).values()
    future.result(WITHIN_S)


def write_aged(connection: KafkaConnection, topic: str, ages_s: list[int]) -> None:
    """Write a record of each age, with the sender's timestamp."""
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    now_ms = time.time_ns() // 1_000_000
    for age_s in ages_s:
        producer.produce(topic, b"message", partition=0, timestamp=now_ms - 1_000 * age_s)
    assert producer.flush(WITHIN_S) == 0


@contextmanager
def open_transaction(connection: KafkaConnection, topic: str, messages: int) -> Iterator[None]:
    """Write messages in a transaction that stays open during the block."""
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers, "transactional.id": f"open-{topic}"})
    producer.init_transactions(WITHIN_S)
    producer.begin_transaction()
    for _ in range(messages):
        producer.produce(topic, b"message", partition=0)
    producer.flush(WITHIN_S)
    try:
        yield
    finally:
        producer.abort_transaction(WITHIN_S)


def test_a_broker_reports_itself(connection: KafkaConnection, topic: MakeTopic, topics: Topics) -> None:
    """The inspector returns rights, replicas, version and offsets by time, as the client library reports them."""
    name = topic(2)
    write_aged(connection, name, [100, 10])
    now_ms = time.time_ns() // 1_000_000
    with KafkaInspector(connection) as cluster:
        topic_info = cluster.topic_info(name)
        assert (topic_info.topic_id, topic_info.rights) == (topics.describe(name).topic_id, frozenset(Right))
        assert topic_info.replicas == dict.fromkeys((0, 1), Replicas(1, 1, has_leader=True))
        assert [each.version for each in cluster.brokers()] == [FROM_4]
        assert cluster.offsets_at(name, [0, 1], now_ms - 50_000) == {0: 1}
        assert cluster.throttled_s == pytest.approx(0.0)


def test_a_client_hears_that_a_quota_holds_it_back(connection: KafkaConnection, topic: MakeTopic) -> None:
    """A request quota, set only for this client id, causes a reported throttle time after some requests."""
    name, client_id = topic(), f"held-back-{time.time_ns()}"
    set_quota(connection, client_id, "request_percentage=1")
    patient = replace(connection, timeout_s=WITHIN_S)
    with KafkaInspector(patient, client_id=client_id) as cluster:

        def is_throttled() -> bool:
            cluster.topic_info(name)
            return cluster.throttled_s > 0

        wait_until(is_throttled, "an answer reports the throttle", pause_s=0)


def set_quota(connection: KafkaConnection, client_id: str, quota: str) -> None:
    """Set a quota with Kafka's own tool, because the client library has no request for quotas."""
    java = find_java()
    classpath = ":".join(map(str, ensure_jars(java)))
    tool = [str(java.executable), "-Xmx64m", "-cp", classpath, "kafka.admin.ConfigCommand"]
    entity = ["--entity-type", "clients", "--entity-name", client_id]
    servers = ["--bootstrap-server", connection.bootstrap_servers]
    done = subprocess.run([*tool, *servers, "--alter", "--add-config", quota, *entity], timeout=WITHIN_S, check=False)
    assert done.returncode == 0
