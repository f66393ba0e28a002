"""Read a stored log for `replay` and `timeline`: a file, or standard input, of the lines that `tail --json` writes."""

import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Annotated, Final

import typer

from marshal_dagster._internal.enums import enum_member
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.messages import INT64_MAX, InvalidMessage, RuleSet, coordination_partition, parse
from marshal_dagster.protocol.replay import MalformedLogError, StoredRecord, encode_value, parse_lines
from marshal_dagster.protocol.world import World

STDIN: Final = "-"
LONGEST_LINE_BYTES: Final = 1 << 24
"""Longer than the JSON form of any record that Kafka accepts."""
_SEARCHED: Final = 2_000
"""How many records are searched for data topics."""
_MOST_TOPICS: Final = 64
_MOST_PARTITIONS: Final = 1_024
"""The largest number of coordination partitions that is guessed."""
_PARTITION_FIRST: Final = re.compile(rb'\{"partition": ?([0-9]{1,10}),')


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLogOptions:
    """What a stored log does not have of the topic that it is from."""

    heartbeat_interval: Annotated[
        float,
        typer.Option(
            "--heartbeat-interval",
            metavar="SECONDS",
            help="The heartbeat interval of a group before its first settings record.",
        ),
    ] = 60.0
    rules: Annotated[
        str,
        typer.Option(
            "--rules",
            metavar="native|go",
            help="The rule set of a group before its first settings record; readers use go.",
        ),
    ] = RuleSet.GO.value
    coordination_partitions: Annotated[
        int | None,
        typer.Option(
            "--coordination-partitions",
            metavar="N",
            help="Number of coordination partitions (default: the least that fits the topics in the log).",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class StoredLog:
    """The records of an open stored log, and the empty world state that they are applied to."""

    records: Iterator[StoredRecord]
    world: World
    is_live: bool
    """Whether the log may still be written while it is read, as through a pipe."""


@contextmanager
def stored_log(file: str, options: StoredLogOptions) -> Iterator[StoredLog]:
    """Open a stored log.

    Args:
        file: Its path, or `-` for standard input.
        options: The options of the command.

    Raises:
        ConfigurationError: An option is wrong, or the file cannot be read.
        MalformedLogError: A line of the log is malformed. It is raised while the records are read.
    """
    interval_ms, rule_set = _interval_ms(options.heartbeat_interval), enum_member(RuleSet, "--rules", options.rules)
    partitions = options.coordination_partitions
    if partitions is not None and partitions < 1:
        raise ConfigurationError(f"--coordination-partitions is {partitions}; it must be at least 1")
    with _opened(file) as given:
        source = given if partitions is not None else _rewindable(given)
        count = _partition_count(source) if partitions is None else partitions
        world = World(count, interval_ms, rule_set)
        yield StoredLog(_records(_Lines(source), count), world, not source.seekable())


def _interval_ms(seconds: float) -> int:
    milliseconds = round(seconds * 1_000) if 0 < seconds <= INT64_MAX / 1_000 else 0
    if milliseconds < 1:
        raise ConfigurationError(f"--heartbeat-interval is {seconds:g}; it must be at least 0.001 seconds")
    return milliseconds


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == STDIN:
        yield sys.stdin.buffer
        return
    try:
        source = open(file, "rb")  # noqa: SIM115, PTH123 - closed below
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"file {file} cannot be read: {reason}") from None
    with source:
        yield source


def _rewindable(source: IO[bytes]) -> IO[bytes]:
    """Return `source`, or a copy of it on disk if it can be read only once."""
    if source.seekable():
        return source
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - deleted with the last reference to it
    shutil.copyfileobj(source, copy)
    copy.seek(0)
    return copy


def _partition_count(source: IO[bytes]) -> int:
    """Return the likely number of coordination partitions, and rewind. Malformed lines are reported later."""
    start = source.tell()
    largest = 0
    placed: Counter[tuple[str, int]] = Counter()
    for number, line in enumerate(_raw_lines(source)):
        partition = _partition_in(line)
        largest = max(largest, partition)
        if number < _SEARCHED and len(placed) < _MOST_TOPICS and (topic := _topic_in(line)):
            placed[topic, partition] += 1
    source.seek(start)
    return likely_partitions(placed, largest + 1)


def likely_partitions(placed: Mapping[tuple[str, int], int], least: int) -> int:
    """Return the number of coordination partitions of the topic that a stored log is from.

    A log may have no record in the last partitions. The number is the smallest one, from `least` on, with which most
    records are in the partition of their data topic.

    Args:
        placed: How many records about a data topic each coordination partition has.
        least: The smallest possible number: the largest partition in the log + 1.
    """
    best, most = least, -1
    for count in range(least, max(least, _MOST_PARTITIONS) + 1):
        fitting = sum(
            records
            for (topic, partition), records in placed.items()
            if coordination_partition(topic, count) == partition
        )
        if fitting > most:
            best, most = count, fitting
        if most == sum(placed.values()):
            break
    return best


def _partition_in(line: bytes) -> int:
    """Return a line's coordination partition, or 0 if it has none."""
    plain = _PARTITION_FIRST.match(line)
    if plain and line.count(b'"partition"') == 1 and b"\\" not in line:
        return int(plain[1])
    try:
        number = json.loads(line)["partition"]
    except (ValueError, RecursionError, TypeError, LookupError):
        return 0
    return number if type(number) is int else 0


def _topic_in(line: bytes) -> str:
    """Return the data topic of a line's record; empty if it has none."""
    try:
        value = json.loads(line)["value"]
        message = parse(encode_value(value))
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        return ""
    return "" if isinstance(message, InvalidMessage) else message.topic


def _raw_lines(source: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(source.readline, LONGEST_LINE_BYTES), b"")


class _Lines:
    """The lines of a file. `number` is the number of the last line that was read, from 1."""

    def __init__(self, source: IO[bytes]) -> None:
        self.number = 0
        self._lines = _raw_lines(source)

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            if len(line) == LONGEST_LINE_BYTES:
                raise MalformedLogError(
                    f"line {self.number} has {LONGEST_LINE_BYTES} bytes or more; check that the file is a stored log"
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
                f"line {lines.number} has coordination partition {record.partition}, but --coordination-partitions is "
                f"{coordination_partitions}; raise it to {record.partition + 1} or leave it out"
            )
        yield record
