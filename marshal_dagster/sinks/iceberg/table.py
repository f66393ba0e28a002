"""An Iceberg table's branch, as the driver reads it and commits to it through pyiceberg."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks.iceberg.older_rows import (
    NOTHING_REPLACED,
    OlderRows,
    Replacement,
    SourceColumns,
    intervals_of,
    replacement,
)
from marshal_dagster.sinks.iceberg.parquet_files import FILE_PREFIX, WrittenFile, data_files
from marshal_dagster.sinks.iceberg.positions import PROPERTY, TablePositions
from marshal_dagster.sinks.sink import Intervals

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

_MERGES = "commit.manifest-merge.enabled"
_AUTH_MANAGER = "auth.manager"
_OF_CATALOG = frozenset({_AUTH_MANAGER, "auth", "credential"})
"""Settings by which the driver logs in to a REST catalog. Tasks do not need them, and a manager cannot be pickled."""
_S3_SIGNER = "s3.signer"
_READ_ONLY = frozenset({"pyiceberg.catalog.bigquery_metastore", "pyiceberg.catalog.dynamodb"})
"""The modules of catalogs whose `commit_table` pyiceberg does not implement."""
_OTHER_CATALOG = "Use another catalog, such as REST, Glue or SQL"


class IcebergTable:
    """One state of a table's branch. Commits succeed only while the branch is in this state."""

    def __init__(self, table: "Table", branch: str, output: str) -> None:
        """Store the arguments.

        Args:
            table: The table, as it was just loaded.
            branch: The branch.
            output: The name of both, for errors.
        """
        self._table = table
        self._branch = branch
        self._output = output
        self._property = f"{PROPERTY}.{branch}"

    @classmethod
    def load(cls, catalog: "Catalog", identifier: str, branch: str, output: str) -> "IcebergTable":
        """Load the table's newest state.

        Raises:
            SinkRejectedError: There is no such table or branch, or its format is not version 2.
        """
        from pyiceberg.exceptions import NoSuchTableError

        try:
            table = catalog.load_table(identifier)
        except NoSuchTableError:
            raise SinkRejectedError(
                f"{output} does not exist. Create the table first, with Spark or with pyiceberg's create_table"
            ) from None
        reference = table.metadata.refs.get(branch)
        if reference is None and (branch != "main" or table.metadata.snapshots):
            create = "Create it first" if branch != "main" else "Write any row with the engine that replaced the table"
            raise SinkRejectedError(f"{output} has no branch {branch!r}. {create}")
        if reference is not None and reference.snapshot_ref_type.value != "branch":
            raise SinkRejectedError(f"{output}: {branch!r} is a tag, which cannot be written to. Name a branch")
        if table.format_version > 2:  # noqa: PLR2004 - the newest version that pyiceberg writes
            raise SinkRejectedError(
                f"{output} has format version {table.format_version}, and pyiceberg writes only version 2. Write to a "
                "new table that is created with 'format-version' = '2'"
            )
        if table.format_version == 1:
            raise SinkRejectedError(
                f"{output} has format version 1, in which this sink cannot detect a rollback. Upgrade the table: "
                "ALTER TABLE ... SET TBLPROPERTIES ('format-version' = '2')"
            )
        return cls(table, branch, output)

    @property
    def metadata(self) -> "TableMetadata":
        """The table's metadata."""
        return self._table.metadata

    @property
    def location(self) -> str:
        """The path of the table's metadata file, which differs after each change."""
        return self._table.metadata_location

    @property
    def schema(self) -> "Schema":
        """The table's current schema."""
        return self._table.schema()

    @property
    def io_properties(self) -> dict[str, object]:
        """The settings of the storage, with the credentials that the catalog has given out, but not its own."""
        found = self._table.io.properties
        kept = {name: text for name, text in found.items() if not name.startswith(PROPERTY) and name not in _OF_CATALOG}
        manager = found.get(_AUTH_MANAGER)
        if manager is not None and _S3_SIGNER in found and (header := manager.auth_header()):
            kept["header.Authorization"] = header  # the catalog signs each request of a task
        return kept

    def short_metadata(self, columns: SourceColumns | None = None) -> "TableMetadata":
        """Return what files are written by: the metadata without all that grows with the number of snapshots.

        Args:
            columns: The columns of which files have whole bounds.
        """
        properties = {name: text for name, text in self.metadata.properties.items() if not name.startswith(PROPERTY)}
        if columns is not None:
            properties = columns.with_bounds(properties)
        lists = ("snapshots", "snapshot_log", "metadata_log", "statistics", "partition_statistics")
        return self.metadata.model_copy(
            update={"properties": properties, "refs": {}, "current_snapshot_id": None} | {name: [] for name in lists}
        )

    def positions(self) -> TablePositions:
        """Return the positions of the rows that the branch has now.

        Raises:
            SinkRejectedError: The branch was rolled back to a snapshot before the first commit of the sink that is
                known.
        """
        stored = self._stored()
        oldest = None
        for snapshot in self._history():
            text = self._text_of(snapshot)
            if text is not None:
                found = TablePositions.from_text(text, f"{self._output}: property {PROPERTY} of a snapshot")
                return found if stored is None or found.number >= stored.number else _renumbered(found, stored)
            oldest = snapshot
        if stored is None:
            return TablePositions()
        if oldest is not None and (oldest.sequence_number or 0) > stored.sequence_number:
            return stored  # older snapshots have expired, or the table's content was replaced
        raise SinkRejectedError(
            f"{self._output} was rolled back: it no longer has the sink's last commit (snapshot sequence "
            f"number {stored.sequence_number}), so nothing was written. Undo that, or remove the table's property "
            f"{self._property} to begin again without positions"
        )

    def has_attempt(self, attempt: str) -> bool:
        """Return whether a commit of this attempt is in the branch."""
        stored = self._stored()
        if stored is not None and stored.attempt == attempt:
            return True
        for snapshot in self._history():
            text = self._text_of(snapshot)
            if text is not None and TablePositions.from_text(text, self._output).attempt == attempt:
                return True
        return False

    def without(self, older: OlderRows, attempt: str) -> Replacement:
        """Write the branch's files that have rows of older generations again, without these rows.

        Raises:
            SinkRejectedError: A file has other rows too, and a column whose values pyiceberg does not read exactly,
                or the branch has equality deletes.
        """
        snapshot = self.metadata.snapshot_by_name(self._branch)
        if snapshot is None:
            return NOTHING_REPLACED
        if _has_equality_deletes(snapshot, self._table.io):
            raise SinkRejectedError(
                f"{self._output} has equality deletes of another engine, which pyiceberg does not apply to files that "
                "are written again. Compact the table with Spark (rewrite_data_files) until it has none, then run the "
                "batch again"
            )
        tasks = self._table.scan(older.expression(), snapshot_id=snapshot.snapshot_id).plan_files()
        name = f"{FILE_PREFIX}{attempt}-{secrets.token_hex(8)}"
        return replacement(older, tasks, self.short_metadata(older.columns), self._table.io, name)

    def offsets(self, files: Sequence[WrittenFile], columns: SourceColumns) -> dict[int, Intervals]:
        """Return the offsets of the rows of files of the sink, by Kafka partition. Rows may have none."""
        import pyarrow.parquet as pq

        found: dict[int, list[Any]] = {}
        for file in files:
            with self._table.io.new_input(file.path).open() as stream:
                read = pq.ParquetFile(stream).read([columns.offset.name])
            for values in read.columns:
                found.setdefault(file.kafka_partition, []).append(values.drop_null().to_numpy())
        return {partition: intervals_of(values) for partition, values in found.items()}

    def commit(
        self, files: Sequence[WrittenFile], positions: TablePositions, replaced: Replacement = NOTHING_REPLACED
    ) -> None:
        """Add files to the branch, and store the positions, in one commit.

        pyiceberg would retry a commit that another one has overtaken, with positions that are old by then. So this
        method calls the catalog once, and its caller judges again.

        Raises:
            CommitFailedException: Pyiceberg's error if the branch, the schema or the specification has changed.
            Exception: Any other error leaves open whether the table has the commit.
        """
        from pyiceberg.table.update import AssertCurrentSchemaId, AssertDefaultSpecId, AssertTableUUID

        metadata, text = self.metadata, positions.to_text()
        transaction = self._table.transaction()
        update = transaction.update_snapshot(snapshot_properties={PROPERTY: text}, branch=self._branch)
        merges = metadata.properties.get(_MERGES, "true").lower() == "true"
        append = update.merge_append if merges else update.fast_append
        with update.overwrite() if replaced.removed else append() as producer:
            for file in data_files([*files, *replaced.rewritten]):
                producer.append_data_file(file)
            for old in replaced.removed:
                producer.delete_data_file(old)
        transaction.set_properties({self._property: text})
        requirements = (
            *transaction._requirements,  # noqa: SLF001 - with the branch's snapshot
            AssertTableUUID(uuid=metadata.table_uuid),
            AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
            AssertDefaultSpecId.model_validate({"default-spec-id": metadata.default_spec_id}),
        )
        self._table._do_commit(updates=transaction._updates, requirements=requirements)  # noqa: SLF001 - without retries

    def files(self) -> Iterator[tuple[str, bool]]:
        """Yield the path of each data file of the branch, and whether the file exists."""
        snapshot = self.metadata.snapshot_by_name(self._branch)
        if snapshot is None:
            return
        for task in self._table.scan(snapshot_id=snapshot.snapshot_id).plan_files():
            path = task.file.file_path
            yield path, self._table.io.new_input(path).exists()

    def next_sequence_number(self) -> int:
        """Return the sequence number of the next snapshot."""
        return int(self.metadata.next_sequence_number())

    def remove(self, files: Sequence[WrittenFile]) -> None:
        """Delete files that are not in the table. Errors are ignored: a later vacuum removes the files."""
        for file in files:
            with contextlib.suppress(Exception):
                self._table.io.delete(file.path)

    def _stored(self) -> TablePositions | None:
        text = self.metadata.properties.get(self._property)
        return None if text is None else TablePositions.from_text(text, f"{self._output}: property {self._property}")

    def _history(self) -> "Iterator[Snapshot]":
        """Yield the branch's snapshots, the newest first."""
        snapshot = self.metadata.snapshot_by_name(self._branch)
        while snapshot is not None:
            yield snapshot
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self.metadata.snapshot_by_id(parent)

    def _text_of(self, snapshot: "Snapshot") -> str | None:
        return None if snapshot.summary is None else snapshot.summary.additional_properties.get(PROPERTY)


def _has_equality_deletes(snapshot: "Snapshot", io: "FileIO") -> bool:
    """Return whether a snapshot has equality deletes.

    pyiceberg refuses them only if their bounds are within the scan's condition. Others delete rows of the same files.
    """
    from pyiceberg.manifest import DataFileContent, ManifestContent

    manifests = (manifest for manifest in snapshot.manifests(io) if manifest.content == ManifestContent.DELETES)
    entries = (entry for manifest in manifests for entry in manifest.fetch_manifest_entry(io))
    return any(entry.data_file.content == DataFileContent.EQUALITY_DELETES for entry in entries)


def check_catalog(catalog: "Catalog", output: str) -> None:
    """Raise `ConfigurationError` if pyiceberg cannot commit to the catalog's tables by a compare-and-set.

    Args:
        catalog: The catalog.
        output: The name of the table, for errors.
    """
    modules = {base.__module__ for base in type(catalog).__mro__}
    if "pyiceberg.catalog.hive" in modules:
        reason = "without a compare-and-set, so two writers could both commit the same range"
        raise ConfigurationError(f"{output}: pyiceberg commits to a Hive catalog {reason}. {_OTHER_CATALOG}")
    if modules & _READ_ONLY:
        raise ConfigurationError(f"{output}: pyiceberg only reads tables of {type(catalog).__name__}. {_OTHER_CATALOG}")


def _renumbered(found: TablePositions, stored: TablePositions) -> TablePositions:
    """Return the positions of a branch that was rolled back, with the number that its next commit follows."""
    return TablePositions(stored.number, found.attempt, found.sequence_number, found.kept)
