"""Reads and writes a Delta table with Spark's public API (SQL and the DataFrame writer), also over Spark Connect.

`delta.sink` decides what to commit and uses this module to do so. Where the session has a JVM, `delta.transaction`
writes rows that replace nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marshal_dagster._internal.file_lock import locked
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.caching import persisted, without_partitions
from marshal_dagster.sinks.delta.commit import APPLICATION, MARSHAL_COLUMN, Commit
from marshal_dagster.sinks.delta.merge import (
    KEY_COLUMN,
    NO_ORDER,
    Merge,
    check_keys,
    check_types,
    commit_session,
    first_problem,
    newest_rows,
    repeated_keys,
)
from marshal_dagster.sinks.delta.place import DeltaPlace
from marshal_dagster.sinks.delta.transaction import DeltaLog, TableState, Transaction, open_log
from marshal_dagster.sinks.rejected_rows import RejectedRow, row_check
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, Intervals, quoted, within
from marshal_dagster.sinks.upsert_keys import Keys
from marshal_dagster.spark.connector import connector_jars
from marshal_dagster.spark.error_text import error_condition, first_line
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.nested_values import is_not_utf8, text_kinds
from marshal_dagster.spark.packages import delta_package
from marshal_dagster.spark.reader import HIGHEST_OFFSET, offsets_read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import StructField

    Detail = Row | dict[str, Any]

_COMMITS_AT_FIRST = 20
_MARSHAL_FIELDS = {
    "group": "string",
    "topic": "string",
    "data_topic_id": "string",
    "generation": "bigint",
    "first_readable": "bigint",
    "end": "bigint",
}
_DENSE = 100
"""A value is listed for each number from the lowest to the highest partition, at most so many for each partition."""
_LOCAL = "file:"
_LOCK = "_marshal_dagster.lock"  # Delta ignores files whose names begin with an underscore
_MISSING = ("DELTA_TABLE_ONLY_OPERATION", "DELTA_MISSING_DELTA_TABLE", "DELTA_TABLE_NOT_FOUND")
_NULLS = ["", "__HIVE_DEFAULT_PARTITION__"]
"""The strings that Delta stores as null in a column by which a table is partitioned."""
_READ_AS_NULL = "the table is partitioned by this column, so Delta would store the string as null"
_REPLACED = "the table is partitioned by this column, so Delta would replace its bytes that are not UTF-8"
_BYTES, _INSTANT = "binary", "timestamp"
_NO_DELTA_TABLE = "DELTA_TABLE_NOT_FOUND"
_VIEW = "EXPECT_TABLE_NOT_VIEW"
_DETAIL, _FORMAT = "DETAIL", "delta"
_CATALOG_SETTING, _SESSION_CATALOG = "spark.sql.catalog.spark_catalog", "spark_catalog"
_SCHEMA_AND_TABLE = 2
_WITHOUT_NAMED_OVERWRITE = "3."
"""Spark 3.5 refuses to overwrite a part of a named Delta table, so it is given the folder."""
_MERGE_SCHEMA = "mergeschema"
_RESERVED_NAMES = ("spark.sql.ansi.enabled", "spark.sql.ansi.enforceReservedKeywords")
"""Settings with which Delta fails to read the statistics of a column with a reserved name."""
_S3 = ("s3", "s3a", "s3n")
_MANY_WRITERS = (
    "spark.delta.logStore.{}.impl",
    "spark.delta.logStore.class",
    "spark.databricks.clusterUsageTags.clusterId",
)
"""Settings of which one shows that a log store was chosen, or that Databricks coordinates the commits."""
_UNKNOWN_SYNTAX = "PARSE_SYNTAX_ERROR"
_NO_TABLE = "TABLE_OR_VIEW_NOT_FOUND"  # without Delta, Spark parses DETAIL as a table's name and the table as a column


def delta_settings(ivy_folder: Path | None = None) -> dict[str, str]:
    """Return the settings of a Spark session with Delta Lake, for `spark_settings(extra=...)`.

    Args:
        ivy_folder: The folder of the jars that `fetch_connector(delta_package())` downloads (default: the user's cache
            folder).

    Returns:
        Spark settings. If the jars were not downloaded in advance, Spark downloads them when the session starts.

    Raises:
        ConfigurationError: No version of Delta Lake is known for the installed Spark.

    Example:
        ```python
        settings = spark_settings(app_name="orders", extra=delta_settings())
        ```
    """
    package = delta_package()
    jars = connector_jars(package, ivy_folder)
    return {
        **({"spark.jars": ",".join(map(str, jars))} if jars else {"spark.jars.packages": package}),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


@dataclass(frozen=True)
class KeptRows:
    """The rows of a frame, persisted on the executors so that they can be written more than once."""

    frame: "DataFrame"
    counts: Mapping[int | None, int]
    """The number of rows, by partition."""
    rejected: RejectedRow | None = None
    """The first row with a string that the table would read back as null or another one, or None."""

    def offsets(self) -> Mapping[int, Intervals]:
        """Return the offsets of the rows, by partition; empty without a column `offset`. Runs a Spark job."""
        if OFFSET_COLUMN not in self.frame.columns:
            return {}
        return offsets_read(self.frame.where(f.col(OFFSET_COLUMN).between(0, HIGHEST_OFFSET)))


@dataclass(frozen=True, slots=True)
class KnownDetail:
    """The details of a table, and a commit of the sink that was made before they were read."""

    detail: "Detail"
    commit: Commit
    state: TableState | None
    """The version of the table whose newest commit of the sink is `commit`, None if unknown."""


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows in files of the table that are not committed yet."""

    counts: Mapping[int | None, int]
    """The number of rows, by partition."""
    transaction: Transaction
    location: str
    newest_state: Callable[[], TableState | None]
    """Returns the newest version of the table that is at the place now."""

    def commit(self) -> TableState:
        """Commit the rows, and return the table's new version. If another commit has the number already, raise."""
        with alone_on_this_machine(self.location):
            return self.transaction.commit()

    def is_current(self) -> bool:
        """Return whether the table at the place is still the one for which the rows were written.

        Delta would commit its next version to a table that was created again, whose versions begin at 0. A name can be
        that of another folder meanwhile.
        """
        return self.transaction.state.is_of(self.newest_state())

    def discard(self) -> None:
        """Delete the files."""
        self.transaction.discard()


class DeltaTable:
    """The Delta table at `place`, accessed through a Spark session, for one call of the sink."""

    def __init__(self, spark: "SparkSession", place: DeltaPlace, options: Mapping[str, str]) -> None:
        self._spark = spark
        self._place = place
        self._options = options
        self._is_found = False
        self._known_detail: Detail | None = None
        self._newest: list[str | None] | None = None
        """The newest commits, read ahead for the next call of `commits`."""
        self._known_commit: Commit | None = None
        """The newest commit, known for the next call of `commits`."""
        self._state: TableState | None = None
        """The version of the table before its commits were read."""
        self._opened: DeltaLog | None = None

    def reuse(self, known: KnownDetail | None) -> None:
        """Use these details if the table's history shows that they still hold.

        They do if it has the commit `known.commit`, and all later commits are those of sinks. To read the details
        Delta reads the whole state of the table, which takes longer than a small batch. If the table's version is still
        the same, its history is not read either.
        """
        log = self._log()
        self._state = None if log is None else log.state()
        self._is_found = self._is_found or self._state is not None
        if known is None:
            return
        if known.state is not None and known.state == self._state:
            self._known_detail, self._known_commit = known.detail, known.commit
            return
        self._newest = self._history(f" LIMIT {_COMMITS_AT_FIRST}")
        for metadata in self._newest:
            commit = Commit.from_metadata(metadata)
            if commit is None:
                return
            if commit.attempt == known.commit.attempt:
                self._known_detail = known.detail
                return

    def known(self, commit: Commit, state: TableState | None = None) -> KnownDetail | None:
        """Return the details for a later `reuse`, None if there are none.

        Args:
            commit: A commit of the sink, which was made before the details were read.
            state: The version of the table whose newest commit of the sink it is, None if unknown.
        """
        return None if self._known_detail is None else KnownDetail(self._known_detail, commit, state)

    def known_unchanged(self, newest: Commit) -> KnownDetail | None:
        """Return the details and the newest commit, None if the table may have changed since `reuse` was called."""
        log = self._log()
        is_unchanged = log is not None and self._state is not None and log.state() == self._state
        return self.known(newest, self._state) if is_unchanged else None

    def commits(self) -> Iterator[Commit]:
        """Yield the sink's commits, newest first; nothing if there is no table."""
        known, self._known_commit = self._known_commit, None
        if known is not None:
            yield known
        for commit in self._commits_in_history():
            if known is None or commit.number < known.number:
                yield commit

    def _commits_in_history(self) -> Iterator[Commit]:
        seen = 0
        for limit in (f" LIMIT {_COMMITS_AT_FIRST}", ""):
            history, self._newest = self._newest or self._history(limit), None
            for metadata in history[seen:]:
                commit = Commit.from_metadata(metadata)
                if commit is not None:
                    yield commit
            seen = len(history)
            if seen < _COMMITS_AT_FIRST:
                return

    def written(
        self, frame: "DataFrame", done: Sequence[int], taken: Sequence[ClaimedRange], before: Commit, commit: Commit
    ) -> WrittenRows | None:
        """Write the rows into files of the table, except those of the partitions `done`, without a commit.

        Rows that belong to no range are written and counted too.

        Args:
            frame: The rows, which replace no stored ones.
            done: Partitions without a range in `taken`.
            taken: The ranges.
            before: The sink's newest commit in the table.
            commit: The commit that follows it.

        Returns:
            None if this session cannot do it, the table does not exist, or `before` is not its newest commit any more.
        """
        self._newest, self._known_commit = None, None
        log = self._log() if self._exists() and not self._partition_strings(frame) else None
        transaction = None if log is None else log.begin()
        if transaction is None or transaction.state.table_id != commit.table_id:
            return None
        if transaction.state != self._state:
            self._known_detail = None  # an older version's, for which Delta would see no conflict
        if transaction.number() != before.number:
            return None
        rows = self._with_ranges(without_partitions(frame, done), taken, commit.attempt)
        transaction.write(rows, self._options, commit.number, commit.to_metadata())
        counts = transaction.counts()
        if counts is None:
            transaction.discard()
            return None
        return WrittenRows(counts, transaction, self._location(), self._newest_state)

    def _newest_state(self) -> TableState | None:
        """Return the version of the table that is at the place now; the catalog finds it again."""
        log = open_log(self._spark, self._place, self._options)
        return None if log is None else log.state()

    def _log(self) -> DeltaLog | None:
        """Return Delta's log of the table, None if this session cannot read it or a named table does not exist."""
        if self._opened is None:
            self._opened = open_log(self._spark, self._place, self._options)
        return self._opened

    @contextmanager
    def evaluated(self, frame: "DataFrame", done: Sequence[int]) -> Iterator[KeptRows]:
        """Persist the rows on the executors, except those of the partitions `done`, and count them."""
        strings = self._partition_strings(frame)
        with persisted(without_partitions(frame, done)) as rows:
            by_partition = rows.groupBy(PARTITION_COLUMN)
            if not strings:
                yield KeptRows(rows, {row[0]: row[1] for row in by_partition.count().collect()})
                return
            problems = [(name, _READ_AS_NULL, f.col(quoted(name)).isin(_NULLS)) for name in strings]
            problems += [(name, _REPLACED, is_not_utf8(f.col(quoted(name)))) for name in strings]
            check = row_check(frame.schema, problems)
            totals = by_partition.agg(f.count("*"), f.min(check.problem)).collect()
            rejected = check.first((row[0], row[2]) for row in totals)
            yield KeptRows(rows, {row[0]: row[1] for row in totals}, rejected)

    def held(self, ranges: Sequence[ClaimedRange], *, only_older: bool) -> list[tuple[ClaimedRange, int, bool]]:
        """Return the ranges at whose readable offsets the table has rows of the same group and data topic.

        Args:
            ranges: The ranges, at most one per partition.
            only_older: Whether to consider only rows of generations older than the range's.

        Returns:
            For each of these ranges: the range, the lowest generation of its rows, and whether all rows have offsets.
        """
        if not ranges or not self._exists():
            return []
        table = self.frame()
        columns = {name.lower(): name for name in table.columns}  # Delta ignores case, whatever the session does
        if MARSHAL_COLUMN not in columns:
            return []
        offset = f.col(quoted(columns[OFFSET_COLUMN])) if OFFSET_COLUMN in columns else f.lit(None)
        conditions = [f.expr(_rows_at(range_, only_older=only_older)) for range_ in ranges]
        held = (
            table.where(reduce(or_, conditions))
            .groupBy(PARTITION_COLUMN)
            .agg(f.min(f"{MARSHAL_COLUMN}.generation"), f.count("*"), f.count(offset))
            .collect()
        )
        by_partition = {range_.partition: range_ for range_ in ranges}
        return [(by_partition[row[0]], row[1], row[2] == row[3]) for row in sorted(held)]

    def older_offsets(self, ranges: Sequence[ClaimedRange]) -> Mapping[int, Intervals]:
        """Return the readable offsets of `ranges` at which there are rows of older generations, by partition."""
        conditions = [f.expr(_rows_at(range_, only_older=True)) for range_ in ranges]
        table = self.frame()
        offsets = offsets_read(
            table.where(reduce(or_, conditions)).where(f.col(OFFSET_COLUMN).between(0, HIGHEST_OFFSET))
        )
        return {range_.partition: within(range_, offsets.get(range_.partition, ())) for range_ in ranges}

    def commit(
        self, rows: KeptRows, taken: Sequence[ClaimedRange], commit: Commit, replaced: Mapping[ClaimedRange, Intervals]
    ) -> None:
        """Write the rows of the ranges in one commit, replacing those of older generations at the offsets `replaced`.

        If another commit has this number already, raise any error or do nothing.

        Raises:
            SinkRejectedError: Rows replace each other, and no order decides between two of them.
        """
        self._newest = None
        written = self._with_ranges(rows.frame, taken, commit.attempt).where(f"{MARSHAL_COLUMN}.`end` IS NOT NULL")
        alias = "" if commit.keys is None else "t."
        gone = [
            _rows_at(range_, only_older=True, offsets=offsets, alias=alias)
            for range_, offsets in replaced.items()
            if offsets
        ]
        if commit.keys is not None:
            self._merge(written, taken, commit, commit.keys, gone)
            return
        writer = (
            written.write.format("delta")
            .options(**self._options)
            .option("userMetadata", commit.to_metadata())
            .option("txnAppId", APPLICATION)
            .option("txnVersion", commit.number)
        )
        if self._place.name and not self._exists():
            self._create(written.limit(0))
        with alone_on_this_machine(self._location()):
            if gone:
                own = f"{MARSHAL_COLUMN}.attempt = {_text(commit.attempt)}"
                writer = writer.mode("overwrite").option("replaceWhere", " OR ".join([own, *gone]))
            else:
                writer = writer.mode("append")
            if self._place.name and not (gone and self._spark.version.startswith(_WITHOUT_NAMED_OVERWRITE)):
                writer.saveAsTable(self._place.sql)
            else:
                writer.save(self._location())

    def _merge(
        self, written: "DataFrame", taken: Sequence[ClaimedRange], commit: Commit, keys: Keys, gone: Sequence[str]
    ) -> None:
        """Replace the stored rows by the newest row of each key in one commit (decision 24)."""
        merge = Merge(keys, f"({' OR '.join(gone)})" if gone else None)
        output, view = f"table {self._place}", f"marshal_{commit.attempt}"
        database = self._spark.conf.get("spark.sql.globalTempDatabase") or "global_temp"
        with persisted(newest_rows(written, keys)) as newest:
            problem = first_problem(newest, keys)
            if problem is not None:
                raise problem.error(output, taken)
            session = commit_session(self._spark, commit)
            newest.drop(KEY_COLUMN).createOrReplaceGlobalTempView(view)
            statement = merge.statement(self._place.sql, f"{quoted(database)}.{view}", written.columns)
            try:
                with alone_on_this_machine(self._location()):
                    session.sql(statement)
            except Exception as error:  # Spark's or py4j's
                if NO_ORDER not in str(error):
                    raise
                found = merge.conflict(newest, self.frame(), taken[0].topic)
                if found is None:
                    raise
                raise found.error(output, taken) from None
            finally:
                self._spark.catalog.dropGlobalTempView(view)

    def prepare_merge(self, frame: "DataFrame", keys: Keys) -> None:
        """Create the table, or add columns to it, so that rows of the frame can be merged into it.

        This is a commit without a number.

        Raises:
            ConfigurationError: The table lacks columns of the result, or has them with another type.
        """
        check_keys(keys, frame.schema)
        kinds = ", ".join(f"{quoted(name)}: {kind}" for name, kind in {**_MARSHAL_FIELDS, "attempt": "string"}.items())
        empty = frame.limit(0).withColumn(MARSHAL_COLUMN, f.lit(None).cast(f"struct<{kinds}>"))
        if not self._exists():
            self._create(empty)
        stored = self.frame().schema
        names = {name.lower() for name in stored.names}
        if any(name.lower() not in names for name in empty.columns) and self._adds_columns():
            with alone_on_this_machine(self._location()):
                empty.write.format("delta").mode("append").options(**self._options).save(self._location())
            stored = self.frame().schema
        check_types(f"table {self._place}", empty.schema, stored, keys)

    def _adds_columns(self) -> bool:
        return any(name.lower() == _MERGE_SCHEMA and value.lower() == "true" for name, value in self._options.items())

    def repeated_keys(self, keys: Keys) -> int:
        """Return of how many keys the table has more than one row. Reads all rows."""
        return repeated_keys(self.frame(), keys)

    def _with_ranges(self, frame: "DataFrame", taken: Sequence[ClaimedRange], attempt: str) -> "DataFrame":
        """Return the rows with the column `marshal`, whose `end` is null for rows of no range.

        The values are looked up by the partition. A join would be a Spark job of its own.
        """
        varying = {
            name: _by_partition({range_.partition: getattr(range_, name) for range_ in taken})
            for name in ("generation", "first_readable", "end")
        }
        fields = [
            (f.expr(varying[name]) if name in varying else f.lit(getattr(taken[0], name))).cast(kind).alias(name)
            for name, kind in _MARSHAL_FIELDS.items()
        ]
        marshal = f.struct(*fields, f.lit(attempt).alias("attempt"))
        return frame.withColumn(MARSHAL_COLUMN, marshal)

    def frame(self) -> "DataFrame":
        """Return the rows of the table, which must exist."""
        if self._place.path is None:
            return self._spark.read.table(self._place.sql)
        return self._spark.read.format("delta").load(self._place.path)

    def _create(self, empty: "DataFrame") -> None:
        """Create a table with the columns of `empty`, unless another writer was first.

        This is a commit without a number. Options of the commit would be stored as a named table's own.
        """
        from pyspark.errors import PySparkException

        path = self._place.path
        writer = empty.write.format("delta").mode("ignore")
        with alone_on_this_machine(path or self._spark.conf.get("spark.sql.warehouse.dir") or ""):
            try:
                if path:
                    writer.save(path)
                else:
                    writer.saveAsTable(self._place.sql)
            except PySparkException:
                if not self._exists():
                    raise
        self._check_store()

    def table_id(self) -> str | None:
        """Return the id that Delta gave the table when it was created, None if there is no table."""
        detail = self._detail()
        return None if detail is None else detail["id"]

    def check_merges(self) -> None:
        """Raise `ConfigurationError` if the session cannot execute a MERGE with settings of its own."""
        if "connect" in type(self._spark).__module__.split("."):
            raise ConfigurationError(
                f"table {self._place}: mode='upsert' needs a second session of the same Spark application, which Spark "
                "Connect does not have. Use a session without Spark Connect (docs/how-to/pipes.md)"
            )

    def check_session(self) -> None:
        """Raise `ConfigurationError` if the session cannot write to the table, or not safely."""
        if self._place.name:
            self._check_catalog()
        self._check_store()
        if all(str(self._spark.conf.get(name, "false")).lower() == "true" for name in _RESERVED_NAMES):
            raise ConfigurationError(
                f"table {self._place}: with {_RESERVED_NAMES[1]} Delta Lake cannot query a table with the column "
                f"{OFFSET_COLUMN}. Set it to false in this session"
            )

    def _check_store(self) -> None:
        """Raise `ConfigurationError` if two writers can commit to the table at once because of its storage.

        Delta's own log store for S3 lets one process write; it does not notice a second one (docs/how-to/sinks.md,
        "Delta on S3").
        """
        scheme = self._location().partition(":")[0].lower()
        if scheme not in _S3 or any(self._spark.conf.get(name.format(scheme), None) for name in _MANY_WRITERS):
            return
        raise ConfigurationError(
            f"table {self._place} is on S3, where Delta loses commits of a second writer. Set "
            f"spark.delta.logStore.{scheme}.impl to io.delta.storage.S3DynamoDBLogStore (docs/how-to/sinks.md, "
            '"Delta on S3")'
        )

    def _location(self) -> str:
        """Return the table's folder as a path or URI; empty if a named table does not exist.

        A path without a scheme is on Spark's default file system, which only the table's own location shows.
        """
        path = self._place.path or ""
        if "://" in path:
            return path
        detail = self._detail()
        return path if detail is None else str(detail["location"])

    def properties(self) -> Mapping[str, str]:
        """Return the table's properties; empty if there is no table."""
        detail = self._detail()
        return {} if detail is None else dict(detail["properties"] or {})

    def check_partitions(self, frame: "DataFrame") -> None:
        """Raise `ConfigurationError` if Delta would store other values of a column by which the table is partitioned.

        It stores them as text: bytes as UTF-8, and an instant as a local time, which it reads in another zone unless
        the zones of the session and of each JVM are the same.
        """
        kinds = {column.name: column.dataType.typeName() for column in self._partition_columns(frame)}
        for name, kind in kinds.items():
            if kind in {_BYTES, _INSTANT}:
                raise ConfigurationError(
                    f"table {self._place} is partitioned by column {name!r} of type {kind}, of which Delta stores "
                    "other values without an error. Partition it by a column of dates or strings"
                )

    def _partition_strings(self, frame: "DataFrame") -> list[str]:
        """Return the columns of text in `frame` by which the table is partitioned; empty if there is no table."""
        texts = text_kinds()
        return [column.name for column in self._partition_columns(frame) if isinstance(column.dataType, texts)]

    def _partition_columns(self, frame: "DataFrame") -> "list[StructField]":
        """Return the columns of `frame` by which the table is partitioned; none if there is no table."""
        detail = self._detail()
        names = set() if detail is None else {name.lower() for name in detail["partitionColumns"] or ()}
        return [column for column in frame.schema.fields if column.name.lower() in names] if names else []

    def _exists(self) -> bool:
        """Return whether there is a table. The answer "yes" is kept: a table that was read is there."""
        return self._is_found or bool(self._history(" LIMIT 1"))

    def refresh(self) -> None:
        """Forget what was read of the table, because it may have been created again."""
        self._is_found, self._known_detail, self._newest = False, None, None
        self._known_commit, self._opened = None, None

    def _detail(self) -> "Detail | None":
        """Return the table's details, or None if there is no table. They are read once."""
        if self._known_detail is None:
            log = self._log()
            found = None if log is None else log.detail()
            self._known_detail = found or next(iter(self._described(_DETAIL)), None)
        return self._known_detail

    def _history(self, limit: str) -> list[str | None]:
        """Return the user metadata of the table's commits, newest first; empty if there is no table."""
        return [row["userMetadata"] for row in self._described("HISTORY", limit)]

    def _described(self, what: str, limit: str = "") -> "list[Row]":
        """Return the rows of `DESCRIBE HISTORY` or `DESCRIBE DETAIL`; empty if there is no table.

        Spark has all rows when the command ends. To select a column of them would be a Spark job.
        """
        from pyspark.errors import PySparkException

        try:
            rows = self._spark.sql(f"DESCRIBE {what} {self._place.sql}{limit}").collect()
        except PySparkException as error:
            condition = error_condition(error) or ""
            if condition == _UNKNOWN_SYNTAX or (condition == _NO_TABLE and f"`{what}`" in str(error)):
                raise ConfigurationError(
                    f"table {self._place}: this Spark session does not have Delta Lake: start it with "
                    "`delta_settings`, in a process that has no session yet"
                ) from error
            if self._place.path is not None:
                if condition in _MISSING:
                    return []
                raise
            if condition in {_NO_TABLE, _NO_DELTA_TABLE}:
                self._check_schema()
                return []
            if condition.startswith(_VIEW):
                raise ConfigurationError(
                    f"table {self._place} is a view, to which this sink cannot write. Name a Delta table, or one that "
                    "does not exist yet"
                ) from error
            raise ConfigurationError(f"table {self._place} cannot be read: {first_line(error)}") from error
        if self._place.name and rows and what == _DETAIL and rows[0]["format"] != _FORMAT:
            raise ConfigurationError(
                f"table {self._place} is a table of the format {rows[0]['format']}, to which this sink cannot write. "
                "Name a Delta table, or one that does not exist yet"
            )
        self._is_found = self._is_found or bool(rows)
        return rows

    def _check_schema(self) -> None:
        """Raise `ConfigurationError` if the table cannot be created because its schema is missing."""
        if not self._spark.catalog.databaseExists(self._place.schema):
            raise ConfigurationError(
                f"table {self._place} does not exist, and neither does the schema {self._place.schema}. Create the "
                "schema, or correct the name"
            )

    def _check_catalog(self) -> None:
        """Raise `ConfigurationError` if the session's default catalog cannot create or write Delta tables."""
        catalog = self._place.name[0] if len(self._place.name) > _SCHEMA_AND_TABLE else ""
        if (catalog or self._spark.catalog.currentCatalog()).lower() == _SESSION_CATALOG and not self._spark.conf.get(
            _CATALOG_SETTING, ""
        ):
            raise ConfigurationError(
                f"table {self._place}: without {_CATALOG_SETTING} Spark's own catalog has no Delta tables. Start the "
                "session with `delta_settings`, or set it to org.apache.spark.sql.delta.catalog.DeltaCatalog"
            )


@contextmanager
def alone_on_this_machine(path: str) -> Iterator[None]:
    """Let only one process at a time commit to a table in a local file system; do nothing for other file systems.

    On a local file system Delta checks whether a commit file exists, and then renames its own file to that name. If
    two processes do so at once, the later one overwrites the commit of the earlier one, and both report success.
    """
    folder = _local_folder(path)
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).touch()
    except OSError:
        if path.startswith(_LOCAL):
            raise
        folder = None  # a path without a scheme can belong to another file system
    with nullcontext() if folder is None else locked(folder / _LOCK):
        yield


def _local_folder(path: str) -> Path | None:
    """Return the folder of a table that is or can be in a local file system, else None."""
    if path.startswith(_LOCAL):
        return Path(re.sub("^//[^/]*", "", path.removeprefix(_LOCAL)))
    return None if re.match("[A-Za-z][A-Za-z0-9+.-]*:", path) else Path(path)


def _by_partition(values: Mapping[int, int]) -> str:
    """Return an expression of Spark SQL for the value of a row's partition; null for partitions without a value."""
    lowest, highest, at = min(values), max(values), f"CAST({PARTITION_COLUMN} AS INT)"
    if highest - lowest < _DENSE * len(values):
        found = (f"{values[partition]}L" if partition in values else "NULL" for partition in range(lowest, highest + 1))
        return f"get(array({', '.join(found)}), {at} - {lowest})"
    return f"try_element_at(map({', '.join(f'{partition}, {value}L' for partition, value in values.items())}), {at})"


def _rows_at(wanted: ClaimedRange, *, only_older: bool, offsets: Intervals | None = None, alias: str = "") -> str:
    """Return the SQL condition for rows of the range's group and data topic, at its readable offsets or at `offsets`.

    With `only_older` the condition selects only rows of generations older than the range's. Each column's name
    follows `alias`.
    """
    marshal, offset = f"{alias}{MARSHAL_COLUMN}", f"{alias}{OFFSET_COLUMN}"
    own = {"group": wanted.group, "topic": wanted.topic, "data_topic_id": wanted.data_topic_id}
    parts = [
        f"{alias}{PARTITION_COLUMN} = {wanted.partition}",
        *(f"{marshal}.`{name}` = {_text(value)}" for name, value in own.items()),
    ]
    if only_older:
        parts.append(f"{marshal}.generation < {wanted.generation}")
    if offsets is None:
        parts.append(f"{marshal}.first_readable < {wanted.end}")
        parts.append(f"{marshal}.`end` > {wanted.first_readable}")
    else:
        at = [f"({offset} >= {start} AND {offset} < {end})" for start, end in offsets]
        parts.append(f"({' OR '.join(at)})")
    return f"({' AND '.join(parts)})"


def _text(value: str) -> str:
    """Return a string literal of Spark SQL that does not depend on `spark.sql.parser.escapedStringLiterals`."""
    if not {"'", "\\"} & set(value):
        return f"'{value}'"
    return f"CAST(X'{value.encode().hex()}' AS STRING)"
