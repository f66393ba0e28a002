"""The outbox: how fast it publishes a backlog, compared with a bare loop, and its delay under a steady load."""

import multiprocessing
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
from confluent_kafka import Consumer, Producer

from benchmarks import services
from benchmarks.harness import Benchmark, Case, Goal, Measured, take_turns
from marshal_dagster._internal.postgres import Database
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.harvester import Harvester, OutboxTopics
from marshal_dagster.outbox.interfaces import ID_HEADER
from marshal_dagster.outbox.options import DEFAULT_OPTIONS
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.outbox.writer import Outbox, OutboxRecord

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

TOPIC: Final = "delays"
PARTITIONS: Final = 4
_BATCH: Final = DEFAULT_OPTIONS.limits.max_in_flight_records
"""Rows of a batch of the bare loop: as many as the harvester takes."""
_MESSAGES_AT_ONCE: Final = 1_000
_COMMIT_EACH_S: Final = 0.02
_WINDOWS: Final = 10
_QUANTILE: Final = 99
_PATIENCE_S: Final = 120.0
_TOLD_SETTINGS: Final = ["synchronous_commit", "fsync", "server_version"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: rows of a backlog, their bytes and keys, rounds and warm-up; rate and duration of the steady load."""

    rows: int = 200_000
    value_bytes: int = 200
    keys: int = 1_000
    alternations: int = 5
    warm_up: int = 1
    steady_rate: int = 5_000
    steady_seconds: int = 60


@dataclass(slots=True)
class Sides:
    """Both ways to publish the same table to the same topic; each call returns rows per second."""

    dsn: str
    connection: KafkaConnection
    sizes: Sizes
    tables: OutboxTables = field(init=False)

    def __post_init__(self) -> None:
        """Create the outbox."""
        self.tables = OutboxTables(Database(self.dsn))
        OutboxTopics.of(self.tables.create().uid).create(self.connection)

    def ours(self, keys: int) -> float:
        """Publish with a harvester that is the leader already. The time starts when the backlog is committed."""
        harvester = Harvester(self.tables, self.connection)
        thread = threading.Thread(target=harvester.run)
        thread.start()
        try:
            _wait(lambda: harvester.counts.sessions > 0)
            with self._let_in(keys):
                began_s = time.perf_counter()
            _wait(lambda: harvester.counts.published >= self.sizes.rows)
            rate = self.sizes.rows / (time.perf_counter() - began_s)
            self._require_empty()
        finally:
            harvester.stop()
            thread.join()
        return rate

    def bare(self, keys: int) -> float:
        """Publish with a loop that selects, produces, waits for the brokers and deletes, without fencing or order."""
        producer = Producer(
            {"bootstrap.servers": self.connection.bootstrap_servers, "enable.idempotence": True, "linger.ms": 5}
        )
        producer.list_topics(TOPIC, timeout=10)
        with self._let_in(keys):
            pass
        began_s = time.perf_counter()
        with psycopg.connect(self.dsn) as connection:
            while found := connection.execute(
                "SELECT id, topic, key, value FROM outbox ORDER BY id LIMIT %s", (_BATCH,)
            ).fetchall():
                for _, topic, key, value in found:
                    producer.produce(topic, value, key)
                producer.flush()
                connection.execute("DELETE FROM outbox WHERE id = ANY(%s)", ([number for number, *_ in found],))
                connection.commit()
        return self.sizes.rows / (time.perf_counter() - began_s)

    @contextmanager
    def _let_in(self, keys: int) -> Iterator[None]:
        """Write the backlog in one transaction, which is committed after the block."""
        value = b"x" * self.sizes.value_bytes
        with psycopg.connect(self.dsn) as connection:
            Outbox().stash(
                connection,
                (OutboxRecord(TOPIC, value, key=f"key-{number % keys}") for number in range(self.sizes.rows)),
            )
            yield

    def _require_empty(self) -> None:
        backlog = OutboxInspector(self.tables)
        _wait(lambda: backlog.status().rows == 0)
        parked = backlog.status().parked
        backlog.close()
        if parked:
            raise RuntimeError(f"{parked} rows were set aside")


@dataclass(slots=True)
class Steady:
    """Result of the steady load: the delay from commit to read of each row, by id, in milliseconds."""

    waited_ms: "array[float]"
    table_bytes: int

    @property
    def windows(self) -> "list[array[float]]":
        """The delays of each tenth of the duration."""
        width = max(1, len(self.waited_ms) // _WINDOWS)
        return [self.waited_ms[width * number : width * (number + 1)] for number in range(_WINDOWS)]


def steady(dsn: str, connection: KafkaConnection, sizes: Sizes) -> Steady:
    """Write at a steady rate, with a harvester and a reader of committed records in processes of their own."""
    spawn = multiprocessing.get_context("spawn")
    stop, waited = spawn.Event(), spawn.SimpleQueue()
    total = sizes.steady_rate * sizes.steady_seconds
    servers = connection.bootstrap_servers
    harvester = spawn.Process(target=_harvest, args=(dsn, servers, stop))
    reader = spawn.Process(target=_read, args=(servers, total, waited))
    harvester.start()
    reader.start()
    try:
        if waited.get() != "ready":
            raise RuntimeError("the reader did not start")
        first, committed = _write(dsn, sizes, total)
        first_read: int
        read: array[float]
        first_read, read = waited.get()
    finally:
        stop.set()
        for process in (harvester, reader):
            process.join(_PATIENCE_S)
    with psycopg.connect(dsn) as asking:
        found = asking.execute("SELECT pg_total_relation_size('outbox')").fetchone()
    if (first_read, len(read)) != (first, len(committed)):
        raise RuntimeError(
            f"{len(committed):,} rows from {first} on were committed, {len(read):,} from {first_read} read"
        )
    waits = array("d", ((there_s - at_s) * 1_000 for there_s, at_s in zip(read, committed, strict=True)))
    return Steady(waits, found[0] if found else 0)


def _write(dsn: str, sizes: Sizes, total: int) -> "tuple[int, array[float]]":
    """Write rows at the rate. Returns the id of the first row, and when each row was committed."""
    outbox, value = Outbox(), b"x" * sizes.value_bytes
    committed = array("d")
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT coalesce(pg_sequence_last_value('outbox_id_seq'), 0)").fetchone()
        number = found[0] if found else 0
        connection.commit()
        first, began_s = number + 1, time.monotonic()
        while len(committed) < total:
            due = min(total, round((time.monotonic() - began_s) * sizes.steady_rate)) - len(committed)
            if due > 0:
                outbox.stash(
                    connection,
                    [OutboxRecord(TOPIC, value, key=f"key-{(number + each) % sizes.keys}") for each in range(due)],
                )
                connection.commit()
                committed.extend([time.monotonic()] * due)
                number += due
            time.sleep(_COMMIT_EACH_S)
    return first, committed


def _harvest(dsn: str, servers: str, stop: "Event") -> None:
    harvester = Harvester(OutboxTables(Database(dsn)), KafkaConnection(bootstrap_servers=servers))

    def stop_when_requested() -> None:
        stop.wait()
        harvester.stop()

    threading.Thread(target=stop_when_requested, daemon=True).start()
    harvester.run()


def _read(servers: str, total: int, reported: Any) -> None:  # noqa: ANN401 - a queue of multiprocessing
    """Read new committed records, and put the lowest id and the arrival times, sorted by id, into the queue."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "benchmark",
            "isolation.level": "read_committed",
            "auto.offset.reset": "latest",
            "fetch.wait.max.ms": 5,
        }
    )
    assigned = threading.Event()
    consumer.subscribe([TOPIC], on_assign=lambda *_: assigned.set())
    while not assigned.is_set():
        consumer.poll(0.1)
    consumer.poll(2)
    reported.put("ready")
    numbers, came = array("q"), array("d")
    last_s = time.monotonic()
    while len(came) < total and time.monotonic() - last_s < _PATIENCE_S:
        first = consumer.poll(0.1)
        messages = [] if first is None else [first, *consumer.consume(_MESSAGES_AT_ONCE, 0)]
        last_s = time.monotonic() if messages else last_s
        for message in messages:
            headers = cast("Sequence[tuple[str, bytes]]", message.headers() or ())
            numbers.append(int(dict(headers)[ID_HEADER].rpartition(b"-")[2]))
            came.append(last_s)
    consumer.close()
    in_order = [came[each] for each in sorted(range(len(came)), key=numbers.__getitem__)]
    reported.put((min(numbers), array("d", in_order)))


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the condition was not met within {_PATIENCE_S:g} s")
        time.sleep(0.005)


def run(sizes: Sizes) -> Measured:
    """Measure with one broker and one database, which waits for the disk at each commit."""
    with services.broker() as connection, services.postgres() as dsn:
        with Topics(connection) as topics:
            topics.create(TOPIC, PARTITIONS, 1)
        sides = Sides(dsn, connection, sizes)
        many, bare, one = take_turns(
            sizes.alternations,
            [lambda: sides.ours(sizes.keys), lambda: sides.bare(sizes.keys), lambda: sides.ours(1)],
            warm_up=sizes.warm_up,
        )
        load = steady(dsn, connection, sizes)
        with psycopg.connect(dsn) as asking:
            found = asking.execute("SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", (_TOLD_SETTINGS,))
            shown: dict[str, str] = dict(found.fetchall())
    tenths = [_high(window) for window in load.windows]
    cases = [
        Case(f"{sizes.keys:,} keys, beside a bare loop", many, bare, "rows/s", Goal.OURS_AT_LEAST, 80_000),
        Case("one key, beside many", one, many, "rows/s", Goal.OURS_AT_LEAST, 10_000),
        Case(
            f"commit to reader at {sizes.steady_rate:,} rows/s, p99 beside median",
            [_high(load.waited_ms)],
            [statistics.median(load.waited_ms)],
            "ms",
            Goal.OURS_AT_MOST,
            20,
        ),
        Case(
            f"the last tenth of {sizes.steady_seconds:,} s beside the second, p99",
            [tenths[-1]],
            [tenths[1]],
            "ms",
            Goal.RATIO_AT_MOST,
            1.5,
        ),
    ]
    conditions = {
        "postgres": shown,
        "table_bytes_at_the_end": load.table_bytes,
        "tenths_ms": [
            {
                "median": round(statistics.median(window), 2),
                "p99": round(_high(window), 2),
                "most": round(max(window), 2),
            }
            for window in load.windows
        ],
    }
    return Measured(cases, conditions)


def _high(waits: Sequence[float]) -> float:
    return statistics.quantiles(waits, n=100, method="inclusive")[_QUANTILE - 1]


BENCHMARK: Final = Benchmark("outbox", "rows of an outbox to Kafka: a backlog, and a steady load", Sizes(), run)
