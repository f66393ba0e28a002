"""Iceberg tables in a folder with a SQLite catalog, and a sink that writes to them without Spark."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.types import IntegerType, LongType, NestedField, StringType
from pyspark.sql import Row as SparkRow
from pyspark.sql.pandas.types import to_arrow_schema

from marshal_dagster.sinks import IcebergSink
from marshal_dagster.sinks.conformance import Row, Target
from marshal_dagster.sinks.iceberg.tasks import TaskResult, WritePlan, write_batches
from tests.conditions import WITHIN_S
from tests.sink_conformance import shared

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.table import Table
    from pyiceberg.table.sorting import SortOrder
    from pyspark.sql.types import StructType

NAME = "shop.orders"
ROWS_AT_ONCE = 7
MESSAGES_SCHEMA = Schema(
    NestedField(1, "partition", IntegerType()),
    NestedField(2, "offset", LongType()),
    NestedField(3, "value", StringType()),
)
"""The columns of messages, as tests of members write them."""


@dataclass(frozen=True)
class TypedFrame:
    """Rows with any types, with the methods of a DataFrame that the sink needs without Spark."""

    schema: "StructType"
    rows: Sequence[dict[str, Any]]

    def collect(self) -> list[SparkRow]:
        """Return the rows."""
        return [SparkRow(**row) for row in self.rows]


class LocalIcebergSink(IcebergSink):
    """A sink whose tasks run in this process, on the rows of a local frame."""

    @staticmethod
    def _run_tasks(frame: Any, done: Sequence[int], plan: WritePlan) -> list[TaskResult]:  # noqa: ANN401 - a LocalFrame
        listed = [row.asDict(recursive=True) for row in frame.collect()]
        kept = [row for row in listed if row["partition"] is None or row["partition"] not in done]
        halves = [kept[: len(kept) // 2], kept[len(kept) // 2 :]]
        results = [write_batches(plan, batches(half, frame.schema)) for half in halves]
        return [result for result in results if result is not None]


def batches(rows: Sequence[dict[str, Any]], schema: Any) -> Iterable[pa.RecordBatch]:  # noqa: ANN401 - a StructType
    """Yield rows as a task gets them from Spark."""
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        fields = pa.RecordBatch.from_pylist(list(some), to_arrow_schema(schema))
        partitions = pa.array([row["partition"] for row in some], pa.int64())
        offsets = pa.array([row.get("offset") for row in some], pa.int64())
        names = ["partition", "offset", *(f"field_{number}" for number in range(len(schema.names)))]
        yield pa.RecordBatch.from_arrays([partitions, offsets, *fields.columns], names)


def catalog_properties(folder: Path, timeout_s: float = WITHIN_S) -> dict[str, str]:
    """Return the properties of a catalog in a folder; `timeout_s` is how long it waits for others of its database."""
    uri = f"sqlite:///{folder}/catalog.db?timeout={timeout_s}"
    return {"type": "sql", "uri": uri, "warehouse": f"file://{folder}/warehouse"}


def open_catalog(folder: Path) -> "Catalog":
    """Return the catalog in a folder."""
    return load_catalog(catalog_name(folder), **catalog_properties(folder))


def catalog_name(folder: Path) -> str:
    """Return the name of the catalog in a folder. Spark keeps a catalog by its name."""
    return f"lake_{folder.name}"


def create_table(folder: Path, schema: "Schema", spec: "PartitionSpec | None" = None, **properties: str) -> "Table":
    """Create the table `NAME`."""
    named = {name.replace("_", "-"): value for name, value in properties.items()}
    return create_sorted_table(folder, schema, UNSORTED_SORT_ORDER, spec, named)


def create_sorted_table(
    folder: Path,
    schema: "Schema",
    order: "SortOrder",
    spec: "PartitionSpec | None" = None,
    properties: Mapping[str, str] = MappingProxyType({}),
) -> "Table":
    """Create the table `NAME` with a sort order."""
    catalog = open_catalog(folder)
    catalog.create_namespace_if_not_exists(NAME.split(".", maxsplit=1)[0])
    spec = spec or UNPARTITIONED_PARTITION_SPEC
    return catalog.create_table(NAME, schema, partition_spec=spec, sort_order=order, properties=dict(properties))


class IcebergTarget(Target):
    """A table in a folder."""

    most_steps = 12
    sink_class: type[IcebergSink] = LocalIcebergSink

    def __init__(self, folder: Path, branch: str = "main", source_column: str | None = None) -> None:
        self.folder = folder
        self.branch = branch
        self.source_column = source_column

    def sink(self, timeout_s: float = WITHIN_S) -> IcebergSink:
        """Return the sink of another process."""
        properties = self.properties(timeout_s)
        return self.sink_class(
            NAME,
            catalog=catalog_name(self.folder),
            catalog_properties=properties,
            branch=self.branch,
            source_column=self.source_column,
        )

    def properties(self, timeout_s: float = WITHIN_S) -> dict[str, str]:
        """Return the properties of the catalog."""
        return catalog_properties(self.folder, timeout_s)

    def shared_sink(self) -> IcebergSink:
        """Return the sink of another process, for several groups."""
        return shared(self.sink())  # type: ignore[no-any-return]

    def table(self) -> "Table":
        """Return the table's newest state."""
        return load_catalog(catalog_name(self.folder), **self.properties()).load_table(NAME)

    def rows(self) -> list[Row]:
        """Return the rows of the branch, read by pyiceberg."""
        table = self.table()
        snapshot = table.snapshot_by_name(self.branch)
        if snapshot is None:
            return []
        found = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().to_pylist()
        return [(row["partition"], row["offset"], row["value"]) for row in found]


def duckdb_rows(table: "Table", query: str) -> list[tuple[Any, ...]]:
    """Return the result of a query in DuckDB, in which `{rows}` stands for the table."""
    with _duckdb().cursor() as cursor:
        found = cursor.execute(query.format(rows=f"iceberg_scan('{table.metadata_location}')")).fetchall()
    return list(found)


@cache
def _duckdb() -> Any:  # noqa: ANN401 - a connection
    """Open DuckDB with its extension for Iceberg, which takes some 0.2 s."""
    import duckdb
    import duckdb_extension_avro
    import duckdb_extension_iceberg

    connection = duckdb.connect()
    for module in (duckdb_extension_avro, duckdb_extension_iceberg):
        extension = next(Path(module.__path__[0]).glob("extensions/*/*.duckdb_extension"))
        connection.execute(f"LOAD '{extension}'")
    return connection
