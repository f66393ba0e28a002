"""Files of each format preserve all values of every Spark type, or the sink rejects them before the commit."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as f
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks import FileSink
from tests.session_settings import session_settings
from tests.sink_conformance import never, part

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FORMATS = ("parquet", "orc", "json", "csv", "avro")
MOST = 64


def text(value: str) -> str:
    """Return a literal of exactly this text."""
    return f"CAST(X'{value.encode().hex()}' AS string)"


def time(micros: int) -> str:
    """Return a literal of a time."""
    return f"timestamp_micros({micros}L)"


TEXTS = [
    *(
        "",
        " ",
        "  a  ",
        "a\nb",
        "a\r\nb",
        "a\rb",
        "\r",
        "\n",
        "\t",
        '"',
        '""',
        '"a"',
        'a"b\nc',
        "\\",
        '\\"',
        'a\\"b',
        ",",
    ),
    *(
        "a,b;c|d",
        "null",
        "NULL",
        "\\N",
        "NaN",
        "#c",
        "\0",
        "\u2028",
        "äö😀",
        '{"a": 1}',
        "1",
        "true",
        "_corrupt_record",
    ),
    *("\\n", "'", "\\\\", '","', '",\n"', "\x7f\x80\x85", "e\u0301"),
]
VALUES: Mapping[str, Sequence[str]] = {
    "boolean": ["true", "false"],
    "tinyint": ["-128Y", "127Y"],
    "smallint": ["-32768S", "32767S"],
    "int": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808L", "9223372036854775807L"],
    "float": [
        f"CAST('{value}' AS float)" for value in ("NaN", "Infinity", "-Infinity", "-0.0", "1.4E-45", "3.4028235E38")
    ],
    "double": [f"CAST('{value}' AS double)" for value in ("NaN", "Infinity", "-Infinity", "-0.0", "4.9E-324", "0.1")],
    "decimal(10,2)": ["-12345678.90BD", "0.00BD"],
    "decimal(38,18)": ["0.000000000000000001BD", "-99999999999999999999.999999999999999999BD"],
    "decimal(38,0)": ["99999999999999999999999999999999999999BD"],
    "string": list(map(text, TEXTS)),
    "binary": ["X''", "X'00'", "X'FF00'", "X'4D0A22'"],
    "date": ["DATE'0001-01-01'", "DATE'1582-10-04'", "DATE'9999-12-31'", "date_add(DATE'9999-12-31', 400)"],
    # Both hours of a clock change, a time in a zone's first days, a second before 1970, years 10000 and -2.
    "timestamp": list(map(time, (1729989000123456, 1729992600123456, -2717640000876544, -1000001)))
    + list(map(time, (253402300799999999, 253402300800000001, -62198755200000001))),
    "timestamp_ntz": [
        f"TIMESTAMP_NTZ'{value}'"
        for value in ("0001-01-01 00:00:00", "2024-10-27 02:30:00.123456", "2024-03-31 02:30:00.000001")
    ],
    "interval day to second": ["INTERVAL '-1 02:03:04.123456' DAY TO SECOND"],
    "interval year to month": ["INTERVAL '-1-2' YEAR TO MONTH"],
}
NO_LEAVES = {"csv": {"binary"}, "orc": {"timestamp"}}


@dataclass(frozen=True)
class Kind:
    """A type as DDL, and literals of its values."""

    ddl: str
    values: Sequence[str]

    def array(self) -> str:
        """Return an array of the values."""
        return f"array({', '.join(f'CAST({value} AS {self.ddl})' for value in self.values)})"


def kinds(format_name: str) -> st.SearchStrategy[Kind]:
    """Return types that the format preserves, two levels deep if it preserves nested types."""
    leaf = st.sampled_from(
        [Kind(ddl, values) for ddl, values in VALUES.items() if ddl not in NO_LEAVES.get(format_name, ())]
    )
    if format_name == "csv":
        return leaf
    keys = st.just(Kind("string", VALUES["string"])) if format_name in {"json", "avro"} else leaf

    def deeper(inner: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
        return st.one_of(
            inner.map(
                lambda kind: Kind(f"array<{kind.ddl}>", [f"array({each}, NULL)" for each in kind.values] + ["array()"])
            ),
            st.tuples(keys, inner).map(
                lambda both: Kind(
                    f"map<{both[0].ddl},{both[1].ddl}>",
                    [f"map({both[0].values[0]}, {each})" for each in both[1].values]
                    + [f"map({each}, NULL)" for each in both[0].values],
                )
            ),
            st.tuples(inner, inner).map(
                lambda both: Kind(
                    f"struct<A_1:{both[0].ddl},b:{both[1].ddl}>",
                    [f"named_struct('A_1', {each}, 'b', NULL)" for each in both[0].values]
                    + [f"named_struct('A_1', NULL, 'b', {each})" for each in both[1].values],
                )
            ),
        )

    return st.one_of(leaf, deeper(leaf), deeper(deeper(leaf)))


Commits = list[list[tuple[str, Kind]]]
"""The columns of each commit, in addition to `partition` and `offset`."""


@st.composite
def commits(draw: st.DrawFn, format_name: str) -> Commits:
    """Draw one to three commits of the same columns in different orders. Some columns come or go.

    A job of Spark costs more than a column, so there are many columns.
    """
    columns = [(f"c{number}", draw(kinds(format_name))) for number in range(draw(st.integers(4, 10)))]
    count = draw(st.integers(1, 3))
    return [[column for column in draw(st.permutations(columns)) if draw(st.integers(0, 3))] for _ in range(count)]


def frame_of(spark: "SparkSession", columns: list[tuple[str, Kind]], start: int, order: int) -> "DataFrame":
    """Return a row for each value, and a row of nulls. Columns with fewer values repeat theirs."""
    count = min(MOST, max((len(kind.values) for _, kind in columns), default=1))
    own = [f"CAST({start} AS bigint) + id AS offset", "0 AS partition"]
    cells = [
        f"CASE WHEN id < {count} THEN {kind.array()}[CAST(id % {len(kind.values)} AS int)] END AS {name}"
        for name, kind in columns
    ]
    names = [name for name, _ in columns]
    where = order % (len(names) + 1)
    rows = spark.range(0, count + 1, 1, 1).selectExpr("id", *cells)
    return rows.selectExpr(*names[:where], *own, *names[where:])


def canonical(column: "Column", data_type: t.DataType) -> "Column":
    """Return the value as text that is equal only for equal values, in any time zone."""
    match data_type:
        case t.StringType() | t.BinaryType():
            shown = f.hex(column)
        case t.DateType():
            shown = f.unix_date(column).cast("string")
        case t.TimestampType():
            shown = f.unix_micros(column).cast("string")
        case t.ArrayType():
            items = f.transform(column, lambda item: canonical(item, data_type.elementType))
            shown = f.concat(f.lit("["), f.concat_ws(",", items), f.lit("]"))
        case t.MapType():
            items = f.transform(
                f.map_entries(column),
                lambda entry: f.concat(
                    canonical(entry["key"], data_type.keyType),
                    f.lit(":"),
                    canonical(entry["value"], data_type.valueType),
                ),
            )
            shown = f.concat(f.lit("{"), f.concat_ws(",", items), f.lit("}"))
        case t.StructType():
            parts = [canonical(column.getField(field.name), field.dataType) for field in data_type.fields]
            shown = f.concat(f.lit("<"), f.concat_ws(",", *parts), f.lit(">"))
        case _:
            shown = column.cast("string")
    return f.when(column.isNull(), f.lit("null")).otherwise(shown)


def canonical_rows(frame: "DataFrame", names: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return the values of these columns by offset, with null for missing columns."""
    types = {field.name: field.dataType for field in frame.schema.fields}
    cells = [canonical(f.col(name), types[name]) if name in types else f.lit("null") for name in names]
    rows = frame.select("offset", *cells).collect()
    assert len({row[0] for row in rows}) == len(rows)
    return {row[0]: tuple(row[1:]) for row in rows}


def check_round_trip(spark: "SparkSession", format_name: str, drawn: Commits, options: Mapping[str, str]) -> None:
    """Write each commit, read all back, and check that all values are equal."""
    folder = tempfile.mkdtemp(prefix="marshal-formats-")
    try:
        sink = FileSink(folder, format_name, options)
        names = sorted({name for columns in drawn for name, _ in columns})
        expected: dict[int, tuple[str, ...]] = {}
        for number, columns in enumerate(drawn):
            frame = frame_of(spark, columns, 1000 * number, number)
            assert sink.write(frame, [part(0, 1000 * number, 1000 * (number + 1))], never).taken
            expected |= canonical_rows(frame, names)
        back = FileSink(folder, format_name, options).read(spark)
        assert set(back.columns) == {"partition", "offset", *names}
        assert canonical_rows(back, names) == expected
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("format_name", FORMATS)
def test_each_type_alone_is_given_back(spark: "SparkSession", format_name: str) -> None:
    """Each special value of each type is preserved over two commits, and as an item of an array in the first one."""
    plain = [(f"c{number}", Kind(ddl, values)) for number, (ddl, values) in enumerate(VALUES.items())]
    kept = [(name, kind) for name, kind in plain if kind.ddl not in NO_LEAVES.get(format_name, ())]
    arrays = [
        (f"{name}_items", Kind(f"array<{kind.ddl}>", [f"array({each})" for each in kind.values]))
        for name, kind in kept
        if format_name != "csv"
    ]
    check_round_trip(spark, format_name, [kept + arrays, kept[::-1]], {})


@pytest.mark.thorough
@pytest.mark.parametrize("format_name", FORMATS)
def test_whatever_is_put_in_is_given_back(spark: "SparkSession", format_name: str) -> None:
    """Random types, special values, column orders, added columns and CSV options are preserved."""
    csv = st.sampled_from(
        [{}, {"header": "true"}, {"sep": ";"}, {"sep": "\t", "header": "true", "compression": "gzip"}]
    )

    @settings(
        max_examples=8 if format_name == "csv" else 4,  # for csv also options are drawn
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=commits(format_name), options=csv if format_name == "csv" else st.just({}))
    def check(drawn: Commits, options: Mapping[str, str]) -> None:
        check_round_trip(spark, format_name, drawn, options)

    check()


REFUSED = [
    ("csv", "array(1)", "it is of type array<int>"),
    ("csv", "X'00'", "it has the type binary"),
    ("csv", "NULL", "it has the type void"),
    ("json", "map(1, 2)", "it has a map whose keys are of type int"),
    ("json", "parse_json('1')", "it has the type variant"),
    ("json", "make_interval(1)", "it has the type interval"),
    ("avro", "map(1, 2)", "it has a map whose keys are of type int"),
    ("avro", "named_struct('a b', 1)", "'a b' is not a valid name in Avro"),
    ("orc", "array(NULL)", "it has the type void"),
    ("orc", "parse_json('1')", "it has the type variant"),
    ("orc", time(0), "it has the type timestamp"),
    ("orc", f"array(named_struct('a', {time(0)}))", "it has the type timestamp"),
    ("parquet", "NULL", "it has the type void"),
    ("parquet", "make_interval(1)", "it has the type interval"),
]


@pytest.mark.parametrize(("format_name", "value", "words"), REFUSED)
def test_a_type_that_is_not_given_back_is_refused(
    spark: "SparkSession", tmp_path: Path, format_name: str, value: str, words: str
) -> None:
    """The error names the column and comes before any row is evaluated or file is written."""
    frame = spark.sql(f"SELECT 0 AS partition, raise_error('evaluated') AS x, {value} AS kept").drop("x")
    with pytest.raises(ConfigurationError, match=f"^column 'kept': {words}.*files of format {format_name}"):
        FileSink(tmp_path, format_name).write(frame, [part(0, 0, 1)], never)
    assert not list(tmp_path.iterdir())


LOST = [
    ("csv", "CAST(X'FF41' AS string)", "a string that is not valid UTF-8"),
    ("csv", text("\0marshal-dagster null\0"), "the string that represents null"),
    ("json", "CAST(X'FF41' AS string)", "a string that is not valid UTF-8"),
    ("json", "array(map('k', CAST(X'FF41' AS string)))", "a string that is not valid UTF-8"),
    ("json", "map(CAST(X'FF41' AS string), 1)", "a string that is not valid UTF-8"),
    ("json", "named_struct('a', 1, 'b', CAST(X'FF41' AS string))", "a string that is not valid UTF-8"),
    ("orc", "DATE'1582-10-10'", "a date from 1582-10-05 to 1582-10-14"),
]


@pytest.mark.parametrize(("format_name", "value", "what"), LOST)
def test_a_value_that_is_not_given_back_is_refused(
    spark: "SparkSession", tmp_path: Path, format_name: str, value: str, what: str
) -> None:
    """One line names column, partition and offset. Nothing is committed, and the range can be taken later."""
    frame = spark.sql(f"SELECT 0 AS partition, 41L AS offset, {value} AS kept")
    sink = FileSink(tmp_path, format_name)
    with pytest.raises(SinkRejectedError, match=f"^column 'kept': {what}, partition 0, offset 41: .*position reset"):
        sink.write(frame, [part(0, 0, 42)], never)
    assert sink.write(frame.where("false"), [part(0, 0, 42)], never).taken


def test_a_file_cannot_begin_with_a_byte_order_mark(spark: "SparkSession", tmp_path: Path) -> None:
    """The mark is preserved if the first column is not text, or if the text is not at the start of a file."""
    row = f"{text(chr(0xFEFF) + 'x')} AS kept"
    with pytest.raises(SinkRejectedError, match="column 'kept': a string that begins with a byte order mark"):
        FileSink(tmp_path, "csv").write(spark.sql(f"SELECT {row}, 0 AS partition"), [part(0, 0, 1)], never)
    sink = FileSink(tmp_path, "csv")
    sink.write(spark.sql(f"SELECT 0 AS partition, {row}"), [part(0, 0, 1)], never)
    assert [row["kept"] for row in sink.read(spark).collect()] == ["\ufeffx"]


def test_csv_columns_are_read_by_the_order_of_their_commit(spark: "SparkSession", tmp_path: Path) -> None:
    """CSV files have no column names, but two commits with different column orders are read correctly."""
    sink = FileSink(tmp_path, "csv")
    sink.write(spark.sql("SELECT 0 AS partition, 'Ann' AS name, 'Ulm' AS town"), [part(0, 0, 1)], never)
    sink.write(spark.sql("SELECT 'Bonn' AS town, 'Bo' AS name, 0 AS partition"), [part(0, 1, 2)], never)
    rows = {(row["name"], row["town"]) for row in sink.read(spark).collect()}
    assert rows == {("Ann", "Ulm"), ("Bo", "Bonn")}


def as_old(folder: Path) -> None:
    """Turn the commits into those of an older version, which stored no options."""
    for path in (folder / "_marshal" / "commits").iterdir():
        document: dict[str, Any] = json.loads(path.read_text())
        document.pop("options", None)
        path.unlink()
        path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("format_name", "columns", "words"),
    [
        ("csv", "0 AS partition, 'a' AS kept", "in which '' is read as null, and a line break ends a row"),
        ("json", "0 AS partition, array(TIMESTAMP'2024-01-01 0:0:0Z') AS kept", "in which times have no microseconds"),
    ],
)
def test_files_of_older_versions_are_refused(
    spark: "SparkSession", tmp_path: Path, format_name: str, columns: str, words: str
) -> None:
    """Such files are neither read nor extended. The error states how to continue, before a batch is processed."""
    frame = spark.sql(f"SELECT {columns}")
    FileSink(tmp_path, format_name).write(frame, [part(0, 0, 1)], never)
    as_old(tmp_path)
    sink = FileSink(tmp_path, format_name)
    refused = f"{format_name} files of an older marshal-dagster, {words}: nothing was"
    with pytest.raises(SinkRejectedError, match=f"{refused} written. Continue in a new folder"):
        sink.verdicts([part(0, 1, 2)])
    with pytest.raises(SinkRejectedError, match=f"{refused} written"):
        sink.write(frame, [part(0, 1, 2)], never)
    with pytest.raises(SinkRejectedError, match=f"{refused} read"):
        sink.read(spark)


def test_older_json_without_times_is_extended(spark: "SparkSession", tmp_path: Path) -> None:
    """Such files have lost no values."""
    frame = spark.sql("SELECT 0 AS partition, 'a' AS kept")
    FileSink(tmp_path, "json").write(frame, [part(0, 0, 1)], never)
    as_old(tmp_path)
    sink = FileSink(tmp_path, "json")
    sink.write(frame, [part(0, 1, 2)], never)
    assert [row["kept"] for row in sink.read(spark).collect()] == ["a", "a"]


@pytest.mark.parametrize("name", ["Marshal_Range", "MARSHAL_RANGE", "marshal_range"])
def test_a_column_that_the_session_takes_for_the_sinks_own_is_refused(
    spark: "SparkSession", tmp_path: Path, name: str
) -> None:
    """The sink would replace the column, and it would be null when read."""
    frame = spark.sql(f"SELECT 0 AS partition, 'mine' AS {name}")
    with pytest.raises(ConfigurationError, match=f"the result's columns {name} are the sink's own: rename them"):
        FileSink(tmp_path).write(frame, [part(0, 0, 1)], never)
    assert not list(tmp_path.iterdir())


def test_the_sink_is_case_sensitive_if_the_session_is(spark: "SparkSession", tmp_path: Path) -> None:
    """In such a session the column is the user's own. A session that cannot have both columns rejects reading them."""
    sink = FileSink(tmp_path)
    with session_settings(spark, {"spark.sql.caseSensitive": "true"}):
        frame = spark.sql("SELECT 0 AS partition, 'mine' AS Marshal_Range, 1 AS a, 2 AS A")
        sink.write(frame, [part(0, 0, 1)], never)
        assert [tuple(row) for row in sink.read(spark).collect()] == [(0, "mine", 1, 2)]
    with pytest.raises(ConfigurationError, match="a commit's columns 'a' and 'A' are the same name in this session"):
        sink.read(spark)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_column_whose_case_changes_is_one_column(spark: "SparkSession", tmp_path: Path, format_name: str) -> None:
    """This is as in the session. Names inside JSON values are exact."""
    sink = FileSink(tmp_path, format_name)
    sink.write(spark.sql("SELECT 0 AS partition, 'a' AS name"), [part(0, 0, 1)], never)
    sink.write(spark.sql("SELECT 0 AS partition, 'b' AS Name"), [part(0, 1, 2)], never)
    back = sink.read(spark)
    assert back.columns == ["partition", "Name"]
    assert sorted(row["Name"] for row in back.collect()) == ["a", "b"]


@pytest.mark.parametrize("name", ["Offset", "PARTITION"])
def test_a_column_spelt_otherwise_is_refused(spark: "SparkSession", tmp_path: Path, name: str) -> None:
    """Spark would find the column, and Python would not."""
    frame = spark.sql("SELECT 0 AS partition, 0L AS offset").withColumnRenamed(name.lower(), name)
    with pytest.raises(ConfigurationError, match=f"this session treats '{name}' as '{name.lower()}'.*rename '{name}'"):
        FileSink(tmp_path).write(frame, [part(0, 0, 1)], never)


SETTINGS = [
    ("csv", "spark.sql.legacy.timeParserPolicy", "LEGACY"),
    ("json", "spark.sql.legacy.timeParserPolicy", "EXCEPTION"),
    ("csv", "spark.sql.legacy.nullValueWrittenAsQuotedEmptyStringCsv", "true"),
    ("avro", "spark.sql.avro.datetimeRebaseModeInWrite", "LEGACY"),
    ("parquet", "spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY"),
    ("parquet", "spark.sql.parquet.int96RebaseModeInWrite", "EXCEPTION"),
    ("parquet", "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MILLIS"),
]


@pytest.mark.parametrize(("format_name", "name", "value"), SETTINGS)
def test_a_session_that_would_write_other_values_is_refused(
    spark: "SparkSession", tmp_path: Path, format_name: str, name: str, value: str
) -> None:
    """One line names the setting and its correct value."""
    with (
        session_settings(spark, {name: value}),
        pytest.raises(
            ConfigurationError, match=rf"^a file sink of {format_name}: with {name}={value} .*spark.conf.set\("
        ),
    ):
        FileSink(tmp_path, format_name).write(spark.sql("SELECT 0 AS partition"), [part(0, 0, 1)], never)
    assert not list(tmp_path.iterdir())


HARMLESS = {
    "spark.sql.session.timeZone": "Europe/Berlin",
    "spark.sql.caseSensitive": "true",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
    "spark.sql.jsonGenerator.ignoreNullFields": "false",
    "spark.sql.columnNameOfCorruptRecord": "c3",
    "spark.sql.legacy.csv.enableDateTimeParsingFallback": "true",
    "spark.sql.legacy.json.enableDateTimeParsingFallback": "true",
    "spark.sql.files.supportSecondOffsetFormat": "false",
    "spark.sql.csv.parser.columnPruning.enabled": "false",
    "spark.sql.parquet.writeLegacyFormat": "true",
    "spark.sql.parquet.enableVectorizedReader": "false",
}


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "others",
    [HARMLESS, {"spark.sql.session.timeZone": "Asia/Kolkata", "spark.sql.ansi.enabled": "false"}],
    ids=["all", "without ansi"],
)
def test_other_settings_change_no_value(spark: "SparkSession", format_name: str, others: Mapping[str, str]) -> None:
    """All values are preserved if they are written and read in such a session."""
    plain = [(f"c{number}", Kind(ddl, values)) for number, (ddl, values) in enumerate(VALUES.items())]
    kept = [(column, kind) for column, kind in plain if kind.ddl not in {"binary", *NO_LEAVES.get(format_name, ())}]
    with session_settings(spark, others):
        check_round_trip(spark, format_name, [kept], {})


@contextmanager
def jvm_zone(spark: "SparkSession", name: str) -> Iterator[None]:
    """Let the JVM have another time zone, as one on another machine may."""
    assert spark._jvm is not None
    zones = spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone(name))
    try:
        yield
    finally:
        zones.setDefault(before)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_jvm_in_another_time_zone_reads_the_same_times(
    spark: "SparkSession", tmp_path: Path, format_name: str
) -> None:
    """Dates and times of all types that the format takes are those that were written."""
    kinds = [kind for kind in ("date", "timestamp", "timestamp_ntz") if kind not in NO_LEAVES.get(format_name, ())]
    values = [f"{value} AS c{number}" for number, value in enumerate(value for kind in kinds for value in VALUES[kind])]
    shown = [f"CAST(c{number} AS string)" for number in range(len(values))]
    frame, sink = spark.sql(f"SELECT 0 AS partition, {', '.join(values)}"), FileSink(tmp_path, format_name)
    with session_settings(spark, {"spark.sql.session.timeZone": "UTC"}):
        with jvm_zone(spark, "America/New_York"):
            sink.write(frame, [part(0, 0, 1)], never)
            expected = frame.selectExpr(*shown).collect()
        with jvm_zone(spark, "Asia/Kolkata"):
            assert sink.read(spark).selectExpr(*shown).collect() == expected


def test_a_missing_file_is_never_ignored(spark: "SparkSession", tmp_path: Path) -> None:
    """This holds also in a session that skips missing and corrupt files."""
    sink = FileSink(tmp_path)
    sink.write(spark.sql("SELECT 0 AS partition"), [part(0, 0, 1)], never)
    [path] = sink.committed_files()
    with (
        session_settings(spark, {"spark.sql.files.ignoreMissingFiles": "true"}),
        session_settings(spark, {"spark.sql.files.ignoreCorruptFiles": "true"}),
    ):
        path.write_bytes(b"no parquet")
        with pytest.raises(Exception, match=r"not a Parquet file|CANNOT_READ_FILE|FAILED_READ_FILE"):
            sink.read(spark).collect()
