"""Clients while the broker stops and restarts."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from marshal_dagster.devkafka import KafkaCluster, running_kafka
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.state import OffsetBounds
from tests.conditions import WITHIN_S, wait_for_line, wait_until

RESTARTS = 2

ASKS_ON_AND_ON = """
import sys
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.admin_client import Topics

def round_of_questions(topics):
    topics.describe("t")
    topics.offsets("t", [0, 1])
    topics.settings("t")
    topics.broker_count()
    text = topics.commit_group_offsets("g", "t", {0: 7})
    if text is not None:
        raise UnavailableError(text)
    return topics.group_offsets("g", "t")

with Topics(KafkaConnection(bootstrap_servers=sys.argv[1], timeout_s=0.7)) as topics:
    while True:
        try:
            print("answers", round_of_questions(topics), flush=True)
        except UnavailableError as error:
            print("none:", error, flush=True)
"""


REFUSED = re.compile(r"Connection refused \(tried for 2 s\).*start Kafka there")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    """A separate broker, which the test stops."""
    with running_kafka(tmp_path / "kafka") as cluster:
        yield cluster


def test_questions_are_answered_again_after_each_restart(cluster: KafkaCluster) -> None:
    """A process with one client reports errors during the outage, survives it, and gets answers afterwards."""
    with Topics(KafkaConnection(bootstrap_servers=cluster.bootstrap_servers)) as topics:
        topics.create("t", 2, 1)
    command = [sys.executable, "-c", ASKS_ON_AND_ON, cluster.bootstrap_servers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        try:
            wait_for_line(asking, "answers {0: 7}")
            for _ in range(RESTARTS):
                cluster.kill(1)
                wait_for_line(asking, "none: Kafka at ")
                wait_for_line(asking, "none: Kafka at ")
                cluster.start(1)
                wait_for_line(asking, "answers {0: 7}")
            assert asking.poll() is None
        finally:
            asking.kill()
        assert asking.stderr is not None
        assert asking.stderr.read() == ""


def test_a_broker_that_is_down_is_reported_in_time_and_found_when_it_is_back(cluster: KafkaCluster) -> None:
    """One client reports the cause while the broker is down, and works afterwards, also for a re-created topic."""
    connection = KafkaConnection(bootstrap_servers=cluster.bootstrap_servers, timeout_s=2)
    empty = {0: OffsetBounds(0, 0)}
    with Topics(connection) as topics, Topics(replace(connection, timeout_s=WITHIN_S)) as patient:

        def is_empty() -> bool:
            return topics.offsets("t", [0]) == empty

        patient.create("t", 1, 1)
        wait_until(is_empty, "the offsets are known", ignored=UnavailableError)
        cluster.kill(1)
        for _ in range(2):
            wait_until(lambda: REFUSED.search(failure_of(topics)), "the error has the cause")
        cluster.start(1)
        patient.delete("t")
        patient.create("t", 1, 1)
        wait_until(is_empty, "the offsets are known again", ignored=UnavailableError)


def failure_of(topics: Topics) -> str:
    """Return the error of a request, which must fail. On a busy machine the cause may come after its time limit."""
    with pytest.raises(UnavailableError) as failed:
        topics.offsets("t", [0])
    return str(failed.value)


def test_a_client_waits_for_a_broker_that_starts(cluster: KafkaCluster) -> None:
    """`reach` with enough time returns once the broker is up, although nothing listened at first."""
    cluster.kill(1)
    connection = KafkaConnection(bootstrap_servers=cluster.bootstrap_servers, timeout_s=WITHIN_S)
    client, log = clients.producer(connection, delivery_timeout_ms=1000, client_id="early")
    with pytest.raises(UnavailableError):
        clients.reach(client, log, timeout_s=0.5)
    cluster.start(1)
    clients.reach(client, log, timeout_s=WITHIN_S)
    assert log.reason is None
    clients.close_client(client, log)
