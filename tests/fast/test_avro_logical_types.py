"""Logical types of Avro: a writer's schema that gives a value another meaning than the reader's is found."""

from collections.abc import Callable
from typing import Any

import pytest

from marshal_dagster.spark.decoding.avro_codec import _if_of_reader, _is_unbounded
from marshal_dagster.spark.decoding.avro_logical_types import logical_type_conflict
from marshal_dagster.spark.decoding.schemas import Schema, SchemaKind

MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
MICROS = {"type": "long", "logicalType": "timestamp-micros"}
DATE = {"type": "int", "logicalType": "date"}


def decimal(scale: int, precision: int = 10) -> dict[str, Any]:
    """Return the schema of a decimal in bytes."""
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def record(of: object, name: str = "at", **more: object) -> dict[str, Any]:
    """Return the schema of a record with one field."""
    return {"type": "record", "name": "shop.Order", "fields": [{"name": name, "type": of, **more}]}


CONFLICTS = [
    (MILLIS, MICROS, "field at is timestamp-millis, but timestamp-micros in the reader's schema"),
    (MICROS, MILLIS, "field at is timestamp-micros, but timestamp-millis"),
    (decimal(4), decimal(2), "field at is decimal of scale 4, but decimal of scale 2"),
    (DATE, MILLIS, "field at is date, but timestamp-millis"),
    ({"type": "int", "logicalType": "time-millis"}, {"type": "long", "logicalType": "time-micros"}, "time-millis"),
    ({**MILLIS, "logicalType": "timestamp-nanos"}, MICROS, "timestamp-nanos"),
    ({**MILLIS, "logicalType": "local-timestamp-millis"}, MILLIS, "local-timestamp-millis"),
    (["null", MILLIS], ["null", MICROS], "field at is"),
    (MILLIS, ["null", MICROS], "field at is"),
    (["null", "string", MILLIS], ["string", MICROS, "null"], "field at is"),
    ({"type": "array", "items": MILLIS}, {"type": "array", "items": MICROS}, "field at[] is"),
    ({"type": "map", "values": decimal(4)}, {"type": "map", "values": decimal(2)}, "field at{} is"),
    ({**record(MILLIS, "inner"), "name": "Part"}, {**record(MICROS, "inner"), "name": "Part"}, "field at.inner is"),
    ({"type": MILLIS}, {"type": MICROS}, "field at is"),
]


@pytest.mark.parametrize(("writer", "reader", "found"), CONFLICTS)
def test_another_meaning_is_found(writer: object, reader: object, found: str) -> None:
    """Avro reads the same number or bytes for both."""
    conflict = logical_type_conflict(record(writer), record(reader))
    assert conflict is not None
    assert found in conflict


EQUAL = [
    (MILLIS, MILLIS),
    ("long", MILLIS),
    (MILLIS, "long"),
    (decimal(2, 10), decimal(2, 20)),
    (decimal(2, 18), decimal(2, 9)),
    (decimal(2, 38), decimal(2, 18)),
    ({"type": "bytes", "logicalType": "decimal", "precision": 9}, decimal(0)),
    (["null", MILLIS], ["null", MILLIS, "string"]),
    ({}, MICROS),
    ({"type": "string", "logicalType": "uuid"}, "string"),
    ({"type": "long", "logicalType": "our-own"}, {"type": "long", "logicalType": "another"}),
]


@pytest.mark.parametrize(("writer", "reader"), EQUAL)
def test_the_same_meaning_is_no_conflict(writer: object, reader: object) -> None:
    """A logical type that only one schema has is the reader's decision."""
    assert logical_type_conflict(record(writer), record(reader)) is None


def test_a_renamed_field_is_compared_by_its_alias() -> None:
    """The reader's aliases name the writer's field."""
    reader = record(MICROS, "changed_at", aliases=["at"])
    assert logical_type_conflict(record(MILLIS), reader) == (
        "field changed_at is timestamp-millis, but timestamp-micros in the reader's schema"
    )


def test_types_that_are_used_by_name_are_compared() -> None:
    """A record may contain itself, and its type may be used before or after by its name."""

    def tree(of: object) -> dict[str, Any]:
        price = {"type": "fixed", "name": "shop.Price", "size": 8, **(of if isinstance(of, dict) else {})}
        fields = [
            {"name": "first", "type": price},
            {"name": "second", "type": "Price"},
            {"name": "below", "type": ["null", "shop.Tree"]},
        ]
        return {"type": "record", "name": "shop.Tree", "fields": fields}

    amount = {"logicalType": "decimal", "precision": 10}
    assert logical_type_conflict(tree({**amount, "scale": 2}), tree({**amount, "scale": 2})) is None
    assert logical_type_conflict(tree({**amount, "scale": 4}), tree({**amount, "scale": 2})) == (
        "field first is decimal of scale 4, but decimal of scale 2 in the reader's schema"
    )


def item(of: object, namespace: str) -> dict[str, Any]:
    """Return a record `Item` of a namespace."""
    return {"type": "record", "name": "Item", "namespace": namespace, "fields": [{"name": "at", "type": of}]}


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ([lambda of: item(of, "invoices")], "second.at"),
        ([lambda of: ["null", item(of, "invoices")]], "second.at"),
        ([lambda of: item(of, "invoices"), lambda _: "orders.Item"], "second.at"),
        (
            [
                lambda _: item("int", "invoices"),
                lambda _: "orders.Item",
                lambda of: {**item(of, "x"), "name": "y.Item"},
            ],
            "4.at",
        ),
    ],
)
def test_types_with_the_same_short_name_are_compared(more: list[Callable[[object], object]], path: str) -> None:
    """They are those of different namespaces."""

    def order(of: object) -> dict[str, Any]:
        types = [item(MILLIS, "orders"), *(make(of) for make in more)]
        names = ["first", "second", "3", "4"]
        fields = [{"name": name, "type": kind} for name, kind in zip(names, types, strict=False)]
        return {"type": "record", "name": "shop.Order", "fields": fields}

    assert logical_type_conflict(order(MILLIS), order(MILLIS)) is None
    assert logical_type_conflict(order(MILLIS), order(MICROS)) == (
        f"field {path} is timestamp-millis, but timestamp-micros in the reader's schema"
    )


def test_a_branch_of_a_union_is_found_by_its_whole_name() -> None:
    """Another branch has the same short name."""
    union = [item(MICROS, "invoices"), item(MILLIS, "orders")]
    assert logical_type_conflict(record(item(MILLIS, "orders")), record(union)) is None
    assert logical_type_conflict(record(item(MILLIS, "x")), record(union)) is not None


def test_a_branch_of_a_union_is_found_by_its_alias() -> None:
    """Avro takes the branch that has the writer's name as an alias, and not the first record."""
    other = {**item(MILLIS, "orders"), "name": "Other"}
    renamed = {**item(MICROS, "orders"), "name": "Line", "aliases": ["Item"]}
    assert logical_type_conflict(record(item(MILLIS, "orders")), record([other, renamed])) is not None


def test_arrays_without_bytes_are_found_beside_a_type_with_the_same_short_name() -> None:
    """The items are looked up in their namespace."""
    empty = {"type": "record", "name": "a.Item", "fields": []}
    fields = [
        {"name": "empty", "type": empty},
        {"name": "full", "type": item("int", "b")},
        {"name": "many", "type": {"type": "array", "items": "a.Item"}},
    ]
    assert _is_unbounded({"type": "record", "name": "shop.Order", "fields": fields})
    fields[2] = {"name": "many", "type": {"type": "array", "items": "b.Item"}}
    assert not _is_unbounded({"type": "record", "name": "shop.Order", "fields": fields})


def test_records_of_such_a_schema_are_bad() -> None:
    """The reason names the schema id, the field and both types."""
    written = '{"type": "record", "name": "Order", "fields": [{"name": "at", "type": %s}]}'
    schema = Schema(SchemaKind.AVRO, written % '{"type": "long", "logicalType": "timestamp-millis"}')
    assert _if_of_reader(7, schema, record(MICROS)) == (
        "schema id 7: field at is timestamp-millis, but timestamp-micros in the reader's schema"
    )
    assert _if_of_reader(7, schema, record(MILLIS)) is schema
