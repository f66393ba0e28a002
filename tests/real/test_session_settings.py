"""Session settings do not change the results of conversions, or the session is rejected in one line."""

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks import DeltaSink, with_source_headers
from marshal_dagster.sinks.kafka import records
from marshal_dagster.spark.decoding import (
    DecodedBatch,
    SchemaFiles,
    decode_avro,
    decode_json,
    decode_protobuf,
    infer_json_schema,
)
from marshal_dagster.spark.reader import offsets_read, read_schema
from tests.avro_bytes import long
from tests.protobuf_bytes import framed_message, orders_file
from tests.session_settings import session_settings
from tests.sink_conformance import never, part
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def batch(spark: "SparkSession", *values: bytes | str | None) -> "DataFrame":
    """Return a batch of these values."""
    rows = [
        (None, value.encode() if isinstance(value, str) else value, "orders", 0, offset, NOW, None)
        for offset, value in enumerate(values)
    ]
    return local_frame(spark, rows, read_schema())


JSONS = (
    '{"d": "2024-13-45", "t": "2024-01-01T10:00:00.123456Z"}',
    '{"d": "2024-02-29", "t": "2024-01-01T10:00:00.123456Z", "s": " a", "m": {"k": 1.50}, "n": 7}',
    '{"t": "2024-03-31T02:30:00", "s": {"a": 1.50,  "b": "x"}}',
    '{"t": 1700000000, "x": {"id": 1}, "l": [{"d": "2024-01-01"}, {}]}',
    '{"t": 1700000000000}',
    '{"n": ""}',
    '{"n": 7, "n": 8, "t": 1}',
    '{"m": {"k": 1, "k": 2}}',
    '{"m": {"k": "1e123456"}}',
    '{"n": 1}, "v": {"n": 2}',
    '{"d": "20240101"}',
    '{"d": "2024-1-1", "t": "2024-01-01"}',
    "[1]",
    "",
    None,
)
SCHEMA = "d date, t timestamp, s string, m map<string, decimal(10, 2)>, n int, x struct<id: bigint NOT NULL>"
JSON_SCHEMA = f"{SCHEMA}, l array<struct<d: date>>"


def shown(decoded: DecodedBatch) -> list[Any]:
    """Return each record's value as text that is independent of time zones, or its reason."""
    good, bad = decoded.split()
    value = good.selectExpr(
        "`offset`", "value.d", "unix_micros(value.t) AS t", "value.s", "value.m", "value.n", "value.x", "value.l"
    )
    return sorted(map(str, value.collect())) + sorted(map(str, bad.select("offset", "reason").collect()))


HARMLESS = [
    ("spark.sql.session.timeZone", "Europe/Berlin"),
    ("spark.sql.session.timeZone", "America/St_Johns"),
    ("spark.sql.ansi.enabled", "false"),
    ("spark.sql.caseSensitive", "true"),
    ("spark.sql.json.enablePartialResults", "false"),
    ("spark.sql.json.useUnsafeRow", "true"),
    ("spark.sql.jsonGenerator.ignoreNullFields", "false"),
    ("spark.sql.mapKeyDedupPolicy", "LAST_WIN"),
    ("spark.sql.columnNameOfCorruptRecord", "s"),
    ("spark.sql.legacy.json.enableDateTimeParsingFallback", "true"),
    ("spark.sql.legacy.sizeOfNull", "false"),
    ("spark.sql.legacy.charVarcharAsString", "true"),
    ("spark.sql.legacy.castComplexTypesToString.enabled", "true"),
    ("spark.sql.legacy.nullInEmptyListBehavior", "true"),
    ("spark.sql.legacy.disableMapKeyNormalization", "true"),
    ("spark.sql.legacy.raiseErrorWithoutErrorClass", "true"),
    ("spark.sql.legacy.respectNullabilityInTextDatasetConversion", "true"),
    ("spark.sql.optimizer.enableJsonExpressionOptimization", "false"),
    ("spark.sql.parser.escapedStringLiterals", "true"),
    ("spark.sql.ansi.enforceReservedKeywords", "true"),
    ("spark.sql.parser.quotedRegexColumnNames", "true"),
    ("spark.sql.datetime.java8API.enabled", "true"),
]


@pytest.fixture(scope="module")
def decoded_as_usual(spark: "SparkSession") -> list[Any]:
    """The values and reasons of `JSONS` with the default settings."""
    return shown(decode_json(batch(spark, *JSONS), JSON_SCHEMA))


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_json_is_decoded_the_same_in_every_session(
    spark: "SparkSession", decoded_as_usual: list[Any], name: str, value: str
) -> None:
    """The same records are good and bad, and all values are equal."""
    frame = batch(spark, *JSONS)
    with session_settings(spark, {name: value}):
        assert shown(decode_json(frame, JSON_SCHEMA)) == decoded_as_usual


def test_a_time_without_a_zone_is_utc(spark: "SparkSession") -> None:
    """This holds unless the options name a zone. The session's zone has no effect."""
    frame = batch(spark, '{"t": "2024-03-31T02:30:00"}')

    def micros(options: dict[str, str]) -> int:
        good, _ = decode_json(frame, "t timestamp", options=options).split()
        return int(good.selectExpr("unix_micros(value.t)").collect()[0][0])

    utc = int(datetime(2024, 3, 31, 2, 30, tzinfo=UTC).timestamp() * 1_000_000)
    with session_settings(spark, {"spark.sql.session.timeZone": "Asia/Kolkata"}):
        assert micros({}) == utc
        assert micros({"TimeZone": "+01:00"}) == utc - 3_600_000_000


REFUSED_JSON = [
    ("spark.sql.legacy.timeParserPolicy", "LEGACY"),
    ("spark.sql.legacy.timeParserPolicy", "legacy"),
    ("spark.sql.legacy.timeParserPolicy", "EXCEPTION"),
    ("spark.sql.legacy.json.allowEmptyString.enabled", "true"),
    ("spark.sql.json.enableExactStringParsing", "false"),
    ("spark.sql.timestampType", "TIMESTAMP_NTZ"),
    ("spark.sql.variant.allowDuplicateKeys", "true"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED_JSON)
def test_json_is_not_decoded_where_the_session_would_change_it(spark: "SparkSession", name: str, value: str) -> None:
    """The error is one line and comes before any planning. With LEGACY, month 13 and day 45 became 2025-02-14."""
    frame = batch(spark, *JSONS)
    with (
        session_settings(spark, {name: value}),
        pytest.raises(ConfigurationError, match=f"^decode_json: with {name}={value} ") as e,
    ):
        decode_json(frame, JSON_SCHEMA)
    assert "\n" not in str(e.value)
    assert f"spark.conf.set('{name}'" in str(e.value)


def test_a_schema_is_inferred_from_objects_with_names_that_come_once(spark: "SparkSession") -> None:
    """With this setting the schema could differ, so the session is rejected."""
    with (
        session_settings(spark, {"spark.sql.variant.allowDuplicateKeys": "true"}),
        pytest.raises(ConfigurationError, match=r"^infer_json_schema: with spark.sql.variant.allowDuplicateKeys=true"),
    ):
        infer_json_schema(batch(spark, '{"a": 1, "a": "x"}'))


def test_fields_that_the_session_cannot_report_apart_are_refused(spark: "SparkSession") -> None:
    """A case-sensitive session has two fields, as in JSON."""
    frame = batch(spark, '{"id": 1, "ID": 2}')
    with pytest.raises(ConfigurationError, match="column 'value': its fields 'id' and 'ID' are the same name"):
        decode_json(frame, "id int, ID int")
    with session_settings(spark, {"spark.sql.caseSensitive": "true"}):
        good, _ = decode_json(frame, "id int NOT NULL, ID int").split()
        assert [tuple(row) for row in good.select("value.*").collect()] == [(1, 2)]


@pytest.mark.parametrize("name", ["Reason", "RAW", "Headers", "_Marshal_Value"])
def test_a_column_that_decoding_adds_must_not_be_there(spark: "SparkSession", name: str) -> None:
    """Decoding would replace the user's column."""
    from pyspark.sql import functions as f

    frame = batch(spark, '{"id": 1}')
    frame = frame.withColumnRenamed("headers", name) if name == "Headers" else frame.withColumn(name, f.lit("mine"))
    with pytest.raises(ConfigurationError, match="the columns to decode and those added to them"):
        decode_json(frame, "id int").marked()


DAYS = {"type": "int", "logicalType": "date"}
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "day", "type": DAYS},
    ],
}
AVRO_SETTINGS = [
    ("spark.sql.avro.datetimeRebaseModeInRead", "LEGACY"),
    ("spark.sql.avro.datetimeRebaseModeInRead", "EXCEPTION"),
    ("spark.sql.session.timeZone", "Europe/Berlin"),
    ("spark.sql.ansi.enabled", "false"),
    ("spark.sql.caseSensitive", "true"),
    ("spark.sql.timestampType", "TIMESTAMP_NTZ"),
    ("spark.sql.legacy.timeParserPolicy", "LEGACY"),
]


@pytest.mark.parametrize(("name", "value"), AVRO_SETTINGS)
def test_avro_is_decoded_the_same_in_every_session(spark: "SparkSession", name: str, value: str) -> None:
    """This includes days before the Gregorian calendar."""
    frame = batch(spark, long(-62135596800000000) + long(-719162), long(1) + long(2), b"\x01")
    with session_settings(spark, {name: value}):
        good, bad = decode_avro(frame, None, schema=json.dumps(AVRO)).split()
        rows = good.selectExpr("offset", "unix_micros(value.at) AS at", "unix_date(value.day) AS day").collect()
        [(offset, reason)] = bad.select("offset", "reason").collect()
    assert [tuple(row) for row in rows] == [(0, -62135596800000000, -719162), (1, 1, 2)]
    assert offset == 2
    assert reason == "it is truncated, or does not match the schema"


def test_avro_is_not_decoded_where_the_session_would_change_it(spark: "SparkSession") -> None:
    """With this setting Spark would read one type as another, incompatible one."""
    with (
        session_settings(spark, {"spark.sql.legacy.avro.allowIncompatibleSchema": "true"}),
        pytest.raises(
            ConfigurationError, match=r"^decode_avro: with spark.sql.legacy.avro.allowIncompatibleSchema=true"
        ),
    ):
        decode_avro(batch(spark, b""), None, schema=json.dumps(AVRO))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.sql.execution.pythonUDF.arrow.enabled", "true"),
        ("spark.sql.session.timeZone", "Europe/Berlin"),
        ("spark.sql.ansi.enabled", "false"),
        ("spark.sql.timestampType", "TIMESTAMP_NTZ"),
    ],
)
def test_protobuf_is_decoded_the_same_in_every_session(
    spark: "SparkSession", tmp_path: Path, name: str, value: str
) -> None:
    """With Arrow, values would be converted by other rules."""
    descriptors = tmp_path / "orders.desc"
    descriptors.write_bytes(FileDescriptorSet(file=[orders_file()]).SerializeToString())
    payloads = (
        b"\x08\x07\x12\x01a",
        b"\x1a\x03\x0a\x01b",
        b"\x22\x02\x08\x01",
        b"\x28\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    )
    frame = batch(spark, *(framed_message(7, [1], payload) for payload in payloads), b"\x00")

    def found() -> list[Any]:
        schemas = SchemaFiles({7: descriptors})
        good, bad = decode_protobuf(frame, schemas, message="shop.Order", descriptors=descriptors).split()
        return [str(row["value"]) for row in good.collect()] + [str(row["reason"]) for row in bad.collect()]

    expected = found()
    with session_settings(spark, {name: value}):
        assert found() == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spark.sql.ansi.enabled", "false"),
        ("spark.sql.session.timeZone", "Europe/Berlin"),
        ("spark.sql.legacy.createEmptyCollectionUsingStringType", "true"),
        ("spark.sql.ansi.enforceReservedKeywords", "true"),
        ("spark.sql.caseSensitive", "true"),
    ],
)
def test_headers_of_the_source_are_the_same_in_every_session(spark: "SparkSession", name: str, value: str) -> None:
    """This holds for rows with headers and without."""
    frame = batch(spark, "a", "b").selectExpr(
        "*", "IF(offset = 0, array(named_struct('key', 'k', 'value', X'01')), NULL) AS own"
    )
    frame = frame.drop("headers").withColumnRenamed("own", "headers")
    expected = with_source_headers(frame, [part(0, 0, 2)]).orderBy("offset").collect()
    with session_settings(spark, {name: value}):
        assert with_source_headers(frame, [part(0, 0, 2)]).orderBy("offset").collect() == expected


def test_headers_of_the_source_replace_no_column_of_another_case(spark: "SparkSession") -> None:
    """Otherwise Spark's writer would find two columns."""
    frame = batch(spark, "a").withColumnRenamed("headers", "Headers")
    with pytest.raises(ConfigurationError, match="this session treats 'Headers' as 'headers'"):
        with_source_headers(frame, [part(0, 0, 1)])


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_a_partition_beyond_an_int_is_not_cut_to_one(spark: "SparkSession", ansi: str) -> None:
    """Without ANSI the row would be assigned to another partition."""
    frame = spark.createDataFrame([(2**32, 0, b"x")], "partition long, offset long, value binary")
    with session_settings(spark, {"spark.sql.ansi.enabled": ansi}), records.evaluated(frame, []) as found:
        assert dict(found.counts) == {2**32: 1}


def headers_of(spark: "SparkSession", name: str) -> "DataFrame":
    """Return a row with two headers. `name` is the name of the second one, in SQL."""
    return spark.sql(
        "SELECT 0 AS partition, 41L AS offset, 'x' AS value, "
        f"array(named_struct('key', 'k', 'value', X'01'), named_struct('key', CAST({name} AS string), 'value', X'')) "
        "AS headers"
    )


@pytest.mark.parametrize(("ansi", "name"), [("true", "X'FF'"), ("false", "X'FF'"), ("true", "X'680078'")])
def test_a_header_whose_name_is_no_text_is_found(spark: "SparkSession", ansi: str, name: str) -> None:
    """Python would get another name, and the client would cut it off at a NUL character."""
    with (
        session_settings(spark, {"spark.sql.ansi.enabled": ansi}),
        records.evaluated(headers_of(spark, name), []) as found,
    ):
        assert found.rejected is not None
        assert (found.rejected.partition, found.rejected.offset, found.rejected.column) == (0, 41, "headers")


def test_a_header_without_a_name_is_refused(spark: "SparkSession") -> None:
    """Kafka records have no such headers."""
    said = "^column 'headers', partition 0, offset 41: a header has no name"
    with records.evaluated(headers_of(spark, "NULL"), []) as found, pytest.raises(SinkRejectedError, match=said):
        list(found)


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_offsets_that_no_message_has_are_left_out_in_every_session(spark: "SparkSession", ansi: str) -> None:
    """The offset after the highest one overflows: it is an error with ANSI, and negative without."""
    from marshal_dagster.sinks.delta.table import KeptRows

    frame = spark.createDataFrame([(0, 2**63 - 1), (0, 5), (0, -1), (0, None)], "partition int, offset long")
    with session_settings(spark, {"spark.sql.ansi.enabled": ansi}):
        assert KeptRows(frame, {0: 4}).offsets() == {0: [(5, 6)]}
        assert offsets_read(frame.where("offset = 5")) == {0: [(5, 6)]}


def test_delta_refuses_a_session_that_would_write_other_values(spark: "SparkSession", tmp_path: Path) -> None:
    """A Delta table's files are Parquet files."""
    sink = DeltaSink(str(tmp_path / "table"), session=lambda: spark)
    frame = spark.createDataFrame([(0, 0)], "partition int, offset long")
    with (
        session_settings(spark, {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS"}),
        pytest.raises(ConfigurationError, match=r"^a Delta sink: with spark.sql.parquet.outputTimestampType"),
    ):
        sink.write(frame, [part(0, 0, 1)], never)
    with pytest.raises(ConfigurationError, match="the result's columns Marshal are the sink's own"):
        sink.write(frame.selectExpr("*", "1 AS Marshal"), [part(0, 0, 1)], never)


def test_a_date_is_one_in_every_session(spark: "SparkSession") -> None:
    """The example of the bug report: there is no month 13."""
    good, bad = decode_json(batch(spark, JSONS[0], JSONS[1]), "d date, t timestamp").split()
    assert [row["value"]["d"] for row in good.collect()] == [date(2024, 2, 29)]
    assert [row["offset"] for row in bad.collect()] == [0]
