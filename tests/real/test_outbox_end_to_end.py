"""From a topic to another one through the example of `examples/outbox`, while its processes and a broker are killed."""

import importlib
import json
import logging
import os
import runpy
import sqlite3
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import dagster as dg
import psutil
import psycopg
import pytest
from confluent_kafka import Message, TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from demo.deployment import kill_tree
from marshal_dagster._internal.postgres import Database
from marshal_dagster.cli.main import run
from marshal_dagster.devkafka import KafkaCluster, running_kafka
from marshal_dagster.kafka import clients
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.interfaces import ID_HEADER
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector, OutboxStatus
from tests.conditions import WITHIN_S, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "outbox"
ROOT = EXAMPLE.parents[1]

FLIGHTS, BATCH, PARTITIONS = 2_400, 600, 4
MOST_RUNS = 5
SECOND, LAST = 1, 3
"""Numbers of batches, from 0. The test can make a run wait before it writes the events of these batches."""

HOLD = f"""
    CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_advisory_xact_lock_shared((count(*) - 1) / {BATCH}) FROM flight_delays;
        RETURN NULL;
    END $$;
    CREATE TRIGGER hold BEFORE INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION hold();
    """
"""After it wrote the rows of a batch, and before its events, the writer requests the lock with the batch's number."""
HELD = """
    SELECT pid FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
    WHERE d.datname = current_database() AND locktype = 'advisory' AND mode = 'ShareLock' AND NOT granted
    """
STRIKING = r"""
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query ~ '^\s*DELETE FROM'
    """
END_HELD = f"SELECT pg_terminate_backend(held.pid) FROM ({HELD}) AS held"  # noqa: S608 - the text is constant

Flight = tuple[int, int]
"""A flight's partition and offset."""
Delay = tuple[str, int, float | None]
"""Carrier, flight, and delay in minutes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """The event of a flight, as a reader of `delays` gets it."""

    id: str
    key: str
    flight: Flight
    delay: Delay

    @classmethod
    def of(cls, number: str, key: str, value: str) -> "Event":
        """Parse an event."""
        reported = json.loads(value)
        flight = reported["kafka_partition"], reported["kafka_offset"]
        return cls(number, key, flight, (reported["carrier"], reported["flight"], reported["arr_delay"]))


@dataclass(slots=True)
class Circle:
    """The example in its own database and cluster, with a Dagster instance in `folder`."""

    folder: Path
    cluster: KafkaCluster
    dsn: str
    asking: "psycopg.Connection[tuple[Any, ...]]"
    backlog: OutboxInspector
    instance: dg.DagsterInstance
    defs: dg.Definitions
    began_s: float = field(default_factory=time.monotonic)
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    runs: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def report(self, what: str) -> None:
        """Log an event with its time."""
        logger.info("%5.1f s  %s", time.monotonic() - self.began_s, what)

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        """Query the database."""
        return self.asking.execute(statement.encode()).fetchall()

    def rows(self) -> int:
        """Count the rows of the result."""
        return cast("int", self.ask("SELECT count(*) FROM flight_delays")[0][0])

    def status(self) -> OutboxStatus:
        """Return the status of the outbox."""
        return self.backlog.status()

    def start(self, name: str, *command: str | Path) -> "subprocess.Popen[bytes]":
        """Start a process. Its output goes to the log file `name` in the folder."""
        with (self.folder / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env={**os.environ, "DAGSTER_HOME": str(self.folder), "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def start_run(self) -> "subprocess.Popen[bytes]":
        """Start a run of the example's job."""
        job = ("-m", "dagster", "job", "execute", "-f", EXAMPLE / "delays.py", "-j", "flight_delays_job")
        self.runs.append(self.start(f"run-{len(self.runs)}", *job))
        return self.runs[-1]

    def work_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds. If a run ends before that, start another one."""

        def goes_on() -> bool:
            ended = self.runs[-1].poll() is not None
            if condition():
                return True
            if ended:
                assert len(self.runs) < MOST_RUNS, (self.folder / f"run-{len(self.runs) - 1}.log").read_text()[-4_000:]
                self.start_run()
            return False

        wait_until(goes_on, what)

    @contextmanager
    def caught_at_work(self) -> Iterator[psutil.Process]:
        """Lock the outbox so that the leader has published a batch and cannot delete its rows.

        Yield the leader's process.
        """
        with psycopg.connect(self.dsn) as locking:

            def has_work() -> bool:
                locking.rollback()
                locking.execute("LOCK TABLE outbox IN SHARE MODE")
                return self.status().rows > 0

            wait_until(has_work, "there is a backlog")
            wait_until(lambda: self.ask(STRIKING), "the harvester has published a batch")
            yield psutil.Process(int(str(self.status().registration.leader).rpartition(":")[2]))

    def notes_leader(self) -> int:
        """Return the broker that takes part in every transaction of the harvester."""
        notes = OutboxTopics.of(self.status().registration.uid).notes
        found = AdminClient({"bootstrap.servers": self.cluster.bootstrap_servers}).list_topics(notes, timeout=20)
        return found.topics[notes].partitions[0].leader

    def messages(self, topic: str, *, committed_only: bool = True) -> list[Message]:
        """Read a topic from its beginning to its end."""
        connection = KafkaConnection(bootstrap_servers=self.cluster.bootstrap_servers)
        reader, _ = clients.consumer(connection, client_id="test", committed_only=committed_only)
        reader.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        found: list[Message] = []
        at_end: set[int | None] = set()
        with closing(reader):
            while len(at_end) < PARTITIONS:
                for message in reader.consume(1_000, timeout=1.0):
                    if message.error() is None:
                        found.append(message)
                    else:
                        at_end.add(message.partition())
        return found

    def seen(self) -> list[tuple[int, Event]]:
        """Return the events of the example's consumer in order, each with its number of deliveries."""
        with closing(sqlite3.connect(self.folder / "delays.db", timeout=30)) as table:
            found = table.execute("SELECT deliveries, id, carrier, event FROM delays ORDER BY place").fetchall()
        return [(deliveries, Event.of(*event)) for deliveries, *event in found]

    def stop(self) -> None:
        """End the remaining processes."""
        for process in self.started:
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait(WITHIN_S)


def decoded(messages: Sequence[Message]) -> list[Event]:
    """Return the events of topic `delays`, in the order of each partition."""
    return [
        Event.of(*(str(part, "utf-8") for part in (dict(each.headers() or ())[ID_HEADER], each.key(), each.value())))  # type: ignore[arg-type] # all are bytes
        for each in messages
    ]


@pytest.fixture
def module(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[KafkaCluster, str, ModuleType]]:
    """Three brokers and a database, prepared by the example's first scripts."""
    database = f"delays_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres, autocommit=True) as made:
        made.execute(f"CREATE DATABASE {database}".encode())
    dsn = make_conninfo(postgres, dbname=database)
    with running_kafka(tmp_path / "kafka", brokers=3) as cluster:
        for name, value in {
            "MARSHAL_BOOTSTRAP_SERVERS": cluster.bootstrap_servers,
            "DELAYS_DSN": dsn,
            "DELAYS_FLIGHTS": FLIGHTS,
            "DELAYS_MAX_RECORDS": BATCH,
            "DELAYS_SPARK_MASTER": "local[2]",
        }.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.syspath_prepend(EXAMPLE)
        assert run(["topic", "create"]) == 0
        for script in ("set_up.py", "flights.py"):
            runpy.run_path(str(EXAMPLE / script))
        yield cluster, dsn, importlib.import_module("delays")
        del sys.modules["delays"]


@pytest.fixture
def circle(module: tuple[KafkaCluster, str, ModuleType], tmp_path: Path) -> Iterator[Circle]:
    """The prepared example, without any of its processes."""
    cluster, dsn, delays = module
    with (
        dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
        psycopg.connect(dsn, autocommit=True) as asking,
        closing(OutboxInspector(OutboxTables(Database(dsn)))) as backlog,
    ):
        made = Circle(tmp_path, cluster, dsn, asking, backlog, instance, delays.defs)
        asking.execute(HOLD.encode())
        yield made
        made.stop()


def break_it(circle: Circle) -> None:
    """Run the example, and kill a harvester, a run and a broker during their work."""
    circle.ask(f"SELECT pg_advisory_lock({SECOND}), pg_advisory_lock({LAST})")
    harvesters = [circle.start(f"harvester-{each}", "-m", "tests.real.outbox_harvester") for each in range(2)]
    first = circle.start_run()

    with circle.caught_at_work() as leader:
        leader.kill()
        circle.report(f"killed the leading harvester; {circle.status().rows} rows of its backlog are left")
    wait_until(lambda: circle.ask(HELD), "the run has moved the rows of its second batch")
    circle.report(f"killed the run within its second transaction: {kill_tree(first.pid)} processes")
    circle.ask(END_HELD)
    assert circle.rows() == BATCH
    circle.instance.report_run_failed(circle.instance.get_runs(limit=1)[0])

    with circle.caught_at_work():
        broker = circle.notes_leader()
        circle.cluster.kill(broker)
        circle.report(f"killed broker {broker}; {circle.status().rows} rows of the next harvester's backlog are left")
    circle.start_run()
    circle.ask(f"SELECT pg_advisory_unlock({SECOND})")
    circle.work_until(lambda: circle.rows() > BATCH, "a batch is taken with a broker down")
    circle.report(f"{circle.rows()} rows were written with the broker down")
    (other,) = (harvester for harvester in harvesters if harvester.poll() is None)
    other.terminate()
    assert other.wait(WITHIN_S) == 0
    circle.report(f"terminated the other harvester; {circle.status().rows} rows wait")
    circle.ask(f"SELECT pg_advisory_unlock({LAST})")
    circle.cluster.start(broker)
    circle.report("the broker is back")
    circle.work_until(lambda: circle.runs[-1].poll() == 0 and circle.rows() == FLIGHTS, "all flights are processed")
    circle.report(f"all flights are processed, by {len(circle.runs)} runs, and {circle.status().rows} rows wait")


def drain(circle: Circle) -> None:
    """Evaluate the sensor, which must request a run, and run the job that publishes the remaining rows."""
    assert circle.status().rows >= BATCH
    sensor = circle.defs.resolve_sensor_def("outbox_backlog")
    resources = {"outbox": (circle.defs.resources or {})["outbox"]}
    with dg.build_sensor_context(instance=circle.instance, resources=resources) as context:
        requested = cast("dg.SensorResult", sensor(context))
    assert len(requested.run_requests or ()) == 1
    assert circle.defs.resolve_job_def("drain_outbox").execute_in_process(instance=circle.instance).success
    assert (circle.status().rows, circle.status().parked) == (0, 0)
    circle.report("the job has published what was left")


def flights(circle: Circle) -> dict[Flight, Delay]:
    """Return all flights of the input topic."""
    found = {}
    for message in circle.messages("flights"):
        reported = json.loads(message.value() or b"")
        flight = cast("int", message.partition()), cast("int", message.offset())
        found[flight] = reported["carrier"], reported["flight"], reported["arr_delay"]
    return found


def assert_in_order(events: Sequence[Event]) -> None:
    """Check that the events of each key are in the order of their messages."""
    by_key: dict[str, list[Flight]] = {}
    for event in events:
        by_key.setdefault(event.key, []).append(event.flight)
    assert len(by_key) > 1
    for key, places in by_key.items():
        assert all(one < other for one, other in pairwise(places)), key


@pytest.mark.filterwarnings("ignore:Parameter `owners`")  # Dagster's own warning, for a sensor's job with resources
def test_each_delay_is_seen_once_and_in_order(circle: Circle) -> None:
    """Rows, ranges and events match the flights, although a harvester, a run and a broker were killed."""
    consumer = circle.start("consumer", EXAMPLE / "consumer.py")
    break_it(circle)
    drain(circle)
    wanted = flights(circle)
    assert len(wanted) == FLIGHTS

    rows = circle.ask("SELECT kafka_partition, kafka_offset, carrier, flight, arr_delay FROM flight_delays")
    assert {(partition, offset): tuple(delay) for partition, offset, *delay in rows} == wanted
    assert len(rows) == FLIGHTS
    assert_ranges_are_whole(circle, wanted)

    wait_until(lambda: len(circle.seen()) >= FLIGHTS, "the consumer has seen all", pause_s=0.5)
    consumer.terminate()
    assert consumer.wait(WITHIN_S) == 0
    seen = [event for _, event in circle.seen()]
    assert {event.flight: event.delay for event in seen} == wanted
    assert len(seen) == FLIGHTS
    assert_in_order(seen)

    committed = decoded(circle.messages("delays"))
    assert_in_order(committed)
    assert Counter(event.id for event in committed) == Counter(event.id for event in seen)
    every = decoded(circle.messages("delays", committed_only=False))
    circle.report(
        f"{len(committed) - len(seen)} repeats read committed, {len(every) - len({each.id for each in every})} "
        f"uncommitted, {sum(deliveries - 1 for deliveries, _ in circle.seen())} to the consumer"
    )


def assert_ranges_are_whole(circle: Circle, wanted: dict[Flight, Delay]) -> None:
    """Check that each partition's ranges are contiguous from 0 to its end, and that each row is in its range."""
    ranges = circle.ask(
        "SELECT partition, start_offset, end_offset, row_count FROM marshal_taken_ranges "
        "ORDER BY partition, start_offset"
    )
    ends = dict.fromkeys(range(PARTITIONS), 0)
    for partition, start, end, count in ranges:
        assert (ends[partition], count) == (start, end - start)
        ends[partition] = end
    assert ends == {number: sum(partition == number for partition, _ in wanted) for number in ends}
    outside = circle.ask(
        "SELECT count(*) FROM flight_delays AS r LEFT JOIN marshal_taken_ranges AS t ON t.id = r.marshal_range "
        "AND t.partition = r.kafka_partition AND r.kafka_offset >= t.start_offset AND r.kafka_offset < t.end_offset "
        "WHERE t.id IS NULL"
    )
    assert outside == [(0,)]
