"""The conformance kit: the correct example sink passes each case, and each wrong sink fails one."""

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import test_sqlite_sink as example

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import BeforeCommit, OffsetsRead, WriteResult
from marshal_dagster.sinks.conformance import CASES, Case, LocalFrame, Target
from sqlite_sink import SqliteSink
from tests.sink_kit import ALL_CASES, GROUP_CHECKS, SHORT_CASES, OutputTarget
from tests.sink_outputs import FileOutput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BY_NAME = {str(case): case for case in CASES}


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_example_passes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that the documentation shows passes unchanged."""
    monkeypatch.setattr(Target, "most_steps", 20)
    example.test_the_sink_conforms(case, tmp_path)


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_the_file_sink_passes(case: Case, tmp_path: Path) -> None:
    """The library's file sink passes the short cases. `test_sink_files` runs the cases with crashes and races."""
    case.check(OutputTarget(FileOutput(tmp_path / "output")))


@pytest.mark.parametrize("check", GROUP_CHECKS)
def test_another_group(check: Callable[[Target], None], tmp_path: Path) -> None:
    """An output belongs to one group and to those that continue it."""
    check(OutputTarget(FileOutput(tmp_path / "output")))


# Wrong sinks


class Forgets(SqliteSink):
    """Takes each range again: no idempotence."""

    def _judge(self, _: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        return dict.fromkeys(ranges, Verdict.TAKE)


class PerBatch(SqliteSink):
    """Stores batches and not ranges. A batch is done only if all of it is."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts = super()._judge(database, ranges)
        if set(verdicts.values()) == {Verdict.SKIP}:
            return verdicts
        return {each: Verdict.TAKE if verdict is Verdict.SKIP else verdict for each, verdict in verdicts.items()}


class PerBatchId(SqliteSink):
    """Identifies a batch by all its ranges, so a part of it is another batch."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts = super()._judge(database, ranges)
        (newest,) = database.execute("SELECT count(*) FROM taken").fetchone()
        if set(verdicts.values()) == {Verdict.SKIP} and len(ranges) != newest:
            return dict.fromkeys(verdicts, Verdict.TAKE)
        return verdicts


class IgnoresEpochs(SqliteSink):
    """Lets a fenced writer write."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        now = {replace(range_, epoch=2**62): range_ for range_ in ranges}
        return {now[each]: verdict for each, verdict in super()._judge(database, list(now)).items()}


class TakesOneRefused(SqliteSink):
    """Ignores one reason to refuse a range."""

    ignored: ClassVar[str]

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts: dict[ClaimedRange, Verdict] = {}
        for range_ in ranges:
            try:
                verdicts |= super()._judge(database, [range_])
            except SinkRejectedError as refused:
                if self.ignored not in str(refused):
                    raise
                verdicts[range_] = Verdict.TAKE
        return verdicts


class IgnoresGenerations(TakesOneRefused):
    """Lets a writer write that started before the position was set."""

    ignored = "is older than"


class IgnoresGaps(TakesOneRefused):
    """Takes a range that starts at any offset."""

    ignored = "neither the range's start"


class IgnoresTopicIds(SqliteSink):
    """Takes a re-created topic for the old one."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        same = "coordination-topic-id-", "the-first-data-topic--"
        now = {replace(range_, coordination_topic_id=same[0], data_topic_id=same[1]): range_ for range_ in ranges}
        return {now[each]: verdict for each, verdict in super()._judge(database, list(now)).items()}


class WritesBeforeItJudges(SqliteSink):
    """Keeps rows of refused batches, because it commits them before the ranges."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows first."""
        rows = [tuple(row) for row in frame.collect()] if len(frame.columns) == 3 else []
        with self._transaction() as database:
            database.executemany('INSERT INTO result (partition, "offset", value) VALUES (?, ?, ?)', rows)
        empty: LocalFrame = LocalFrame(frame.columns, ())
        return super().write(empty, ranges, offsets_read, before_commit)  # type: ignore[arg-type]


class TwoTransactions(SqliteSink):
    """Commits the rows in one transaction and the ranges in the next."""

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        super()._insert(database, taken, rows)
        database.execute("DELETE FROM taken WHERE rowid = last_insert_rowid()")
        database.commit()
        database.execute("BEGIN IMMEDIATE")
        super()._insert(database, taken, [])


class JudgesOnce(SqliteSink):
    """Decides once, and not again in the transaction of the rows."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._known: dict[ClaimedRange, Verdict] = {}

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        if not set(ranges) <= self._known.keys():
            self._known |= super()._judge(database, ranges)
        return {range_: self._known[range_] for range_ in ranges}


class UndoesInFinally(TwoTransactions):
    """Removes rows without ranges in a `finally` block, which a killed process does not run."""

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        is_done = False
        try:
            super()._insert(database, taken, rows)
            is_done = True
        finally:
            if not is_done:
                database.executemany('DELETE FROM result WHERE partition = ? AND "offset" = ? AND value = ?', rows)


class ForgetsEmptyRanges(SqliteSink):
    """Stores ranges with their rows, so a range without rows is not stored."""

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        if rows:
            super()._insert(database, taken, rows)


class CountsRows(SqliteSink):
    """Takes the last row's offset for the position."""

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        end = max((offset + 1 for _, offset, _ in rows), default=taken.end)
        super()._insert(database, replace(taken, end=max(end, taken.first_readable)), rows)


class MixesGroups(SqliteSink):
    """Has one position for all groups."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        now = {replace(range_, group="g"): range_ for range_ in ranges}
        return {now[each]: verdict for each, verdict in super()._judge(database, list(now)).items()}

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        super()._insert(database, replace(taken, group="g"), rows)


class TakesEveryGroup(SqliteSink):
    """Ignores which group owns the output."""

    def __init__(self, path: str, *, shared_by_groups: bool = True) -> None:  # noqa: ARG002
        super().__init__(path, shared_by_groups=True)


class ChecksGroupsEarly(SqliteSink):
    """Checks which group owns the output only in `verdicts`."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts = super()._judge(database, ranges)
        self._groups = replace(self._groups, shared_by_groups=True)
        return verdicts


class DropsForeignRows(SqliteSink):
    """Silently drops rows of other partitions."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of its own partitions."""
        ours = {range_.partition for range_ in ranges}
        if isinstance(frame, LocalFrame) and frame.rows is not None and frame.columns[0] == "partition":
            rows = tuple(row for row in frame.rows if row[0] in ours)
            frame = LocalFrame(frame.columns, rows, frame.reads)  # type: ignore[assignment]
        return super().write(frame, ranges, offsets_read, before_commit)


class NeverAsksTheBatch(SqliteSink):
    """Does not call `before_commit`."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write without `before_commit`."""
        before_commit = lambda: None  # noqa: E731
        return super().write(frame, ranges, offsets_read, before_commit)


class AsksTheBatchFirst(SqliteSink):
    """Calls `before_commit` before it reads the rows."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Call `before_commit`, then write."""
        before_commit()
        return super().write(frame, ranges, offsets_read)


class AppendsInANewGeneration(SqliteSink):
    """Reports that it replaces old rows, and adds new ones instead."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, _: Sequence[tuple[int, int]]) -> None:
        super()._replace(database, wanted, ())


class ReplacesWholeRanges(SqliteSink):
    """Removes rows of messages that were not read again."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, offsets: Sequence[tuple[int, int]]) -> None:  # noqa: ARG002
        super()._replace(database, wanted, [(wanted.start, wanted.end)])


class ReplacesBeyond(SqliteSink):
    """Removes rows of messages outside its range."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, offsets: Sequence[tuple[int, int]]) -> None:
        super()._replace(database, replace(wanted, start=0, first_readable=0, end=2**62), offsets)


class ReplacesWhatIsWritten(SqliteSink):
    """Removes old rows only at the offsets of new ones."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,  # noqa: ARG002
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write without `offsets_read`."""
        return super().write(frame, ranges, dict, before_commit)


class ReplacesOtherTopics(SqliteSink):
    """Removes the rows of an older topic with the same name."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, offsets: Sequence[tuple[int, int]]) -> None:
        for topic_id in ("the-first-data-topic--", "made-anew"):
            super()._replace(database, replace(wanted, data_topic_id=topic_id), offsets)


class RefusesAfterAll(SqliteSink):
    """Reports that it can replace, and then refuses to."""

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Refuse each new generation."""
        verdicts = super().verdicts(ranges)
        if any(range_.generation for range_ in ranges):
            raise SinkRejectedError("no")
        return verdicts


class TakesRowsWithoutOffsets(SqliteSink):
    """Accepts rows that it could not replace later, and does not report it."""

    def _check_offsets(self, rows: Sequence[tuple[int, int | None, str]]) -> None:
        rows[:] = [(partition, -1 if at is None else at, value) for partition, at, value in rows]  # type: ignore[index]


class DropsEqualRows(SqliteSink):
    """Drops equal rows as duplicates."""

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        super()._insert(database, taken, sorted(set(rows)))


class ReadsTheOffsetsLast(SqliteSink):
    """Does not call `before_commit` again after `offsets_read`."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Call `before_commit` once."""
        requested: list[str] = []

        def once() -> None:
            if not requested:
                requested.append("batch")
                before_commit()

        return super().write(frame, ranges, offsets_read, once)


class NamesInTheStatement(SqliteSink):
    """Puts names into its SQL without escaping."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        for each in ranges:
            database.execute(f"SELECT * FROM taken WHERE \"group\" = '{each.group}'")  # noqa: S608 - the fault
        return super()._judge(database, ranges)


class PositionOnly(SqliteSink):
    """Reports that it takes ranges in any order, and keeps only a position."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        now = {replace(range_, in_any_order=False): range_ for range_ in ranges}
        return {now[each]: verdict for each, verdict in super()._judge(database, list(now)).items()}


class TakesRangesInSecret(SqliteSink):
    """Reports that it does not take ranges in any order, and takes them."""

    supports_unordered_ranges = False


class NoLock(SqliteSink):
    """Decides and writes without a lock on the database."""

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with super()._transaction() as database:
            database.commit()
            yield database


WRONG: Mapping[type[SqliteSink], str] = {
    Forgets: "duplicate",
    PerBatch: "rest_of_a_batch",
    PerBatchId: "subset_replayed_by_others",
    IgnoresEpochs: "lower_epoch",
    IgnoresGenerations: "lower_generation",
    IgnoresGaps: "gap_or_overlap",
    IgnoresTopicIds: "recreated_topics",
    WritesBeforeItJudges: "lower_epoch",
    TwoTransactions: "death_at_any_step",
    UndoesInFinally: "death_at_any_step",
    JudgesOnce: "judged_when_written",
    ForgetsEmptyRanges: "ranges_without_rows",
    CountsRows: "lost_and_missing_offsets",
    MixesGroups: "groups_and_topics_apart",
    TakesEveryGroup: "another_group",
    ChecksGroupsEarly: "two_groups_at_once",
    DropsForeignRows: "foreign_rows",
    NeverAsksTheBatch: "batch_refuses",
    AsksTheBatchFirst: "batch_refuses",
    AppendsInANewGeneration: "inside_an_older_range",
    ReplacesWholeRanges: "what_was_not_read_stays",
    ReplacesBeyond: "rows_at_other_offsets",
    ReplacesWhatIsWritten: "read_without_rows",
    ReplacesOtherTopics: "other_data_topic",
    RefusesAfterAll: "inside_an_older_range",
    TakesRowsWithoutOffsets: "some_rows_without_offsets",
    DropsEqualRows: "several_rows_of_a_message",
    ReadsTheOffsetsLast: "batch_refuses_the_offsets",
    NamesInTheStatement: "groups_and_topics_apart",
    PositionOnly: "ranges_in_any_order",
    TakesRangesInSecret: "ranges_in_any_order",
    NoLock: "overtaken_at_any_step",
}


SLOW = (NoLock, TwoTransactions, UndoesInFinally)
DIES_INSIDE = (TwoTransactions, UndoesInFinally)
"""Caught by a death at one of their own lines, so those of the correct sink need not be tried: each costs a fork."""


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(wrong, marks=[pytest.mark.thorough] if wrong in SLOW else []) for wrong in WRONG],
    ids=lambda wrong: wrong.__name__,
)
def test_a_wrong_sink_is_caught(wrong: type[SqliteSink], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each wrong sink fails the case that was written for its mistake."""
    monkeypatch.setattr(example, "SqliteSink", wrong)
    if wrong in DIES_INSIDE:
        monkeypatch.setattr(Target, "source_files", lambda _: {__file__})
    target = example.SqliteOutput(tmp_path)
    case = BY_NAME[WRONG[wrong]]
    with pytest.raises((AssertionError, SinkRejectedError, sqlite3.Error)) as reported:
        case.check(target)
    assert str(reported.value)


def test_each_case_has_a_name_of_its_own_and_says_its_rule() -> None:
    """Names are test ids, and each rule is a sentence."""
    assert len(BY_NAME) == len(CASES)
    assert all(case.rule.endswith(".") for case in CASES)
