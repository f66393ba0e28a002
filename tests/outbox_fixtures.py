"""An outbox for one test on real services: write rows, harvest them step by step, and read them as consumers do."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import psycopg
from confluent_kafka import Consumer, KafkaError, TopicPartition

from marshal_dagster._internal.postgres import Database
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvest import Harvest, HarvestCounts
from marshal_dagster.outbox.harvester import Harvester, OutboxTopics
from marshal_dagster.outbox.interfaces import ID_HEADER, Header, Row
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.publisher import KafkaPublisher
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector, OutboxStatus, ParkedRow
from marshal_dagster.outbox.store import PostgresStore
from marshal_dagster.outbox.writer import Outbox, OutboxRecord
from tests.conditions import WITHIN_S

LONG_MS: Final = 60_000
MOST_TURNS: Final = 200


class Published(NamedTuple):
    """A record as a consumer reads it; `headers` are without the row's id, which is in `row`."""

    key: bytes | None
    value: bytes | None
    headers: list[Header]
    row: int
    partition: int


class Session:
    """A session of harvesting, step by step; only the test moves its clock."""

    def __init__(self, site: "Site", limits: HarvestLimits) -> None:
        self.store, self.publisher = PostgresStore(site.tables), site.publisher()
        self.counts = HarvestCounts()
        self.now_ms = 0.0
        self.harvest = Harvest(
            self.store, self.publisher, limits=limits, counts=self.counts, now_ms=lambda: self.now_ms
        )

    def turns(self) -> list[int]:
        """Start, and harvest without waiting until no row is left; return the number of rows of each step."""
        self.harvest.begin()
        taken: list[int] = []
        while len(taken) < MOST_TURNS:
            taken.append(self.harvest.turn())
            if taken[-2:] == [0, 0]:
                break
            self.now_ms += LONG_MS
        self.harvest.finish()
        return taken

    def close(self) -> None:
        """Close the connections."""
        self.publisher.close()
        self.store.close()


class Site:
    """An outbox with its tables and topics."""

    def __init__(self, dsn: str, connection: KafkaConnection, name: str | None = None, schema: str = "public") -> None:
        self.dsn, self.connection = dsn, connection
        self.name = name or f"outbox_{uuid.uuid4().hex[:8]}"
        self.tables = OutboxTables(Database(dsn), self.name, schema)
        self.uid = self.tables.create().uid
        self.topics = OutboxTopics.of(self.uid)
        self.topics.create(connection)
        self.outbox = Outbox(self.name, schema=schema, max_bytes=50_000_000)

    def stash(self, *records: OutboxRecord) -> None:
        """Write rows in one transaction."""
        with psycopg.connect(self.dsn) as connection:
            self.outbox.stash(connection, records)

    def publisher(self) -> KafkaPublisher:
        """Return a publisher for Kafka."""
        return KafkaPublisher(self.connection, self.uid, self.topics.notes)

    @contextmanager
    def session(self, **limits: int) -> Iterator[Session]:
        """Open a session that has not started."""
        session = Session(self, HarvestLimits(topic_patience_s=0, **limits))
        try:
            yield session
        finally:
            session.close()

    def harvest(self, **limits: int) -> HarvestCounts:
        """Harvest all rows in one session."""
        with self.session(**limits) as session:
            session.turns()
            return session.counts

    def harvester(self, **options: Any) -> Harvester:  # noqa: ANN401
        """Return a harvester that is the leader."""
        return Harvester(self.tables, self.connection, HarvesterOptions(**options))

    def status(self) -> OutboxStatus:
        """Return the status of the outbox."""
        backlog = OutboxInspector(self.tables)
        try:
            return backlog.status()
        finally:
            backlog.close()

    def parked(self) -> list[ParkedRow]:
        """Return the parked rows."""
        backlog = OutboxInspector(self.tables)
        try:
            return backlog.parked()
        finally:
            backlog.close()

    def rows(self) -> list[Row]:
        """Return the rows that wait."""
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(
                self.tables.named("SELECT id, topic, key, value, header_keys, header_values FROM {rows} ORDER BY id"),
                (),
            )
            return [
                Row(number, topic, key, value, None if names is None else list(zip(names, values, strict=True)))
                for number, topic, key, value, names, values in found
            ]

    def read(self, topic: str, *, committed: bool = True) -> list[Published]:
        """Read a topic to its end; the records of each partition are in order."""
        with Topics(self.connection) as topics:
            count = len(topics.describe(topic).partitions)
            bounds = topics.offsets(topic, range(count), committed_only=False)
        consumer = Consumer(
            {
                "bootstrap.servers": self.connection.bootstrap_servers,
                "group.id": "reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 20,
                "fetch.message.max.bytes": 20_000_000,
                "fetch.max.bytes": 50_000_000,
                "receive.message.max.bytes": 60_000_000,
            }
        )
        due = {number for number, each in bounds.items() if each.end}
        consumer.assign([TopicPartition(topic, number, 0) for number in due])
        found: list[Published] = []
        deadline = time.monotonic() + WITHIN_S
        try:
            while due:
                assert time.monotonic() < deadline, f"{topic} was not read to its end: {due}"
                for message in consumer.consume(1_000, 0.05):
                    error, partition = message.error(), message.partition() or 0
                    if error is None:
                        found.append(_published(message))
                    elif error.code() == KafkaError._PARTITION_EOF and (message.offset() or 0) >= bounds[partition].end:
                        due.discard(partition)
        finally:
            consumer.close()
        return found


def values(found: Sequence[Published]) -> list[str]:
    """Return the values of records as text."""
    return [(each.value or b"").decode() for each in found]


def _published(message: Any) -> Published:  # noqa: ANN401 - its hints lack what it gives
    headers = list(message.headers() or [])
    rows = [content.decode() for name, content in headers if name == ID_HEADER]
    assert len(rows) == 1, headers
    rest = [(name, content) for name, content in headers if name != ID_HEADER]
    return Published(message.key(), message.value(), rest, int(rows[0].partition("-")[2]), message.partition())
