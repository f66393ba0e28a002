"""Effectively once with the real sinks: a member dies at any step, and its successor produces the correct output.

The tests share one broker, one warm Spark session and one PostgreSQL. The member dies inside this process
(`tests.real.kill_points`): from one moment on none of its calls reaches the coordination log or the output. Its
successor knows that it is dead, as it would from Dagster. `test_takeover_sinks` has members whose successors wait until
their claims are stale, and that die at each step of the Delta sink.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from confluent_kafka import Producer

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, IdleReason
from marshal_dagster.coordination.claimer import new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.errors import DataTopicChangedError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.sinks import DeltaSink, FileSink, IcebergSink, KafkaSink, MariaDBSink, PostgresSink, Sink
from marshal_dagster.sinks.kafka.records import FrameRecords
from marshal_dagster.sinks.row_writer import RowWriter
from tests.conditions import WITHIN_S
from tests.kafka_outputs import KafkaOutput
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side
from tests.real.sink_worker import iceberg_sink
from tests.real.test_kill_points import APPENDS, COMMITS, POSITIONS
from tests.sink_conformance import Row
from tests.sink_outputs import (
    DATABASE_STEPS,
    FILE_STEPS,
    TABLE,
    UPSERTS,
    MariaDBOutput,
    PostgresOutput,
    counting_files,
    hook,
    own_schema,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HEARTBEAT_INTERVAL_MS = 60_000
"""So long that no background heartbeat is sent and no lease ends, even on two busy cores:

`COMMITS` counts heartbeats.
"""
PARTITIONS, MESSAGES = 2, 10

APPEND_STEPS = [*(KillPoint(side, record) for record in APPENDS for side in Side), *POSITIONS, *COMMITS]
PLANS = [KillPoint(side, "ClaimingMessages") for side in (Side.WITHIN, Side.AFTER)]


class Output(Protocol):
    """An output, as each member opens it, and its contents."""

    def open(self, reached: Callable[[str], None] | None = None) -> Sink:
        """Open the output as another process would. `reached` is called at each of the sink's steps."""
        ...

    def rows(self) -> list[Row]:
        """Return the contents: partition, offset and value, sorted."""
        ...


class Files:
    """A folder of JSON lines, read only by its commit files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, reached: Callable[[str], None] | None = None) -> FileSink:
        """Open the output."""
        sink = FileSink(self.path, format="json")
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Read the committed files."""
        return sorted(
            (row["partition"], row["offset"], row["value"])
            for path, is_replaced in counting_files(self.path)
            for row in map(json.loads, path.read_text().splitlines())
            if not is_replaced(row["offset"])
        )


class HadoopFiles:
    """A folder of JSON lines in a Hadoop file system."""

    def __init__(self, uri: str, spark: "SparkSession") -> None:
        self.uri, self._spark = uri, spark

    def open(self, reached: Callable[[str], None] | None = None) -> FileSink:
        """Open the output."""
        sink = FileSink(self.uri, format="json", session=lambda: self._spark)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Read the output with the sink's own reader. Return no rows if there is no commit yet."""
        sink = self.open()
        if not sink.committed_uris():
            return []
        return sorted(tuple(row) for row in sink.read(self._spark).select("partition", "offset", "value").collect())


class DeltaFolder:
    """A Delta table, read with plain Spark. With `upserts` each message has a key of its own."""

    def __init__(self, path: Path, spark: "SparkSession", *, upserts: bool = False) -> None:
        self.path, self._spark, self.upserts = path, spark, upserts

    def open(self, reached: Callable[[str], None] | None = None) -> DeltaSink:
        """Open the output."""
        sink = DeltaSink(str(self.path), session=lambda: self._spark, **(UPSERTS if self.upserts else {}))
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Read the table. Return no rows if it does not exist yet."""
        if not any(self.path.glob("_delta_log/*.json")):
            return []
        frame = self._spark.read.format("delta").load(str(self.path))
        return sorted(tuple(row) for row in frame.select("partition", "offset", "value").collect())


class IcebergFolder:
    """An Iceberg table in a catalog of its own, read by pyiceberg."""

    def __init__(self, folder: Path) -> None:
        from tests.iceberg_tables import MESSAGES_SCHEMA, create_table

        self.folder = folder
        create_table(folder, MESSAGES_SCHEMA)

    def open(self, reached: Callable[[str], None] | None = None) -> IcebergSink:
        """Open the output."""
        sink = iceberg_sink(self.folder)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Read the table."""
        from tests.iceberg_tables import IcebergTarget

        return IcebergTarget(self.folder).found()


class Keyed(KafkaSink):
    """A sink whose record keys name the source message."""

    def _evaluated(  # type: ignore[override]
        self, frame: "DataFrame", done: Sequence[int]
    ) -> AbstractContextManager[FrameRecords]:
        from pyspark.sql import functions as f

        return super()._evaluated(frame.withColumn("key", f.concat_ws("/", "partition", "offset")), done)


class KafkaTopic(KafkaOutput):
    """A topic, read as a read_committed consumer reads it."""

    def open(self, reached: Callable[[str], None] | None = None) -> KafkaSink:
        """Open the output. With `reached` the steps are those of this process."""
        writer = RowWriter.EXECUTORS if reached is None else RowWriter.DRIVER
        sink = Keyed(self.connection, self.topic, **{"written_by": writer, **self.options})
        hook(sink, reached)
        return sink


class Table:
    """A table in its own schema."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.schema = dsn, own_schema()
        self._output = PostgresOutput(dsn, self.schema)

    def open(self, reached: Callable[[str], None] | None = None) -> PostgresSink:
        """Open the output."""
        sink = PostgresSink(self.dsn, TABLE, schema=self.schema)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Read the table."""
        return self._output.rows()

    def staging_tables(self) -> list[str]:
        """Return the names of the staging tables."""
        return self._output.staging_tables()


class MariaDBTable:
    """A table in its own database of MariaDB."""

    def __init__(self, server: str) -> None:
        self._output = MariaDBOutput(server, own_schema())
        self.dsn = self._output.dsn

    def open(self, reached: Callable[[str], None] | None = None) -> MariaDBSink:
        """Open the output."""
        sink = MariaDBSink(self.dsn, TABLE)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Read the table."""
        return self._output.rows()


@pytest.fixture
def mariadb_table(mariadb: str) -> MariaDBTable:
    """An empty table."""
    return MariaDBTable(mariadb)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """An empty folder."""
    return Files(tmp_path / "output")


@pytest.fixture
def table(postgres: str) -> Table:
    """An empty table."""
    return Table(postgres)


@pytest.fixture
def delta(tmp_path: Path, spark: "SparkSession") -> DeltaFolder:
    """A Delta table that does not exist yet."""
    return DeltaFolder(tmp_path / "output", spark)


@pytest.fixture
def kafka_topic(connection: KafkaConnection) -> KafkaTopic:
    """An empty topic."""
    return KafkaTopic(connection)


@pytest.fixture(params=["files", "table"])
def output(request: pytest.FixtureRequest) -> Output:
    """An empty output of the kind in the parameter."""
    found: Output = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def coordination_topic(topics: Topics) -> str:
    """One coordination topic for all groups of this module."""
    name = new_instance_id("coordination")
    assert topics.create(name, 4, 1, {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1"})
    return name


@pytest.fixture(scope="module")
def data_topic(topics: Topics, connection: KafkaConnection) -> str:
    """One data topic that all groups of this module read."""
    name = new_instance_id("data")
    assert topics.create(name, PARTITIONS, 1)
    fill_topic(connection, name)
    return name


def fill_topic(connection: KafkaConnection, topic: str, value: str = "message") -> None:
    """Write `MESSAGES` messages, spread evenly."""
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for number in range(MESSAGES):
        producer.produce(topic, f"{value} {number}", partition=number % PARTITIONS)
    assert producer.flush(WITHIN_S) == 0


def input_rows() -> list[Row]:
    """Return the rows of `data_topic`, which the output must contain."""
    return sorted((number % PARTITIONS, number // PARTITIONS, f"message {number}") for number in range(MESSAGES))


class Members:
    """The members of one group, one after the other."""

    def __init__(self, connection: KafkaConnection, coordination_topic: str, topics: Topics, topic: str) -> None:
        self._connection, self._coordination_topic, self._topics = connection, coordination_topic, topics
        self._group = new_instance_id("group")
        self._logs: list[KillableLog] = []
        self.topic = topic

    def open(self, at: KillPoint | None = None) -> tuple[BatchSession, KillableLog]:
        """Open a member that dies at `at`. It treats all earlier members as dead."""
        log = KillableLog(KafkaLog(self._connection, self._coordination_topic, HEARTBEAT_INTERVAL_MS), at)
        self._logs.append(log)
        delivery = BatchSession(
            log=log,
            data=self._topics,
            connection=self._connection,
            group=self._group,
            client="tester",
            run_id=f"run{len(self._logs)}",
            settings=GroupSettings(HEARTBEAT_INTERVAL_MS, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE),
            is_dead=lambda _: True,
        )
        return delivery, log

    def batch(self, delivery: BatchSession, sink: Sink, most: int | None = None) -> ClaimedBatch:
        """Return a batch of at most `most` messages."""
        return delivery.claimed_batch(BatchRequest(topic=self.topic, max_records=most), sink)

    def drain(self, sink: Sink, spark: "SparkSession") -> list[ClaimedBatch]:
        """Process batches with another member until the topic is drained."""
        delivery, _ = self.open()
        done: list[ClaimedBatch] = []
        while True:
            with self.batch(delivery, sink) as batch:
                if batch.idle is None:
                    batch.write(result(batch, spark))
            if batch.idle is not None:
                assert batch.idle.reason is IdleReason.DRAINED, batch.idle
                return done
            done.append(batch)

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs:
            log.close()


def result(batch: ClaimedBatch, spark: "SparkSession") -> "DataFrame":
    """Return the rows of a typical user function, computed in one task."""
    return batch.read(spark).selectExpr("partition", "offset", "CAST(value AS STRING) AS value").coalesce(1)


@pytest.fixture
def members(connection: KafkaConnection, coordination_topic: str, topics: Topics, data_topic: str) -> Iterator[Members]:
    """A group without history."""
    members = Members(connection, coordination_topic, topics, data_topic)
    yield members
    members.close()


@pytest.mark.parametrize("at", APPEND_STEPS, ids=str)
def test_a_member_that_dies_at_an_append(members: Members, files: Files, spark: "SparkSession", at: KillPoint) -> None:
    """If the member dies before, within or after any append to the coordination log, the output equals the input.

    Only appends beside its write concern the kind of the sink.
    """
    delivery, _ = members.open(at)
    batch = members.batch(delivery, files.open())
    with pytest.raises(KilledError), batch:
        batch.write(result(batch, spark))

    members.drain(files.open(), spark)

    assert files.rows() == input_rows()


@pytest.mark.parametrize("output", ["table", "delta", "kafka_topic"], indirect=True)
@pytest.mark.parametrize("at", [*PLANS, *COMMITS], ids=str)
def test_a_member_that_dies_at_its_plan_or_its_commit(
    members: Members, output: Output, spark: "SparkSession", at: KillPoint
) -> None:
    """Rows that the member has written are kept and not written again. The output equals the input."""
    delivery, _ = members.open(at)
    batch = members.batch(delivery, output.open())
    with pytest.raises(KilledError), batch:
        batch.write(result(batch, spark))
    is_written = at in COMMITS
    assert output.rows() == (input_rows() if is_written else [])

    done = members.drain(output.open(), spark)

    assert sum(len(batch.ranges) for batch in done) == (0 if is_written else PARTITIONS)
    assert output.rows() == input_rows()


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_a_member_that_dies_beside_its_write(
    members: Members, output: Output, spark: "SparkSession", written: bool
) -> None:
    """If the member dies after the write, its successor only commits the ranges."""
    delivery, log = members.open()
    batch = members.batch(delivery, output.open())
    with pytest.raises(KilledError), batch:
        work_and_die(batch, spark, log, written=written)

    done = members.drain(output.open(), spark)

    assert [(len(batch.ranges), len(batch.skipped)) for batch in done] == [(0, 2) if written else (2, 0)]
    assert output.rows() == input_rows()


def work_and_die(batch: ClaimedBatch, spark: "SparkSession", log: KillableLog, *, written: bool) -> None:
    """Die before or after the write."""
    frame = result(batch, spark)
    if written:
        batch.write(frame)
    log.dead = True
    raise KilledError


def die_at_step(members: Members, output: Output, spark: "SparkSession", step: str) -> None:
    """Have a member die at one of the sink's steps. Files that the dead process could not delete remain."""
    delivery, log = members.open()

    def reached(now: str) -> None:
        if log.dead or now == step:
            log.dead = True
            raise KilledError

    sink = output.open(reached)
    if isinstance(sink, FileSink):
        clear = sink._clear
        sink._clear = lambda *args: None if log.dead else clear(*args)  # type: ignore[method-assign]
    batch = members.batch(delivery, sink)
    with pytest.raises(KilledError), batch:
        batch.write(result(batch, spark))


@pytest.mark.parametrize("step", FILE_STEPS)
def test_a_member_that_dies_at_a_step_of_the_file_sink(
    members: Members, files: Files, spark: "SparkSession", step: str
) -> None:
    """Whatever the dead member's attempt left, the output equals the input."""
    die_at_step(members, files, spark, step)
    members.drain(files.open(), spark)
    assert files.rows() == input_rows()


@pytest.mark.parametrize("step", DATABASE_STEPS)
def test_a_member_that_dies_at_a_step_of_the_postgres_sink(
    members: Members, table: Table, spark: "SparkSession", step: str
) -> None:
    """Whether or not the dead member's transaction was committed, the output equals the input."""
    die_at_step(members, table, spark, step)
    members.drain(table.open(), spark)
    assert table.rows() == input_rows()


@pytest.mark.parametrize("step", ["moved", "committing", "committed"])
def test_a_member_that_dies_at_a_step_of_the_mariadb_sink(
    members: Members, mariadb_table: MariaDBTable, spark: "SparkSession", step: str
) -> None:
    """Whether or not the dead member's transaction was committed, the output equals the input."""
    die_at_step(members, mariadb_table, spark, step)
    members.drain(mariadb_table.open(), spark)
    assert mariadb_table.rows() == input_rows()


def test_many_members_die_one_after_the_other(members: Members, output: Output, spark: "SparkSession") -> None:
    """Members die at commits of small batches, each at a different step. The output is exact."""
    for side, count in ((Side.WITHIN, 3), (Side.BEFORE, 2), (Side.AFTER, 2), (Side.WITHIN, 2)):
        delivery, _ = members.open(KillPoint(side, "Heartbeat", count))
        batch = members.batch(delivery, output.open(), most=4)
        with pytest.raises(KilledError), batch:
            batch.write(result(batch, spark))
    members.drain(output.open(), spark)
    assert output.rows() == input_rows()


def test_a_data_topic_re_created_while_spark_reads(
    members: Members, output: Output, spark: "SparkSession", topics: Topics, connection: KafkaConnection
) -> None:
    """Spark may read the new topic's messages at these offsets, but they never get into the output."""
    members.topic = new_instance_id("anew")
    assert topics.create(members.topic, PARTITIONS, 1)
    fill_topic(connection, members.topic, "old")

    def reached(step: str) -> None:
        if step in {"rows written", "evaluated"}:
            recreate(topics, members.topic)
            fill_topic(connection, members.topic, "new")

    delivery, _ = members.open()
    batch = members.batch(delivery, output.open(reached))
    with pytest.raises(DataTopicChangedError, match="nothing was written or committed"), batch:
        batch.write(result(batch, spark))

    assert output.open().verdicts(batch.ranges).keys() == set(batch.ranges)
    assert not batch.committed
    assert rows_or_none(output) == []


def recreate(topics: Topics, topic: str) -> None:
    """Delete a topic and create it again."""
    topics.delete(topic)
    assert topics.create(topic, PARTITIONS, 1)


def rows_or_none(output: Output) -> list[Row]:
    """Return the rows of an output that may have no commit yet."""
    try:
        return output.rows()
    except FileNotFoundError:
        return []
