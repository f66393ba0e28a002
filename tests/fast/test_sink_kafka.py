"""The rules of the Kafka sink, over a fake broker that fences and commits as Kafka's transactions do."""

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.transactions import (
    ProducerFencedError,
    RecordRejectedError,
    Transaction,
    TransactionStillOpenError,
    UnnamedRecord,
)
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import StoredPosition
from marshal_dagster.sinks import KafkaSink, NewGeneration, WriteResult
from marshal_dagster.sinks.conformance import Case, Row, Target
from marshal_dagster.sinks.conformance.target import deliver, never, part, rows_of
from marshal_dagster.sinks.kafka.notes import PositionNote
from marshal_dagster.sinks.kafka.range_write import Place, Step
from marshal_dagster.sinks.kafka.records import FrameRecords, Record, check_record_columns
from tests.kafka_outputs import FakeKafkaSink, FakeRecords
from tests.sink_conformance import shared
from tests.sink_kit import ALL_CASES, GROUP_CHECKS, following

MAKE = """
CREATE TABLE IF NOT EXISTS producers (id TEXT PRIMARY KEY, epoch INT);
CREATE TABLE IF NOT EXISTS transactions (number INTEGER PRIMARY KEY, id TEXT, epoch INT, state TEXT);
CREATE TABLE IF NOT EXISTS records (place INTEGER PRIMARY KEY, number INT, topic TEXT, key BLOB, value BLOB);
"""
CONNECTION = KafkaConnection(bootstrap_servers="nowhere.invalid:9092", timeout_s=1)
OUTPUT = "output"


class Broker:
    """Kafka's transactions in a file, so they survive the process that started them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for one atomic step of the broker."""
        with closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            database.execute("PRAGMA synchronous = OFF")  # writers die in these tests, machines do not
            database.executescript(MAKE)
            database.execute("BEGIN IMMEDIATE")
            yield database

    def committed(self, topic: str) -> list[tuple[bytes, bytes]]:
        """Return key and value of the committed records before the first open transaction."""
        with self.opened() as database:
            return database.execute(
                "SELECT key, value FROM records JOIN transactions USING (number) WHERE topic = ?1 AND "
                "state = 'committed' AND place < (SELECT coalesce(min(place), 9e18) FROM records JOIN transactions "
                "USING (number) WHERE topic = ?1 AND state = 'open') ORDER BY place",
                (topic,),
            ).fetchall()

    def is_open(self, topic: str) -> bool:
        """Return whether a transaction is open in a topic."""
        with self.opened() as database:
            return bool(
                database.execute(
                    "SELECT 1 FROM records JOIN transactions USING (number) WHERE topic = ? AND state = 'open'",
                    (topic,),
                ).fetchone()
            )


class FakeTransaction:
    """A transaction of this broker."""

    def __init__(self, broker: Broker, transactional_id: str) -> None:
        self.broker, self.id = broker, transactional_id
        self.epoch = self.number = 0

    def __enter__(self) -> Self:
        """Fence earlier producers with the same id."""
        with self.broker.opened() as database:
            database.execute("INSERT OR IGNORE INTO producers VALUES (?, 0)", (self.id,))
            database.execute("UPDATE producers SET epoch = epoch + 1 WHERE id = ?", (self.id,))
            database.execute("UPDATE transactions SET state = 'aborted' WHERE id = ? AND state = 'open'", (self.id,))
            (self.epoch,) = database.execute("SELECT epoch FROM producers WHERE id = ?", (self.id,)).fetchone()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort an open transaction."""
        with self.broker.opened() as database:
            database.execute(
                "UPDATE transactions SET state = 'aborted' WHERE number = ? AND state = 'open'", (self.number,)
            )

    def begin(self) -> None:
        """Do nothing, because the broker learns of it at the first record."""

    def send(self, topic: str, value: bytes | None, key: bytes | None, **_: object) -> None:
        """Append within the transaction."""
        with self.broker.opened() as database:
            self._check(database)
            if not self.number:
                self.number = (
                    database.execute(
                        "INSERT INTO transactions (id, epoch, state) VALUES (?, ?, 'open')", (self.id, self.epoch)
                    ).lastrowid
                    or 0
                )
            database.execute(
                "INSERT INTO records (number, topic, key, value) VALUES (?, ?, ?, ?)", (self.number, topic, key, value)
            )

    def send_many(self, records: Iterable[UnnamedRecord]) -> int:
        """Append records, and return their number."""
        sent = 0
        for topic, value, key, *_ in records:
            self.send(topic, value, key)
            sent += 1
        return sent

    def flush(self) -> None:
        """Do nothing, because records are appended at once."""

    def commit(self) -> None:
        """Commit, unless a newer producer has the id."""
        with self.broker.opened() as database:
            self._check(database)
            database.execute("UPDATE transactions SET state = 'committed' WHERE number = ?", (self.number,))

    def _check(self, database: sqlite3.Connection) -> None:
        (epoch,) = database.execute("SELECT epoch FROM producers WHERE id = ?", (self.id,)).fetchone()
        if epoch != self.epoch:
            raise ProducerFencedError(0.1)


class FakeNotesReader:
    """The notes topic of this broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def newest(self, patience_s: float) -> Mapping[str, bytes]:
        """Return the newest committed value of each key. Wait for open transactions."""
        deadline = time.monotonic() + patience_s
        while self.broker.is_open(f"{OUTPUT}_marshal_ranges"):
            if time.monotonic() > deadline:
                raise TransactionStillOpenError("open")
            time.sleep(0.01)
        return {key.decode(): value for key, value in self.broker.committed(f"{OUTPUT}_marshal_ranges")}


class FakeSink(FakeKafkaSink):
    """A sink of this broker."""

    def __init__(self, broker: Broker, **options: Any) -> None:  # noqa: ANN401
        super().__init__(CONNECTION, OUTPUT, **options)
        self.broker = broker
        self.topic_id = "first"

    @contextmanager
    def _place(self) -> Iterator[Place]:
        yield Place(self.topic_id, cast("Any", FakeNotesReader(self.broker)), cast("Any", None))

    def _transaction(self, wanted: ClaimedRange, *, sends_alone: bool = False) -> Transaction:  # noqa: ARG002
        return cast("Transaction", FakeTransaction(self.broker, self._key(wanted)))


class BatchRecords(FrameRecords):
    """Rows that this process sends as Arrow batches of two rows each."""

    rows: Any

    @classmethod
    def of_rows(cls, fake: FakeRecords) -> "BatchRecords":
        """Return the records of rows."""
        return cls(fake.counts, None, 0, {}, cast("Any", fake), has_whole_partitions=True, _size=0)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.rows)

    def of(self, partition: int) -> "BatchRecords":
        """Return the records of one source partition."""
        return self.of_rows(FakeRecords([row for row in self.rows.rows if row["partition"] == partition]))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the records as batches."""
        schema = pa.schema({"partition": pa.int64(), "offset": pa.int64(), "value": pa.binary(), "key": pa.binary()})
        rows = [(record.source_partition, record.source_offset, record.value, record.key) for record in self]
        for start in range(0, len(rows), 2):
            columns = zip(*rows[start : start + 2], strict=True)
            yield pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=schema)


class BatchSink(FakeSink):
    """A sink of this broker that gets Arrow batches, as this process sends them."""

    @contextmanager
    def _evaluated(self, frame: Any, done: Sequence[int]) -> Iterator[Any]:  # noqa: ANN401
        with super()._evaluated(frame, done) as records:
            yield BatchRecords.of_rows(records)


class KafkaTarget(Target):
    """A separate broker."""

    range_by_range = True
    most_steps = 30

    def __init__(self, folder: Path, kind: type[FakeSink] = FakeSink, **options: Any) -> None:  # noqa: ANN401
        self.broker, self.kind, self.options = Broker(folder / "broker.db"), kind, options

    def sink(self) -> FakeSink:
        """Return the sink of another process."""
        return self.kind(self.broker, **self.options)

    def shared_sink(self) -> FakeSink:
        """Return the sink of another process, for several groups."""
        return shared(self.sink())  # type: ignore[no-any-return]

    def rows(self) -> list[Row]:
        """Return the committed rows."""
        found = [(key.decode().split("/"), value) for key, value in self.broker.committed(OUTPUT)]
        return [(int(partition), int(offset), value.decode()) for (partition, offset), value in found]


@pytest.fixture
def target(tmp_path: Path) -> KafkaTarget:
    """Return an empty topic."""
    return KafkaTarget(tmp_path)


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_sink_conforms(case: Case, target: KafkaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case of the kit passes, also if a writer dies or stalls at any line of the sink."""
    monkeypatch.setattr("marshal_dagster.sinks.kafka.sink._GLANCE_S", 0.02)
    case.check(target)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.id in {"first_batch", "death_at_any_step"}])
def test_a_process_that_sends_arrow_batches_conforms(case: Case, tmp_path: Path) -> None:
    """The batches of several ranges follow each other, and a range may begin within a batch."""
    case.check(KafkaTarget(tmp_path, BatchSink))


def test_rows_of_ranges_that_are_not_written_are_skipped(tmp_path: Path) -> None:
    """Another writer takes two of four ranges before this one has fenced them."""
    target = KafkaTarget(tmp_path, BatchSink)
    ranges = [part(partition, 0, 3) for partition in range(4)]
    sink = target.sink()

    def overtake(step: str) -> None:
        if step == "evaluated":
            deliver(target, "a", ranges[0], ranges[2])

    sink._reached = overtake  # type: ignore[method-assign]
    assert deliver(target, "b", *ranges, sink=sink).taken == (ranges[1], ranges[3])
    assert sorted(target.rows()) == rows_of("a", ranges[0]) + rows_of("b", ranges[1]) + rows_of("a", ranges[2]) + (
        rows_of("b", ranges[3])
    )


def test_a_rejected_record_of_a_batch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range is sent again, one record after the other. The ranges before it are written, those after it are not."""
    send = FakeTransaction.send

    def reject(self: FakeTransaction, topic: str, value: bytes, key: bytes, *, name: str = "", **_: object) -> None:
        if key == b"1/1":
            raise RecordRejectedError(name, "too large", is_too_large=True, is_sure=bool(name))
        send(self, topic, value, key)

    monkeypatch.setattr(FakeTransaction, "send", reject)
    target = KafkaTarget(tmp_path, BatchSink)
    with pytest.raises(
        SinkRejectedError, match=r"^t/1 offset 1 of group .* rejects the record made from it: too large"
    ):
        deliver(target, "a", *(part(partition, 0, 3) for partition in range(3)))
    assert target.rows() == rows_of("a", part(0, 0, 3))


@pytest.mark.parametrize("check", GROUP_CHECKS)
def test_another_group(check: Callable[[Target], None], target: KafkaTarget) -> None:
    """An output belongs to one group and to those that continue it."""
    check(target)


# Wrong sinks


class NotesApart(FakeSink):
    """Commits the records first, and the note in a later transaction."""

    def _send_note(self, transaction: Transaction, wanted: ClaimedRange, note: PositionNote) -> None:
        transaction.commit()
        with self._transaction(wanted) as another:
            super()._send_note(another, wanted, note)
            another.commit()


class JudgesBefore(FakeSink):
    """Decides by notes that it read before it fenced others."""

    def __init__(self, broker: Broker, **options: Any) -> None:  # noqa: ANN401
        super().__init__(broker, **options)
        self.known: dict[str, bytes] | None = None

    @contextmanager
    def _place(self) -> Iterator[Place]:
        known = FakeNotesReader(self.broker).newest(2)

        class Known:
            def newest(self, _: float) -> Mapping[str, bytes]:
                return known

        yield Place(self.topic_id, cast("Any", Known()), cast("Any", None))


class FencesNobody(FakeSink):
    """Uses a new transactional id for each writer, so it fences no other writer."""

    def _transaction(self, wanted: ClaimedRange, *, sends_alone: bool = False) -> Transaction:  # noqa: ARG002
        return cast("Transaction", FakeTransaction(self.broker, f"{self._key(wanted)}/{time.monotonic_ns()}"))


class OneIdForAll(FakeSink):
    """Keeps one note for all partitions."""

    def _key(self, wanted: ClaimedRange) -> str:
        return super()._key(wanted).rpartition("/")[0]


class AsksNobody(FakeSink):
    """Does not call `before_commit`."""

    def write(self, frame: Any, ranges: Any, offsets_read: Any, before_commit: Any = None) -> Any:  # noqa: ANN401, ARG002
        """Write without `before_commit`."""
        return super().write(frame, ranges, offsets_read)


class AppendsSilently(FakeSink):
    """Reports that it replaces old records, and appends instead."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker, on_new_generation="append")


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(NotesApart, "death_at_any_step", marks=pytest.mark.thorough),
        pytest.param(JudgesBefore, "overtaken_at_any_step", marks=pytest.mark.thorough),
        pytest.param(FencesNobody, "overtaken_at_any_step", marks=pytest.mark.thorough),
        (OneIdForAll, "first_batch"),
        (AsksNobody, "batch_refuses"),
        (AppendsSilently, "inside_an_older_range"),
    ],
)
def test_a_wrong_sink_is_caught(
    kind: type[FakeSink], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mistake fails a case of the kit."""
    monkeypatch.setattr("marshal_dagster.sinks.kafka.sink._GLANCE_S", 0.02)
    (wanted,) = (param.values[0] for param in ALL_CASES if param.id == case)
    target = KafkaTarget(tmp_path, kind)
    target.most_steps = 60  # with half of them a mistake may stay unnoticed
    with pytest.raises((AssertionError, SinkRejectedError)):
        wanted.check(target)  # type: ignore[attr-defined]


# Cases that the kit does not have


def hooked(target: KafkaTarget, step: str, then: Callable[[], None]) -> FakeSink:
    """Return a sink that calls `then` when it reaches this step for the first time."""
    sink, done = target.sink(), list[str]()

    def reached(at: str) -> None:
        if at == step and not done:
            done.append(at)
            then()

    sink._reached = reached  # type: ignore[method-assign,assignment]
    return sink


@pytest.mark.thorough
def test_a_note_behind_an_open_transaction_is_waited_for(target: KafkaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another partition's open transaction hides later notes. They must not be taken for missing."""
    monkeypatch.setattr("marshal_dagster.sinks.kafka.sink._GLANCE_S", 0.02)
    mine, other = part(0, 0, 3), FakeTransaction(target.broker, "another partition")
    with other:
        sink = hooked(target, "sent", lambda: other.send(f"{OUTPUT}_marshal_ranges", b"{}", b"another"))
        assert deliver(target, "a", mine, sink=sink).taken == (mine,)
        impatient = target.sink()
        impatient._patience_s = 0.1
        with pytest.raises(UnavailableError):
            deliver(target, "b", mine, sink=impatient)
        other.commit()
    assert deliver(target, "b", mine).skipped == (mine,)


def test_the_note_comes_last(target: KafkaTarget) -> None:
    """An open transaction in the notes topic blocks all its readers, so it is kept as short as possible."""
    deliver(target, "a", part(0, 0, 0))  # its group is noted first
    deliver(target, "a", part(1, 0, 3))
    with target.broker.opened() as database:
        topics = [topic for (topic,) in database.execute("SELECT topic FROM records ORDER BY place")]
    assert topics[2:] == [OUTPUT] * 3 + [f"{OUTPUT}_marshal_ranges"]


def test_offsets_of_which_there_are_no_records_are_free(target: KafkaTarget) -> None:
    """A new generation may use ranges without rows, because it has no record to replace there."""
    deliver(target, "a", part(0, 0, 5), part(1, 0, 5), rows=rows_of("a", part(1, 0, 5)))
    free, held = (part(number, 2, 6, generation=20, epoch=21) for number in (0, 1))
    assert target.sink().can_replace([free]) is None
    assert "cannot be replaced. Write to a new topic" in (target.sink().can_replace([free, held]) or "")
    assert deliver(target, "b", free).taken == (free,)


def test_a_group_that_is_followed_while_it_writes_is_fenced(target: KafkaTarget) -> None:
    """The group that continues the output aborts the open transaction at the same offsets, which has no note yet."""
    deliver(target, "old", part(0, 0, 5))
    mine, theirs = part(0, 5, 9), part(0, 5, 9, group="h")
    late = hooked(target, "sent", lambda: expect_taken(deliver(following(target, "g"), "new", theirs)))
    with pytest.raises(SinkRejectedError, match="another run has taken the partition over"):
        deliver(target, "late", mine, sink=late)
    assert target.found() == rows_of("old", part(0, 0, 5)) + rows_of("new", theirs)


def test_of_two_groups_that_begin_one_is_noted(target: KafkaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is noted before the first record, so the group that is fenced finds the other one's note."""
    monkeypatch.setattr("marshal_dagster.sinks.kafka.sink._GLANCE_S", 0.02)
    mine, theirs = part(0, 0, 5), part(1, 0, 5, group="h")
    late = hooked(target, "group noted", lambda: expect_taken(deliver(target, "new", theirs)))
    with pytest.raises(UnavailableError, match="group 'g': another run started to write to topic output"):
        deliver(target, "late", mine, sink=late)
    with pytest.raises(SinkRejectedError, match="from group 'h': group 'g'"):
        deliver(target, "late", mine)
    assert target.found() == rows_of("new", theirs)


def expect_taken(outcome: WriteResult) -> None:
    """Check that a range was taken."""
    assert outcome.taken


BEFORE = part(0, 0, 3)


def answering(target: KafkaTarget, answer: Callable[[Callable[[], None]], None]) -> FakeSink:
    """Return a sink whose first commit is answered like this, after the range [0, 3) was delivered.

    The note of that range must not be taken for the one of the commit.
    """
    deliver(target, "before", BEFORE)
    sink = target.sink()
    sink._is_tried = True  # otherwise the first commit would be an empty one
    plain, answered = sink._transaction, list[str]()

    def transaction(wanted: ClaimedRange, *, sends_alone: bool = False) -> Transaction:
        found = plain(wanted, sends_alone=sends_alone)
        if not answered:
            answered.append("once")
            commit = found.commit
            found.commit = lambda: answer(commit)  # type: ignore[method-assign]
        return found

    sink._transaction = transaction  # type: ignore[method-assign]
    return sink


@pytest.mark.parametrize(
    "error", [ProducerFencedError(0.1), UnavailableError("no answer")], ids=["fenced", "unavailable"]
)
def test_a_commit_whose_answer_was_lost_counts(target: KafkaTarget, error: Exception) -> None:
    """The result of a commit is read from the notes."""

    def lost(commit: Callable[[], None]) -> None:
        commit()
        raise error

    mine = part(0, 3, 6)
    assert deliver(target, "a", mine, sink=answering(target, lost)).taken == (mine,)
    assert target.found() == rows_of("before", BEFORE) + rows_of("a", mine)


def test_a_commit_that_fails_is_an_error(target: KafkaTarget) -> None:
    """The transaction is ended before its result is read, so a late commit has no effect."""
    late: list[Callable[[], None]] = []

    def fails(commit: Callable[[], None]) -> None:
        late.append(commit)
        raise UnavailableError("no answer")

    mine = part(0, 3, 6)
    with pytest.raises(UnavailableError, match="no answer"):
        deliver(target, "a", mine, sink=answering(target, fails))
    with pytest.raises(ProducerFencedError):
        late[0]()
    assert target.found() == rows_of("before", BEFORE)
    assert deliver(target, "b", mine).taken == (mine,)


def test_a_commit_of_which_nothing_is_known_is_reported(target: KafkaTarget) -> None:
    """If Kafka cannot be reached at all, the error explains that the next attempt reads the result."""

    def lost(commit: Callable[[], None]) -> None:
        commit()
        raise UnavailableError("no answer")

    def gone(_: object) -> None:
        raise UnavailableError("Kafka cannot be reached")

    mine, sink = part(0, 3, 6), answering(target, lost)
    sink._end_open = gone  # type: ignore[method-assign,assignment]
    with pytest.raises(UnavailableError, match=r"reached\. Whether the commit of t/0 \[3, 6\) .* the next attempt"):
        sink.write(target.frame(rows_of("a", mine)), [mine], never)
    assert deliver(target, "b", mine).skipped == (mine,)


@pytest.mark.parametrize(
    ("raised", "error", "said"),
    [
        (ProducerFencedError(0.5), SinkRejectedError, "another run has taken the partition over"),
        (ProducerFencedError(121), UnavailableError, "not sent within transaction_timeout_s=120. Use smaller batches"),
        (
            RecordRejectedError("t/0 offset 2", "Message size too large", is_too_large=True, is_sure=True),
            SinkRejectedError,
            "t/0 offset 2 of group 'g': topic output rejects .* raise max.message.bytes",
        ),
        (
            RecordRejectedError("t/0 offset 2", "bad", is_too_large=False, is_sure=True),
            SinkRejectedError,
            "bad; nothing of .* was written. Correct .* skip the message: `marshal-dagster position reset g t .* 0=3`",
        ),
    ],
)
def test_what_goes_wrong_in_a_transaction_is_reported(
    target: KafkaTarget, raised: Exception, error: type[Exception], said: str
) -> None:
    """The transaction is aborted, and the error names the range and gives advice."""

    def fail() -> None:
        raise raised

    with pytest.raises(error, match=said) as reported:
        deliver(target, "a", part(0, 0, 3), sink=hooked(target, "sent", fail))
    assert "\n" not in str(reported.value)
    assert target.found() == []


def test_a_batch_that_loses_its_claim_half_way(target: KafkaTarget) -> None:
    """`before_commit` is called before the end of each range.

    Ranges taken before stay, and are skipped the next time.
    """
    batch, requested = [part(0, 0, 3), part(1, 0, 3)], list[str]()

    class RecordLostError(Exception):
        """The claim is lost."""

    def before_commit() -> None:
        requested.append("asked")
        if len(requested) == 3:
            raise RecordLostError

    with pytest.raises(RecordLostError):
        deliver(target, "a", *batch, before_commit=before_commit)
    assert target.found() == rows_of("a", batch[0])
    outcome = deliver(target, "b", *batch)
    assert (outcome.taken, outcome.skipped) == ((batch[1],), (batch[0],))
    assert target.found() == rows_of("a", batch[0]) + rows_of("b", batch[1])


def test_a_new_generation_may_be_appended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `append` the new records follow the old ones, and the result names the ranges concerned."""
    target = KafkaTarget(tmp_path, on_new_generation=NewGeneration.APPEND)
    first = deliver(target, "old", part(0, 0, 4), part(1, 0, 2))
    assert first.note == "Kafka topic output: read it with isolation.level=read_committed"
    newer = [part(0, 2, 4, generation=20, epoch=21), part(1, 2, 4)]
    assert target.sink().can_replace(newer) is None
    outcome = deliver(target, "new", *newer)
    assert set(outcome.taken) == set(newer)
    assert (outcome.note or "").endswith("older generation remain before the new records of: t/0 [2, 4)")
    assert "those of generation 20 were appended after them" in caplog.text
    assert target.found() == sorted(rows_of("old", part(0, 0, 4), part(1, 0, 2)) + rows_of("new", *newer))
    assert deliver(target, "again", *newer).skipped


def test_an_output_topic_re_created_is_refused(target: KafkaTarget) -> None:
    """Rows that a re-created output topic has lost are not skipped. A new generation writes them again."""
    deliver(target, "a", part(0, 0, 3))
    for wanted in (part(0, 0, 3), part(0, 3, 6)):
        sink = target.sink()
        sink.topic_id = "second"
        with pytest.raises(SinkRejectedError, match="output topic output was deleted and re-created"):
            sink.verdicts([wanted])
    sink = target.sink()
    sink.topic_id = "second"
    newer = part(0, 0, 6, generation=20, epoch=21)
    assert sink.can_replace([newer]) is None
    assert deliver(target, "b", newer, sink=sink).taken == (newer,)


def test_rows_that_are_others_when_they_are_fetched(target: KafkaTarget) -> None:
    """If fewer rows are fetched than were counted, no row of the range is written."""

    class Fewer(FakeSink):
        @contextmanager
        def _evaluated(self, frame: Any, done: Sequence[int]) -> Iterator[FakeRecords]:  # type: ignore[override] # noqa: ANN401
            with super()._evaluated(frame, done) as records:
                yield Shorter(records.rows)

    class Shorter(FakeRecords):
        def __iter__(self) -> Iterator[Record]:
            return iter(list(super().__iter__())[1:])

    with pytest.raises(SinkRejectedError, match="had 3 rows, and 2 when they were fetched"):
        deliver(target, "a", part(0, 0, 3), sink=Fewer(target.broker))
    assert target.found() == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"timestamp_ms": 0}, "column 'timestamp' is 0 ms after 1970, and for 0 the client sends the current time"),
        ({"timestamp_ms": -1}, "column 'timestamp' is -1 ms after 1970, and Kafka stores .* without a time"),
        ({"partition": -1}, "column 'output_partition' is -1, which is not the number of a partition"),
    ],
)
def test_a_record_that_the_client_would_change_is_refused(
    target: KafkaTarget, changed: dict[str, Any], reason: str
) -> None:
    """The client sends other times and partitions for these values. Nothing of the range is written."""

    class Changed(FakeRecords):
        def __iter__(self) -> Iterator[Record]:
            return (replace(record, **changed) for record in super().__iter__())

    class Changing(FakeSink):
        @contextmanager
        def _evaluated(self, frame: Any, done: Sequence[int]) -> Iterator[FakeRecords]:  # type: ignore[override] # noqa: ANN401
            with super()._evaluated(frame, done) as records:
                yield Changed(records.rows)

    with pytest.raises(SinkRejectedError, match=rf"offset 0 of group .*{reason}; nothing of .* was written"):
        deliver(target, "a", part(0, 0, 3), sink=Changing(target.broker))
    assert target.found() == []


def test_other_times_and_partitions_are_sent() -> None:
    """Times before 1970 and partition 0 are values like others."""
    sent = Record(0, 7, b"v", timestamp_ms=-1000, partition=0), Record(0, 7, b"v", timestamp_ms=1), Record(0, 7, b"v")
    assert [record.problem for record in sent] == [None, None, None]


def _note_text(**fields: object) -> str:
    """Return a note with some fields replaced."""
    note = PositionNote.after(None, part(0, 0, 3), "id", has_rows=True)
    return json.dumps({**json.loads(note.to_json()), **fields})


def test_notes_of_a_newer_version_are_refused(target: KafkaTarget) -> None:
    """Notes of a newer version and damaged notes are rejected."""
    key = target.sink()._key(part(0, 0, 3)).encode()
    for text, said in (
        (json.dumps({"version": 2}), "has version 2, but this marshal-dagster supports only 1"),
        ("x", "is damaged"),
        ("", "is damaged"),
        ("[" * 100_000, "is damaged"),
        (json.dumps({"version": True}), "is damaged"),
        (json.dumps({"version": 0}), "is damaged"),
        (json.dumps({"version": "2"}), "is damaged"),
        (_note_text(position="7"), "is damaged"),
        (_note_text(epoch=None), "is damaged"),
        (_note_text(covered=[["1", "2"]]), "is damaged"),
        (_note_text(covered=7), "is damaged"),
        (_note_text(attempt=7), "is damaged"),
    ):
        with FakeTransaction(target.broker, "another") as transaction:
            transaction.send(f"{OUTPUT}_marshal_ranges", text.encode(), key)
            transaction.commit()
        with pytest.raises(SinkRejectedError, match=said):
            target.sink().verdicts([part(0, 0, 3)])


def test_a_note_of_groups_of_a_newer_version_is_refused(target: KafkaTarget) -> None:
    """A note of groups that is newer or damaged is rejected, and not taken for a missing one."""
    wanted = part(0, 0, 3)
    key = target.sink()._key(replace(wanted, group="", partition=-1)).encode()
    for text, said in (
        (json.dumps({"version": 2}), "has version 2, but this marshal-dagster supports only 1"),
        ("x", "is damaged"),
        (json.dumps({"version": 1, "groups": [7]}), "is damaged"),
    ):
        with FakeTransaction(target.broker, "another") as transaction:
            transaction.send(f"{OUTPUT}_marshal_ranges", text.encode(), key)
            transaction.commit()
        with pytest.raises(SinkRejectedError, match=said):
            target.sink().verdicts([wanted])


def test_what_a_note_says_is_read_back() -> None:
    """If there are very many intervals, the closest are joined, so the note stays small and forgets no offset."""
    note: PositionNote | None = None
    for start in range(0, 2_000, 10):
        note = PositionNote.after(note, part(0, start, start + 3, epoch=start), "id", has_rows=start != 500)
    assert note is not None
    assert PositionNote.from_json(note.to_json(), "here") == note
    assert note.position == StoredPosition("coordination-topic-id-", "the-first-data-topic--", 0, 1990, 1993)
    assert len(note.covered) == 50
    assert note.covers(part(0, 1, 2), "id")
    assert not note.covers(part(0, 1, 2), "another")
    assert not note.covers(part(0, 1, 2, topic_id="another"), "id")
    assert not note.covers(part(0, 1993, 2000), "id")
    assert not note.covers(part(0, 0, 2, readable=2), "id") or note.covered[0][1] > 2


def test_values_that_cannot_be_are_refused() -> None:
    """An invalid option is rejected with the name of its field."""
    for options, said in (
        ({"topic": ""}, "^topic is empty"),
        ({"transaction_timeout_s": 1}, "^transaction_timeout_s is 1; it must be at least"),
        ({"notes_topic": "output"}, "^notes_topic is 'output', which is the output topic itself"),
        ({"partitioner": "java"}, "^partitioner: 'java'; give murmur2_random or"),
        ({"on_new_generation": "replace"}, "^on_new_generation: 'replace'; give refuse or append"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            KafkaSink(CONNECTION, **{"topic": OUTPUT, **options})  # type: ignore[arg-type]


HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"value": BinaryType(), "key": BinaryType(), "headers": HEADERS, "timestamp": TimestampType()}, None),
        ({"value": StringType(), "key": StringType(), "output_partition": IntegerType(), "offset": LongType()}, None),
        ({"key": StringType()}, "no column 'value'"),
        ({"value": LongType()}, "column 'value' has type bigint, .* needs string or binary. Cast the column"),
        ({"value": StringType(), "headers": StringType()}, "needs array<struct<key:string,value:binary>>"),
        ({"value": StringType(), "topic": StringType()}, "writes only to topic output. Drop the column"),
        ({"value": StringType(), "shop": StringType()}, "columns shop are not part of a Kafka record of topic output"),
    ],
)
def test_columns_are_those_of_a_record(columns: dict[str, DataType], said: str | None) -> None:
    """A column that would not be written is rejected before any computation."""
    schema = StructType([StructField("partition", IntegerType()), *(StructField(*each) for each in columns.items())])
    if said is None:
        check_record_columns(schema, OUTPUT)
        return
    with pytest.raises(ConfigurationError, match=said):
        check_record_columns(schema, OUTPUT)


@pytest.mark.thorough
def test_a_sink_shows_no_secret() -> None:
    """Neither the sink nor the errors of its connection show a secret."""
    secret = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "PLAIN", "username": "u", "password": "hunter2"}
    connection = KafkaConnection.from_settings({"bootstrap_servers": "127.0.0.1:1", "timeout_s": 0.5, **secret})
    sink = KafkaSink(connection, OUTPUT)
    assert repr(sink) == "KafkaSink('output')"
    with pytest.raises(UnavailableError) as raised:
        sink.verdicts([part(0, 0, 3)])
    assert "hunter2" not in str(raised.value)


def test_names_give_ids_that_differ() -> None:
    """Each output, group, topic and partition has its own transactional id."""
    sink, other = KafkaSink(CONNECTION, "a"), KafkaSink(CONNECTION, "a-b")
    wanted = [part(1, 0, 1), part(11, 0, 1), part(1, 0, 1, topic="t-1"), part(1, 0, 1, group="g-t", topic="t")]
    ids = [each._key(one) for each in (sink, other) for one in wanted]
    assert len(set(ids)) == len(ids)
    assert ids[0] == "marshal-dagster/a/g/t/1"


def test_only_the_same_task_has_written_a_range_that_its_second_attempt_finds(target: KafkaTarget) -> None:
    """A task that runs again reports the range as taken. A task of another batch has not taken it."""
    sink, wanted = target.sink(), part(0, 0, 3)
    queue: Any = SimpleNamespace(send=lambda *_: 0)
    with sink._place() as place:

        def write(attempt: str) -> Step | None:
            return sink._write(place, wanted, 0, queue, lambda: None, attempt=attempt)

        assert [write("this task"), write("this task"), write("another task")] == [Step.TAKEN, Step.TAKEN, None]
