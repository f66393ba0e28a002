"""Data of version 0.1 is continued by this version (docs/how-to/upgrading.md).

`tests/data/version_0_1` has topics, tables and outputs that the code of commit 1698b61 wrote. Each test loads what it
needs into the suite's services, under the names that the data has. Kafka gives the topics other ids, so
`Topics.describe` reports the ids of then.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from confluent_kafka import Producer
from psycopg import sql

from marshal_dagster._internal.postgres import Database
from marshal_dagster.admin.position_spec import LogEnd
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, RangeOptions
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordinator.messages import StartFetcher
from marshal_dagster.coordinator.transport import CoordinatorTopics, read_coordinator_messages
from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnsafeTopicError
from marshal_dagster.kafka.admin_client import TopicDescription, Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.writer import OutboxRecord
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import RANGES
from marshal_dagster.sinks import DeltaSink, FileSink, KafkaSink, PostgresSink, Sink
from tests.conditions import WITHIN_S, wait_until
from tests.kafka_outputs import committed
from tests.outbox_fixtures import Site, values
from tests.real.kill_points import drain
from tests.real.test_coordinator import coordinator, member
from tests.topics import alter, reserved

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER: Final = Path(__file__).parents[1] / "data" / "version_0_1"
COORDINATION, DATA, COPIES = "former.coordination", "former.orders", "former.copies"
EVENTS, COORDINATOR = "former.events", "former.coordinator"
TOPIC_IDS: Final[dict[str, str]] = json.loads((FOLDER / "topic_ids.json").read_text(encoding="utf-8"))
PARTITIONS: Final = 2
HEARTBEAT_INTERVAL_MS: Final = 60_000
INPUT: Final = sorted(f"message {number}" for number in range(16))
WRITTEN: Final = sorted(f"message {number}" for number in range(12))
"""What version 0.1 left in each output; four of these messages are in a plan that was not committed."""


def records_of(topic: str) -> list[dict[str, Any]]:
    """Return the records of a topic."""
    return [json.loads(line) for line in (FOLDER / f"{topic}.jsonl").read_text(encoding="utf-8").splitlines()]


class Cluster:
    """The suite's broker with topics of version 0.1."""

    def __init__(self, connection: KafkaConnection, topics: Topics, stack: ExitStack) -> None:
        self.connection, self.topics, self._stack = connection, topics, stack

    def load(self, *names: str, settings: Mapping[str, str] = {"retention.ms": "-1"}) -> None:
        """Create topics with the records that version 0.1 left in them; they are deleted at the end.

        The records keep their timestamps, because pauses in them end at a fixed time.
        """
        producer = Producer({"bootstrap.servers": self.connection.bootstrap_servers})
        for name in names:
            self._stack.enter_context(reserved(self.topics, name))
            assert self.topics.create(name, PARTITIONS, 1, settings)
            for record in records_of(name):
                producer.produce(
                    name,
                    record["value"],
                    record.get("key"),
                    record["partition"],
                    timestamp=record["timestamp"],
                    headers=[(name, value) for name, value in record.get("headers", ())],
                )
        assert producer.flush(WITHIN_S) == 0

    def session(self, group: str) -> BatchSession:
        """Open a member of this version."""
        features = (RANGES,) if "range" in group else ()
        log = KafkaLog(self.connection, COORDINATION, HEARTBEAT_INTERVAL_MS)
        self._stack.callback(log.close)
        return BatchSession(
            log=log,
            data=self.topics,
            connection=self.connection,
            group=group,
            client="this version",
            run_id="today",
            settings=GroupSettings(HEARTBEAT_INTERVAL_MS, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE, features),
        )

    def drain(self, group: str, sink: Sink, spark: "SparkSession", text: str = "message") -> list[ClaimedBatch]:
        """Process batches until all messages are processed, at most four messages in each."""
        member = self.session(group)
        limits = {"ranges": RangeOptions(size=2)} if "range" in group else {"max_records": 4}
        columns = ["partition", "offset", f"replace(CAST(value AS STRING), 'message', '{text}') AS value"]
        columns += ["timestamp_seconds(offset) AS at"] if "time" in group else []
        return drain(
            lambda: member.claimed_batch(BatchRequest(topic=DATA, **limits), sink),
            lambda batch: batch.write(batch.read(spark).selectExpr(*columns).coalesce(1)),
        )

    def set_back(self, group: str) -> None:
        """Set the position of a group to the first offset."""
        open_log = lambda interval_ms: Rationalizer(KafkaLog(self.connection, COORDINATION, interval_ms))  # noqa: E731
        with closing(PositionResetter(open_log, self.topics, group, DATA, "operator")) as resetter:
            resetter.carry_out(resetter.look(LogEnd.EARLIEST), wait_s=WITHIN_S)


@pytest.fixture
def cluster(connection: KafkaConnection, topics: Topics, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The suite's broker with the coordination log and the data topic of version 0.1."""
    describe = Topics.describe

    def describe_former(topics: Topics, topic: str) -> TopicDescription:
        found = describe(topics, topic)
        return replace(found, topic_id=TOPIC_IDS.get(topic, found.topic_id))

    monkeypatch.setattr(Topics, "describe", describe_former)
    with ExitStack() as stack:
        cluster = Cluster(connection, topics, stack)
        cluster.load(COORDINATION, DATA)
        alter(connection, COORDINATION, "message.timestamp.type", "LogAppendTime")
        yield cluster


@pytest.fixture
def tables(database: str) -> str:
    """A database with the tables that version 0.1 left."""
    with psycopg.connect(database) as connection:
        connection.execute((FOLDER / "tables.sql").read_bytes())
    return database


@dataclass(frozen=True)
class Output:
    """An output of version 0.1."""

    sink: Sink
    values: Callable[[], list[str]]
    """Returns the values of all rows, as a reader sees them now."""


@pytest.fixture
def output(request: pytest.FixtureRequest, cluster: Cluster, spark: "SparkSession", tmp_path: Path) -> Output:
    """The output of the group in the parameter."""
    group: str = request.param
    name = group.replace(" ", "_")
    if (FOLDER / name).is_dir():
        shutil.copytree(FOLDER / name, tmp_path / name)
    match group:
        case "files" | "range files":
            files = FileSink(tmp_path / name)
            return Output(files, lambda: sorted(row.value for row in files.read(spark).collect()))
        case "delta":
            path = str(tmp_path / name)
            table = DeltaSink(path, session=lambda: spark)
            return Output(table, lambda: sorted(row.value for row in spark.read.format("delta").load(path).collect()))
        case "copies":
            cluster.load(COPIES)
            cluster.load(f"{COPIES}_marshal_ranges", settings={"cleanup.policy": "compact"})
            topic = KafkaSink(cluster.connection, COPIES)
            return Output(topic, lambda: sorted(text(record) for record in committed(cluster.connection, COPIES)))
    dsn = request.getfixturevalue("tables")
    of_group = {"table": "rows", "range table": "range_rows"}[group]

    def values_of_table() -> list[str]:
        with psycopg.connect(dsn) as connection:
            found = connection.execute(sql.SQL("SELECT value FROM {}").format(sql.Identifier(of_group)))
            return sorted(value for (value,) in found)

    return Output(PostgresSink(dsn, of_group), values_of_table)


def text(record: Any) -> str:  # noqa: ANN401 - the hints of the client library lack what it returns
    """Return the value of a record."""
    return str(record.value().decode())


GROUPS: Final = ["files", "range files", "table", "range table", "delta", "copies"]


@pytest.mark.parametrize(("group", "output"), [(group, group) for group in GROUPS], indirect=["output"], ids=GROUPS)
def test_an_output_is_continued(cluster: Cluster, spark: "SparkSession", output: Output, group: str) -> None:
    """Readers see all rows, the open plan is taken over without a second write, and the next batch follows it.

    After the position was set back, all rows are replaced. Only a Kafka topic refuses that.
    """
    assert output.values() == WRITTEN

    done = cluster.drain(group, output.sink, spark)

    assert [sorted((at.partition, at.start, at.end) for at in batch.skipped) for batch in done] == [
        [(0, 4, 6), (1, 4, 6)],
        [],
    ]
    assert [sorted((at.partition, at.start, at.end) for at in batch.ranges) for batch in done] == [
        [],
        [(0, 6, 8), (1, 6, 8)],
    ]
    assert output.values() == INPUT

    cluster.set_back(group)
    if group == "copies":
        with pytest.raises(SinkRejectedError, match="on_new_generation"):
            cluster.drain(group, output.sink, spark)
        assert output.values() == INPUT
        return
    cluster.drain(group, output.sink, spark, "replacing")
    assert output.values() == [value.replace("message", "replacing") for value in INPUT]


def test_a_delta_table_partitioned_by_a_timestamp_is_refused(
    cluster: Cluster, spark: "SparkSession", tmp_path: Path
) -> None:
    """The table is refused with the column's name before anything is written."""
    shutil.copytree(FOLDER / "delta_by_time", tmp_path / "table")
    commits = sorted((tmp_path / "table" / "_delta_log").iterdir())
    sink = DeltaSink(str(tmp_path / "table"), session=lambda: spark)
    with pytest.raises(ConfigurationError, match="partitioned by column 'at' of type timestamp"):
        cluster.drain("delta by time", sink, spark)
    assert sorted((tmp_path / "table" / "_delta_log").iterdir()) == commits


def test_a_log_with_the_timestamps_of_senders_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """The log is refused until its topic stores the broker's timestamps."""
    alter(cluster.connection, COORDINATION, "message.timestamp.type", "CreateTime")
    with pytest.raises(UnsafeTopicError, match="LogAppendTime"):
        cluster.session("files").claimed_batch(BatchRequest(topic=DATA), FileSink(tmp_path))


def test_an_outbox_is_continued(cluster: Cluster, tables: str) -> None:
    """Events in Kafka are not published again, those that waited are published once, and ids continue."""
    uid = OutboxTables(Database(tables)).create().uid
    cluster.load(EVENTS, OutboxTopics.of(uid).notes)
    outbox = Site(tables, cluster.connection, "outbox")
    assert outbox.uid == uid
    published = [f"event {number}" for number in range(8)]
    assert sorted(values(outbox.read(EVENTS))) == published
    assert len(outbox.rows()) == 6
    (parked,) = outbox.parked()
    assert (parked.topic, parked.size) == ("former.missing", len("event 99"))

    outbox.stash(OutboxRecord(EVENTS, "event 10", key="key 1"))
    counts = outbox.harvest()

    found = outbox.read(EVENTS)
    assert sorted(values(found)) == sorted([*published, "event 8", "event 9", "event 10"])
    assert len({record.row for record in found}) == len(found)
    assert max(found, key=lambda record: record.row).value == b"event 10"
    assert counts.parked == 0
    assert outbox.rows() == []
    assert outbox.parked() == [parked]


def test_a_coordinator_continues_in_a_later_epoch(cluster: Cluster) -> None:
    """A new coordinator reads the shares of version 0.1, and gives both members theirs in a later epoch."""
    topics = CoordinatorTopics(COORDINATOR)
    cluster.load(topics.member_messages, topics.coordinator_messages, topics.leader)
    former = started(cluster.connection, topics)
    assert {name: message.places for name, message in former.items()} == {"m0": {DATA: [0]}, "m1": {DATA: [1]}}

    with (
        coordinator(cluster.connection, topics),
        member(cluster.connection, topics, "m0", DATA, "coordinated") as first,
        member(cluster.connection, topics, "m1", DATA, "coordinated") as second,
    ):
        wait_until(lambda: first.works_on and second.works_on, "each member has a partition")
        assert (first.works_on, second.works_on) == ({(DATA, 0)}, {(DATA, 1)})
        now = started(cluster.connection, topics)
    assert all(now[name].epoch > message.epoch for name, message in former.items())


def started(connection: KafkaConnection, topics: CoordinatorTopics) -> dict[str, StartFetcher]:
    """Return the newest share of each member."""
    found = read_coordinator_messages(connection, topics.coordinator_messages, range(PARTITIONS))
    return {message.member: message for message, _ in found if isinstance(message, StartFetcher)}
