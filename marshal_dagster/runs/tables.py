"""Tables of metadata, as Dagster's pages show them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from dagster import MetadataValue, TableColumn, TableMetadataValue, TableRecord, TableSchema

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table: its Dagster type, its description, and what a row has there."""

    name: str
    type: str
    about: str | None = None
    cell: Callable[[Row], str | int | bool | None] | None = None
    """By default the row's attribute of the column's name."""


def table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> TableMetadataValue:
    """Return a table of `rows`."""
    schema = TableSchema([TableColumn(column.name, column.type, column.about) for column in columns])
    cells = {column.name: column.cell or attrgetter(column.name) for column in columns}
    records = [TableRecord({name: cell(row) for name, cell in cells.items()}) for row in rows]
    return MetadataValue.table(records, schema)
