"""`sink describe|check|vacuum` and the vacuum of a database output, with the dialect of the documentation."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from marshal_dagster.cli.main import run
from marshal_dagster.errors import SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import FileSink
from marshal_dagster.sinks.conformance.target import ahead, deliver, part, rows_of
from marshal_dagster.sinks.database.dialect import TransactionConflictError
from tests import cli
from tests.fast.test_database_dialect import SqliteOutput
from tests.fast.test_sink_upsert import SqliteUpserts


@pytest.fixture
def output(tmp_path: Path) -> SqliteOutput:
    """Two partitions in order, and one in any order."""
    output = SqliteOutput(tmp_path)
    for start in range(0, 50, 10):
        deliver(output, "a", part(0, start, start + 10), part(1, start, start + 10))
        if start != 20:
            deliver(output, "a", ahead(2, start, start + 10))
    return output


def execute(output: SqliteOutput, statement: str) -> list[tuple[Any, ...]]:
    """Run a statement."""
    with closing(sqlite3.connect(output.path, isolation_level=None)) as database:
        return database.execute(statement).fetchall()


def entries(output: SqliteOutput) -> list[tuple[int, int, int]]:
    """Return partition, start and end of each entry."""
    return execute(
        output,
        'SELECT "partition", start_offset, end_offset FROM marshal_taken_ranges ORDER BY "partition", start_offset',
    )


def test_a_vacuum_merges_adjacent_ranges_and_changes_no_row(output: SqliteOutput) -> None:
    """The last range of each partition stays. Ranges around a gap are not merged. A second vacuum finds nothing."""
    before = output.found()
    planned = output.sink().vacuum(dry_run=True)
    assert (planned.entries, planned.merged, planned.obsolete, planned.moved_rows) == (14, 7, 0, None)
    assert len(entries(output)) == 14
    done = output.sink().vacuum(dry_run=False)
    assert (done.merged, done.moved_rows) == (7, 70)
    assert entries(output) == [(0, 0, 40), (0, 40, 50), (1, 0, 40), (1, 40, 50), (2, 0, 20), (2, 30, 40), (2, 40, 50)]
    assert output.found() == before
    assert output.sink().check() == []
    assert output.sink().vacuum(dry_run=False).merged == 0


@pytest.mark.parametrize("conflicts", [10, 11])
def test_a_vacuum_begins_a_transaction_again_up_to_ten_times(output: SqliteOutput, conflicts: int) -> None:
    """A writer of the partition can end it by a deadlock. After that the last error is raised."""
    sink = output.sink()
    remove, left = sink._maintenance._ranges.remove, [TransactionConflictError("a deadlock")] * conflicts

    def remove_later(*given: Any) -> None:  # noqa: ANN401 - its arguments
        if left:
            raise left.pop()
        remove(*given)

    sink._maintenance._ranges.remove = remove_later  # type: ignore[method-assign,assignment]
    if conflicts == 10:
        assert sink.vacuum(dry_run=False).merged == 7
        return
    with pytest.raises(UnavailableError, match="a deadlock"):
        sink.vacuum(dry_run=False)
    assert len(entries(output)) == 14


@pytest.mark.slow
def test_ranges_that_come_again_after_a_vacuum_are_skipped(output: SqliteOutput) -> None:
    """Also one that is within a merged entry. New ranges are taken, and one that overlaps in part is refused."""
    before = output.found()
    output.sink().vacuum(dry_run=False)
    for again in (part(0, 40, 50), ahead(2, 10, 20), ahead(2, 0, 10), ahead(2, 40, 50)):
        assert output.sink().verdicts([again]) == {again: Verdict.SKIP}
        deliver(output, "b", again)
    for overlapping in (ahead(2, 15, 25), ahead(2, 25, 35), part(0, 30, 40)):
        with pytest.raises(SinkRejectedError):
            output.sink().verdicts([overlapping])
    assert output.found() == before
    deliver(output, "b", part(0, 50, 60), ahead(2, 20, 30))
    assert output.found() == sorted([*before, *rows_of("b", part(0, 50, 60), part(2, 20, 30))])
    output.sink().vacuum(dry_run=False)
    assert entries(output) == [(0, 0, 50), (0, 50, 60), (1, 0, 40), (1, 40, 50), (2, 0, 40), (2, 40, 50)]
    assert output.sink().check() == []


@pytest.mark.slow
def test_a_generation_replaces_rows_of_merged_ranges(output: SqliteOutput) -> None:
    """Entries whose rows are all replaced are deleted then, and the older generation is still refused."""
    output.sink().vacuum(dry_run=False)
    newer = part(0, 0, 50, generation=1, epoch=20)
    deliver(output, "b", newer)
    assert [row for row in output.found() if row[0] == 0] == rows_of("b", part(0, 0, 50))
    done = output.sink().vacuum(dry_run=False)
    assert (done.obsolete, done.merged) == (2, 0)
    with pytest.raises(SinkRejectedError):
        output.sink().verdicts([part(0, 50, 60)])
    deliver(output, "c", part(0, 10, 20, generation=2, epoch=30))
    assert len(output.found()) == 5 * 10 * 2 + 40
    assert output.sink().check() == []


def test_a_merged_range_with_rows_without_offsets_is_not_replaced(tmp_path: Path) -> None:
    """One such row in a merged range is enough."""
    output = SqliteOutput(tmp_path)
    for start in (0, 10, 20):
        rows = [(0, None if start == 10 else start, "a")]
        output.sink().write(output.frame(rows), [part(0, start, start + 10)], dict)
    output.sink().vacuum(dry_run=False)
    assert "no column 'offset'" in (output.sink().can_replace([part(0, 0, 10, generation=1)]) or "")


def test_a_vacuum_of_upserts_keeps_what_refuses_a_generation(tmp_path: Path) -> None:
    """Rows that were replaced have left no trace but the entry of their range."""
    table = SqliteUpserts(tmp_path)
    for generation, start in ((0, 0), (0, 10), (0, 20), (1, 30)):
        wanted = part(0, start, start + 10, generation=generation, epoch=10 * generation + 1)
        table.write([(0, start, 1, str(start), 0)], wanted)
    done = table.upserting().vacuum(dry_run=False)
    assert (done.merged, done.obsolete) == (1, 0)
    assert table.upserting().check() == []
    again = part(0, 25, 40, generation=2, epoch=40)
    with pytest.raises(SinkRejectedError, match="Reset the position to 0"):
        table.write([], again)
    table.write([(0, 41, 1, "new", 0)], part(0, 40, 50, generation=1, epoch=20))
    assert [row[3] for row in table.rows()] == ["new"]


PROBLEMS = [
    (
        'DELETE FROM marshal_taken_ranges WHERE "partition" = 0 AND start_offset = 10',
        "come in order: 1",
        "belong to no range: 10",
    ),
    (
        'UPDATE marshal_taken_ranges SET start_offset = 5 WHERE "partition" = 2 AND start_offset = 10',
        "overlap the one before them: 1",
    ),
    ('UPDATE marshal_ranges SET position = 60 WHERE "partition" = 1', "position is 60, but its last range ends at 50"),
    ("UPDATE orders SET kafka_offset = 77 WHERE kafka_partition = 0 AND kafka_offset = 7", "of their range: 1"),
    (
        "UPDATE orders SET kafka_partition = 1 WHERE kafka_partition = 0 AND kafka_offset = 7",
        "of their range: 1",
    ),
    (
        "INSERT INTO orders SELECT * FROM orders WHERE kafka_partition = 0 AND kafka_offset = 7",
        "t/0 [0, 10): the table has 11 rows of this range, of which the sink wrote 10",
    ),
]


@pytest.mark.parametrize(("statement", "found"), [(statement, found) for statement, *found in PROBLEMS])
def test_a_check_names_what_is_wrong(output: SqliteOutput, statement: str, found: Sequence[str]) -> None:
    """Each fault is one line or two, and nothing else is reported."""
    assert output.sink().check() == []
    execute(output, statement)
    problems = output.sink().check()
    assert len(problems) == len(found)
    assert all(any(text in problem for problem in problems) for text in found)


class Called:
    """The command line, with the sink of a module that was imported for it."""

    def __init__(
        self, output: SqliteOutput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.capsys = capsys
        monkeypatch.setattr("tests.fast.test_sink_maintenance.orders", output.sink, raising=False)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """Run a command, and return what it writes."""
        answer = cli.call(self.capsys, "sink", *arguments, "--sink", "tests.fast.test_sink_maintenance:orders")
        assert answer.code == code
        return answer.out


@pytest.mark.slow
def test_the_commands(
    output: SqliteOutput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They show the ranges, find that all is well, and merge entries after a dry run."""
    call = Called(output, monkeypatch, capsys)
    shown = call("describe").splitlines()
    assert shown[0] == "Output: table main.orders"
    assert shown[2].split() == ["g", "t", "0", "0", "0", "50", "5", "50", "0", "-"]
    assert shown[4].split() == ["g", "t", "2", "0", "0", "50", "4", "40", "1", "in", "any", "order"]
    assert json.loads(call("describe", "--json"))["generations"][1]["partition"] == 1
    assert call("check") == "The output is whole.\n"
    assert "14 entries: 7 can be merged, 0 deleted. 7 stay." in call("vacuum", "--dry-run")
    assert len(entries(output)) == 14
    assert json.loads(call("vacuum", "--yes", "--json"))["moved_rows"] == 70
    assert len(entries(output)) == 7
    execute(output, "UPDATE orders SET marshal_range = 99 WHERE kafka_partition = 0")
    assert json.loads(call("check", "--json", code=1)) == {
        "format_version": 1,
        "problems": ["rows that belong to no range: 50. Another writer wrote them, or their range was deleted"],
    }
    assert call("vacuum", "--json", code=2) == ""


def test_an_output_without_ranges_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its path may be misspelt, or all of it may be gone."""
    module = "tests.fast.test_sink_maintenance"
    monkeypatch.setattr(f"{module}.orders", FileSink(tmp_path / "typo"), raising=False)
    answer = cli.call(capsys, "sink", "check", "--sink", f"{module}:orders", "--json")
    assert answer.code == 1
    (problem,) = answer.json["problems"]
    assert problem.startswith(f"folder {tmp_path / 'typo'} has no ranges, so there is nothing to check")


def test_a_sink_that_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The error is one line."""
    assert run(["sink", "check", "--sink", "tests.fast.test_sink_maintenance:silent"]) == 2
    assert "cannot be described. Name a sink" in capsys.readouterr().err


class SilentSink:
    """A sink without reports."""

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> None:
        """Accept each range."""


def silent() -> SilentSink:
    """Return a sink without reports."""
    return SilentSink()
