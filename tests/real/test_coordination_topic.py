"""The coordination topic on a real cluster: creation, checks, rejection, and one shared reader in a process."""

from contextlib import closing
from pathlib import Path

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.log import Append
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.rationalizer_cache import shared_rationalizer
from marshal_dagster.coordination.topic_settings import (
    Severity,
    check_coordination_topic,
    create_coordination_topic,
    require_safe,
)
from marshal_dagster.devkafka import running_kafka
from marshal_dagster.errors import CoordinationLogChangedError, TimestampTypeError, UnsafeTopicError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.inspection import KafkaInspector, Replicas
from marshal_dagster.protocol.messages import GroupSettings
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.topics import alter


@pytest.fixture
def created(topics: Topics, topic: MakeTopic) -> str:
    """A coordination topic as the library creates it."""
    name = topic()
    topics.delete(name)
    assert create_coordination_topic(topics, name, partitions=3).created
    return name


def test_what_is_created_is_safe(topics: Topics, created: str) -> None:
    """A created topic is safe, with a warning for its single replica. Creating it again changes nothing."""
    problems = check_coordination_topic(topics, topics.describe(created))

    assert [(problem.setting, problem.severity) for problem in problems] == [("replication factor", Severity.WARNING)]
    assert create_coordination_topic(topics, created, partitions=3).created is False
    assert require_safe(topics, topics.describe(created)) == problems


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retention.ms", "60000"),
        ("compression.type", "zstd"),
        ("unclean.leader.election.enable", "true"),
    ],
)
def test_a_dangerous_topic_is_refused_unless_reported(
    connection: KafkaConnection, topics: Topics, created: str, setting: str, value: str
) -> None:
    """A topic that breaks the protocol's promises is not safe. The danger can be accepted, or the setting corrected."""
    alter(connection, created, setting, value)

    with pytest.raises(UnsafeTopicError, match=setting):
        require_safe(topics, topics.describe(created))
    assert setting in [problem.setting for problem in require_safe(topics, topics.describe(created), allow_unsafe=True)]
    right = {"retention.ms": "-1", "compression.type": "uncompressed"}
    alter(connection, created, setting, right.get(setting, "false"))
    assert setting not in [problem.setting for problem in require_safe(topics, topics.describe(created))]


def test_kafkas_own_defaults_are_refused(topics: Topics, topic: MakeTopic) -> None:
    """A topic with the broker's default settings is rejected, with each reason."""
    name = topic(2)

    with pytest.raises(UnsafeTopicError) as refused:
        require_safe(topics, topics.describe(name))
    assert len(refused.value.reasons) == 2


def test_three_brokers_hold_three_replicas(tmp_path: Path) -> None:
    """On three brokers the topic has three replicas, of which two must be in sync.

    Claims continue without one broker, and the inspector reports which replicas are in sync.
    """
    with running_kafka(tmp_path / "kafka", brokers=3) as cluster:
        connection = KafkaConnection(bootstrap_servers=cluster.bootstrap_servers)
        with Topics(connection) as topics:
            create_coordination_topic(topics, "__marshal", partitions=2)
            assert check_coordination_topic(topics, topics.describe("__marshal")) == []
            assert topics.settings("__marshal")["min.insync.replicas"] == "2"
        with KafkaInspector(connection) as cluster_now:
            assert set(cluster_now.topic_info("__marshal").replicas.values()) == {Replicas(3, 3, has_leader=True)}
        log = KafkaLog(connection)
        claimer = Claimer(Rationalizer(log), Member("etl", "c", "run1.0"), "orders", GroupSettings())
        claimer.ensure_group_settings()
        cluster.kill(3)

        assert len(claimer.claim(range(10))) == 10
        log.close()
        with KafkaInspector(connection) as cluster_now:
            two_left = {Replicas(3, 2, has_leader=True)}
            wait_until(
                lambda: set(cluster_now.topic_info("__marshal").replicas.values()) == two_left,
                "each partition has two replicas in sync",
            )


def test_a_second_tick_reads_only_new_records(connection: KafkaConnection, topics: Topics, created: str) -> None:
    """Later readers get the shared reader that has read the log.

    After the topic was re-created they get another one.
    """
    log = KafkaLog(connection, created)
    log.append([Append(0, b"anything")] * 500)
    rationalizer = shared_rationalizer(connection, created)
    rationalizer.catch_up()
    log.append([Append(1, b"anything")] * 3)
    log.close()

    again = shared_rationalizer(KafkaConnection(bootstrap_servers=connection.bootstrap_servers), created)
    again.catch_up()
    assert again is rationalizer
    assert again.records_read == 503

    topics.delete(created)
    create_coordination_topic(topics, created, partitions=3)
    with pytest.raises(CoordinationLogChangedError):
        again.catch_up()
    assert shared_rationalizer(connection, created).catch_up().partitions[0].next_offset == 0


def test_a_topic_that_turns_to_senders_timestamps_ends_every_claim(connection: KafkaConnection, created: str) -> None:
    """A member that opened the log before finds its own record with its sender's timestamp, and loses its claims."""
    with closing(Rationalizer(KafkaLog(connection, created, 60_000), timeout_s=WITHIN_S)) as rationalizer:
        member = Member("etl", "c", new_instance_id("run"))
        claimer = Claimer(rationalizer, member, "orders", GroupSettings(60_000))
        claimer.ensure_group_settings()
        assert claimer.claim([0])
        alter(connection, created, "message.timestamp.type", "CreateTime")

        def beat_until_noticed() -> bool:
            """Return whether the member noticed. The broker applies the changed setting after a moment."""
            try:
                claimer.beat({0: 5})
            except TimestampTypeError:
                return True
            return False

        wait_until(beat_until_noticed, "the member notices its sender's timestamp")
        assert claimer.claims == {}


@pytest.mark.parametrize(
    ("setting", "value"), [("message.timestamp.type", "CreateTime"), ("cleanup.policy", "compact,delete")]
)
def test_no_reader_opens_an_unusable_topic(connection: KafkaConnection, created: str, setting: str, value: str) -> None:
    """Readers reject the topic as members do, and name the setting."""
    alter(connection, created, setting, value)

    with closing(KafkaLog(connection, created)) as log, pytest.raises(UnsafeTopicError, match=setting):
        Rationalizer(log)
