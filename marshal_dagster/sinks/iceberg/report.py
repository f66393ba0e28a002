"""What `sink describe` and `sink check` report about an Iceberg table."""

from collections.abc import Iterator

from marshal_dagster.sinks.iceberg.positions import TablePositions
from marshal_dagster.sinks.iceberg.table import IcebergTable
from marshal_dagster.sinks.report import StoredGeneration


def stored_generations(positions: TablePositions) -> Iterator[StoredGeneration]:
    """Yield the position of each partition."""
    for (group, topic, partition), kept in sorted(positions.kept.items()):
        yield StoredGeneration(
            group=group,
            topic=topic,
            partition=partition,
            generation=kept.position.generation,
            is_current=True,
            start=None,
            end=kept.position.position,
            ranges=1,
            rows=None,
            gaps=0,
            in_any_order=False,
        )


def file_problems(table: IcebergTable) -> Iterator[str]:
    """Yield a line for each file of the table's branch that is missing."""
    for path, exists in table.files():
        if not exists:
            yield f"file {path} of the table is missing. Restore it, or roll the table back to a snapshot without it"
