"""An append to a Delta table in two steps: its files are written, and later they are committed.

Spark's public API does both in one call, so rows that are checked before their commit must be cached. This module calls
Delta's classes in the JVM. Where they are missing or unknown, `delta.table` caches the rows (decision 9).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from marshal_dagster.sinks.delta.commit import APPLICATION
from marshal_dagster.sinks.delta.place import DeltaPlace
from marshal_dagster.sinks.sink import PARTITION_COLUMN
from marshal_dagster.spark.interrupts import unless_interrupted
from marshal_dagster.spark.packages import minor_version

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_VERSIONS: Final = ("3.3", "4.0")
"""The versions of Delta Lake whose classes are known."""
_CATALOG: Final = "spark_catalog"
_DELTA_CATALOG: Final = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_MAPPED: Final = "delta.columnMapping.mode"
_MANY_FILES: Final = 500
"""The most files whose statistics are read one by one. Each takes a call of the JVM, some 0.3 ms."""


@dataclass(frozen=True, slots=True)
class TableState:
    """A version of a table."""

    version: int
    table_id: str
    location: str = ""
    """The table's folder. A copy of a folder has the same id."""

    def is_of(self, other: "TableState | None") -> bool:
        """Return whether both are versions of one table."""
        return other is not None and (self.table_id, self.location) == (other.table_id, other.location)


class DeltaLog:
    """Delta's log of a table, read through the JVM of the Spark session."""

    def __init__(self, spark: "SparkSession", log: Any, catalog_table: Any) -> None:  # noqa: ANN401 - py4j has no types
        self.spark = spark
        self.log = log
        self.catalog_table = catalog_table

    def state(self) -> TableState | None:
        """Return the table's newest version, None if there is no table. Lists the files of its log."""
        with _active(self.spark):
            return self.state_of(self._newest())

    def state_of(self, snapshot: Any) -> TableState | None:  # noqa: ANN401 - py4j has no types
        """Return the version of a snapshot, None if there is no table."""
        version = int(snapshot.version())
        if version < 0:
            return None
        return TableState(version, str(snapshot.metadata().id()), str(self.log.dataPath().toString()))

    def _newest(self) -> Any:  # noqa: ANN401 - py4j has no types
        none = _jvm(self.spark).scala.Option.empty()
        return self.log.update(False, none, none)  # noqa: FBT003 - Java

    def detail(self) -> dict[str, Any] | None:
        """Return those details of `DESCRIBE DETAIL` that a sink needs, None if there is no table.

        Delta's statement also counts the files of the table, for which Delta reads its whole state.
        """
        with _active(self.spark):
            snapshot = self._newest()
            if self.state_of(snapshot) is None:
                return None
            metadata, properties = snapshot.metadata(), dict[str, str]()
            entries = metadata.configuration().iterator()
            while entries.hasNext():
                entry = entries.next()
                properties[entry._1()] = entry._2()  # noqa: SLF001 - Scala's names
            columns = list(_items(metadata.partitionColumns()))
            location = self.log.dataPath().toString()
            return {"id": metadata.id(), "location": location, "properties": properties, "partitionColumns": columns}

    def begin(self) -> "Transaction | None":
        """Return a transaction on the table's newest version, None if there is no table."""
        with _active(self.spark):
            transaction = self.log.startTransaction(self.catalog_table, _jvm(self.spark).scala.Option.empty())
            state = self.state_of(transaction.snapshot())
            return None if state is None else Transaction(self, transaction, state)


def open_log(spark: "SparkSession", place: DeltaPlace, options: Mapping[str, str]) -> DeltaLog | None:
    """Return the log of the table at `place`, or None if this session cannot read it with Delta's classes.

    It cannot over Spark Connect, on Databricks, with an unknown version of Delta Lake, and in another catalog than
    Spark's own. None too if there is no table of that name.
    """
    from py4j.protocol import Py4JError, Py4JJavaError

    jvm = _jvm(spark)
    if jvm is None or any(name.lower().startswith("delta.") for name in options):
        return None
    try:
        if not _is_known(jvm):
            return None
        with _active(spark):
            return _path_log(spark, place.path, options) if place.path is not None else _named_log(spark, place.name)
    except Py4JJavaError:
        raise
    except (Py4JError, TypeError):  # a class or a method that this version does not have
        return None


def _is_known(jvm: Any) -> bool:  # noqa: ANN401 - py4j has no types
    from py4j.java_gateway import JavaClass

    is_class = isinstance(jvm.org.apache.spark.sql.delta.DeltaLog, JavaClass)
    return is_class and minor_version(jvm.io.delta.package.VERSION()) in _VERSIONS


def _path_log(spark: "SparkSession", path: str, options: Mapping[str, str]) -> DeltaLog:
    jvm = _jvm(spark)
    settings = _map(jvm, options)
    log = jvm.org.apache.spark.sql.delta.DeltaLog.forTable(
        spark._jsparkSession,  # noqa: SLF001 - there is no public name
        jvm.org.apache.hadoop.fs.Path(path),
        settings,
    )
    return DeltaLog(spark, log, jvm.scala.Option.empty())


def _named_log(spark: "SparkSession", name: Sequence[str]) -> DeltaLog | None:
    from pyspark.errors import PySparkException

    jvm, session = _jvm(spark), spark._jsparkSession  # noqa: SLF001 - there is no public name
    *catalog, schema, table = name
    if (catalog or [spark.catalog.currentCatalog()])[0].lower() != _CATALOG:
        return None
    if spark.conf.get(f"spark.sql.catalog.{_CATALOG}", None) != _DELTA_CATALOG:
        return None
    identifier = jvm.org.apache.spark.sql.catalyst.TableIdentifier(table, jvm.scala.Option.apply(schema))
    try:
        found = session.sessionState().catalog().getTableMetadata(identifier)
    except PySparkException:
        return None
    provider = found.provider()
    if not provider.isDefined() or provider.get().lower() != "delta":
        return None
    return DeltaLog(
        spark, jvm.org.apache.spark.sql.delta.DeltaLog.forTable(session, found), jvm.scala.Option.apply(found)
    )


class Transaction:
    """A transaction of Delta that reads the sink's number, so that it conflicts with each other commit of the sink."""

    def __init__(self, log: DeltaLog, transaction: Any, state: TableState) -> None:  # noqa: ANN401 - py4j has no types
        self.state = state
        """The version of the table that the transaction reads."""
        self._log = log
        self._transaction = transaction
        self._jvm = _jvm(log.spark)
        self._added: list[Any] = []
        self._data: Any = None
        self._metadata = ""

    def number(self) -> int:
        """Return the number of the sink's last commit, 0 if there is none.

        Delta's checksum of the version has it. Without a checksum Delta reads the whole state of the table.
        """
        with _active(self._log.spark):
            checksum = self._transaction.snapshot().checksumOpt()
            stored = checksum.get().setTransactions() if checksum.isDefined() else checksum
            if not stored.isDefined():
                return max(0, int(self._transaction.txnVersion(APPLICATION)))
            getattr(self._transaction.readTxn(), "$plus$eq")(APPLICATION)  # as `txnVersion` does
            found = (each for each in _items(stored.get()) if each.appId() == APPLICATION)
            return max((int(each.version()) for each in found), default=0)

    def write(self, frame: "DataFrame", options: Mapping[str, str], number: int, metadata: str) -> None:
        """Write the files of the rows. Readers do not see them before `commit`."""
        jvm, session = self._jvm, self._log.spark._jsparkSession  # noqa: SLF001 - there is no public name
        own = {"userMetadata": metadata, "txnAppId": APPLICATION, "txnVersion": str(number)}
        with _active(self._log.spark):
            none, delta = jvm.scala.Option.empty(), jvm.org.apache.spark.sql.delta
            settings = delta.DeltaOptions(_map(jvm, {**options, **own}), session.sessionState().conf())
            command = delta.commands.WriteIntoDelta(
                self._log.log,
                jvm.org.apache.spark.sql.SaveMode.Append,
                settings,
                _sequence(jvm, []),
                _map(jvm, {}),
                frame._jdf,  # noqa: SLF001 - there is no public name
                self._log.catalog_table,
                none,
            )
            self._data = command.writeAndReturnCommitData(self._transaction, session, none, False)  # noqa: FBT003 - Java
        self._metadata = metadata
        self._added = [each for each in _items(self._data.actions()) if each.getClass().getSimpleName() == "AddFile"]

    def counts(self) -> Mapping[int | None, int] | None:
        """Return the number of rows that were written, by the column `partition`.

        Delta's statistics have them if each file has rows of one partition. Otherwise this reads the column, and
        returns None if the table did not have it before this transaction.
        """
        counts = None if len(self._added) > _MANY_FILES or self._is_mapped() else self._counts_by_statistics()
        if counts is not None:
            return counts
        from pyspark.sql import DataFrame

        with _active(self._log.spark):
            files = _sequence(self._jvm, self._added)
            snapshot = self._transaction.snapshot()
            if PARTITION_COLUMN not in snapshot.schema().fieldNames():
                return None
            rows = self._log.log.createDataFrame(snapshot, files, False, self._jvm.scala.Option.empty())  # noqa: FBT003
        by_partition = DataFrame(rows, self._log.spark).groupBy(PARTITION_COLUMN)
        return {row[0]: row[1] for row in by_partition.count().collect()}

    def commit(self) -> TableState:
        """Commit the files, and return the table's new version.

        Raises:
            Exception: If another commit of the sink was first, or for any reason of Delta. The commit may exist.
        """
        jvm = self._jvm
        with _active(self._log.spark):
            write = getattr(jvm.org.apache.spark.sql.delta, "DeltaOperations$Write")
            operation = write(
                jvm.org.apache.spark.sql.SaveMode.Append,
                jvm.scala.Option.apply(_sequence(jvm, [])),
                jvm.scala.Option.empty(),
                jvm.scala.Option.apply(self._metadata),
            )
            committed = self._transaction.commitIfNeeded(self._data.actions(), operation, self._data.stringTags())
        # Spark's own writer does so too. Else the session would not see these rows in a table that it has cached.
        self._log.spark.catalog.refreshByPath(self.state.location)
        return replace(self.state, version=int(committed.get()))

    def discard(self) -> None:
        """Delete the files, which must not have been committed. What cannot be deleted is left to Delta's VACUUM."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            settings = self._log.log.newDeltaHadoopConf()
            for added in self._added:
                path = added.absolutePath(self._log.log)
                path.getFileSystem(settings).delete(path, False)  # noqa: FBT003 - Java
        except (Py4JError, PySparkException):
            return

    def _is_mapped(self) -> bool:
        mode = self._transaction.metadata().configuration().get(_MAPPED)
        return bool(mode.isDefined() and mode.get() != "none")

    def _counts_by_statistics(self) -> dict[int | None, int] | None:
        counts: dict[int | None, int] = {}
        for added in self._added:
            found = rows_of_one_partition(added.json())
            if found is None:
                return None
            partition, rows = found
            counts[partition] = counts.get(partition, 0) + rows
        return counts


def rows_of_one_partition(action: str) -> tuple[int, int] | None:
    """Return the partition of all rows in a file, and their number, by Delta's JSON of the file; None if unknown."""
    added = json.loads(action)["add"]
    statistics = json.loads(added.get("stats") or "{}")
    rows, nulls = statistics.get("numRecords"), statistics.get("nullCount", {}).get(PARTITION_COLUMN)
    lowest, highest = (statistics.get(name, {}).get(PARTITION_COLUMN) for name in ("minValues", "maxValues"))
    if rows is None or nulls != 0 or lowest is None or lowest != highest:
        return None
    return int(lowest), int(rows)


def _jvm(spark: "SparkSession") -> Any:  # noqa: ANN401 - py4j has no types
    return None if "connect" in type(spark).__module__.split(".") else getattr(spark, "_jvm", None)


def _map(jvm: Any, values: Mapping[str, str]) -> Any:  # noqa: ANN401 - py4j has no types
    found = jvm.java.util.HashMap()
    for name, value in values.items():
        found.put(name, value)
    return jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(found)


def _sequence(jvm: Any, values: list[Any]) -> Any:  # noqa: ANN401 - py4j has no types
    found = jvm.java.util.ArrayList()
    for value in values:
        found.add(value)
    return jvm.org.apache.spark.api.python.PythonUtils.toSeq(found)


def _items(sequence: Any) -> Iterator[Any]:  # noqa: ANN401 - py4j has no types
    return (sequence.apply(index) for index in range(sequence.size()))


@contextmanager
def _active(spark: "SparkSession") -> Iterator[None]:
    """Let Delta find this session as the active one of the thread, as Spark's own calls do."""
    jvm, own = _jvm(spark), spark._jsparkSession  # noqa: SLF001 - there is no public name
    sessions = getattr(jvm, own.getClass().getName())
    before = sessions.getActiveSession()

    def restore() -> None:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()

    sessions.setActiveSession(own)
    with unless_interrupted(restore):
        yield
