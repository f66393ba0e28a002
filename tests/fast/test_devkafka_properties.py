"""Check the configuration of the brokers."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from marshal_dagster._internal.java_properties import render_properties
from marshal_dagster.devkafka.properties import (
    Node,
    check_settings,
    logging_configuration,
    server_properties,
)
from marshal_dagster.errors import ConfigurationError

NODES = (Node(1, 9092, 20001), Node(2, 9093, 20002), Node(3, 9094, 20003))


def test_one_broker_stands_alone() -> None:
    """A single broker is its own quorum and keeps one replica of Kafka's own topics."""
    settings = server_properties(NODES[0], NODES[:1], Path("/d"), {})
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:20001"
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:20001"
    for name in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        assert settings[f"{name}.replication.factor"] == "1"
    assert settings["transaction.state.log.min.isr"] == "1"
    assert settings["default.replication.factor"] == "1"


def test_three_brokers_keep_three_replicas() -> None:
    """Each of three brokers has all voters and its own listeners; the cluster survives the loss of one broker."""
    settings = server_properties(NODES[1], NODES, Path("/d"), {})
    assert settings["node.id"] == "2"
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:20001,2@127.0.0.1:20002,3@127.0.0.1:20003"
    assert settings["advertised.listeners"] == "PLAINTEXT://127.0.0.1:9093"
    for name in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        assert settings[f"{name}.replication.factor"] == "3"
    assert settings["transaction.state.log.min.isr"] == "2"


def test_all_listening_is_on_loopback() -> None:
    """Brokers bind and advertise no address except 127.0.0.1."""
    settings = server_properties(NODES[0], NODES, Path("/d"), {})
    for name in ("listeners", "advertised.listeners"):
        assert all("://127.0.0.1:" in each for each in settings[name].split(","))


def test_what_a_data_team_relies_on_is_left_as_kafka_has_it() -> None:
    """Topics are not created by accident, and retention is Kafka's default."""
    settings = server_properties(NODES[0], NODES[:1], Path("/d"), {})
    assert settings["auto.create.topics.enable"] == "false"
    assert not [name for name in settings if name.startswith("log.retention") or name == "log.cleanup.policy"]


def test_extra_settings_come_on_top() -> None:
    """A given setting replaces the default of the module; other settings are added."""
    settings = server_properties(
        NODES[0], NODES[:1], Path("/d"), {"auto.create.topics.enable": "true", "num.partitions": "7"}
    )
    assert (settings["auto.create.topics.enable"], settings["num.partitions"]) == ("true", "7")


@pytest.mark.parametrize("name", ["listeners", "node.id", "log.dirs", "controller.quorum.voters"])
def test_what_the_cluster_decides_itself_cannot_be_set(name: str) -> None:
    """Ports, folders and roles are refused by name."""
    with pytest.raises(ConfigurationError, match=f"^broker setting '{name}' is chosen by the cluster itself"):
        check_settings({name: "x"})


@pytest.mark.parametrize(("name", "value"), [("", "x"), ("a\nb", "x"), ("a", "x\nnode.id=9"), ("a", "x\rnode.id=9")])
def test_a_setting_is_one_line(name: str, value: str) -> None:
    """A line break cannot add another setting."""
    with pytest.raises(ConfigurationError, match="must not contain line breaks"):
        check_settings({name: value})


def test_values_are_escaped_as_java_reads_them() -> None:
    """Backslashes, leading blanks, separators in names and non-ASCII characters are read correctly by Java."""
    rendered = render_properties({"a": "C:\\x", "b c": " v", "d": "é\U0001f600", "e": "=f:g #h", "i.J:K": "\t"})
    assert rendered == "a=C:\\\\x\nb\\ c=\\ v\nd=\\u00e9\\ud83d\\ude00\ne==f:g #h\ni.J\\:K=\\t\n"


def test_logging_is_bounded_and_names_the_file() -> None:
    """The logging file is valid for any folder name, and keeps at most two files of 10 MB."""
    log = Path('/x & y/"z"/broker.log')
    root = ET.fromstring(logging_configuration(log))  # noqa: S314 - text that the library generates
    appender = root.find("./Appenders/RollingFile")
    assert appender is not None
    assert appender.get("fileName") == str(log)
    limits = [appender.find("SizeBasedTriggeringPolicy"), appender.find("DefaultRolloverStrategy")]
    assert [limit.attrib for limit in limits if limit is not None] == [{"size": "10 MB"}, {"max": "1"}]
