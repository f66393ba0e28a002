"""A sink of files on a file system that this machine and all executors share, under the same path.

Below the output's path stands only `_marshal`, so that whoever reads the path itself sees no half-done work:

    _marshal/attempts/<attempt>.json                         the ranges that it wants; written first, removed last
    _marshal/attempts/<attempt>/marshal_range=<partition>/   the rows of one range, apart those that have no offset
    _marshal/commits/<n>.json                                which files count
    _marshal/checkpoints/<n>.json                            the same, all up to n

A writer writes its attempt, judges its ranges by all commits, and adds the next commit with the names of its files;
when another was first it judges again (PROTOCOL.md 6, "Effectively once"). Nothing is ever overwritten, so what a
process adds that is no longer wanted, or a task that ends late, is named nowhere and does not count.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from marshal_dagster.errors import ConfigurationError, SinkRefused
from marshal_dagster.protocol.ranges import ClaimedRange, Verdict
from marshal_dagster.spark.sinks import commits
from marshal_dagster.spark.sinks.commits import Commit, CommitLog, Entry, View, decided
from marshal_dagster.spark.sinks.file_writing import check_all_see, hadoop_path, some_files_at_once
from marshal_dagster.spark.sinks.footers import parquet_rows
from marshal_dagster.spark.sinks.port import (
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    BeforeCommit,
    Intervals,
    OffsetsRead,
    WriteOutcome,
    check_columns,
    check_ranges,
    judge_all,
    refuse_foreign_rows,
    then_checked,
    unreplaceable,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger(__name__)

_RANGE_COLUMN = "marshal_range"
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_SYNCS_AT_ONCE = 16
_FORMATS = ("parquet", "orc", "json", "csv", "avro")
_ROW_COUNTS = {"parquet": parquet_rows}
_WITHOUT_OFFSET = "_without_offset"
_PARTITION = re.compile(rf"(0|-?[1-9][0-9]*)({_WITHOUT_OFFSET})?")
# Of the output committer: a task's files are moved where they count when the whole job has succeeded, by the driver.
_COMMITTER_OPTIONS = {
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


@dataclass(frozen=True, slots=True)
class _Written:
    """The files of one range in an attempt, and their rows if known."""

    files: tuple[str, ...] = ()
    rows: int | None = 0
    has_offsets: bool = True

    def beside(self, others: "_Written") -> "_Written":
        """Return these files and the `others` of the same range."""
        return _Written(
            files=(*others.files, *self.files),
            rows=None if self.rows is None or others.rows is None else self.rows + others.rows,
            has_offsets=self.has_offsets and others.has_offsets,
        )


_NOTHING = _Written()


class FileSink:
    """Files in the folder `path`, readable through `read` and `committed_files`."""

    takes_in_any_order = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "parquet",  # noqa: A002 - what Spark calls it
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Name the output; nothing is read or made before it is used.

        `path` is a local path or a `file:` URI. `options` are those of Spark's writer and reader for `format`. Raises
        `ConfigurationError` for another kind of path and a format that is not made of files.
        """
        self.path = _local_path(path)
        if format not in _FORMATS:
            raise ConfigurationError(f"format: {format!r}; a file sink writes {', '.join(_FORMATS)}")
        self.format = format
        self.options = dict(options or {})
        self._folder = self.path / "_marshal"
        self._log = CommitLog(self._folder)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FileSink({str(self.path)!r}, format={self.format!r})"

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Say what would be done with each range (`Sink.verdicts`)."""
        check_ranges(ranges)
        with self._lock:
            return self._judge(self._log.settled(), ranges)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace what is there, else why not (`Sink.can_replace`)."""
        with self._lock:
            view = self._log.refresh()
        for wanted in ranges:
            for entry in view.at_offsets_of(wanted, below_generation=None):
                if not entry.has_offsets:
                    return unreplaceable(wanted, entry.taken.generation, str(self.path))
        return None

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteOutcome:
        """Write the rows of each range that is not yet there, in one commit (`Sink.write`).

        The frame is evaluated once, and not at all when every range is there. `rows` are told for Parquet alone.
        """
        check_columns(frame.schema, {_RANGE_COLUMN})
        check_ranges(ranges)
        with self._lock:
            self._sweep_quietly()
            verdicts = self._judge(self._log.settled(), ranges)
        wanted = tuple(each for each in ranges if verdicts[each] is not Verdict.SKIP)
        if not wanted:
            return WriteOutcome(taken=(), skipped=tuple(ranges), rows={})
        done = [each.partition for each in ranges if each not in wanted]
        attempt = self._begin(wanted)
        try:
            folder = self._attempts / attempt
            self._check_place(frame, folder.with_suffix(".json"))
            self._write_rows(frame, folder, done)
            self._reached("rows written")
            written = self._collect(folder, wanted)
            before_commit()
            replaced = self._replaced(frame, folder, written, then_checked(offsets_read, before_commit))
            taken = self._commit(attempt, frame, wanted, written=written, offsets_replaced=replaced)
        finally:
            with self._lock, contextlib.suppress(OSError):
                self._clear(attempt, self._log.refresh())
        return WriteOutcome(
            taken=taken,
            skipped=tuple(each for each in ranges if each not in taken),
            rows={each.partition: rows for each in taken if (rows := _of(written, each).rows) is not None},
        )

    def read(self, spark: "SparkSession") -> "DataFrame":
        """Return the rows that count: of the commit files alone, without those that a newer generation replaced.

        Columns that only some commits have are null in the others; one whose type has changed is a
        `ConfigurationError`. Raises `SinkRefused` for an output that is damaged or was written by a newer version.
        """
        from marshal_dagster.spark.sinks.file_reading import read_committed

        with self._lock:
            view = self._log.refresh()
            if not view.number:
                raise ConfigurationError(f"path: {self.path} holds no commit yet, so its columns are not known")
            return read_committed(spark, view, self._attempts, self.options)

    def committed_files(self) -> tuple[Path, ...]:
        """Return the files that count, for readers other than Spark.

        Where a newer generation has replaced single offsets of an older one, the older file still holds these rows;
        `read` leaves them out.
        """
        with self._lock:
            view = self._log.refresh()
        return tuple(
            self._attempts / commit.attempt / name
            for commit in view.commits
            for entry in commit.entries
            for name in entry.files
        )

    def sweep(self) -> int:
        """Remove what attempts left that can no longer count, and return how many of them that were.

        An attempt goes when the commits have or refuse each of its ranges for good, never by age: one that still runs
        could not add anything any more.
        """
        with self._lock:
            return self._sweep()

    @property
    def _attempts(self) -> Path:
        return self._folder / "attempts"

    def _judge(self, view: View, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Judge all, and refuse also where older rows could not be replaced, or are of another format."""
        verdicts = judge_all(view.stored, ranges)
        if view.commits and view.commits[-1].format != self.format:
            raise SinkRefused(
                f"format: {self.path} holds {view.commits[-1].format} files, not {self.format}: nothing was written; "
                "give the format of the output, or another path"
            )
        for wanted, verdict in verdicts.items():
            if verdict is Verdict.SKIP:
                continue
            for entry in view.at_offsets_of(wanted, below_generation=wanted.generation):
                if not entry.has_offsets:
                    raise SinkRefused(unreplaceable(wanted, entry.taken.generation, str(self.path)))
        return verdicts

    def _begin(self, wanted: Sequence[ClaimedRange]) -> str:
        """Make a name for an attempt of one's own and note its ranges."""
        attempt = secrets.token_hex(16)
        self._attempts.mkdir(parents=True, exist_ok=True)
        commits.write_whole(
            self._attempts / f"{attempt}.json",
            {"version": commits.version_of(wanted), "ranges": [commits.range_to(each) for each in wanted]},
        )
        self._reached("attempt noted")
        return attempt

    def _check_place(self, frame: "DataFrame", note: Path) -> None:
        """Make sure that what executors write is seen here."""
        check_all_see(frame.sparkSession, note)

    def _write_rows(self, frame: "DataFrame", folder: Path, done: Sequence[int]) -> None:
        """Have Spark write the rows, but for those of the partitions `done`, a folder for each partition."""
        from pyspark.sql import functions as f

        partition = f.col(PARTITION_COLUMN)
        if done:
            frame = frame.where(partition.isNull() | ~partition.isin(list(done)))
        name = partition.cast("string")
        if OFFSET_COLUMN in frame.columns:
            without = f.concat(name, f.lit(_WITHOUT_OFFSET))
            name = f.when(f.col(OFFSET_COLUMN).isNull(), without).otherwise(name)
        writer = (
            frame.withColumn(_RANGE_COLUMN, name)
            .write.format(self.format)
            .options(**self.options, **_COMMITTER_OPTIONS)
            .partitionBy(_RANGE_COLUMN)
        )
        with some_files_at_once(frame.sparkSession):
            writer.save(hadoop_path(folder))

    def _collect(self, folder: Path, wanted: Sequence[ClaimedRange]) -> dict[int, _Written]:
        """List what Spark has committed below `folder`, by partition, and have the storage hold it."""
        written: dict[int, _Written] = {}
        foreign: list[str] = []
        expected = {each.partition for each in wanted}
        count = _ROW_COUNTS.get(self.format)
        if not folder.is_dir():
            raise SinkRefused(f"Spark has written the rows to another place than {folder}: nothing was committed")
        for place in sorted(folder.glob(f"{_RANGE_COLUMN}=*")):
            value = place.name.partition("=")[2]
            found = _PARTITION.fullmatch(value)
            if found is None or int(found[1]) not in expected:
                foreign.append("null" if value == _NO_PARTITION else unquote(found[1] if found else value))
                continue
            paths = sorted(path for path in place.iterdir() if not path.name.startswith(("_", ".")))
            added = _Written(
                files=tuple(f"{place.name}/{path.name}" for path in paths),
                rows=sum(map(count, paths)) if count else None,
                has_offsets=found[2] is None,
            )
            number = int(found[1])
            written[number] = added.beside(written[number]) if number in written else added
        refuse_foreign_rows(foreign, wanted)
        _sync_below(folder)
        return written

    def _commit(
        self,
        attempt: str,
        frame: "DataFrame",
        wanted: Sequence[ClaimedRange],
        *,
        written: Mapping[int, _Written],
        offsets_replaced: OffsetsRead,
    ) -> tuple[ClaimedRange, ...]:
        """Add a commit with the ranges of `wanted` that are not done meanwhile, and return these."""
        schema = frame.schema.json()
        has_offsets = OFFSET_COLUMN in frame.columns
        replaced: Mapping[int, Intervals] | None = None
        while True:
            with self._lock:
                view = self._log.settled()
                verdicts = self._judge(view, wanted)
                taken = tuple(each for each in wanted if verdicts[each] is not Verdict.SKIP)
                if not taken:
                    return ()
                over_older = {each for each in taken if view.at_offsets_of(each, below_generation=each.generation)}
                if replaced is not None or not over_older:
                    entries = tuple(
                        _entry(each, written, replaced or {}, has_offsets=has_offsets, replaces=each in over_older)
                        for each in taken
                    )
                    self._reached("judged")
                    if self._log.append(Commit(attempt, self.format, schema, entries), self._scratch(attempt)):
                        self._reached("linked")
                        self._log.checkpoint_if_due(self._scratch(attempt))
                        return taken
                    continue
            replaced = offsets_replaced()

    def _replaced(
        self, frame: "DataFrame", folder: Path, written: Mapping[int, _Written], offsets_read: OffsetsRead
    ) -> OffsetsRead:
        """Return what works out at which offsets older rows give way.

        Kafka is read anew for it, when compaction may have taken what a written row comes from.
        """

        def offsets_replaced() -> Mapping[int, Intervals]:
            paths = [folder / name for each in written.values() for name in each.files]
            own = self._offsets_in(frame, paths) if paths and OFFSET_COLUMN in frame.columns else {}
            read = offsets_read()
            return {number: (*read.get(number, ()), *own.get(number, ())) for number in read.keys() | own.keys()}

        return offsets_replaced

    def _offsets_in(self, frame: "DataFrame", paths: Sequence[Path]) -> Mapping[int, Intervals]:
        """Work out at which offsets of each partition these files have rows."""
        from marshal_dagster.spark.sinks.file_reading import offsets_in

        return offsets_in(frame.sparkSession, paths, self.format, self.options, frame.schema)

    def _scratch(self, attempt: str) -> Path:
        return self._attempts / attempt

    def _sweep_quietly(self) -> None:
        """Sweep, but let what hinders it hinder no write."""
        try:
            self._sweep()
        except (OSError, SinkRefused) as error:
            _logger.warning("attempts below %s were not swept: %s", self._attempts, error)

    def _sweep(self) -> int:
        # In this order: an attempt found without its note was cleared before, so the commits read now tell of it, on
        # other hosts too, as `refresh` asks the server for them anew.
        folders = {path.name for path in _entries(self._attempts) if path.suffix != ".json"}
        notes = {path.stem for path in _entries(self._attempts) if path.suffix == ".json" and path.stem[:1] != "."}
        view = self._log.settled()
        swept = 0
        for attempt in sorted(folders | notes):
            if attempt in notes:
                if not self._is_decided(attempt, view):
                    continue
            elif view.files_of(attempt) is not None:
                continue
            self._clear(attempt, view)
            swept += 1
        return swept

    def _is_decided(self, attempt: str, view: View) -> bool:
        note = commits.load(self._attempts / f"{attempt}.json")
        if note is None:
            return False  # its writer has just cleared it
        wanted = [commits.range_from(each) for each in note["ranges"]]
        return all(decided(view.stored(each), each) for each in wanted)

    def _clear(self, attempt: str, view: View) -> None:
        """Remove what of an attempt does not count, and then its note."""
        folder = self._attempts / attempt
        keep = view.files_of(attempt)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _remove_all_but(folder, {folder / name for name in keep})
        self._reached("cleared")
        (self._attempts / f"{attempt}.json").unlink(missing_ok=True)

    def _reached(self, step: str) -> None:
        """Do nothing; tests crash here."""


def _of(written: Mapping[int, _Written], taken: ClaimedRange) -> _Written:
    return written.get(taken.partition, _NOTHING)


def _entry(
    taken: ClaimedRange,
    written: Mapping[int, _Written],
    replaced: Mapping[int, Intervals],
    *,
    has_offsets: bool,
    replaces: bool,
) -> Entry:
    found = _of(written, taken)
    return Entry(
        taken=taken,
        files=found.files,
        rows=found.rows,
        has_offsets=has_offsets and found.has_offsets,
        replaces=_within(taken, replaced.get(taken.partition, ())) if replaces else (),
    )


def _within(taken: ClaimedRange, offsets: Intervals) -> tuple[tuple[int, int], ...]:
    """Return those of `offsets` that `taken` could read, as rising intervals that do not meet."""
    found: list[tuple[int, int]] = []
    for first, behind in sorted(offsets):
        start, end = max(first, taken.first_readable), min(behind, taken.end)
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return tuple(found)


def _local_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    scheme = urlsplit(text)
    if scheme.scheme == "file" and scheme.netloc in {"", "localhost"}:
        text = unquote(scheme.path)
    elif "://" in text or (scheme.scheme and ":" in text.split("/", 1)[0]):
        raise ConfigurationError(f"path: {text}; a file sink writes to local file systems: give a path or a file: URI")
    if not text:
        raise ConfigurationError("path: empty; give the folder of the output")
    return Path(text).expanduser().absolute()


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except FileNotFoundError:
        return


def _sync_below(folder: Path) -> None:
    """Have the storage hold all files below `folder`, then the folders; many at once share its trips to the disk."""
    folders, files = [folder.parent], []
    for parent, _, names in os.walk(folder):
        folders.append(Path(parent))
        files += [Path(parent, name) for name in names]
    with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
        for paths in (files, folders):
            for _ in pool.map(commits.sync, paths):
                pass


def _remove_all_but(folder: Path, keep: set[Path]) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(parent, name)
            if path not in keep and not _is_checksum_of(path, keep):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            Path(parent).rmdir()


def _is_checksum_of(path: Path, keep: set[Path]) -> bool:
    """Hadoop keeps `.name.crc` beside `name`."""
    return path.name.startswith(".") and path.name.endswith(".crc") and path.with_name(path.name[1:-4]) in keep
