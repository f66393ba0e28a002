"""Files that other engines read: their visible places, and columns as folders, in one warm Spark session."""

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as pads
import pytest
from pyspark.sql import functions as f

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks import FileSink
from marshal_dagster.sinks.files import formats, reader
from tests.session_settings import session_settings
from tests.sink_conformance import never, part
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Let Spark compile its plans in one test of values."""
    if request.node.name == f"{test_columns_as_folders.__name__}[parquet]":
        request.getfixturevalue("compiled")


def test_the_folder_itself_shows_what_is_committed(spark: "SparkSession", tmp_path: Path) -> None:
    """An engine that lists the folder reads the rows that the sink's own reader reads, also after a replacement."""
    sink = FileSink(tmp_path)
    frame = spark.range(20).selectExpr("CAST(id % 2 AS int) AS partition", "id AS offset", "'old' AS value")
    sink.write(frame, [part(0, 0, 20), part(1, 0, 20)], never)
    sink.write(
        frame.replace("old", "new").where("partition = 0 AND offset BETWEEN 4 AND 9"),
        [part(0, 4, 10, generation=20, epoch=21)],
        lambda: {0: [(4, 10)]},
    )
    expected = sorted((id_ % 2, id_, "new" if id_ % 2 == 0 and 4 <= id_ < 10 else "old") for id_ in range(20))
    assert sorted(map(tuple, sink.read(spark).collect())) == expected
    assert sorted(map(tuple, spark.read.parquet(str(tmp_path)).collect())) == expected
    assert sorted(map(tuple, spark.read.parquet(*map(str, sink.committed_files())).collect())) == expected
    listed = pads.dataset(str(tmp_path)).to_table().to_pylist()
    assert sorted(tuple(row.values()) for row in listed) == expected


PLACES = [
    "a",
    "A",
    " a ",
    "007",
    "a/b",
    "a=b",
    "ü",
    "%",
    "a:b",
    "..",
    "x\ny",
    "null",
    "{}",
    "*",
    "\\",
    "2026-01-31",
    None,
]


@pytest.mark.parametrize("format_name", ["parquet", "orc", "json", "csv", "avro"])
def test_columns_as_folders(spark: "SparkSession", tmp_path: Path, format_name: str) -> None:
    """The values of each supported type are read back as written, and files do not have these columns."""
    rows = [
        (0, offset, f"v{offset}", place, offset % 2 == 0, date(1900 + offset, 1, 31), -offset if offset else None)
        for offset, place in enumerate(PLACES)
    ]
    names = "partition int, offset long, value string, place string, flag boolean, day date, number int"
    frame = local_frame(spark, rows, names)
    for pick in ["place", "flag", "day", "number"] if format_name == "parquet" else ["place"]:
        sink = FileSink(tmp_path / pick, format_name, partition_by=[pick])
        assert sink.write(frame, [part(0, 0, len(rows))], never).taken
        assert sorted(map(tuple, sink.read(spark).collect())) == rows
        assert {path.parent.name.partition("=")[0] for path in sink.committed_files()} == {pick}
        newer = part(0, 3, 6, generation=20, epoch=21)
        replacing = frame.where("offset = 4").withColumn("value", f.lit("new"))
        assert (
            FileSink(tmp_path / pick, format_name, partition_by=[pick])
            .write(replacing, [newer], lambda: {0: [(3, 6)]})
            .taken
        )
        expected = [(*row[:2], "new", *row[3:]) if row[1] == 4 else row for row in rows if row[1] not in {3, 5}]
        assert sorted(map(tuple, sink.read(spark).collect())) == expected


def test_older_ranges_are_read_together(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that stay of many ranges come from one read for each generation, and stay in files of their range."""
    sink = FileSink(tmp_path)
    frame = spark.range(40).selectExpr("CAST(id % 2 AS INT) AS partition", "id DIV 2 AS offset", "'old' AS value")
    for start in range(0, 20, 5):
        rows = frame.where(f"offset BETWEEN {start} AND {start + 4}")
        sink.write(rows, [part(number, start, start + 5) for number in (0, 1)], never)
    second = part(0, 0, 2, generation=20, epoch=21)
    sink.write(frame.where("partition = 0 AND offset < 2").replace("old", "second"), [second], lambda: {0: [(0, 2)]})
    reads: list[int] = []
    read_files = formats.read_files

    def counted(*args: Any, **others: Any) -> Any:  # noqa: ANN401 - as `read_files`
        reads.append(len(args[4]))
        return read_files(*args, **others)

    monkeypatch.setattr(reader, "read_files", counted)
    third, read = [part(number, 0, 20, generation=30, epoch=31) for number in (0, 1)], {0: [(1, 19)], 1: [(1, 19)]}
    sink.write(frame.where("offset IN (1, 18)").replace("old", "third"), third, lambda: read)
    assert len(reads) == 2
    kept = [(number, 0, "old" if number else "second") for number in (0, 1)]
    kept += [(number, 19, "old") for number in (0, 1)]
    kept += [(number, offset, "third") for number in (0, 1) for offset in (1, 18)]
    assert sorted(map(tuple, sink.read(spark).collect())) == sorted(kept)
    assert sink.check() == []


def test_older_rows_of_a_text_format_keep_their_options(spark: "SparkSession", tmp_path: Path) -> None:
    """The rows that stay in a replacement are written with the options of their commit, by which they are read."""
    frame = spark.range(3).selectExpr("0 AS partition", "id AS offset", "'old' AS value")
    FileSink(tmp_path, "csv").write(frame, [part(0, 0, 3)], never)
    sink = FileSink(tmp_path, "csv", {"sep": ";", "header": "true"})
    newer = part(0, 1, 2, generation=20, epoch=21)
    sink.write(frame.where("offset = 1").replace("old", "new"), [newer], lambda: {0: [(1, 2)]})
    expected = [(0, 0, "old"), (0, 1, "new"), (0, 2, "old")]
    assert sorted(map(tuple, sink.read(spark).collect())) == expected
    assert sorted(map(tuple, FileSink(tmp_path, "csv").read(spark).collect())) == expected


def test_a_setting_that_changes_dates_in_folders_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    """Spark would write another year for a date before Christ."""
    frame = spark.sql("SELECT 0 AS partition, 0L AS offset, date_from_unix_date(-719528) AS day")
    sink = FileSink(tmp_path, partition_by=["day"])
    with (
        session_settings(spark, {"spark.sql.legacy.timeParserPolicy": "LEGACY"}),
        pytest.raises(ConfigurationError, match="timeParserPolicy"),
    ):
        sink.write(frame, [part(0, 0, 1)], never)
    sink.write(frame, [part(0, 0, 1)], never)
    assert sink.read(spark).selectExpr("unix_date(day)").collect()[0][0] == -719528


@pytest.mark.parametrize("value", ["", "__HIVE_DEFAULT_PARTITION__", "a\0b"])
def test_values_that_folders_do_not_keep_are_refused(spark: "SparkSession", tmp_path: Path, value: str) -> None:
    """Such a value is refused by the job that writes it, with its place, and nothing is committed."""
    sink = FileSink(tmp_path, partition_by=["place"])
    frame = local_frame(spark, [(0, 7, value, 1)], "partition int, offset long, place string, n int")
    with pytest.raises(
        SinkRejectedError, match=r"column 'place': .* in a column of partition_by, partition 0, offset 7"
    ):
        sink.write(frame, [part(0, 0, 9)], never)
    assert sink.committed_files() == ()
    plain = FileSink(tmp_path / "plain")
    assert plain.write(frame, [part(0, 0, 9)], never).taken


def test_a_folder_with_the_longest_name(spark: "SparkSession", tmp_path: Path) -> None:
    """Some characters take three bytes in a folder's name. A value for which it would be too long is refused."""
    sink = FileSink(tmp_path, partition_by=["pl[ace"])
    room = 255 - len("pl%5Bace=")
    longest = "ä" + "/:{^" + "x" * (room - 14)
    frame = local_frame(spark, [(0, 7, longest, 1)], "partition int, offset long, `pl[ace` string, n int")
    sink.write(frame, [part(0, 0, 9)], never)
    assert [row["pl[ace"] for row in sink.read(spark).collect()] == [longest]
    (folder,) = tmp_path.glob("pl*")
    assert len(folder.name.encode()) == 255
    with pytest.raises(SinkRejectedError, match=r"column 'pl\[ace': more than 255 bytes .* partition 0, offset 7"):
        sink.write(frame.withColumn("pl[ace", f.concat("pl[ace", f.lit("x"))), [part(0, 9, 18)], never)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["nowhere"], "which is not a column of the result"),
        (["Place"], "compared with upper and lower case"),
        (["amount"], r"'amount' of type decimal\(5,2\), whose values"),
        (["at"], "'at' of type timestamp, whose values"),
        (["partition", "place", "amount", "at"], "of type decimal"),
    ],
)
def test_columns_that_cannot_be_folders_are_refused(
    spark: "SparkSession", tmp_path: Path, columns: list[str], message: str
) -> None:
    """Before the rows are evaluated."""
    frame = spark.sql("SELECT 0 AS partition, 'x' AS place, 1.00BD + 100 AS amount, now() AS at")
    frame = frame.withColumn("amount", f.col("amount").cast("decimal(5,2)"))
    with pytest.raises(ConfigurationError, match=message):
        FileSink(tmp_path, partition_by=columns).write(frame, [part(0, 0, 1)], never)


def test_an_output_has_one_partitioning(spark: "SparkSession", tmp_path: Path) -> None:
    """A sink with other columns is refused; a reader needs to know none."""
    frame = spark.sql("SELECT 0 AS partition, 0L AS offset, 'x' AS place")
    FileSink(tmp_path, partition_by=["place"]).write(frame, [part(0, 0, 1)], never)
    with pytest.raises(SinkRejectedError, match=r"is partitioned by \['place'\], not by \[\]"):
        FileSink(tmp_path).write(frame, [part(0, 1, 2)], never)
    assert [tuple(row) for row in FileSink(tmp_path).read(spark).collect()] == [(0, 0, "x")]
