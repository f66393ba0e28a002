"""How `status` looks up the data topics, and which connections the command line uses."""

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
    """A cluster with topic orders of 2 partitions, and topics whose look-up fails."""

    def __init__(self) -> None:
        self.requested: list[str] = []

    def describe(self, topic: str) -> TopicDescription:
        """Return the topic, or raise the error for its name."""
        self.requested.append(topic)
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
        """Return the bounds of each partition requested."""
        assert set(partitions) <= {0, 1}
        return {partition: OffsetBounds(3, 10 + partition) for partition in partitions}


def look(topics: FakeTopics, places: dict[str, set[int]]) -> dict[str, DataTopicEnds]:
    """Look up the data topics of the fake cluster."""
    return read_data_topics(cast("Topics", topics), places)


def test_ends_are_requested_the_partitions_that_there_are() -> None:
    """A partition that is in the log but not in the topic is left out."""
    found = look(FakeTopics(), {"orders": {1, 7}})
    assert found == {"orders": DataTopicEnds(TOPIC_ID, {1: OffsetBounds(3, 11)})}


def test_a_topic_that_cannot_be_looked_at_leaves_the_others() -> None:
    """A topic that is missing or must not be described is marked; the others are known."""
    found = look(FakeTopics(), {"gone": {0}, "orders": {0}, "secret": {0}})
    assert {name: now.unknown for name, now in found.items()} == {
        "gone": LagUnknownReason.NO_TOPIC,
        "orders": None,
        "secret": LagUnknownReason.NOT_ALLOWED,
    }


def test_a_cluster_out_of_reach_gets_one_request() -> None:
    """If the data topics' Kafka does not answer, the state is shown without a timeout for each topic."""
    topics = FakeTopics()
    found = look(topics, {"far": {0}, "orders": {0}})
    assert [now.unknown for now in found.values()] == [LagUnknownReason.UNAVAILABLE, LagUnknownReason.UNAVAILABLE]
    assert topics.requested == ["far"]


def test_another_error_is_not_hidden() -> None:
    """An error that is not about access to a topic ends the command."""
    with pytest.raises(CoordinationLogChangedError):
        look(FakeTopics(), {"odd": {0}})


def test_servers_on_the_command_line_win_over_the_environments() -> None:
    """`--bootstrap-servers` and `--timeout` override the environment, whose other fields apply."""
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": "env:1", "MARSHAL_TIMEOUT_S": "3", "MARSHAL_SECURITY_PROTOCOL": "SSL"}
    connection = connection_of(ConnectionOptions(bootstrap_servers="given:1"), environment)
    assert (connection.bootstrap_servers, connection.timeout_s, connection.security_protocol) == ("given:1", 3, "SSL")
    assert connection_of(ConnectionOptions(), environment).bootstrap_servers == "env:1"
    assert connection_of(ConnectionOptions(timeout_s=0.5), environment).timeout_s == 0.5


def test_a_connection_file_stands_alone(tmp_path: Path) -> None:
    """With `--connection` the environment is ignored; `--timeout` still overrides."""
    path = tmp_path / "connection.toml"
    path.write_text('bootstrap_servers = "file:1"\ntimeout_s = 7\n', encoding="utf-8")
    environment = {"MARSHAL_BOOTSTRAP_SERVERS": "env:1", "MARSHAL_TIMEOUT_S": "3"}
    connection = connection_of(ConnectionOptions(connection_file=path), environment)
    assert (connection.bootstrap_servers, connection.timeout_s) == ("file:1", 7)
    assert connection_of(ConnectionOptions(connection_file=path, timeout_s=2), environment).timeout_s == 2


def test_no_kafka_is_an_error_that_names_all_ways() -> None:
    """An empty variable counts as missing."""
    with pytest.raises(ConfigurationError, match=r"--bootstrap-servers .* --connection .* MARSHAL_BOOTSTRAP_SERVERS"):
        connection_of(ConnectionOptions(), {"MARSHAL_BOOTSTRAP_SERVERS": " "})


def test_the_data_topics_are_where_the_coordination_topic_is(tmp_path: Path) -> None:
    """A file, or else the environment, can name another cluster."""
    environment = {"MARSHAL_DATA_BOOTSTRAP_SERVERS": "data:1"}
    path = tmp_path / "data.json"
    path.write_text('{"bootstrap_servers": "file:1"}', encoding="utf-8")
    assert data_connection_of(None, HERE, {}) is HERE
    assert data_connection_of(None, HERE, environment).bootstrap_servers == "data:1"
    assert data_connection_of(path, HERE, environment).bootstrap_servers == "file:1"
