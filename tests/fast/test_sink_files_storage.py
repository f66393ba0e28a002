"""The file sink after interrupts and power losses, and on hosts whose file system caches missing files."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import FileSink
from marshal_dagster.sinks.files import commit_log, storage
from marshal_dagster.sinks.files import sink as files_sink
from marshal_dagster.sinks.files.storage import LocalStorage
from tests.line_interrupts import Place, watched
from tests.sink_conformance import deliver, intervals, part, rows_of
from tests.sink_outputs import FakeFileSink, FileOutput, hook


@pytest.fixture
def output(tmp_path: Path) -> FileOutput:
    """Return an output in a folder that does not exist yet, in a parent that does not exist either."""
    return FileOutput(tmp_path / "made" / "output")


def commits_of(output: FileOutput) -> Path:
    """Return the folder of the commit files."""
    return output.path / "_marshal" / "commits"


# Interrupts

OLD = [part(0, 0, 6), part(1, 0, 6)]
NEW = [part(0, 2, 4, generation=20, epoch=21), part(1, 6, 8)]
AGAIN = [part(0, 2, 4, generation=20, epoch=22), part(1, 6, 8, epoch=22)]
EXPECTED = sorted(rows_of("old", part(0, 0, 2), part(0, 4, 6), OLD[1]) + rows_of("new", *NEW))


def written_until(output: FileOutput, sink: FileSink, count: int | None) -> list[Place]:
    """Replace old rows, interrupted at the `count`-th line that concerns commits. Return the lines passed."""
    read = rows_of("new", *NEW)
    passed: list[Place] = []
    steps: list[str] = []

    def at_line(place: Place) -> None:
        if "judged" in steps or place[0] in {commit_log.__file__, storage.__file__}:
            passed.append(place)
            if len(passed) == count:
                raise KeyboardInterrupt

    hook(sink, steps.append)
    with watched((files_sink, commit_log, storage), at_line, but=("with ",)):
        sink.write(output.frame(read), NEW, lambda: intervals(read))  # type: ignore[arg-type]
    return passed


@pytest.mark.thorough
def test_an_interrupt_at_any_line_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a write is interrupted, its committed rows stay. The same process and another one read the same."""
    monkeypatch.setattr(commit_log, "CHECKPOINT_EVERY", 3)
    monkeypatch.setattr(storage, "sync", lambda _: None)
    old, whole = FileOutput(tmp_path / "old"), FileOutput(tmp_path / "whole")
    deliver(old, "old", *OLD)
    deliver(old, "beside", part(2, 0, 1))
    shutil.copytree(old.path, whole.path)
    passed = written_until(whole, whole.sink(), None)
    last = {place: count for count, place in enumerate(passed, start=1)}
    assert len(last) > 100
    for place, count in last.items():
        output = FileOutput(tmp_path / str(count))
        shutil.copytree(old.path, output.path)
        sink = output.sink()
        with pytest.raises(KeyboardInterrupt):
            written_until(output, sink, count)
        assert all(file.exists() for file in output.sink().committed_files()), place
        deliver(output, "new", *AGAIN, sink=sink)
        sink.sweep()
        assert [row for row in output.rows() if row[0] != 2] == EXPECTED, place
        assert sink.committed_files() == output.sink().committed_files(), place


# Power losses


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the paths that are synced, in order, and return them."""
    found: list[Path] = []
    real = storage.sync

    def noted(path: Path) -> None:
        real(path)
        found.append(path)

    monkeypatch.setattr(storage, "sync", noted)
    return found


class TestPower:
    """Others see a commit as soon as it is linked. It survives a power loss only once its folders were synced."""

    @staticmethod
    def dies_unsynced(output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
        """Deliver in a process that dies after it has linked its commit."""

        def dies(path: Path) -> None:
            if path == commits_of(output):
                raise OSError(errno.EIO, "the process dies")

        with monkeypatch.context() as patch:
            patch.setattr(storage, "sync", dies)
            with pytest.raises(OSError, match="dies"):
                deliver(output, "a", part(0, 0, 3))

    @pytest.mark.parametrize("asks", ["verdicts", "write"])
    def test_a_commit_of_another_is_synced_before_it_is_trusted(
        self, output: FileOutput, synced: list[Path], monkeypatch: pytest.MonkeyPatch, asks: str
    ) -> None:
        """A skipped range's offset is committed, so the storage must have the commit first.

        Each commit is synced once.
        """
        self.dies_unsynced(output, monkeypatch)
        synced.clear()
        sink, again = output.sink(), [part(0, 0, 3, epoch=20)]
        if asks == "verdicts":
            assert set(sink.verdicts(again).values()) == {Verdict.SKIP}
        else:
            assert sink.write(output.poison(), again, dict).skipped == tuple(again)  # type: ignore[arg-type]
        folders = [commits_of(output), output.path / "_marshal", output.path, output.path.parent]
        assert {*folders, output.path.parent.parent} <= set(synced)
        synced.clear()
        sink.verdicts(again)
        assert synced == []
        deliver(output, "b", part(0, 3, 4, epoch=20))
        synced.clear()
        sink.verdicts([part(0, 3, 4, epoch=20)])
        assert synced == [commits_of(output)]

    def test_what_cannot_be_synced_is_not_trusted(self, output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the sync fails, no range is skipped, now or at the next call."""
        self.dies_unsynced(output, monkeypatch)
        sink = output.sink()

        def fails(_: Path) -> None:
            raise OSError(errno.EIO, "no disk")

        with monkeypatch.context() as patch:
            patch.setattr(storage, "sync", fails)
            for _ in range(2):
                with pytest.raises(OSError, match="no disk"):
                    sink.verdicts([part(0, 0, 3, epoch=20)])
        assert set(sink.verdicts([part(0, 0, 3, epoch=20)]).values()) == {Verdict.SKIP}

    def test_folders_that_may_not_be_read_hinder_nothing(
        self, output: FileOutput, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Writers may have no right to read the folders above the output, but need it for the folder of the commits."""
        closed, real = {output.path.parent.parent}, storage.sync

        def refuses(path: Path) -> None:
            if path in closed:
                raise PermissionError(errno.EACCES, "closed")
            real(path)

        monkeypatch.setattr(storage, "sync", refuses)
        assert deliver(output, "a", part(0, 0, 3)).taken
        closed.add(commits_of(output))
        with pytest.raises(PermissionError):
            output.sink().verdicts([part(0, 0, 3)])

    def test_a_batch_done_meanwhile_is_synced_too(self, output: FileOutput, synced: list[Path]) -> None:
        """If another writer commits the range first, its commit is synced before this writer skips the range."""
        mine = part(0, 0, 3)
        seen: list[str] = []

        def reached(step: str) -> None:
            if step == "rows written" and not seen:
                seen.append(step)
                deliver(output, "b", mine, sink=output.sink())
                synced.clear()

        assert deliver(output, "a", mine, sink=output.sink(reached)).skipped == (mine,)
        assert commits_of(output) in synced

    def test_the_folders_made_are_held_by_theirs(self, output: FileOutput, synced: list[Path]) -> None:
        """The first commit of an output survives a power loss, with all folders on the way to it."""
        held: list[Path] = []

        def reached(step: str) -> None:
            if step == "linked":
                held.extend(synced)

        deliver(output, "a", part(0, 0, 3), sink=output.sink(reached))
        attempts = output.path / "_marshal" / "attempts"
        made = [commits_of(output), attempts, output.path / "_marshal", output.path, output.path.parent]
        assert {folder.parent for folder in made} | {commits_of(output), attempts} <= set(held)

    def test_a_reader_moves_no_file_of_a_commit_that_may_vanish(
        self, output: FileOutput, synced: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A commit is durable before its rows are visible to other engines."""
        self.dies_unsynced(output, monkeypatch)
        synced.clear()
        (path, *_) = output.sink().committed_files()
        assert path.parent == output.path
        assert synced.index(commits_of(output)) < synced.index(output.path)

    def test_files_are_held_where_they_were_moved_to(self, output: FileOutput, synced: list[Path]) -> None:
        """The folders of moved files are synced before the note is removed by which the next process finds them."""
        held: list[Path] = []

        def reached(step: str) -> None:
            if step == "linked":
                synced.clear()
            elif step == "cleared":
                held.extend(synced)

        deliver(output, "a", part(0, 0, 3), sink=output.sink(reached))
        assert output.path in held

    def test_files_are_held_where_they_were_removed(self, output: FileOutput, synced: list[Path]) -> None:
        """A rewritten file does not come back after a power loss, also if no file takes its place."""
        deliver(output, "a", part(0, 0, 3))
        newer = [part(0, 0, 3, generation=20, epoch=21)]

        def reached(step: str) -> None:
            if step == "older file removed":
                synced.clear()

        output.sink(reached).write(output.frame([]), newer, lambda: {0: [(0, 3)]})  # type: ignore[arg-type]
        assert output.rows() == []
        assert output.path in synced

    def test_nothing_is_swept_for_a_commit_that_may_vanish(
        self, output: FileOutput, synced: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An attempt is removed only because of commits that the storage has."""
        self.dies_unsynced(output, monkeypatch)
        synced.clear()
        output.sink().sweep()
        assert commits_of(output) in synced

    def test_readers_sync_nothing(self, output: FileOutput, synced: list[Path]) -> None:
        """Reading an output syncs nothing."""
        deliver(output, "a", part(0, 0, 3))
        synced.clear()
        assert output.sink().committed_files()
        assert output.sink().can_replace([part(0, 0, 3)]) is None
        assert synced == []


# Other hosts


class Host:
    """A host whose file system caches that a commit file is missing, until its folder is opened again."""

    def __init__(self, output: FileOutput, monkeypatch: pytest.MonkeyPatch) -> None:
        self._output, self._monkeypatch = output, monkeypatch
        self._absent: set[str] = set()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Make this process see what the host sees."""
        read, opened, scanned = LocalStorage.read, os.open, os.scandir

        def remembered(local: LocalStorage, name: str) -> bytes | None:
            found = None if name in self._absent else read(local, name)
            if found is None:
                self._absent.add(name)
            return found

        def forgets(path: Any) -> None:  # noqa: ANN401 - as `os` has it
            if path == commits_of(self._output):
                self._absent.clear()

        def opens(path: Any, *others: Any) -> int:  # noqa: ANN401
            forgets(path)
            return opened(path, *others)

        def lists(path: Any = ".") -> Any:  # noqa: ANN401
            forgets(path)
            return scanned(path)

        with self._monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "read", remembered)
            patch.setattr(os, "open", opens)
            patch.setattr(os, "scandir", lists)
            yield


def test_another_hosts_commit_is_not_swept_by_a_stale_cache(
    output: FileOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that cached a missing commit reads the folder again before it takes an attempt for a left-over."""
    host, sink = Host(output, monkeypatch), FakeFileSink(output.path)
    deliver(output, "a", part(0, 0, 3))
    with host.at_work():
        sink.verdicts([part(0, 3, 5)])
    deliver(output, "b", part(0, 3, 5))
    with host.at_work():
        assert sink.sweep() == 0
        assert sink.verdicts([part(0, 3, 5)]) == {part(0, 3, 5): Verdict.SKIP}
    assert output.rows() == rows_of("a", part(0, 0, 3)) + rows_of("b", part(0, 3, 5))


# Gaps


def test_a_gap_is_refused_again_and_again(output: FileOutput) -> None:
    """A sink that found a commit missing never writes in its place."""
    for start in (0, 2, 4):
        deliver(output, "a", part(0, start, start + 2))
    middle = sorted(commits_of(output).iterdir())[1]
    middle.rename(middle.with_suffix(".aside"))
    sink: FileSink = output.sink()
    for _ in range(2):
        with pytest.raises(SinkRejectedError, match="is missing, but there are later ones"):
            sink.verdicts([part(0, 2, 3)])
        with pytest.raises(SinkRejectedError, match="is missing, but there are later ones"):
            sink.write(output.poison(), [part(0, 2, 3)], dict)  # type: ignore[arg-type]
    middle.with_suffix(".aside").rename(middle)
    assert sink.verdicts([part(0, 4, 6)]) == {part(0, 4, 6): Verdict.SKIP}
