"""The conformance kit: the example's right sink passes all of it, and each wrong one is caught."""

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
    """The test that the documentation shows holds, as it stands there."""
    monkeypatch.setattr(Target, "most_steps", 20)
    example.test_the_sink_conforms(case, tmp_path)


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_the_file_sink_passes(case: Case, tmp_path: Path) -> None:
    """So does the library's own sink of files, which dies and meets others in `test_sink_rules_files`."""
    case.check(OutputTarget(FileOutput(tmp_path / "output")))


@pytest.mark.parametrize("check", GROUP_CHECKS)
def test_another_group(check: Callable[[Target], None], tmp_path: Path) -> None:
    """An output is one group's, and those that follow on it."""
    check(OutputTarget(FileOutput(tmp_path / "output")))


# Wrong sinks


class Forgets(SqliteSink):
    """Takes whatever comes: no idempotence."""

    def _judge(self, _: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        return dict.fromkeys(ranges, Verdict.TAKE)


class PerBatch(SqliteSink):
    """Knows batches, not ranges: one is done when all of it is."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts = super()._judge(database, ranges)
        if set(verdicts.values()) == {Verdict.SKIP}:
            return verdicts
        return {each: Verdict.TAKE if verdict is Verdict.SKIP else verdict for each, verdict in verdicts.items()}


class PerBatchId(SqliteSink):
    """Knows a batch by its ranges together: a part of it is another batch."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts = super()._judge(database, ranges)
        (newest,) = database.execute("SELECT count(*) FROM taken").fetchone()
        if set(verdicts.values()) == {Verdict.SKIP} and len(ranges) != newest:
            return dict.fromkeys(verdicts, Verdict.TAKE)
        return verdicts


class IgnoresEpochs(SqliteSink):
    """Lets a zombie write."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        now = {replace(range_, epoch=2**62): range_ for range_ in ranges}
        return {now[each]: verdict for each, verdict in super()._judge(database, list(now)).items()}


class TakesOneRefused(SqliteSink):
    """Takes what is refused for one reason."""

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
    """Lets one write that was at work before the position was set."""

    ignored = "is older than"


class IgnoresGaps(TakesOneRefused):
    """Takes a range wherever it starts."""

    ignored = "neither the range's start"


class IgnoresTopicIds(SqliteSink):
    """Takes a topic that was made anew for the one of before."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        same = "coordination-topic-id-", "the-first-data-topic--"
        now = {replace(range_, coordination_topic_id=same[0], data_topic_id=same[1]): range_ for range_ in ranges}
        return {now[each]: verdict for each, verdict in super()._judge(database, list(now)).items()}


class WritesBeforeItJudges(SqliteSink):
    """Has rows of refused batches: they are committed before the ranges."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write, then ask."""
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
    """Judges when it is asked, and not again in the transaction of the rows."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._known: dict[ClaimedRange, Verdict] = {}

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        if not set(ranges) <= self._known.keys():
            self._known |= super()._judge(database, ranges)
        return {range_: self._known[range_] for range_ in ranges}


class UndoesInFinally(TwoTransactions):
    """Removes rows whose ranges did not come through: but the dead remove nothing."""

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        is_done = False
        try:
            super()._insert(database, taken, rows)
            is_done = True
        finally:
            if not is_done:
                database.executemany('DELETE FROM result WHERE partition = ? AND "offset" = ? AND value = ?', rows)


class ForgetsEmptyRanges(SqliteSink):
    """Keeps ranges with the rows, and so none that has no row."""

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
    """Asks nothing of groups."""

    def __init__(self, path: str, *, shared_by_groups: bool = True) -> None:  # noqa: ARG002
        super().__init__(path, shared_by_groups=True)


class ChecksGroupsEarly(SqliteSink):
    """Asks which group has the output in `verdicts` alone."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        verdicts = super()._judge(database, ranges)
        self._groups = replace(self._groups, shared_by_groups=True)
        return verdicts


class DropsForeignRows(SqliteSink):
    """Leaves rows of other partitions out and says nothing."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write what fits."""
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
        """Write at once."""
        before_commit = lambda: None  # noqa: E731
        return super().write(frame, ranges, offsets_read, before_commit)


class AsksTheBatchFirst(SqliteSink):
    """Calls `before_commit` ahead of the rows."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Ask, then read."""
        before_commit()
        return super().write(frame, ranges, offsets_read)


class AppendsInANewGeneration(SqliteSink):
    """Says that it replaces, and adds."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, _: Sequence[tuple[int, int]]) -> None:
        super()._replace(database, wanted, ())


class ReplacesWholeRanges(SqliteSink):
    """Removes rows of messages that nobody read again."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, offsets: Sequence[tuple[int, int]]) -> None:  # noqa: ARG002
        super()._replace(database, wanted, [(wanted.start, wanted.end)])


class ReplacesBeyond(SqliteSink):
    """Removes rows of messages that are not of its range."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, offsets: Sequence[tuple[int, int]]) -> None:
        super()._replace(database, replace(wanted, start=0, first_readable=0, end=2**62), offsets)


class ReplacesWhatIsWritten(SqliteSink):
    """Removes old rows only where it has new ones."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,  # noqa: ARG002
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write without asking what was read."""
        return super().write(frame, ranges, dict, before_commit)


class ReplacesOtherTopics(SqliteSink):
    """Removes rows of a topic of the same name that was made anew."""

    def _replace(self, database: sqlite3.Connection, wanted: ClaimedRange, offsets: Sequence[tuple[int, int]]) -> None:
        for topic_id in ("the-first-data-topic--", "made-anew"):
            super()._replace(database, replace(wanted, data_topic_id=topic_id), offsets)


class RefusesAfterAll(SqliteSink):
    """Says that it can replace, and refuses when it should."""

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> Mapping[ClaimedRange, Verdict]:
        """Refuse every new generation."""
        verdicts = super().verdicts(ranges)
        if any(range_.generation for range_ in ranges):
            raise SinkRejectedError("no")
        return verdicts


class TakesRowsWithoutOffsets(SqliteSink):
    """Lets rows in that it cannot replace, and does not say so."""

    def _check_offsets(self, rows: Sequence[tuple[int, int | None, str]]) -> None:
        rows[:] = [(partition, -1 if at is None else at, value) for partition, at, value in rows]  # type: ignore[index]


class DropsEqualRows(SqliteSink):
    """Takes rows that are equal for one that came twice."""

    def _insert(self, database: sqlite3.Connection, taken: ClaimedRange, rows: Sequence[tuple[int, int, str]]) -> None:
        super()._insert(database, taken, sorted(set(rows)))


class ReadsTheOffsetsLast(SqliteSink):
    """Does not call `before_commit` again behind `offsets_read`."""

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Ask the batch once."""
        asked: list[str] = []

        def once() -> None:
            if not asked:
                asked.append("batch")
                before_commit()

        return super().write(frame, ranges, offsets_read, once)


class NamesInTheStatement(SqliteSink):
    """Puts names into its SQL as they are."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        for each in ranges:
            database.execute(f"SELECT * FROM taken WHERE \"group\" = '{each.group}'")  # noqa: S608 - the fault
        return super()._judge(database, ranges)


class PositionOnly(SqliteSink):
    """Says that it takes ranges in any order, and keeps a position."""

    def _judge(self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        now = {replace(range_, in_any_order=False): range_ for range_ in ranges}
        return {now[each]: verdict for each, verdict in super()._judge(database, list(now)).items()}


class TakesRangesInSecret(SqliteSink):
    """Says that it takes no ranges in any order, and takes them."""

    supports_unordered_ranges = False


class NoLock(SqliteSink):
    """Judges and writes in a transaction that is not alone."""

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
    IgnoresTopicIds: "other_topics_made_anew",
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
    NeverAsksTheBatch: "batch_says_no",
    AsksTheBatchFirst: "batch_says_no",
    AppendsInANewGeneration: "inside_an_older_range",
    ReplacesWholeRanges: "what_was_not_read_stays",
    ReplacesBeyond: "rows_at_other_offsets",
    ReplacesWhatIsWritten: "read_without_rows",
    ReplacesOtherTopics: "other_data_topic",
    RefusesAfterAll: "inside_an_older_range",
    TakesRowsWithoutOffsets: "some_rows_without_offsets",
    DropsEqualRows: "several_rows_of_a_message",
    ReadsTheOffsetsLast: "batch_says_no_to_the_offsets",
    NamesInTheStatement: "groups_and_topics_apart",
    PositionOnly: "ranges_in_any_order",
    TakesRangesInSecret: "ranges_in_any_order",
    NoLock: "overtaken_at_any_step",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_sink_is_caught(wrong: type[SqliteSink], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The case made for its fault tells of it."""
    monkeypatch.setattr(example, "SqliteSink", wrong)
    target = example.SqliteOutput(tmp_path)
    case = BY_NAME[WRONG[wrong]]
    with pytest.raises((AssertionError, SinkRejectedError, sqlite3.Error)) as told:
        case.check(target)
    assert str(told.value)


def test_each_case_has_a_name_of_its_own_and_says_its_rule() -> None:
    """Names are test ids; the rule is a sentence."""
    assert len(BY_NAME) == len(CASES)
    assert all(case.rule.endswith(".") for case in CASES)
