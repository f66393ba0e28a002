"""The Kafka sink on a real broker. `tests/fast/test_sink_kafka` tests its rules without a broker."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as f

from marshal_dagster.batches import BatchRequest, BatchSession, ClaimedBatch, IdleReason
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.errors import ConfigurationError, SinkRejectedError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.transactions import NotesReader, Transaction, TransactionStillOpenError
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.sinks import KafkaSink
from marshal_dagster.sinks.conformance import CASES, Case, Row, Target
from marshal_dagster.sinks.conformance.target import deliver, never, part, rows_of
from marshal_dagster.sinks.kafka.records import Record
from tests.conditions import WITHIN_S, wait_until
from tests.kafka_outputs import FakeRecords, KafkaOutput, committed
from tests.real import sink_worker
from tests.real.conftest import MakeTopic
from tests.real.test_takeover_sinks import (
    HEARTBEAT_INTERVAL_MS,
    PARTITIONS,
    MakeSite,
    Site,
    input_rows,
    make_site,
    site,
)
from tests.sink_conformance import shared
from tests.sink_kit import GROUP_CHECKS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["make_site", "site"]

ON_A_BROKER = (
    "rest_of_a_batch",
    "judged_when_written",
    "groups_and_topics_apart",
    "ranges_without_rows",
    "batch_refuses",
    "death_at_any_step",
    "overtaken_at_any_step",
    "two_at_once",
    "batches_that_share_ranges",
    "another_group",
    "two_groups_at_once",
    "over_older_ranges",
)
"""The cases in which a real broker may behave differently from a replacement."""


class KafkaTarget(Target):
    """A separate topic."""

    range_by_range = True
    most_steps = 6

    def __init__(self, output: KafkaOutput) -> None:
        self.output = output

    def sink(self) -> KafkaSink:
        """Return a sink, as another process opens it."""
        return self.output.sink()

    def shared_sink(self) -> KafkaSink:
        """Return a sink for several groups, as another process opens it."""
        return shared(self.sink())  # type: ignore[no-any-return]

    def rows(self) -> list[Row]:
        """Return the committed rows. Those in open transactions of dead writers are not visible."""
        return self.output.rows(patience_s=1)


@pytest.fixture
def output(connection: KafkaConnection) -> KafkaOutput:
    """An empty topic."""
    return KafkaOutput(connection)


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in ON_A_BROKER], ids=str)
def test_the_sink_conforms(case: Case, output: KafkaOutput) -> None:
    """The selected cases of the kit pass on a broker."""
    case.check(KafkaTarget(output))


@pytest.mark.parametrize("check", GROUP_CHECKS)
def test_another_group(check: Callable[[Target], None], output: KafkaOutput) -> None:
    """An output belongs to one group, or to groups that follow each other."""
    check(KafkaTarget(output))


# Processes that are killed or stopped


def drain(site: Site, output: KafkaOutput) -> list[ClaimedBatch]:
    """Process batches until the topic is drained, as a member that knows that all others are dead."""
    log = KafkaLog(site.connection, site.coordination_topic, HEARTBEAT_INTERVAL_MS)
    delivery = BatchSession(
        log=log,
        data=site.topics,
        connection=site.connection,
        group=site.group,
        client="tester",
        run_id="successor",
        settings=GroupSettings(HEARTBEAT_INTERVAL_MS, RuleSet.NATIVE, DeliveryMode.EFFECTIVELY_ONCE),
        is_dead=lambda _: True,
    )
    orders = sink_worker.Orders.model_validate_json(site.orders(output))
    done: list[ClaimedBatch] = []
    try:
        while True:
            with delivery.claimed_batch(BatchRequest(topic=site.topic), output.sink()) as batch:
                if batch.idle is None and batch.ranges:
                    batch.write(sink_worker.result(batch, orders, None))
            if batch.idle is not None:
                assert batch.idle.reason is IdleReason.DRAINED, batch.idle
                return done
            done.append(batch)
    finally:
        log.close()


KILLS = [("evaluated", 1), ("fenced", 1), ("sent", 3), ("noted", 1), ("noted", 5), ("committed", 1), ("committed", 4)]


def test_a_process_killed_at_each_step(make_site: MakeSite, connection: KafkaConnection) -> None:
    """Members are killed in one of five ranges and taken over at once. The output equals the input exactly."""
    members = {kill: (make_site(), KafkaOutput(connection)) for kill in KILLS}
    worker = members[KILLS[0]][0].start_together(
        *(
            group.orders(output, name=f"{step} {count} ", with_spark=False, halt_at_step=step, halt_at_count=count)
            for (step, count), (group, output) in members.items()
        )
    )
    for step, count in KILLS:
        worker.wait_until_reported(f"{step} {count} halted {step}")
    worker.kill_all()

    for (step, count), (group, output) in members.items():
        done = drain(group, output)
        taken = range(count if step == "committed" else count - 1)
        assert [[each.partition for each in batch.skipped] for batch in done] == [[*taken]], (step, count)
        assert output.rows() == input_rows(), (step, count)


@pytest.mark.parametrize("step", ["sent", "noted"])
def test_a_zombie_is_fenced(site: Site, output: KafkaOutput, step: str) -> None:
    """A process stopped with an open transaction, taken over and continued, fails and adds nothing."""
    stopped = site.start(output, with_spark=False, halt_at_step=step)
    stopped.wait_until_reported(f"halted {step}")
    stopped.signal(signal.SIGSTOP)

    (batch,) = drain(site, output)
    assert (len(batch.ranges), len(batch.skipped)) == (PARTITIONS, 0)
    assert output.rows() == input_rows()

    stopped.signal(signal.SIGCONT)
    stopped.go_on()
    said = stopped.wait_until_reported("failed")
    assert "ClaimLostError" in said or "another run has taken the partition over" in said
    assert stopped.wait() == 1
    assert output.rows() == input_rows()


def test_a_zombie_that_believes_in_its_claim_is_fenced(output: KafkaOutput) -> None:
    """Even if its batch allows the write, its open transaction is aborted and its commit is rejected."""
    mine, noted, go_on = part(0, 0, 3), threading.Event(), threading.Event()

    def reached(step: str) -> None:
        if step == "noted":
            noted.set()
            assert go_on.wait(WITHIN_S)

    failed: list[BaseException] = []

    def write() -> None:
        try:
            deliver(KafkaTarget(output), "late", mine, sink=output.sink(reached))
        except SinkRejectedError as error:
            failed.append(error)

    late = threading.Thread(target=write)
    late.start()
    assert noted.wait(WITHIN_S)
    assert deliver(KafkaTarget(output), "new", part(0, 0, 3, epoch=11)).taken
    go_on.set()
    late.join(WITHIN_S)
    assert "another run has taken the partition over; this run must stop" in str(failed[0])
    assert output.rows() == rows_of("new", mine)


# Topics and clients


def transaction(output: KafkaOutput, name: str) -> Transaction:
    """Return a transaction of another writer."""
    return Transaction(
        output.connection,
        name,
        id_prefix="",
        topics=[output.topic],
        timeout_s=60,
        partitioner="random",
    )


@pytest.mark.parametrize("ends", ["commits", "aborts"])
def test_notes_behind_an_open_transaction_are_waited_for(output: KafkaOutput, topics: Topics, ends: str) -> None:
    """Another writer's open transaction hides later committed notes. The reader does not treat them as missing."""
    notes = KafkaSink(output.connection, output.topic).notes_topic
    with transaction(output, "other") as other, NotesReader(output.connection, notes, topics) as reader:
        other.begin()
        other.send(notes, b"another's", b"other", name="note", partition=0)
        other.flush()
        with transaction(output, "mine") as mine:
            mine.begin()
            mine.send(notes, b"mine's", b"mine", name="note", partition=0)
            mine.commit()
        wait_until(lambda: "has an open transaction at offset 0" in _why_not_read(reader), "the reader is at the end")
        if ends == "commits":
            other.commit()
        else:
            with transaction(output, "other"):
                pass
        expected = {"mine": b"mine's"} | ({"other": b"another's"} if ends == "commits" else {})
        assert reader.newest(WITHIN_S) == expected
        assert reader.newest(0) == expected


def _why_not_read(reader: NotesReader) -> str:
    with pytest.raises(TransactionStillOpenError) as error:
        reader.newest(1)
    return str(error.value)


def test_topics_that_are_missing_or_wrong(connection: KafkaConnection, topics: Topics, topic: MakeTopic) -> None:
    """The error states what to do.

    The notes topic is created once, replicated as the output, and never deletes notes.
    """
    wanted = [part(0, 0, 3)]
    with pytest.raises(TopicNotFoundError, match="look up topic 'no-such-topic'"):
        KafkaSink(connection, "no-such-topic").verdicts(wanted)
    name = topic(1, {"min.insync.replicas": "1"})
    sink = KafkaSink(connection, name)
    with pytest.raises(TopicNotFoundError, match=r"call `create_notes\(\)` once"):
        sink.verdicts(wanted)
    assert (sink.create_notes(), sink.create_notes()) == (True, False)
    settings = topics.settings(sink.notes_topic)
    assert (settings["cleanup.policy"], settings["min.insync.replicas"]) == ("compact", "1")
    assert sink.verdicts(wanted)
    deleting = KafkaSink(connection, name, notes_topic=topic(1, {"cleanup.policy": "compact,delete"}))
    for use in (lambda: deleting.verdicts(wanted), deleting.create_notes):
        with pytest.raises(ConfigurationError, match=r"cleanup\.policy compact,delete, so it deletes notes"):
            use()


def test_a_broker_that_cannot_be_reached_is_one_line() -> None:
    """The error comes within the connection's timeout."""
    nowhere = KafkaConnection(bootstrap_servers="127.0.0.1:1", timeout_s=1)
    with pytest.raises(UnavailableError, match=r"Kafka at 127\.0\.0\.1:1 cannot be reached") as raised:
        KafkaSink(nowhere, "output").verdicts([part(0, 0, 3)])
    assert "\n" not in str(raised.value)


def test_a_record_that_is_too_large(output: KafkaOutput, connection: KafkaConnection, topics: Topics) -> None:
    """Client and broker errors both name the message. No transaction is left open, and the next delivery succeeds."""
    wanted, rows = part(0, 0, 3), [(0, 0, "a"), (0, 1, "x" * 1_100_000), (0, 2, "c")]
    large = replace(connection, client_settings={"message.max.bytes": "5000000"})
    for each in (connection, large):
        writer = KafkaTarget(KafkaOutput(each, output.topic))
        with pytest.raises(
            SinkRejectedError, match=r"t/0 offset 1 of group 'g'.*Message size too large; nothing of t/0"
        ):
            deliver(writer, "a", wanted, rows=rows)
        at, end = (topics.offsets(output.topic, [0, 1], committed_only=only) for only in (True, False))
        assert at == end, "the writer has left its transaction open"
    assert output.rows() == []
    assert deliver(KafkaTarget(output), "b", wanted).taken == (wanted,)
    assert output.rows() == rows_of("b", wanted)


def test_a_record_without_a_key_for_a_compacted_topic_is_named(
    connection: KafkaConnection, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker rejects the whole request, but the error names this record and the command that skips its message."""
    output = KafkaOutput(connection, topic(1, {"cleanup.policy": "compact"}))
    assert output.open().create_notes()
    records = FakeRecords.__iter__

    def without_a_key(rows: FakeRecords) -> Iterator[Record]:
        return (replace(record, key=None) if record.source_offset == 2 else record for record in records(rows))

    monkeypatch.setattr(FakeRecords, "__iter__", without_a_key)
    with pytest.raises(
        SinkRejectedError, match=r"t/0 offset 2 of group 'g'.*--to-offset 0=3`, which also skips the 2 off"
    ):
        deliver(KafkaTarget(output), "a", part(0, 0, 4))


def test_records_that_are_too_large_together_are_sent_one_by_one(connection: KafkaConnection, topic: MakeTopic) -> None:
    """Requests above the topic's limit are split. If a single record is above it, the error names its message."""
    output = KafkaOutput(connection, topic(1, {"max.message.bytes": "10000"}))
    assert output.open().create_notes()
    wanted, rows = part(0, 0, 30), [(0, offset, "x" * 1_000) for offset in range(30)]
    assert deliver(KafkaTarget(output), "a", wanted, rows=rows).taken == (wanted,)
    assert output.rows() == rows
    wanted, rows[7] = part(0, 30, 60), (0, 37, "x" * 20_000)
    rows = [(0, 30 + index, value) for index, (_, _, value) in enumerate(rows)]
    with pytest.raises(
        SinkRejectedError, match=r"t/0 offset 37 of group 'g'.*--to-offset 0=38`, which also skips the 7 off"
    ):
        deliver(KafkaTarget(output), "a", wanted, rows=rows)


def test_a_partition_that_is_not_there(output: KafkaOutput, spark: "SparkSession") -> None:
    """The error names the message whose record has a missing output partition."""
    frame = spark.range(3).selectExpr("0 AS partition", "id AS offset", "'v' AS value", "int(id) AS output_partition")
    with pytest.raises(
        SinkRejectedError, match=r"t/0 offset 2 of group 'g'.* Unknown partition; nothing of t/0 \[0, 3\)"
    ):
        output.open().write(frame, [part(0, 0, 3)], never)


def test_a_header_whose_name_is_not_utf8_is_refused(output: KafkaOutput, spark: "SparkSession") -> None:
    """The error names the message before any record is sent. Header values may be any bytes."""
    headers = "array(named_struct('key', IF(id = 1, string(X'FF41'), 'name'), 'value', X'FF')) AS headers"
    frame = spark.range(3).selectExpr("0 AS partition", "id AS offset", "string(X'FF') AS value", headers)
    with pytest.raises(SinkRejectedError, match=r"partition 0, offset 1, column 'headers': it has bytes that are not"):
        output.open().write(frame, [part(0, 0, 3)], never)
    assert output.rows() == []


def test_a_time_out_that_the_brokers_do_not_allow(output: KafkaOutput) -> None:
    """The error names the field."""
    sink = KafkaOutput(output.connection, output.topic, transaction_timeout_s=3_600).sink()
    with pytest.raises(ConfigurationError, match="transaction_timeout_s: 3600 is more than the brokers allow"):
        sink.verdicts([part(0, 0, 3)])


# Spark


@pytest.mark.parametrize("bytes_at_once", [8_000_000, 2_000], ids=["one piece", "many pieces"])
def test_rows_become_records(
    spark: "SparkSession", output: KafkaOutput, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    """Each range's records are in the order of their messages, and have all columns.

    Several records of one message keep their order too.
    """
    monkeypatch.setattr("marshal_dagster.sinks.kafka.records._BYTES_AT_ONCE", bytes_at_once)
    batch = [part(0, 100, 200), part(1, 0, 50), part(7, 3, 4)]
    rows = spark.range(150).selectExpr("IF(id < 100, 0, 1) AS partition", "IF(id < 100, id + 100, id - 100) AS offset")
    frame = (
        rows.orderBy(f.rand(3))
        .withColumn("part", f.explode(f.array(f.lit(0), f.lit(1))))
        .selectExpr(
            "concat_ws('/', partition, offset, part) AS key",
            "IF(offset = 120, NULL, unhex('00FF')) AS value",
            "partition",
            "offset",
            "array(named_struct('key', 'h', 'value', binary('x')), named_struct('key', 'n', 'value', NULL)) AS headers",
            "timestamp_millis(1700000000000 + offset) AS timestamp",
            "partition AS output_partition",
        )
    )
    sink = output.open()

    outcome = sink.write(frame, batch, never)

    assert (outcome.taken, outcome.rows) == (tuple(batch), {0: 200, 1: 100, 7: 0})
    found = committed(output.connection, output.topic, patience_s=60)
    for number, (start, end) in enumerate(((100, 200), (0, 50))):
        keys = [message.key().decode() for message in found if message.partition() == number]
        assert keys == [f"{number}/{offset}/{one}" for offset in range(start, end) for one in (0, 1)]
    assert {message.value() for message in found} == {b"\x00\xff", None}
    assert all(message.headers() == [("h", b"x"), ("n", None)] for message in found)
    assert all(message.timestamp()[1] == 1_700_000_000_000 + int(message.key().split(b"/")[1]) for message in found)
    with pytest.raises(SinkRejectedError, match="rows of partition 1, which this batch did not read"):
        sink.write(frame, [part(0, 200, 300)], never)
    assert sink.write(frame, batch, never).skipped == tuple(batch)


def test_a_timestamp_that_brokers_would_replace_is_refused(
    connection: KafkaConnection, topic: MakeTopic, spark: "SparkSession"
) -> None:
    """Nothing is written then; without the column, the brokers' time is what the user wants."""
    sink = KafkaSink(connection, topic(settings={"message.timestamp.type": "LogAppendTime"}))
    sink.create_notes()
    frame = spark.range(0, 3, 1, 1).selectExpr("0 AS partition", "id AS offset", "'v' AS value", "now() AS timestamp")
    reason = "has message.timestamp.type=LogAppendTime, so brokers would replace the result's column 'timestamp'"
    with pytest.raises(ConfigurationError, match=reason):
        sink.write(frame, [part(0, 0, 3)], never)
    assert sink.write(frame.drop("timestamp"), [part(0, 0, 3)], never).rows == {0: 3}
