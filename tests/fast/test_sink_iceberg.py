"""The Iceberg sink on real tables of pyiceberg, without Spark: its tasks run in the test's process."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.sinks import IcebergSink, ReportingSink
from marshal_dagster.sinks.conformance import Case, Target
from marshal_dagster.sinks.conformance.target import deliver, never, part, rows_of
from marshal_dagster.sinks.iceberg.positions import PROPERTY, TablePositions
from tests.iceberg_tables import NAME, IcebergTarget, create_table, open_catalog
from tests.sink_kit import ALL_CASES, GROUP_CHECKS

SCHEMA = Schema(
    NestedField(1, "partition", IntegerType()),
    NestedField(2, "offset", LongType()),
    NestedField(3, "value", StringType()),
)


@pytest.fixture
def target(tmp_path: Path) -> IcebergTarget:
    """Return an empty table."""
    create_table(tmp_path, SCHEMA)
    return IcebergTarget(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES)
def test_the_sink_conforms(case: Case, target: IcebergTarget) -> None:
    """Each case of the kit passes, also if a writer dies or stalls at any line of the sink."""
    case.check(target)


@pytest.mark.slow
@pytest.mark.parametrize("check", GROUP_CHECKS)
def test_another_group(check: Callable[[Target], None], target: IcebergTarget) -> None:
    """An output belongs to one group and to those that continue it."""
    check(target)


@contextmanager
def commits(then: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Let `then` decide what happens to each commit; it gets the commit."""
    original = Table._do_commit

    def commit(self: Table, updates: Any, requirements: Any) -> None:  # noqa: ANN401 - as pyiceberg's
        then(lambda: original(self, updates, requirements))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "_do_commit", commit)
        yield


@pytest.mark.slow
def test_a_commit_whose_answer_was_lost_counts(target: IcebergTarget) -> None:
    """After an error the table shows whether it has the commit."""

    def lost(commit: Callable[[], None]) -> None:
        commit()
        raise OSError("connection lost")

    with commits(lost):
        assert deliver(target, "a", part(0, 0, 3)).taken == (part(0, 0, 3),)
    assert target.found() == rows_of("a", part(0, 0, 3))


def test_a_commit_that_was_applied_and_then_refused_counts(target: IcebergTarget) -> None:
    """A request that a client sends again after a lost response is refused, although the first one has succeeded."""

    def sent_twice(commit: Callable[[], None]) -> None:
        commit()
        raise CommitFailedException("branch main has changed")

    with commits(sent_twice):
        assert deliver(target, "a", part(0, 0, 3)).taken == (part(0, 0, 3),)
    assert target.found() == rows_of("a", part(0, 0, 3))


@pytest.mark.slow
def test_a_commit_that_arrives_later_is_refused_by_the_catalog(target: IcebergTarget) -> None:
    """A request whose outcome is unknown may arrive after the next attempt, and then changes nothing."""
    held: list[Callable[[], None]] = []

    def hold(commit: Callable[[], None]) -> None:
        held.append(commit)
        raise OSError("timed out")

    with commits(hold), pytest.raises(UnavailableError, match="timed out"):
        deliver(target, "late", part(0, 0, 3))
    assert target.found() == []
    deliver(target, "next", part(0, 0, 3))
    with pytest.raises(CommitFailedException):
        held[0]()
    assert target.found() == rows_of("next", part(0, 0, 3))


@pytest.mark.slow
def test_a_late_commit_that_succeeds_is_found_by_the_next_attempt(target: IcebergTarget) -> None:
    """The files of an attempt stay while its commit may still arrive, and the next attempt skips the range then."""
    held: list[Callable[[], None]] = []

    def hold(commit: Callable[[], None]) -> None:
        held.append(commit)
        raise OSError("timed out")

    with commits(hold), pytest.raises(UnavailableError, match="timed out"):
        deliver(target, "late", part(0, 0, 3))
    held[0]()
    assert deliver(target, "next", part(0, 0, 3)).skipped
    assert target.found() == rows_of("late", part(0, 0, 3))


@pytest.mark.thorough
def test_a_commit_of_a_busy_database_is_an_error(target: IcebergTarget) -> None:
    """After a failed commit SQLAlchemy's connection shows the row of the catalog that was not committed."""
    deliver(target, "a", part(0, 0, 3))
    with (
        closing(sqlite3.connect(target.folder / "catalog.db")) as reader,
        closing(reader.execute("SELECT 1 FROM iceberg_tables UNION ALL SELECT 2")) as rows,
    ):
        next(rows)  # the reader locks the database until it has read the second row
        with pytest.raises(UnavailableError, match="database is locked"):
            deliver(target, "b", part(0, 3, 6), sink=target.sink(timeout_s=0.1))
    assert target.found() == rows_of("a", part(0, 0, 3))
    deliver(target, "c", part(0, 3, 6))
    assert target.found() == rows_of("a", part(0, 0, 3)) + rows_of("c", part(0, 3, 6))


@pytest.mark.slow
def test_a_writer_that_was_overtaken_does_not_write_its_rows_again(target: IcebergTarget) -> None:
    """It judges again and commits the same files."""
    mine, tries = part(0, 0, 3), list[str]()

    def overtaken(commit: Callable[[], None]) -> None:
        tries.append("commit")
        if len(tries) == 1:
            deliver(target, "other", part(10, 0, 3))
        commit()

    with commits(overtaken):
        frame = target.frame(rows_of("a", mine))
        assert target.sink().write(frame, [mine], never).taken == (mine,)
    assert len(tries) == 3
    assert frame.reads == ["rows"]
    assert target.found() == rows_of("a", mine) + rows_of("other", part(10, 0, 3))
    assert len(list(target.folder.glob("**/*.parquet"))) == 4


@pytest.mark.slow
def test_a_writer_that_lost_a_part_commits_the_rest(target: IcebergTarget) -> None:
    """Files have rows of one Kafka partition each, so those of another writer's range are left out and deleted."""
    batch = [part(0, 0, 4), part(1, 0, 4)]
    sink, steps = target.sink(), list[str]()

    def reached(step: str) -> None:
        steps.append(step)
        if steps == ["written"]:
            deliver(target, "other", part(0, 0, 4, epoch=20))

    sink._reached = reached  # type: ignore[method-assign]
    outcome = sink.write(target.frame(rows_of("a", *batch)), [part(0, 0, 4, epoch=20), batch[1]], never)
    assert outcome.taken == (batch[1],)
    assert outcome.rows == {1: 4}
    assert target.found() == rows_of("other", part(0, 0, 4)) + rows_of("a", batch[1])
    named = {file["file_path"].removeprefix("file://") for file in target.table().inspect.files().to_pylist()}
    assert {str(path) for path in target.folder.glob("**/*.parquet")} == named


@pytest.mark.slow
def test_positions_outlive_the_snapshots(target: IcebergTarget) -> None:
    """Other commits and an expiry of all snapshots of the sink leave the positions."""
    deliver(target, "a", part(0, 0, 3), part(1, 0, 3))
    table = target.table()
    table.append(table.scan().to_arrow().slice(0, 1))
    ours = [snapshot.snapshot_id for snapshot in table.snapshots()][:-1]
    table.maintenance.expire_snapshots().by_ids(ours).commit()
    assert all(PROPERTY not in str(snapshot.summary) for snapshot in target.table().snapshots())
    assert deliver(target, "b", part(0, 0, 3, epoch=20)).skipped
    assert deliver(target, "b", part(0, 3, 5, epoch=20)).taken
    assert len(target.found()) == 9


@pytest.mark.slow
def test_after_a_rollback_the_positions_of_its_rows_count(target: IcebergTarget) -> None:
    """The next range does not follow the rows that are left, which is an error. They can be delivered again."""
    deliver(target, "a", part(0, 0, 3))
    before = target.table().current_snapshot()
    assert before is not None
    deliver(target, "a", part(0, 3, 6))
    target.table().manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
    with pytest.raises(SinkRejectedError, match="is at position 3, which is neither"):
        deliver(target, "b", part(0, 6, 9))
    assert deliver(target, "b", part(0, 3, 6, epoch=20)).taken
    assert deliver(target, "b", part(0, 6, 9, epoch=20)).taken
    assert target.found() == rows_of("a", part(0, 0, 3)) + rows_of("b", part(0, 3, 9))


@pytest.mark.slow
def test_a_rollback_before_the_first_commit_is_refused(target: IcebergTarget) -> None:
    """Without positions any range would be taken, and rows would be missing without an error."""
    table = target.table()
    table.append(target.table().scan().to_arrow())
    before = table.current_snapshot()
    assert before is not None
    deliver(target, "a", part(0, 0, 3))
    target.table().manage_snapshots().rollback_to_snapshot(before.snapshot_id).commit()
    for _ in range(2):
        with pytest.raises(SinkRejectedError, match="was rolled back"):
            deliver(target, "b", part(0, 3, 6))
        target.table().append(target.table().scan().to_arrow())
    with target.table().transaction() as transaction:
        transaction.remove_properties(f"{PROPERTY}.main")
    assert deliver(target, "b", part(0, 3, 6)).taken


@pytest.mark.slow
def test_a_table_that_was_dropped_and_created_again_fails_the_running_batch(target: IcebergTarget) -> None:
    """Its files belong to the dropped table. The next batch finds an empty output."""
    sink, steps = target.sink(), list[str]()

    def reached(step: str) -> None:
        steps.append(step)
        if step == "written":
            open_catalog(target.folder).drop_table(NAME)
            create_table(target.folder, SCHEMA)

    sink._reached = reached  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="was dropped and created again"):
        sink.write(target.frame(rows_of("a", part(0, 0, 3))), [part(0, 0, 3)], never)
    assert deliver(target, "b", part(0, 0, 3)).taken
    assert target.found() == rows_of("b", part(0, 0, 3))


def test_tables_that_cannot_be_written_are_refused(target: IcebergTarget, tmp_path: Path) -> None:
    """A missing table or branch, a tag, and a table of format version 1 have errors of their own."""
    deliver(target, "a", part(0, 0, 3))
    snapshot = target.table().current_snapshot()
    assert snapshot is not None
    target.table().manage_snapshots().create_tag(snapshot.snapshot_id, "v1").commit()
    for branch, why in (("none", "has no branch 'none'"), ("v1", "is a tag")):
        with pytest.raises(SinkRejectedError, match=why):
            IcebergTarget(tmp_path, branch).sink().verdicts([part(0, 3, 6)])
    open_catalog(tmp_path).drop_table(NAME)
    with pytest.raises(SinkRejectedError, match="does not exist"):
        target.sink().verdicts([part(0, 3, 6)])
    create_table(tmp_path, SCHEMA, format_version="1")
    with pytest.raises(SinkRejectedError, match="format version 1"):
        target.sink().verdicts([part(0, 3, 6)])


@pytest.mark.slow
def test_a_branch_has_its_own_positions(target: IcebergTarget) -> None:
    """A branch continues after the rows that it began with, and `main` does not see its rows."""
    deliver(target, "a", part(0, 0, 3))
    snapshot = target.table().current_snapshot()
    assert snapshot is not None
    target.table().manage_snapshots().create_branch(snapshot.snapshot_id, "audit").commit()
    audit = IcebergTarget(target.folder, "audit")
    deliver(audit, "b", part(0, 3, 6))
    assert target.found() == rows_of("a", part(0, 0, 3))
    assert audit.found() == rows_of("a", part(0, 0, 3)) + rows_of("b", part(0, 3, 6))
    deliver(target, "c", part(0, 3, 6))
    assert target.found() == rows_of("a", part(0, 0, 3)) + rows_of("c", part(0, 3, 6))


def test_the_table_is_described_and_checked(target: IcebergTarget) -> None:
    """Positions are described, and a missing file and unreadable positions are found."""
    deliver(target, "a", part(0, 0, 3), part(1, 5, 8))
    sink = target.sink()
    assert isinstance(sink, ReportingSink)
    found = [(stored.partition, stored.start, stored.end, stored.rows) for stored in sink.describe().generations]
    assert found == [(0, None, 3, None), (1, None, 8, None)]
    assert sink.check() == []
    result = sink.vacuum(dry_run=True)
    assert (result.entries, result.obsolete) == (2, 0)
    assert "remove_orphan_files" in (result.hint or "")
    next(target.folder.glob("**/*.parquet")).unlink()
    assert [line.split(" of the table")[1] for line in sink.check()] == [
        " is missing. Restore it, or roll the table back to a snapshot without it"
    ]
    with target.table().transaction() as transaction:
        transaction.set_properties({f"{PROPERTY}.main": "{"})
    assert ["is damaged" in line for line in sink.check()] == [True]


def test_configuration_errors() -> None:
    """No namespace, an empty branch, another mode, an odd column and contradicting groups are refused."""
    for table in ("orders", "shop.", ".orders", ""):
        with pytest.raises(ConfigurationError, match="with its namespace"):
            IcebergSink(table)
    with pytest.raises(ConfigurationError, match="branch is empty"):
        IcebergSink("shop.orders", branch="")
    with pytest.raises(ConfigurationError, match="mode is 'upsert', but IcebergSink only appends"):
        IcebergSink("shop.orders", mode="upsert")
    for name in ("", "source.name"):
        with pytest.raises(ConfigurationError, match="without a dot"):
            IcebergSink("shop.orders", source_column=name)
    with pytest.raises(ConfigurationError, match="previous_group cannot be combined with shared_by_groups"):
        IcebergSink("shop.orders", shared_by_groups=True, previous_group="etl")


@pytest.mark.parametrize(
    ("properties", "kind", "why"),
    [
        ({}, ConfigurationError, "catalog cannot be opened"),
        ({"uri": "odd://user:secret@host"}, ConfigurationError, r"\*\*\*"),
        ({"uri": "http://127.0.0.1:1", "token": "secret"}, UnavailableError, "cannot be reached"),
    ],
    ids=["unknown", "odd", "unreachable"],
)
def test_errors_of_the_catalog_are_one_line(properties: dict[str, str], kind: type[Exception], why: str) -> None:
    """They name what to do, and not the values of the properties."""
    sink = IcebergSink("shop.orders", catalog="none", catalog_properties=properties)
    with pytest.raises(kind, match=why) as raised:
        sink.verdicts([part(0, 0, 1)])
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_secrets_are_not_shown() -> None:
    """The properties of the catalog appear nowhere."""
    sink = IcebergSink("shop.orders", catalog_properties={"credential": "secret"})
    assert repr(sink) == "IcebergSink('shop.orders')"


def test_positions_are_read_back() -> None:
    """They are equal after a round trip, compressed or not, and a newer version or damage is refused."""
    taken = [part(0, 2**62, 2**63 - 1, group='a "group"', topic="t"), part(3, 0, 0, generation=5, epoch=9)]
    few = TablePositions().then("attempt", 1, taken, {0})
    many = few.then("attempt", 2, [part(number, 0, 1_000 + number) for number in range(1_000)], range(1_000))
    for positions in (few, many):
        assert TablePositions.from_text(positions.to_text(), "x") == positions
    assert len(many.to_text()) < 10_000
    with pytest.raises(SinkRejectedError, match="has version 2, but this marshal-dagster supports only 1"):
        TablePositions.from_text('{"version": 2}', "x")
    for damaged in ("{", "", "{}", "AAAA", few.to_text()[:-1]):
        with pytest.raises(SinkRejectedError, match="x is damaged"):
            TablePositions.from_text(damaged, "x")
