"""`tail`: show the log's records, parsed and with their verdicts, and follow new ones."""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Annotated, Final

import typer

from marshal_dagster.admin.pause import group_names, topic_names, unknown_group
from marshal_dagster.admin.record_sentences import JudgedRecord, judge, sentence
from marshal_dagster.admin.texts import settings_text
from marshal_dagster.cli import output
from marshal_dagster.cli.command import command, command_group
from marshal_dagster.cli.connections import READING, connection_of, hint_how_to_create, open_log, require_rights
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.options import LogOptions
from marshal_dagster.cli.record_filter import EVERYTHING, FilterOptions, RecordFilter
from marshal_dagster.coordination.clock import SystemClock
from marshal_dagster.coordination.log import Chunk, PositionLostError, TimedLog
from marshal_dagster.errors import ConfigurationError, CoordinationLogChangedError
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingRange,
    DataTopic,
    GroupMessage,
    GroupSettingsRecord,
    Heartbeat,
    InvalidMessage,
    Message,
    PlanningRange,
    RangeMessage,
    ReleaseGroup,
    ReleasingPartition,
    RevokingClaim,
    coordination_partition,
    parse,
    type_name,
)
from marshal_dagster.protocol.replay import StoredRecord, render_record
from marshal_dagster.protocol.world import PartitionWorld, VerdictKind, World

_DEFAULT_LINES: Final = 10
_MOST_LINES: Final = 1_000_000
_TOGETHER: Final = 10_000
_LOOK_AGAIN_S: Final = 0.25
_SHOWN_BYTES: Final = 512
_STYLES: Final[Mapping[VerdictKind, str]] = {
    VerdictKind.ACCEPTED: "green",
    VerdictKind.REFUSED: "yellow",
    VerdictKind.INVALID: "red",
}


app = command_group("Show the records of the coordination log.")


@command(
    app,
    "tail",
    "Show the records of the coordination log. Each is parsed and shown with its verdict. By default these are the "
    "last 10; with --json they are all records, in the form that `replay` reads. Records of one coordination partition "
    "are in order; those of several partitions are merged by log time. With --explain each record is a sentence. "
    "With --since all records since then are shown. The exit code is 1 if no record names the group or topic.",
    "tail --follow --explain --no-heartbeats",
    "tail --group flights --topic flights --partition 0,2-4 --since 2h --explain",
    "tail --json > log.jsonl",
)
def tail(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new records.")] = False,
    from_start: Annotated[bool, typer.Option("--from-start", help="Show all records, from the log's first.")] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", metavar="N", help="The last N records. Default: 10; all with --json or --since."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", "-e", help="Show each record as a sentence: who did what, and why not.")
    ] = False,
    chosen: FilterOptions,
    options: LogOptions,
) -> ExitCode:
    """Show the last records, then with `follow` new ones. Raises `MarshalError`."""
    wanted, (since_ms, until_ms) = chosen.record_filter(), chosen.times(SystemClock().wall_ms())
    if follow and until_ms is not None:
        raise typer.BadParameter("--follow and --until contradict each other: use only one of them")
    if from_start and since_ms is not None:
        raise typer.BadParameter("--from-start and --since contradict each other: use only one of them")
    if from_start and lines is not None:
        raise typer.BadParameter("--from-start and -n contradict each other: use only one of them")
    if explain and options.as_json:
        raise typer.BadParameter("--explain and --json contradict each other: use only one of them")
    if lines is None and not from_start and since_ms is None and not options.as_json:
        lines = _DEFAULT_LINES
    if lines is not None and not 0 <= lines <= _MOST_LINES:
        raise ConfigurationError(f"-n is {lines}; it must be a number of records from 0 to {_MOST_LINES}")
    connection, topic = connection_of(options), options.coordination_topic
    with hint_how_to_create(topic), closing(open_log(connection, topic)) as log:
        require_rights(connection, topic, READING)
        # The stored records alone are enough for `replay`, which judges them itself.
        is_judged = not options.as_json or wanted.without_heartbeats
        reader = Reader(log, judge=is_judged, timeout_s=connection.timeout_s, wanted=wanted)
        reader.limit(since_ms, until_ms)
        for records in shown(reader, lines=lines, follow=follow):
            if options.as_json:
                for judged in records:
                    output.write_line(render_record(judged.record))
            else:
                output.show(*(explained_lines(records) if explain else map(record_line, records)))
            output.flush()
    return ExitCode.PROBLEMS if reader.has_unknown_name else ExitCode.OK


def shown(reader: "Reader", *, lines: int | None, follow: bool) -> Iterator[list[JudgedRecord]]:
    """Yield the last `lines` records (None: all), then with `follow` new ones, in batches by log time.

    Records of one coordination partition are in order. Those of several are merged by log time within a batch.
    """
    if lines is None:
        yield from reader.read()
    else:
        reader.skip_to_last(lines)
        yield _last(lines, reader.read())
    reader.report_unknown_names()
    if not (follow or reader.has_shown):
        output.write_note("no record to show")
    while follow:
        output.wait(_LOOK_AGAIN_S)
        yield from reader.read()


def _last(lines: int, batches: Iterable[list[JudgedRecord]]) -> list[JudgedRecord]:
    """Return the last `lines` records by log time. In each partition, later batches have later records."""
    by_partition: dict[int, deque[JudgedRecord]] = {}
    for judged in chain.from_iterable(batches):
        by_partition.setdefault(judged.record.partition, deque(maxlen=lines)).append(judged)
    merged = _merged(by_partition)
    return merged[max(0, len(merged) - lines) :]


def _merged(by_partition: Mapping[int, Sequence[JudgedRecord]]) -> list[JudgedRecord]:
    ordered = [by_partition[partition] for partition in sorted(by_partition)]
    return list(heapq.merge(*ordered, key=lambda judged: judged.log_time_ms))


class Reader:
    """Reads the whole log, and judges each record; without `judge` it only reads."""

    def __init__(self, log: TimedLog, *, judge: bool, timeout_s: float, wanted: RecordFilter = EVERYTHING) -> None:
        """Begin at the log's start; with a topic read only its coordination partition. No record is read yet.

        Raises `TopicNotFoundError`, `UnavailableError`.
        """
        self._log = log
        self._timeout_s = timeout_s
        self._wanted = wanted
        self._identity = log.identity()
        self._world = World(self._identity.partitions) if judge else None
        self._log_times: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._shown_from: dict[int, int] = {}
        self._shown_until: dict[int, int] = {}
        self._since_ms: int | None = None
        self.has_shown = False
        """Whether there was a record to show."""
        self.has_unknown_name = False
        """Whether a note was written for a group or topic that no record names."""
        self._has_names = False
        """Whether a record to show names the group and the topic of the filter."""
        count = self._identity.partitions
        followed = range(count) if wanted.topic is None else [coordination_partition(wanted.topic, count)]
        for partition, bounds in log.bounds(followed).items():
            self._begin(partition, bounds.start)
        self._log.follow(dict(self._positions))

    def limit(self, since_ms: int | None, until_ms: int | None) -> None:
        """Show only records with a log time from `since_ms` to `until_ms` (exclusive, unix ms).

        The first record with a timestamp of at least T is also the first with a log time of at least T, because log
        time is the largest timestamp so far. If `since_ms` is in the future, no record has that time yet, and of new
        ones each is compared with it.
        """
        partitions = list(self._positions)
        if until_ms is not None:
            self._shown_until.update(self._log.offsets_at(partitions, until_ms))
        self._since_ms = since_ms
        if since_ms is None:
            return
        first = self._log.offsets_at(partitions, since_ms)
        for partition, bounds in self._log.bounds(partitions).items():
            self._show_from(partition, first.get(partition, bounds.end))
        self._skip_unjudged()

    def skip_to_last(self, records: int) -> None:
        """Show only the last `records` of each coordination partition, if no record is left out.

        Earlier ones are read only to judge. Records are counted by offset. An offset without a record, such as a
        transaction's marker, counts too.
        """
        if not self._wanted.is_everything:
            return
        for partition, bounds in self._log.bounds(self._positions).items():
            self._show_from(partition, self._end(partition, bounds.end) - records)
        self._skip_unjudged()

    def _show_from(self, partition: int, offset: int) -> None:
        self._shown_from[partition] = max(self._shown_from[partition], offset)

    def _end(self, partition: int, end: int) -> int:
        return min(end, self._shown_until.get(partition, end))

    def _skip_unjudged(self) -> None:
        """Read only what is shown, if nothing is judged."""
        if self._world is None:
            self._positions = dict(self._shown_from)
            self._log.follow(dict(self._positions))

    def read(self) -> Iterator[list[JudgedRecord]]:
        """Read to the present end and yield the records to show, in batches.

        Raises:
            CoordinationLogChangedError: The topic was re-created, repartitioned or truncated.
            UnavailableError: Kafka does not answer.
        """
        if self._log.identity() != self._identity:
            raise CoordinationLogChangedError(
                f"the coordination topic {self._identity.topic!r} was re-created or repartitioned meanwhile; run the "
                "command again"
            )
        bounds = self._log.bounds(self._positions)
        for partition, at in bounds.items():
            if at.end < self._positions[partition]:
                raise self._truncated(partition, at.end)
        ends = {partition: self._end(partition, at.end) for partition, at in bounds.items()}
        batch: dict[int, list[JudgedRecord]] = {}
        count = 0
        for chunk in self._chunks(
            {partition: end for partition, end in ends.items() if end > self._positions[partition]}
        ):
            judged = self._judge(chunk)
            batch.setdefault(chunk.partition, []).extend(judged)
            count += len(judged)
            if count >= _TOGETHER:
                yield _merged(batch)
                batch, count = {}, 0
        if count:
            yield _merged(batch)

    def report_unknown_names(self) -> None:
        """Write a note for a group or topic that no record read so far names, because it may be misspelt.

        The world state has only what accepted records name. If records after `--until` are left unread, they may name
        it.
        """
        group, topic = self._wanted.group, self._wanted.topic
        if (group is None and topic is None) or self._has_names or self._shown_until:
            return
        note = None if (world := self._named_world()) is None else _unknown_name(world, group, topic)
        if note is not None:
            self.has_unknown_name = True
            output.write_note(note)

    def _named_world(self) -> World | None:
        """Return the world state with all names of the log, which is read again if nothing was judged.

        None if something was shown without a verdict, so that the names exist.
        """
        if self._world is not None or self.has_shown:
            return self._world
        judging = Reader(self._log, judge=True, timeout_s=self._timeout_s)
        for _ in judging.read():
            pass
        self._log.follow(dict(self._positions))
        return judging._world

    def _begin(self, partition: int, start: int) -> None:
        self._positions[partition] = self._shown_from[partition] = start
        if self._world is None:
            return
        self._world.start(partition, start)
        if start > 0:
            output.write_note(
                f"coordination partition {partition} begins at offset {start}: it is only observed, so no record is "
                "refused"
            )

    def _chunks(self, ends: Mapping[int, int]) -> Iterator[Chunk]:
        unread = {partition: end for partition, end in ends.items() if end > self._positions[partition]}
        if not unread:
            return
        try:
            yield from self._log.read_until(unread, self._timeout_s)
        except PositionLostError as lost:
            self._restart(lost.partition)

    def _restart(self, partition: int) -> None:
        """Continue at the first record that is left, after retention deleted records before they were read."""
        bounds = self._log.bounds([partition])[partition]
        if bounds.start <= self._positions[partition]:
            raise self._truncated(partition, bounds.end)
        output.write_note(
            f"coordination partition {partition}: retention deleted the records before offset {bounds.start} before "
            "they were read"
        )
        self._begin(partition, bounds.start)
        self._log.follow(dict(self._positions))

    def _judge(self, chunk: Chunk) -> list[JudgedRecord]:
        """Apply a chunk to the world state, and return the records to show."""
        first, end = self._shown_from[chunk.partition], self._end(chunk.partition, chunk.position)
        world = None if self._world is None else self._world.partitions[chunk.partition]
        shown: list[JudgedRecord] = []
        unseen: list[tuple[int, int, bytes | None]] = []
        for offset, timestamp_ms, value in chunk.records:
            is_unseen = offset < first or offset >= end or not self._wanted.may_show(value)
            if world is not None and is_unseen and offset not in chunk.reasons:
                unseen.append((offset, timestamp_ms, value))
                continue
            record = StoredRecord(chunk.partition, offset, timestamp_ms, value, chunk.reasons.get(offset))
            judged = self._unjudged(record) if world is None else _judge_after(world, unseen, record)
            unseen.clear()
            is_early = self._since_ms is not None and judged.log_time_ms < self._since_ms
            if not (is_unseen or is_early) and self._wanted.shows(judged):
                shown.append(judged)
                self.has_shown = True
                self._has_names = self._has_names or self._wanted.topic is None or not _is_about_group(judged)
        if world is not None:
            world.apply_many(unseen)
        self._positions[chunk.partition] = chunk.position
        return shown

    def _unjudged(self, record: StoredRecord) -> JudgedRecord:
        log_time_ms = max(record.timestamp_ms, self._log_times.get(record.partition, record.timestamp_ms))
        self._log_times[record.partition] = log_time_ms
        return JudgedRecord(record, log_time_ms, None)

    def _truncated(self, partition: int, end: int) -> CoordinationLogChangedError:
        return CoordinationLogChangedError(
            f"coordination partition {partition} of {self._identity.topic!r} ends at {end}, but was read up to "
            f"{self._positions[partition]}: the log was truncated; see `marshal-dagster doctor`"
        )


def _unknown_name(world: World, group: str | None, topic: str | None) -> str | None:
    """Return the note for a group or topic that the world state lacks; None if it has both."""
    if topic is None:
        return None if group is None or group in group_names(world) else unknown_group(world, group)
    if topic in topic_names(world, group):
        return None
    # Only the topic's own coordination partition may have been read, so other topics may be missing here.
    whose = "" if group is None else f" of group {group!r}"
    return f"no record{whose} is about topic {topic!r}; `marshal-dagster lag` lists the topics"


def _judge_after(
    world: PartitionWorld, unseen: Sequence[tuple[int, int, bytes | None]], record: StoredRecord
) -> JudgedRecord:
    """Apply the records before `record`, which are not shown, and then `record` itself."""
    world.apply_many(unseen)
    return judge(world, record)


def record_line(judged: JudgedRecord) -> output.Line:
    """Return one record as a line: log time, place in the log, content, verdict."""
    record, verdict = judged.record, judged.verdict
    place = f"{output.utc(judged.log_time_ms)} {record.partition}:{record.offset} "
    parts = [(place, "dim"), (_record_text(record.value), "")]
    if verdict is not None:
        why = verdict.reason or "; ".join(verdict.notes)
        parts.append((f"  {verdict.kind}" + (f": {why}" if why else ""), _STYLES[verdict.kind]))
    return output.Line(tuple(parts))


def explained_line(judged: JudgedRecord, more: str = "") -> output.Line:
    """Return one record as a sentence after its log time; a refused or invalid one in the colour of its verdict."""
    kind = VerdictKind.ACCEPTED if judged.verdict is None else judged.verdict.kind
    style = "" if kind is VerdictKind.ACCEPTED else _STYLES[kind]
    return output.Line(
        ((f"{output.utc(judged.log_time_ms)} ", "dim"), (sentence(judged).removesuffix(".") + f"{more}.", style))
    )


def explained_lines(records: Iterable[JudgedRecord]) -> Iterator[output.Line]:
    """Yield the sentence of each record. One that is in several coordination partitions is shown once."""
    texts = [(judged, sentence(judged)) for judged in records]
    copies = Counter((judged.record.value, text) for judged, text in texts if _is_about_group(judged))
    for judged, text in texts:
        count = copies.pop((judged.record.value, text), 0) if _is_about_group(judged) else 1
        if count:
            yield explained_line(judged, f" (in {count} coordination partitions)" if count > 1 else "")


def _is_about_group(judged: JudgedRecord) -> bool:
    return isinstance(parse(judged.record.value), GroupMessage)


def _record_text(value: bytes | None) -> str:
    message = parse(value)
    if isinstance(message, InvalidMessage):
        return "null" if value is None else value[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    place = "" if isinstance(message, GroupMessage) else f" {message.topic}/{message.partition}"
    details = details_text(message)
    return f"{type_name(message)} {message.group}{place}{details} by {message.instance} ({message.client})"


def details_text(message: Message) -> str:
    """Return the fields of a message that not all messages have."""
    match message:
        case Heartbeat(offset=offset) | ReleasingPartition(offset=offset):
            return f" at {offset}"
        case ClaimingMessages(plan_end=end):
            return f" up to {end}"
        case ClaimingRange(start=start, end=end):
            return f" from {start} up to {end}"
        case PlanningRange(epoch=epoch, end=end):
            return f" of epoch {epoch} up to {end}"
        case RevokingClaim(epoch=epoch) | RangeMessage(epoch=epoch):
            return f" of epoch {epoch}"
        case DataTopic(topic_id=topic_id):
            return f" is {topic_id}"
        case ReleaseGroup(expiry_s=expiry_s):
            return f" until {output.utc(expiry_s * 1_000)}"
        case GroupSettingsRecord(settings=settings):
            return f": {settings_text(settings)},"
    return ""
