# ruff: noqa: PT012 - the block that raises is a batch
"""The commands of docs/operate/disaster-recovery.md on real services: what each case loses and repeats."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from marshal_dagster.batches import BatchRequest, BatchSession
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.devkafka import running_kafka
from marshal_dagster.errors import MarshalError, SinkRejectedError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.writer import OutboxRecord
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings
from marshal_dagster.sinks.database.postgres import PostgresSink
from marshal_dagster.sinks.sink import Sink
from tests.batch_fixtures import MemorySink
from tests.cli import Answer, call, start
from tests.conditions import WITHIN_S, wait_until
from tests.outbox_fixtures import Site
from tests.pages import command_blocks
from tests.real.conftest import MakeTopic
from tests.real.kill_points import read_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "disaster-recovery.md").read_text()
EMPTY, MIRROR = "A new, empty cluster", "A mirror with other offsets"
LOST, RESTORED, LEFT = "The coordination topic is lost", "The database is restored to yesterday", "Leave the library"
COMMITTED, ALL = 12, 20
NATIVE = GroupSettings(10_000)
ONCE = replace(NATIVE, delivery=DeliveryMode.EFFECTIVELY_ONCE)


def blocks(section: str) -> list[list[str]]:
    """Return the commands of each block in a section of the page."""
    text = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (found,) = [part for part in text if part.startswith(f"{section}\n")]
    return command_blocks(found)


@dataclass(slots=True)
class Deployment:
    """A group on a cluster, its data topic, and the records that it has processed."""

    connection: KafkaConnection
    topic: str
    coordination_topic: str
    group: str = field(default_factory=lambda: new_instance_id("shops"))
    processed: Counter[int] = field(default_factory=Counter)

    def work(
        self, most: int | None = None, *, settings: GroupSettings = NATIVE, sink: Sink | None = None, group: str = ""
    ) -> None:
        """Process batches until `most` records or all were processed."""
        done = 0
        with BatchSession.open(
            self.connection, group or self.group, settings=settings, coordination_topic=self.coordination_topic
        ) as session:
            for claimed in session.batches(BatchRequest(topic=self.topic, max_records=4), sink):
                if most is not None and done >= most:
                    break
                with claimed as batch:
                    if batch.idle is not None:
                        continue
                    batch.begin_processing()
                    found = read_messages(self.connection, batch.ranges)
                    done += len(found)
                    if sink is not None:
                        batch.write(cast("DataFrame", found))
                    else:
                        self.processed.update(offset for _, offset in found)


@dataclass(slots=True)
class Operator:
    """A person who runs the commands of the page, with the names of this test."""

    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]
    names: dict[str, str]

    def run(self, commands: list[str]) -> list[Answer]:
        """Run commands, each of which must succeed."""
        answers = [self.call(command) for command in commands]
        assert [answer.code for answer in answers] == [0] * len(commands), answers
        return answers

    def call(self, command: str) -> Answer:
        """Run a command."""
        pattern = "|".join(rf"(?<![\w.]){re.escape(name)}(?![\w.])" for name in self.names)
        program, *arguments = shlex.split(re.sub(pattern, lambda found: self.names[found[0]], command))
        if program == "export":
            name, _, value = arguments[0].partition("=")
            self.patch.setenv(name, value)
            return Answer(0, "", "")
        if program == "kafka-topics":
            servers, topic = arguments[1], arguments[-1]
            admin = AdminClient({"bootstrap.servers": servers})
            for deleted in admin.delete_topics([topic]).values():
                deleted.result(WITHIN_S)
            return Answer(0, "", "")
        assert program == "marshal-dagster"
        if arguments[-1] == "drain":  # it handles signals, for which it needs a process of its own
            given = {name: value for name, value in os.environ.items() if name.startswith("MARSHAL_")}
            return start(*arguments, environment=given)
        return call(self.capsys, *arguments)


MakeOperator = Callable[..., Operator]


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> MakeOperator:
    """A function that returns an operator with these names for those of the page."""
    monkeypatch.delenv("MARSHAL_COORDINATION_TOPIC", raising=False)
    return lambda **names: Operator(monkeypatch, capsys, names)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaConnection]:
    """A second cluster, which is empty at first."""
    with running_kafka(tmp_path_factory.mktemp("second")) as cluster:
        yield KafkaConnection(bootstrap_servers=cluster.bootstrap_servers)


@pytest.fixture
def old(
    connection: KafkaConnection, coordination_topic: str, topic: MakeTopic, fill: Callable[[str, int, int], None]
) -> Deployment:
    """A deployment that has committed 12 of 20 records."""
    data = topic(1)
    fill(data, 1, ALL)
    deployment = Deployment(connection, data, coordination_topic)
    deployment.work(COMMITTED)
    assert deployment.processed == Counter(range(COMMITTED))
    return deployment


def send(connection: KafkaConnection, topic: str, count: int) -> None:
    """Send records to a topic."""
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for number in range(count):
        producer.produce(topic, f"message {number}")
    assert producer.flush(WITHIN_S) == 0


def test_a_new_empty_cluster(old: Deployment, second: KafkaConnection, operator: MakeOperator, database: str) -> None:
    """Records that were not committed are lost, new ones are processed once, and waiting outbox rows are published."""
    sink, other = MemorySink(), new_instance_id("once")
    old.work(settings=ONCE, sink=sink, group=other)
    site = Site(database, old.connection, "outbox")
    site.stash(*(OutboxRecord(old.topic, "published", key="k") for _ in range(2)))
    assert site.harvest().published == 2
    site.stash(OutboxRecord(old.topic, "waiting", key="k"))

    names = {"new-cluster:9092": second.bootstrap_servers, "shops": old.group}
    person = operator(**names)
    setup, outbox = blocks(EMPTY)
    with Topics(second) as topics:
        assert topics.create(old.topic, 1, 1)
    send(second, old.topic, 10)
    person.run(setup)
    new = replace(old, connection=second, coordination_topic="__marshal", processed=Counter())
    new.work()
    assert new.processed == Counter(range(10))

    with pytest.raises(SinkRejectedError, match="the coordination topic was deleted and re-created"):
        new.work(settings=ONCE, sink=sink, group=other)
    assert len(sink.rows) == ALL
    fresh = MemorySink()
    new.work(settings=ONCE, sink=fresh, group=f"{other}-2")
    assert fresh.counts() == {(0, offset): 1 for offset in range(10)}

    person.patch.setenv("MARSHAL_OUTBOX_DSN", database)
    person.run(outbox)
    moved = Site(database, second, "outbox")
    assert site.rows() == []
    found = [value for value in read_values(second, old.topic, 10) if value]
    assert found == ["waiting"]
    assert moved.uid == site.uid


def read_values(connection: KafkaConnection, topic: str, start: int) -> list[str]:
    """Return the values of a topic's only partition from `start` to its end."""
    consumer = Consumer(
        {
            "bootstrap.servers": connection.bootstrap_servers,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, start)])
    found: list[str] = []
    with closing(consumer):
        while (message := consumer.poll(WITHIN_S)) is not None and message.error() is None:
            found.append((message.value() or b"").decode())
    return found


def test_a_mirror_with_other_offsets(old: Deployment, second: KafkaConnection, operator: MakeOperator) -> None:
    """Nothing that was mirrored is lost; what is between the translated offset and the commit is processed again."""
    shift, translated = 5, COMMITTED - 2
    with Topics(second) as topics:
        assert topics.create(old.topic, 1, 1)
        send(second, old.topic, shift)
        admin = AdminClient({"bootstrap.servers": second.bootstrap_servers})
        for deleted in admin.delete_records([TopicPartition(old.topic, 0, shift)]).values():
            deleted.result(WITHIN_S)
        send(second, old.topic, ALL)
        assert topics.commit_group_offsets(old.group, old.topic, {0: shift + translated}) is None

    person = operator(**{"mirror:9092": second.bootstrap_servers, "shops": old.group, "orders": old.topic})
    by_group, by_time = blocks(MIRROR)
    person.run(by_group)
    new = replace(old, connection=second, coordination_topic="__marshal", processed=Counter())
    new.work()
    assert new.processed == Counter(shift + number for number in range(translated, ALL))
    person.run(by_time)
    new.work()
    assert new.processed == Counter(shift + number for number in range(ALL)) + Counter(
        shift + number for number in range(translated, ALL)
    )


def test_the_coordination_topic_is_lost(old: Deployment, operator: MakeOperator) -> None:
    """No record is lost, and the batch that was under way is repeated."""
    admin = AdminClient({"bootstrap.servers": old.connection.bootstrap_servers})
    session = BatchSession.open(old.connection, old.group, settings=NATIVE, coordination_topic=old.coordination_topic)
    batch = session.claimed_batch(BatchRequest(topic=old.topic, max_records=4))
    with closing(session), pytest.raises(MarshalError), batch:
        batch.begin_processing()
        old.processed.update(offset for _, offset in read_messages(old.connection, batch.ranges))
        for deleted in admin.delete_topics([old.coordination_topic]).values():
            deleted.result(WITHIN_S)
        wait_until(
            lambda: old.coordination_topic not in admin.list_topics(timeout=WITHIN_S).topics, "the topic is deleted"
        )
    person = operator(shops=old.group, orders=old.topic)
    person.patch.setenv("MARSHAL_BOOTSTRAP_SERVERS", old.connection.bootstrap_servers)
    person.patch.setenv("MARSHAL_COORDINATION_TOPIC", old.coordination_topic)
    (steps,) = blocks(LOST)
    person.run(steps)
    old.work()
    assert old.processed == Counter(range(ALL)) + Counter(range(COMMITTED, COMMITTED + 4))


def test_the_database_is_restored_to_yesterday(  # noqa: PLR0917 - fixtures
    old: Deployment, operator: MakeOperator, database: str, postgres: str, tmp_path: Path, spark: "SparkSession"
) -> None:
    """The next batch is refused. After the steps each row is in the output once, and the later batches ran twice."""
    group, calls = new_instance_id("shops"), Counter[int]()
    sink = PostgresSink(database, "orders", written_by="driver")
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sinks.py").write_text(
        f"from marshal_dagster import PostgresSink\n\norders = PostgresSink({database!r}, 'orders')\n"
    )

    def work(most: int | None = None) -> None:
        with BatchSession.open(
            old.connection, group, settings=ONCE, coordination_topic=old.coordination_topic
        ) as session:
            for claimed in session.batches(BatchRequest(topic=old.topic, max_records=most), sink):
                with claimed as batch:
                    if batch.idle is not None:
                        break
                    frame = batch.read(spark).selectExpr("partition", "offset", "CAST(value AS STRING) AS text")
                    calls.update(row.offset for row in frame.select("offset").collect())
                    batch.write(frame)
                if most is not None:
                    break

    sink.create_tables(spark.createDataFrame([], "partition int, offset long, text string").schema)
    name = conninfo_to_dict(database)["dbname"]
    shop, backup = sql.Identifier(str(name)), sql.Identifier(f"{name}_backup")
    work(COMMITTED)
    with psycopg.connect(postgres, autocommit=True) as server:
        server.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(backup, shop))
        work()
        server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(shop))
        server.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(backup, shop))
    send(old.connection, old.topic, 4)
    with pytest.raises(SinkRejectedError):
        work()

    person = operator(**{"shops": group, "orders": old.topic, "0=1500,1=1720": f"0={COMMITTED}"})
    person.patch.syspath_prepend(tmp_path)
    person.patch.setenv("MARSHAL_BOOTSTRAP_SERVERS", old.connection.bootstrap_servers)
    person.patch.setenv("MARSHAL_COORDINATION_TOPIC", old.coordination_topic)
    look, (reset,) = blocks(RESTORED)
    person.names["my_project.sinks:orders"] = "my_project.sinks:orders"
    check, describe = person.run(look)
    assert "The output is whole." in check.out
    assert [stored.end for stored in sink.describe().generations] == [COMMITTED]
    assert f" {COMMITTED} " in describe.out
    person.run([reset])
    work()
    with psycopg.connect(database) as reader:
        found = reader.execute("SELECT kafka_offset FROM orders").fetchall()
    assert Counter(offset for (offset,) in found) == Counter(range(ALL + 4))
    assert calls == Counter(range(ALL + 4)) + Counter(range(COMMITTED, ALL))


def test_leaving_the_library(old: Deployment, operator: MakeOperator) -> None:
    """A plain consumer of the same group continues at the position: nothing is lost and nothing is repeated."""
    look, delete = blocks(LEFT)
    person = operator(shops=old.group, orders=old.topic)
    person.names |= {
        "old-cluster:9092": old.connection.bootstrap_servers,
        "__marshal_snapshot": f"{old.coordination_topic}_snapshot",
        "__marshal": old.coordination_topic,
    }
    person.patch.setenv("MARSHAL_BOOTSTRAP_SERVERS", old.connection.bootstrap_servers)
    person.patch.setenv("MARSHAL_COORDINATION_TOPIC", old.coordination_topic)
    person.run(["marshal-dagster topic create --partitions 4"])
    person.run(look)
    consumer = Consumer(
        {
            "bootstrap.servers": old.connection.bootstrap_servers,
            "group.id": old.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe([old.topic])
    with closing(consumer):
        while (message := consumer.poll(WITHIN_S)) is not None and message.error() is None:
            old.processed[message.offset() or 0] += 1
    assert old.processed == Counter(range(ALL))
    person.run(delete)
    admin = AdminClient({"bootstrap.servers": old.connection.bootstrap_servers})
    wait_until(
        lambda: (
            not {person.names["__marshal"], person.names["__marshal_snapshot"]}
            & set(admin.list_topics(timeout=WITHIN_S).topics)
        ),
        "the topics are deleted",
    )
