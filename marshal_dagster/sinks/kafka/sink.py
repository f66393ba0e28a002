"""A sink that writes records to a Kafka topic, each range in a transaction that also stores the new position.

Each partition of each group has its own transactional id. Initialising a transaction with it aborts the open
transaction of an earlier writer and fences that writer, so Kafka accepts only one writer at a time. After that the
writer reads the newest note of the partition and judges its range by it (protocol.md, section 6). It sends the records
and, last of all, the new note (docs/contributing/decisions/0010-kafka-sink.md).

`records` converts rows to records, `notes` defines the notes, and `marshal_dagster.kafka.transactions` contains the
Kafka client.
"""

import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.errors import (
    AuthorizationError,
    ConfigurationError,
    MarshalError,
    SinkRejectedError,
    TopicNotFoundError,
    UnavailableError,
)
from marshal_dagster.kafka.acls import Right, on_topic
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.partitioner import Partitioner
from marshal_dagster.kafka.topic_creation import create_and_warn
from marshal_dagster.protocol.batch_planning import ClaimedRange, skip_text
from marshal_dagster.protocol.idempotence import Verdict, judge
from marshal_dagster.sinks.kafka import report
from marshal_dagster.sinks.kafka.notes import GroupsNote, PositionNote
from marshal_dagster.sinks.kafka.range_write import Place, RecordQueue, Step
from marshal_dagster.sinks.kafka.records import TIMESTAMP, FrameRecords, Record, check_record_columns, evaluated
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.report import SinkReport, VacuumResult
from marshal_dagster.sinks.row_writer import RowWriter
from marshal_dagster.sinks.sink import (
    BeforeCommit,
    OffsetsRead,
    Steps,
    WriteResult,
    changed_result,
    check_columns,
    check_ranges,
    ranges_to_write,
    refuse_foreign_rows,
    session_of,
    write_result,
)
from marshal_dagster.spark.column_names import is_case_sensitive
from marshal_dagster.spark.executor_check import check_executors

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame, SparkSession

    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.kafka.transactions import NotesReader, Transaction

logger = logging.getLogger(__name__)

ID_PREFIX: Final = "marshal-dagster/"
NOTES_SUFFIX: Final = "_marshal_ranges"
NOTES_SETTINGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    "unclean.leader.election.enable": "false",
    "segment.bytes": "4194304",
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.1",
}
"""Compaction keeps each partition's newest note forever; small segments let it run soon."""
_OFFSET: Final = " offset "
_TIMESTAMP_TYPE: Final = "message.timestamp.type"
_CREATE_TIME: Final = "CreateTime"
_GLANCE_S: Final = 0.5
"""How long to wait for another writer's open transaction before aborting those of dead writers of our partitions."""
_MORE_PATIENCE_S: Final = 15.0
"""The interval at which a broker aborts timed-out transactions (10 s), plus some seconds."""


def _how_to_skip(name: str, range_: ClaimedRange) -> str:
    """Return how to skip the source message of the record with this name; empty if it has no offset."""
    _, _, offset = name.rpartition(_OFFSET)
    if not offset.isdigit():
        return ""
    return f". Correct the code that makes it, or skip the message: {skip_text(range_, int(offset), int(offset) + 1)}"


class NewGeneration(StrEnum):
    """What to do with offsets that are read again after an operator has set the position back.

    The records of a topic cannot be replaced.
    """

    REFUSE = "refuse"
    """Refuse ranges at which the topic may have records of an older generation."""
    APPEND = "append"
    """Append the new records after the old ones, which stay in the topic."""


class _RepeatableQueue(RecordQueue, Protocol):
    """A queue whose records can be sent again."""

    def again(self, wanted: ClaimedRange) -> RecordQueue:
        """Return a queue with the records of a range, whose errors name a record."""
        ...


class _Queue:
    """The records of one `write` call, in ascending order of their source partitions."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = records
        self._groups = itertools.groupby(records, key=attrgetter("source_partition"))
        self._next: tuple[int, Iterator[Record]] | None = None

    def send(self, transaction: "Transaction", topic: str, wanted: ClaimedRange) -> int:
        """Send the records of a range, and return their number."""
        from marshal_dagster.kafka.transactions import RecordRejectedError

        sent = 0
        for row in self.of(wanted.partition):
            name = f"{wanted.topic}/{wanted.partition}{_OFFSET}{row.source_offset}"
            if row.problem is not None:
                raise RecordRejectedError(name, row.problem, is_too_large=False, is_sure=True)
            transaction.send(
                topic,
                row.value,
                row.key,
                name=name,
                partition=row.partition,
                headers=row.headers,
                timestamp_ms=row.timestamp_ms,
            )
            sent += 1
        return sent

    def again(self, _: ClaimedRange) -> "_Queue":
        """Return a new queue that starts at the first record again."""
        return _Queue(self._records)

    def of(self, partition: int) -> Iterator[Record]:
        """Return the records of a partition, and skip those of lower partitions."""
        while self._next is None or self._next[0] < partition:
            self._next = next(self._groups, None)
            if self._next is None:
                return iter(())
        return self._next[1] if self._next[0] == partition else iter(())


class _BatchQueue:
    """The rows of one `write` call as Arrow batches, in ascending order of their source partitions."""

    def __init__(self, batches: "Iterator[RecordBatch]", records: FrameRecords) -> None:
        from marshal_dagster.sinks.kafka.arrow_rows import ArrowRows

        self._rows, self._records = ArrowRows(batches), records

    def send(self, transaction: "Transaction", topic: str, wanted: ClaimedRange) -> int:
        """Send the records of a range, and return their number. An error does not name the record."""
        while (partition := self._rows.partition) is not None and partition < wanted.partition:
            self._rows.skip(partition)
        return self._rows.send(transaction, topic, wanted)

    def again(self, wanted: ClaimedRange) -> _Queue:
        """Return a queue with the records of a range, whose errors name a record."""
        return _Queue(self._records.of(wanted.partition))


def _queue_of(records: Iterable[Record]) -> _RepeatableQueue:
    """Return the records as this process sends them: as Arrow batches, if Spark can pass these."""
    if isinstance(records, FrameRecords) and (batches := records.batches()) is not None:
        return _BatchQueue(batches, records)
    return _Queue(records)


class KafkaSink(Steps):
    """A sink that writes records to the Kafka topic `topic`, for readers with `isolation.level=read_committed`.

    The frame has the columns of Spark's own Kafka writer: `value` (string or binary) and optionally `key` (string or
    binary), `headers` and `timestamp`. `partition` and `offset` remain those of the source message. The optional
    column `output_partition` (int) selects the partition of the output topic.

    The records of one range are written in one transaction, in the order of their offsets. Each range of a batch is
    atomic on its own. By default Spark's tasks send the records, several ranges at the same time. Call `create_notes`
    once to create the topic in which the sink records the ranges that it has taken.

    Example:
        ```python
        sink = KafkaSink(KafkaConnection(bootstrap_servers="kafka-1:9092"), "orders-upper")
        sink.create_notes()  # once, when the output is set up
        ```
    """

    supports_unordered_ranges = False
    """False: the sink stores one position for each partition, so it needs ranges in order."""
    _evaluated = staticmethod(evaluated)
    """Evaluates the rows of the partitions that are not done; tests replace it."""

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        *,
        notes_topic: str | None = None,
        transaction_timeout_s: float = 120.0,
        partitioner: Partitioner | str = Partitioner.MURMUR2_RANDOM,
        on_new_generation: NewGeneration | str = NewGeneration.REFUSE,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
        written_by: RowWriter | str = RowWriter.EXECUTORS,
    ) -> None:
        """Configure the output; the sink does not connect to Kafka before its first use.

        Args:
            connection: The connection to the cluster with the output topic.
            topic: The output topic.
            notes_topic: The topic in which the sink records the ranges that it has taken, by default
                `<topic>_marshal_ranges`. All writers of the output must use the same one.
            transaction_timeout_s: How many seconds sending the records of one range may take. Readers of the topic
                wait at most this long for a run that has died.
            partitioner: A partitioner of librdkafka; the `murmur2` ones select partitions as Java clients do.
            on_new_generation: Whether records of a new generation are refused or appended after older ones.
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/how-to/sinks.md,
                "Another group").
            written_by: Whether Spark's tasks send the records, or the process of the run. Tasks need the packages
                marshal-dagster, pandas and pyarrow on each executor.

        Raises:
            ConfigurationError: A value is not valid.
        """
        if not topic:
            raise ConfigurationError("topic is empty; it must be the name of the output topic")
        if not connection.timeout_s + 1 <= transaction_timeout_s < math.inf:
            raise ConfigurationError(
                f"transaction_timeout_s is {transaction_timeout_s:g}; it must be at least one second longer than the "
                f"connection's timeout_s, which is {connection.timeout_s:g}"
            )
        if topic == notes_topic:
            raise ConfigurationError(f"notes_topic is {topic!r}, which is the output topic itself: use another topic")
        self.topic = topic
        """The output topic."""
        self.notes_topic = notes_topic or f"{topic}{NOTES_SUFFIX}"
        """The topic in which the sink records the ranges that it has taken."""
        self.transaction_timeout_s = transaction_timeout_s
        """The maximum time to send the records of one range, in seconds."""
        self.partitioner = Partitioner.of(partitioner)
        """The librdkafka partitioner that selects the partition of a key."""
        self.on_new_generation = enum_member(NewGeneration, "on_new_generation", on_new_generation)
        """Whether records of a new generation are refused, or appended after older ones."""
        self.written_by = enum_member(RowWriter, "written_by", written_by)
        """The processes that send the records."""
        self._groups = OutputGroups(f"Kafka topic {topic}", shared_by_groups, previous_group)
        self._connection = connection
        self._id_prefix = f"{ID_PREFIX}{topic}/"
        self._patience_s = transaction_timeout_s + _MORE_PATIENCE_S
        """How long a transaction of a dead writer can stay open, in seconds."""
        self._is_checked = self._is_tried = False

    def __repr__(self) -> str:
        return f"KafkaSink({self.topic!r})"

    def create_notes(self) -> bool:
        """Create the topic of notes, with the replication factor of the output topic.

        Returns:
            True if the topic was created, False if it existed with the right settings.

        Raises:
            TopicNotFoundError: The output topic does not exist.
            ConfigurationError: The topic of notes exists with settings under which it would lose notes.
            AuthorizationError: A right on one of the topics is missing.
            UnavailableError: If Kafka cannot be reached.
        """
        with self._topics() as topics:
            described = topics.describe(self.topic)
            settings = dict(NOTES_SETTINGS)
            try:
                settings["min.insync.replicas"] = topics.settings(self.topic)["min.insync.replicas"]
            except AuthorizationError as missing:
                logger.info(
                    "topic %s is created with the brokers' min.insync.replicas, because that of topic %s cannot be "
                    "read: %s",
                    self.notes_topic,
                    self.topic,
                    missing,
                )
            created = create_and_warn(
                topics, self.notes_topic, 1, described.replication, settings, required=("cleanup.policy",)
            )
            if not created:
                self._check_notes(topics)
            return created

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Return what the sink would do with each range (`Sink.verdicts`).

        The first call also initialises a transaction, so that a missing right is found before the batch is processed.

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: One of the ranges cannot be written.
            ConfigurationError: The topic of notes would lose notes, or the transaction timeout is too long.
            TopicNotFoundError: The output topic or the topic of notes does not exist.
            AuthorizationError: A right is missing.
            UnavailableError: If Kafka cannot be reached.
        """
        check_ranges(ranges)
        with self._place() as place:
            verdicts = self._judge_all(place, ranges)
            if not self._is_tried:
                self._end_open(ranges[:1])
                self._is_tried = True
            return verdicts

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if the sink would write a new generation of these ranges, else the reason (`Sink.can_replace`).

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason why they would be refused.

        Raises:
            SinkRejectedError: A note is damaged or was written by a newer version.
            TopicNotFoundError: The output topic or the topic of notes does not exist.
            UnavailableError: If Kafka cannot be reached.
        """
        with self._place() as place:
            notes = place.notes.newest(self._patience_s)
            covered = self._covered(place, notes, ranges)
        if covered and self.on_new_generation is NewGeneration.REFUSE:
            return self._unreplaceable(covered[0])
        return self._groups.refusal(ranges, self._groups_in(notes, ranges), partial(self._covered, place, notes))

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,  # noqa: ARG002 - nothing is replaced
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the records of each range that the topic does not have, each range in one transaction (`Sink.write`).

        The executors evaluate the frame once, before the first transaction begins, and `before_commit` is called then.
        If this process writes, it is called again at the end of each transaction. After an error, the ranges that were
        committed remain, and nothing of the other ranges is visible to `read_committed` readers.

        Args:
            frame: The rows, with the columns that the class describes.
            ranges: The ranges of the batch.
            offsets_read: Not used, because records cannot be replaced.
            before_commit: Checks that the batch still holds its claims.

        Returns:
            The ranges taken and skipped, with a note for readers of the topic.

        Raises:
            SinkRejectedError: A range or a record cannot be written.
            ConfigurationError: The columns are not those of Kafka records.
            UnavailableError: If Kafka cannot be reached, or sending took longer than the transaction timeout.
        """
        session = session_of(frame)
        spark = session if self.written_by is RowWriter.EXECUTORS else None
        case_sensitive = is_case_sensitive(session)
        check_columns(frame.schema, (), case_sensitive=case_sensitive)
        check_record_columns(frame.schema, self.topic, case_sensitive=case_sensitive)
        check_ranges(ranges)
        if spark is not None:
            check_executors(spark, ("marshal_dagster", "confluent_kafka"), f"use written_by={RowWriter.DRIVER.value!r}")
        with self._place() as place:
            if TIMESTAMP in frame.columns:
                self._require_create_time(place.topics)
            verdicts = self._judge_all(place, ranges)
            wanted = sorted(ranges_to_write(verdicts), key=attrgetter("partition"))
            if not wanted:
                return WriteResult(taken=(), skipped=tuple(ranges), rows={})
            done = [range_.partition for range_ in ranges if range_ not in wanted]
            with self._evaluated(frame, done) as records:
                counts = {range_: records.counts.get(range_.partition, 0) for range_ in wanted}
                refuse_foreign_rows(records.counts, wanted)
                if records.rejected is not None:
                    raise records.rejected.error(f"Kafka topic {self.topic}", wanted)
                self._reached("evaluated")
                before_commit()
                self._enter_group(place, wanted[0])
                steps = self._write_all(place, counts, records, before_commit, spark)
        taken = tuple(range_ for range_ in ranges if steps.get(range_))
        appended = [range_ for range_ in taken if steps[range_] is Step.APPENDED]
        for range_ in appended:
            logger.warning(
                "%s of group %r: topic %s keeps its records of an older generation of these offsets; those of "
                "generation %d were appended after them",
                range_,
                range_.group,
                self.topic,
                range_.generation,
            )
        return write_result(ranges, taken, records.counts, self._note_to_readers(appended))

    def describe(self) -> SinkReport:
        """Return the position of each partition, by the notes.

        Returns:
            The positions, by group, topic and partition.

        Raises:
            SinkRejectedError: A note is damaged or was written by a newer version.
            TopicNotFoundError: The output topic or the topic of notes does not exist.
            UnavailableError: If Kafka cannot be reached.
        """
        with self._place() as place:
            notes = place.notes.newest(self._patience_s)
        return SinkReport(f"Kafka topic {self.topic}", tuple(report.stored_generations(notes, self._id_prefix)))

    def check(self) -> list[str]:
        """Return what is wrong with the notes. Records of the output topic are not read.

        Returns:
            One line for each problem.

        Raises:
            TopicNotFoundError: The output topic or the topic of notes does not exist.
            UnavailableError: If Kafka cannot be reached.
        """
        with self._place() as place:
            notes = place.notes.newest(self._patience_s)
            return list(report.note_problems(notes, self._id_prefix, place.topic_id))

    def vacuum(self, *, dry_run: bool) -> VacuumResult:  # noqa: ARG002 - nothing is removed
        """Remove nothing: the brokers' compaction removes older notes.

        Args:
            dry_run: Without effect.

        Returns:
            A result with a hint.
        """
        hint = f"Older notes are removed by the compaction of topic {self.notes_topic}"
        return VacuumResult(f"Kafka topic {self.topic}", 0, merged=0, obsolete=0, moved_rows=None, hint=hint)

    def _write_all(
        self,
        place: Place,
        counts: Mapping[ClaimedRange, int],
        records: FrameRecords,
        before_commit: BeforeCommit,
        spark: "SparkSession | None",
    ) -> dict[ClaimedRange, Step | None]:
        """Write the records of each range: by the tasks of `spark`, or by this process.

        This process notes the ranges without records, and writes those again of which the brokers reject a record.
        """
        if spark is None:
            queue = _queue_of(records)
            return {range_: self._take(place, range_, counts[range_], queue, before_commit) for range_ in counts}
        from marshal_dagster.sinks.kafka.tasks import write_in_tasks

        in_tasks = {range_: count for range_, count in counts.items() if count}
        written = write_in_tasks(self, place, in_tasks, records, before_commit)
        for range_, count in counts.items():
            if range_ not in written:
                queue = _Queue(records.of(range_.partition) if count else ())
                written[range_] = self._take(place, range_, count, queue, before_commit)
        return written

    def _note_to_readers(self, appended: Sequence[ClaimedRange]) -> str:
        note = f"Kafka topic {self.topic}: read it with isolation.level=read_committed"
        if not appended:
            return note
        listed = ", ".join(map(str, appended))
        return f"{note}. Records of an older generation remain before the new records of: {listed}"

    def _take(
        self, place: Place, wanted: ClaimedRange, count: int, queue: "_RepeatableQueue", before_commit: BeforeCommit
    ) -> Step | None:
        """Write the records of a range in one transaction; return None if another writer has taken it meanwhile.

        A broker that rejects a record rejects all records of the same request. If it is not known which record it was,
        the range is written again with one record per request.
        """
        from marshal_dagster.kafka.transactions import ProducerFencedError, RecordRejectedError

        try:
            try:
                step = self._write(place, wanted, count, queue, before_commit)
            except RecordRejectedError as refused:
                if refused.is_sure:
                    raise
                logger.warning(
                    "topic %s rejects records of %s of group %r: sending them again, one per request, to find the "
                    "record",
                    self.topic,
                    wanted,
                    wanted.group,
                )
                step = self._write(place, wanted, count, queue.again(wanted), before_commit, sends_alone=True)
        except ProducerFencedError as fenced:
            raise self._fenced_error(wanted, fenced.took_s) from None
        except RecordRejectedError as refused:
            hint = (
                ": make it smaller, or raise max.message.bytes of the topic and message.max.bytes in the connection's "
                "client_settings"
            )
            raise SinkRejectedError(
                f"{refused.name} of group {wanted.group!r}: topic {self.topic} rejects the record made from it: "
                f"{refused.reason}; nothing of {wanted} was written{hint if refused.is_too_large else ''}"
                f"{_how_to_skip(refused.name, wanted)}"
            ) from None
        return step

    def _write(
        self,
        place: Place,
        wanted: ClaimedRange,
        count: int,
        queue: RecordQueue,
        before_commit: BeforeCommit,
        *,
        sends_alone: bool = False,
        attempt: str | None = None,
    ) -> Step | None:
        """Write a range in one transaction; return None if another writer has taken it.

        Another writer with the same `attempt` is a process that executes the same task of this batch.
        """
        with self._transaction(wanted, sends_alone=sends_alone) as transaction:
            self._reached("fenced")
            notes = place.notes.newest(self._patience_s)
            if others := self._groups.others(wanted, self._groups_in(notes, [wanted])):
                # Each group aborts the open transaction of the other one, so the later one sees the earlier one's note.
                self._end_open([replace(wanted, group=other) for other in others])
                notes = place.notes.newest(self._patience_s)
            before = self._found(notes, wanted)
            if self._judge_by(place, notes, [wanted])[wanted] is Verdict.SKIP:
                return Step.TAKEN if before is not None and before.attempt == attempt else None
            note = PositionNote.after(before, wanted, place.topic_id, has_rows=count > 0, attempt=attempt)
            transaction.begin()
            self._send(transaction, queue, wanted, count)
            self._reached("sent")
            before_commit()
            self._send_note(transaction, wanted, note)
            self._reached("noted")
            self._commit(transaction, place, wanted, note)
            self._reached("committed")
        return Step.APPENDED if before is not None and before.covers(wanted, place.topic_id) else Step.TAKEN

    def _send(self, transaction: "Transaction", queue: RecordQueue, wanted: ClaimedRange, count: int) -> None:
        sent = queue.send(transaction, self.topic, wanted)
        transaction.flush()
        if sent != count:
            raise changed_result(f"{wanted} of group {wanted.group!r}", count, sent)

    def _send_note(self, transaction: "Transaction", wanted: ClaimedRange, note: PositionNote) -> None:
        """Send the note that the range is taken. It is sent last, because readers of notes wait for the commit."""
        from marshal_dagster.kafka.transactions import NOTES_PARTITION

        key = self._key(wanted)
        transaction.send(
            self.notes_topic, note.to_json(), key.encode(), name=f"the note of {key}", partition=NOTES_PARTITION
        )

    def _commit(self, transaction: "Transaction", place: Place, wanted: ClaimedRange, note: PositionNote) -> None:
        """Commit the transaction. After an error, read the topic of notes to find out whether it was committed."""
        from marshal_dagster.kafka.transactions import ProducerFencedError

        try:
            transaction.commit()
        except (ProducerFencedError, MarshalError) as error:
            try:
                if not isinstance(error, ProducerFencedError):
                    self._end_open([wanted])
                newest = self._found(place.notes.newest(self._patience_s), wanted)
            except MarshalError as unknown:
                raise UnavailableError(
                    f"{unknown}. Whether the commit of {wanted} of group {wanted.group!r} succeeded is not known: the "
                    "next attempt of the batch finds out, and skips the range if it was written"
                ) from None
            if newest != note:
                raise

    def _fenced_error(self, wanted: ClaimedRange, took_s: float) -> MarshalError:
        nothing = f"{wanted} of group {wanted.group!r}: nothing of it was written to topic {self.topic}"
        if took_s >= self.transaction_timeout_s:
            return UnavailableError(
                f"{nothing}, because its records were not sent within transaction_timeout_s="
                f"{self.transaction_timeout_s:g}. Use smaller batches or a longer timeout"
            )
        return SinkRejectedError(f"{nothing}, because another run has taken the partition over; this run must stop")

    def _judge_all(self, place: Place, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Judge all ranges by the newest notes, and abort transactions that dead writers of their partitions left."""
        from marshal_dagster.kafka.transactions import TransactionStillOpenError

        try:
            notes = place.notes.newest(_GLANCE_S)
        except TransactionStillOpenError:
            self._end_open([*ranges, *map(_entry_of, ranges[:1])])
            notes = place.notes.newest(self._patience_s)
        return self._judge_by(place, notes, ranges)

    def _judge_by(
        self, place: Place, notes: Mapping[str, bytes], ranges: Sequence[ClaimedRange]
    ) -> dict[ClaimedRange, Verdict]:
        verdicts = {range_: self._judge(place, range_, self._found(notes, range_)) for range_ in ranges}
        undone = ranges_to_write(verdicts)
        self._groups.check(undone, self._groups_in(notes, undone), partial(self._covered, place, notes))
        return verdicts

    def _groups_in(self, notes: Mapping[str, bytes], ranges: Sequence[ClaimedRange]) -> set[str]:
        """Return the groups that have started to write ranges of the topic of `ranges`, according to the notes."""
        if not ranges:
            return set()
        entry = self._key(_entry_of(ranges[0]))
        places = [key.removeprefix(self._id_prefix).rsplit("/", 2) for key in notes if key.startswith(self._id_prefix)]
        groups = {place[0] for place in places if place[1:-1] == [ranges[0].topic]} - {""}
        if entry in notes:
            groups.update(GroupsNote.from_json(notes[entry], self._note_name(entry)).groups)
        return groups

    def _covered(self, place: Place, notes: Mapping[str, bytes], ranges: Sequence[ClaimedRange]) -> list[ClaimedRange]:
        """Return the ranges at which the output may have records of their group."""
        found = ((range_, self._found(notes, range_)) for range_ in ranges)
        return [range_ for range_, note in found if note is not None and note.covers(range_, place.topic_id)]

    def _enter_group(self, place: Place, wanted: ClaimedRange) -> None:
        """Note the group before its first range of the topic. Only one writer of all groups can do so at a time."""
        from marshal_dagster.kafka.transactions import NOTES_PARTITION, ProducerFencedError

        if self._groups.shared_by_groups or self._is_entered(place, wanted):
            return
        entry = _entry_of(wanted)
        key = self._key(entry)
        try:
            with self._transaction(entry) as transaction:
                notes = place.notes.newest(self._patience_s)
                self._judge_by(place, notes, [wanted])
                groups = self._groups_in(notes, [wanted])
                note = GroupsNote(tuple(sorted({*groups, wanted.group}))).to_json()
                transaction.begin()
                transaction.send(
                    self.notes_topic, note, key.encode(), name=f"the note of {key}", partition=NOTES_PARTITION
                )
                self._reached("group noted")
                transaction.commit()
        except ProducerFencedError:
            if not self._is_entered(place, wanted):
                raise UnavailableError(
                    f"{wanted} of group {wanted.group!r}: another run started to write to topic {self.topic} at the "
                    "same time, so nothing was written. Run the batch again"
                ) from None

    def _is_entered(self, place: Place, wanted: ClaimedRange) -> bool:
        return wanted.group in self._groups_in(place.notes.newest(self._patience_s), [wanted])

    def _end_open(self, ranges: Sequence[ClaimedRange]) -> None:
        for range_ in ranges:
            with self._transaction(range_):
                pass

    def _judge(self, place: Place, wanted: ClaimedRange, note: PositionNote | None) -> Verdict:
        verdict = judge(note.position if note else None, wanted)
        if note is None:
            return verdict
        if note.output_topic_id != place.topic_id and verdict is not Verdict.REPLACE:
            raise SinkRejectedError(
                f"{wanted} of group {wanted.group!r}: output topic {self.topic} was deleted and re-created since the "
                "previous range was written, so nothing was written. Set the group's position to the offset at which "
                "the new topic should begin"
            )
        refuses = self.on_new_generation is NewGeneration.REFUSE
        if refuses and verdict is not Verdict.SKIP and note.covers(wanted, place.topic_id):
            raise SinkRejectedError(self._unreplaceable(wanted))
        return verdict

    def _unreplaceable(self, wanted: ClaimedRange) -> str:
        return (
            f"{wanted} of group {wanted.group!r}: topic {self.topic} has records of an older generation of these "
            "offsets, and a topic's records cannot be replaced. Write to a new topic, or have the new records appended "
            f"after the old ones (on_new_generation={NewGeneration.APPEND.value!r})"
        )

    def _found(self, notes: Mapping[str, bytes], wanted: ClaimedRange) -> PositionNote | None:
        key = self._key(wanted)
        if key not in notes:
            return None
        return PositionNote.from_json(notes[key], self._note_name(key))

    def _note_name(self, key: str) -> str:
        return f"the note of {key} in topic {self.notes_topic}"

    def _key(self, wanted: ClaimedRange) -> str:
        """Return the transactional id of the range's partition, which is also the key of its note.

        Only the group's name can contain slashes, so the parts of an id are unambiguous.
        """
        return f"{self._id_prefix}{wanted.group}/{wanted.topic}/{wanted.partition}"

    def _transaction(self, wanted: ClaimedRange, *, sends_alone: bool = False) -> "Transaction":
        from marshal_dagster.kafka.transactions import Transaction

        return Transaction(
            self._connection,
            self._key(wanted),
            id_prefix=self._id_prefix,
            topics=[self.topic, self.notes_topic],
            timeout_s=self.transaction_timeout_s,
            partitioner=self.partitioner,
            sends_alone=sends_alone,
        )

    @contextmanager
    def _place(self) -> Iterator[Place]:
        """Describe the topics and yield them with a reader of the notes; close the connections after the block."""
        with self._notes_reader() as (topics, notes):
            described = topics.describe(self.topic)
            if not self._is_checked:
                topics.require(on_topic(self.topic, Right.WRITE))
                self._check_notes(topics)
                self._is_checked = True
            yield Place(described.topic_id, notes, topics)

    @contextmanager
    def _notes_reader(self) -> Iterator[tuple["Topics", "NotesReader"]]:
        """Yield an admin client and a reader of the notes; close both after the block."""
        from marshal_dagster.kafka.transactions import NotesReader

        with (
            self._topics() as topics,
            NotesReader(self._connection, self.notes_topic, topics, is_note=is_note) as notes,
        ):
            yield topics, notes

    def _with_connection(self, connection: KafkaConnection | None) -> "KafkaSink":
        """Return a copy with another connection. Without one it contains no secret, and cannot write.

        A copy of a subclass is a `KafkaSink`, because executors may not have the module of the subclass.
        """
        other = object.__new__(KafkaSink)
        vars(other).update(vars(self), _connection=connection)
        return other

    def _require_create_time(self, topics: "Topics") -> None:
        """Raise `ConfigurationError` if brokers replace the timestamps of the topic's records by their own."""
        try:
            kind = topics.settings(self.topic)[_TIMESTAMP_TYPE]
        except AuthorizationError as missing:
            logger.warning(
                "topic %s: if its %s is LogAppendTime, brokers replace the result's column %r; that cannot be read: %s",
                self.topic,
                _TIMESTAMP_TYPE,
                TIMESTAMP,
                missing,
            )
            return
        if kind != _CREATE_TIME:
            raise ConfigurationError(
                f"topic {self.topic} has {_TIMESTAMP_TYPE}={kind}, so brokers would replace the result's column "
                f"{TIMESTAMP!r} by the time of writing: set it to {_CREATE_TIME}, or drop the column"
            )

    def _check_notes(self, topics: "Topics") -> None:
        from marshal_dagster.kafka.transactions import check_notes_are_kept

        try:
            topics.require(on_topic(self.notes_topic, Right.READ, Right.WRITE))
            check_notes_are_kept(topics, self.notes_topic)
        except TopicNotFoundError as missing:
            raise TopicNotFoundError(
                f"{missing}. KafkaSink({self.topic!r}) records there which ranges it has taken: for a new output call "
                "`create_notes()` once; if the topic was deleted, restore it or start a new output"
            ) from None

    def _topics(self) -> "Topics":
        from marshal_dagster.kafka.admin_client import Topics

        return Topics(self._connection, client_id="marshal-dagster-sink")


def _entry_of(wanted: ClaimedRange) -> ClaimedRange:
    """Return the range whose key is that of the note of a topic's groups; no real range has its group and partition."""
    return replace(wanted, group="", partition=-1)


def is_note(key: str, text: bytes | None) -> bool:
    """Return whether a record of the topic of notes is a note of this sink."""
    kind = GroupsNote if key.endswith("/-1") else PositionNote
    return kind.is_note(text)
