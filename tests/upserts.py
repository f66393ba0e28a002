"""Histories of upserts against a model: whatever batches and deaths there are, the table holds the newest rows."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pyspark.sql import Row
from pyspark.sql import types as t

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks import WriteResult
from marshal_dagster.sinks.conformance.target import ahead, part
from tests.sink_typed_frames import TypedFrame

FIELDS = {
    "partition": t.IntegerType(),
    "offset": t.LongType(),
    "key": t.IntegerType(),
    "value": t.StringType(),
    "version": t.LongType(),
}
KeyedRow = tuple[int | None, int | None, int | None, str, int | None]
"""Partition, offset, key, value, version."""
STEPS = ("evaluated", "copied", "locked", "moved", "set", "committing", "committed")


@dataclass(frozen=True)
class KeyedFrame(TypedFrame):
    """A frame of rows with a key, without Spark."""

    def collect(self) -> list[Row]:
        """Return all rows."""
        return [Row(**row) for row in self.rows]


def keyed_frame(rows: Iterable[KeyedRow]) -> Any:  # noqa: ANN401 - has the parts of a DataFrame that sinks use
    """Return a frame of these rows."""
    schema = t.StructType([t.StructField(name, kind) for name, kind in FIELDS.items()])
    return KeyedFrame(schema, [dict(zip(FIELDS, row, strict=True)) for row in rows])


class UpsertTarget(ABC):
    """A table whose column `key` is its key."""

    steps: ClassVar[Sequence[str]] = STEPS

    @abstractmethod
    def sink(self, reached: Callable[[str], None] | None = None, **options: Any) -> Any:  # noqa: ANN401 - any database's
        """Return a sink with these options, as another process would create it."""

    @abstractmethod
    def rows(self) -> list[KeyedRow]:
        """Return all rows of the table, sorted by key."""

    def upserting(self, reached: Callable[[str], None] | None = None, **options: Any) -> Any:  # noqa: ANN401 - as above
        """Return a sink that upserts by the column `key`."""
        return self.sink(reached, mode="upsert", keys=["key"], **options)

    def create(self) -> None:
        """Create the tables."""
        self.upserting().create_tables(keyed_frame(()).schema)

    def write(
        self,
        rows: Iterable[KeyedRow],
        *ranges: ClaimedRange,
        reached: Callable[[str], None] | None = None,
        **options: Any,  # noqa: ANN401 - as above
    ) -> WriteResult:
        """Deliver the rows of these ranges, as a batch does."""
        sink, given = self.upserting(reached, **options), list(rows)
        sink.verdicts(ranges)
        read = {range_.partition: [(range_.first_readable, range_.end)] for range_ in ranges}
        written: WriteResult = sink.write(self.frame(given), ranges, lambda: read)
        return written

    def frame(self, rows: Iterable[KeyedRow]) -> Any:  # noqa: ANN401 - a DataFrame or a part of it
        """Return a frame of these rows."""
        return keyed_frame(rows)


class DeadError(Exception):
    """A writer died."""


def newest(rows: Iterable[KeyedRow], order: Callable[[KeyedRow], Any]) -> list[KeyedRow]:
    """Return the newest row of each key, sorted by key."""
    found: dict[Any, KeyedRow] = {}
    for row in rows:
        if row[2] not in found or order(found[row[2]]) < order(row):
            found[row[2]] = row
    return [found[key] for key in sorted(found)]


def check_history(target: UpsertTarget, seed: int, *, has_versions: bool, in_any_order: bool, length: int = 12) -> None:
    """Write messages in random batches, some of which die or come twice, and compare the table after each one."""
    rng = random.Random(seed)
    options: dict[str, Any] = {"order_by": "version"} if has_versions else {}

    def order(row: KeyedRow) -> Any:  # noqa: ANN401 - a tuple of numbers
        return (row[4], row[0], row[1]) if has_versions else row[1]

    partitions = range(3)
    rows = {
        (partition, offset): [
            (partition, offset, key, f"{partition}.{offset}.{key}", rng.randrange(6))
            for key in rng.sample(range(6), rng.randrange(3))
            if has_versions or key % len(partitions) == partition
        ]
        for partition in partitions
        for offset in range(length)
    }
    left = {partition: list(_cut(rng, partition, length, in_any_order=in_any_order)) for partition in partitions}
    taken: list[ClaimedRange] = []
    while any(left.values()):
        chosen = [partition for partition in partitions if left[partition] and rng.random() < 0.7]
        batch = [left[partition][rng.randrange(len(left[partition])) if in_any_order else 0] for partition in chosen]
        last = taken if in_any_order else {range_.partition: range_ for range_ in taken}.values()
        again = [range_ for range_ in last if range_.partition not in chosen and rng.random() < 0.2]
        batch += {range_.partition: range_ for range_ in again}.values()
        if not batch:
            continue
        given = [
            row for range_ in batch for at in range(range_.start, range_.end) for row in rows[range_.partition, at]
        ]
        rng.shuffle(given)
        fatal = rng.choice([*target.steps, *[None] * len(target.steps)])
        try:
            target.write(given, *batch, reached=_dying(fatal), **options)
        except DeadError:
            if fatal != "committed":
                continue
            target.write(given, *batch, **options)
        taken += [range_ for range_ in batch if range_ not in taken]
        for range_ in batch:
            if range_ in left[range_.partition]:
                left[range_.partition].remove(range_)
        delivered = [
            row for range_ in taken for at in range(range_.start, range_.end) for row in rows[range_.partition, at]
        ]
        assert target.rows() == newest(delivered, order), (seed, batch)
    assert target.rows() == newest([row for found in rows.values() for row in found], order)


def _cut(rng: random.Random, partition: int, length: int, *, in_any_order: bool) -> Iterator[ClaimedRange]:
    start = 0
    while start < length:
        end = min(length, start + rng.randint(1, 5))
        yield (ahead if in_any_order else part)(partition, start, end)
        start = end


def _dying(fatal: str | None) -> Callable[[str], None]:
    def reached(step: str) -> None:
        if step == fatal:
            raise DeadError

    return reached
