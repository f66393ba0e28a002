"""`sink describe|check|vacuum` of folders, Delta tables and Kafka topics, without Spark and Kafka."""

import json
from pathlib import Path

import pytest

from marshal_dagster.cli.main import run
from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks import ReportingSink
from marshal_dagster.sinks.conformance.target import ahead, deliver, part
from marshal_dagster.sinks.delta import report
from marshal_dagster.sinks.delta.commit import Commit
from marshal_dagster.sinks.kafka.notes import GroupsNote, PositionNote
from marshal_dagster.sinks.kafka.report import note_problems
from tests.fast.test_sink_delta import DeltaTarget, FakeTable
from tests.fast.test_sink_kafka import KafkaTarget
from tests.sink_conformance import deliver as deliver_to
from tests.sink_outputs import FileOutput, visible_name

SINK = "tests.fast.test_sink_reports:orders"


@pytest.fixture
def folder(tmp_path: Path) -> FileOutput:
    """Two partitions in order, one of them in two generations, and one in any order."""
    output = FileOutput(tmp_path / "output")
    for start in (0, 10, 20):
        deliver_to(output, "a", part(0, start, start + 10), part(1, start, start + 10))
    deliver_to(output, "a", ahead(2, 0, 10))
    deliver_to(output, "a", ahead(2, 20, 30))
    deliver_to(output, "b", part(1, 15, 40, generation=20, epoch=21))
    return output


def test_a_folder_is_described_by_its_commits(folder: FileOutput) -> None:
    """Each generation is described, and a gap is normal if ranges come in any order."""
    found = [
        (stored.partition, stored.generation, stored.start, stored.end, stored.ranges, stored.gaps, stored.is_current)
        for stored in folder.sink().describe().generations
    ]
    assert found == [
        (0, 0, 0, 30, 3, 0, True),
        (1, 0, 0, 30, 3, 0, False),
        (1, 20, 15, 40, 1, 0, True),
        (2, 0, 0, 30, 2, 1, True),
    ]
    assert [stored.in_any_order for stored in folder.sink().describe().generations] == [False, False, False, True]
    assert folder.sink().check() == []


def test_a_check_of_a_folder_names_missing_files_gaps_and_overlaps(folder: FileOutput) -> None:
    """Each fault is one line."""
    commits = folder.path / "_marshal/commits"
    first, second = (json.loads((commits / f"{number:020}.json").read_text()) for number in (1, 2))
    name = visible_name(f"attempts/{first['attempt']}/{first['ranges'][0]['files'][0]}")
    (folder.path / name).unlink()
    (problem,) = folder.sink().check()
    assert problem.startswith("commit 1, t/0 [0, 10)")
    assert problem.endswith(f"{name} is missing")
    second["ranges"][0] |= {"start": 12, "first_readable": 12}
    second["ranges"][1]["start"] = 8
    second["ranges"][1]["files"] = []
    (commits / f"{2:020}.json").write_text(json.dumps(second))
    assert folder.sink().check()[:2] == [
        "group 'g', t/0, generation 0: gaps between its ranges, which come in order: 1",
        "group 'g', t/1, generation 0: ranges that overlap the one before them: 1",
    ]
    (commits / f"{2:020}.json").write_text("{")
    assert "is damaged" in folder.sink().check()[0]


@pytest.mark.slow
def test_a_check_names_files_that_nobody_committed_and_those_that_are_not_visible(
    folder: FileOutput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another engine reads the first and does not find the second. A check moves nothing."""
    own = folder.path / "day=1" / "mine.json"
    own.parent.mkdir()
    own.write_text("{}")
    (folder.path / "_SUCCESS").write_text("")
    assert folder.sink().check() == [f"files that no commit has, which other engines read: 1, such as {own}"]
    own.unlink()
    sink = folder.sink()
    sink._clear_quietly = lambda attempt: None  # type: ignore[method-assign]  # noqa: ARG005
    deliver_to(folder, "a", part(0, 30, 40), sink=sink)
    for _ in range(2):
        (problem,) = folder.sink().check()
        assert problem.endswith("its files are not visible yet. Run `marshal-dagster sink vacuum`")
    result = folder.sink().vacuum(dry_run=True)
    assert (result.obsolete, result.completed) == (0, 1)
    monkeypatch.setattr("tests.fast.test_sink_reports.orders", folder.sink, raising=False)
    assert run(["sink", "vacuum", "--sink", SINK, "--yes"]) == 0
    printed = capsys.readouterr().out
    assert "1 attempts were committed: their files are moved to their places." in printed
    assert "Done: 1 attempts were completed, and 0 were deleted." in printed
    assert folder.sink().check() == []


@pytest.mark.slow
def test_a_check_beside_a_writer_raises_no_alarm(folder: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a writer commits while the files are listed, the check begins again."""
    sink, looks = folder.sink(), list[int]()
    listed = sink._storage.files_below

    def late(name: str) -> list[str] | None:
        looks.append(1)
        if len(looks) == 1:
            deliver_to(folder, "b", part(1, 15, 30, generation=30, epoch=31))
        return listed(name)

    monkeypatch.setattr(sink._storage, "files_below", late)
    assert sink.check() == []
    assert len(looks) == 2


@pytest.mark.slow
def test_a_check_counts_the_rows_of_parquet_files(folder: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with another number of rows, and files that cannot be read, are faults."""
    sink = folder.sink()
    sink.format = "parquet"
    commit = json.loads((folder.path / f"_marshal/commits/{1:020}.json").read_text())
    commit["ranges"][0]["rows"] = 10
    (folder.path / f"_marshal/commits/{1:020}.json").write_text(json.dumps(commit))
    monkeypatch.setattr(type(sink._storage), "rows", lambda *_: 4)
    assert [problem.partition(": ")[2] for problem in sink.check()] == [
        "its files have 8 rows, of 10 that were committed"
    ]

    def damaged(*_: object) -> int:
        raise SinkRejectedError("no footer")

    monkeypatch.setattr(type(sink._storage), "rows", damaged)
    (problem,) = sink.check()
    assert problem.endswith("cannot be read: no footer")


@pytest.mark.slow
def test_a_vacuum_of_a_folder_removes_attempts_that_cannot_commit(
    folder: FileOutput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run changes nothing."""

    class DiedError(BaseException):
        """The end of a process."""

    def reached(step: str) -> None:
        if step == "judged":
            raise DiedError

    dead = folder.sink(reached)
    dead._clear_quietly = lambda attempt: None  # type: ignore[method-assign]  # noqa: ARG005
    with pytest.raises(DiedError):
        deliver_to(folder, "dead", part(0, 30, 40), sink=dead)
    monkeypatch.setattr("tests.fast.test_sink_reports.orders", folder.sink, raising=False)
    assert run(["sink", "vacuum", "--sink", SINK, "--dry-run"]) == 0
    assert "1 attempts: 0 can be merged, 0 deleted. 1 stay." in capsys.readouterr().out
    sink = folder.sink()
    sink._sweep_quietly = lambda: None  # type: ignore[method-assign]
    deliver_to(folder, "b", part(0, 30, 40, epoch=20), sink=sink)
    rows = folder.rows()
    assert [folder.sink().vacuum(dry_run=True).obsolete for _ in range(2)] == [1, 1]
    assert run(["sink", "vacuum", "--sink", SINK, "--yes"]) == 0
    assert "Done: 1 attempts were deleted." in capsys.readouterr().out
    assert folder.sink().vacuum(dry_run=True).obsolete == 0
    assert folder.rows() == rows
    assert folder.sink().check() == []


def test_a_topic_is_described_by_its_notes(tmp_path: Path) -> None:
    """The note of a partition has its position, and the offsets of which there may be records."""
    target = KafkaTarget(tmp_path)
    deliver(target, "a", part(0, 5, 10), part(1, 0, 3))
    deliver(target, "a", part(1, 3, 9), rows=[])
    found = [
        (stored.partition, stored.start, stored.end, stored.rows) for stored in target.sink().describe().generations
    ]
    assert found == [(0, 5, 10, None), (1, 0, 9, None)]
    assert target.sink().check() == []
    assert "compaction" in (target.sink().vacuum(dry_run=False).hint or "")
    sink = target.sink()
    sink.topic_id = "created again"
    assert len(sink.check()) == 2
    assert "former output topic" in sink.check()[0]


def test_notes_that_do_not_fit() -> None:
    """A damaged note, one of a newer version and a missing group are faults."""
    note = PositionNote.after(None, part(0, 0, 3), "topic", has_rows=True).to_json()
    notes = {
        "out/g/t/-1": GroupsNote(("another",)).to_json(),
        "out/g/t/0": note,
        "out/g/t/1": b"{",
        "out/g/t/2": b'{"version": 99}',
        "elsewhere/g/t/0": b"{",
    } | {"out//t/-1": GroupsNote(("another",)).to_json()}
    found = list(note_problems(notes, "out/", "topic"))
    assert len(found) == 3
    assert "lacks this group" in found[0]
    assert "damaged" in found[1]
    assert "version 99" in found[2]


def test_a_delta_table_is_described_by_its_newest_commit(tmp_path: Path) -> None:
    """It has a position for each partition. Another table's positions are a fault."""
    target = DeltaTarget(tmp_path)
    deliver(target, "a", part(0, 5, 10), part(1, 0, 3))
    report = target.sink().describe()
    assert [(stored.partition, stored.start, stored.end) for stored in report.generations] == [
        (0, None, 10),
        (1, None, 3),
    ]
    assert "VACUUM delta.`" in (target.sink().vacuum(dry_run=False).hint or "")
    sink = target.sink()
    deliver(target, "a", part(0, 10, 20))
    sink.fake.id = "another table"  # type: ignore[attr-defined]
    assert "dropped and re-created" in sink.check()[0]
    assert isinstance(sink, ReportingSink)


def test_a_check_of_a_delta_table_beside_a_writer_raises_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a writer commits before the rows are read, the check begins again."""
    target = DeltaTarget(tmp_path)
    deliver(target, "a", part(0, 0, 3))
    looks: list[int] = []

    def problems(commit: Commit, _: object) -> list[str]:
        looks.append(commit.number)
        if len(looks) == 1:
            deliver(target, "a", part(0, 3, 6))
        return [] if commit.number > 1 else ["rows of ranges up to 6, but the stored position is 3"]

    monkeypatch.setattr(report, "row_problems", problems)
    monkeypatch.setattr(FakeTable, "frame", lambda _: None, raising=False)
    assert target.sink().check() == []
    assert looks == [1, 2]
    monkeypatch.setattr(report, "row_problems", lambda *_: ["a fault"])
    assert target.sink().check() == ["a fault"]
