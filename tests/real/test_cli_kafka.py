"""`kafka up`, `status` and `down` as a user calls them, each in its own process."""

import os
from pathlib import Path

import psutil
import pytest

from tests.cli import start


def test_a_kafka_is_started_looked_at_stopped_and_wiped(tmp_path: Path) -> None:
    """One broker starts on a free port, keeps its topics over a stop, and is removed completely by `--wipe`."""
    directory = tmp_path / "kafka"
    try:
        first = start("kafka", "up", "--port", "0", "--directory", directory, "--json")
        assert (first.code, first.json["up"], first.json["started"]) == (0, True, [1])
        servers, (broker,) = first.json["bootstrap_servers"], first.json["brokers"]
        assert "kafka.Kafka" in psutil.Process(broker["pid"]).cmdline()
        again = start("kafka", "up", "-d", directory)
        assert (again.code, again.err) == (0, "")
        assert again.out.splitlines()[-1] == f"export MARSHAL_BOOTSTRAP_SERVERS={servers}"
        assert "already up" in again.out
        created = start("topic", "create", "-b", servers, "--json").json
        up = start("kafka", "status", "-d", directory)
        assert (up.code, broker["address"] in up.out, " up " in up.out) == (0, True, True)

        down = start("kafka", "down", "-d", directory)
        assert (down.code, "its data is kept" in down.out) == (0, True)
        stopped = start("kafka", "status", "-d", directory, "--json")
        assert (stopped.code, stopped.json["up"], stopped.json["brokers"][0]["pid"]) == (3, False, None)
        assert start("status", "-b", servers, "--timeout", "1").code == 3

        restarted = start("kafka", "up", "-d", directory, "--json").json
        assert restarted["cluster_id"] == first.json["cluster_id"]
        check = start("topic", "check", "-b", restarted["bootstrap_servers"], "--json").json
        assert check["topic_id"] == created["topic_id"]
    finally:
        wiped = start("kafka", "down", "--wipe", "-d", directory)
    assert (wiped.code, "its data is deleted" in wiped.out) == (0, True)
    assert not directory.exists()
    none = start("kafka", "status", "-d", directory)
    assert (none.code, none.err) == (3, "")
    assert "There is no Kafka in" in none.out
    assert start("kafka", "down", "-d", directory).code == 0


def test_a_port_in_use_is_one_line(kafka: str, tmp_path: Path) -> None:
    """If another process has the port, the error names the port, and nothing is started."""
    port = kafka.rpartition(":")[2]
    answer = start("kafka", "up", "--port", port, "--directory", tmp_path)
    assert (answer.code, answer.out) == (3, "")
    assert f"port {port} is in use" in answer.error


@pytest.mark.parametrize("java_home", ["missing", "old"])
def test_a_java_that_will_not_do_is_one_line(tmp_path: Path, java_home: str) -> None:
    """Without Java, or with an old one, nothing is started and the error states the required version."""
    launcher = tmp_path / "old" / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n", encoding="utf-8")
    launcher.chmod(0o755)
    environment = {"JAVA_HOME": os.fspath(tmp_path / java_home)}
    answer = start("kafka", "up", "--port", "0", "--directory", tmp_path / "kafka", environment=environment)
    assert (answer.code, answer.out) == (2, "")
    assert "Java 17 or newer" in answer.error
