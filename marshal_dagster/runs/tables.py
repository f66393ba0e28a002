"""Tables in Dagster metadata, built from objects and column definitions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from dagster import MetadataValue, TableColumn, TableMetadataValue, TableRecord, TableSchema

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table: its name, Dagster type, description, and how to get the value of a row."""

    name: str
    type: str
    about: str | None = None
    cell: Callable[[Row], str | int | bool | None] | None = None
    """Returns the value of a row (default: the attribute with the name of the column)."""


def table(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> TableMetadataValue:
    """Return the metadata value of a table with these columns and rows."""
    schema = TableSchema([TableColumn(column.name, column.type, column.about) for column in columns])
    cells = {column.name: column.cell or attrgetter(column.name) for column in columns}
    records = [TableRecord({name: cell(row) for name, cell in cells.items()}) for row in rows]
    return MetadataValue.table(records, schema)
