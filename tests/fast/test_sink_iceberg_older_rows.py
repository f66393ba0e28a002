"""A new generation replaces rows of an Iceberg table that has a column for each row's source."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

import numpy as np
from pyiceberg import types as i
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import parse_transform

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.conformance import Case
from marshal_dagster.sinks.conformance.generations import CASES
from marshal_dagster.sinks.conformance.target import deliver, never, part, rows_of
from marshal_dagster.sinks.iceberg.older_rows import intervals_of
from tests.fast.test_sink_iceberg_order import ASCENDING, LAST, sort_order
from tests.iceberg_tables import IcebergTarget, create_sorted_table, create_table

FIELDS = (
    i.NestedField(1, "partition", i.IntegerType()),
    i.NestedField(2, "offset", i.LongType()),
    i.NestedField(3, "value", i.StringType()),
    i.NestedField(4, "marshal_source", i.StringType()),
)
SCHEMA = Schema(*FIELDS)


def target_of(folder: Path, schema: Schema = SCHEMA) -> IcebergTarget:
    """Return an empty table with the sink's column."""
    create_table(folder, schema)
    return IcebergTarget(folder, source_column="marshal_source")


@pytest.fixture
def target(tmp_path: Path) -> IcebergTarget:
    """Return an empty table with the sink's column."""
    return target_of(tmp_path)


def newer(partition: int, start: int, end: int, generation: int = 20) -> ClaimedRange:
    """Return a range of a new generation."""
    return part(partition, start, end, generation=generation, epoch=generation + 1)


def paths(target: IcebergTarget) -> set[str]:
    """Return the paths of the table's files."""
    return {file["file_path"] for file in target.table().inspect.files().to_pylist()}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.thorough
def test_the_sink_conforms(case: Case, target: IcebergTarget) -> None:
    """The sink passes the kit's cases of a new generation; `test_sink_iceberg` has the others."""
    case.check(target)


@pytest.mark.slow
def test_a_file_of_older_rows_only_is_removed_as_a_whole(target: IcebergTarget) -> None:
    """Its statistics show that, so it is not read, and no other file changes."""
    deliver(target, "old", part(0, 0, 4), part(1, 0, 4))
    kept = paths(target)
    deliver(target, "old", part(0, 4, 8))
    for path in paths(target) - kept:
        Path(path.removeprefix("file://")).unlink()
    deliver(target, "new", newer(0, 4, 8))
    assert kept <= paths(target)
    assert target.found() == rows_of("old", part(0, 0, 4)) + rows_of("new", part(0, 4, 8)) + rows_of(
        "old", part(1, 0, 4)
    )


@pytest.mark.slow
def test_a_file_with_other_rows_is_written_again(target: IcebergTarget) -> None:
    """Only at the offsets that were read, in one snapshot."""
    deliver(target, "old", part(0, 0, 10))
    before = len(target.table().snapshots())
    sink = target.sink()
    mine = newer(0, 3, 8)
    sink.write(target.frame(rows_of("new", part(0, 4, 6))), [mine], lambda: {0: [(3, 5), (7, 8)]})
    old = [row for row in rows_of("old", part(0, 0, 10)) if row[1] not in {3, 4, 5, 7}]
    assert target.found() == sorted(old + rows_of("new", part(0, 4, 6)))
    snapshots = target.table().snapshots()
    assert len(snapshots) == before + 1
    assert snapshots[-1].summary is not None
    assert snapshots[-1].summary.operation.value == "overwrite"


@pytest.mark.slow
def test_rows_are_found_after_a_compaction(target: IcebergTarget) -> None:
    """Another engine has written all rows to one file, with rows of other writers."""
    deliver(target, "old", part(0, 0, 6), part(1, 0, 6))
    table = target.table()
    rows = table.scan().to_arrow()
    other = rows.slice(0, 2).drop_columns(["marshal_source"])
    table.overwrite(rows)
    target.table().append(other)
    found = target.found()
    deliver(target, "new", newer(0, 0, 6), newer(1, 3, 6))
    gone = sorted(rows_of("old", part(0, 0, 6), part(1, 3, 6)))
    for row in gone:
        found.remove(row)
    assert target.found() == sorted(found + rows_of("new", part(0, 0, 6), part(1, 3, 6)))


@pytest.mark.slow
def test_a_commit_that_was_overtaken_plans_the_replacement_again(target: IcebergTarget) -> None:
    """A compaction before the commit has moved the older rows to another file."""
    deliver(target, "old", part(0, 0, 6))
    sink, changes = target.sink(), [1]

    def reached(step: str) -> None:
        if step == "judged" and changes:
            changes.clear()
            table = target.table()
            table.overwrite(table.scan().to_arrow())

    sink._reached = reached  # type: ignore[method-assign]
    mine = newer(0, 2, 4)
    assert sink.write(target.frame(rows_of("new", mine)), [mine], lambda: {0: [(2, 4)]}).taken == (mine,)
    old = rows_of("old", part(0, 0, 2), part(0, 4, 6))
    assert target.found() == sorted(old + rows_of("new", part(0, 2, 4)))


def test_a_table_with_equality_deletes_is_refused(target: IcebergTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of other offsets, so pyiceberg's plan leaves them out, and deleted rows would come back."""
    deliver(target, "old", part(0, 0, 8))
    deletes = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES,
        file_format=FileFormat.PARQUET,
        equality_ids=[2],
        lower_bounds={2: to_bytes(i.LongType(), 7)},
        upper_bounds={2: to_bytes(i.LongType(), 7)},
    )
    entry = ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=deletes)
    manifest = ManifestFile.from_args(content=ManifestContent.DELETES)
    fetch, manifests = ManifestFile.fetch_manifest_entry, Snapshot.manifests
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "manifests", lambda *of: [*manifests(*of), manifest])
        patch.setattr(
            ManifestFile, "fetch_manifest_entry", lambda self, *of: [entry] if self is manifest else fetch(self, *of)
        )
        with pytest.raises(SinkRejectedError, match="has equality deletes of another engine"):
            deliver(target, "new", newer(0, 1, 4))
    assert target.found() == rows_of("old", part(0, 0, 8))


@pytest.mark.slow
def test_a_partitioned_and_sorted_table_stays_so(tmp_path: Path) -> None:
    """Rows that are written again are in their partitions and in order."""
    spec = PartitionSpec(PartitionField(2, 1000, parse_transform("bucket[3]"), "bucket"))
    create_sorted_table(tmp_path, SCHEMA, sort_order((3, "identity", ASCENDING, LAST)), spec)
    target = IcebergTarget(tmp_path, source_column="marshal_source")
    deliver(target, "old", part(0, 0, 20))
    deliver(target, "new", newer(0, 5, 15))
    assert target.found() == sorted(rows_of("old", part(0, 0, 5), part(0, 15, 20)) + rows_of("new", part(0, 5, 15)))
    files = target.table().inspect.files().to_pylist()
    assert {file["sort_order_id"] for file in files} == {1}
    assert target.table().scan(row_filter="offset = 17").to_arrow().num_rows == 1


@pytest.mark.slow
def test_rows_without_a_source_are_not_replaced(tmp_path: Path) -> None:
    """They were written before the option was set, so the table does not show whose they are."""
    create_table(tmp_path, SCHEMA)
    deliver(IcebergTarget(tmp_path), "old", part(0, 0, 4))
    target = IcebergTarget(tmp_path, source_column="marshal_source")
    deliver(target, "old", part(0, 4, 8), part(1, 0, 4))
    reason = target.sink().can_replace([newer(0, 4, 8)])
    assert reason is not None
    assert "written without this source_column" in reason
    with pytest.raises(SinkRejectedError, match="written without this source_column"):
        deliver(target, "new", newer(0, 4, 8))
    assert target.sink().can_replace([newer(1, 0, 4)]) is None
    assert IcebergTarget(tmp_path).sink().can_replace([newer(1, 0, 4)]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("column", ["marshal_source", "offset"])
def test_rows_of_a_column_that_was_created_again_are_not_replaced(column: str, target: IcebergTarget) -> None:
    """They are null in the new column, so they would not be found."""
    deliver(target, "old", part(0, 0, 4))
    kind = target.table().schema().find_field(column).field_type
    with target.table().update_schema(allow_incompatible_changes=True) as update:
        update.delete_column(column)
    with target.table().update_schema() as update:
        update.add_column(column, kind)
    assert target.sink().can_replace([newer(0, 0, 4)]) is not None
    with pytest.raises(SinkRejectedError, match="written without this source_column"):
        deliver(target, "new", newer(0, 0, 4))
    deliver(target, "old", part(0, 4, 8))
    assert target.sink().can_replace([newer(0, 4, 8)]) is not None


@pytest.mark.slow
def test_rows_of_another_source_column_are_not_replaced(target: IcebergTarget) -> None:
    """The option was given another name. A column that is renamed is the same one."""
    deliver(target, "old", part(0, 0, 4))
    with target.table().update_schema() as update:
        update.rename_column("marshal_source", "source")
        update.add_column("other", i.StringType())
    target.source_column = "other"
    with pytest.raises(SinkRejectedError, match="written without this source_column"):
        deliver(target, "new", newer(0, 0, 4))
    target.source_column = "source"
    deliver(target, "new", newer(0, 0, 4))
    assert target.found() == rows_of("new", part(0, 0, 4))


def test_a_column_that_is_created_again_during_a_batch_does_not_find_its_rows(target: IcebergTarget) -> None:
    """The batch's files have the former column."""
    sink = target.sink()

    def reached(step: str) -> None:
        if step == "written":
            with target.table().update_schema(allow_incompatible_changes=True) as update:
                update.delete_column("marshal_source")
            with target.table().update_schema() as update:
                update.add_column("marshal_source", i.StringType())

    sink._reached = reached  # type: ignore[method-assign]
    mine = part(0, 0, 4)
    assert sink.write(target.frame(rows_of("old", mine)), [mine], never).taken == (mine,)
    assert target.sink().can_replace([newer(0, 0, 4)]) is not None


@pytest.mark.slow
def test_a_column_of_a_wider_type_finds_older_rows(target: IcebergTarget) -> None:
    """The bounds of older files have four bytes."""
    deliver(target, "old", part(0, 0, 6))
    with target.table().update_schema() as update:
        update.update_column("partition", i.LongType())
    deliver(target, "new", newer(0, 0, 4))
    assert target.found() == rows_of("new", part(0, 0, 4)) + rows_of("old", part(0, 4, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (i.MapType(6, i.StringType(), 7, i.StringType()), "map"),
        (i.ListType(6, i.StructType(i.NestedField(7, "name", i.StringType()))), "list<struct"),
        (i.StructType(i.NestedField(6, "name", i.UUIDType())), "struct"),
    ],
    ids=["map", "list of structs", "uuid"],
)
def test_types_that_are_not_read_exactly_are_not_written_again(kind: i.IcebergType, shown: str, tmp_path: Path) -> None:
    """Pyiceberg reads null as an empty map, or as an empty list of structs. A whole file can be removed."""
    target = target_of(tmp_path, Schema(*FIELDS, i.NestedField(5, "pairs", kind)))
    deliver(target, "old", part(0, 0, 4))
    with pytest.raises(SinkRejectedError, match=f"column 'pairs' has type {shown}"):
        deliver(target, "new", newer(0, 1, 4))
    assert target.found() == rows_of("old", part(0, 0, 4))
    deliver(target, "new", newer(0, 0, 4))
    assert target.found() == rows_of("new", part(0, 0, 4))


def test_new_rows_may_have_no_offset(target: IcebergTarget) -> None:
    """They replace what was read, and cannot be replaced themselves."""
    deliver(target, "old", part(0, 0, 4))
    mine = newer(0, 1, 3)
    frame = target.frame([(0, "sum")], ["partition", "value"])
    target.sink().write(frame, [mine], lambda: {0: [(1, 3)]})
    expected = [row for row in rows_of("old", part(0, 0, 4)) if row[1] not in {1, 2}]
    assert target.found() == sorted([*expected, (0, -1, "sum")])
    assert target.sink().can_replace([newer(0, 1, 3, generation=30)]) is not None


def test_a_batch_that_cannot_replace_leaves_no_files(target: IcebergTarget) -> None:
    """Its own files are removed, because nothing was sent to the catalog."""
    deliver(target, "old", part(0, 0, 4))

    def fails() -> Any:  # noqa: ANN401 - never returns
        raise KeyError("offsets")

    mine = newer(0, 1, 3)
    with pytest.raises(KeyError):
        target.sink().write(target.frame(rows_of("new", mine)), [mine], fails)
    there = {str(path) for path in target.folder.glob("warehouse/**/*.parquet")}
    assert there == {path.removeprefix("file://") for path in paths(target)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (FIELDS[:3], "the column 'marshal_source' of type string, but the table has no such column"),
        (FIELDS[1:], "the column 'partition' of type int or long, but the table has no such column"),
        (
            (*FIELDS[:1], i.NestedField(2, "offset", i.IntegerType()), *FIELDS[2:]),
            "the column 'offset' of type long, but the table has the type int",
        ),
    ],
)
def test_a_table_without_the_columns_is_refused(
    fields: tuple[i.NestedField, ...], message: str, tmp_path: Path
) -> None:
    """Before the batch is processed."""
    with pytest.raises(ConfigurationError, match=message):
        target_of(tmp_path, Schema(*fields)).sink().verdicts([part(0, 0, 1)])


def test_the_sinks_column_is_reserved(target: IcebergTarget) -> None:
    """The result must not have it, and it may be required."""
    frame: Any = target.frame([(0, 0, "a")])
    frame.columns[2] = "marshal_source"
    with pytest.raises(Exception, match="marshal_source"):
        target.sink().write(frame, [part(0, 0, 1)], never)


def test_offsets_become_intervals() -> None:
    """Adjacent offsets are in one interval; offsets may be there twice."""
    assert intervals_of([]) == ()
    assert intervals_of([np.array([3, 1, 2]), np.array([7, 3])]) == [(1, 4), (7, 8)]
