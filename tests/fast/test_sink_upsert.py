"""Upserts of database sinks, with the dialect of the documentation, which needs no server."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks.conformance.target import ahead, part
from marshal_dagster.sinks.delta.merge import check_types
from marshal_dagster.sinks.upsert_keys import Keys
from sqlite_dialect import SqliteDialectSink
from tests.upserts import KeyedRow, UpsertTarget, check_history, keyed_frame


class SqliteUpserts(UpsertTarget):
    """A table in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "output.db")
        self.create()

    def sink(self, reached: Callable[[str], None] | None = None, **options: Any) -> SqliteDialectSink:  # noqa: ANN401
        """Open it like another process."""
        sink = SqliteDialectSink(self.path, "orders", **options)
        if reached is not None:
            sink._reached = reached  # type: ignore[method-assign,assignment]
        return sink

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement."""
        with closing(sqlite3.connect(self.path, isolation_level=None)) as database:
            return database.execute(statement).fetchall()

    def rows(self) -> list[KeyedRow]:
        """Read all rows of the table."""
        return self.execute('SELECT kafka_partition, kafka_offset, "key", value, version FROM orders ORDER BY "key"')


@pytest.fixture
def table(tmp_path: Path) -> SqliteUpserts:
    """An empty table."""
    return SqliteUpserts(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("in_any_order", [False, True], ids=["in order", "in any order"])
@pytest.mark.parametrize("has_versions", [False, True], ids=["by offset", "by version"])
@pytest.mark.parametrize("seed", range(5))
def test_the_table_holds_the_newest_rows(
    table: SqliteUpserts, seed: int, has_versions: bool, in_any_order: bool
) -> None:
    """After each batch of a random history, with deaths and replays, the table is that of the model."""
    check_history(table, seed, has_versions=has_versions, in_any_order=in_any_order)


A, B = part(0, 0, 10), part(1, 0, 10)


def refused(table: SqliteUpserts, rows: list[KeyedRow], match: str, *ranges: Any, **options: Any) -> None:  # noqa: ANN401
    """Check that a batch is refused and changes nothing."""
    before = table.rows()
    with pytest.raises(SinkRejectedError, match=match) as raised:
        table.write(rows, *(ranges or (A, B)), **options)
    assert "\n" not in str(raised.value)
    assert table.rows() == before


def test_keys_that_cross_partitions_are_refused_without_an_order(table: SqliteUpserts) -> None:
    """Within a batch, and beside a row that another partition has written before."""
    one, other = (0, 3, 1, "a", 1), (1, 2, 1, "b", 2)
    refused(table, [one, other], "offset 3: partitions 0 and 1 both have rows of its key.*order_by")
    table.write([one], A)
    refused(table, [other], "partition 1, offset 2: the stored row of its key is from partition 0 of topic 't'", B)
    refused(table, [(0, 3, 1, "c", 1)], "from partition 0 of topic 't'", part(0, 0, 10, topic="u", topic_id="u" * 22))


def test_an_order_decides_between_partitions(table: SqliteUpserts) -> None:
    """A smaller value does not replace the stored row. Of equal values the greater partition's is kept."""
    table.write([(1, 2, 1, "b", 2)], B, order_by="version")
    table.write([(0, 3, 1, "smaller", 1), (0, 4, 2, "new", 1)], A, order_by="version")
    table.write([(0, 13, 1, "equal", 2)], part(0, 10, 20), order_by="version")
    assert [row[3] for row in table.rows()] == ["b", "new"]
    table.write([(0, 23, 1, "greater", 3)], part(0, 20, 30), order_by="version")
    assert [row[3] for row in table.rows()] == ["greater", "new"]


def test_rows_without_an_order_or_a_key_are_refused(table: SqliteUpserts) -> None:
    """The error names the message."""
    refused(table, [(0, 5, None, "a", 1)], "partition 0, offset 5: one of key is null")
    refused(table, [(0, 5, 1, "a", None)], "offset 5: one of key, version is null", order_by="version")
    refused(table, [(0, 5, 1, "a", 1), (0, 5, 1, "b", 1)], "offset 5: the message has two rows of this key")
    refused(table, [(0, 5, 1, "a", 1), (0, 5, 1, "b", 1)], "two rows of this key", order_by="version")
    refused(table, [(0, None, 1, "a", 1)], "column 'offset' is null")
    table.execute("INSERT INTO orders VALUES (0, 0, 0, 7, 'of another writer', 0)")
    refused(table, [(0, 5, 7, "a", 1)], "the stored row of its key was not written by this sink")


def test_a_message_with_two_versions_of_a_key_keeps_the_greater(table: SqliteUpserts) -> None:
    """The order column decides between rows of one message too."""
    table.write([(0, 5, 1, "a", 1), (0, 5, 1, "b", 2)], A, order_by="version")
    assert table.rows() == [(0, 5, 1, "b", 2)]


def test_another_unique_index_is_named(table: SqliteUpserts) -> None:
    """Nothing is written."""
    table.execute("CREATE UNIQUE INDEX other ON orders (value)")
    refused(table, [(0, 5, 1, "a", 1), (0, 6, 2, "a", 1)], "UNIQUE constraint failed")


def test_a_generation_that_begins_anew_rebuilds_the_table(table: SqliteUpserts) -> None:
    """Rows that the new code does not make are gone at its end, and rows of earlier offsets are there again."""
    table.write([(0, 1, 1, "first", 0), (0, 7, 1, "second", 0), (0, 8, 2, "wrong", 0)], A)
    table.write([(0, 1, 1, "again", 0)], part(0, 0, 5, generation=1, epoch=20))
    table.write([(0, 9, 3, "new", 0)], part(0, 5, 10, generation=1, epoch=20))
    assert [row[3] for row in table.rows()] == ["again", "new"]


def test_a_generation_that_cannot_be_exact_is_refused(table: SqliteUpserts) -> None:
    """It begins in the middle, has an order between partitions, or its ranges come in any order."""
    table.write([(0, 1, 1, "first", 0), (0, 7, 1, "second", 0)], part(0, 0, 10, in_any_order=True))
    newer = part(0, 5, 10, generation=1, epoch=20)
    match = "have replaced rows from offset 0 on, which this generation does not read again"
    refused(table, [], match, newer)
    assert "Reset the position to 0" in (table.upserting().can_replace([newer]) or "")
    refused(table, [], "cannot bring back", ahead(0, 0, 10, generation=1, epoch=20))
    whole = part(0, 0, 10, generation=1, epoch=20)
    refused(table, [], "cannot bring back", whole, order_by="version")
    assert table.upserting().can_replace([whole]) is None
    assert table.write([], part(0, 10, 12, generation=1, epoch=20)).taken


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "merge"}, "mode: 'merge'; give append or upsert"),
        ({"keys": ["key"]}, "belong to mode='upsert'"),
        ({"mode": "upsert"}, "keys: .* needs a list"),
        ({"mode": "upsert", "keys": "key"}, "keys: 'key'"),
        ({"mode": "upsert", "keys": ["key", "key"]}, "each one once"),
        ({"mode": "upsert", "keys": ["key"], "order_by": "key"}, "order_by: 'key' is one of the keys"),
        ({"mode": "upsert", "keys": ["key"], "order_by": "offset"}, "order_by: 'offset' is no order"),
        ({"mode": "upsert", "keys": ["key"], "shared_by_groups": True}, "cannot be combined with shared_by_groups"),
    ],
)
def test_options_that_contradict_each_other(table: SqliteUpserts, options: dict[str, Any], match: str) -> None:
    """The error is one line."""
    with pytest.raises(ConfigurationError, match=match):
        table.sink(**options)


def test_columns_and_the_index_are_checked_before_the_frame_is_read(table: SqliteUpserts) -> None:
    """The error names what is missing, and the statement that creates the index."""
    unread = keyed_frame(())
    object.__setattr__(unread, "given", None)

    def fails(match: str, keys: list[str], frame: Any = unread, **options: Any) -> None:  # noqa: ANN401
        with pytest.raises(ConfigurationError, match=match):
            table.sink(mode="upsert", keys=keys, **options).write(frame, [A], dict)

    fails("lacks the columns id,", ["id"])
    fails("order_by: column 'value' has type string", ["key"], order_by="value")
    fails(
        r'no unique index on \(value\).*Run CREATE UNIQUE INDEX "marshal_keys_\w+" ON .*"orders" \("value"\)', ["value"]
    )
    fails(r"no unique index on \(key, value\)", ["key", "value"])


def test_a_key_of_a_delta_table_is_not_filled_up_with_spaces() -> None:
    """Spark shows the types `char` and `varchar` as strings."""

    def stored(declared: str) -> t.StructType:
        metadata = {"__CHAR_VARCHAR_TYPE_STRING": declared}
        return t.StructType([t.StructField("Name", t.StringType(), metadata=metadata)])

    result = t.StructType([t.StructField("name", t.StringType())])
    check_types("table t", result, stored("varchar(5)"), Keys(["name"], None))
    with pytest.raises(ConfigurationError, match="key name has type char"):
        check_types("table t", result, stored("char(5)"), Keys(["name"], None))
