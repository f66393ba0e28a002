"""`replay`: a stored coordination log in, the world state or each record's verdict out."""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Final

from marshal_dagster.cli import output, tables
from marshal_dagster.cli.world_view import world_view
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import INT64_MAX, RuleSet
from marshal_dagster.protocol.replay import MalformedLogError, StoredRecord, parse_lines, summary
from marshal_dagster.protocol.world import World

STDIN: Final = "-"
LONGEST_LINE_BYTES: Final = 1 << 24
"""Longer than any record that Kafka takes, however JSON writes its bytes."""
_TOGETHER: Final = 10_000
_PARTITION_FIRST: Final = re.compile(rb'\{"partition": ?([0-9]{1,10}),')


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """What is replayed and how; the interval is in seconds, None stands for the largest partition in the log + 1."""

    file: str
    heartbeat_interval_s: float = 60.0
    rules: str = RuleSet.GO.value
    coordination_partitions: int | None = None
    as_json: bool = False
    at_each: bool = False


def run(request: ReplayRequest) -> None:
    """Replay a stored log and write what came of it.

    Raises `ConfigurationError` for an option or a file that cannot be, `MalformedLogError` for a line.
    """
    interval_ms, rules = _interval_ms(request.heartbeat_interval_s), _rules(request.rules)
    if request.coordination_partitions is not None and request.coordination_partitions < 1:
        raise ConfigurationError(
            f"--coordination-partitions: {request.coordination_partitions}; a coordination topic has at least 1"
        )
    with _opened(request.file) as given:
        count = request.coordination_partitions
        source = given if count is not None else _rewindable(given)
        count = _partition_count(source) if count is None else count
        world = World(count, interval_ms, rules)
        records = _records(_Lines(source), count)
        if request.at_each:
            _judge_each(world, records, is_live=not _is_file(source))
        else:
            _apply(world, records)
    if request.as_json:
        output.write_json(summary(world))
    elif not request.at_each:
        output.show(*tables.overview(world_view(world)))


def _interval_ms(seconds: float) -> int:
    milliseconds = round(seconds * 1_000) if 0 < seconds <= INT64_MAX / 1_000 else 0
    if milliseconds < 1:
        raise ConfigurationError(f"--heartbeat-interval: {seconds:g}; give seconds, 0.001 at the least")
    return milliseconds


def _rules(name: str) -> RuleSet:
    try:
        return RuleSet(name)
    except ValueError:
        raise ConfigurationError(f"--rules: {name!r} is no rule set; give native or go") from None


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == STDIN:
        yield sys.stdin.buffer
        return
    try:
        source = open(file, "rb")  # noqa: SIM115, PTH123 - closed below
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"FILE: {file} cannot be read: {reason}") from None
    with source:
        yield source


def _is_file(source: IO[bytes]) -> bool:
    """Tell whether `source` can be read twice and nobody is still writing to it."""
    return source.seekable()


def _rewindable(source: IO[bytes]) -> IO[bytes]:
    """Give `source`, or a copy of it on disk where it can be read but once."""
    if _is_file(source):
        return source
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - gone with the last reference to it
    shutil.copyfileobj(source, copy)
    copy.seek(0)
    return copy


def _partition_count(source: IO[bytes]) -> int:
    """Find the largest coordination partition and go back; a line that is malformed is left to who reads it next."""
    start = source.tell()
    largest = 0
    for line in _raw_lines(source):
        largest = max(largest, _partition_in(line))
    source.seek(start)
    return largest + 1


def _partition_in(line: bytes) -> int:
    """Find a line's coordination partition; 0 in a line that has none."""
    plain = _PARTITION_FIRST.match(line)
    if plain and line.count(b'"partition"') == 1 and b"\\" not in line:
        return int(plain[1])
    try:
        number = json.loads(line)["partition"]
    except (ValueError, RecursionError, TypeError, LookupError):
        return 0
    return number if type(number) is int else 0


def _raw_lines(source: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(source.readline, LONGEST_LINE_BYTES), b"")


class _Lines:
    """The lines of a file, which knows the number of the one that it gave last; from 1."""

    def __init__(self, source: IO[bytes]) -> None:
        self.number = 0
        self._lines = _raw_lines(source)

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            if len(line) == LONGEST_LINE_BYTES:
                raise MalformedLogError(
                    f"line {self.number}: {LONGEST_LINE_BYTES} bytes or more; is this a stored log?"
                )
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                raise MalformedLogError(
                    f"line {self.number}: not UTF-8 ({error.reason} at byte {error.start + 1})"
                ) from None


def _records(lines: _Lines, coordination_partitions: int) -> Iterator[StoredRecord]:
    for record in parse_lines(lines):
        if record.partition >= coordination_partitions:
            raise MalformedLogError(
                f"line {lines.number}: coordination partition {record.partition}, but --coordination-partitions says "
                f"that there are {coordination_partitions}, from 0 on"
            )
        yield record


def _apply(world: World, records: Iterable[StoredRecord]) -> None:
    """Let all records act, those of one coordination partition together: the partitions know nothing of each other."""
    waiting: dict[int, list[tuple[int, int, bytes | None]]] = {}
    count = 0
    for record in records:
        waiting.setdefault(record.partition, []).append((record.offset, record.timestamp_ms, record.value))
        count += 1
        if count == _TOGETHER:
            _apply_waiting(world, waiting)
            waiting, count = {}, 0
    _apply_waiting(world, waiting)


def _apply_waiting(world: World, waiting: dict[int, list[tuple[int, int, bytes | None]]]) -> None:
    for partition, records in waiting.items():
        world.apply_many(partition, records)


def _judge_each(world: World, records: Iterable[StoredRecord], *, is_live: bool) -> None:
    """Write the verdict of each record; of a log that is still being written, at once."""
    hand_on: Callable[[], None] = output.flush if is_live else _later
    for record in records:
        verdict = world.apply(record.partition, record.offset, record.timestamp_ms, record.value)
        output.write_line(
            f'{{"partition": {record.partition}, "offset": {record.offset}, "verdict": "{verdict.kind.value}"}}'
        )
        hand_on()


def _later() -> None:
    """Leave it to the buffer."""
