"""`tail`: the log's records, parsed and judged, as they are there and as they come."""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from marshal_dagster.cli import output
from marshal_dagster.cli.connections import READING, connection_of, hint_how_to_create, open_log, require_rights
from marshal_dagster.cli.options import ConnectionOptions
from marshal_dagster.cli.world_view import settings_text
from marshal_dagster.coordination.log import Chunk, CoordinationLog, PositionLostError
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
    parse,
    type_name,
)
from marshal_dagster.protocol.replay import StoredRecord, render_record
from marshal_dagster.protocol.world import Verdict, VerdictKind, World

DEFAULT_LINES: Final = 10
_MOST_LINES: Final = 1_000_000
_TOGETHER: Final = 10_000
_LOOK_AGAIN_S: Final = 0.25
_STYLES: Final[Mapping[VerdictKind, str]] = {
    VerdictKind.ACCEPTED: "green",
    VerdictKind.REFUSED: "yellow",
    VerdictKind.INVALID: "red",
}


@dataclass(frozen=True, slots=True)
class TailRequest:
    """What is shown: the last `lines` records, or with None all of them; then, with `follow`, those that come."""

    connection: ConnectionOptions
    coordination_topic: str
    lines: int | None = DEFAULT_LINES
    follow: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class JudgedRecord:
    """One record, the log time at it, and what it came to; no verdict where nobody asked for one."""

    record: StoredRecord
    log_time_ms: int
    verdict: Verdict | None


def run(request: TailRequest) -> None:
    """Show the records that are asked for. Raises `MarshalError`."""
    if request.lines is not None and not 0 <= request.lines <= _MOST_LINES:
        raise ConfigurationError(f"-n: {request.lines}; give a number of records from 0 to {_MOST_LINES}")
    connection = connection_of(request.connection)
    with (
        hint_how_to_create(request.coordination_topic),
        closing(open_log(connection, request.coordination_topic)) as log,
    ):
        require_rights(connection, request.coordination_topic, READING)
        # The lines alone are what `replay` judges by itself.
        reader = Reader(log, judge=not request.as_json, timeout_s=connection.timeout_s)
        for batch in shown(reader, lines=request.lines, follow=request.follow):
            _write(batch, as_json=request.as_json)


def shown(reader: "Reader", *, lines: int | None, follow: bool) -> Iterator[list[JudgedRecord]]:
    """Give the last `lines` records (None: all), then with `follow` those that come, in batches; each by log time.

    Records of one coordination partition are in their order; those of several are merged by log time as far as they
    were read together.
    """
    if lines is None:
        yield from reader.read()
    else:
        reader.skip_to_last(lines)
        yield _last(lines, reader.read())
    while follow:
        output.wait(_LOOK_AGAIN_S)
        yield from reader.read()


def _last(lines: int, batches: Iterable[list[JudgedRecord]]) -> list[JudgedRecord]:
    """Give the last `lines` by log time; each batch has records that come after those of the same partition before."""
    by_partition: dict[int, list[JudgedRecord]] = {}
    for batch in batches:
        for seen in batch:
            by_partition.setdefault(seen.record.partition, []).append(seen)
    merged = _merged(by_partition)
    return merged[max(0, len(merged) - lines) :]


def _merged(by_partition: Mapping[int, list[JudgedRecord]]) -> list[JudgedRecord]:
    ordered = [by_partition[number] for number in sorted(by_partition)]
    return list(heapq.merge(*ordered, key=lambda seen: seen.log_time_ms))


class Reader:
    """Reads the whole log, record by record from a place on, and judges each; with `judge` off it only reads."""

    def __init__(self, log: CoordinationLog, *, judge: bool, timeout_s: float) -> None:
        """Stand at the log's beginning; nothing is read yet. Raises `TopicNotFoundError`, `UnavailableError`."""
        self._log = log
        self._timeout_s = timeout_s
        self._identity = log.identity()
        self._world = World(self._identity.partitions) if judge else None
        self._log_times: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._shown_from: dict[int, int] = {}
        for number, bounds in log.bounds(range(self._identity.partitions)).items():
            self._begin(number, bounds.start)
        self._log.follow(dict(self._positions))

    def skip_to_last(self, records: int) -> None:
        """Show of each coordination partition only its last `records`; those before are read to judge by, if at all.

        They are told by their offsets: where some hold no record (a transaction's marker), fewer are shown.
        """
        for number, bounds in self._log.bounds(self._positions).items():
            self._shown_from[number] = max(self._positions[number], bounds.end - records)
        if self._world is None:
            self._positions = dict(self._shown_from)
            self._log.follow(dict(self._positions))

    def read(self) -> Iterator[list[JudgedRecord]]:
        """Read to the present end and give the records to show, in batches.

        Raises `CoordinationLogChangedError` when it is not the log that was read before, `UnavailableError` when it
        does not answer.
        """
        if self._log.identity() != self._identity:
            raise CoordinationLogChangedError(
                f"the coordination topic {self._identity.topic!r} was made anew or repartitioned meanwhile"
            )
        ends = {number: bounds.end for number, bounds in self._log.bounds(self._positions).items()}
        self._check(ends)
        together: dict[int, list[JudgedRecord]] = {}
        count = 0
        for chunk in self._chunks({number: end for number, end in ends.items() if end > self._positions[number]}):
            seen = self._take(chunk)
            together.setdefault(chunk.partition, []).extend(seen)
            count += len(seen)
            if count >= _TOGETHER:
                yield _merged(together)
                together, count = {}, 0
        if count:
            yield _merged(together)

    def _begin(self, number: int, start: int) -> None:
        self._positions[number] = self._shown_from[number] = start
        if self._world is None:
            return
        self._world.start(number, start)
        if start > 0:
            output.write_note(
                f"coordination partition {number} begins at offset {start}: it is only observed, nothing is refused"
            )

    def _chunks(self, ends: Mapping[int, int]) -> Iterator[Chunk]:
        if not ends:
            return
        try:
            yield from self._log.read_until(ends, self._timeout_s)
        except PositionLostError as lost:
            self._restart_partition(lost.partition)

    def _restart_partition(self, number: int) -> None:
        """Retention overtook this reader: it goes on at what is left."""
        bounds = self._log.bounds([number])[number]
        if bounds.start <= self._positions[number]:
            self._fail_truncated(number, bounds.end)
        output.write_note(
            f"coordination partition {number}: retention deleted records up to {bounds.start} before they were read"
        )
        self._begin(number, bounds.start)
        self._log.follow(dict(self._positions))

    def _take(self, chunk: Chunk) -> list[JudgedRecord]:
        first = self._shown_from[chunk.partition]
        if self._world is not None:
            self._world.partitions[chunk.partition].apply_many(each for each in chunk.records if each[0] < first)
        seen = [self._judge(chunk.partition, record) for record in chunk.records if record[0] >= first]
        self._positions[chunk.partition] = chunk.position
        return seen

    def _judge(self, number: int, record: tuple[int, int, bytes | None]) -> JudgedRecord:
        offset, timestamp_ms, value = record
        stored = StoredRecord(number, offset, timestamp_ms, value)
        before_ms = self._log_times.get(number, timestamp_ms)
        verdict = None
        if self._world is not None:
            before_ms = self._world.partitions[number].log_time_ms or before_ms
            verdict = self._world.partitions[number].apply(offset, timestamp_ms, value)
        self._log_times[number] = log_time_ms = max(timestamp_ms, before_ms)
        return JudgedRecord(stored, log_time_ms, verdict)

    def _check(self, ends: Mapping[int, int]) -> None:
        for number, end in ends.items():
            if end < self._positions[number]:
                self._fail_truncated(number, end)

    def _fail_truncated(self, number: int, end: int) -> None:
        raise CoordinationLogChangedError(
            f"coordination partition {number} of {self._identity.topic!r} ends at {end}, but was read up to "
            f"{self._positions[number]}: the log was truncated"
        )


def _write(batch: Iterable[JudgedRecord], *, as_json: bool) -> None:
    if as_json:
        for seen in batch:
            output.write_line(render_record(seen.record))
    else:
        output.show(*map(line, batch))
    output.flush()


def line(seen: JudgedRecord) -> output.Line:
    """Write one record as a line for a person: log time, place in the log, what it says, what it came to."""
    record, verdict = seen.record, seen.verdict
    parts = [(f"{output.utc(seen.log_time_ms)} {record.partition}:{record.offset} ", "dim"), (_said(record.value), "")]
    if verdict is not None:
        why = verdict.reason or "; ".join(verdict.notes)
        parts.append((f"  {verdict.kind}" + (f": {why}" if why else ""), _STYLES[verdict.kind]))
    return output.Line(tuple(parts))


def _said(value: bytes | None) -> str:
    message = parse(value)
    if isinstance(message, InvalidMessage):
        return "null" if value is None else value[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    place = "" if isinstance(message, GroupMessage) else f" {message.topic}/{message.partition}"
    tail = _tail(message)
    return f"{type_name(message)} {message.group}{place}{tail} by {message.instance} ({message.client})"


_SHOWN_BYTES: Final = 512


def _tail(message: Message) -> str:
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
