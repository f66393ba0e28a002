"""Commits of the Iceberg sink that are refused, lost or overtaken, and changes of the table while a batch runs."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.update import AddSchemaUpdate, SetCurrentSchemaUpdate
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
)

from marshal_dagster.errors import SinkRejectedError, UnavailableError
from marshal_dagster.sinks.conformance.target import deliver, never, part, rows_of
from marshal_dagster.sinks.iceberg.positions import PROPERTY, TablePositions
from marshal_dagster.sinks.iceberg.schema_changes import first_misfit
from marshal_dagster.sinks.iceberg.tasks import WritePlan
from tests.iceberg_tables import IcebergTarget, create_table, open_catalog

PARTITION = NestedField(1, "partition", IntegerType())
OFFSET = NestedField(2, "offset", LongType())
SCHEMA = Schema(PARTITION, OFFSET, NestedField(3, "value", StringType()))


@pytest.fixture
def target(tmp_path: Path) -> IcebergTarget:
    """Return an empty table."""
    create_table(tmp_path, SCHEMA)
    return IcebergTarget(tmp_path)


@contextmanager
def commits(*then: Callable[[Callable[[], None]], None]) -> Iterator[list[int]]:
    """Let the functions decide what happens to each commit, in turn; the last one decides on all others."""
    original, made = Table._do_commit, list[int]()

    def commit(self: Table, updates: Any, requirements: Any) -> None:  # noqa: ANN401 - as pyiceberg's
        made.append(len(made))
        then[min(made[-1], len(then) - 1)](lambda: original(self, updates, requirements))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "_do_commit", commit)
        yield made


def expire_all_but_last(target: IcebergTarget) -> None:
    """Remove the table's older snapshots."""
    table = target.table()
    table.maintenance.expire_snapshots().by_ids([entry.snapshot_id for entry in table.snapshots()[:-1]]).commit()


def missing_files(target: IcebergTarget) -> list[str]:
    """Return the data files of the table that do not exist."""
    paths = [str(row["file_path"]).removeprefix("file://") for row in target.table().inspect.files().to_pylist()]
    return [path for path in paths if not Path(path).exists()]


def test_files_of_a_commit_that_seemed_to_fail_stay(target: IcebergTarget) -> None:
    """A commit that was sent twice is refused; if its snapshot has expired, the table still has its files."""
    mine = part(0, 0, 3)

    def applied_then_refused(commit: Callable[[], None]) -> None:
        commit()
        deliver(target, "other", part(10, 0, 3))
        expire_all_but_last(target)
        raise CommitFailedException("branch main has changed")

    with commits(applied_then_refused, lambda commit: commit()):
        deliver(target, "a", mine)
    assert missing_files(target) == []
    assert target.found() == rows_of("a", mine) + rows_of("other", part(10, 0, 3))


def test_a_commit_that_is_always_refused_is_an_error(target: IcebergTarget) -> None:
    """If nothing has changed since the table was judged, another try would be refused too."""

    def refused(_: Callable[[], None]) -> None:
        raise CommitFailedException("the namespace is read-only")

    with commits(refused) as made, pytest.raises(UnavailableError, match="the namespace is read-only"):
        deliver(target, "a", part(0, 0, 3))
    assert len(made) == 1


@pytest.mark.slow
def test_a_commit_to_another_branch_does_not_fail_the_batch(target: IcebergTarget) -> None:
    """Sequence numbers belong to all branches, so the table refuses the older one with an error of its own."""
    deliver(target, "a", part(0, 0, 3))
    snapshot = target.table().current_snapshot()
    assert snapshot is not None
    target.table().manage_snapshots().create_branch(snapshot.snapshot_id, "audit").commit()
    audit = IcebergTarget(target.folder, "audit")

    def overtaken(_: Callable[[], None]) -> None:
        deliver(audit, "b", part(0, 3, 6))
        raise ValueError("Cannot add snapshot with sequence number 2 older than last sequence number 2")

    with commits(overtaken, lambda commit: commit()):
        assert deliver(target, "c", part(0, 3, 6)).taken
    assert target.found() == rows_of("a", part(0, 0, 3)) + rows_of("c", part(0, 3, 6))


def test_a_column_that_gets_another_type_fails_the_running_batch(target: IcebergTarget) -> None:
    """Spark's CREATE OR REPLACE TABLE keeps the table's UUID and the ids of its fields."""
    sink = target.sink()

    def reached(step: str) -> None:
        if step == "written":
            changed = Schema(PARTITION, OFFSET, NestedField(3, "value", LongType()), schema_id=1)
            updates = AddSchemaUpdate(schema=changed), SetCurrentSchemaUpdate.model_validate({"schema-id": -1})
            open_catalog(target.folder).commit_table(target.table(), (), updates)

    sink._reached = reached  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="another type of column 'value'"):
        sink.write(target.frame(rows_of("a", part(0, 0, 3))), [part(0, 0, 3)], never)
    assert target.table().current_snapshot() is None


def column(kind: Any, *, required: bool = False, field_id: int = 3) -> NestedField:  # noqa: ANN401 - an IcebergType
    """Return a column of a type."""
    return NestedField(field_id, "value", kind, required=required)


STRUCT = StructType(NestedField(4, "a", IntegerType()), NestedField(5, "b", StringType()))


@pytest.mark.parametrize(
    ("written", "now", "fits"),
    [
        (column(IntegerType()), column(LongType()), True),
        (column(FloatType()), column(DoubleType()), True),
        (column(DecimalType(9, 2)), column(DecimalType(12, 2)), True),
        (column(DecimalType(9, 2)), column(DecimalType(12, 3)), False),
        (column(LongType()), column(IntegerType()), False),
        (column(LongType()), column(LongType(), required=True), False),
        (column(LongType()), column(StringType(), field_id=9), True),
        (column(LongType()), column(LongType(), required=True, field_id=9), False),
        (column(STRUCT), column(StructType(STRUCT.fields[0])), True),
        (column(STRUCT), column(StructType(NestedField(4, "a", StringType()))), False),
        (column(STRUCT), column(LongType()), False),
        (column(ListType(4, STRUCT)), column(ListType(4, StringType())), False),
        (column(ListType(4, IntegerType())), column(ListType(4, LongType())), True),
        (column(MapType(4, StringType(), 5, LongType())), column(ListType(4, StringType())), False),
        (column(MapType(4, StringType(), 5, LongType())), column(MapType(4, StringType(), 5, DoubleType())), False),
    ],
)
def test_which_schemas_the_written_files_fit(written: NestedField, now: NestedField, *, fits: bool) -> None:
    """A field is gone, or has the same or a promoted type, and is not newly required."""
    assert first_misfit([written], [now]) == (None if fits else "value")


def test_a_newer_format_is_refused_before_rows_are_written(
    target: IcebergTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pyiceberg does not write format version 3."""
    monkeypatch.setattr(Table, "format_version", 3)
    with pytest.raises(SinkRejectedError, match="has format version 3, and pyiceberg writes only version 2"):
        target.sink().verdicts([part(0, 0, 3)])


def test_the_plan_of_the_tasks_does_not_grow_with_the_snapshots(target: IcebergTarget) -> None:
    """Tasks get neither snapshots nor positions."""
    sink, sizes, original = target.sink(), list[int](), target.sink()._run_tasks

    def run_tasks(frame: Any, done: Any, plan: WritePlan) -> Any:  # noqa: ANN401 - as the sink's
        sizes.append(len(pickle.dumps(replace(plan, attempt=""))))
        assert PROPERTY not in repr(plan)
        return original(frame, done, plan)

    sink._run_tasks = run_tasks
    for number in range(3):
        deliver(target, "a", part(0, number * 3, number * 3 + 3), sink=sink)
    assert max(sizes) - min(sizes) < 100


@pytest.mark.slow
def test_the_size_of_the_positions_is_bounded() -> None:
    """Ranges without rows leave gaps between written offsets. With many partitions, more of the gaps are merged."""

    def intervals(partitions: int, batches: int) -> set[int]:
        positions = TablePositions()
        for number in range(batches):
            taken = [part(partition, number * 10, number * 10 + 10) for partition in range(partitions)]
            positions = positions.then("", number, taken, range(partitions) if number % 2 else ())
        return {len(kept.covered) for kept in positions.kept.values()}

    assert intervals(1, batches=44) == {20}
    assert intervals(100, batches=24) == {10}
    assert intervals(600, batches=6) == intervals(1_001, batches=6) == {1}
