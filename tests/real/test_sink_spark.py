"""The file sink and the Postgres sink with real frames, in one warm Spark session."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
import pytest
from psycopg import sql
from pyspark.sql.types import StructField, StructType

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks import FileSink, PostgresSink
from marshal_dagster.sinks.database import frame_lines
from marshal_dagster.sinks.files.writer import some_files_at_once
from marshal_dagster.spark.reader import offsets_read
from tests.conditions import WITHIN_S
from tests.sink_conformance import (
    AnyOrderConformance,
    CrashConformance,
    Output,
    ReplacingConformance,
    Row,
    SinkConformance,
    never,
    part,
)
from tests.sink_outputs import DATABASE_STEPS, FILE_STEPS, TABLE, TYPES, PostgresOutput, hook, own_schema
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class SparkOutput(Output):
    """An output for Spark frames."""

    def __init__(self, spark: "SparkSession") -> None:
        self.spark = spark

    def frame(
        self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = ("partition", "offset", "value")
    ) -> "DataFrame":
        """Return a frame of these rows in two Spark partitions."""
        return local_frame(self.spark, rows, StructType([StructField(name, TYPES[name]) for name in columns])).coalesce(
            2
        )

    def poison(self) -> "DataFrame":
        """Return a frame that fails when a row is computed."""
        return self.frame([(0, 0, "x")]).selectExpr("partition", "offset", "string(raise_error('evaluated')) AS value")


class SparkFileOutput(SparkOutput):
    """A folder of Parquet files."""

    steps: ClassVar[Sequence[str]] = FILE_STEPS
    racing_step: ClassVar[str] = "judged"

    def __init__(self, spark: "SparkSession", path: Path) -> None:
        super().__init__(spark)
        self.path = path

    def sink(self, reached: Callable[[str], None] | None = None) -> FileSink:
        """Return a sink, as another process opens it."""
        sink = FileSink(self.path)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Read the output with the sink's own reader."""
        if not (self.path / "_marshal" / "commits").exists():
            return []
        frame = self.sink().read(self.spark)
        offset = "coalesce(offset, -1L)" if "offset" in frame.columns else "-1L"
        return sorted(tuple(row) for row in frame.selectExpr("partition", offset, "value").collect())

    def sweep(self) -> None:
        """Sweep as another process would."""
        self.sink().sweep()


class SparkPostgresOutput(SparkOutput):
    """A table."""

    steps: ClassVar[Sequence[str]] = DATABASE_STEPS
    racing_step: ClassVar[str] = "copied"

    def __init__(self, spark: "SparkSession", dsn: str) -> None:
        super().__init__(spark)
        self._output = PostgresOutput(dsn, own_schema())

    def sink(self, reached: Callable[[str], None] | None = None) -> PostgresSink:
        """Return a sink, as another process opens it."""
        sink = PostgresSink(self._output.dsn, TABLE, schema=self._output.schema)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        return self._output.rows()

    def sweep(self) -> None:
        """Do nothing: this sink leaves no files."""


@pytest.fixture(params=["files", "postgres"])
def output(request: pytest.FixtureRequest, spark: "SparkSession", tmp_path: Path, postgres: str) -> Output:
    """An empty output."""
    if request.param == "files":
        return SparkFileOutput(spark, tmp_path / "output")
    return SparkPostgresOutput(spark, postgres)


class TestRules:
    """The rules that involve Spark. All other rules are tested without Spark, on the same sinks."""

    test_first = SinkConformance.test_the_first_batch_is_taken_whole
    test_duplicate = SinkConformance.test_a_duplicate_is_skipped_unevaluated
    test_partly = SinkConformance.test_of_a_partly_taken_batch_the_rest_is_taken
    test_empty = SinkConformance.test_ranges_without_rows_are_taken
    test_foreign = SinkConformance.test_rows_need_a_partition_of_the_batch
    test_gone = ReplacingConformance.test_offsets_that_are_no_longer_there_keep_their_rows
    test_compacted = ReplacingConformance.test_an_offset_compacted_while_its_row_is_written_is_replaced
    test_beyond = ReplacingConformance.test_rows_at_offsets_beyond_their_range_replace_nothing_there
    test_requested = ReplacingConformance.test_the_batch_is_requested_after_kafka_was_read_for_the_last_time
    test_generations = ReplacingConformance.test_generation_upon_generation
    test_without_offsets = ReplacingConformance.test_rows_without_offsets_cannot_be_replaced
    test_overtaken = CrashConformance.test_a_writer_that_was_overtaken_adds_nothing
    test_overlap = CrashConformance.test_writers_whose_ranges_overlap_in_part
    race = staticmethod(CrashConformance.race)
    test_any_order = AnyOrderConformance.test_lost_and_compacted_offsets_keep_their_rows


EVERY_TYPE = (
    "CAST(id % 2 AS int) AS partition",
    "id AS offset",
    "CAST(id AS byte) AS a_byte",
    "CAST(-id AS short) AS a_short",
    "CAST(id * 1000 AS int) AS an_int",
    "shiftleft(id, 40) AS a_long",
    "CAST(id / 3 AS float) AS a_float",
    "CASE id WHEN 0 THEN double('NaN') WHEN 1 THEN double('-Infinity') ELSE id / 7 END AS a_double",
    "CAST(id / 7 AS decimal(20, 9)) AS a_decimal",
    "id % 2 = 0 AS a_boolean",
    # Empty text, all characters that COPY escapes, COPY's null and end markers, and text beyond ASCII.
    r"""element_at(array('', 'tab\tnew\nline\rback\\slash', '\\N', '\\.', 'naïve 😀', '"quoted"'), int(id) + 1)
    AS a_string""",
    "unhex(concat('00', lpad(hex(id), 2, '0'), 'FF5C0A')) AS a_binary",
    "DATE '1969-12-30' + CAST(id AS int) AS a_date",
    "timestamp_micros(id * 123456789012345 - 1000000) AS a_timestamp",
    "TIMESTAMP_NTZ '2024-03-31 02:30:00.000001' AS a_local_time",
    "array(id, NULL) AS an_array",
    "map('k', CAST(id AS string), 'none', NULL) AS a_map",
    r"named_struct('n', id, 's', 'x\ty', 'nothing', CAST(NULL AS string)) AS a_struct",
)
NUMBERS = ("a_byte", "a_short", "an_int", "a_long", "a_float", "a_double", "a_decimal")
TEXTS = ("a_boolean", "a_date", "a_local_time")
BATCH = [part(0, 0, 7), part(1, 0, 6)]


def every_type(spark: "SparkSession") -> "DataFrame":
    """Return six rows of every type, with values that text formats can confuse, and one row of nulls."""
    rows = spark.range(6).selectExpr(*EVERY_TYPE)
    nulls = [f"CAST(NULL AS {kind}) AS {name}" for name, kind in rows.dtypes[2:]]
    return rows.union(spark.range(1).selectExpr("0 AS partition", "6L AS offset", *nulls))


def numbers(row: Iterable[Any]) -> list[float | str | None]:
    """Return a row's numbers, rounded; NaN as text, because NaN is not equal to itself."""
    return [
        None if each is None else str(each) if float(each) != float(each) else round(float(each), 5) for each in row
    ]


def postgres_sink(dsn: str, columns: str | None) -> PostgresSink:
    """Return a sink on a separate table with these columns."""
    schema = own_schema()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    sink = PostgresSink(dsn, TABLE, schema=schema)
    if columns is not None:
        schema_of_rows = StructType.fromDDL(columns)
        assert isinstance(schema_of_rows, StructType)
        sink.create_tables(schema_of_rows)
    return sink


def query(sink: PostgresSink, dsn: str, what: str) -> list[tuple[Any, ...]]:
    """Query the sink's table."""
    with psycopg.connect(dsn) as connection:
        statement = f'SELECT {what} FROM "{sink.schema}"."{sink.table}"'  # noqa: S608 - the text is constant
        return connection.execute(statement.encode()).fetchall()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("format_name", ["parquet", "orc"])
def test_files_keep_every_value(spark: "SparkSession", tmp_path: Path, format_name: str) -> None:
    """Values of every type are read back as written, and rows are counted for Parquet."""
    frame = every_type(spark)
    if format_name == "orc":
        frame = frame.drop("a_timestamp")  # refused
    sink = FileSink(tmp_path, format=format_name)
    outcome = sink.write(frame, BATCH, never)
    assert outcome.rows == ({0: 4, 1: 3} if format_name == "parquet" else {})
    back = sink.read(spark)
    assert back.dtypes == frame.dtypes
    as_text = [f"hex({name})" if name == "a_binary" else f"CAST({name} AS string) AS {name}" for name in frame.columns]
    expected = sorted(map(str, frame.selectExpr(*as_text).collect()))
    assert sorted(map(str, back.selectExpr(*as_text).collect())) == expected


@pytest.mark.parametrize("format_name", ["json", "csv"])
def test_text_formats_with_options(spark: "SparkSession", tmp_path: Path, format_name: str) -> None:
    """The options apply to the writer and the reader."""
    sink = FileSink(tmp_path, format=format_name, options={"compression": "gzip", "header": "true"})
    frame = spark.createDataFrame([(0, 1, "a,b"), (0, 2, None)], "partition int, offset long, value string")
    assert sink.write(frame, [part(0, 0, 3)], never).taken
    assert all(path.suffix == ".gz" for path in sink.committed_files())
    assert sorted(map(tuple, sink.read(spark).collect()), key=str) == [(0, 1, "a,b"), (0, 2, None)]


def test_a_row_without_offset_is_known_of(spark: "SparkSession", tmp_path: Path) -> None:
    """Such rows are recorded separately for each range, and all rows are counted and read."""
    sink = FileSink(tmp_path)
    rows = [(0, 0, "a"), (0, None, "sum"), (1, 0, "b")]
    frame = spark.createDataFrame(rows, "partition int, offset long, value string")
    assert sink.write(frame, [part(0, 0, 2), part(1, 0, 2)], never).rows == {0: 2, 1: 1}
    assert sorted(map(tuple, sink.read(spark).collect()), key=str) == sorted(rows, key=str)
    newer = [part(number, 0, 2, generation=20, epoch=21) for number in (0, 1)]
    assert "generation 0" in str(sink.can_replace(newer[:1]))
    assert sink.can_replace(newer[1:]) is None


@pytest.mark.parametrize("name", ["a b%20c#d", "größe [1] {x,y} *?", "back\\slash $HOME"])
def test_whatever_the_folders_name(spark: "SparkSession", tmp_path: Path, name: str) -> None:
    """Spark writes to and reads from exactly this folder, although the name has special characters for Spark."""
    sink = FileSink(tmp_path / name)
    frame = spark.createDataFrame([(0, 0, "old"), (0, 1, "old")], "partition int, offset long, value string")
    assert sink.write(frame, [part(0, 0, 2)], never).rows == {0: 2}
    newer = part(0, 1, 2, generation=20, epoch=21)
    assert sink.write(frame.where("offset = 1").replace("old", "new"), [newer], lambda: {0: [(1, 2)]}).taken
    assert sorted(map(tuple, sink.read(spark).collect())) == [(0, 0, "old"), (0, 1, "new")]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_columns_may_come_and_go(spark: "SparkSession", tmp_path: Path) -> None:
    """A column that only some batches have is null in the others. If its type changes, the error names the column."""
    sink = FileSink(tmp_path)
    for number, columns in enumerate(("'a' AS old", "1 AS new", "'b' AS old, 2 AS new")):
        frame = spark.range(1).selectExpr("0 AS partition", f"{number}L AS offset", *columns.split(", "))
        sink.write(frame, [part(0, number, number + 1)], never)
    found = sink.read(spark).select("offset", "old", "new").orderBy("offset").collect()
    assert [tuple(row) for row in found] == [(0, "a", None), (1, None, 1), (2, "b", 2)]
    sink.write(spark.range(1).selectExpr("0 AS partition", "3.5 AS old"), [part(0, 3, 4)], never)
    with pytest.raises(ConfigurationError, match="column 'old': its type changed from string to decimal"):
        sink.read(spark)


def test_an_output_without_commits_has_no_columns(spark: "SparkSession", tmp_path: Path) -> None:
    """Reading before the first batch is a clear one-line error. After a batch without rows the frame is empty."""
    sink = FileSink(tmp_path)
    with pytest.raises(ConfigurationError, match="holds no commit yet"):
        sink.read(spark)
    sink.write(spark.createDataFrame([], "partition int, n long"), [part(0, 0, 3)], never)
    assert sink.read(spark).dtypes == [("partition", "int"), ("n", "bigint")]
    assert sink.read(spark).count() == 0


def test_a_frame_is_evaluated_once(spark: "SparkSession", tmp_path: Path, postgres: str) -> None:
    """Each sink computes a frame once, whatever the number of tasks and partitions."""
    calls = spark.sparkContext.accumulator(0)

    def counted(rows: Iterable[Any]) -> Iterable[Any]:
        for row in rows:
            calls.add(1)
            yield row

    columns = ("CAST(id % 3 AS int) AS partition", "id AS offset", "id % 7 AS k")
    source = spark.range(100, numPartitions=4).selectExpr(*columns)
    ranges = [part(number, 0, 100) for number in range(3)]
    for sink in (FileSink(tmp_path), postgres_sink(postgres, "partition int, k long, n long")):
        before = calls.value
        rows = spark.createDataFrame(source.rdd.mapPartitions(counted), source.schema)
        outcome = sink.write(rows.groupBy("partition", "k").count().withColumnRenamed("count", "n"), ranges, never)
        assert outcome.rows == {0: 7, 1: 7, 2: 7}
        assert calls.value - before == 100


def test_a_new_generation_over_what_spark_read(spark: "SparkSession", tmp_path: Path, postgres: str) -> None:
    """The sink replaces the intervals that Spark found in the frame that was read."""
    old = spark.range(20).selectExpr("0 AS partition", "id AS offset", "'old' AS value")
    new = spark.range(5, 15).where("id NOT IN (7, 9)").selectExpr("0 AS partition", "id AS offset", "'new' AS value")
    files, table = FileSink(tmp_path), postgres_sink(postgres, "partition int, offset long, value string")
    for sink in (files, table):
        sink.write(old, [part(0, 0, 20)], never)
        newer = part(0, 5, 15, generation=30, epoch=31)
        assert sink.write(new.where("offset % 2 = 0"), [newer], lambda: offsets_read(new)).taken == (newer,)
    kept = [0, 1, 2, 3, 4, 7, 9, 15, 16, 17, 18, 19]
    expected = dict.fromkeys(kept, "old") | dict.fromkeys((6, 8, 10, 12, 14), "new")
    assert {row["offset"]: row["value"] for row in files.read(spark).collect()} == expected
    assert dict(query(table, postgres, "kafka_offset, value")) == expected


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (("'0' AS partition", "1L AS offset"), "column 'partition' has type string"),
        (("0 AS partition", "'1' AS offset"), "column 'offset' has type string"),
        (("0 AS partition", "1 AS marshal_range"), "marshal_range are the sink's own"),
        (("1 AS offset",), "no column 'partition'"),
    ],
)
def test_columns_that_cannot_be(
    spark: "SparkSession", tmp_path: Path, postgres: str, columns: Sequence[str], why: str
) -> None:
    """Both sinks name the wrong column before anything is computed."""
    frame = spark.range(1).selectExpr(*columns)
    for sink in (FileSink(tmp_path), postgres_sink(postgres, "partition int")):
        with pytest.raises(ConfigurationError, match=why):
            sink.write(frame, [part(0, 0, 3)], never)


@pytest.mark.usefixtures("compiled")
def test_a_table_keeps_every_value(spark: "SparkSession", postgres: str) -> None:
    """The table has exactly the values that were written, in any session time zone."""
    frame = every_type(spark)
    sink = postgres_sink(postgres, None)
    sink.create_tables(frame.schema)
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    spark.conf.set("spark.sql.session.timeZone", "America/St_Johns")
    try:
        assert sink.write(frame, BATCH, never).rows == {0: 4, 1: 3}
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    theirs = frame.selectExpr(
        "offset",
        "a_string",
        "lower(hex(a_binary))",
        "unix_micros(a_timestamp)",
        *(f"CAST({name} AS string)" for name in (*TEXTS, *NUMBERS)),
    )
    ours = query(
        sink,
        postgres,
        "kafka_offset, a_string, encode(a_binary, 'hex'), (extract(epoch FROM a_timestamp) * 1000000)::bigint, "
        + ", ".join(f"{name}::text" for name in (*TEXTS, *NUMBERS)),
    )
    found, expected = ({row[0]: (row[1:7], numbers(row[7:])) for row in rows} for rows in (ours, theirs.collect()))
    assert found == expected
    nested = {row[0]: row[1:] for row in query(sink, postgres, "kafka_offset, an_array, a_map, a_struct")}
    assert nested[2] == ([2, None], {"k": "2", "none": None}, {"n": 2, "s": "x\ty", "nothing": None})
    assert nested[6] == (None, None, None)
    assert {found[number][0][0] for number in (1, 2, 3)} == {"tab\tnew\nline\rback\\slash", "\\N", "\\."}


def test_rows_come_in_pieces(spark: "SparkSession", postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result of many megabytes is transferred through this process in pieces, without loss."""
    monkeypatch.setattr(frame_lines, "_LARGE_BYTES", 50_000)
    monkeypatch.setattr(frame_lines, "_BYTES_AT_ONCE", 20_000)
    sink = postgres_sink(postgres, "partition int, offset long, value string")
    frame = spark.range(0, 5000, numPartitions=8).selectExpr(
        "CAST(id % 2 AS int) AS partition", "id AS offset", "repeat('x', 20) AS value"
    )
    assert sink.write(frame, [part(0, 0, 5000), part(1, 0, 5000)], never).rows == {0: 2500, 1: 2500}
    assert query(sink, postgres, "count(DISTINCT kafka_offset), sum(kafka_offset)") == [(5000, 12497500)]


def test_a_write_lets_go_of_what_spark_kept(spark: "SparkSession", postgres: str) -> None:
    """Whether a write is rejected or taken, none of its evaluated rows stay cached in the session."""

    def kept() -> set[int]:
        return set(spark.sparkContext._jsc.getPersistentRDDs())

    kept_before = kept()  # an interrupted write of another test leaves its own
    sink = postgres_sink(postgres, "partition int, offset long, value string")
    frame = spark.range(3).selectExpr("5 AS partition", "id AS offset", "'x' AS value")
    with pytest.raises(SinkRejectedError, match="which this batch did not read"):
        sink.write(frame, [part(0, 0, 3)], never)
    assert kept() <= kept_before
    assert sink.write(frame, [part(5, 0, 3)], never).taken
    assert kept() <= kept_before


SORTING = "spark.sql.maxConcurrentOutputFileWriters"


def test_rows_are_not_sorted_to_be_written(spark: "SparkSession", tmp_path: Path) -> None:
    """A task keeps a few files open at once. Afterwards, and after an error, the session's setting is restored.

    The test has a separate session, because interrupted writes of other tests do not restore the setting.
    """
    spark = spark.newSession()
    seen: list[str | None] = []

    class Looking(FileSink):
        def _write_rows(self, frame: Any, folder: str, done: Sequence[int]) -> None:  # noqa: ANN401 - a DataFrame
            with some_files_at_once(spark):
                seen.append(spark.conf.get(SORTING))
                super()._write_rows(frame, folder, done)
                seen.append(spark.conf.get(SORTING))

    frame = spark.range(100).selectExpr("CAST(id % 10 AS int) AS partition", "id AS offset")
    assert Looking(tmp_path).write(frame, [part(number, 0, 100) for number in range(10)], never).rows[9] == 10
    with pytest.raises(ZeroDivisionError), some_files_at_once(spark):
        seen.append(str(1 // int(spark.conf.get(SORTING) == "0")))
    assert seen == ["4", "4"]
    assert spark.conf.get(SORTING) == "0"
    spark.conf.set(SORTING, "2")
    try:
        with some_files_at_once(spark):
            assert spark.conf.get(SORTING) == "2"
        assert spark.conf.get(SORTING) == "2"
    finally:
        spark.conf.set(SORTING, "0")


ON_A_CLUSTER = """
import os
import sys
from pathlib import Path
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.session import spark_settings, start_session
from marshal_dagster.sinks import FileSink
from tests.sink_conformance import never, part

spark = start_session(spark_settings(app_name="cluster", extra={
    "spark.master": "local-cluster[1,1,600]", "spark.executor.memory": "600m",
    "spark.executor.extraJavaOptions": os.environ["SPARK_SUBMIT_OPTS"]}))
frame = spark.range(0, 100, numPartitions=2).selectExpr("CAST(id % 2 AS int) AS partition", "id AS offset")
ranges = [part(0, 0, 100), part(1, 0, 100)]
sink = FileSink(sys.argv[1])
print(sink.write(frame, ranges, never).rows, sink.read(spark).count())
try:
    FileSink("/proc/self/cwd/elsewhere").write(frame, ranges, never)
except ConfigurationError as error:
    print(error)
print(list(Path("elsewhere").rglob("*.*")))
spark.stop()
"""


def test_executors_that_see_another_folder_are_noticed(tmp_path: Path) -> None:
    """On a cluster all processes must see the same folder.

    If executors see another one, the write fails without loss.
    """
    done = subprocess.run(
        [sys.executable, "-c", ON_A_CLUSTER, str(tmp_path / "output")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr[-3000:]
    assert lines[0] == "{0: 50, 1: 50} 100"
    assert "do not see /proc/self/cwd/elsewhere/_marshal/attempts" in lines[1]
    assert lines[2] == "[]"
