"""A sink of files, in a folder that all executors have too or through Hadoop's file system layer (`storage`).

Below the output's path stands only `_marshal`, so that whoever reads the path itself sees no half-done work:

    _marshal/attempts/<attempt>.json                         the ranges that it wants; written first, removed last
    _marshal/attempts/<attempt>/marshal_range=<partition>/   the rows of one range, apart those that have no offset
    _marshal/commits/<n>.json                                which files count
    _marshal/checkpoints/<n>.json                            the same, all up to n

A writer writes its attempt, judges its ranges by all commits, and adds the next commit with the names of its files;
when another was first it judges again (protocol.md, section 6, "Effectively once"). Nothing is ever overwritten, so
what a process adds that is no longer wanted, or a task that ends late, is named nowhere and does not count.
"""

import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict, judge_ranges
from marshal_dagster.sinks.caching import without_partitions
from marshal_dagster.sinks.files import commit_log, formats
from marshal_dagster.sinks.files.commit_log import Commit, CommitLog, CommitView, Entry, decided
from marshal_dagster.sinks.files.hadoop_storage import Exclusive, HadoopStorage
from marshal_dagster.sinks.files.reader import read_committed
from marshal_dagster.sinks.files.storage import LocalStorage, Storage
from marshal_dagster.sinks.files.writer import some_files_at_once
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.sink import (
    OFFSET_COLUMN,
    PARTITION_COLUMN,
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Steps,
    WriteResult,
    both,
    check_columns,
    check_ranges,
    checked_after_read,
    refuse_foreign_rows,
    session_of,
    unreplaceable,
    within,
)
from marshal_dagster.spark import reader
from marshal_dagster.spark.column_names import is_case_sensitive
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger(__name__)

_RANGE_COLUMN = "marshal_range"
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_COUNTED = "parquet"
_ATTEMPTS = "attempts"
_NOTE = ".json"
_FOLDER = "_marshal"
_WITHOUT_OFFSET = "_without_offset"
_PARTITION = re.compile(rf"(0|-?[1-9][0-9]*)({_WITHOUT_OFFSET})?")
# Of the output committer: a task's files are moved where they count when the whole job has succeeded, by the driver.
_COMMITTER_OPTIONS = {
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


@dataclass(frozen=True, slots=True)
class _WrittenFiles:
    """The files of one range in an attempt, and their rows if known."""

    files: tuple[str, ...] = ()
    rows: int | None = 0
    has_offsets: bool = True

    def beside(self, others: "_WrittenFiles") -> "_WrittenFiles":
        """Return these files and the `others` of the same range."""
        return _WrittenFiles(
            files=(*others.files, *self.files),
            rows=None if self.rows is None or others.rows is None else self.rows + others.rows,
            has_offsets=self.has_offsets and others.has_offsets,
        )


_NOTHING = _WrittenFiles()


class FileSink(Steps):
    """Files in the folder `path`, readable through `read` and `committed_files`."""

    supports_unordered_ranges = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "parquet",  # noqa: A002 - what Spark calls it
        options: Mapping[str, str] | None = None,
        *,
        session: "Callable[[], SparkSession] | None" = None,
        exclusive: Exclusive | None = None,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
    ) -> None:
        """Name the output; nothing is read or made before it is used.

        `path` is a local path, a `file:` URI, or a URI of a file system that Hadoop's layer knows, such as `hdfs://`.
        `options` are those of Spark's writer and reader for `format`, except those that the sink fixes so that rows are
        read back as they were written. `shared_by_groups` lets several groups write all offsets of a topic,
        each apart; without it a group is refused where another has ranges, unless that is its `previous_group`
        (docs/sinks.md, "Another group"). The others are for such a file system alone:
        `session` gives the Spark session through which it is reached, by default the active one, and with `exclusive`
        the user vouches for one that is not known to keep two writers apart (docs/sinks.md). Raises
        `ConfigurationError` for another kind of path, a format that is not made of files, and options that are the
        sink's own.
        """
        self.path, self._storage = _opened(path, session, exclusive)
        if format not in formats.FORMATS:
            raise ConfigurationError(f"format: {format!r}; a file sink writes {', '.join(formats.FORMATS)}")
        self.format = format
        self.options = dict(options or {})
        formats.check_options(format, self.options)
        self._log = CommitLog(self._storage)
        self._groups = OutputGroups(str(self.path), shared_by_groups, previous_group)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FileSink({str(self.path)!r}, format={self.format!r})"

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Say what would be done with each range (`Sink.verdicts`)."""
        check_ranges(ranges)
        self._storage.check()
        with self._lock:
            return self._judge(self._log.settled(), ranges)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace what is there, else why not (`Sink.can_replace`)."""
        with self._lock:
            view = self._log.refresh()
        held = _held(view, ranges, only_older=False)
        return unreplaceable(held, str(self.path)) or self._groups.refusal(*_of_groups(view, ranges))

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of each range that is not yet there, in one commit (`Sink.write`).

        The frame is evaluated once, and not at all when every range is there. `rows` are counted for Parquet only.
        Raises `ConfigurationError` for columns that the format cannot give back, and for session settings that would
        change values (docs/sinks.md); `SinkRejectedError` for a value that it cannot give back.
        """
        spark = session_of(frame)
        check_columns(frame.schema, {_RANGE_COLUMN}, case_sensitive=is_case_sensitive(spark))
        check_ranges(ranges)
        self._storage.use(lambda: frame.sparkSession)
        self._storage.check()
        with self._lock:
            self._sweep_quietly()
            verdicts = self._judge(self._log.settled(), ranges)
        wanted = tuple(range_ for range_ in ranges if verdicts[range_] is not Verdict.SKIP)
        if not wanted:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        formats.check_writable(spark, self.format, frame.schema)
        done = [range_.partition for range_ in ranges if range_ not in wanted]
        attempt = self._begin(wanted)
        try:
            folder = _of_attempt(attempt)
            self._check_place(frame, _note_of(attempt))
            try:
                self._write_rows(frame, folder, done)
            except Exception as error:  # Spark's, with the text of the JVM's error
                if refusal := formats.refusal_in(error, self.format, wanted):
                    raise refusal from None
                raise
            self._reached("rows written")
            written = self._collect(folder, wanted)
            before_commit()
            read = checked_after_read(offsets_read, before_commit)
            replaced = partial(self._offsets_replaced, frame, folder, written, read)
            taken = self._commit(attempt, frame, wanted, written=written, offsets_replaced=replaced)
        except BaseException as error:
            if self._storage.is_settled(error):
                self._clear_quietly(attempt)
            raise
        self._clear_quietly(attempt)
        return WriteResult(
            taken=taken,
            skipped=tuple(range_ for range_ in ranges if range_ not in taken),
            rows={range_.partition: rows for range_ in taken if (rows := _of(written, range_).rows) is not None},
        )

    def read(self, spark: "SparkSession") -> "DataFrame":
        """Return the rows that count: of the commit files alone, without those that a newer generation replaced.

        Columns that only some commits have are null in the others; one whose type has changed is a
        `ConfigurationError`. Raises `SinkRejectedError` for an output that is damaged or was written by a newer
        version.
        """
        self._storage.use(lambda: spark)
        with self._lock:
            view = self._log.refresh()
            if not view.number:
                raise ConfigurationError(f"path: {self.path} holds no commit yet, so its columns are not known")
            self._refuse_lossy(view, "read")
            return read_committed(spark, view, lambda name: self._storage.to_read(_of_attempt(name)), self.options)

    def committed_files(self) -> tuple[Path, ...]:
        """Return the files that count, for readers other than Spark.

        Where a newer generation has replaced single offsets of an older one, the older file still holds these rows;
        `read` leaves them out. Raises `ConfigurationError` where they are no local files: `committed_uris`.
        """
        if not isinstance(self.path, Path):
            raise ConfigurationError(f"path: {self.path}: not local; ask for `committed_uris`")
        return tuple(map(Path, self.committed_uris()))

    def committed_uris(self) -> tuple[str, ...]:
        """Return the same where the files lie in another file system; local ones by their path."""
        with self._lock:
            view = self._log.refresh()
        return tuple(
            self._storage.full(_of_attempt(f"{commit.attempt}/{name}"))
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

    def _judge(self, view: CommitView, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Judge all, and refuse also where older rows could not be replaced, or are of another format."""
        verdicts = {wanted: judge_ranges(view.stored(wanted), wanted) for wanted in ranges}
        if view.commits and view.commits[-1].format != self.format:
            raise SinkRejectedError(
                f"format: {self.path} holds {view.commits[-1].format} files, not {self.format}: nothing was written; "
                "give the format of the output, or another path"
            )
        self._refuse_lossy(view, "written")
        undone = [wanted for wanted, verdict in verdicts.items() if verdict is not Verdict.SKIP]
        self._groups.check(*_of_groups(view, undone))
        if reason := unreplaceable(_held(view, undone, only_older=True), str(self.path)):
            raise SinkRejectedError(reason)
        return verdicts

    def _refuse_lossy(self, view: CommitView, done: str) -> None:
        """Refuse text files that were written with Spark's own options, which lost values."""
        for commit in view.commits:
            if reason := formats.lost_in(commit.format, commit.schema, commit.options):
                raise SinkRejectedError(
                    f"path: {self.path} holds {commit.format} files of an older marshal-dagster, {reason}: nothing was "
                    f'{done}. Continue in a new folder (docs/sinks.md, "A new folder"), and read the files of the old '
                    "one by committed_files() with Spark's own reader"
                )

    def _begin(self, wanted: Sequence[ClaimedRange]) -> str:
        attempt = secrets.token_hex(16)
        note = {"version": commit_log.version_of(wanted), "ranges": list(map(commit_log.range_to, wanted))}
        self._storage.write_whole(_note_of(attempt), commit_log.as_bytes(note))
        self._reached("attempt noted")
        return attempt

    def _check_place(self, frame: "DataFrame", note: str) -> None:
        """Make sure that what executors write is seen here."""
        self._storage.check_seen(frame.sparkSession, note)

    def _write_rows(self, frame: "DataFrame", folder: str, done: Sequence[int]) -> None:
        """Have Spark write the rows, but for those of the partitions `done`, a folder for each partition."""
        frame = without_partitions(frame, done)
        name = f.col(PARTITION_COLUMN).cast("string")
        if OFFSET_COLUMN in frame.columns:
            of_no_offset = f.concat(name, f.lit(_WITHOUT_OFFSET))
            name = f.when(f.col(OFFSET_COLUMN).isNull(), of_no_offset).otherwise(name)
        writer = (
            frame.withColumn(_RANGE_COLUMN, formats.refusing(frame, self.format, name))
            .write.format(self.format)
            .options(**formats.write_options(self.format, self.options), **_COMMITTER_OPTIONS)
            .partitionBy(_RANGE_COLUMN)
        )
        with some_files_at_once(frame.sparkSession):
            writer.save(self._storage.to_write(folder))

    def _collect(self, folder: str, wanted: Sequence[ClaimedRange]) -> dict[int, _WrittenFiles]:
        """List what Spark has committed below `folder`, by partition, and have the storage hold it."""
        written: dict[int, _WrittenFiles] = {}
        foreign: list[str] = []
        expected = {range_.partition for range_ in wanted}
        for place, names in self._places(folder).items():
            value = place.partition("=")[2]
            matched = _PARTITION.fullmatch(value)
            if matched is None or int(matched[1]) not in expected:
                foreign.append("null" if value == _NO_PARTITION else unquote(matched[1] if matched else value))
                continue
            rows = sum(self._storage.rows(f"{folder}/{name}") for name in names) if self.format == _COUNTED else None
            added = _WrittenFiles(tuple(names), rows, has_offsets=matched[2] is None)
            partition = int(matched[1])
            written[partition] = added.beside(written[partition]) if partition in written else added
        refuse_foreign_rows(foreign, wanted)
        self._storage.hold_below(folder)
        return written

    def _places(self, folder: str) -> dict[str, list[str]]:
        files = self._storage.files_below(folder)
        if files is None:
            raise SinkRejectedError(
                f"Spark has written the rows to another place than {self._storage.full(folder)}: nothing was committed"
            )
        places: dict[str, list[str]] = {}
        for name in sorted(files):
            place, _, file = name.partition("/")
            if place.startswith(f"{_RANGE_COLUMN}=") and not file.startswith(("_", ".")):
                places.setdefault(place, []).append(name)
        return places

    def _commit(
        self,
        attempt: str,
        frame: "DataFrame",
        wanted: Sequence[ClaimedRange],
        *,
        written: Mapping[int, _WrittenFiles],
        offsets_replaced: OffsetsRead,
    ) -> tuple[ClaimedRange, ...]:
        """Add a commit with the ranges of `wanted` that are not done meanwhile, and return these."""
        schema = frame.schema.json()
        options = self.options if self.format in formats.TEXT_FORMATS else None
        has_offsets = OFFSET_COLUMN in frame.columns
        replaced: Mapping[int, Intervals] | None = None
        while True:
            with self._lock:
                view = self._log.settled()
                verdicts = self._judge(view, wanted)
                taken = tuple(range_ for range_ in wanted if verdicts[range_] is not Verdict.SKIP)
                if not taken:
                    return ()
                over_older = {range_ for range_, _, _ in _held(view, taken, only_older=True)}
                if replaced is not None or not over_older:
                    entries = []
                    for range_ in taken:
                        offsets = (replaced or {}).get(range_.partition, ()) if range_ in over_older else ()
                        own = _of(written, range_)
                        whole = has_offsets and own.has_offsets
                        entries.append(Entry(range_, own.files, own.rows, whole, within(range_, offsets)))
                    self._reached("judged")
                    commit = Commit(attempt, self.format, schema, tuple(entries), options)
                    if self._log.append(commit, _of_attempt(attempt)):
                        self._reached("linked")
                        self._log.checkpoint_if_due(_of_attempt(attempt))
                        return taken
                    continue
            replaced = offsets_replaced()

    def _offsets_replaced(
        self, frame: "DataFrame", folder: str, written: Mapping[int, _WrittenFiles], offsets_read: OffsetsRead
    ) -> Mapping[int, Intervals]:
        """Work out at which offsets older rows give way.

        Kafka is read again for it, when compaction may have taken what a written row comes from.
        """
        names = [f"{folder}/{name}" for range_files in written.values() for name in range_files.files]
        own = self._offsets_in(frame, names) if names and OFFSET_COLUMN in frame.columns else {}
        return both(offsets_read(), own)

    def _offsets_in(self, frame: "DataFrame", names: Sequence[str]) -> Mapping[int, Intervals]:
        paths = [self._storage.to_read(name) for name in names]
        rows = formats.read_files(frame.sparkSession, self.format, frame.schema, self.options, paths)
        return reader.offsets_read(rows.where(f.col(OFFSET_COLUMN).between(0, reader.HIGHEST_OFFSET)))

    def _sweep_quietly(self) -> None:
        """Sweep, but let what hinders it hinder no write."""
        try:
            self._sweep()
        except Exception as error:  # noqa: BLE001 - a storage's, or of what another has damaged
            _logger.warning("attempts below %s were not swept: %s", self._storage.full(_ATTEMPTS), error)

    def _sweep(self) -> int:
        # In this order: an attempt found without its note was cleared before, so the commits read now tell of it, on
        # other hosts too, as `refresh` asks the server for them anew.
        folders = {name for name in self._storage.names(_ATTEMPTS) if not name.endswith(_NOTE)}
        notes = {
            name.removesuffix(_NOTE)
            for name in self._storage.names(_ATTEMPTS)
            if name.endswith(_NOTE) and not name.startswith(".")
        }
        view = self._log.settled()
        swept = 0
        for attempt in sorted(folders | notes):
            if attempt in notes and not self._is_decided(attempt, view):
                continue
            if attempt not in notes and view.files_of(attempt) is not None:
                continue
            self._clear(attempt, view)
            swept += 1
        return swept

    def _is_decided(self, attempt: str, view: CommitView) -> bool:
        note = commit_log.load(self._storage, _note_of(attempt))
        if note is None:
            return False  # its writer has just cleared it
        wanted = map(commit_log.range_from, note["ranges"])
        return all(decided(view.stored(range_), range_) for range_ in wanted)

    def _clear(self, attempt: str, view: CommitView) -> None:
        """Remove what of an attempt does not count, and then its note."""
        self._storage.remove_below(_of_attempt(attempt), view.files_of(attempt) or ())
        self._reached("cleared")
        self._storage.remove(_note_of(attempt))

    def _clear_quietly(self, attempt: str) -> None:
        """Clear, but let what hinders it neither hide an error nor undo a commit; a later sweep does it."""
        try:
            with self._lock:
                self._clear(attempt, self._log.refresh())
        except Exception as error:  # noqa: BLE001 - as above
            _logger.warning("attempt %s was not cleared: %s", self._storage.full(_of_attempt(attempt)), error)


def _of_attempt(name: str) -> str:
    return f"{_ATTEMPTS}/{name}"


def _note_of(attempt: str) -> str:
    return _of_attempt(attempt + _NOTE)


def _held(
    view: CommitView, ranges: Sequence[ClaimedRange], *, only_older: bool
) -> Iterator[tuple[ClaimedRange, int, bool]]:
    """Yield the ranges where the output has rows, with the generation of these, and whether all have offsets."""
    for wanted in ranges:
        for entry in view.at_offsets_of(wanted, below_generation=wanted.generation if only_older else None):
            yield wanted, entry.taken.generation, entry.has_offsets


def _of_groups(
    view: CommitView, wanted: Sequence[ClaimedRange]
) -> tuple[Sequence[ClaimedRange], Collection[str], Callable[[Sequence[ClaimedRange]], Iterator[ClaimedRange]]]:
    """Return what `OutputGroups` judges by."""
    groups = view.groups(wanted[0].topic) if wanted else ()
    return wanted, groups, lambda ranges: (range_ for range_, _, _ in _held(view, ranges, only_older=False))


def _of(written: Mapping[int, _WrittenFiles], taken: ClaimedRange) -> _WrittenFiles:
    return written.get(taken.partition, _NOTHING)


def _opened(
    path: str | os.PathLike[str], session: "Callable[[], SparkSession] | None", exclusive: Exclusive | None
) -> tuple[Path | str, Storage]:
    """Return the output's path, as text where it is not local, and what is below it."""
    text = os.fspath(path)
    scheme = urlsplit(text)
    if scheme.scheme not in {"", "file"} and text.startswith(f"{scheme.scheme}://"):
        uri = text.rstrip("/")
        return uri, HadoopStorage(f"{uri}/{_FOLDER}", session, exclusive)
    if exclusive is not None:
        raise ConfigurationError("exclusive: a local file system needs no vouching for, it makes hard links")
    if scheme.scheme == "file" and scheme.netloc in {"", "localhost"}:
        text = unquote(scheme.path)
    elif "://" in text or (scheme.scheme and ":" in text.split("/", 1)[0]):
        raise ConfigurationError(
            f"path: {text}; a file sink writes to a local path, a file: URI, or a URI with :// that Hadoop knows"
        )
    if not text:
        raise ConfigurationError("path: empty; give the folder of the output")
    local = Path(text).expanduser().absolute()
    return local, LocalStorage(local / _FOLDER)
