"""Describes and checks a Delta table by the sink's newest commit, for `marshal-dagster sink describe|check`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from marshal_dagster.sinks.delta.commit import MARSHAL_COLUMN, Commit
from marshal_dagster.sinks.delta.merge import repeated_keys
from marshal_dagster.sinks.report import StoredGeneration, stored_position
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

_RANGE: Final = ("group", "topic", "data_topic_id")


def stored_generations(commit: Commit) -> list[StoredGeneration]:
    """Return the position of each partition. The commit has no older generations, and no number of rows."""
    return [stored_position(key, kept.position) for key, kept in sorted(commit.kept.items())]


def row_problems(commit: Commit, table: "DataFrame") -> Iterator[str]:
    """Yield what is wrong with the rows of the sink. Reads all rows; rows without a range are not the sink's."""
    columns = {name.lower(): name for name in table.columns}
    if MARSHAL_COLUMN not in columns or PARTITION_COLUMN not in columns:
        if commit.kept:
            yield f"the table lacks the columns {PARTITION_COLUMN} or {MARSHAL_COLUMN}, which show a row's range"
        return
    rows = table.where(f.col(MARSHAL_COLUMN).isNotNull())
    offset = f.col(quoted(columns[OFFSET_COLUMN])) if OFFSET_COLUMN in columns else f.lit(None).cast("bigint")
    yield from _position_problems(commit, rows, offset)
    if OFFSET_COLUMN in columns:
        yield from _repeated_messages(rows, offset)
    if commit.keys is not None and (count := repeated_keys(table, commit.keys)):
        yield f"keys with more than one row: {count}, but the sink keeps one row of each key"


def _position_problems(commit: Commit, rows: "DataFrame", offset: "Column") -> Iterator[str]:
    """Yield rows outside of their range, and rows of which the positions of the commit know nothing."""
    is_outside = (offset < _of("first_readable")) | (offset >= _of("end"))
    found = (
        rows.groupBy(
            *(_of(name).alias(name) for name in _RANGE), PARTITION_COLUMN, _of("generation").alias("generation")
        )
        .agg(
            f.count("*").alias("rows"),
            f.max(_of("end")).alias("last"),
            f.sum(f.when(is_outside, 1).otherwise(0)).alias("outside"),
        )
        .collect()
    )
    for row in sorted(found, key=str):
        where = f"group {row['group']!r}, {row['topic']}/{row[PARTITION_COLUMN]}, generation {row['generation']}"
        if row["outside"]:
            yield f"{where}: rows of offsets outside of their range: {row['outside']}"
        yield from _beyond_position(commit, row, where)


def _beyond_position(commit: Commit, row: "Row", where: str) -> Iterator[str]:
    kept = commit.kept.get((row["group"], row["topic"], row[PARTITION_COLUMN]))
    if kept is None:
        yield f"{where}: {row['rows']} rows, but the sink's newest commit has no position of this partition"
        return
    at = kept.position
    if row["generation"] > at.generation:
        yield f"{where}: {row['rows']} rows, but the stored position is of generation {at.generation}"
    elif row["generation"] == at.generation and row["data_topic_id"] != at.data_topic_id:
        yield f"{where}: {row['rows']} rows of another data topic than that of the stored position"
    elif row["generation"] == at.generation and row["last"] > at.position:
        yield f"{where}: rows of ranges up to {row['last']}, but the stored position is {at.position}"


def _repeated_messages(rows: "DataFrame", offset: "Column") -> Iterator[str]:
    """Yield the messages whose rows were written by more than one attempt, by partition."""
    found = (
        rows.where(offset.isNotNull())
        .groupBy(*(_of(name).alias(name) for name in _RANGE), PARTITION_COLUMN, offset.alias("at"))
        .agg(f.min(_of("attempt")).alias("first"), f.max(_of("attempt")).alias("last"))
        .where(f.col("first") != f.col("last"))
        .groupBy("group", "topic", PARTITION_COLUMN)
        .agg(f.count("*").alias("messages"), f.min("at").alias("lowest"))
        .collect()
    )
    for row in sorted(found, key=str):
        yield (
            f"group {row['group']!r}, {row['topic']}/{row[PARTITION_COLUMN]}: messages whose rows were written twice: "
            f"{row['messages']}, the first one at offset {row['lowest']}"
        )


def _of(name: str) -> "Column":
    return f.col(MARSHAL_COLUMN).getField(name)
