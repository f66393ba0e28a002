"""Decoding: each record of a batch becomes a good row with its exact value, or a bad record with the reason."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import functions as f

from marshal_dagster.errors import BadRecord, ConfigurationError, DecodeError, SchemaDriftError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.spark.decoding import (
    DecodedBatch,
    NullPolicy,
    Schema,
    SchemaFiles,
    SchemaKind,
    SchemaRegistry,
    decode_avro,
    decode_json,
    decode_protobuf,
    infer_json_schema,
)
from marshal_dagster.spark.reader import read_ranges, read_schema
from tests.avro_bytes import encode, framed, long, record, string
from tests.conditions import WITHIN_S
from tests.pages import python_blocks
from tests.protobuf_bytes import F, framed_message, orders_file
from tests.real.conftest import MakeTopic
from tests.registry import Registry, running_registry
from tests.session_settings import session_settings
from tests.spark_frames import local_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

pytestmark = pytest.mark.usefixtures("compiled")
NOW = datetime(2026, 11, 22, tzinfo=UTC)


def batch(spark: "SparkSession", values: Sequence[bytes | str | None]) -> "DataFrame":
    """Return a batch of topic `orders`: the values alternate between two partitions, from offset 100."""
    rows = [
        (
            f"k{number}".encode(),
            value.encode() if isinstance(value, str) else value,
            "orders",
            number % 2,
            100 + number // 2,
            NOW,
            None,
        )
        for number, value in enumerate(values)
    ]
    return local_frame(spark, rows, read_schema())


def place(row: "Row") -> int:
    """Return the number of a record of `batch`."""
    return int((row["offset"] - 100) * 2 + row["partition"])


def outcome(decoded: DecodedBatch, count: int) -> list[Any]:
    """Return for each record its value as a dict, or its reason. Check that it is either good or bad."""
    good, bad = decoded.split()
    found: dict[int, Any] = {}
    for row in good.collect():
        found[place(row)] = row["value"] and row["value"].asDict(recursive=True)
    for row in bad.collect():
        assert place(row) not in found
        found[place(row)] = row["reason"]
    assert sorted(found) == list(range(count))
    marked = decoded.marked().collect()
    assert [found[place(row)] for row in marked] == [
        row["reason"] or (row["value"] and row["value"].asDict(recursive=True)) for row in marked
    ]
    assert all((row["raw"] is not None) <= (row["reason"] is not None) for row in marked)
    return [found[number] for number in range(count)]


MISFIT = "not JSON, or another type in a field than declared"
NOT_ONE = "not exactly one JSON value"
JSONS: list[tuple[bytes | str | None, Any]] = [
    ('{"id": 1, "name": "a"}', {"id": 1, "name": "a"}),
    ('{"id": 2}', {"id": 2, "name": None}),
    ('{"id": 3, "name": null, "more": {"id": [1]}}', {"id": 3, "name": None}),
    (' \n{"name": "\\u00e4ö", "id": 4}\r\n', {"id": 4, "name": "äö"}),
    ('{"id": 9223372036854775807}', {"id": 2**63 - 1, "name": None}),
    ('{"id": 6, "name": {"a": 1.5}}', {"id": 6, "name": '{"a":1.5}'}),
    (None, "null value"),
    ("", "empty value"),
    ("{}", "field id is missing or null"),
    ('{"id": null}', "field id is missing or null"),
    ('{"ID": 1}', "field id is missing or null"),
    ("null", "JSON null"),
    (b'{"id": 1, "name": "\xff"}', "not UTF-8"),
    ('{"id": "x"}', MISFIT),
    ('{"id": "7"}', MISFIT),
    ('{"id": true}', MISFIT),
    ('{"id": 1.5}', MISFIT),
    ('{"id": 9223372036854775808}', MISFIT),
    ('{"id": {"a": 1}}', MISFIT),
    ('{"id": 1', MISFIT),
    ('{"id": 1, "name": "a', MISFIT),
    ("id", MISFIT),
    ("7", MISFIT),
    ('"text"', MISFIT),
    ('""', MISFIT),
    ("[1]", MISFIT),
    ('[{"id": 1}, {"id": 2}]', MISFIT),
    ("   ", MISFIT),
    ('{"id": 1} {"id": 2}', MISFIT),
    ('{"id": 1} garbage', MISFIT),
    ('{"id": 1}}', NOT_ONE),
    ('{"id": 1}}}', NOT_ONE),
    ('{"id": 1}, "x": {"id": 2}', NOT_ONE),
    ('{"id": 1}, "v": {"id": 2}', NOT_ONE),
    ('{"id": 1}}, "m": {"v": {"id": 2}', NOT_ONE),
]


def test_each_json_value_is_good_or_bad_for_a_reason(spark: "SparkSession") -> None:
    """No value is truncated, guessed or left out. Multiple values, a wrong type and bytes that are not text are bad."""
    frame = batch(spark, [value for value, _ in JSONS])
    decoded = decode_json(frame, "id bigint NOT NULL, name string")
    found = outcome(decoded, len(JSONS))
    assert dict(enumerate(found)) == dict(enumerate(expected for _, expected in JSONS))
    assert outcome(decoded, len(JSONS)) == found


HUGE = "a number with an exponent of 10,000 or more"
HUGES: list[tuple[str, Any]] = [
    ('{"price": 1e1000000000}', HUGE),
    ('{"price": 2e2, "x": [1.5E-0099999999]}', HUGE),
    ('{"price": "1e1000000000"}', HUGE),
    (r'{"price": "1\u0065\u0661\u0660,00000000"}', HUGE),
    ('{"price": "1e1000000000", "price": 1}', HUGE),
    ('{"price": 1}, "m": {"price": "1e1000000000"}', HUGE),
    (r'{"lines": [5, {"price": "1\u00651000000000"}]}', HUGE),
    ('{"lines": [{"price": "1e-,999999999"}]}', HUGE),
    (r'{"note": "\\\"1e123456789", "price": 1.5}', {"price": 1.5, "note": '\\"1e123456789', "lines": None}),
    ('{"note": "81e34567", "price": "2.5"}', {"price": 2.5, "note": "81e34567", "lines": None}),
    ('{"price": 1e0000002}', {"price": 100, "note": None, "lines": None}),
]


def test_a_number_of_a_billion_digits_is_bad_and_not_written_out(spark: "SparkSession") -> None:
    """In a decimal such a number of 13 bytes would block a task for hours, or fill its memory.

    In a string it is text.
    """
    schema = "price decimal(10, 2), note string, lines array<struct<price: decimal(38, 9)>>"
    decoded = decode_json(batch(spark, [value for value, _ in HUGES]), schema)
    found = outcome(decoded, len(HUGES))
    assert dict(enumerate(found)) == dict(enumerate(expected for _, expected in HUGES))


NAMED_E: list[tuple[str, Any]] = [
    ('{"phase12345": 1.5}', {"phase12345": 1.5, "all": None}),
    ('{"phase12345": "1e12345"}', HUGE),
    ('{"all": {"e67890": 2, "\\"e67890\\":": "3"}}', {"phase12345": None, "all": {"e67890": 2, '"e67890":': 3}}),
    (r'{"all": {"e67890": 2, "\":": "3", ":": "4e99999"}}', HUGE),
]


HALF = "half of a surrogate pair in a string, which is no character"
HALVES: list[tuple[str, Any]] = [
    (r'{"s": "a\ud83d"}', HALF),
    (r'{"s": "\uDE00\uD83D"}', HALF),
    (r'{"s": "\\\ud83d\\\ude00"}', HALF),
    (r'{"list": [{"x": "\ud83d\ud83d\ude00"}]}', HALF),
    (r'{"map": {"\ude00": "b"}}', HALF),
    (r'{"s": "\ud83d\ude00"}', {"s": "\U0001f600", "list": None, "map": None}),
    (r'{"s": "\\ud83d"}', {"s": "\\ud83d", "list": None, "map": None}),
    (r'{"more": "\ud83d", "s": "\\\\"}', {"s": "\\\\", "list": None, "map": None}),
]


def test_half_of_a_surrogate_pair_is_bad(spark: "SparkSession") -> None:
    """Spark would read a question mark. Undeclared fields do not count, and neither do escaped backslashes."""
    schema = "s string, list array<struct<x: string>>, map map<string, string>"
    decoded = decode_json(batch(spark, [value for value, _ in HALVES]), schema)
    assert outcome(decoded, len(HALVES)) == [expected for _, expected in HALVES]
    if hasattr(f, "try_parse_json"):
        values = [r'{"s": {"x": "\ud83d"}}', r'{"more": "\ud83d", "s": 1}']
        marked = decode_json(batch(spark, values), "s variant").marked()
        assert marked.select("reason", f.to_json("value")).collect() == [(HALF, None), (None, '{"s":1}')]


@pytest.mark.parametrize("drawn", ["e1234567-0000-4000-8000-000000000000", "00000000-0000-4000-8000-00000e123456"])
def test_a_name_that_looks_like_an_exponent_is_no_number(
    spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, drawn: str
) -> None:
    """The name may be a field, a map key, or the random name for the end of a value: one in six has such digits."""
    monkeypatch.setattr("marshal_dagster.spark.decoding.json_codec.uuid.uuid4", lambda: UUID(drawn))
    schema = "phase12345 decimal(10, 2), all map<string, decimal(10, 2)>"
    found = outcome(decode_json(batch(spark, [value for value, _ in NAMED_E]), schema), len(NAMED_E))
    assert dict(enumerate(found)) == dict(enumerate(expected for _, expected in NAMED_E))


def test_a_text_that_only_looks_like_days_is_no_date(spark: "SparkSession") -> None:
    """Spark's fallback would interpret the text as days since 1970, or as the year 57275."""
    values = ['{"day": "2020-01-01"}', '{"day": "7"}', '{"day": "20200101"}']
    assert outcome(decode_json(batch(spark, values), "day date"), 3) == [{"day": date(2020, 1, 1)}, MISFIT, MISFIT]


FAR = "a number of more than 11 digits in a timestamp, which takes seconds"
AT = datetime.fromtimestamp(1_700_000_000)  # noqa: DTZ006 - as Spark returns it
LATEST = datetime.fromtimestamp(99_999_999_999)  # noqa: DTZ006
NAMED = {"at": AT, "id": None, "all": {"a1700000000000": [AT]}}
TIMES: list[tuple[str, Any]] = [
    ('{"at": 1700000000}', {"at": AT, "id": None, "all": None}),
    ('{"at": 99999999999, "id": 1700000000000}', {"at": LATEST, "id": 1_700_000_000_000, "all": None}),
    ('{"at": "2023-11-14T22:13:20Z", "all": {"a1700000000000": ["2023-11-14 22:13:20.000000"]}}', NAMED),
    ('{"at": 100000000000}', FAR),
    ('{"at": 1700000000000}', FAR),
    ('{"at": -1700000000000000}', FAR),
    ('{"at": 18446744073709}', FAR),
    ('{"all": {"\\"": [1, 1700000000000]}}', FAR),
    ('{"at": 1.7e12}', MISFIT),
    ('{"at": 1700000000.5}', MISFIT),
    ('{"at": 1700000000000, "at": 1700000000}', {"at": AT, "id": None, "all": None}),
]


def test_a_number_in_a_timestamp_is_seconds_or_bad(spark: "SparkSession") -> None:
    """Milliseconds would become a far year, and microseconds any time: seconds times a million overflow silently."""
    decoded = decode_json(
        batch(spark, [value for value, _ in TIMES]), "at timestamp, id bigint, all map<string, array<timestamp>>"
    )
    found = outcome(decoded, len(TIMES))
    assert dict(enumerate(found)) == dict(enumerate(expected for _, expected in TIMES))


TIME = "a time without a date in a timestamp"
TIMES_OF_DAY: list[tuple[str, Any]] = [
    ('{"at": "12:30"}', TIME),
    ('{"at": "1:02:03.5+01:00"}', TIME),
    ('{"at": "T12:30"}', TIME),
    ('{"at": " \\t12:30"}', TIME),
    ('{"at": "\\u00312:30"}', TIME),
    ('{"all": {"a": ["2023-11-14T22:13:20Z", "T1:2"]}}', TIME),
    ('{"name": "12:30", "at": "2023-11-14T22:13:20Z"}', {"at": AT, "name": "12:30", "all": None}),
    ('{"at": 1700000000, "all": {"12:30": null}}', {"at": AT, "name": None, "all": {"12:30": None}}),
    ('{"at": "x12:30"}', MISFIT),
]


def test_a_time_without_a_date_is_bad(spark: "SparkSession") -> None:
    """Spark would read it as a time of the day on which it is decoded, so a replay would give another value."""
    values = [value for value, _ in TIMES_OF_DAY]
    schema = "at timestamp, name string, all map<string, array<timestamp>>"
    found = outcome(decode_json(batch(spark, values), schema), len(values))
    assert dict(enumerate(found)) == dict(enumerate(expected for _, expected in TIMES_OF_DAY))
    clock = decode_json(batch(spark, ['{"at": "12:30"}']), "at timestamp", options={"timestampFormat": "HH:mm"})
    assert [row["value"]["at"].year for row in clock.or_fail().collect()] == [1970]


def test_a_null_value_is_good_where_it_is_meant(spark: "SparkSession") -> None:
    """With `NullPolicy.KEEP` a tombstone is a row without a value."""
    decoded = decode_json(batch(spark, [None, '{"id": 1}', ""]), "id int NOT NULL", nulls=NullPolicy.KEEP)
    assert outcome(decoded, 3) == [None, {"id": 1}, "empty value"]


def test_fields_of_objects_in_objects_must_be_there_too(spark: "SparkSession") -> None:
    """NOT NULL applies if the enclosing object exists."""
    values = ['{"a": {"b": 1}}', '{"a": {}}', "{}", '{"a": {"b": [1]}}']
    found = outcome(decode_json(batch(spark, values), "a struct<b: int NOT NULL>"), 4)
    assert found == [{"a": {"b": 1}}, "field a.b is missing or null", {"a": None}, MISFIT]


def test_bad_records_fail_the_batch_with_their_count_and_the_first_ones(spark: "SparkSession") -> None:
    """`or_fail` fails before it returns a row. With `or_fail_at_first` the action that reads a bad value fails."""
    decoded = decode_json(batch(spark, ["{", '{"a": 1}', '{"a": 2}', "", "", "x"]), "a int")
    with pytest.raises(DecodeError) as caught:
        decoded.or_fail()
    assert caught.value.count == 4
    assert caught.value.first == (
        BadRecord("orders", 0, 100, MISFIT),
        BadRecord("orders", 1, 101, "empty value"),
    )
    with pytest.raises(Exception, match=r"bad record at orders/[01]/10[0-2]: "):
        decoded.or_fail_at_first().select("value").collect()
    good = decode_json(batch(spark, ['{"a": 1}', '{"a": 2}']), "a int").or_fail()
    assert sorted(row["a"] for row in good.select("value.*").collect()) == [1, 2]
    assert good.columns == read_schema().names


def test_new_fields_are_an_error_where_requested(spark: "SparkSession") -> None:
    """By default new fields are ignored. Bad records do not count as having new fields."""
    frame = batch(spark, ['{"a": 1, "b": {"c": 1}}', '{"a": 2, "b": {"c": 1, "d x": [{"e": 1}]}}', "[1]", "{", None])
    schema = "a int, b struct<c: int>"
    with pytest.raises(SchemaDriftError, match=r"lacks: b\.d x\. Declare"):
        decode_json(frame, schema, new_fields="fail")
    good, _ = decode_json(frame, f"{schema[:-1]}, `d x`: array<struct<e: int>>>", new_fields="fail").split()
    assert good.count() == 2
    inferred = infer_json_schema(frame)
    assert inferred.simpleString() == "struct<a:bigint,b:struct<c:bigint,d x:array<struct<e:bigint>>>>"
    assert infer_json_schema(batch(spark, ["1", None])).fields == []


@pytest.mark.parametrize(
    ("schema", "options"),
    [("a intt", {}), ("int", {}), ("", {}), ("a int", {"Mode": "DROPMALFORMED"}), ("a array<struct<b: tinyint>>", {})],
)
def test_a_json_schema_or_option_that_cannot_be_is_refused(
    spark: "SparkSession", schema: str, options: dict[str, str]
) -> None:
    """The error is one line, and no record is read."""
    with pytest.raises(ConfigurationError, match=r"schema|Mode"):
        decode_json(batch(spark, []), schema, options=options)


def test_dead_letters_hold_all_that_the_record_was(
    spark: "SparkSession", connection: KafkaConnection, topic: MakeTopic
) -> None:
    """A dead letter has the record's bytes, headers, place and the reason. A repeated batch writes equal dead letters.

    No secret is shown.
    """
    name, dead = topic(1), topic(1)
    servers = connection.bootstrap_servers
    producer = Producer({"bootstrap.servers": servers})
    producer.produce(name, key=b"\xff", value=b"{", headers=[("h", b"1")], timestamp=1_700_000_000_123)
    producer.produce(name, key=b"k", value=b'{"a": 1}')
    producer.produce(name, value=None, timestamp=1_700_000_000_124)
    assert producer.flush(WITHIN_S) == 0
    frame = read_ranges(spark, connection.spark_options(), name, {0: (0, 3)})
    decoded = decode_json(frame, "a int")

    class WithSecrets:
        def spark_options(self) -> dict[str, str]:
            jaas = 'ScramLoginModule required username="u" password="hunter2";'
            secrets = {"kafka.sasl.jaas.config": jaas, "kafka.ssl.key.password": "hunter2"}
            return {**connection.spark_options(), **secrets}

    decoded.or_dead_letter(dead, connection)
    good = decoded.or_dead_letter(dead, WithSecrets())
    assert [(row["offset"], row["value"]["a"]) for row in good.collect()] == [(1, 1)]
    letters = messages(servers, dead, 4)
    assert sorted(letters[:2]) == sorted(letters[2:])
    first, second = sorted(letters[:2])
    assert first == (
        f"{name}/0/0".encode(),
        b"{",
        [
            ("h", b"1"),
            ("marshal.topic", name.encode()),
            ("marshal.partition", b"0"),
            ("marshal.offset", b"0"),
            ("marshal.timestamp", b"1700000000123"),
            ("marshal.key", b"\xff"),
            ("marshal.reason", MISFIT.encode()),
        ],
    )
    assert (second[0], second[1]) == (f"{name}/0/2".encode(), None)
    assert dict(second[2] or [])["marshal.key"] is None
    with pytest.raises(ConfigurationError, match="cannot go to that topic itself"):
        decoded.or_dead_letter(name, connection)
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    plans = "".join(executions.apply(each).physicalPlanDescription() for each in range(executions.size()))
    assert f"topic={dead}" in plans
    assert "hunter2" not in plans


def test_a_large_bad_record_is_a_dead_letter_too(
    spark: "SparkSession", connection: KafkaConnection, topic: MakeTopic
) -> None:
    """The producer's default limit of a megabyte would fail each batch with such a record."""
    dead = topic(1, {"max.message.bytes": str(4 * 1024**2)})
    large = b"{" * (3 * 1024**2)
    decode_json(batch(spark, [large]), "a int").or_dead_letter(dead, connection)
    assert [value for _, value, _ in messages(connection.bootstrap_servers, dead, 1)] == [large]


def messages(servers: str, topic: str, count: int) -> list[tuple[Any, Any, Any]]:
    """Return key, value and headers of the first messages of a topic's partition 0."""
    settings = {"bootstrap.servers": servers, "group.id": "tests", "enable.auto.commit": False}
    reader = Consumer(settings)
    try:
        reader.assign([TopicPartition(topic, 0, 0)])
        found = [each for each in reader.consume(count, timeout=30) if each.error() is None]
        return [(each.key(), each.value(), each.headers()) for each in found]
    finally:
        reader.close()


ORDER_1 = record("Order", {"id": "long", "note": ["null", "string"]})
ORDER_2 = record("Order", {"id": "long", "note": ["null", "string"], "total": "double"})
READER = record(
    "Order",
    {"total": "double", "id": "long", "note": ["null", "string"], "lines": {"type": "array", "items": "string"}},
    defaults={"total": -1.0, "lines": []},
)
NULLS = record("Order", {"note": ["null", "string"]})


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A schema registry for this test."""
    with running_registry() as registry:
        yield registry


def test_avro_of_several_schemas_is_read_by_one(spark: "SparkSession", registry: Registry) -> None:
    """Records of an older and a newer writer schema are decoded, with bad records between them."""
    first = registry.register("orders-value", json.dumps(ORDER_1))
    second = registry.register("orders-value", json.dumps(ORDER_2))
    other = registry.register("other", "{}", kind="JSON")
    misfit = registry.register("misfit", json.dumps(record("Order", {"id": "string"})))
    one, two = {"id": 1, "note": "äö"}, {"id": -2, "note": None, "total": 0.5}
    whole = framed(first, encode(ORDER_1, one))
    ends_early = f"it is truncated, or is not of schema id {first}, or does not fit the reader's schema"
    cases: list[tuple[bytes | None, Any]] = [
        (whole, {"total": -1.0, **one, "lines": []}),
        (framed(second, encode(ORDER_2, two)), {**two, "lines": []}),
        (None, "null value"),
        (b"", "empty value"),
        (b"\x00\x00\x00", "shorter than a frame"),
        (b"\x01" + whole[1:], "no frame: it does not begin with a zero byte"),
        (framed(77, whole[5:]), "schema id 77 is not known"),
        (framed(2**32 - 1, whole[5:]), "schema id 4294967295 is not known"),
        (framed(other, b"{}"), f"schema id {other} is of type JSON, not AVRO"),
        (framed(misfit, b"\x02a"), ends_early.replace(str(first), str(misfit))),
        *((whole[:length], ends_early) for length in range(5, len(whole))),
    ]
    decoded = decode_avro(
        batch(spark, [value for value, _ in cases]), SchemaRegistry(url=registry.url), schema=json.dumps(READER)
    )
    assert outcome(decoded, len(cases)) == [expected for _, expected in cases]
    requested = list(registry.requested)
    outcome(decoded, len(cases))
    assert registry.requested == requested


def test_json_of_a_registry_has_its_schema_id_removed(spark: "SparkSession", registry: Registry) -> None:
    """Values of Confluent's JSON Schema serializer are decoded; the id of another kind of schema makes a bad record."""
    known = registry.register("json-value", '{"type": "object"}', kind="JSON")
    other = registry.register("avro-value", json.dumps(ORDER_1))
    cases: list[tuple[bytes | None, Any]] = [
        (framed(known, b'{"id": 1, "name": "x"}'), {"id": 1, "name": "x"}),
        (framed(known, b'{"name": "x"}'), "field id is missing or null"),
        (framed(known, b"\xff"), "not UTF-8"),
        (framed(known, b""), MISFIT),
        (b'{"id": 1}', "no frame: it does not begin with a zero byte"),
        (framed(other, b'{"id": 1}'), f"schema id {other} is of type AVRO, not JSON"),
        (framed(77, b'{"id": 1}'), "schema id 77 is not known"),
        (None, "null value"),
    ]
    frame, schemas = batch(spark, [value for value, _ in cases]), SchemaRegistry(url=registry.url)
    decoded = decode_json(frame, "id bigint NOT NULL, name string", schemas=schemas)
    assert outcome(decoded, len(cases)) == [expected for _, expected in cases]
    with pytest.raises(SchemaDriftError, match="name"):
        decode_json(frame, "id bigint", schemas=schemas, new_fields="fail")


def test_an_avro_record_of_nulls_alone_is_a_good_one(spark: "SparkSession", registry: Registry) -> None:
    """Such a record is not mistaken for an unreadable one. The reader's schema is the newest of a subject."""
    number = registry.register("orders-value", json.dumps(NULLS))
    decoded = decode_avro(
        batch(spark, [framed(number, b"\x00"), framed(number, b"\x02"), None]),
        SchemaRegistry(url=registry.url),
        subject="orders-value",
        nulls=NullPolicy.KEEP,
    )
    found = outcome(decoded, 3)
    assert found[0] == {"note": None}
    assert "is truncated" in found[1]
    assert found[2] is None


def test_an_avro_record_of_another_name_is_bad(spark: "SparkSession", registry: Registry) -> None:
    """Another record is bad even if its fields fit or all have defaults, unless an alias allows it.

    An invalid schema is an error.
    """
    order, invoice = (
        registry.register(name, json.dumps(record(name, {"id": "long"}))) for name in ("Order", "Invoice")
    )
    text = registry.register("text", '"string"')
    frame = batch(spark, [framed(order, b"\x02"), framed(invoice, b"\x02"), framed(text, b"\x02a")])
    reader = record("Order", {"id": "long"}, defaults={"id": 0})
    bad = [
        f"schema id {number} is of {reported}, but the reader's schema is of Order, without such an alias"
        for number, reported in ((invoice, "record Invoice"), (text, "no record"))
    ]
    schemas = SchemaRegistry(url=registry.url)
    assert outcome(decode_avro(frame, schemas, schema=json.dumps(reader)), 3) == [{"id": 1}, *bad]
    named = json.dumps({**reader, "name": "Paper", "aliases": ["shop.Order", "Invoice"]})
    assert outcome(decode_avro(frame, schemas, schema=named), 3)[:2] == [{"id": 1}, {"id": 1}]
    none = framed(registry.register("none", "{"), b"\x02")
    with pytest.raises(ConfigurationError, match="no Avro schema"):
        decode_avro(batch(spark, [none]), schemas, schema=named)


def test_bytes_that_follow_an_avro_record_make_it_bad(spark: "SparkSession") -> None:
    """Spark ignores them, although they may be a second record."""
    one = encode(ORDER_1, {"id": 1, "note": "a"})
    payloads = [one, one + one, one + b"\x00"]
    expected = [{"id": 1, "note": "a"}, *["further bytes follow the record"] * 2]
    text = json.dumps(ORDER_1)
    frames = [framed(1, payload) for payload in payloads]
    assert outcome(decode_avro(batch(spark, frames), Known({1: ORDER_1}), schema=text), 3) == expected
    assert outcome(decode_avro(batch(spark, payloads), None, schema=text), 3) == expected


def decimal_schema(precision: int, **kind: object) -> dict[str, Any]:
    """Return the schema of a decimal with two digits after the point."""
    return {"type": "bytes", **kind, "logicalType": "decimal", "precision": precision, "scale": 2}


BEYOND_64_BITS = -(2**64) - 5
TOO_LONG = "a decimal has more digits than the reader's schema declares"


@pytest.mark.parametrize("is_ansi", [True, False])
def test_a_decimal_has_all_its_digits_or_is_bad(spark: "SparkSession", is_ansi: bool) -> None:
    """Spark reads 64 bits of a decimal of 18 digits or fewer, also where the writer's schema has more or none."""
    fixed = {"type": "fixed", "name": "Price", "size": 9}
    schema = {
        "a": decimal_schema(18),
        "b": {"type": "array", "items": ["null", decimal_schema(4)]},
        "c": {"type": "map", "values": decimal_schema(38)},
        "d": decimal_schema(10, **fixed),
        "e": decimal_schema(10, type="fixed", name="Small", size=8),
    }
    reader, writer = record("Order", schema), record("Order", {**schema, "a": "bytes", "d": fixed})

    def payload(a: int, b: int = 1, d: int = 1) -> bytes:
        def number(value: int, size: int = 9) -> bytes:
            return value.to_bytes(size, "big", signed=True)

        of_b = long(2) + long(0) + long(1) + long(9) + number(b) + b"\x00"
        return (
            long(9)
            + number(a)
            + of_b
            + long(1)
            + string("k")
            + long(9)
            + number(a)
            + b"\x00"
            + number(d)
            + number(7, 8)
        )

    def row(a: str, b: str, d: str, e: str = "0.07") -> dict[str, Any]:
        return {"a": Decimal(a), "b": [None, Decimal(b)], "c": {"k": Decimal(a)}, "d": Decimal(d), "e": Decimal(e)}

    cases = [
        (payload(-(10**18) + 1, 9999, -(10**10) + 1), row("-9999999999999999.99", "99.99", "-99999999.99")),
        (payload(0), row("0.00", "0.01", "0.01")),
        (payload(10**18), TOO_LONG),
        (payload(BEYOND_64_BITS), TOO_LONG),
        (payload(5, 10_000), TOO_LONG),
        (payload(5, 1, BEYOND_64_BITS), TOO_LONG),
    ]
    with session_settings(spark, {"spark.sql.ansi.enabled": str(is_ansi).lower()}):
        frame = batch(spark, [framed(1, payload) for payload, _ in cases])
        decoded = decode_avro(frame, Known({1: writer}), schema=json.dumps(reader))
        assert outcome(decoded, len(cases)) == [expected for _, expected in cases]


class Known:
    """A source of schemas that needs no registry."""

    largest_id = 2**31 - 1

    def __init__(self, schemas: dict[int, dict[str, Any]]) -> None:
        self.schemas = schemas

    def by_id(self, number: int, /) -> Schema | None:
        """Return the schema that was given for this number."""
        return Schema(SchemaKind.AVRO, json.dumps(self.schemas[number])) if number in self.schemas else None

    def latest(self, subject: str, /) -> Schema:
        """Raise an error, because there are no subjects."""
        raise NotImplementedError(subject)


def test_a_thousand_schema_ids_of_garbage_stop_no_batch(spark: "SparkSession") -> None:
    """Each record with an unknown id is bad, and the good record among them is good."""
    garbage = [framed(number, b"\x02\x00") for number in range(100, 2**32, 2**32 // 1_200)]
    decoded = decode_avro(
        batch(spark, [*garbage, framed(7, b"\x02\x00")]), Known({7: ORDER_1}), schema=json.dumps(ORDER_1)
    )
    good, bad = decoded.split()
    assert [row["value"]["id"] for row in good.collect()] == [1]
    reasons = sorted(row["reason"] for row in bad.collect())
    assert reasons == sorted(f"schema id {int.from_bytes(each[1:5], 'big')} is not known" for each in garbage)


def test_an_avro_record_with_another_logical_type_is_bad(spark: "SparkSession", registry: Registry) -> None:
    """Avro would read milliseconds as microseconds: a time of today would be in January 1970."""
    millis, micros = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("millis", "micros"))
    first, second = (registry.register("e-value", json.dumps(record("E", {"at": unit}))) for unit in (millis, micros))
    values = [framed(first, long(1_700_000_000_000)), framed(second, long(1_700_000_000_000_000))]
    decoded = decode_avro(
        batch(spark, values), SchemaRegistry(url=registry.url), schema=json.dumps(record("E", {"at": micros}))
    )
    reason = f"schema id {first}: field at is timestamp-millis, but timestamp-micros in the reader's schema"
    assert outcome(decoded, 2) == [reason, {"at": AT}]


def test_an_avro_string_that_is_not_utf8_is_bad(spark: "SparkSession") -> None:
    """Spark keeps such bytes, and readers would silently replace them."""
    schema = json.dumps(record("Order", {"id": "long", "names": {"type": "array", "items": "string"}}))
    good, bad = (long(7) + long(1) + long(2) + name + long(0) for name in ("é".encode(), b"\xff\xfe"))
    found = outcome(decode_avro(batch(spark, [good, bad, good]), None, schema=schema), 3)
    assert found == [{"id": 7, "names": ["é"]}, "it has a text that is not UTF-8", {"id": 7, "names": ["é"]}]


def test_no_number_that_a_broken_avro_record_claims_takes_all_memory(spark: "SparkSession") -> None:
    """A length or count of two billion makes a bad record. Schemas whose items take no bytes are rejected.

    The number of such items is unlimited. Any of these records ended the whole JVM, or kept it busy forever.
    """
    lists = {"type": "array", "items": "string"}
    sizes = {"string": "string", "bytes": "bytes", "strings": lists}
    for name, of in sizes.items():
        schema = json.dumps(record("Order", {name: of}))
        values = [long(size) + b"abc" for size in (2**31 - 20, 2**31 + 5, 2**62, -(2**31))]
        found = outcome(decode_avro(batch(spark, values), None, schema=schema), len(values))
        assert found == ["it is truncated, or does not match the schema"] * len(values)
    empty = {"type": "record", "name": "Empty", "fields": [{"name": "a", "type": {"type": "null"}}]}
    unbounded = [record("Order", {"a": {"type": "array", "items": each}}) for each in ("null", empty)]
    unbounded.append(record("Order", {"e": ["null", empty], "a": {"type": "map", "values": [unbounded_items()]}}))
    good = record("Order", {"a": {"type": "array", "items": ["null"]}, "id": "long"})
    values = [framed(number, long(2**40) + b"\x00\x02") for number in range(3)]
    decoded = decode_avro(
        batch(spark, [*values, framed(3, b"\x04\x00\x00\x00\x0e")]),
        Known(dict(enumerate([*unbounded, good]))),
        schema=json.dumps(record("Order", {"id": "long"}, defaults={"id": 0})),
    )
    *bad, last = outcome(decoded, 4)
    assert [each.partition(" items take no bytes")[1] != "" for each in bad] == [True] * 3
    assert last == {"id": 7}
    with pytest.raises(ConfigurationError, match="items take no bytes"):
        decode_avro(batch(spark, []), None, schema=json.dumps(unbounded[0]))


def unbounded_items() -> dict[str, Any]:
    """Return an array of a type that is defined elsewhere, by its short name."""
    return {"type": "array", "items": "Empty"}


def test_avro_without_a_frame_and_with_schemas_in_files(spark: "SparkSession", tmp_path: Path) -> None:
    """Decoding works without a registry."""
    one = {"id": 1, "note": "a"}
    bare = decode_avro(batch(spark, [encode(ORDER_1, one), b"", None]), None, schema=json.dumps(ORDER_1))
    assert outcome(bare, 3) == [one, "empty value", "null value"]
    file = tmp_path / "order.avsc"
    file.write_text(json.dumps(ORDER_1), encoding="utf-8")
    framed_ones = batch(spark, [framed(7, encode(ORDER_1, one)), framed(8, b"")])
    decoded = decode_avro(framed_ones, SchemaFiles({7: file}), schema=json.dumps(ORDER_1))
    assert outcome(decoded, 2) == [one, "schema id 8 is not known"]


def test_a_registry_that_cannot_be_requested_makes_no_record_bad(spark: "SparkSession", registry: Registry) -> None:
    """The batch fails if the registry is unavailable."""
    frame = batch(spark, [framed(registry.register("a", json.dumps(ORDER_1)), b"\x02\x00")])
    registry.status = 503
    with pytest.raises(UnavailableError, match="503"):
        decode_avro(frame, SchemaRegistry(url=registry.url), schema=json.dumps(ORDER_1))


def test_no_secret_of_the_registry_is_in_the_plan(spark: "SparkSession", registry: Registry) -> None:
    """Only the driver connects to the registry."""
    registry.login = "etl:hunter2"
    frame = batch(spark, [framed(registry.register("a", json.dumps(ORDER_1)), b"\x02\x00")])
    schemas = SchemaRegistry(url=registry.url, username="etl", password="hunter2")
    rows = decode_avro(frame, schemas, schema=json.dumps(ORDER_1)).or_fail()
    shown = rows._jdf.queryExecution().toString()
    assert "Physical Plan" in shown
    assert [secret for secret in ("hunter2", "ZXRsOmh1bnRlcjI=", registry.url) if secret in shown] == []


@pytest.mark.parametrize(
    "schema", ['"string"', "{", '{"type": "record", "name": "A", "fields": [{"name": "a", "type": "B"}]}']
)
def test_an_avro_schema_that_cannot_be_is_refused(spark: "SparkSession", schema: str) -> None:
    """The schema is rejected before any record is read."""
    with pytest.raises(
        ConfigurationError, match=r"Undefined schema: B|is not a defined name|must be that of a record|no Avro schema"
    ):
        decode_avro(batch(spark, []), None, schema=schema)


def test_protobuf_of_several_schemas_is_read_by_one(spark: "SparkSession", registry: Registry) -> None:
    """Records of two writer files are read by the subject's newest schema. Other messages and broken ones are bad."""
    first = registry.register("orders", "...", kind="PROTOBUF", serialized=orders_file().SerializeToString())
    second = registry.register("orders", "...", kind="PROTOBUF", serialized=orders_file(newer=True).SerializeToString())
    avro = registry.register("a", '"string"')
    wider = orders_file()
    wider.message_type[1].field[4].type = F.TYPE_INT64
    third = registry.register("wider", "...", kind="PROTOBUF", serialized=wider.SerializeToString())
    conflict = f"schema id {third}: field serial is int64, but uint64 in the reader's schema"
    empty: dict[str, Any] = {"id": 0, "note": None, "lines": [], "at": None, "serial": 0, "state": "NEW", "total": 0.0}
    total = bytes.fromhex("39000000000000e03f")
    cases: list[tuple[bytes | None, Any]] = [
        (framed_message(first, [1], b"\x08\x07\x12\x01a"), {**empty, "id": 7, "note": "a"}),
        (framed_message(first, [1], b"\x1a\x03\x0a\x01b"), {**empty, "lines": [{"sku": "b"}]}),
        (framed_message(first, [1], b"\x22\x02\x08\x01"), {**empty, "at": datetime.fromtimestamp(1)}),  # noqa: DTZ006 - as Spark returns it
        (framed_message(second, [1], total), {**empty, "total": 0.5}),
        (framed_message(second, [1], b""), empty),
        (framed_message(second, [0], b""), "it is a shop.Other, not a shop.Order"),
        (framed_message(second, [1], total[:5]), "no valid shop.Order: Error parsing message"),
        (framed_message(third, [1], b"\x28\x01"), conflict),
        (framed_message(avro, [1], b""), f"schema id {avro} is of type AVRO, not PROTOBUF"),
        (framed_message(77, [1], b""), "schema id 77 is not known"),
        (b"\x00\x00", "shorter than a frame"),
        (b"", "empty value"),
        (None, "null value"),
    ]
    decoded = decode_protobuf(
        batch(spark, [value for value, _ in cases]),
        SchemaRegistry(url=registry.url),
        message="shop.Order",
        subject="orders",
    )
    found = outcome(decoded, len(cases))
    starts = [
        each[: len(expected)] if isinstance(expected, str) else each
        for each, (_, expected) in zip(found, cases, strict=True)
    ]
    assert starts == [expected for _, expected in cases]


def test_a_null_value_is_a_good_protobuf_record_where_it_is_meant(spark: "SparkSession", registry: Registry) -> None:
    """With `NullPolicy.KEEP` a tombstone is a row without a value; an empty value stays bad."""
    registry.register("orders", "...", kind="PROTOBUF", serialized=orders_file().SerializeToString())
    decoded = decode_protobuf(
        batch(spark, [None, b""]),
        SchemaRegistry(url=registry.url),
        message="shop.Order",
        subject="orders",
        nulls=NullPolicy.KEEP,
    )
    assert outcome(decoded, 2) == [None, "empty value"]


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "decoding.md"


def test_the_examples_of_the_page_do_what_it_says(
    spark: "SparkSession", registry: Registry, connection: KafkaConnection, topic: MakeTopic, tmp_path: Path
) -> None:
    """Each function of the page works on a batch with and without bad records."""
    name, dead = topic(1), topic(1)
    blocks = python_blocks(PAGE.read_text(encoding="utf-8"))
    code = "\n".join(blocks).replace("http://registry:8081", registry.url).replace("/data/", f"{tmp_path}/")
    page: dict[str, Any] = {}
    exec(code.replace('"orders.dead"', f'"{dead}"'), page)  # noqa: S102 - the page is ours
    to_connection = SimpleNamespace(to_connection=lambda _: connection)
    context = SimpleNamespace(resources=SimpleNamespace(claimer=SimpleNamespace(connection=to_connection)))

    def work(example: str, values: Sequence[bytes | str | None]) -> list[tuple[Any, ...]]:
        frame = batch(spark, values).withColumn("topic", f.lit(name))
        return [tuple(row) for row in page[example](context, None, frame).orderBy("offset", "partition").collect()]

    good, bad = '{"id": 1, "shop": "a", "total": 2}', '{"id": 1, "new": 5}'
    row = (0, 100, 1, "a", 2.0)
    for example in ("orders", "orders_or_dead_letters", "orders_and_bad_records", "orders_to_tables"):
        assert [each[:5] for each in work(example, [good])] == [row]
    with pytest.raises(DecodeError):
        work("orders", [good, "{"])
    with pytest.raises(SchemaDriftError, match="new"):
        work("orders_without_news", [good, bad])
    assert work("orders_or_dead_letters", [good, "{"]) == [row]
    assert [value for _, value, _ in messages(connection.bootstrap_servers, dead, 1)] == [b"{"]
    assert work("orders_and_bad_records", [good, "{"]) == [
        (*row, None, None),
        (1, 100, None, None, None, b"{", MISFIT),
    ]
    assert work("orders_to_tables", [good, "{"]) == [row]
    bad_records = [tuple(each) for each in spark.read.parquet(f"{tmp_path}/orders_bad").collect()]
    assert bad_records == [(name, 1, 100, b"{", MISFIT)]
    assert work("orders_to_tables", [good, "{"]) == [row]
    again = [tuple(each) for each in spark.read.parquet(f"{tmp_path}/orders_bad").collect()]
    assert again == bad_records * 2, "a repeated batch appends the same records"
    older = record("Order", {"id": "long"})
    avro = registry.register("avro", json.dumps(older))
    protobuf = registry.register("orders-value", "...", kind="PROTOBUF", serialized=orders_file().SerializeToString())
    assert work("avro_orders", [framed(avro, encode(older, {"id": 7}))]) == [(0, 100, 7, None)]
    assert work("protobuf_orders", [framed_message(protobuf, [1], b"\x08\x07")])[0][:4] == (0, 100, 7, None)
