"""What `sink describe` and `sink check` report about an Iceberg table."""

from collections.abc import Iterator

from marshal_dagster.sinks.iceberg.positions import TablePositions
from marshal_dagster.sinks.iceberg.table import IcebergTable
from marshal_dagster.sinks.report import StoredGeneration, stored_position


def stored_generations(positions: TablePositions) -> Iterator[StoredGeneration]:
    """Return the position of each partition."""
    return (stored_position(key, kept.position) for key, kept in sorted(positions.kept.items()))


def file_problems(table: IcebergTable) -> Iterator[str]:
    """Yield a line for each file of the table's branch that is missing."""
    for path, exists in table.files():
        if not exists:
            yield f"file {path} of the table is missing. Restore it, or roll the table back to a snapshot without it"
