"""The rules of the file sink, with rows of plain Python in place of Spark's."""

import errno
import gc
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from py4j.protocol import Py4JNetworkError

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import FileSink
from marshal_dagster.sinks.files import commit_log
from marshal_dagster.sinks.files.commit_log import Commit, CommitView, Entry, decided
from marshal_dagster.sinks.files.hadoop_storage import HadoopStorage
from marshal_dagster.sinks.files.places import show
from marshal_dagster.sinks.files.storage import LocalStorage
from marshal_dagster.spark import connect
from tests.conditions import WITHIN_S
from tests.sink_conformance import (
    AnyOrderConformance,
    CrashConformance,
    Frame,
    HistoryConformance,
    KillConformance,
    Output,
    ReplacingConformance,
    Row,
    SinkConformance,
    ahead,
    deliver,
    intervals,
    never,
    part,
    rows_of,
)
from tests.sink_outputs import FILE_STEPS, REPLACING_STEPS, FakeFileSink, FileOutput
from tests.sink_process import KILLED, die, write_and_die

__all__ = ["die"]


@pytest.fixture
def output(tmp_path: Path) -> FileOutput:
    """Return an output in an empty folder."""
    return WatchedOutput(tmp_path / "output")


def listed(path: Path) -> list[Path]:
    """Return the files that an engine finds which lists a folder: all but those whose names or folders are hidden."""
    found: list[Path] = []
    for parent, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] not in "._"]
        found += [Path(parent, name) for name in names if name[0] not in "._"]
    return found


def listed_rows(path: Path) -> list[Row]:
    """Return the rows that an engine reads from a folder. It lists again if a file was removed before it was read."""
    while True:
        try:
            rows = [json.loads(line) for file in listed(path) for line in file.read_text().splitlines()]
        except FileNotFoundError:
            continue
        return sorted(
            (row["partition"], -1 if row.get("offset") is None else row["offset"], row["value"]) for row in rows
        )


def by_offset(rows: Sequence[Row]) -> dict[tuple[int, int], Counter[Row]]:
    """Return the rows by partition and offset."""
    found: dict[tuple[int, int], Counter[Row]] = {}
    for row in rows:
        found.setdefault(row[:2], Counter())[row] += 1
    return found


class WatchedOutput(FileOutput):
    """An output that an engine lists at each step of each writer."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._committed: list[dict[tuple[int, int], Counter[Row]]] = []

    def sink(self, reached: Callable[[str], None] | None = None) -> FileSink:
        """Return a sink that is watched."""

        def looks(step: str) -> None:
            self.look()
            if reached is not None:
                reached(step)

        return super().sink(looks)

    def look(self) -> None:
        """Check that the rows that are visible at one offset are rows that one state of the output had there."""
        visible, state = by_offset(listed_rows(self.path)), by_offset(self.rows())
        if state not in self._committed:
            self._committed.append(state)
        for place, rows in visible.items():
            assert any(rows <= known.get(place, Counter()) for known in reversed(self._committed))

    def sweep(self) -> None:
        """Sweep as another process would. Then exactly the rows that count are visible."""
        super().sweep()
        assert listed_rows(self.path) == self.rows()


class HiddenOutput(FileOutput):
    """An output whose committed files stay in the folders of the attempts, as those of older versions do."""

    steps: ClassVar[Sequence[str]] = [step for step in FILE_STEPS if step != "file moved"]

    def sink(self, reached: Callable[[str], None] | None = None) -> FileSink:
        """Return a sink on a file system where a move is not atomic."""
        sink = super().sink(reached)
        sink._storage.can_move = lambda: False  # type: ignore[method-assign]
        return sink


class TestTaking(SinkConformance):
    """Taking, skipping and refusing ranges."""


class TestReplacing(ReplacingConformance):
    """New generations."""


class TestCrashes(CrashConformance):
    """Crashes and races."""


class TestAnyOrder(AnyOrderConformance):
    """Ranges in any order."""


class InHiddenFiles:
    """The same cases where committed files are not moved."""

    @pytest.fixture
    def output(self, tmp_path: Path) -> FileOutput:
        """Return an output in an empty folder."""
        return HiddenOutput(tmp_path / "output")


class TestTakingHidden(InHiddenFiles, SinkConformance):
    """Taking, skipping and refusing ranges."""


class TestReplacingHidden(InHiddenFiles, ReplacingConformance):
    """New generations."""


class TestCrashesHidden(InHiddenFiles, CrashConformance):
    """Crashes and races."""


@pytest.mark.thorough
class TestKills(KillConformance):
    """SIGKILL."""


@pytest.mark.thorough
class TestHistories(HistoryConformance):
    """Random histories compared with a model."""


@pytest.mark.thorough
class TestHistoriesHidden(InHiddenFiles, HistoryConformance):
    """The same where committed files are not moved."""


def commit_files(output: FileOutput) -> list[Path]:
    """Return the commit files in order."""
    return sorted((output.path / "_marshal" / "commits").iterdir())


def everything(output: FileOutput) -> set[str]:
    """Return the paths of all files of attempts."""
    attempts = output.path / "_marshal" / "attempts"
    return {str(path.relative_to(attempts)) for path in attempts.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_nothing_is_ever_overwritten(output: FileOutput) -> None:
    """Over many batches and generations no file is changed: one that is still there is the same as it was."""
    seen: dict[Path, tuple[int, bytes]] = {}
    for step in range(12):
        deliver(output, f"v{step}", part(0, step, step + 4, generation=step, epoch=step))
        for path, (inode, content) in seen.items():
            is_rewritten = "_marshal" not in path.parts and path not in output.sink().committed_files()
            assert path.exists() != is_rewritten
            assert is_rewritten or (path.stat().st_ino, path.read_bytes()) == (inode, content)
        kept = [*commit_files(output), *output.sink().committed_files()]
        seen = {path: (path.stat().st_ino, path.read_bytes()) for path in kept}
    assert len(commit_files(output)) == 12


@pytest.mark.slow
def test_checkpoints_stand_for_the_commits_before_them(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process that reads the newest checkpoint and the later commits has the same view as from all commits."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 4)
    for start in range(0, 22, 2):
        deliver(output, str(start), part(0, start, start + 2))
    deliver(output, "new", part(0, 3, 9, generation=50, epoch=51))
    checkpoints = sorted(path.name for path in (output.path / "_marshal" / "checkpoints").iterdir())
    assert checkpoints == [f"{number:020d}.json" for number in (8, 12)]
    by_all = output.rows()
    files = output.sink().committed_files()
    for path in commit_files(output)[:8]:
        path.rename(path.with_suffix(".aside"))
    assert output.sink().committed_files() == files
    assert output.sink().verdicts([part(0, 9, 11, generation=50, epoch=52)]) == {
        part(0, 9, 11, generation=50, epoch=52): Verdict.TAKE
    }
    for path in commit_files(output):
        path.rename(path.with_suffix(".json"))
    assert output.rows() == by_all


def test_a_lost_checkpoint_is_written_again(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the writer of a commit died before it wrote the checkpoint, the next writer writes it."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 3)
    for start in (0, 1):
        deliver(output, "a", part(0, start, start + 1))
    assert CrashConformance.dies(output, "linked", "a", part(0, 2, 3))
    assert not (output.path / "_marshal" / "checkpoints").exists()
    deliver(output, "a", part(0, 3, 4))
    names = [path.name for path in (output.path / "_marshal" / "checkpoints").iterdir()]
    assert names == [f"{3:020d}.json"]
    assert output.rows() == rows_of("a", part(0, 0, 4))


def test_a_newer_version_is_refused(output: FileOutput) -> None:
    """Commit files of a newer marshal-dagster are rejected, both for reading and for writing."""
    deliver(output, "a", part(0, 0, 2))
    newest = commit_files(output)[-1]
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"version": 4}))
    for use in (output.sink().committed_files, lambda: output.sink().verdicts([part(0, 2, 3)])):
        with pytest.raises(SinkRejectedError, match=r"has version 4, but this marshal-dagster supports only 3"):
            use()


def versions(output: FileOutput) -> list[int]:
    """Return the versions of the checkpoints and then of the commits, in order."""
    found = sorted(path for path in (output.path / "_marshal").glob("c*/*.json"))
    return [json.loads(path.read_text())["version"] for path in found]


def test_what_came_in_any_order_is_of_a_newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that an older marshal-dagster would misread have a newer version. All others keep the old one."""
    output = HiddenOutput(tmp_path)
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 2)
    for start in (0, 2):
        deliver(output, "a", part(0, start, start + 2))
    assert versions(output) == [1, 1, 1]
    notes: list[int] = []

    def reached(step: str) -> None:
        if step == "attempt noted":
            (note,) = (output.path / "_marshal" / "attempts").glob("*.json")
            notes.append(json.loads(note.read_text())["version"])

    deliver(output, "b", ahead(0, 6, 8), sink=output.sink(reached))
    deliver(output, "b", part(1, 0, 2), sink=output.sink(reached))
    assert notes == [2, 1]
    assert versions(output) == [1, 2, 1, 1, 2, 1]
    monkeypatch.setattr(commit_log, "VERSION", 1)  # the version that an older marshal-dagster knows
    with pytest.raises(SinkRejectedError, match="has version 2, but this marshal-dagster supports only 1"):
        output.sink().verdicts([part(0, 8, 9)])


def test_a_checkpoint_knows_each_range(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process that reads a checkpoint comes to the same verdicts as one that reads all commits."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 4)
    deliver(output, "a", part(0, 0, 4))
    for start in (8, 20, 16):
        deliver(output, "b", ahead(0, start, start + 4))
    for path in commit_files(output):
        path.rename(path.with_suffix(".aside"))
    expected = {ahead(0, 16, 20): Verdict.SKIP, ahead(0, 0, 4): Verdict.SKIP, ahead(0, 4, 8): Verdict.TAKE}
    assert {one: output.sink().verdicts([one])[one] for one in expected} == expected
    with pytest.raises(SinkRejectedError, match=r"holds \[8, 12\)"):
        output.sink().verdicts([ahead(0, 4, 12)])


@pytest.mark.thorough
def test_an_attempt_on_a_gap_is_not_swept(output: FileOutput) -> None:
    """Later ranges do not decide about a gap. The attempt is removed once its range is done or can never be done."""
    deliver(output, "a", ahead(0, 0, 5))
    write_and_die(output, "rows written", "dead", [ahead(0, 5, 10)])
    for start in (10, 15):
        deliver(output, "b", ahead(0, start, start + 5, epoch=50))
        assert output.sink().sweep() == 0
    deliver(output, "b", ahead(0, 8, 10, epoch=50))
    assert output.sink().sweep() == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 1}', '{"version": 1, "ranges": [{}]}', "\xff"])
def test_damage_is_refused(output: FileOutput, damage: str) -> None:
    """A damaged commit file stops reading and writing. The error names it."""
    deliver(output, "a", part(0, 0, 2))
    commit_files(output)[-1].write_bytes(damage.encode("latin-1"))
    with pytest.raises(SinkRejectedError, match=r"0001\.json (is damaged|has version)"):
        output.sink().verdicts([part(0, 2, 3)])


def test_a_missing_commit_is_noticed(output: FileOutput) -> None:
    """A missing commit is noticed by a new process, and by one that had read the commits before."""
    reader = output.sink()
    for start in (0, 2, 4):
        deliver(output, "a", part(0, start, start + 2))
    assert len(reader.committed_files()) == 6
    first, _, last = commit_files(output)
    first.rename(first.with_suffix(".aside"))
    with pytest.raises(SinkRejectedError, match="is missing, but there are later ones"):
        output.sink().verdicts([part(0, 6, 7)])
    last.unlink()
    with pytest.raises(SinkRejectedError, match="has disappeared"):
        reader.verdicts([part(0, 6, 7)])


@pytest.mark.thorough
def test_an_attempt_that_can_still_count_is_not_swept(output: FileOutput) -> None:
    """An attempt is removed only if the commits contain or rule out its ranges, however old it is.

    Committed files stay.
    """
    CrashConformance.dies(output, "none", "kept", part(3, 0, 2))
    for step, one in (("rows written", part(0, 0, 4)), ("judged", part(1, 0, 4))):
        write_and_die(output, step, "dead", [one, part(2, 10, 12)])
    before = everything(output)
    assert output.sink().sweep() == 0
    assert everything(output) == before
    deliver(output, "new", part(0, 0, 4, epoch=20))
    assert output.sink().sweep() == 0  # partition 2 is undecided in both
    deliver(output, "new", part(2, 10, 12, epoch=20))
    assert output.sink().sweep() == 1  # partition 1 is undecided in the other
    deliver(output, "new", part(1, 0, 2, epoch=20))
    assert output.sink().sweep() == 1
    assert everything(output) == set()
    assert len(listed(output.path)) == len(output.sink().committed_files()) == 8


@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize("is_done", [True, False], ids=["delivers", "begins"])
def test_who_comes_while_a_sweep_looks_loses_nothing(output: FileOutput, gap: int, *, is_done: bool) -> None:
    """What another writer does between the looks of a sweep is not taken for a left-over."""
    sweeper, looks = output.sink(), list[str]()
    lists, settles = sweeper._storage.names, sweeper._log.settled

    def looked(what: str) -> None:
        looks.append(what)
        if len(looks) == gap and is_done:
            deliver(output, "new", part(0, 0, 4))
        elif len(looks) == gap:
            write_and_die(output, "rows written", "new", [part(0, 0, 4)])

    def names(folder: str) -> list[str]:
        found = lists(folder)
        if folder == "_marshal/attempts":
            looked(folder)
        return found

    def settled() -> CommitView:
        view = settles()
        looked("commits")
        return view

    sweeper._storage.names, sweeper._log.settled = names, settled  # type: ignore[method-assign]
    assert sweeper.sweep() == 0
    assert len(looks) > gap
    rows = [name for name in everything(output) if name.endswith(".json") and "marshal_range" in name]
    assert len(rows) + len(listed(output.path)) >= 2
    assert output.rows() == (rows_of("new", part(0, 0, 4)) if is_done else [])


def test_what_a_killed_writer_added_is_kept_and_the_rest_swept(output: FileOutput) -> None:
    """If a writer died between its commit and its cleanup, only uncommitted files are removed."""
    write_and_die(output, "linked", "a", [part(0, 0, 4)])
    assert any(name.endswith("left") for name in everything(output))
    assert output.sink().sweep() == 1
    assert output.rows() == rows_of("a", part(0, 0, 4))
    assert not any(name.endswith(("left", "json")) and "marshal_range" not in name for name in everything(output))


def test_a_late_task_adds_nothing(output: FileOutput) -> None:
    """A file that appears in an attempt after its commit does not count. One in a removed attempt is removed."""
    deliver(output, "a", part(0, 0, 4))
    place = output.path / "_marshal" / "attempts" / output.sink().committed_files()[0].name.split("-")[1]
    (place / "marshal_range=0").mkdir(parents=True)
    (place / "marshal_range=0" / "part-late.json").write_text('{"partition": 0, "offset": 0, "value": "late"}\n')
    swept = output.path / "_marshal" / "attempts" / "f"
    swept.mkdir()
    (swept / "part-late.json").write_text("{}")
    assert output.rows() == rows_of("a", part(0, 0, 4))
    assert output.sink().sweep() == 2
    assert not swept.exists()
    assert not place.exists()
    assert listed_rows(output.path) == output.rows()


def test_sweeping_survives_what_it_does_not_know(output: FileOutput) -> None:
    """A damaged note stays. It stops the sweep, but no write."""
    deliver(output, "a", part(0, 0, 1))
    note = output.path / "_marshal" / "attempts" / "x.json"
    note.write_text("{")
    assert deliver(output, "a", part(0, 1, 2)).taken
    with pytest.raises(SinkRejectedError, match=r"x\.json is damaged"):
        output.sink().sweep()
    assert note.exists()


def test_another_format_is_refused(output: FileOutput) -> None:
    """A sink with another format is rejected, because all files of an output have one format."""
    deliver(output, "a", part(0, 0, 1))
    with pytest.raises(SinkRejectedError, match="holds json files, not parquet"):
        FileSink(output.path).verdicts([part(0, 1, 2)])


@pytest.mark.parametrize("path", ["file://host/x", "", "s3:x", Path("hdfs://host/x")])
def test_paths_that_are_none_are_refused(path: str | Path) -> None:
    """A file URI of another host, or a URI that `Path` has changed, is not a local path. The error explains it."""
    with pytest.raises(ConfigurationError, match="path is "):
        FileSink(path)


def test_a_file_system_of_hadoops_is_reached_through_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a session, or over Spark Connect, the error gives advice. No check runs before the output is used."""
    wanted = [part(0, 0, 1)]
    sink = FileSink("hdfs://host/output/")
    assert (sink.path, repr(sink)) == ("hdfs://host/output", "FileSink('hdfs://host/output', format='parquet')")
    with pytest.raises(ConfigurationError, match="there is no Spark session: start one before the batch is claimed"):
        sink.verdicts(wanted)
    monkeypatch.setattr(connect, "is_connect", lambda _: True)
    over_connect: Any = object()
    with pytest.raises(ConfigurationError, match="over Spark Connect there is no JVM here"):
        FileSink("hdfs://host/output", session=lambda: over_connect).verdicts(wanted)
    with pytest.raises(ConfigurationError, match="is only for Hadoop file systems"):
        FileSink("/output", exclusive="rename")


def test_paths_and_formats(tmp_path: Path) -> None:
    """A path, a file: URI with escapes and a relative path can name the same folder. A table format is rejected."""
    folder = tmp_path / "with space"
    assert FileSink(folder.as_uri()).path == FileSink(str(folder)).path == FileSink(folder).path == folder
    assert FileSink("some/where").path == Path.cwd() / "some" / "where"
    with pytest.raises(ConfigurationError, match="format is 'delta'"):
        FileSink(folder, format="delta")


@pytest.mark.parametrize("error", [RuntimeError, Py4JNetworkError, SinkRejectedError])
def test_what_hinders_clearing_hinders_nothing_else(
    output: FileOutput, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A failed cleanup does not undo a commit or replace another error. What is left is removed later."""

    def fails(*_: object) -> None:
        raise error("cannot be removed")

    with monkeypatch.context() as hindered:
        hindered.setattr(LocalStorage, "remove_below", fails)
        assert deliver(output, "a", part(0, 0, 3)).taken
        sink = output.sink(lambda step: fails_at("judged", step))
        with pytest.raises(ZeroDivisionError):
            deliver(output, "b", part(1, 0, 3), sink=sink)
        assert deliver(output, "c", part(1, 0, 3)).taken
    assert output.rows() == rows_of("a", part(0, 0, 3)) + rows_of("c", part(1, 0, 3))
    output.sweep()
    assert list((output.path / "_marshal" / "attempts").iterdir()) == []


def fails_at(here: str, step: str) -> None:
    """Fail at this step of a write."""
    if step == here:
        raise ZeroDivisionError


@pytest.mark.slow
def test_a_file_system_that_hangs_keeps_no_process_alive() -> None:
    """A call that the JVM never answers does not keep the process alive."""
    script = (
        "import threading\n"
        "from marshal_dagster.sinks.files.hadoop_storage import HadoopStorage\n"
        "storage, began = HadoopStorage('hdfs://h/out', lambda: None, None), threading.Event()\n"
        "storage._way = lambda: (began.set(), threading.Event().wait())\n"
        "threading.Thread(target=storage.check, daemon=True).start()\n"
        "assert began.wait(30)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WITHIN_S)


@pytest.mark.slow
def test_an_output_that_is_no_longer_used_keeps_no_thread() -> None:
    """Each output has its own thread for calls to the JVM, which ends with the output."""

    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "marshal-files"}

    before = threads()
    storage = HadoopStorage("hdfs://h/out", lambda: cast("Any", None), None)
    storage._way = lambda: lambda *_: None  # type: ignore[method-assign]
    storage.check()
    (own,) = threads() - before
    del storage
    gc.collect()
    own.join(WITHIN_S)
    assert not own.is_alive()


def test_rows_that_are_not_where_they_should_be_are_no_empty_ranges(output: FileOutput) -> None:
    """If Spark has not created the folder, it has written elsewhere, so nothing is committed."""

    class Astray(FakeFileSink):
        def _write_rows(self, frame: Frame, folder: str, done: Sequence[int]) -> None:
            super()._write_rows(frame, f"{folder}-elsewhere", done)

    with pytest.raises(SinkRejectedError, match="to another place than"):
        deliver(output, "a", part(0, 0, 3), sink=Astray(output.path))
    assert output.rows() == []


def test_a_link_whose_answer_was_lost_counts_once(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file server creates a link and then reports that it exists, the commit is still the writer's own."""
    real = os.link

    def answers_twice(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr(os, "link", answers_twice)
    assert deliver(output, "a", part(0, 0, 3)).taken
    assert output.rows() == rows_of("a", part(0, 0, 3))
    assert len(commit_files(output)) == 1


def test_a_file_system_without_hard_links_is_reported(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links causes one clear error, and nothing is committed."""

    def cannot(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "link", cannot)
    with pytest.raises(ConfigurationError, match="has no hard links"):
        deliver(output, "a", part(0, 0, 3))
    assert output.rows() == []


def test_one_sink_from_several_threads(output: FileOutput) -> None:
    """Threads that share a sink take each range once."""
    sink = FakeFileSink(output.path)
    ranges = [part(number, 0, 3) for number in range(6)]
    outcomes = CrashConformance.race(_Shared(output, sink), {str(range_.partition): [range_] for range_ in ranges})
    assert all(len(outcome.taken) == 1 for outcome in outcomes.values())
    assert len(output.rows()) == 18


class _Shared(FileOutput):
    """An output that has one sink for all threads."""

    racing_step = "never"

    def __init__(self, output: FileOutput, sink: FileSink) -> None:
        super().__init__(output.path)
        self._sink = sink

    def sink(self, reached: Callable[[str], None] | None = None) -> FileSink:  # noqa: ARG002
        """Return the shared sink."""
        return self._sink


STORED = CommitView()
for bounds in ((0, 60), (60, 100)):
    done = part(0, *bounds, generation=5, epoch=50, log="c", topic_id="d")
    STORED.add(Commit("attempt", "json", "{}", (Entry(done, (), 0, has_offsets=True),)))


@pytest.mark.parametrize(
    ("start", "end", "others", "is_decided"),
    [
        (100, 120, {}, False),
        (90, 100, {}, True),
        (120, 130, {}, False),
        (90, 95, {}, True),
        (90, 110, {}, True),
        (100, 120, {"generation": 4}, True),
        (0, 10, {"generation": 6}, False),
        (100, 120, {"epoch": 49}, True),
        (120, 130, {"epoch": 49}, True),
        (100, 120, {"topic_id": "e"}, True),
        (100, 120, {"topic_id": "e", "generation": 6}, False),
        (100, 120, {"log": "x", "generation": 6}, True),
        (100, 100, {}, True),
    ],
)
def test_what_is_decided_for_good(start: int, end: int, others: dict[str, str | int], *, is_decided: bool) -> None:
    """A range that could still be taken, at a later position or in a newer generation, is not decided."""
    wanted = part(0, start, end, **{"generation": 5, "epoch": 50, "log": "c", "topic_id": "d", **others})  # type: ignore[arg-type]
    assert decided(STORED.stored(wanted), wanted) is is_decided
    assert not decided(CommitView().stored(wanted), wanted)


@pytest.mark.parametrize(
    ("wanted", "is_decided"),
    [
        (ahead(0, 20, 30, epoch=9), False),
        (ahead(0, 10, 20), True),
        (ahead(0, 15, 25), True),
        (ahead(0, 0, 5), True),
        (ahead(0, 20, 20), True),
        (ahead(0, 10, 20, generation=20), False),
        (part(0, 20, 30), False),
        (part(0, 20, 30, epoch=9), True),
        (part(0, 40, 50), False),
        (part(0, 30, 40), True),
        (ahead(1, 20, 30), False),
    ],
    ids=str,
)
def test_what_is_decided_for_good_in_any_order(wanted: ClaimedRange, *, is_decided: bool) -> None:
    """A range that could still be taken before or after the stored ones, or after a gap is filled, is not decided."""
    view = CommitView()
    for each in (part(0, 2, 10), ahead(0, 30, 40), ahead(0, 10, 20), ahead(1, 30, 40)):
        view.add(Commit("attempt", "json", "{}", (Entry(each, (), 0, has_offsets=True),)))
    assert decided(view.stored(wanted), wanted) is is_decided


def test_a_write_that_fails_leaves_nothing(output: FileOutput) -> None:
    """If Spark fails, nothing is committed and no file remains."""
    with pytest.raises(AssertionError, match="evaluated"):
        deliver_poison(output)
    assert everything(output) == set()
    assert output.rows() == []


def deliver_poison(output: Output) -> None:
    """Write a frame that fails."""
    output.sink().write(output.poison(), [part(0, 0, 3)], never)


# Visible files


@pytest.mark.thorough
@pytest.mark.parametrize("step", REPLACING_STEPS)
def test_a_writer_killed_while_it_replaces_shows_no_row_twice(output: WatchedOutput, step: str) -> None:
    """At each kill point of a replacement an engine finds no offset twice; after the next writer it finds all rows."""
    deliver(output, "old", part(0, 0, 8), part(1, 0, 4))
    newer = part(0, 2, 6, generation=20, epoch=21)
    assert write_and_die(output, step, "new", [newer]) == KILLED
    output.look()
    deliver(output, "new", part(0, 2, 6, generation=20, epoch=22))
    output.sweep()
    assert len(output.rows()) == 12
    assert [row for row in output.rows() if row[2] == "new"] == rows_of("new", newer)


@pytest.mark.parametrize("step", ["linked", "file moved"])
@pytest.mark.parametrize("comes", ["verdicts", "committed_files", "sweep"])
def test_whoever_comes_next_shows_what_was_committed(output: FileOutput, step: str, comes: str) -> None:
    """If a writer died after its commit, the next process that uses the output moves the files."""
    mine = part(0, 0, 6)
    write_and_die(output, step, "a", [mine])
    assert len(listed_rows(output.path)) < 6
    sink = output.sink()
    files = sink.verdicts([part(0, 0, 6, epoch=20)]) if comes == "verdicts" else getattr(sink, comes)()
    assert files
    assert listed_rows(output.path) == rows_of("a", mine)
    assert all(path.parent == output.path for path in sink.committed_files())
    assert everything(output) == set()


@pytest.mark.parametrize("end", [3, 4])
def test_a_late_move_shows_nothing_that_was_replaced(output: FileOutput, end: int) -> None:
    """A process that was held up since before a replacement can no longer make the replaced rows visible."""
    write_and_die(output, "linked", "old", [part(0, 0, 4)])
    held_up = output.sink()
    (commit,) = held_up._log.settled().commits
    sink = output.sink()
    sink._sweep_quietly = lambda: None  # type: ignore[method-assign] # so that the files wait for the replacement
    newer = [part(0, 0, end, generation=20, epoch=21)]
    read = rows_of("new", *newer)
    assert sink.write(output.frame(read), newer, lambda: intervals(read)).taken  # type: ignore[arg-type]
    show(held_up._storage, commit, lambda _: None)
    assert listed_rows(output.path) == output.rows() == rows_of("new", *newer) + rows_of("old", part(0, end, 4))


def test_what_was_rewritten_meanwhile_is_rewritten_again(output: FileOutput) -> None:
    """If another writer replaces rows of the same files first, the loser rewrites what that one has left."""
    deliver(output, "old", part(0, 0, 8))
    seen: list[str] = []

    def reached(step: str) -> None:
        seen.append(step)
        if seen.count("older rows written") == 1 and step == "older rows written":
            deliver(output, "first", part(0, 0, 3, generation=20, epoch=21))

    deliver(output, "second", part(0, 2, 5, generation=30, epoch=31), sink=output.sink(reached))
    assert seen.count("older rows written") == 2
    assert [row[2] for row in output.rows()] == ["first"] * 2 + ["second"] * 3 + ["old"] * 3
    assert listed_rows(output.path) == output.rows()


def test_files_that_another_writer_removes_while_they_are_rewritten_end_no_batch(output: FileOutput) -> None:
    """The loser reads files that are gone, judges again, and rewrites what the other writer has left."""
    deliver(output, "old", part(0, 0, 8))
    sink = output.sink()
    real, tries = sink._write_older, list[str]()

    def late(spark: Any, folder: str, older: Any) -> None:  # noqa: ANN401
        tries.append(folder)
        if len(tries) == 1:
            deliver(output, "first", part(0, 0, 3, generation=20, epoch=21))
            raise FileNotFoundError("as Spark has it")
        real(spark, folder, older)

    sink._write_older = late  # type: ignore[method-assign]
    assert deliver(output, "second", part(0, 2, 5, generation=30, epoch=31), sink=sink).taken
    assert len(set(tries)) == 2
    assert [row[2] for row in output.rows()] == ["first"] * 2 + ["second"] * 3 + ["old"] * 3
    assert listed_rows(output.path) == output.rows()


def test_a_rewriting_that_fails_ends_the_batch(output: FileOutput) -> None:
    """If no other writer was there, the error is raised, and nothing changes."""
    deliver(output, "old", part(0, 0, 8))
    sink = output.sink()

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    sink._write_older = fails  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        deliver(output, "new", part(0, 2, 5, generation=20, epoch=21), sink=sink)
    assert listed_rows(output.path) == output.rows() == rows_of("old", part(0, 0, 8))


@pytest.mark.parametrize("removes", ["before the move", "after the move"])
def test_a_folder_that_is_removed_while_files_are_moved_loses_no_file(
    output: FileOutput, monkeypatch: pytest.MonkeyPatch, removes: str
) -> None:
    """A file that is neither moved nor at its place keeps its attempt, and the next process moves it."""
    write_and_die(output, "linked", "a", [part(0, 0, 4)])

    def gone(*_: object, **__: object) -> None:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        if removes == "before the move":
            patch.setattr(Path, "rename", gone)
        else:
            exists = LocalStorage.exists
            patch.setattr(LocalStorage, "exists", lambda own, name: "_marshal" in name and exists(own, name))
        with pytest.raises(OSError):  # noqa: PT011 - as the system has it, or the sink's own
            output.sink().sweep()
    assert output.rows() == rows_of("a", part(0, 0, 4))
    assert output.sink().sweep() == 1
    assert listed_rows(output.path) == output.rows()


def test_a_checkpoint_that_fails_ends_no_batch(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit was made; a later one writes the checkpoint."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 2)
    deliver(output, "a", part(0, 0, 2))
    with monkeypatch.context() as patch:
        patch.setattr(commit_log.CommitLog, "checkpoint_if_due", lambda *_: os.link("missing", "target"))
        assert deliver(output, "a", part(0, 2, 4)).taken
    deliver(output, "a", part(0, 4, 6))
    assert [path.name for path in (output.path / "_marshal" / "checkpoints").iterdir()] == [f"{2:020d}.json"]


def test_claims_are_checked_after_older_rows_are_rewritten(output: FileOutput) -> None:
    """Rewriting takes time, so a claim that was lost meanwhile commits nothing."""
    deliver(output, "old", part(0, 0, 8))
    checks: list[int] = []

    def before_commit() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise ZeroDivisionError

    newer = part(0, 2, 5, generation=20, epoch=21)
    rows = rows_of("new", newer)
    with pytest.raises(ZeroDivisionError):
        output.sink().write(output.frame(rows), [newer], lambda: intervals(rows), before_commit)  # type: ignore[arg-type]
    assert listed_rows(output.path) == output.rows() == rows_of("old", part(0, 0, 8))
    assert everything(output) == set()


def test_a_reader_that_may_not_move_files_reads_them(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the right to write finds each committed file where it is."""
    write_and_die(output, "file moved", "a", [part(0, 0, 6)])

    def refuses(*_: object) -> None:
        raise PermissionError(errno.EACCES, "read only")

    monkeypatch.setattr(LocalStorage, "move", refuses)
    files = output.sink().committed_files()
    assert {"_marshal" in path.parts for path in files} == {True, False}
    assert all(path.exists() for path in files)


def test_files_that_cannot_be_moved_are_reported(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are committed all the same, and the batch's note states what is not visible yet and who continues."""

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "no disk")

    with monkeypatch.context() as hindered:
        hindered.setattr(LocalStorage, "move", fails)
        result = deliver(output, "a", part(0, 0, 3))
    assert result.taken
    assert "no disk); the next write does it" in str(result.note)
    assert listed_rows(output.path) == []
    assert output.rows() == rows_of("a", part(0, 0, 3))
    assert deliver(output, "a", part(0, 3, 4)).note is None
    assert listed_rows(output.path) == rows_of("a", part(0, 0, 4))


def test_an_output_of_an_older_version_stays_as_it_is(tmp_path: Path) -> None:
    """An output that keeps its files in the folders of the attempts does so for good, and stays readable."""
    old = HiddenOutput(tmp_path)
    deliver(old, "a", part(0, 0, 4))
    output = FileOutput(tmp_path)
    deliver(output, "b", part(0, 4, 6))
    deliver(output, "new", part(0, 3, 5, generation=20, epoch=21))
    assert output.rows() == old.rows()
    assert [row[2] for row in output.rows()] == ["a"] * 3 + ["new"] * 2 + ["b"]
    assert listed(tmp_path) == []
    assert versions(output) == [1, 1, 1]
    with pytest.raises(SinkRejectedError, match=r"is partitioned by \[\], not by \['day'\]"):
        FakeFileSink(tmp_path, partition_by=["day"]).verdicts([part(1, 0, 1)])


def test_visible_files_are_of_a_newer_version(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older marshal-dagster would look for the files in the folders of the attempts, so it refuses the output."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 2)
    for start in (0, 2, 4):
        deliver(output, "a", part(0, start, start + 2))
    assert versions(output) == [3, 3, 3, 3]
    files = output.sink().committed_files()
    for path in commit_files(output)[:2]:
        path.unlink()
    assert output.sink().committed_files() == files


@pytest.mark.parametrize(
    ("partition_by", "message"),
    [
        ("day", r"partition_by is 'day'; it must be a list of columns: \['day'\]"),
        (["day", "day"], "must name each column once"),
        (["offset"], "and not 'offset'"),
        (["_day"], "engines skip folders whose names begin with a dot or an underscore"),
        ([".day"], "engines skip folders"),
    ],
)
def test_partition_by_must_name_columns(tmp_path: Path, partition_by: Sequence[str], message: str) -> None:
    """A string, a column twice and the column `offset` are refused when the sink is made."""
    with pytest.raises(ConfigurationError, match=message):
        FileSink(tmp_path, partition_by=partition_by)


def test_partition_by_needs_moves(tmp_path: Path) -> None:
    """Where a move is not atomic, no folders are made: an engine would see files half copied."""
    sink = FakeFileSink(tmp_path, partition_by=["day"])
    sink._storage.can_move = lambda: False  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="cannot be moved to folders in one step"):
        sink.verdicts([part(0, 0, 1)])
