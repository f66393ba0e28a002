"""A sink that appends rows to an Iceberg table, and stores the positions of all partitions in the same commit.

Spark's tasks write the rows to files. The driver commits them: a compare-and-set on the branch's snapshot, after which
the branch has both the rows and the positions. A writer that was overtaken judges its ranges again, and commits the
files that it has written already (docs/contributing/decisions/0022-iceberg.md).
"""

import contextlib
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from marshal_dagster._internal.extras import Extra, require_extra
from marshal_dagster.errors import ConfigurationError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict, judge
from marshal_dagster.sinks.hidden_secrets import secret_values
from marshal_dagster.sinks.iceberg import report
from marshal_dagster.sinks.iceberg.catalog_errors import commit_error, configured_properties, known_errors
from marshal_dagster.sinks.iceberg.columns import match_columns
from marshal_dagster.sinks.iceberg.older_rows import (
    NOTHING_REPLACED,
    OlderRows,
    Replacement,
    SourceColumns,
    source_columns,
    source_of,
)
from marshal_dagster.sinks.iceberg.parquet_files import WrittenFile
from marshal_dagster.sinks.iceberg.partitions import check_spec
from marshal_dagster.sinks.iceberg.positions import PartitionPosition, TablePositions
from marshal_dagster.sinks.iceberg.schema_changes import first_misfit
from marshal_dagster.sinks.iceberg.table import IcebergTable, check_catalog
from marshal_dagster.sinks.iceberg.tasks import TaskResult, WritePlan, run_tasks
from marshal_dagster.sinks.output_groups import OutputGroups
from marshal_dagster.sinks.report import SinkReport, VacuumResult
from marshal_dagster.sinks.sink import (
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Steps,
    WriteResult,
    both,
    check_columns,
    check_ranges,
    checked_after_read,
    partition_key,
    ranges_to_write,
    refuse_foreign_rows,
    session_of,
    within,
    write_result,
)
from marshal_dagster.spark.column_names import is_case_sensitive
from marshal_dagster.spark.conversion_settings import QUOTED_NAMES, check_settings

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark.sql import DataFrame


class IcebergSink(Steps):
    """A sink that appends rows to the Iceberg table `table` of a catalog, as pyiceberg is configured.

    The table must exist. The result's columns go to its columns of the same name; `partition` and `offset` are left
    out if it does not have them. A new generation replaces rows of older ones only if the table has a column for that
    (`source_column`); otherwise such ranges are refused.

    Example:
        ```python
        sink = IcebergSink("shop.orders", catalog="lake")  # a catalog of ~/.pyiceberg.yaml
        ```
    """

    supports_unordered_ranges = False
    """False: the sink stores one position for each partition, so it needs ranges in order."""
    _run_tasks = staticmethod(run_tasks)
    """Writes the rows to files; tests replace it."""

    def __init__(
        self,
        table: str,
        *,
        catalog: str | None = None,
        catalog_properties: Mapping[str, str] | None = None,
        branch: str = "main",
        mode: str = "append",
        source_column: str | None = None,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
    ) -> None:
        """Configure the output; the sink does not access the catalog before its first use.

        Args:
            table: The table with its namespace, such as `shop.orders`.
            catalog: The name of a catalog in pyiceberg's configuration, by default pyiceberg's default catalog.
            catalog_properties: Properties of the catalog, which pyiceberg's configuration does not need to have, such
                as `{"uri": "https://..."}`. They are never logged.
            branch: The branch of the table. It must exist, unless it is `main`.
            mode: Only `append`. One row for each key is not supported (docs/contributing/decisions/0022-iceberg.md).
            source_column: The name of a column of type `string`. In it the sink stores for each row its group, its
                topic and Kafka's id of the topic. With it and the columns `partition` and `offset` of the table, a new
                generation replaces rows. The result must not have this column.
            shared_by_groups: Whether several groups write all offsets of a topic to this output. If false, a group
                is refused if another group has ranges in the output.
            previous_group: The group whose ranges this group continues, after it was renamed (docs/how-to/sinks.md,
                "Another group").

        Raises:
            ConfigurationError: The table has no namespace, the branch is empty, the mode is another one, or the
                source column is a field of a struct.
        """
        if not all(table.split(".")) or "." not in table:
            raise ConfigurationError(f"table is {table!r}; it must be a name with its namespace, such as 'shop.orders'")
        if not branch:
            raise ConfigurationError("branch is empty; it must be the name of a branch, such as 'main'")
        if mode != "append":
            raise ConfigurationError(
                f"mode is {mode!r}, but IcebergSink only appends, because pyiceberg would rewrite each file that has a "
                "key of the batch. Write to PostgresSink or MariaDBSink with this mode, or append and merge with Spark"
            )
        if source_column is not None and (not source_column or "." in source_column):
            raise ConfigurationError(
                f"source_column is {source_column!r}; it must be the name of a column without a dot, or None"
            )
        self.table = table
        """The table with its namespace."""
        self.catalog = catalog
        """The name of the catalog in pyiceberg's configuration."""
        self.branch = branch
        """The branch of the table."""
        self.source_column = source_column
        """The name of the column that the sink fills, None if a new generation does not replace rows."""
        self._output = f"Iceberg table {table}" if branch == "main" else f"Iceberg table {table}, branch {branch}"
        self._catalog_properties = dict(catalog_properties or {})
        self._loaded_catalog: Catalog | None = None
        self._groups = OutputGroups(self._output, shared_by_groups, previous_group)

    def __repr__(self) -> str:
        return f"IcebergSink({self.table!r})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_loaded_catalog": None}

    def verdicts(self, ranges: Sequence[ClaimedRange]) -> dict[ClaimedRange, Verdict]:
        """Return what the sink would do with each range (`Sink.verdicts`).

        Args:
            ranges: The ranges of the batch.

        Returns:
            The verdict on each range.

        Raises:
            SinkRejectedError: One of the ranges cannot be written, or the table does not exist.
            ConfigurationError: pyiceberg or the catalog's configuration is missing, or the table is partitioned in a
                way that cannot be written.
            AuthorizationError: The catalog has refused the credentials.
            UnavailableError: The catalog cannot be reached.
        """
        check_ranges(ranges)
        table = self._table()
        check_spec(table.metadata.spec(), table.schema, self._output)
        return self._judge(table.positions(), ranges, self._source_columns(table))

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:
        """Return None if the sink would write a new generation of these ranges, else the reason (`Sink.can_replace`).

        Args:
            ranges: Ranges of the new generation.

        Returns:
            None, or the reason why they would be refused.

        Raises:
            SinkRejectedError: The table does not exist.
        """
        table = self._table()
        positions, sources = table.positions(), self._source_columns(table)
        for range_ in _covered(positions, ranges):
            if not _replaces(sources, positions.kept[partition_key(range_)]):
                return self._unreplaceable(range_)
        return self._groups.refusal(ranges, _groups_in(positions, ranges), partial(_covered, positions))

    def write(
        self,
        frame: "DataFrame",
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows of each range that the table does not have, in one commit (`Sink.write`).

        Args:
            frame: The rows, with the column `partition` and optionally `offset`.
            ranges: The ranges of the batch.
            offsets_read: Returns the offsets that the batch has read; called if older rows are replaced.
            before_commit: Checks that the batch still holds its claims.

        Returns:
            The ranges taken and skipped.

        Raises:
            SinkRejectedError: A range or a row cannot be written.
            ConfigurationError: The table cannot store the columns exactly.
            AuthorizationError: The catalog has refused the commit.
            UnavailableError: The commit failed, or the table was changed in a way that the files of this batch do
                not fit any more.
        """
        spark = session_of(frame)
        case_sensitive = is_case_sensitive(spark)
        own = () if self.source_column is None else (self.source_column,)
        check_columns(frame.schema, own, case_sensitive=case_sensitive)
        check_settings(spark, QUOTED_NAMES, "an Iceberg sink")
        check_ranges(ranges)
        table = self._table()
        check_spec(table.metadata.spec(), table.schema, self._output)
        sources = self._source_columns(table)
        wanted = ranges_to_write(self._judge(table.positions(), ranges, sources))
        if not wanted:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        filled = () if sources is None else (sources.source,)
        columns = match_columns(frame.schema, table.schema, self._output, case_sensitive=case_sensitive, filled=filled)
        plan = WritePlan(
            table.short_metadata(sources),
            table.io_properties,
            secrets.token_hex(16),
            columns,
            case_sensitive,
            None if sources is None else sources.source,
            {range_.partition: source_of(range_) for range_ in wanted},
        )
        done = [range_.partition for range_ in ranges if range_ not in wanted]
        results = self._run_tasks(frame, done, plan)
        files = [file for result in results for file in result.files]
        self._reached("written")
        try:
            counts = self._checked_counts(results, wanted)
            before_commit()
        except BaseException:
            table.remove(files)
            raise
        taken = self._take(table, plan, wanted, files, checked_after_read(offsets_read, before_commit))
        return write_result(ranges, taken, counts)

    def describe(self) -> SinkReport:
        """Return the position of each partition.

        Returns:
            The positions, by group, topic and partition.

        Raises:
            SinkRejectedError: The table does not exist, was rolled back, or has positions of a newer version.
        """
        return SinkReport(self._output, tuple(report.stored_generations(self._table().positions())))

    def check(self) -> list[str]:
        """Return what is wrong: positions that cannot be read, and files of the table that are missing.

        Returns:
            One line for each problem.

        Raises:
            SinkRejectedError: The table does not exist.
        """
        table = self._table()
        try:
            table.positions()
        except SinkRejectedError as error:
            return [str(error)]
        return list(report.file_problems(table))

    def vacuum(self, *, dry_run: bool) -> VacuumResult:  # noqa: ARG002 - nothing is removed
        """Remove nothing: each commit replaces the positions of the one before, and old files are Iceberg's to remove.

        Args:
            dry_run: Not used.

        Returns:
            The number of positions, and which procedures of Iceberg remove old snapshots and files.

        Raises:
            SinkRejectedError: The table does not exist, was rolled back, or has positions of a newer version.
        """
        hint = (
            "Iceberg's procedure expire_snapshots removes old snapshots with their positions, and remove_orphan_files "
            "the files of runs that died"
        )
        kept = self._table().positions().kept
        return VacuumResult(self._output, len(kept), 0, 0, None, what="positions", hint=hint)

    def _checked_counts(self, results: Sequence[TaskResult], wanted: Sequence[ClaimedRange]) -> Mapping[int, int]:
        """Return the number of rows by partition. Raises `SinkRejectedError` for a row that cannot be written."""
        counts: Counter[int] = Counter()
        for result in results:
            refuse_foreign_rows(result.counts, wanted)
            counts.update({partition: count for partition, count in result.counts.items() if partition is not None})
        rejected = [result.rejected for result in results if result.rejected is not None]
        if rejected:
            raise min(rejected, key=lambda row: row.partition).error(self._output, wanted)
        return counts

    def _take(
        self,
        table: IcebergTable,
        plan: WritePlan,
        wanted: Sequence[ClaimedRange],
        files: Sequence[WrittenFile],
        offsets_read: OffsetsRead,
    ) -> tuple[ClaimedRange, ...]:
        """Commit, at once, the files of those of `wanted` that no other writer has committed meanwhile."""
        written_for, removable = table, files
        read: Mapping[int, Intervals] | None = None
        while True:
            table = self._table()
            self._check_same_table(written_for, table, plan)
            positions = table.positions()
            sources = self._source_columns(table)
            taken = ranges_to_write(self._judge(positions, wanted, sources))
            partitions = {range_.partition for range_ in taken}
            unused = [file for file in removable if file.kafka_partition not in partitions]
            if not taken:
                table.remove(unused)
                return ()
            mine = [file for file in files if file.kafka_partition in partitions]
            over_older = _covered(positions, taken)
            try:
                if over_older and sources is not None and read is None:
                    read = both(offsets_read(), table.offsets(mine, sources))
                replaced = self._replaced(table, plan.attempt, sources, over_older, read or {})
            except BaseException:
                table.remove(removable)
                raise
            with_rows = {file.kafka_partition for file in mine}
            with_gaps = {file.kafka_partition for file in mine if sources is None or not sources.are_in(file)}
            following = positions.then(
                plan.attempt,
                table.next_sequence_number(),
                taken,
                with_rows,
                with_rows - with_gaps,
                columns=() if sources is None else sources.ids,
            )
            self._reached("judged")
            if self._commit(table, mine, following, replaced):
                self._reached("committed")
                table.remove(unused)
                return taken
            removable = ()  # a commit that seemed to fail may have added them to the table

    def _replaced(
        self,
        table: IcebergTable,
        attempt: str,
        columns: SourceColumns | None,
        over_older: Sequence[ClaimedRange],
        read: Mapping[int, Intervals],
    ) -> Replacement:
        """Return how a commit removes the rows of older generations at the offsets that were read."""
        offsets = {range_.partition: within(range_, read.get(range_.partition, ())) for range_ in over_older}
        offsets = {partition: intervals for partition, intervals in offsets.items() if intervals}
        if columns is None or not offsets:
            return NOTHING_REPLACED
        return table.without(OlderRows(columns, source_of(over_older[0]), offsets), attempt)

    def _source_columns(self, table: IcebergTable) -> SourceColumns | None:
        if self.source_column is None:
            return None
        return source_columns(table.schema, self.source_column, self._output)

    def _commit(
        self, table: IcebergTable, files: Sequence[WrittenFile], positions: TablePositions, replaced: Replacement
    ) -> bool:
        """Commit, and return whether the table has the commit. If not, it was changed: it must be judged again.

        Raises:
            AuthorizationError: The catalog has refused the commit.
            UnavailableError: The commit failed, although the table was not changed meanwhile.
        """
        from pyiceberg.exceptions import CommitFailedException

        try:
            table.commit(files, positions, replaced)
        except Exception as error:  # noqa: BLE001 - raised below, unless the table has changed
            now = self._reconnected()
            if now.has_attempt(positions.attempt):
                return True
            is_conflict = isinstance(error, CommitFailedException) and now.location != table.location
            if not is_conflict and now.next_sequence_number() <= table.next_sequence_number():
                raise commit_error(self._output, self._secrets(), error) from None
            return False
        return True

    def _check_same_table(self, before: IcebergTable, now: IcebergTable, plan: WritePlan) -> None:
        """Raise `UnavailableError` if files that were written for `before` do not fit the table any more."""
        if before.metadata.table_uuid != now.metadata.table_uuid:
            change = "was dropped and created again"
        elif before.metadata.default_spec_id != now.metadata.default_spec_id:
            change = "was partitioned in another way"
        elif (misfit := first_misfit(plan.written_fields(), now.schema.fields)) is not None:
            change = f"got another type of column {misfit!r}, or requires it,"
        else:
            return
        raise UnavailableError(
            f"{self._output} {change} while this batch wrote its rows, so nothing was committed. Run the batch again"
        )

    def _judge(
        self, positions: TablePositions, ranges: Sequence[ClaimedRange], sources: SourceColumns | None
    ) -> dict[ClaimedRange, Verdict]:
        """Return the verdicts. Raises `SinkRejectedError` for a range that must not be written."""
        verdicts = {}
        for range_ in ranges:
            kept = positions.kept.get(partition_key(range_))
            verdicts[range_] = judge(kept.position if kept else None, range_)
            if kept is None or verdicts[range_] is Verdict.SKIP or not kept.covers(range_):
                continue
            if not _replaces(sources, kept):
                raise SinkRejectedError(self._unreplaceable(range_))
        wanted = ranges_to_write(verdicts)
        self._groups.check(wanted, _groups_in(positions, wanted), partial(_covered, positions))
        return verdicts

    def _unreplaceable(self, wanted: ClaimedRange) -> str:
        return (
            f"{wanted} of group {wanted.group!r}: {self._output} has rows of an older generation of these offsets, "
            "which this sink cannot replace, because they were written without this source_column or an offset. "
            "Set the group's position after them, or write to a new table"
        )

    def _reconnected(self) -> IcebergTable:
        """Load the table's newest state through a new connection to the catalog.

        After a failed commit, the connection of a SQL catalog may still show what was not committed.
        """
        catalog, self._loaded_catalog = self._loaded_catalog, None
        if catalog is not None:
            with contextlib.suppress(Exception):
                catalog.close()
        return self._table()

    def _table(self) -> IcebergTable:
        """Load the table's newest state. Raises as `known_errors` and `IcebergTable.load`."""
        require_extra(Extra.ICEBERG, "IcebergSink")
        from pyiceberg.catalog import load_catalog

        with known_errors(self._output, self._secrets):
            if self._loaded_catalog is None:
                self._loaded_catalog = load_catalog(self.catalog, **self._catalog_properties)
                check_catalog(self._loaded_catalog, self._output)
            return IcebergTable.load(self._loaded_catalog, self.table, self.branch, self._output)

    def _secrets(self) -> list[str]:
        """Return the texts that errors must not show."""
        loaded = {} if self._loaded_catalog is None else self._loaded_catalog.properties
        return secret_values(configured_properties(self.catalog), self._catalog_properties, loaded)


def _replaces(sources: SourceColumns | None, kept: PartitionPosition) -> bool:
    """Return whether the table's columns show of which message each row is."""
    return sources is not None and kept.found_by == sources.ids


def _covered(positions: TablePositions, ranges: Sequence[ClaimedRange]) -> list[ClaimedRange]:
    """Return the ranges at which the table may have rows of their group."""
    found = ((range_, positions.kept.get(partition_key(range_))) for range_ in ranges)
    return [range_ for range_, kept in found if kept is not None and kept.covers(range_)]


def _groups_in(positions: TablePositions, wanted: Sequence[ClaimedRange]) -> Collection[str]:
    return {group for group, topic, _ in positions.kept if wanted and topic == wanted[0].topic}
