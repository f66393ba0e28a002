"""A sink that writes files to a folder shared with all executors, or through Hadoop's file system API (`storage`).

Everything but committed files lies in the folder `_marshal`, so a reader of the path never sees incomplete work:

    _marshal/attempts/<attempt>.json                         the ranges of an attempt; written first, removed last
    _marshal/attempts/<attempt>/marshal_range=<partition>/   the rows of one range; those without offset separately
    _marshal/attempts/<attempt>/older-<n>/                   older rows that stay where the attempt replaces others
    _marshal/commits/<n>.json                                the files that commit n adds to the output
    _marshal/checkpoints/<n>.json                            the contents of all commits up to n
    <partition>-<file>, <column>=<value>/<partition>-<file>  committed files, moved there by their writer or the next

A writer writes the files of its attempt, judges its ranges by all commits, and adds the next commit with the names of
its files. If another writer made that commit first, it judges again (protocol.md, section 6, "Effectively once"). Only
then are the files moved (`places`, docs/contributing/decisions/0023-visible-files.md). Nothing is ever overwritten.
Files that a fenced process or a late task adds are named in no commit, so they are never moved. Outputs of older
versions, and those where a move is not atomic, keep their committed files in the folders of the attempts.
"""

import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict, judge_ranges
from marshal_dagster.sinks.caching import without_partitions
from marshal_dagster.sinks.files import commit_log, formats, partitioning, report
from marshal_dagster.sinks.files.attempt import Attempt, WrittenFiles
from marshal_dagster.sinks.files.commit_log import Commit, CommitLog, CommitView, Entry, decided
from marshal_dagster.sinks.files.hadoop_storage import Exclusive, HadoopStorage
from marshal_dagster.sinks.files.object_location import SCHEMES, StoreOptions
from marshal_dagster.sinks.files.object_storage import ObjectStorage
from marshal_dagster.sinks.files.older_rows import OlderRows
from marshal_dagster.sinks.files.partitioning import NO_VALUE
from marshal_dagster.sinks.files.places import (
    ATTEMPTS,
    NOTE,
    RANGE_COLUMN,
    base_of,
    note_of,
    of_attempt,
    show,
    visible_place,
)
from marshal_dagster.sinks.files.reader import Places, read_committed, read_older
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
    ranges_to_write,
    refuse_foreign_rows,
    session_of,
    unreplaceable,
)
from marshal_dagster.spark import reader
from marshal_dagster.spark.column_names import is_case_sensitive
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger(__name__)

_COUNTED = "parquet"
_WITHOUT_OFFSET = "_without_offset"
_PARTITION = re.compile(rf"(0|-?[1-9][0-9]*)({_WITHOUT_OFFSET})?")
# With version 1 of the output committer, the driver moves the files of all tasks once the whole job has succeeded.
_COMMITTER_OPTIONS = {
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}


class FileSink(Steps):
    """A sink that writes files to the folder `path`; read them with `read` or `committed_files`.

    Example:
        ```python
        local = FileSink("/data/orders")
        on_hdfs = FileSink("hdfs://namenode:8020/data/orders", format="orc")
        on_s3 = FileSink("s3://lake/orders", storage_options={"region": "eu-central-1"})
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
        partition_by: Sequence[str] = (),
        session: "Callable[[], SparkSession] | None" = None,
        exclusive: Exclusive | None = None,
        storage_options: StoreOptions | None = None,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
    ) -> None:
        """Configure the output; the sink does not access the path before its first use.

        Args:
            path: A local path or a `file:` URI. Or a URI of an object store (`s3://`, `s3a://`, `gs://`, `abfss://`)
                or of a file system that Hadoop supports, such as `hdfs://`.
            format: `parquet`, `orc`, `json`, `csv` or `avro`.
            options: Options of Spark's writer and reader for `format`. Options that the sink sets itself, so that
                rows are read back as they were written, are refused.
            partition_by: Columns of strings, integers, booleans or dates whose values become folders `column=value`,
                and that the files themselves do not have.
            session: For Hadoop file systems: returns the Spark session to use, by default the active one.
            exclusive: For Hadoop file systems that do not declare it themselves: how this one lets only one of several
                writers create a file (docs/how-to/sinks.md, "Files").
            storage_options: For object stores: settings of this process's client, by their names in obstore, such as
                `endpoint` and `region`. A value is a text or a secret, such as pydantic's `SecretStr`. A text
                `env:NAME` or `file:/PATH` names where the value is (docs/how-to/sinks.md, "Object stores").
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/how-to/sinks.md,
                "Another group").

        Raises:
            ConfigurationError: The path, the format or an option is not supported.
        """
        self.path, self._storage = _opened(path, session, exclusive, storage_options)
        if format not in formats.FORMATS:
            raise ConfigurationError(f"format is {format!r}; it must be one of {', '.join(formats.FORMATS)}")
        self.format = format
        """The format of the files, such as `parquet`."""
        self.options = dict(options or {})
        """The options of Spark's writer and reader, as passed."""
        formats.check_options(format, self.options)
        self.partition_by = partitioning.check_names(partition_by)
        """The columns whose values become folders."""
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
            SinkRejectedError: One of the ranges cannot be written, or a file of the output is missing or damaged.
            ConfigurationError: The file system or the object store cannot keep two writers apart, or there is no
                session to reach it.
            AuthorizationError: An object store has refused access.
            UnavailableError: An object store cannot be reached.
        """
        check_ranges(ranges)
        self._check_storage()
        with self._lock:
            view = self._log.settled()
            self._show_quietly(view)
            return self._judge(view, ranges)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if a new generation could replace the rows at these offsets, else why not (`Sink.can_replace`).

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason why these rows cannot be replaced.

        Raises:
            SinkRejectedError: The output is damaged or was written by a newer version.
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
            SinkRejectedError: A range cannot be written, or the format cannot store a value unchanged.
            ConfigurationError: The format cannot store a column's type unchanged, or a setting of the session
                would change values (docs/how-to/sinks.md, "Files").
        """
        spark = session_of(frame)
        check_columns(frame.schema, {RANGE_COLUMN}, case_sensitive=is_case_sensitive(spark))
        partitioning.check_partition_by(spark, frame.schema, self.partition_by)
        check_ranges(ranges)
        self._storage.use(lambda: frame.sparkSession)
        self._check_storage()
        with self._lock:
            self._sweep_quietly()
            wanted = ranges_to_write(self._judge(self._log.settled(), ranges))
        if not wanted:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        formats.check_writable(spark, self.format, frame.schema)
        done = [range_.partition for range_ in ranges if range_ not in wanted]
        attempt = self._begin(wanted)
        try:
            folder = of_attempt(attempt)
            self._check_place(frame, note_of(attempt))
            try:
                self._write_rows(frame, folder, done)
            except Exception as error:  # Spark's, with the text of the JVM's error
                if refusal := formats.refusal_in(error, self.format, wanted):
                    raise refusal from None
                raise
            self._reached("rows written")
            own = Attempt(attempt, frame, wanted, self._collect(folder, wanted))
            before_commit()
            taken = self._commit(own, offsets_read, before_commit)
        except BaseException as error:
            if self._storage.is_settled(error):
                self._clear_quietly(attempt)
            raise
        hindrance = self._clear_quietly(attempt)
        return WriteResult(
            taken=taken,
            skipped=tuple(range_ for range_ in ranges if range_ not in taken),
            rows={range_.partition: rows for range_ in taken if (rows := own.of(range_).rows) is not None},
            note=hindrance,
        )

    def read(self, spark: "SparkSession") -> "DataFrame":
        """Return the committed rows, without those that a newer generation has replaced.

        Columns that only some commits have are null in the rows of the others.

        Args:
            spark: The session that reads.

        Returns:
            A frame of the rows; Spark reads the files when the frame is evaluated.

        Raises:
            ConfigurationError: Nothing was committed yet, a column's type differs between commits, or a setting of
                the session would change the values.
            SinkRejectedError: The output is damaged, was written by a newer version, or has JSON or CSV files of an
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
            return read_committed(spark, view, self._read_places(self._place_of(view)), self.options)

    def committed_files(self) -> tuple[Path, ...]:
        """Return the committed local files, for readers other than Spark.

        Files that an older version of marshal-dagster has written can contain rows that a newer generation has
        replaced; only `read` leaves these out.

        Returns:
            The paths of the files.

        Raises:
            ConfigurationError: The output is not local; call `committed_uris` instead.
            SinkRejectedError: The output is damaged or was written by a newer version.
        """
        if not isinstance(self.path, Path):
            raise ConfigurationError(f"output {self.path} is not local; call `committed_uris` instead")
        return tuple(map(Path, self.committed_uris()))

    def committed_uris(self) -> tuple[str, ...]:
        """Return the committed files as URIs, or as paths if the output is local; see `committed_files`.

        Returns:
            The URIs or paths of the files.

        Raises:
            SinkRejectedError: The output is damaged or was written by a newer version.
        """
        with self._lock:
            view = self._log.refresh()
            place = self._place_of(view)
        return tuple(
            self._storage.full(place(name))
            for commit in view.commits
            for entry in commit.entries
            for name in view.files(entry)
        )

    def sweep(self) -> int:
        """Remove files of attempts that can no longer be committed, and move committed ones to their places.

        An attempt is removed if the commits contain or permanently refuse each of its ranges, never because of its
        age. So an attempt that is removed while it still runs could not have committed anything.

        Returns:
            The number of attempts that were removed or completed.

        Raises:
            SinkRejectedError: The output is damaged or was written by a newer version.
        """
        with self._lock:
            return sum(self._sweep())

    def describe(self) -> SinkReport:
        """Return what the output has, by its commits.

        Returns:
            The ranges, by group, topic, partition and generation.

        Raises:
            SinkRejectedError: The output is damaged or was written by a newer version.
        """
        with self._lock:
            return SinkReport(f"folder {self.path}", tuple(report.stored_generations(self._log.refresh())))

    def check(self) -> list[str]:
        """Return what is wrong: gaps and overlaps, files without their rows, and files that are not committed.

        The numbers of rows are compared for Parquet, whose files contain them.

        Returns:
            One line for each problem.
        """
        try:
            with self._lock:
                return self._problems()
        except SinkRejectedError as error:
            return [str(error)]

    def _problems(self) -> list[str]:
        """Check the files by the commits, and again if a writer has committed meanwhile."""
        while True:
            view = self._log.refresh()
            number = view.number
            files = report.file_problems(view, self._storage, are_counted=self.format == _COUNTED)
            problems = [*report.range_problems(view), *files]
            if not problems or self._log.refresh().number == number:
                return problems

    def vacuum(self, *, dry_run: bool) -> VacuumResult:
        """Remove files of attempts that can no longer be committed, and move committed ones to their places (`sweep`).

        Args:
            dry_run: Whether to report only.

        Returns:
            The number of attempts, of those that are removed, and of those that were committed.
        """
        with self._lock:
            count = len(self._attempts())
            removed, completed = self._sweep(dry_run=dry_run)
        return VacuumResult(
            f"folder {self.path}",
            count,
            merged=0,
            obsolete=removed,
            moved_rows=None,
            completed=completed,
            what="attempts",
        )

    def _judge(self, view: CommitView, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Judge all ranges. Refuses also if older rows cannot be replaced, or the output has another format."""
        verdicts = {wanted: judge_ranges(view.stored(wanted), wanted) for wanted in ranges}
        if view.newest is not None and view.newest.format != self.format:
            raise SinkRejectedError(
                f"output {self.path} holds {view.newest.format} files, not {self.format}, so nothing was "
                "written. Set the sink's format to that of the output, or use another path"
            )
        if view.newest is not None and view.newest.partition_by != self.partition_by:
            raise SinkRejectedError(
                f"output {self.path} is partitioned by {list(view.newest.partition_by)}, not by "
                f"{list(self.partition_by)}, so nothing was written. Set partition_by to the output's columns, or use "
                "another path"
            )
        if view.newest is not None and view.newest.visible and not self._storage.can_move():
            raise SinkRejectedError(
                f"output {self.path} was copied from a file system whose files are moved to visible places, which is "
                "not possible here, so nothing was written. Begin a new output in another folder"
            )
        self._refuse_lossy(view, "written")
        undone = ranges_to_write(verdicts)
        self._groups.check(*_of_groups(view, undone))
        if reason := unreplaceable(_held(view, undone, only_older=True), str(self.path)):
            raise SinkRejectedError(reason)
        return verdicts

    def _refuse_lossy(self, view: CommitView, done: str) -> None:
        """Refuse files of an older version that lose values: text by Spark's default options, and timestamps in ORC."""
        for commit in view.commits:
            if reason := formats.lost_in(commit.format, commit.schema, commit.options):
                raise SinkRejectedError(
                    f"output {self.path} holds {commit.format} files of an older marshal-dagster, {reason}: nothing "
                    f'was {done}. Continue in a new folder (docs/how-to/sinks.md, "A new folder"), and read the files '
                    "that committed_files() returns for the old one with Spark's own reader"
                )

    def _begin(self, wanted: Sequence[ClaimedRange]) -> str:
        attempt = secrets.token_hex(16)
        note = {"version": commit_log.version_of(wanted), "ranges": list(map(commit_log.range_to, wanted))}
        self._storage.write_whole(note_of(attempt), commit_log.as_bytes(note))
        self._reached("attempt noted")
        return attempt

    def _check_storage(self) -> None:
        self._storage.check()
        if self.partition_by and not self._storage.can_move():
            raise ConfigurationError(
                f"partition_by: files of {self.path} cannot be moved to folders in one step, which its file system "
                "does not promise. Leave partition_by out, or write to a table (IcebergSink, DeltaSink)"
            )

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
        named = frame.withColumn(RANGE_COLUMN, formats.refusing(frame, self.format, name, self.partition_by))
        self._save(named, folder, self.options)

    def _save(self, frame: "DataFrame", folder: str, options: Mapping[str, str]) -> None:
        writer = (
            frame.write.format(self.format)
            .options(**formats.write_options(self.format, options), **_COMMITTER_OPTIONS)
            .partitionBy(RANGE_COLUMN, *self.partition_by)
        )
        with some_files_at_once(frame.sparkSession):
            writer.save(self._storage.to_write(folder))

    def _write_older(self, spark: "SparkSession", folder: str, older: Mapping[str, OlderRows]) -> None:
        """Write the rows that are not replaced with Spark, to one folder for each key of `older`."""
        places = self._read_places(visible_place)
        whole = read_older(spark, older, places, self.options, RANGE_COLUMN)
        commit = next(iter(older.values())).commit
        self._save(whole, folder, self.options if commit.options is None else commit.options)

    def _collect(self, folder: str, wanted: Sequence[ClaimedRange]) -> dict[int, WrittenFiles]:
        """Return the files that Spark has written below `folder`, by partition, and sync them to disk."""
        written: dict[int, WrittenFiles] = {}
        foreign: list[str] = []
        expected = {range_.partition for range_ in wanted}
        for value, names in self._files_by_range(folder).items():
            matched = _PARTITION.fullmatch(value)
            if matched is None or int(matched[1]) not in expected:
                foreign.append("null" if value == NO_VALUE else unquote(matched[1] if matched else value))
                continue
            is_counted = self.format == _COUNTED
            rows = self._storage.rows_of([f"{folder}/{name}" for name in names]) if is_counted else None
            own = tuple(f"{folder.removeprefix(f'{ATTEMPTS}/')}/{name}" for name in names)
            added = WrittenFiles(own, rows, has_offsets=matched[2] is None)
            partition = int(matched[1])
            written[partition] = added.beside(written[partition]) if partition in written else added
        refuse_foreign_rows(foreign, wanted)
        self._storage.hold_below(folder)
        return written

    def _files_by_range(self, folder: str) -> dict[str, list[str]]:
        """Return the files below `folder` by the value of `RANGE_COLUMN`."""
        files = self._storage.files_below(folder)
        if files is None:
            raise SinkRejectedError(
                f"Spark has written the rows to another place than {self._storage.full(folder)}, so nothing was "
                "committed. Use a path that this process and Spark resolve to the same folder"
            )
        found: dict[str, list[str]] = {}
        for name in sorted(files):
            place, *_, file = name.split("/")
            if place.startswith(f"{RANGE_COLUMN}=") and not file.startswith(("_", ".")):
                found.setdefault(place.partition("=")[2], []).append(name)
        return found

    def _commit(
        self, attempt: Attempt, offsets_read: OffsetsRead, before_commit: BeforeCommit
    ) -> tuple[ClaimedRange, ...]:
        """Commit those ranges of the attempt that no other writer has written meanwhile, and return them."""
        while True:
            with self._lock:
                view = self._log.settled()
                taken = ranges_to_write(self._judge(view, attempt.ranges))
                if not taken:
                    return ()
                over_older = {range_ for range_, _, _ in _held(view, taken, only_older=True)}
                is_visible = self._storage.can_move() if view.newest is None else view.newest.visible
                older = attempt.older(view, taken) if is_visible else []
                needs_offsets = attempt.replaced is None and bool(over_older)
                unwritten = attempt.unwritten(older)
                if not needs_offsets and not unwritten:
                    entries = attempt.entries(taken, () if is_visible else over_older)
                    commit = self._commit_of(attempt, entries, is_visible=is_visible, older=older)
                    self._reached("judged")
                    if self._log.append(commit, of_attempt(attempt.name)):
                        self._reached("linked")
                        self._checkpoint_quietly(attempt.name)
                        return taken
                    continue
                if unwritten:
                    self._show(view)
            if needs_offsets:
                attempt.replaced = self._offsets_replaced(attempt, checked_after_read(offsets_read, before_commit))
                continue
            try:
                self._rewrite(attempt, unwritten)
            except Exception:
                if not self._has_rewritten(unwritten):
                    raise
                continue  # another writer has removed the files meanwhile
            self._reached("older rows written")
            before_commit()

    def _has_rewritten(self, older: Sequence[OlderRows]) -> bool:
        """Return whether another writer has rewritten one of these files."""
        with self._lock:
            view = self._log.settled()
        return any(not view.counts(name) for rows in older for name in rows.files)

    def _checkpoint_quietly(self, attempt: str) -> None:
        """Write a checkpoint if one is due, and log errors: the commit was made, and a later one writes it."""
        try:
            self._log.checkpoint_if_due(of_attempt(attempt))
        except Exception as error:  # noqa: BLE001 - any error of the storage
            _logger.warning("no checkpoint was written below %s: %s", self._storage.full(ATTEMPTS), error)

    def _commit_of(
        self, attempt: Attempt, entries: tuple[Entry, ...], *, is_visible: bool, older: Sequence[OlderRows]
    ) -> Commit:
        return Commit(
            attempt=attempt.name,
            format=self.format,
            schema=attempt.frame.schema.json(),
            entries=entries,
            options=self.options if self.format in formats.TEXT_FORMATS else None,
            visible=is_visible,
            partition_by=self.partition_by,
            rewritten=attempt.all_rewritten(older),
        )

    def _rewrite(self, attempt: Attempt, unwritten: Sequence[OlderRows]) -> None:
        """Write the rows of older files that are not replaced to files of the attempt."""
        groups: dict[tuple[object, ...], dict[str, OlderRows]] = {}
        for number, rows in enumerate(unwritten, start=len(attempt.rewritten)):
            if rows.all_replaced:
                attempt.rewritten[rows.files] = ()
                continue
            columns = rows.commit.schema, *sorted((rows.commit.options or {}).items())
            groups.setdefault(columns, {})[f"{rows.entry.taken.partition}-older-{number}"] = rows
        for group in groups.values():
            folder = f"{attempt.name}/older-{attempt.folders}"
            attempt.folders += 1
            self._write_older(attempt.frame.sparkSession, of_attempt(folder), group)
            names = self._files_by_range(of_attempt(folder))
            self._storage.hold_below(of_attempt(folder))
            for key, rows in group.items():
                attempt.rewritten[rows.files] = tuple(f"{folder}/{name}" for name in names.get(key, ()))

    def _offsets_replaced(self, attempt: Attempt, offsets_read: OffsetsRead) -> Mapping[int, Intervals]:
        """Return the offsets at which older rows are replaced: those read from Kafka and those of the new rows.

        `offsets_read` reads Kafka again, and compaction can have removed the message of a written row since.
        """
        frame = attempt.frame
        names = [of_attempt(name) for files in attempt.written.values() for name in files.files]
        own = self._offsets_in(frame, names) if names and OFFSET_COLUMN in frame.columns else {}
        return both(offsets_read(), own)

    def _offsets_in(self, frame: "DataFrame", names: Sequence[str]) -> Mapping[int, Intervals]:
        paths = [self._storage.to_read(name) for name in names]
        folders = (
            formats.Folders(self.partition_by, self._storage.to_write(base_of(names[0]))) if self.partition_by else None
        )
        rows = formats.read_files(frame.sparkSession, self.format, frame.schema, self.options, paths, folders=folders)
        return reader.offsets_read(rows.where(f.col(OFFSET_COLUMN).between(0, reader.HIGHEST_OFFSET)))

    def _read_places(self, place_of: Callable[[str], str]) -> Places:
        return Places(
            path=lambda name: self._storage.to_read(place_of(name)),
            base=lambda name: self._storage.to_write(base_of(place_of(name))),
        )

    def _place_of(self, view: CommitView) -> Callable[[str], str]:
        """Return a function that returns where a committed file is. Files that are not moved yet are moved first."""
        if view.newest is None or not view.newest.visible:
            return of_attempt
        if self._unshown(view):
            self._show_quietly(self._log.settled())
        hidden = frozenset(self._unshown(view))

        def place(name: str) -> str:
            visible = visible_place(name)
            is_hidden = name.partition("/")[0] in hidden and not self._storage.exists(visible)
            return of_attempt(name) if is_hidden else visible

        return place

    def _unshown(self, view: CommitView) -> list[str]:
        """Return the attempts that are committed, but whose files may not be at their visible places yet."""
        return [attempt for attempt in sorted(self._noted()) if view.commit_of(attempt) is not None]

    def _noted(self) -> set[str]:
        """Return the attempts that have a note."""
        names = self._storage.names(ATTEMPTS)
        return {name.removesuffix(NOTE) for name in names if name.endswith(NOTE) and not name.startswith(".")}

    def _show(self, view: CommitView) -> None:
        """Move the files of attempts that were committed, and whose writers have not done it."""
        for attempt in self._unshown(view):
            self._clear(attempt, view)

    def _show_quietly(self, view: CommitView) -> None:
        """Do the same, and log errors instead of raising them."""
        try:
            self._show(view)
        except Exception as error:  # noqa: BLE001 - any error of the storage
            _logger.warning("committed files below %s were not moved: %s", self._storage.full(ATTEMPTS), error)

    def _sweep_quietly(self) -> None:
        """Sweep, and log errors instead of raising them, so that they do not prevent a write."""
        try:
            self._sweep()
        except Exception as error:  # noqa: BLE001 - any error of the storage or of damaged files
            _logger.warning("files of old attempts below %s were not removed: %s", self._storage.full(ATTEMPTS), error)

    def _attempts(self) -> dict[str, bool]:
        """Return the attempts that have files or a note, and whether they have a note."""
        folders = {name for name in self._storage.names(ATTEMPTS) if not name.endswith(NOTE)}
        notes = self._noted()
        return {attempt: attempt in notes for attempt in sorted(folders | notes)}

    def _sweep(self, *, dry_run: bool = False) -> tuple[int, int]:
        """Return the numbers of attempts that were removed and of committed ones that were completed."""
        # The order matters. An attempt without a note was cleared before it was listed, so the commits read after the
        # listing contain it if it was committed. This holds across hosts, because `refresh` bypasses cached listings.
        attempts = self._attempts()
        view = self._log.settled()
        removed = completed = 0
        for attempt, has_note in sorted(attempts.items(), key=lambda each: view.commit_of(each[0]) is None):
            commit = view.commit_of(attempt)
            if not has_note and commit is not None and not commit.visible:
                continue
            if has_note and commit is None and not self._is_decided(attempt, view):
                continue
            if not has_note and not self._storage.has_files(of_attempt(attempt)):
                continue
            if not dry_run:
                self._clear(attempt, view)
            if commit is None:
                removed += 1
            else:
                completed += 1
        return removed, completed

    def _is_decided(self, attempt: str, view: CommitView) -> bool:
        note = commit_log.load(self._storage, note_of(attempt))
        if note is None:
            return False  # its writer has removed it meanwhile
        wanted = map(commit_log.range_from, note["ranges"])
        return all(decided(view.stored(range_), range_) for range_ in wanted)

    def _clear(self, attempt: str, view: CommitView) -> None:
        """Move the committed files of an attempt to their visible places, and remove its other files and its note."""
        commit = view.commit_of(attempt)
        kept: Collection[str] = ()
        if commit is not None and commit.visible:
            show(self._storage, commit, self._reached)
            self._check_shown(commit)
        elif commit is not None:
            kept = [name.removeprefix(f"{attempt}/") for name in commit.files]
        self._storage.remove_below(of_attempt(attempt), kept)
        self._reached("cleared")
        self._storage.remove(note_of(attempt))

    def _check_shown(self, commit: Commit) -> None:
        """Check that each file of a commit is at its visible place, before the files of its attempt are removed."""
        missing = [name for name in commit.files if not self._storage.exists(visible_place(name))]
        view = self._log.settled() if missing else None
        lost = [name for name in missing if view is None or view.counts(name)]
        if lost:
            raise OSError(
                f"{self._storage.full(visible_place(lost[0]))} is missing after it was moved there, so nothing of "
                f"attempt {commit.attempt} was removed. Restore the file"
            )

    def _clear_quietly(self, attempt: str) -> str | None:
        """Clear an attempt, and return what hindered it instead of raising it; a later write or sweep continues."""
        try:
            with self._lock:
                self._clear(attempt, self._log.settled())
        except Exception as error:  # noqa: BLE001 - as above
            _logger.warning("files of attempt %s were not removed: %s", self._storage.full(of_attempt(attempt)), error)
            return f"the files of attempt {attempt} were not all moved or removed ({error}); the next write does it"
        return None


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


def _opened(
    path: str | os.PathLike[str],
    session: "Callable[[], SparkSession] | None",
    exclusive: Exclusive | None,
    storage_options: StoreOptions | None,
) -> tuple[Path | str, Storage]:
    """Return the output's path, as a string if it is not local, and its storage."""
    text = os.fspath(path)
    scheme = urlsplit(text)
    if exclusive is None and scheme.scheme in SCHEMES and text.startswith(f"{scheme.scheme}://"):
        uri = text.rstrip("/")
        return uri, ObjectStorage(uri, storage_options)
    if storage_options:
        raise ConfigurationError(
            f"storage_options are only for object stores ({', '.join(sorted(SCHEMES))}) without `exclusive`, but path "
            f"is {text!r}: leave them out"
        )
    if scheme.scheme not in {"", "file"} and text.startswith(f"{scheme.scheme}://"):
        uri = text.rstrip("/")
        return uri, HadoopStorage(uri, session, exclusive)
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
    return local, LocalStorage(local)
