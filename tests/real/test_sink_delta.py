"""The Delta sink on real tables. `tests/fast/test_sink_delta` tests its rules without Spark."""

import json
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import StructField, StructType

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks import DeltaSink
from marshal_dagster.sinks.conformance import CASES, Case, Target
from marshal_dagster.sinks.conformance.target import COLUMNS, deliver, intervals, never, part, rows_of
from marshal_dagster.sinks.delta.commit import APPLICATION, Commit
from marshal_dagster.sinks.delta.table import DeltaTable, alone_on_this_machine
from tests.conditions import WITHIN_S, wait_until
from tests.session_settings import WITHOUT_STATISTICS, session_settings
from tests.sink_conformance import shared
from tests.sink_kit import a_renamed_group_takes_over
from tests.sink_outputs import DELTA_STEPS, TYPES
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ON_A_TABLE = (
    "duplicate",
    "subset_replayed_by_others",
    "ranges_without_rows",
    "inside_an_older_range",
    "rows_without_offsets",
)


class DeltaTarget(Target):
    """A separate table."""

    def __init__(self, spark: "SparkSession", path: Path) -> None:
        self.spark = spark
        self.path = path

    def sink(self) -> DeltaSink:
        """Return a sink, as another process opens it."""
        return DeltaSink(str(self.path), session=self._session)

    def shared_sink(self) -> DeltaSink:
        """Return a sink for several groups, as another process opens it."""
        return shared(self.sink())  # type: ignore[no-any-return]

    def rows(self) -> list[tuple[int, int | None, str]]:
        """Read the files that the table's log names. `test_kill_points_sinks` reads tables with Spark."""
        from pyarrow.parquet import ParquetFile

        files: dict[str, dict[str, str]] = {}
        for commit in sorted(self.path.glob("_delta_log/*.json")):
            for action in map(json.loads, commit.read_text().splitlines()):
                if "add" in action:
                    assert not action["add"].get("deletionVector")
                    files[action["add"]["path"]] = action["add"]["partitionValues"]
                elif "remove" in action:
                    del files[action["remove"]["path"]]
        return [
            (row["partition"], row.get("offset"), (values | row)["value"])
            for name, values in files.items()
            for row in ParquetFile(self.path / unquote(name)).read().to_pylist()
        ]

    def frame(self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = COLUMNS) -> DataFrame:
        """Return a frame of these rows in two Spark partitions."""
        return local_frame(
            self._session(), rows, StructType([StructField(name, TYPES[name]) for name in columns])
        ).coalesce(2)

    def _session(self) -> "SparkSession":
        assert self.spark is not None
        return self.spark


@pytest.fixture
def target_with_statistics(spark: "SparkSession", tmp_path: Path) -> DeltaTarget:
    """A table that does not exist yet, in whose files Delta leaves out what a query does not need."""
    return DeltaTarget(spark, tmp_path / "a `table`'s folder")


@pytest.fixture
def target(spark: "SparkSession", target_with_statistics: DeltaTarget) -> Iterator[DeltaTarget]:
    """A table that does not exist yet."""
    with session_settings(spark, WITHOUT_STATISTICS):
        yield target_with_statistics


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in ON_A_TABLE], ids=str)
def test_the_sink_conforms(case: Case, target: DeltaTarget) -> None:
    """The sink passes those cases of the kit that involve Spark and Delta."""
    case.check(target)


def test_a_renamed_group_takes_over(target: DeltaTarget) -> None:
    """The takeover is tested with the commits and rows of a real table."""
    a_renamed_group_takes_over(target)


def slow_append(target: DeltaTarget, commit: Commit, marks: tuple[Path, Path], value: str) -> None:
    """Commit as the sink does. Create the first file when Delta writes the rows, and then wait for the second file."""
    begun, may_continue = map(str, marks)

    def pause(value: str) -> str:
        Path(begun).touch()
        while not Path(may_continue).exists():
            time.sleep(0.05)
        return value

    slow = target.frame([(0, 0, value)]).withColumn("value", f.udf(pause, "string", useArrow=False)("value"))
    options = {"userMetadata": commit.to_metadata(), "txnAppId": APPLICATION, "txnVersion": str(commit.number)}
    slow.write.format("delta").mode("append").options(**options).save(str(target.path))


def test_delta_lets_no_two_commits_of_a_number_overlap(spark: "SparkSession", tmp_path: Path) -> None:
    """Of two overlapping appends with the same number, only one is in the table. The sink depends on this.

    Both of two plain appends would be in the table.
    """
    table, begun, may_continue = tmp_path / "table", tmp_path / "begun", tmp_path / "may continue"
    target = DeltaTarget(spark, table)
    target.frame([(0, 9, "old")]).write.format("delta").save(str(table))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow_append, target, Commit(1, "slow"), (begun, may_continue), "slow")
        wait_until(lambda: begun.exists() or first.done(), "the first writer writes its rows")
        assert begun.exists(), first.exception()
        try:
            fast = target.frame([(0, 0, "fast")])
            fast.write.format("delta").mode("append").options(txnAppId=APPLICATION, txnVersion="1").save(str(table))
        finally:
            may_continue.touch()
        with pytest.raises(Exception, match="DELTA_CONCURRENT_TRANSACTION"):
            first.result(WITHIN_S)
    assert target.found() == [(0, 0, "fast"), (0, 9, "old")]


class CrashError(BaseException):
    """The end of a process."""


def test_dying_at_each_step(target: DeltaTarget) -> None:
    """A new generation and another partition's first batch are one commit, which the next process repeats.

    Each process that dies repeats the batch of the one before it. In the end each row exists once.
    """
    deliver(target, "old", part(20, 0, 1), part(0, 0, 4))
    done, batch = part(20, 0, 1), [part(0, 1, 3, generation=20, epoch=21), part(10, 0, 2)]
    before, read = target.found(), rows_of("new", *batch)
    after = sorted(rows_of("old", done, part(0, 0, 1), part(0, 3, 4)) + read)
    for step in DELTA_STEPS:
        sink = target.sink()

        def reached(at: str, step: str = step) -> None:
            if at == step:
                raise CrashError

        sink._reached = reached  # type: ignore[method-assign,assignment]
        with pytest.raises(CrashError):
            sink.write(target.frame(read), batch, lambda: intervals(read))
        assert target.found() == (after if step == "committed" else before), step
    assert set(deliver(target, "again", *batch, done).skipped) == {*batch, done}
    assert target.found() == after


def test_a_writer_that_was_overtaken_adds_nothing(target_with_statistics: DeltaTarget) -> None:
    """A writer that stalls before its commit is checked against the table's state at the commit.

    This includes writers that replace rows of an older generation.
    """
    target = target_with_statistics
    deliver(target, "old", part(0, 0, 6))
    late = part(0, 2, 4, generation=20, epoch=21)
    sink = target.sink()
    stalled: list[str] = []

    def reached(step: str) -> None:
        if step == "judged" and not stalled:
            stalled.append(step)
            deliver(target, "new", part(0, 2, 4, generation=20, epoch=22))

    sink._reached = reached  # type: ignore[method-assign]
    read = rows_of("late", late)
    with pytest.raises(SinkRejectedError, match="fencing token 21 is lower than 22"):
        sink.write(target.frame(read), [late], lambda: intervals(read))
    assert target.found() == sorted(rows_of("old", part(0, 0, 2), part(0, 4, 6)) + rows_of("new", late))


def test_an_append_that_was_overtaken_is_judged_again(target: DeltaTarget) -> None:
    """Delta rejects its commit because of the number, though both only add rows. Otherwise a position would be lost."""
    deliver(target, "a", part(0, 0, 3))
    sink = target.sink()
    steps: list[str] = []

    def reached(step: str) -> None:
        steps.append(step)
        if steps.count("judged") == 1 and step == "judged":
            deliver(target, "b", part(1, 0, 2))

    sink._reached = reached  # type: ignore[method-assign]
    mine = part(2, 0, 2)
    assert sink.write(target.frame(rows_of("c", mine)), [mine], never).taken == (mine,)
    assert steps == ["evaluated", "judged", "evaluated", "judged", "committed"]
    assert target.found() == rows_of("a", part(0, 0, 3)) + rows_of("b", part(1, 0, 2)) + rows_of("c", mine)
    assert [stored.end for stored in target.sink().describe().generations] == [3, 2, 2]


def test_a_new_generation_over_gaps(target_with_statistics: DeltaTarget) -> None:
    """Rows at offsets that were not read again remain. Gaps without rows are skipped."""
    target = target_with_statistics
    deliver(target, "old", part(0, 0, 6))
    target.sink().write(target.frame([(0, 10, "old"), (0, 20, "old")]), [part(0, 6, 30)], never)
    read = [(0, offset, "new") for offset in (1, 3, 10, 15, 20)]
    over, beside = part(0, 0, 30, generation=20, epoch=21), part(1, 0, 1)
    target.sink().write(target.frame([*read, (1, 0, "new")]), [over, beside], lambda: intervals(read))
    kept = [(0, offset, "old") for offset in (0, 2, 4, 5)]
    assert target.found() == sorted([*kept, *read, (1, 0, "new")])


def test_a_table_whose_log_was_cleaned_is_refused(target: DeltaTarget) -> None:
    """If a checkpoint has commits of the sink that the history no longer shows, nothing is written."""
    spark, table = target._session(), f"delta.`{str(target.path).replace('`', '``')}`"
    with session_settings(spark, {"spark.databricks.delta.properties.defaults.checkpointInterval": "1"}):
        deliver(target, "a", part(0, 0, 3))
        target.frame([(9, 9, "of another writer")]).write.format("delta").mode("append").save(str(target.path))
    (target.path / "_delta_log" / f"{0:0>20}.json").unlink()
    with pytest.raises(SinkRejectedError, match="its history no longer shows"):
        target.sink().write(target.frame(rows_of("b", part(0, 0, 3))), [part(0, 0, 3)], never)
    left = spark.sql(f"SELECT offset FROM {table} ORDER BY offset")  # noqa: S608 - the test's own table
    assert [row.offset for row in left.collect()] == [0, 1, 2, 9]


def test_two_processes_do_not_commit_to_a_local_table_at_once(target: DeltaTarget) -> None:
    """Without the lock, Delta's commit to a local file system could overwrite another process's commit."""
    wanted = part(0, 0, 3)
    with ThreadPoolExecutor(1) as pool:
        with alone_on_this_machine(f"file://{target.path}"):
            writing = pool.submit(deliver, target, "a", wanted)
            with pytest.raises(TimeoutError):
                writing.result(3)
            assert target.found() == []
        assert writing.result(WITHIN_S).taken == (wanted,)
    assert target.found() == rows_of("a", wanted)


def test_a_table_that_forgets_numbers_is_refused(target: DeltaTarget) -> None:
    """Otherwise Delta accepts a late commit with a number that is already used, once the retention has passed."""
    deliver(target, "a", part(0, 0, 3))
    table = f"delta.`{str(target.path).replace('`', '``')}`"
    name = "delta.setTransactionRetentionDuration"
    target._session().sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('{name}' = 'interval 1 days')")
    with pytest.raises(SinkRejectedError, match="UNSET TBLPROPERTIES"):
        target.sink().verdicts([part(0, 3, 6)])
    target._session().sql(f"ALTER TABLE {table} UNSET TBLPROPERTIES ('{name}')")
    assert deliver(target, "b", part(0, 3, 6)).taken


@pytest.mark.parametrize("lost", ["", "__HIVE_DEFAULT_PARTITION__"])
def test_a_string_that_a_partitioned_table_loses_is_refused(target: DeltaTarget, lost: str) -> None:
    """Delta stores these strings as null in a column by which the table is partitioned, and others by characters."""
    empty = target.frame([(0, 0, "a")]).limit(0)
    empty.write.format("delta").partitionBy("value").save(str(target.path))
    sink = DeltaSink(str(target.path), session=target._session, options={"mergeSchema": "true"})
    with pytest.raises(SinkRejectedError, match=r"partition 0, offset 1, column 'value': the table is partitioned by"):
        deliver(target, "a", part(0, 0, 3), rows=[(0, 0, "a"), (0, 1, lost), (0, 2, "c")], sink=sink)
    assert target.found() == []
    frame = target.frame(rows_of("a", part(0, 0, 3))).withColumn(
        "value", f.expr("if(offset = 2, string(X'4DFC'), 'a')")
    )
    with pytest.raises(SinkRejectedError, match=r"offset 2, column 'value': .* replace its bytes that are not UTF-8"):
        sink.write(frame, [part(0, 0, 3)], never)
    assert deliver(target, "b", part(0, 0, 3), sink=sink).taken
    assert target.found() == rows_of("b", part(0, 0, 3))


@pytest.mark.parametrize("value", ["X'FF'", "timestamp_micros(0)"])
def test_partitions_whose_values_delta_changes_are_refused(target: DeltaTarget, value: str) -> None:
    """Delta stores bytes as characters, and an instant as the local time of the session, read as that of the JVM."""
    frame = target.frame([(0, 0, "a")]).withColumn("by", f.expr(value))
    frame.limit(0).write.format("delta").partitionBy("by").save(str(target.path))
    with pytest.raises(ConfigurationError, match=r"partitioned by column 'by' of type (binary|timestamp)"):
        target.sink().write(frame, [part(0, 0, 1)], never)


def test_names_that_sql_reads_otherwise(target: DeltaTarget) -> None:
    """A group with quotes is found under both ways that Spark reads literals, and a column name may have a dot."""
    spark, group = target._session(), "o'h\\x"
    with session_settings(spark, {"spark.sql.parser.escapedStringLiterals": "true"}):
        for value, generation in (("old", 0), ("new", 20)):
            wanted = part(0, 0, 2, group=group, generation=generation, epoch=generation + 1)
            frame = target.frame([(0, 0, value), (0, 1, value)]).withColumn("a.b", f.lit(1))
            target.sink().write(frame, [wanted], lambda: {0: [(0, 2)]})
    assert target.found() == [(0, 0, "new"), (0, 1, "new")]


@pytest.mark.parametrize("settings", [{}, WITHOUT_STATISTICS], ids=["statistics", "read"])
def test_rows_are_written_without_a_cache(
    target_with_statistics: DeltaTarget, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]
) -> None:
    """Files are written first, and are deleted if they are not committed. Rows are counted by Delta or by reading."""
    target = target_with_statistics
    deliver(target, "a", part(0, 0, 3), part(1, 0, 2))
    evaluated = DeltaTable.evaluated
    monkeypatch.delattr(DeltaTable, "evaluated")
    batch = [part(0, 3, 6), part(1, 2, 4), part(2, 0, 0)]
    with session_settings(target._session(), settings):
        assert deliver(target, "b", *batch).rows == {0: 3, 1: 2, 2: 0}
        files = set(target.path.glob("*.parquet"))
        following, later = part(0, 6, 8), rows_of("c", part(0, 6, 8))

        def lost() -> None:
            assert set(target.path.glob("*.parquet")) > files
            raise ConnectionError

        with pytest.raises(ConnectionError):
            target.sink().write(target.frame(later), [following], never, lost)
        monkeypatch.setattr(DeltaTable, "evaluated", evaluated, raising=False)
        with pytest.raises(SinkRejectedError, match="rows of partition 7"):
            target.sink().write(target.frame([*later, (7, 0, "c")]), [following], never)
    assert set(target.path.glob("*.parquet")) == files
    assert target.found() == sorted(rows_of("a", part(0, 0, 3), part(1, 0, 2)) + rows_of("b", *batch))


def test_a_table_that_the_session_has_cached(target: DeltaTarget) -> None:
    """Later reads of the session see the batch, as after a commit by Spark's own writer."""
    deliver(target, "a", part(0, 0, 3))
    table = target._session().read.format("delta").load(str(target.path))
    table.cache()
    try:
        assert table.count() == 3
        deliver(target, "b", part(0, 3, 6))
        assert target._session().read.format("delta").load(str(target.path)).count() == 6
    finally:
        table.unpersist()


class NamedTable(DeltaTarget):
    """A table that is given by its name."""

    def __init__(self, spark: "SparkSession", name: str) -> None:
        super().__init__(spark, Path("unused"))
        self.name = name

    def sink(self) -> DeltaSink:
        """Return a sink, as another process opens it."""
        return DeltaSink(table=self.name, session=self._session)

    def rows(self) -> list[tuple[int, int | None, str]]:
        """Read the table with plain Spark."""
        return [tuple(row) for row in self._session().table(self.name).select(*COLUMNS).collect()]


@pytest.fixture
def named(spark: "SparkSession") -> Iterator[NamedTable]:
    """A table that does not exist yet, in a schema of its own."""
    schema = f"named_{secrets.token_hex(4)}"
    spark.sql(f"CREATE SCHEMA {schema}")
    with session_settings(spark, WITHOUT_STATISTICS):
        yield NamedTable(spark, f"{schema}.Results")
    spark.sql(f"DROP SCHEMA {schema} CASCADE")


def test_a_managed_table_by_name(named: NamedTable) -> None:
    """It is created by the first batch, under each spelling of its name, and replaces rows of an older generation."""
    deliver(named, "old", part(0, 0, 4), part(1, 0, 2))
    other = NamedTable(named._session(), f"spark_catalog.`{named.name.replace('.', '`.`').upper()}`")
    assert deliver(other, "again", part(0, 0, 4, epoch=20)).skipped
    deliver(other, "new", part(0, 1, 3, generation=20, epoch=21))
    assert named.found() == sorted(
        rows_of("old", part(0, 0, 1), part(0, 3, 4), part(1, 0, 2)) + rows_of("new", part(0, 1, 3))
    )
    detail = named._session().sql(f"DESCRIBE EXTENDED {named.name}").collect()
    assert {row.data_type for row in detail if row.col_name == "Type"} == {"MANAGED"}


def test_an_external_table_by_name_and_by_path(named: NamedTable, target: DeltaTarget) -> None:
    """Both are the same output, as they are the same table."""
    deliver(target, "a", part(0, 0, 3))
    location = str(target.path).replace("'", "\\'")
    named._session().sql(f"CREATE TABLE {named.name} USING delta LOCATION '{location}'")
    assert deliver(named, "b", part(0, 0, 3)).skipped
    deliver(named, "b", part(0, 3, 6))
    assert target.found() == named.found() == rows_of("a", part(0, 0, 3)) + rows_of("b", part(0, 3, 6))


def test_a_name_of_another_folder(named: NamedTable, target: DeltaTarget, tmp_path: Path) -> None:
    """A batch whose table's name moves to another folder before the commit is written to that folder."""
    spark, other = named._session(), DeltaTarget(named._session(), tmp_path / "other")
    deliver(target, "a", part(0, 0, 3))
    shutil.copytree(target.path, other.path)
    location = str(target.path).replace("'", "\\'")
    spark.sql(f"CREATE TABLE {named.name} USING delta LOCATION '{location}'")
    following = part(0, 3, 6)

    def moved() -> None:
        spark.sql(f"DROP TABLE IF EXISTS {named.name}")
        spark.sql(f"CREATE TABLE {named.name} USING delta LOCATION '{other.path}'")

    assert named.sink().write(named.frame(rows_of("b", following)), [following], never, moved).taken
    assert target.found() == rows_of("a", part(0, 0, 3))
    assert named.found() == other.found() == rows_of("a", part(0, 0, 3)) + rows_of("b", following)


def test_a_table_that_is_dropped_and_created_again(named: NamedTable) -> None:
    """It is a new output, unless a commit for the former table reached it. A replaced table is refused."""
    spark, sink = named._session(), named.sink()
    deliver(named, "a", part(0, 0, 3), part(1, 0, 9))
    deliver(named, "a", part(0, 3, 6))
    spark.sql(f"DROP TABLE {named.name}")
    assert deliver(named, "b", part(0, 6, 9)).taken
    deliver(named, "b", part(0, 9, 12))
    assert named.found() == rows_of("b", part(0, 6, 12))
    spark.sql(f"CREATE OR REPLACE TABLE {named.name} (partition INT) USING delta")
    with pytest.raises(SinkRejectedError, match="dropped and re-created"):
        sink.verdicts([part(0, 12, 15)])


def test_names_that_are_no_delta_table(named: NamedTable) -> None:
    """The error names what is there, or what is missing."""
    spark = named._session()
    schema = named.name.partition(".")[0]
    spark.sql(f"CREATE VIEW {schema}.view AS SELECT 1 AS partition")
    spark.sql(f"CREATE TABLE {schema}.parquet_table (partition INT) USING parquet")
    for name, match in {
        f"{schema}.view": "is a view",
        f"{schema}.parquet_table": "of the format parquet",
        "missing_schema.orders": "neither does the schema",
        "missing_catalog.shop.orders": "cannot be read",
    }.items():
        with pytest.raises(ConfigurationError, match=match):
            DeltaSink(table=name, session=named._session).verdicts([part(0, 0, 3)])
    session = spark.newSession()
    session.conf.unset("spark.sql.catalog.spark_catalog")
    with pytest.raises(ConfigurationError, match=r"without spark.sql.catalog.spark_catalog"):
        DeltaSink(table=named.name, session=lambda: session).verdicts([part(0, 0, 3)])


def test_a_check_of_a_table(target: DeltaTarget) -> None:
    """A check finds rows that do not fit the positions, and messages that were written twice."""
    assert target.sink().check() == []
    deliver(target, "a", part(0, 0, 4), part(1, 0, 2))
    deliver(target, "b", part(0, 2, 4, generation=20, epoch=21))
    sink, table = target.sink(), target.sink()._table()
    assert [(stored.partition, stored.end) for stored in sink.describe().generations] == [(0, 4), (1, 2)]
    assert sink.check() == []
    rows = table.frame().where("partition = 1")
    again = rows.withColumn("marshal", f.col("marshal").withField("attempt", f.lit("another")))
    outside = rows.where("offset = 1").withColumn("offset", f.lit(7).cast("long"))
    beyond = rows.where("offset = 0").withColumn("marshal", f.col("marshal").withField("end", f.lit(9).cast("long")))
    unknown = rows.withColumn("partition", f.lit(5))
    foreign = rows.withColumn("marshal", f.lit(None).cast(rows.schema["marshal"].dataType))
    written = reduce(DataFrame.unionByName, (again, outside, beyond, unknown, foreign))
    written.write.format("delta").mode("append").save(str(target.path))
    assert sink.check() == [
        "group 'g', t/1, generation 0: rows of offsets outside of their range: 1",
        "group 'g', t/1, generation 0: rows of ranges up to 9, but the stored position is 2",
        "group 'g', t/5, generation 0: 2 rows, but the sink's newest commit has no position of this partition",
        "group 'g', t/1: messages whose rows were written twice: 2, the first one at offset 0",
    ]
