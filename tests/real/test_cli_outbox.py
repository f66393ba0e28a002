"""The `outbox` commands on a real Kafka and PostgreSQL. Commands that publish or prompt run in their own process."""

import json
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition

from marshal_dagster import Outbox, OutboxRecord
from marshal_dagster.outbox import status as outbox_status
from tests.cli import COMMAND, REPOSITORY, Answer, call, environ, start
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.sink_outputs import own_schema


@dataclass(frozen=True, slots=True)
class Stand:
    """An outbox in its own schema, and a topic for its rows."""

    dsn: str
    kafka: str
    schema: str
    topic: str
    capsys: pytest.CaptureFixture[str]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the database and the cluster."""
        return {"MARSHAL_OUTBOX_DSN": self.dsn, "MARSHAL_BOOTSTRAP_SERVERS": self.kafka}

    def ask(self, *arguments: str) -> Answer:
        """Run `outbox ...` in this process, which is faster."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            return call(self.capsys, "outbox", *arguments, "--schema", self.schema)

    def call(self, *arguments: str, given: str = "") -> Answer:
        """Run `outbox ...` in its own process."""
        return start("outbox", *arguments, "--schema", self.schema, given=given, environment=self.environment)

    def stash(self, *records: OutboxRecord) -> None:
        """Write records and commit them."""
        with psycopg.connect(self.dsn) as connection:
            Outbox(schema=self.schema).stash(connection, records)

    def read(self, count: int) -> list[tuple[bytes | None, bytes | None]]:
        """Read this number of committed records, as key and value, from the topic's only partition."""
        settings = {"bootstrap.servers": self.kafka, "group.id": "none", "isolation.level": "read_committed"}
        consumer = Consumer(settings)
        consumer.assign([TopicPartition(self.topic, 0, 0)])
        deadline = time.monotonic() + WITHIN_S
        read: list[tuple[bytes | None, bytes | None]] = []
        while len(read) < count and time.monotonic() < deadline:
            read += [(each.key(), each.value()) for each in consumer.consume(100, 0.5) if each.error() is None]
        consumer.close()
        return read


@pytest.fixture
def stand(postgres: str, kafka: str, topic: MakeTopic, capsys: pytest.CaptureFixture[str]) -> Stand:
    """An outbox created by `outbox init`."""
    stand = Stand(postgres, kafka, own_schema(), topic(1), capsys)
    with psycopg.connect(postgres) as connection:
        connection.execute(f"CREATE SCHEMA {stand.schema}".encode())
    made = stand.call("init", "--json")
    assert (made.code, made.json["schema"], made.json["notifies"]) == (0, stand.schema, True)
    assert made.json["topics"]["notes"] == f"__marshal_outbox_{made.json['uid']}_notes"
    return stand


@dataclass(slots=True)
class Harvesting:
    """A process of `outbox harvest`."""

    process: subprocess.Popen[str]
    events: "queue.Queue[dict[str, Any]]" = field(default_factory=queue.Queue)
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start the thread that reads the process's events."""
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))

    def await_event(self, name: str) -> dict[str, Any]:
        """Return the next event with this name."""
        deadline = time.monotonic() + WITHIN_S
        while True:
            event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            self.seen.append(event["event"])
            if event["event"] == name:
                return event

    @classmethod
    @contextmanager
    def begun(cls, stand: Stand) -> Iterator[Self]:
        """Start a harvester. It is killed at the end if it still runs."""
        command = [*COMMAND, "outbox", "harvest", "--schema", stand.schema, "--health", "0", "--json"]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ(stand.environment),
            cwd=REPOSITORY,
        ) as process:
            try:
                yield cls(process)
            finally:
                process.kill()


def health(address: str) -> tuple[int, dict[str, Any]]:
    """Return the health of a harvester: the HTTP status and the reported values."""
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=WITHIN_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def served(address: str, path: str) -> list[str]:
    """Return the lines that a harvester serves with status 200."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=WITHIN_S) as answer:
        return str(answer.read().decode()).splitlines()


def _is_served(address: str, line: str) -> bool:
    return line in served(address, "/metrics")


def test_rows_are_published_looked_at_and_looked_after(stand: Stand) -> None:
    """Init, status, drain, parked list, retry and delete work in turn, until no row waits or is set aside."""
    again = stand.ask("init", "--no-notify")
    assert (again.code, again.err, "the harvester polls for new rows" in again.out) == (0, "", True)
    missing = f"{stand.topic}-missing"
    stand.stash(OutboxRecord(stand.topic, "first", key="k"), OutboxRecord(stand.topic, None, key="k"))
    stand.stash(OutboxRecord(missing, "lost", key="ö".encode("latin-1")), OutboxRecord(missing, "left"))
    before = stand.ask("status", "--json").json
    assert (before["rows"], before["parked"], before["session"], before["leader"]) == (4, 0, 0, None)
    assert 0 < before["oldest_age_s"] < WITHIN_S

    drained = stand.call("drain", "--max-attempts", "1", "--topic-patience", "0", "--json")
    assert (drained.code, drained.json) == (1, {"published": 2, "parked": 2, "complete": True})
    assert stand.read(2) == [(b"k", b"first"), (b"k", None)]
    listed = stand.ask("parked", "list", "--json").json
    assert (listed["parked"], [(row["id"], row["topic"], row["key"]) for row in listed["rows"]]) == (
        2,
        [(3, missing, "\\xf6"), (4, missing, None)],
    )
    assert f"topic '{missing}'" in listed["rows"][0]["reason"]
    table = stand.ask("parked", "list", "--limit", "1")
    assert (table.code, table.error) == (0, "1 more; --limit shows them")
    assert table.out.splitlines()[1].split()[:4] == ["3", missing, "\\xf6", "4"]

    with psycopg.connect(stand.dsn) as connection:
        connection.execute(f"SET search_path = {stand.schema}".encode())
        connection.execute("UPDATE outbox_parked SET topic = %s WHERE id = 3", (stand.topic,))
    retried = stand.ask("parked", "retry", "3", "99")
    assert (retried.code, retried.out) == (1, "1 row put back, to be published\n")
    assert "not set aside: 99" in retried.error
    assert stand.ask("drain").out == "1 row published by this process, 0 set aside\n"
    assert stand.read(3)[2] == (b"\xf6", b"lost")

    kept = stand.call("parked", "delete", "4", given="n\n")
    assert (kept.code, missing in kept.out, "nothing was deleted" in kept.err) == (1, True, True)
    assert stand.call("parked", "delete", "4", given="y\n").code == 0
    assert stand.ask("parked", "list").out == "No rows are set aside\n"
    after = stand.ask("status")
    assert (after.code, after.err) == (0, "")
    assert [line.split()[:3] for line in after.out.splitlines()[1:]] == [
        ["waiting", "0", "rows"],
        ["set", "aside", "0"],
        ["harvested", "session", "2,"],
    ]


def test_of_two_harvesters_the_other_takes_over(stand: Stand) -> None:
    """On SIGTERM the leader hands over and ends with 0. Both harvesters report their health over HTTP."""
    with Harvesting.begun(stand) as first, Harvesting.begun(stand) as second:
        addresses = [each.await_event("started")["health"] for each in (first, second)]
        leader, standby = _distinguished(first, second, addresses)
        by_role = {reported["role"]: (status, reported) for status, reported in map(health, addresses)}
        assert {role: status for role, (status, _) in by_role.items()} == {"leader": 200, "standby": 200}
        assert {reported["failure"] for _, reported in by_role.values()} == {None}
        stand.stash(OutboxRecord(stand.topic, "first", key="k"))
        assert stand.read(1) == [(b"k", b"first")]
        roles = ["1.0" if harvester is leader else "0.0" for harvester in (first, second)]
        for address, leads in zip(addresses, roles, strict=True):
            assert served(address, "/ready")
            line = f'marshal_outbox_leads{{outbox="outbox"}} {leads}'
            wait_until(partial(_is_served, address, line), "the role is served")

        leader.process.send_signal(signal.SIGTERM)
        reported = leader.await_event("stopped")
        assert (leader.process.wait(WITHIN_S), reported["published"], reported["sessions"]) == (0, 1, 1)
        standby.await_event("leader")
        stand.stash(OutboxRecord(stand.topic, "second", key="k"))
        assert stand.read(2)[1] == (b"k", b"second")

        standby.process.send_signal(signal.SIGINT)
        assert standby.process.wait(WITHIN_S) == 0
        assert [each.process.stderr.read() for each in (first, second) if each.process.stderr] == ["", ""]
    assert stand.ask("status", "--json").json["session"] == 2


def _distinguished(first: Harvesting, second: Harvesting, addresses: Sequence[str]) -> tuple[Harvesting, Harvesting]:
    """Wait until one harvester leads, and return that one first."""
    wait_until(lambda: "leader" in {health(address)[1]["role"] for address in addresses}, "one of the two leads")
    is_first = health(addresses[0])[1]["role"] == "leader"
    return (first, second) if is_first else (second, first)


def test_harvesters_with_another_cluster_or_partitioner_are_refused(stand: Stand) -> None:
    """The first one that leads records its own. Keys would lose their order, or rows be divided between clusters."""
    with psycopg.connect(stand.dsn, autocommit=True) as connection:
        registry = f"{stand.schema}.marshal_outboxes"
        # As `outbox init` of version 0.1 created it.
        connection.execute(f"ALTER TABLE {registry} DROP COLUMN cluster_id, DROP COLUMN partitioner".encode())
        stand.stash(OutboxRecord(stand.topic, "first", key="k"))
        first = stand.call("drain")
        assert (first.code, f"`marshal-dagster outbox init --schema {stand.schema}` upgrades it" in first.err) == (
            0,
            True,
        )
        assert stand.call("init").code == 0
        stand.stash(OutboxRecord(stand.topic, "second", key="k"))
        assert stand.call("drain").code == 0
        recorded = stand.ask("status", "--json").json
        assert (recorded["partitioner"], bool(recorded["cluster_id"])) == ("murmur2_random", True)

        other = stand.call("drain", "--partitioner", "consistent")
        assert (other.code, "--partitioner murmur2_random" in other.err) == (2, True)
        connection.execute(f"SET search_path = {stand.schema}".encode())
        connection.execute("UPDATE marshal_outboxes SET cluster_id = 'elsewhere'")
        stand.stash(OutboxRecord(stand.topic, "third", key="k"))
        for command in ("drain", "harvest"):
            moved = stand.call(command)
            assert (moved.code, "cluster with the id 'elsewhere'" in moved.err) == (2, True)
        assert stand.call("init", "--forget-target").code == 0
        assert stand.call("drain", "--partitioner", "consistent").code == 0
    now = stand.ask("status", "--json").json
    assert (now["rows"], now["partitioner"], now["cluster_id"]) == (0, "consistent", recorded["cluster_id"])


def test_no_command_waits_for_a_locked_table_without_end(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first statement of each has the limit too. The error shows where to look."""
    monkeypatch.setattr(outbox_status, "_LOCK_TIMEOUT", "10ms")
    with psycopg.connect(stand.dsn) as connection:
        connection.execute(f"LOCK TABLE {stand.schema}.outbox_parked IN ACCESS EXCLUSIVE MODE".encode())
        for command in (("status",), ("parked", "list"), ("parked", "retry", "1"), ("parked", "delete", "1", "--yes")):
            locked = stand.ask(*command)
            assert (locked.code, "an open transaction has locked its tables" in locked.err) == (3, True)


def test_what_is_missing_is_one_line(stand: Stand) -> None:
    """Missing topics, a missing outbox and an unreachable database each have their own exit code."""
    without = start(
        "outbox", "init", "--schema", stand.schema, "--name", "two", environment={"MARSHAL_OUTBOX_DSN": stand.dsn}
    )
    assert (without.code, "no Kafka cluster is specified, so the topics were not created" in without.error) == (0, True)
    harvested = stand.call("harvest", "--name", "two")
    assert harvested.code == 5
    assert f"outbox init --name two --schema {stand.schema}` creates the topics" in harvested.err.splitlines()[-1]
    none = stand.ask("status", "--name", "tow")
    assert (none.code, "which has 'two', 'outbox': `marshal-dagster outbox init --name tow" in none.error) == (2, True)
    for command in (("list",), ("retry", "1"), ("delete", "1", "--yes")):
        nothing = stand.ask("parked", *command, "--name", "tow")
        assert (nothing.code, "which has 'two', 'outbox'" in nothing.error) == (2, True)
    with psycopg.connect(stand.dsn, autocommit=True) as connection:
        connection.execute(f"ALTER TABLE {stand.schema}.two SET UNLOGGED".encode())
    unsafe = stand.ask("status", "--name", "two", "--json")
    assert (unsafe.code, unsafe.out, "two is unlogged" in unsafe.error) == (2, "", True)
    secret = "canary-77aa"
    away = start("outbox", "status", environment={"MARSHAL_OUTBOX_DSN": f"postgresql://u:{secret}@127.0.0.1:1/d"})
    assert (away.code, secret in away.err) == (3, False)
    assert "PostgreSQL of outbox 'outbox'" in away.error
