"""Upserts to real Delta tables by MERGE. `tests/fast/test_sink_delta` applies the conformance kit without Spark."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from pyspark.sql import functions as f
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks import DeltaSink
from marshal_dagster.sinks.conformance.target import part
from tests.session_settings import QUICK_PLANS, WITHOUT_STATISTICS, session_settings
from tests.sink_outputs import DELTA_STEPS, hook
from tests.spark_frames import local_frame
from tests.upserts import FIELDS, KeyedRow, UpsertTarget, check_history

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

A, B = part(0, 0, 10), part(1, 0, 10)


class DeltaUpserts(UpsertTarget):
    """A Delta table in a folder, or under a name."""

    steps: ClassVar[Sequence[str]] = DELTA_STEPS

    def __init__(self, spark: "SparkSession", path: str | None = None, table: str | None = None) -> None:
        self.spark, self.place = spark, {"path": path} if table is None else {"table": table}

    def sink(self, reached: Callable[[str], None] | None = None, **options: Any) -> DeltaSink:  # noqa: ANN401
        """Return a sink, as another process would have it."""
        sink = DeltaSink(**self.place, session=lambda: self.spark, **options)
        hook(sink, reached)
        return sink

    def rows(self) -> list[KeyedRow]:
        """Read all rows of the table."""
        rows = self.upserting()._table().frame().select(*FIELDS).collect()
        return sorted(map(tuple, rows), key=lambda row: row[2])

    def frame(self, rows: Iterable[KeyedRow]) -> "DataFrame":
        """Return a frame of these rows."""
        return local_frame(self.spark, rows, t.StructType([t.StructField(name, FIELDS[name]) for name in FIELDS]))


@pytest.fixture
def table(spark: "SparkSession", tmp_path: Path) -> Iterator[DeltaUpserts]:
    """A table that does not exist yet."""
    with session_settings(spark, WITHOUT_STATISTICS | QUICK_PLANS):
        yield DeltaUpserts(spark, str(tmp_path / "a `table`'s folder"))


@pytest.fixture
def named(spark: "SparkSession") -> Iterator[DeltaUpserts]:
    """A table by its name that does not exist yet, in a schema of its own."""
    schema = f"named_{secrets.token_hex(4)}"
    spark.sql(f"CREATE SCHEMA {schema}")
    with session_settings(spark, WITHOUT_STATISTICS | QUICK_PLANS):
        yield DeltaUpserts(spark, table=f"{schema}.Customers")
    spark.sql(f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.parametrize("has_versions", [False, True], ids=["by offset", "by version"])
def test_the_table_holds_the_newest_rows(table: DeltaUpserts, named: DeltaUpserts, has_versions: bool) -> None:
    """After each batch of a random history, with deaths and replays, the table is that of the model."""
    check_history(named if has_versions else table, 1, has_versions=has_versions, in_any_order=False, length=4)


def test_what_no_order_decides_is_refused(table: DeltaUpserts) -> None:
    """Keys of two partitions, null keys, and two rows of a message; nothing is written."""
    table.write([(0, 3, 1, "a", 1)], A)
    table.frame([(0, 1, 7, "foreign", 1)]).write.format("delta").mode("append").save(table.place["path"])
    before = table.rows()
    for rows, match in (
        ([(1, 2, 1, "b", 2)], "offset 2: the stored row of its key is from partition 0 of topic 't'"),
        ([(1, 2, 7, "b", 2)], "offset 2: the stored row of its key was not written by this sink"),
        ([(1, 2, None, "b", 2)], "offset 2: one of key, offset is null"),
        ([(1, 2, 5, "b", 2), (1, 2, 5, "c", 3)], "offset 2: the message has two rows"),
    ):
        with pytest.raises(SinkRejectedError, match=match) as raised:
            table.write(rows, B)
        assert "\n" not in str(raised.value)
    assert table.rows() == before
    with pytest.raises(SinkRejectedError, match="partitions 1 and 2 both have rows of its key"):
        table.write([(1, 2, 5, "b", 2), (2, 2, 5, "c", 3)], B, part(2, 0, 10))
    assert table.write([(1, 2, 5, "b", 2), (1, 3, 5, "c", 3)], B).rows == {1: 2}
    assert [row[3] for row in table.rows()] == ["a", "c", "foreign"]


def test_a_new_generation_rebuilds_the_table(table: DeltaUpserts) -> None:
    """It begins where the first one began. An older row there is removed, also if its key does not come again."""
    table.write([(0, 1, 1, "first", 0), (0, 7, 1, "second", 0), (0, 8, 2, "wrong", 0)], A)
    table.write([(0, 1, 1, "again", 0)], part(0, 0, 5, generation=1, epoch=20))
    table.write([(0, 9, 3, "new", 0)], part(0, 5, 10, generation=1, epoch=20))
    assert [row[3] for row in table.rows()] == ["again", "new"]
    late = part(0, 5, 10, generation=2, epoch=30)
    assert "replaced rows from offset 0 on" in str(table.upserting().can_replace([late]))
    with pytest.raises(SinkRejectedError, match="replaced rows from offset 0 on"):
        table.write([], late)


def test_a_new_generation_by_version_is_refused(table: DeltaUpserts) -> None:
    """A row may have replaced one of another partition."""
    table.write([(0, 1, 1, "first", 0)], A, order_by="version")
    with pytest.raises(SinkRejectedError, match="cannot bring back"):
        table.write([(0, 1, 1, "again", 0)], part(0, 0, 5, generation=1, epoch=20), order_by="version")
    assert [row[3] for row in table.rows()] == ["first"]


def test_writers_of_different_partitions_meet(table: DeltaUpserts) -> None:
    """The one that is overtaken between its judgement and its MERGE is judged again, and the greater value stays."""
    table.write([], A, B, order_by="version")
    overtaken: list[str] = []

    def reached(step: str) -> None:
        if step == "judged" and not overtaken:
            overtaken.append(step)
            table.write([(1, 10, k, "b", (k + 1) % 2) for k in range(4)], part(1, 10, 20), order_by="version")

    rows = [(0, 10, k, "a", k % 2) for k in range(4)]
    assert table.write(rows, part(0, 10, 20), reached=reached, order_by="version").taken
    assert [(row[2], row[3], row[4]) for row in table.rows()] == [(0, "b", 1), (1, "a", 1), (2, "b", 1), (3, "a", 1)]


def test_a_stale_writer_writes_nothing(table: DeltaUpserts) -> None:
    """Another run has taken the same range with a higher fencing token between its judgement and its MERGE."""
    table.write([(0, 3, 1, "a", 1)], A)
    overtaken: list[str] = []

    def reached(step: str) -> None:
        if step == "judged" and not overtaken:
            overtaken.append(step)
            table.write([(0, 12, 1, "new", 1)], part(0, 10, 20, epoch=20))

    with pytest.raises(SinkRejectedError, match="fencing token 19 is lower than 20"):
        table.write([(0, 12, 1, "late", 1)], part(0, 10, 20, epoch=19), reached=reached)
    assert [row[3] for row in table.rows()] == ["new"]


def test_a_table_keeps_its_mode_and_keys(table: DeltaUpserts) -> None:
    """Rows could be lost or repeated with others."""
    table.write([(0, 3, 1, "a", 1)], A)
    by_version: dict[str, Any] = {"mode": "upsert", "keys": ["key"], "order_by": "version"}
    by_value: dict[str, Any] = {"mode": "upsert", "keys": ["value"]}
    for options in ({}, by_value, by_version):
        with pytest.raises(ConfigurationError, match=r"was written with mode='upsert', keys=\['key'\], and"):
            table.sink(**options).write(table.frame([]), [part(0, 10, 20)], dict)
    assert len(table.rows()) == 1


def test_a_table_with_two_rows_of_a_key_is_refused(table: DeltaUpserts) -> None:
    """`check` finds the rows that another writer adds later."""
    table.sink().write(table.frame([(0, 3, 1, "a", 1), (0, 4, 1, "b", 1)]), [A], dict)
    with pytest.raises(ConfigurationError, match="more than one row for each of 1 keys"):
        table.write([], part(0, 10, 20))
    table.spark.sql(f"DELETE FROM {table.sink()._place.sql} WHERE value = 'a'")  # noqa: S608 - the test's table
    table.write([(0, 12, 1, "c", 1)], part(0, 10, 20))
    assert [row[3] for row in table.rows()] == ["c"]
    assert table.upserting().check() == []
    table.frame([(0, 1, 1, "foreign", 1)]).write.format("delta").mode("append").save(table.place["path"])
    assert table.upserting().check() == ["keys with more than one row: 1, but the sink keeps one row of each key"]


def test_columns_and_types(table: DeltaUpserts) -> None:
    """Columns that only the table has keep their values. New ones are refused, or added if the user wants it."""
    table.write([(0, 3, 1, "a", 1), (0, 3, 2, "a", 1)], A)
    sql, place = table.spark.sql, table.sink()._place.sql
    sql(f"ALTER TABLE {place} ADD COLUMNS (note STRING)")
    sql(f"UPDATE {place} SET note = 'kept'")  # noqa: S608 - the test's table
    frame, following = table.frame([(0, 12, 1, "b", 1)]), part(0, 10, 20)
    for other, match in (
        (frame.withColumn("more", f.lit(1)), "lacks the column more"),
        (frame.withColumn("value", f.lit(1)), "column value has type string, and int in the result"),
        (frame.withColumn("key", f.lit(1.5)), "keys: column 'key' has type double"),
        (frame.withColumn("marshal_key", f.lit(1)), "marshal_key are the sink's own"),
        (frame.drop("offset"), "lacks the columns offset"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            table.upserting().write(other, [following], dict)
    added = table.upserting(options={"mergeSchema": "true"})
    assert added.write(frame.withColumn("more", f.lit(7)), [following], dict).taken
    found = table.sink()._table().frame().orderBy("key").select("key", "value", "note", "more").collect()
    assert [tuple(row) for row in found] == [(1, "b", "kept", 7), (2, "a", "kept", None)]


def test_a_table_only_for_appends_is_refused(table: DeltaUpserts) -> None:
    """Before the batch is processed."""
    table.write([(0, 3, 1, "a", 1)], A)
    table.spark.sql(f"ALTER TABLE {table.sink()._place.sql} SET TBLPROPERTIES ('delta.appendOnly' = 'true')")
    with pytest.raises(SinkRejectedError, match="appendOnly"):
        table.upserting().verdicts([part(0, 10, 20)])


def test_settings_of_the_session_hold_in_the_merge(table: DeltaUpserts) -> None:
    """And nothing of the MERGE's own settings and views stays in the session."""
    with session_settings(table.spark, {"spark.databricks.delta.properties.defaults.checkpointInterval": "7"}):
        table.write([(0, 3, 1, "a", 1)], A)
    assert table.spark.conf.get("spark.databricks.delta.write.txnAppId", None) is None
    assert [
        view.name for view in table.spark.catalog.listTables("global_temp") if view.name.startswith("marshal_")
    ] == []
    metadata = table.spark.sql(f"DESCRIBE HISTORY {table.sink()._place.sql} LIMIT 1").first()
    assert metadata is not None
    assert metadata["operation"] == "MERGE"
    assert '"keys":["key"],"order_by":null' in metadata["userMetadata"]
