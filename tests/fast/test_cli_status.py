"""How `status` looks at the data topics, and which connections the command line means."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest

from marshal_dagster.cli.connections import connection_of, data_connection_of
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.cli.world_reader import read_data_topics
from marshal_dagster.cli.world_view import DataTopicEnds, LagUnknownReason
from marshal_dagster.errors import (
    AuthorizationError,
    ConfigurationError,
    CoordinationLogChangedError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.kafka.admin_client import TopicDescription, Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.state import OffsetBounds

TOPIC_ID = "A" * 22
HERE = KafkaConnection(bootstrap_servers="here:1")


class FakeTopics:
    """A cluster with topic orders of 2 partitions, and topics that cannot be looked at."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def describe(self, topic: str) -> TopicDescription:
        """Give the topic, or fail as its name says."""
        self.asked.append(topic)
        errors = {
            "gone": TopicNotFoundError,
            "secret": AuthorizationError,
            "far": UnavailableError,
            "odd": CoordinationLogChangedError,
        }
        if topic in errors:
            raise errors[topic](topic)
        return TopicDescription(topic, TOPIC_ID, (0, 1), 1)

    def offsets(self, _: str, partitions: Iterable[int]) -> dict[int, OffsetBounds]:
        """Give the bounds of each partition asked for."""
        assert set(partitions) <= {0, 1}
        return {partition: OffsetBounds(3, 10 + partition) for partition in partitions}


def look(topics: FakeTopics, places: dict[str, set[int]]) -> dict[str, DataTopicEnds]:
    """Look at the data topics of a cluster that is none."""
    return read_data_topics(cast("Topics", topics), places)


def test_ends_are_asked_for_the_partitions_that_there_are() -> None:
    """A partition that the log names and the topic has not is left out."""
    found = look(FakeTopics(), {"orders": {1, 7}})
    assert found == {"orders": DataTopicEnds(TOPIC_ID, {1: 11})}


def test_a_topic_that_cannot_be_looked_at_leaves_the_others() -> None:
    """A topic that is missing or must not be seen is marked, the others are known."""
    found = look(FakeTopics(), {"gone": {0}, "orders": {0}, "secret": {0}})
    assert {name: now.unknown for name, now in found.items()} == {
        "gone": LagUnknownReason.NO_TOPIC,
        "orders": None,
        "secret": LagUnknownReason.NOT_ALLOWED,
    }


def test_a_cluster_out_of_reach_is_asked_once() -> None:
    """When the data topics' Kafka does not answer, the state is shown without waiting for each topic."""
    topics = FakeTopics()
    found = look(topics, {"far": {0}, "orders": {0}})
    assert [now.unknown for now in found.values()] == [LagUnknownReason.UNAVAILABLE, LagUnknownReason.UNAVAILABLE]
    assert topics.asked == ["far"]


def test_another_error_is_not_hidden() -> None:
    """What says nothing about a topic's visibility ends the command."""
    with pytest.raises(CoordinationLogChangedError):
        look(FakeTopics(), {"odd": {0}})


def test_servers_on_the_command_line_win_over_the_environments() -> None:
    """`--bootstrap-servers` replaces the variable, other fields stay the environment's, `--timeout` wins."""
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": "env:1", "MARSHAL_TIMEOUT_S": "3", "MARSHAL_SECURITY_PROTOCOL": "SSL"}
    connection = connection_of(ConnectionOptions(bootstrap_servers="given:1"), environment)
    assert (connection.bootstrap_servers, connection.timeout_s, connection.security_protocol) == ("given:1", 3, "SSL")
    assert connection_of(ConnectionOptions(), environment).bootstrap_servers == "env:1"
    assert connection_of(ConnectionOptions(timeout_s=0.5), environment).timeout_s == 0.5


def test_a_connection_file_stands_alone(tmp_path: Path) -> None:
    """With `--connection` the environment is not looked at; `--timeout` still wins."""
    path = tmp_path / "connection.toml"
    path.write_text('bootstrap_servers = "file:1"\ntimeout_s = 7\n', encoding="utf-8")
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": "env:1", "MARSHAL_TIMEOUT_S": "3"}
    connection = connection_of(ConnectionOptions(connection_file=path), environment)
    assert (connection.bootstrap_servers, connection.timeout_s) == ("file:1", 7)
    assert connection_of(ConnectionOptions(connection_file=path, timeout_s=2), environment).timeout_s == 2


def test_no_kafka_is_an_error_that_names_all_ways() -> None:
    """An empty variable counts as none."""
    with pytest.raises(ConfigurationError, match=r"--bootstrap-servers .* --connection .* MARSHAL_BOOTSTRAP_SERVERS"):
        connection_of(ConnectionOptions(), {"MARSHAL_BOOTSTRAP_SERVERS": " "})


def test_the_data_topics_are_where_the_coordination_topic_is(tmp_path: Path) -> None:
    """Unless a file, or else the environment, names another cluster."""
    environment = {"MARSHAL_DATA_BOOTSTRAP_SERVERS": "data:1"}
    path = tmp_path / "data.json"
    path.write_text('{"bootstrap_servers": "file:1"}', encoding="utf-8")
    assert data_connection_of(None, HERE, {}) is HERE
    assert data_connection_of(None, HERE, environment).bootstrap_servers == "data:1"
    assert data_connection_of(path, HERE, environment).bootstrap_servers == "file:1"
