"""A sink that writes files to a folder shared with all executors, or through Hadoop's file system API (`storage`).

The output's path contains only the folder `_marshal`, so a reader of the path itself never sees incomplete work:

    _marshal/attempts/<attempt>.json                         the ranges of an attempt; written first, removed last
    _marshal/attempts/<attempt>/marshal_range=<partition>/   the rows of one range; those without offset separately
    _marshal/commits/<n>.json                                the files that commit n adds to the output
    _marshal/checkpoints/<n>.json                            the contents of all commits up to n

A writer writes the files of its attempt, judges its ranges by all commits, and adds the next commit with the names of
its files. If another writer made that commit first, it judges again (protocol.md, section 6, "Effectively once").
Nothing is ever overwritten. Files that a fenced process or a late task adds are named in no commit, so readers ignore
them.
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
from marshal_dagster.sinks.files import commit_log, formats, report
from marshal_dagster.sinks.files.commit_log import Commit, CommitLog, CommitView, Entry, decided
from marshal_dagster.sinks.files.hadoop_storage import Exclusive, HadoopStorage
from marshal_dagster.sinks.files.reader import read_committed
from marshal_dagster.sinks.files.storage import LocalStorage, Storage
from marshal_dagster.sinks.files.writer import some_files_at_once
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.report import SinkReport, VacuumResult
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
# With version 1 of the output committer, the driver moves the files of all tasks once the whole job has succeeded.
_COMMITTER_OPTIONS = {
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


@dataclass(frozen=True, slots=True)
class _WrittenFiles:
    """The files of one range in an attempt, and the number of their rows if known."""

    files: tuple[str, ...] = ()
    rows: int | None = 0
    has_offsets: bool = True

    def beside(self, others: "_WrittenFiles") -> "_WrittenFiles":
        """Return these files together with `others` of the same range."""
        return _WrittenFiles(
            files=(*others.files, *self.files),
            rows=None if self.rows is None or others.rows is None else self.rows + others.rows,
            has_offsets=self.has_offsets and others.has_offsets,
        )


_NOTHING = _WrittenFiles()


class FileSink(Steps):
    """A sink that writes files to the folder `path`; read them with `read` or `committed_files`.

    Example:
        ```python
        local = FileSink("/data/orders")
        on_hdfs = FileSink("hdfs://namenode:8020/data/orders", format="orc")
        ```
    """

    supports_unordered_ranges = True
    """True: the sink stores every range, so it accepts ranges in any order."""

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
        """Configure the output; the sink does not access the path before its first use.

        Args:
            path: A local path, a `file:` URI, or a URI of a file system that Hadoop supports, such as `hdfs://`.
            format: `parquet`, `orc`, `json`, `csv` or `avro`.
            options: Options of Spark's writer and reader for `format`. Options that the sink sets itself, so that
                rows are read back as they were written, are refused.
            session: For Hadoop file systems: returns the Spark session to use, by default the active one.
            exclusive: For Hadoop file systems that do not declare it themselves: how this one lets only one of several
                writers create a file (docs/sinks.md, "Files").
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/sinks.md,
                "Another group").

        Raises:
            ConfigurationError: If the path, the format or an option is not supported.
        """
        self.path, self._storage = _opened(path, session, exclusive)
        if format not in formats.FORMATS:
            raise ConfigurationError(f"format is {format!r}; it must be one of {', '.join(formats.FORMATS)}")
        self.format = format
        """The format of the files, such as `parquet`."""
        self.options = dict(options or {})
        """The options of Spark's writer and reader, as passed."""
        formats.check_options(format, self.options)
        self._log = CommitLog(self._storage)
        self._groups = OutputGroups(str(self.path), shared_by_groups, previous_group)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FileSink({str(self.path)!r}, format={self.format!r})"

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Return what the sink would do with each range (`Sink.verdicts`).

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: If one of the ranges cannot be written, or a file of the output is missing or damaged.
            ConfigurationError: If the file system cannot keep two writers apart, or there is no session to reach it.
        """
        check_ranges(ranges)
        self._storage.check()
        with self._lock:
            return self._judge(self._log.settled(), ranges)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace the rows at these offsets, else why not (`Sink.can_replace`).

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason why these rows cannot be replaced.

        Raises:
            SinkRejectedError: If the output is damaged or was written by a newer version.
        """
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
        """Write the rows of each range that the output does not have, in one commit (`Sink.write`).

        The frame is evaluated once, and not at all if the output has every range.

        Args:
            frame: The rows, with the column `partition` and optionally `offset`.
            ranges: The ranges of the batch.
            offsets_read: Returns the offsets that the batch has read; called if older rows are replaced.
            before_commit: Checks that the batch still holds its claims.

        Returns:
            The ranges taken and skipped. `rows` is filled for Parquet only.

        Raises:
            SinkRejectedError: If a range cannot be written, or the format cannot store a value unchanged.
            ConfigurationError: If the format cannot store a column's type unchanged, or a setting of the session
                would change values (docs/sinks.md, "Files").
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
        """Return the committed rows, without those that a newer generation has replaced.

        Columns that only some commits have are null in the rows of the others.

        Args:
            spark: The session that reads.

        Returns:
            A frame of the rows; Spark reads the files when the frame is evaluated.

        Raises:
            ConfigurationError: If nothing was committed yet, a column's type differs between commits, or a setting of
                the session would change the values.
            SinkRejectedError: If the output is damaged, was written by a newer version, or has JSON or CSV files of an
                older version that lost values.
        """
        self._storage.use(lambda: spark)
        with self._lock:
            view = self._log.refresh()
            if not view.number:
                raise ConfigurationError(
                    f"output {self.path} holds no commit yet, so its columns are not known. Read it after the first "
                    "batch"
                )
            self._refuse_lossy(view, "read")
            return read_committed(spark, view, lambda name: self._storage.to_read(_of_attempt(name)), self.options)

    def committed_files(self) -> tuple[Path, ...]:
        """Return the committed local files, for readers other than Spark.

        If a newer generation has replaced some offsets of an older file, that file still contains the old rows; only
        `read` leaves them out.

        Returns:
            The paths of the files.

        Raises:
            ConfigurationError: If the output is not local; call `committed_uris` instead.
            SinkRejectedError: If the output is damaged or was written by a newer version.
        """
        if not isinstance(self.path, Path):
            raise ConfigurationError(f"output {self.path} is not local; call `committed_uris` instead")
        return tuple(map(Path, self.committed_uris()))

    def committed_uris(self) -> tuple[str, ...]:
        """Return the committed files as URIs, or as paths if the output is local; see `committed_files`.

        Returns:
            The URIs or paths of the files.

        Raises:
            SinkRejectedError: If the output is damaged or was written by a newer version.
        """
        with self._lock:
            view = self._log.refresh()
        return tuple(
            self._storage.full(_of_attempt(f"{commit.attempt}/{name}"))
            for commit in view.commits
            for entry in commit.entries
            for name in entry.files
        )

    def sweep(self) -> int:
        """Remove files of attempts that can no longer be committed.

        An attempt is removed if the commits contain or permanently refuse each of its ranges, never because of its
        age. So an attempt that is removed while it still runs could not have committed anything.

        Returns:
            The number of attempts that were removed.

        Raises:
            SinkRejectedError: If the output is damaged or was written by a newer version.
        """
        with self._lock:
            return self._sweep()

    def describe(self) -> SinkReport:
        """Return what the output has, by its commits.

        Returns:
            The ranges, by group, topic, partition and generation.

        Raises:
            SinkRejectedError: If the output is damaged or was written by a newer version.
        """
        with self._lock:
            return SinkReport(f"folder {self.path}", tuple(report.stored_generations(self._log.refresh())))

    def check(self) -> list[str]:
        """Return what is wrong: gaps and overlaps of ranges, and committed files without their rows.

        The numbers of rows are compared for Parquet, whose files contain them.

        Returns:
            One line for each problem.
        """
        try:
            with self._lock:
                view = self._log.refresh()
        except SinkRejectedError as error:
            return [str(error)]
        files = report.file_problems(view, self._storage, _ATTEMPTS, are_counted=self.format == _COUNTED)
        return [*report.range_problems(view), *files]

    def vacuum(self, *, dry_run: bool) -> VacuumResult:
        """Remove files of attempts that can no longer be committed (`sweep`).

        Args:
            dry_run: Whether to report only.

        Returns:
            The number of attempts, and of those that are removed.
        """
        with self._lock:
            count = len(self._attempts())
            swept = self._sweep(dry_run=dry_run)
        return VacuumResult(f"folder {self.path}", count, merged=0, obsolete=swept, moved_rows=None, what="attempts")

    def _judge(self, view: CommitView, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Judge all ranges. Refuses also if older rows cannot be replaced, or the output has another format."""
        verdicts = {wanted: judge_ranges(view.stored(wanted), wanted) for wanted in ranges}
        if view.commits and view.commits[-1].format != self.format:
            raise SinkRejectedError(
                f"output {self.path} holds {view.commits[-1].format} files, not {self.format}, so nothing was "
                "written. Set the sink's format to that of the output, or use another path"
            )
        self._refuse_lossy(view, "written")
        undone = [wanted for wanted, verdict in verdicts.items() if verdict is not Verdict.SKIP]
        self._groups.check(*_of_groups(view, undone))
        if reason := unreplaceable(_held(view, undone, only_older=True), str(self.path)):
            raise SinkRejectedError(reason)
        return verdicts

    def _refuse_lossy(self, view: CommitView, done: str) -> None:
        """Refuse text files that an older version wrote with Spark's default options, which lose values."""
        for commit in view.commits:
            if reason := formats.lost_in(commit.format, commit.schema, commit.options):
                raise SinkRejectedError(
                    f"output {self.path} holds {commit.format} files of an older marshal-dagster, {reason}: nothing "
                    f'was {done}. Continue in a new folder (docs/sinks.md, "A new folder"), and read the files that '
                    "committed_files() returns for the old one with Spark's own reader"
                )

    def _begin(self, wanted: Sequence[ClaimedRange]) -> str:
        attempt = secrets.token_hex(16)
        note = {"version": commit_log.version_of(wanted), "ranges": list(map(commit_log.range_to, wanted))}
        self._storage.write_whole(_note_of(attempt), commit_log.as_bytes(note))
        self._reached("attempt noted")
        return attempt

    def _check_place(self, frame: "DataFrame", note: str) -> None:
        """Check that the executors and this process see the same files; tests override this."""
        self._storage.check_seen(frame.sparkSession, note)

    def _write_rows(self, frame: "DataFrame", folder: str, done: Sequence[int]) -> None:
        """Write the rows with Spark, except those of the partitions `done`, to one folder for each partition."""
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
        """Return the files that Spark has written below `folder`, by partition, and sync them to disk."""
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
                f"Spark has written the rows to another place than {self._storage.full(folder)}, so nothing was "
                "committed. Use a path that this process and Spark resolve to the same folder"
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
        """Commit those of `wanted` that no other writer has written meanwhile, and return them."""
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
        """Return the offsets at which older rows are replaced: those read from Kafka and those of the new rows.

        `offsets_read` reads Kafka again, and compaction can have removed the message of a written row since.
        """
        names = [f"{folder}/{name}" for range_files in written.values() for name in range_files.files]
        own = self._offsets_in(frame, names) if names and OFFSET_COLUMN in frame.columns else {}
        return both(offsets_read(), own)

    def _offsets_in(self, frame: "DataFrame", names: Sequence[str]) -> Mapping[int, Intervals]:
        paths = [self._storage.to_read(name) for name in names]
        rows = formats.read_files(frame.sparkSession, self.format, frame.schema, self.options, paths)
        return reader.offsets_read(rows.where(f.col(OFFSET_COLUMN).between(0, reader.HIGHEST_OFFSET)))

    def _sweep_quietly(self) -> None:
        """Sweep, and log errors instead of raising them, so that they do not prevent a write."""
        try:
            self._sweep()
        except Exception as error:  # noqa: BLE001 - any error of the storage or of damaged files
            _logger.warning("files of old attempts below %s were not removed: %s", self._storage.full(_ATTEMPTS), error)

    def _attempts(self) -> dict[str, bool]:
        """Return the attempts that have files or a note, and whether they have a note."""
        folders = {name for name in self._storage.names(_ATTEMPTS) if not name.endswith(_NOTE)}
        notes = {
            name.removesuffix(_NOTE)
            for name in self._storage.names(_ATTEMPTS)
            if name.endswith(_NOTE) and not name.startswith(".")
        }
        return {attempt: attempt in notes for attempt in sorted(folders | notes)}

    def _sweep(self, *, dry_run: bool = False) -> int:
        # The order matters. An attempt without a note was cleared before it was listed, so the commits read after the
        # listing contain it if it was committed. This holds across hosts, because `refresh` bypasses cached listings.
        attempts = self._attempts()
        view = self._log.settled()
        swept = 0
        for attempt, has_note in attempts.items():
            if has_note and not self._is_decided(attempt, view):
                continue
            if not has_note and view.files_of(attempt) is not None:
                continue
            if not dry_run:
                self._clear(attempt, view)
            swept += 1
        return swept

    def _is_decided(self, attempt: str, view: CommitView) -> bool:
        note = commit_log.load(self._storage, _note_of(attempt))
        if note is None:
            return False  # its writer has removed it meanwhile
        wanted = map(commit_log.range_from, note["ranges"])
        return all(decided(view.stored(range_), range_) for range_ in wanted)

    def _clear(self, attempt: str, view: CommitView) -> None:
        """Remove the files of an attempt that are not committed, and then its note."""
        self._storage.remove_below(_of_attempt(attempt), view.files_of(attempt) or ())
        self._reached("cleared")
        self._storage.remove(_note_of(attempt))

    def _clear_quietly(self, attempt: str) -> None:
        """Clear an attempt, and log errors instead of raising them; a later sweep removes what is left."""
        try:
            with self._lock:
                self._clear(attempt, self._log.refresh())
        except Exception as error:  # noqa: BLE001 - as above
            _logger.warning("files of attempt %s were not removed: %s", self._storage.full(_of_attempt(attempt)), error)


def _of_attempt(name: str) -> str:
    return f"{_ATTEMPTS}/{name}"


def _note_of(attempt: str) -> str:
    return _of_attempt(attempt + _NOTE)


def _held(
    view: CommitView, ranges: Sequence[ClaimedRange], *, only_older: bool
) -> Iterator[tuple[ClaimedRange, int, bool]]:
    """Yield each range at which the output has rows, with their generation and whether all of them have offsets."""
    for wanted in ranges:
        for entry in view.at_offsets_of(wanted, below_generation=wanted.generation if only_older else None):
            yield wanted, entry.taken.generation, entry.has_offsets


def _of_groups(
    view: CommitView, wanted: Sequence[ClaimedRange]
) -> tuple[Sequence[ClaimedRange], Collection[str], Callable[[Sequence[ClaimedRange]], Iterator[ClaimedRange]]]:
    """Return the arguments of `OutputGroups.check` and `refusal`."""
    groups = view.groups(wanted[0].topic) if wanted else ()
    return wanted, groups, lambda ranges: (range_ for range_, _, _ in _held(view, ranges, only_older=False))


def _of(written: Mapping[int, _WrittenFiles], taken: ClaimedRange) -> _WrittenFiles:
    return written.get(taken.partition, _NOTHING)


def _opened(
    path: str | os.PathLike[str], session: "Callable[[], SparkSession] | None", exclusive: Exclusive | None
) -> tuple[Path | str, Storage]:
    """Return the output's path, as a string if it is not local, and its storage."""
    text = os.fspath(path)
    scheme = urlsplit(text)
    if scheme.scheme not in {"", "file"} and text.startswith(f"{scheme.scheme}://"):
        uri = text.rstrip("/")
        return uri, HadoopStorage(f"{uri}/{_FOLDER}", session, exclusive)
    if exclusive is not None:
        raise ConfigurationError(
            f"exclusive is {exclusive!r}, which is only for Hadoop file systems, but {text} is a local path: leave it "
            "out"
        )
    if scheme.scheme == "file" and scheme.netloc in {"", "localhost"}:
        text = unquote(scheme.path)
    elif "://" in text or (scheme.scheme and ":" in text.split("/", 1)[0]):
        raise ConfigurationError(
            f"path is {text!r}; it must be a local path, a file: URI, or a URI with :// that Hadoop supports"
        )
    if not text:
        raise ConfigurationError("path is empty; it must be the folder of the output")
    local = Path(text).expanduser().absolute()
    return local, LocalStorage(local / _FOLDER)
