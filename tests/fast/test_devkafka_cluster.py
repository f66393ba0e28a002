"""Check what `KafkaCluster` decides before a broker runs, and how it reads the brokers' output."""

import errno
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from marshal_dagster._internal import ports as ports_module
from marshal_dagster._internal.file_lock import locked
from marshal_dagster._internal.java import Java
from marshal_dagster._internal.ports import check_free, free_port, is_free
from marshal_dagster._internal.user_folders import cache_folder, kafka_folder, why_not_own
from marshal_dagster.devkafka import (
    BrokerStatus,
    ClusterLockedError,
    ClusterMismatchError,
    KafkaCluster,
    KafkaStatus,
    PortInUseError,
)
from marshal_dagster.devkafka.errors import DevKafkaError
from marshal_dagster.devkafka.launch import BrokerFolder, Launcher, reason_in
from marshal_dagster.devkafka.properties import Node
from marshal_dagster.devkafka.readiness import brokers_known_to
from marshal_dagster.devkafka.state import ClusterState, new_uuid, read_state, write_state
from marshal_dagster.errors import ConfigurationError
from tests.conditions import WITHIN_S


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yield a socket that listens on a free port of 127.0.0.1."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"brokers": 2}, "brokers is 2; it must be 1 or 3"),
        ({"port": 70_000}, "port is 70000; it must be numbers from 1 to 65535"),
        ({"port": -1}, "port is -1; it must be numbers"),
        ({"port": [9092, 9092, 9093]}, "port is 9092, 9092, 9093; it must be numbers from 1 to 65535, each once"),
        ({"port": []}, "port is ; it must be numbers"),
        ({"heap_mb": 1}, "heap_mb is 1; it must be at least 128"),
        ({"settings": {"node.id": "4"}}, "broker setting 'node.id' is chosen by the cluster itself"),
        ({"directory": Path("/a,b")}, "directory is /a,b; use a path without commas"),
    ],
)
def test_a_value_that_cannot_be_is_named_at_once(wrong: dict[str, object], words: str) -> None:
    """Arguments are checked before a broker starts; the error has the argument's name and the accepted values."""
    with pytest.raises(ConfigurationError) as refused:
        KafkaCluster(**wrong)  # type: ignore[arg-type]
    assert str(refused.value).startswith(words)


def test_ports_must_match_the_brokers(tmp_path: Path) -> None:
    """A list of ports has one port for each broker."""
    with pytest.raises(
        ConfigurationError, match=r"^port is 9092, 9093, but there are 3 broker\(s\): pass one port for each"
    ):
        KafkaCluster(tmp_path, brokers=3, port=[9092, 9093]).up()


def test_an_empty_directory_holds_no_cluster(tmp_path: Path) -> None:
    """`status` and `down` without a cluster are no errors, and create no files."""
    directory = tmp_path / "none"
    cluster = KafkaCluster(directory)
    assert cluster.status() == KafkaStatus(directory, None, ())
    assert cluster.down() == cluster.down(wipe=True) == cluster.status()
    assert not cluster.status().is_up
    assert not cluster.status().is_running
    assert not directory.exists()


def test_what_needs_a_cluster_says_how_to_get_one(tmp_path: Path) -> None:
    """For a directory without a cluster, the error names `kafka up`."""
    cluster = KafkaCluster(tmp_path)
    for ask in (lambda: cluster.bootstrap_servers, lambda: cluster.kill(1), lambda: cluster.start(1)):
        with pytest.raises(ClusterMismatchError, match="start one with `marshal-dagster kafka up --directory /"):
            ask()


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}', '{"version": 1, "cluster_id": "x"}', "\xff"])
def test_a_cluster_file_that_does_not_read_is_named(tmp_path: Path, text: str) -> None:
    """If `cluster.json` is damaged, nothing is assumed about processes."""
    (tmp_path / "cluster.json").write_text(text, encoding="latin-1")
    for ask in (KafkaCluster(tmp_path).status, KafkaCluster(tmp_path).up, KafkaCluster(tmp_path).down):
        with pytest.raises(ClusterMismatchError, match=r"cluster\.json cannot be read as the state of a cluster"):
            ask()


def test_without_java_nothing_is_started_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` fails before it stores a cluster, so that a later call may have other arguments."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigurationError, match="no Java found"):
        KafkaCluster(tmp_path / "kafka", port=0).up()
    assert read_state(tmp_path / "kafka") is None


@pytest.mark.slow
def test_a_directory_at_work_is_said_to_be(tmp_path: Path) -> None:
    """A second command waits for the first, and reports it after its timeout."""
    with (
        locked(tmp_path / ".lock", 1.0),
        pytest.raises(ClusterLockedError, match=f"^another command has been using {tmp_path} for 0.1 s"),
    ):
        KafkaCluster(tmp_path, port=0).up(timeout_s=0.1)


def test_a_lock_whose_file_was_deleted_does_not_count(tmp_path: Path) -> None:
    """If the holder deletes the lock's file, a waiting process gets a new lock. Two never hold it at the same time."""
    path = tmp_path / "lock"
    held = threading.Event()
    let_go = threading.Event()
    order: list[str] = []

    def hold_and_delete() -> None:
        with locked(path, WITHIN_S):
            held.set()
            let_go.wait(WITHIN_S)
            path.unlink()
            order.append("first")

    def wait_for_it() -> None:
        with locked(path, WITHIN_S):
            order.append("second")
            assert path.exists()

    first = threading.Thread(target=hold_and_delete)
    first.start()
    assert held.wait(WITHIN_S)
    second = threading.Thread(target=wait_for_it)
    second.start()
    let_go.set()
    first.join()
    second.join()
    assert order == ["first", "second"]


def test_a_port_in_use_is_named_with_its_user(listener: socket.socket) -> None:
    """The message has the port, the process that listens there, and what to do."""
    port = listener.getsockname()[1]
    assert not is_free(port)
    with pytest.raises(PortInUseError, match=rf"^port {port} is in use by \S+ \(pid \d+\); stop that process, or give"):
        check_free(port)


def test_a_port_is_in_use_when_taken_on_all_addresses() -> None:
    """A listener on all addresses uses the port on 127.0.0.1 too."""
    with closing(socket.create_server(("0.0.0.0", 0))) as server:  # noqa: S104 - the test needs all addresses
        assert not is_free(server.getsockname()[1])


def test_free_ports_are_not_of_those_for_outgoing_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chosen port is below the system's range, is not in use, and accepts a listener."""
    reported = tmp_path / "ip_local_port_range"
    reported.write_text("21005\t60999\n", encoding="ascii")
    monkeypatch.setattr(ports_module, "_EPHEMERAL_RANGE", reported)
    taken = set(range(20_000, 21_000))
    port = free_port(taken)
    assert 21_000 <= port < 21_005
    assert is_free(port)


def test_without_a_reported_range_ports_stay_below_linuxs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system does not show its range, Linux's default range is avoided."""
    monkeypatch.setattr(ports_module, "_EPHEMERAL_RANGE", tmp_path / "missing")
    assert 20_000 <= free_port() < 32_768


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message shows the range of ports."""
    monkeypatch.setattr(ports_module, "_highest", lambda: 20_001)
    with pytest.raises(PortInUseError, match=r"^no port from 20000 to 20001 is free"):
        free_port({20_000, 20_001})


def answer_once(listener: socket.socket, answer: bytes) -> None:
    """Accept one connection, read its request, send `answer` and close."""
    connection, _ = listener.accept()
    with closing(connection):
        (size_bytes,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
        connection.recv(size_bytes, socket.MSG_WAITALL)
        connection.sendall(answer)


def metadata(*brokers: tuple[int, bytes, bytes | None]) -> bytes:
    """Return a Metadata response (version 1) with brokers by id, host and rack, after its length."""
    body = struct.pack(">ii", 1, len(brokers))
    for broker_id, host, rack in brokers:
        body += struct.pack(">ih", broker_id, len(host)) + host + struct.pack(">i", 9092)
        body += struct.pack(">h", -1) if rack is None else struct.pack(">h", len(rack)) + rack
    body += struct.pack(">ii", 1, 0)
    return struct.pack(">i", len(body)) + body


@pytest.mark.parametrize(
    ("answer", "brokers"),
    [
        (metadata((1, b"127.0.0.1", None), (3, b"h", b"rack-a"), (2, b"", b"")), {1, 2, 3}),
        (metadata(), set()),
        (b"", set()),
        (metadata((1, b"127.0.0.1", None))[:20], set()),
        (struct.pack(">i", 8) + struct.pack(">ii", 1, 5), set()),
        (struct.pack(">i", -1), set()),
        (struct.pack(">i", 1 << 30), set()),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", set()),
    ],
)
def test_a_broker_is_requested_whom_it_knows(listener: socket.socket, answer: bytes, brokers: set[int]) -> None:
    """All brokers of an answer are read; an answer that is cut, too long or not Kafka's counts as empty."""
    server = threading.Thread(target=answer_once, args=(listener, answer))
    server.start()
    assert brokers_known_to(listener.getsockname()[1], timeout_s=WITHIN_S) == brokers
    server.join()


@pytest.mark.slow
def test_a_port_that_does_not_answer_knows_nobody(listener: socket.socket) -> None:
    """The timeout applies to a silent port and to a closed one."""
    port = listener.getsockname()[1]
    assert brokers_known_to(port, timeout_s=0.1) == frozenset()
    listener.close()
    assert brokers_known_to(port, timeout_s=0.1) == frozenset()


LOG = """\
2026-01-01T10:00:00,001 INFO KafkaRaftServer: starting
2026-01-01T10:00:00,002 WARN NetworkClient: not yet
java.io.IOException: of a warning
2026-01-01T10:00:00,003 ERROR BrokerServer: [BrokerServer id=1] Fatal error during broker startup.
org.apache.kafka.common.KafkaException: Class no.such.Class cannot be found
\tat org.apache.kafka.common.utils.Utils.newInstance(Utils.java:1)
Caused by: java.lang.ClassNotFoundException: no.such.Class
2026-01-01T10:00:00,004 ERROR FaultHandler: something on the way out
java.lang.IllegalStateException: on the way out
2026-01-01T10:00:00,005 INFO AppInfoParser: unregistered
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOG, "KafkaException: Class no.such.Class cannot be found"),
        ('Exception in thread "main" a.b.ConfigException: Invalid value', "ConfigException: Invalid value"),
        ("Error: Could not create the Java Virtual Machine.", "Error: Could not create the Java Virtual Machine."),
        ("java.lang.OutOfMemoryError: Java heap space", "OutOfMemoryError: Java heap space"),
        ("2026-01-01T10:00:00,003 ERROR A: b", "2026-01-01T10:00:00,003 ERROR A: b"),
        ("2026-01-01T10:00:00,003 INFO A: SomeException: no\nx", None),
        ("", None),
    ],
)
def test_the_first_error_reports_the_reason(text: str, reason: str | None) -> None:
    """The first error's exception is shown without its package; warnings and later errors are not shown."""
    assert reason_in(text.splitlines()) == reason


def test_last_words_are_of_this_start_and_name_their_file(tmp_path: Path) -> None:
    """Errors of an earlier start are not reported again, even after the log was rotated."""
    folder = BrokerFolder(tmp_path)
    folder.log.write_text(LOG, encoding="utf-8")
    since = folder.sizes()
    assert folder.last_log_line(since) == f"it logged nothing; its log: {folder.log}"
    with folder.log.open("a", encoding="utf-8") as log:
        log.write("2026-01-01T10:01:00,001 INFO KafkaRaftServer: starting\n")
    assert folder.last_log_line(since) == (
        f"2026-01-01T10:01:00,001 INFO KafkaRaftServer: starting; its log: {folder.log}"
    )
    folder.console.write_text("Error: no memory\n", encoding="utf-8")
    assert folder.last_log_line(since) == f"Error: no memory; its log: {folder.console}"
    folder.console.unlink()
    folder.log.write_text("2026-01-01T10:02:00,001 ERROR A: b\n", encoding="utf-8")
    assert folder.last_log_line(since).startswith("2026-01-01T10:02:00,001 ERROR A: b; ")


def test_a_status_gives_what_clients_take(tmp_path: Path) -> None:
    """Addresses are in order; `is_up` means that all brokers answer, `is_running` that one has a process."""
    answering = BrokerStatus(1, 9092, 10, ready=True, log=tmp_path)
    silent = BrokerStatus(2, 9093, None, ready=False, log=tmp_path)
    status = KafkaStatus(tmp_path, "id", (answering, silent))
    assert status.bootstrap_servers == "127.0.0.1:9092,127.0.0.1:9093"
    assert (status.is_up, status.is_running) == (False, True)
    assert KafkaStatus(tmp_path, "id", (answering,)).is_up
    assert not KafkaStatus(tmp_path, "id", (silent,)).is_running


def test_folders_follow_the_users_choice() -> None:
    """The package's own variables come first, then the user's folders; relative XDG paths are ignored."""
    home = Path.home()
    assert cache_folder({"MARSHAL_CACHE": "/m", "XDG_CACHE_HOME": "/x"}) == Path("/m")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/marshal-dagster")
    assert cache_folder({"XDG_CACHE_HOME": "x"}) == home / ".cache" / "marshal-dagster"
    assert kafka_folder({"MARSHAL_KAFKA_DIR": "~/k"}) == home / "k"
    assert kafka_folder({"XDG_STATE_HOME": "/s"}) == Path("/s/marshal-dagster/kafka")
    assert kafka_folder({}) == home / ".local" / "state" / "marshal-dagster" / "kafka"


def test_cluster_ids_are_kafkas() -> None:
    """They are 22 characters of URL-safe base64, all different, and do not start with a dash."""
    ids = {new_uuid() for _ in range(500)}
    assert len(ids) == 500
    assert all(len(each) == 22 and not each.startswith("-") and "=" not in each for each in ids)


def test_a_cluster_of_another_size_is_not_replaced(tmp_path: Path) -> None:
    """Three brokers in a directory with the data of one are refused; the error shows how to remove the old cluster."""
    broker = {"id": 1, "port": 9092, "controller_port": 20_001, "pid": None, "birth": None}
    document = {"version": 1, "cluster_id": "x", "brokers": [broker]}
    (tmp_path / "cluster.json").write_text(json.dumps(document), encoding="utf-8")
    command = f"`marshal-dagster kafka down --directory {tmp_path} --wipe`"  # of this cluster, not of the default one
    with pytest.raises(ClusterMismatchError, match=rf"holds a cluster of 1 broker\(s\), not 3; .*{re.escape(command)}"):
        KafkaCluster(tmp_path, brokers=3).up()
    with pytest.raises(ClusterMismatchError, match=r"^there is no broker 2; this cluster has 1$"):
        KafkaCluster(tmp_path).kill(2)


@pytest.mark.parametrize("inner", ["", "broker-1"])
@pytest.mark.parametrize("act", ["up", "down", "wipe", "start"])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, inner: str, act: str) -> None:
    """Other users could put a link there, so that a file of this user would be overwritten."""
    directory = tmp_path / "kafka"
    (directory / inner).mkdir(parents=True)
    write_state(directory, ClusterState(new_uuid(), (Node(1, 9092, 9093),), {}))
    (directory / inner).chmod(0o1777)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (directory / inner / "cluster.new").symlink_to(precious)
    (directory / ".lock").symlink_to(tmp_path / "made")
    cluster = KafkaCluster(directory)
    acts: dict[str, Callable[[], object]] = {"up": cluster.up, "down": cluster.down, "start": lambda: cluster.start(1)}
    with pytest.raises(DevKafkaError, match=r"^all users may write into .*such as ~/kafka") as refused:
        acts.get(act, lambda: cluster.down(wipe=True))()
    assert "\n" not in str(refused.value)
    assert precious.read_text() == "mine"
    assert not (tmp_path / "made").exists()


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dangling link is refused too; only this user may enter a new directory."""
    broken = tmp_path / "broken"
    broken.symlink_to(tmp_path / "nowhere")
    assert why_not_own(broken) == f"{broken} is a link to nothing"
    assert why_not_own(tmp_path / "new") is None
    cluster = KafkaCluster(tmp_path / "made" / "kafka")
    with cluster._locked(1):
        assert cluster.directory.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: 1_000_000)
    with pytest.raises(DevKafkaError, match="belongs to another user"):
        cluster.up()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_made_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """This holds for the directory itself, and for a broker's files on a full disk."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error), str(tmp_path))

    for name in ("mkdir", "write_text"):
        with monkeypatch.context() as patch:
            cluster = KafkaCluster(tmp_path / name, port=0)
            patch.setattr(KafkaCluster, "_launcher", lambda _: Launcher(Java(Path("java"), "21", 21), ()))
            patch.setattr(Path, name, fail)
            with pytest.raises(DevKafkaError, match=os.strerror(error)) as refused:
                cluster.up()
            assert "\n" not in str(refused.value)
            assert str(cluster.directory) in str(refused.value)
