"""Compares the output of a race with its input, record by record."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marshal_dagster.protocol.batch_planning import ClaimedRange

Place = tuple[int, int, int]
"""Source partition, offset, and the number of the row among those of the offset."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number of records, and what is wrong with the output."""

    records: int
    lost: int
    twice: int
    violations: tuple[str, ...]


def value_of(place: Place) -> bytes | None:
    """Return the value of the record of a row; some have none."""
    return None if sum(place) % 7 == 0 else f"row {place}".encode()


def headers_of(place: Place, run: str) -> list[tuple[str, bytes | None]]:
    """Return the headers of the record of a row: the run that has written it, and others."""
    partition, offset, row = place
    others: list[tuple[str, bytes | None]] = [("offset", str(offset).encode()), ("offset", None)]
    return [("run", run.encode()), *others[: (partition + offset + row) % 3]]


def judge(
    messages: Iterable[Any],
    expected: Mapping[int, Sequence[tuple[int, int]]],
    reported: Collection[tuple[ClaimedRange, str]],
) -> Verdict:
    """Judge an output.

    Args:
        messages: The committed messages, in the order of each output partition.
        expected: The offsets and row numbers of each source partition, in order.
        reported: The ranges that runs have reported as written, with the runs.
    """
    found: dict[int, list[Place]] = defaultdict(list)
    runs: dict[Place, str] = {}
    violations: list[str] = []
    for message in messages:
        partition, offset, row = map(int, message.key().decode().split("/"))
        place = partition, offset, row
        found[partition].append(place)
        headers = message.headers() or [("", b"")]
        runs[place] = headers[0][1].decode()
        if headers != headers_of(place, runs[place]) or message.value() != value_of(place):
            violations.append(f"{place} has value {message.value()} and headers {headers}")
        if message.partition() != partition % 2:
            violations.append(f"{place} is in output partition {message.partition()}")
    lost = twice = 0
    for partition, rows in expected.items():
        wanted, there = [(partition, *row) for row in rows], found.pop(partition, [])
        lost += len(set(wanted) - set(there))
        twice += len(there) - len(set(there))
        if there != wanted:
            violations.append(f"partition {partition}: {len(there)} records instead of {len(wanted)}, or out of order")
    violations += [f"records of partition {partition}, which no run has read" for partition in found]
    violations += _mixed(runs, reported)
    return Verdict(sum(map(len, expected.values())), lost, twice, tuple(violations))


def _mixed(runs: Mapping[Place, str], reported: Collection[tuple[ClaimedRange, str]]) -> Iterator[str]:
    """Yield ranges that another run has written than the one that has reported it."""
    for range_, run in reported:
        writers = {
            writer
            for (partition, offset, _), writer in runs.items()
            if partition == range_.partition and range_.start <= offset < range_.end
        }
        if writers - {run}:
            yield f"run {run} has reported {range_} as written, but {writers} wrote it"
    runs_of: dict[tuple[int, int], set[str]] = defaultdict(set)
    for range_, run in reported:
        runs_of[range_.partition, range_.start].add(run)
    yield from (f"{place} was reported by {names}" for place, names in runs_of.items() if len(names) > 1)
