"""The Kafka for one machine: real brokers are started, inspected, killed and stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]

from marshal_dagster._internal.ports import free_port, is_free
from marshal_dagster.devkafka import (
    BrokerFailedError,
    ClusterMismatchError,
    KafkaCluster,
    KafkaStatus,
    PortInUseError,
    running_kafka,
)
from tests.conditions import WITHIN_S, wait_until


@contextmanager
def cluster_in(directory: Path, brokers: int = 1, settings: Mapping[str, str] | None = None) -> Iterator[KafkaCluster]:
    """Yield a cluster on free ports, which the test starts itself. Stop its processes and delete it at the end."""
    cluster = KafkaCluster(directory, brokers=brokers, port=0, settings=settings)
    try:
        yield cluster
    finally:
        cluster.down(wipe=True)


def pids(status: KafkaStatus) -> list[int]:
    """Return the brokers' processes, all of which must run."""
    return [broker.pid for broker in status.brokers if broker.pid is not None]


def make_topic(cluster: KafkaCluster, topic: str, replicas: int = 1) -> None:
    """Create a topic with one partition."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for made in admin.create_topics([NewTopic(topic, 1, replicas)], request_timeout=WITHIN_S).values():
        made.result(WITHIN_S)


def produce(cluster: KafkaCluster, topic: str, *values: bytes) -> None:
    """Append values, acknowledged by all replicas."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "acks": "all"})
    errors: list[object] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(WITHIN_S) == 0
    assert errors == [None] * len(values)


def read(cluster: KafkaCluster, topic: str, count: int) -> list[bytes]:
    """Return the first `count` values of the topic's only partition."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "reader"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes] = []

    def are_read() -> bool:
        for message in consumer.consume(count, 0.5):
            value = message.value()
            assert message.error() is None
            assert value is not None
            values.append(value)
        return len(values) >= count

    wait_until(are_read, f"{count} messages are read")
    consumer.close()
    return values


def in_another_process(program: str, directory: Path) -> str:
    """Run `program` in another Python process and return its output.

    `cluster` there is the cluster of the directory.
    """
    start = "import sys; from pathlib import Path; from marshal_dagster.devkafka import KafkaCluster\n"
    start += "cluster = KafkaCluster(Path(sys.argv[1]), port=0)\n"
    done = subprocess.run(
        [sys.executable, "-c", start + program, directory],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_up_status_and_down_with_the_data_kept_and_wiped(tmp_path: Path) -> None:
    """Records produced before `down` exist after the next `up`, on the same port. `wipe` leaves nothing."""
    with cluster_in(tmp_path / "kafka") as cluster:
        first = cluster.up()
        assert (first.is_up, first.started) == (True, (1,))
        assert cluster.status() == KafkaStatus(first.directory, first.cluster_id, first.brokers)
        again = cluster.up()
        assert (again.started, again.brokers) == ((), first.brokers)
        make_topic(cluster, "kept")
        produce(cluster, "kept", b"a", b"b")

        stopped = cluster.down()
        assert (stopped.is_up, stopped.is_running) == (False, False)
        assert not any(psutil.pid_exists(pid) for pid in pids(first))
        assert cluster.down() == stopped
        assert "shut down" in first.brokers[0].log.read_text(encoding="utf-8")

        second = cluster.up()
        assert second.cluster_id == first.cluster_id
        assert second.bootstrap_servers == first.bootstrap_servers
        assert read(cluster, "kept", 2) == [b"a", b"b"]

        wiped = cluster.down(wipe=True)
        assert wiped == KafkaStatus(first.directory, None, ())
        assert not (tmp_path / "kafka").exists()
        assert not any(psutil.pid_exists(pid) for pid in pids(second))


def test_brokers_outlive_their_starter_and_move_only_when_they_are_down(tmp_path: Path) -> None:
    """A broker whose starting process has ended is found, used and stopped by other processes.

    While it runs, `up` with other ports or another size is rejected, and the cluster keeps running.
    """
    with cluster_in(tmp_path) as cluster:
        pid = int(in_another_process("print(cluster.up().brokers[0].pid)", tmp_path))
        status = cluster.status()
        assert (status.is_up, pids(status)) == (True, [pid])
        assert os.getsid(pid) == pid
        assert cluster.up().started == ()
        for other in (KafkaCluster(tmp_path, port=9), KafkaCluster(tmp_path, brokers=3)):
            with pytest.raises(ClusterMismatchError):
                other.up()
        assert cluster.status().brokers == status.brokers

        assert in_another_process("print(cluster.down().is_running)", tmp_path) == "False"
        assert not cluster.status().is_running
        moved = KafkaCluster(tmp_path, port=free_port({broker.port for broker in status.brokers})).up()
        assert moved.is_up
        assert moved.bootstrap_servers != status.bootstrap_servers


def test_after_a_port_in_use_two_that_start_at_once_start_one_cluster(tmp_path: Path) -> None:
    """The message names the port, and nothing is started. Of several later `up` calls on a free port one starts it.

    The others find it running. A user's file in the directory survives `wipe`.
    """
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with cluster_in(tmp_path) as cluster:
        with closing(socket.create_server(("127.0.0.1", 0))) as taken:
            port = taken.getsockname()[1]
            message = f"^port {port} is in use by .*; stop that process, or give another port"
            with pytest.raises(PortInUseError, match=message):
                KafkaCluster(tmp_path, port=port).up()
        assert not cluster.status().is_running

        found: list[KafkaStatus] = []
        threads = [threading.Thread(target=lambda: found.append(cluster.up())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(status.started for status in found) == [(), (), (1,)]
        assert len({(status.cluster_id, *pids(status)) for status in found}) == 1
        cluster.down(wipe=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_recycled_pid_is_left_alone(tmp_path: Path) -> None:
    """If the pid of a dead broker now belongs to another process, neither `down` nor `kill` affects that process."""
    with cluster_in(tmp_path) as cluster, subprocess.Popen(["sleep", "600"]) as innocent:
        try:
            (broker,) = cluster.up().brokers
            cluster.kill(1)
            assert is_free(broker.port)
            path = tmp_path / "cluster.json"
            document = json.loads(path.read_text(encoding="utf-8"))
            document["brokers"][0]["pid"] = innocent.pid
            path.write_text(json.dumps(document), encoding="utf-8")

            assert not cluster.status().is_running
            cluster.kill(1)
            cluster.stop(1)
            cluster.down()
            assert innocent.poll() is None

            path.write_text(json.dumps(document), encoding="utf-8")
            assert cluster.up().started == (1,)
            cluster.down(wipe=True)
            assert innocent.poll() is None
        finally:
            innocent.kill()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num.partitions": "many"}, "could not be set up: ConfigException: Invalid value many for configuration num"),
        ({"metric.reporters": "no.Such"}, "ended during its start: KafkaException: Class no.Such cannot be found"),
    ],
)
def test_a_broker_that_cannot_start_says_why(tmp_path: Path, settings: dict[str, str], words: str) -> None:
    """The error is one line with Kafka's reason and the path of the log, and no process is left."""
    with cluster_in(tmp_path, settings=settings) as cluster:
        with pytest.raises(BrokerFailedError) as failed:
            cluster.up()
        message = str(failed.value)
        assert message.startswith(f"broker 1 {words}")
        assert "\n" not in message
        assert Path(message.rpartition("; its log: ")[2]).is_file()
        assert not cluster.status().is_running
        with_good_settings = KafkaCluster(tmp_path, port=0).up()
        assert with_good_settings.is_up


def test_a_broker_that_is_not_ready_in_time_is_stopped_again(tmp_path: Path) -> None:
    """A timeout of `up` is an error and leaves no process running."""
    with cluster_in(tmp_path) as cluster:
        with pytest.raises(BrokerFailedError, match=r"^broker 1 was not ready within 0\.01 s: .*; its log: "):
            cluster.up(timeout_s=0.01)
        assert not cluster.status().is_running
        assert [path.name for path in (tmp_path / "broker-1").glob("crash-*")] == []


def test_a_frozen_broker_is_running_but_not_ready(tmp_path: Path) -> None:
    """A stopped process counts as running but not ready, and `down` still ends it."""
    with cluster_in(tmp_path) as cluster:
        (pid,) = pids(cluster.up())
        os.kill(pid, signal.SIGSTOP)
        # The threads of the process stop one after another.
        wait_until(lambda: not cluster.status().is_up, "the frozen broker does not answer")
        assert cluster.status().is_running
        cluster.down(timeout_s=0.2)
        assert not psutil.pid_exists(pid)


def test_settings_and_loopback(tmp_path: Path) -> None:
    """Extra settings apply, topics are not created automatically, and the broker listens only on 127.0.0.1."""
    with running_kafka(tmp_path / "kafka é", settings={"message.max.bytes": "123456"}) as cluster:
        (broker,) = cluster.status().brokers
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        (requested,) = admin.describe_configs([ConfigResource(ConfigResource.Type.BROKER, "1")]).values()
        configs = requested.result(WITHIN_S)
        assert configs["message.max.bytes"].value == "123456"
        assert configs["auto.create.topics.enable"].value == "false"
        assert configs["group.initial.rebalance.delay.ms"].value == "0"
        listening = [
            connection.laddr[0]
            for connection in psutil.Process(broker.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
        assert len(listening) == 2
    assert not (tmp_path / "kafka é").exists()


def test_logs_are_kept_when_a_test_fails(tmp_path: Path) -> None:
    """If the body raises, `running_kafka` stops its brokers and keeps their logs."""

    class FaultError(Exception):
        """Raised by the body."""

    seen: list[KafkaStatus] = []

    def body() -> None:
        with running_kafka(tmp_path) as cluster:
            seen.append(cluster.status())
            raise FaultError

    with pytest.raises(FaultError):
        body()
    (status,) = seen
    assert not any(psutil.pid_exists(pid) for pid in pids(status))
    assert status.brokers[0].log.stat().st_size > 0


def test_three_brokers_live_on_without_one(tmp_path: Path) -> None:
    """With one broker killed, records are still written and read. After its restart all replicas are in sync again."""
    with cluster_in(tmp_path, brokers=3) as cluster:
        up = cluster.up()
        assert (up.is_up, up.started) == (True, (1, 2, 3))
        assert len(set(pids(up))) == 3
        assert len(up.bootstrap_servers.split(",")) == 3
        make_topic(cluster, "kept", replicas=3)
        produce(cluster, "kept", b"a")

        cluster.kill(2)
        after = cluster.status()
        assert [(broker.pid is not None, broker.ready) for broker in after.brokers] == [
            (True, True),
            (False, False),
            (True, True),
        ]
        assert after.is_running
        assert not after.is_up
        produce(cluster, "kept", b"b")

        back = cluster.start(2)
        assert (back.ready, back.port) == (True, up.brokers[1].port)
        assert cluster.up().started == ()
        assert read(cluster, "kept", 2) == [b"a", b"b"]
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        wait_until(
            lambda: len(admin.list_topics("kept", WITHIN_S).topics["kept"].partitions[0].isrs) == 3,
            "all replicas are in sync",
        )

        cluster.kill(1)
        cluster.kill(3)
        assert cluster.up().started == (1, 3)
        assert read(cluster, "kept", 2) == [b"a", b"b"]
