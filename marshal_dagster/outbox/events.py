"""Events written into an outbox with the result of a claimed batch, in the transaction that takes its ranges."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple

from marshal_dagster._internal.postgres import DEFAULT_SCHEMA, identifier
from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.outbox.schema import DEFAULT_MAX_BYTES, DEFAULT_NAME, tables_to_write

if TYPE_CHECKING:
    from psycopg.sql import Composable

    from marshal_dagster._internal.postgres import Connection

_RANGE: Final = "marshal_range"
_IN_ORDER: Final = ("kafka_partition", "kafka_offset")

_WRITE: Final[LiteralString] = """
    WITH made AS (
        SELECT {key} AS key, {value} AS value, row_number() OVER (ORDER BY {order}) AS place
        FROM pg_temp.marshal_rows AS r WHERE r.marshal_range = ANY(%(ranges)s)
    ), written AS (
        INSERT INTO {rows} (topic, key, value) SELECT %(topic)s, key, value FROM made ORDER BY place RETURNING 1
    )
    SELECT max(coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0)), count(*),
        (SELECT count(*) FROM written)
    FROM made
    """

_KINDS: Final[LiteralString] = """
    WITH RECURSIVE kinds AS (
        SELECT attname AS name, atttypid AS kind FROM pg_attribute
        WHERE attrelid = 'pg_temp.marshal_rows'::regclass AND attnum > 0
        UNION ALL
        SELECT kinds.name, typbasetype FROM kinds JOIN pg_type ON oid = kind WHERE typtype = 'd'
    )
    SELECT name, format_type(kind, NULL), kind = 'bytea'::regtype, typcategory IN ('A', 'C', 'P', 'R')
    FROM kinds JOIN pg_type ON oid = kind WHERE typtype <> 'd'
    """
"""Selects the base type of each column, below its domains, and whether it is an array, a composite or a range."""


class OutgoingEvents:
    """An event for each row of a batch's result; given to a `PostgresSink` as its `companion`.

    The events of a range are stashed when its rows are taken: once, however often the range is delivered. A new
    generation, which replaces rows, stashes events anew.
    """

    def __init__(
        self,
        topic: str,
        *,
        key: str | None = None,
        value: str | None = None,
        outbox: str = DEFAULT_NAME,
        schema: str = DEFAULT_SCHEMA,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        """Publish to `topic`; `key` and `value` are columns of the output.

        Without `value` the whole row is the event, as JSON under the output's column names. A column of bytes, or of a
        domain over them, is published as it is; any other as PostgreSQL's text in UTF-8, with times in UTC and dates by
        ISO 8601. An array, a composite or a range cannot be a key or a value, and is refused when it is written.
        Raises `ConfigurationError` for invalid names and sizes.
        """
        require_topic_name("topic", topic)
        self._topic, self._key, self._value = topic, key, value
        self._tables = tables_to_write(outbox, schema, max_bytes)
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"OutgoingEvents({self._topic!r}, key={self._key!r}, outbox={self._tables.name!r})"

    def check(self, connection: "Connection", columns: Sequence[str]) -> None:
        """Make sure that the outbox and the columns are there (`TransactionHook.check`)."""
        from psycopg import sql

        for field, name in (("key", self._key), ("value", self._value)):
            if name is not None and name not in columns:
                raise ConfigurationError(f"{field}: the output has no column {name!r}; it has {', '.join(columns)}")
        name = sql.Identifier(self._tables.schema, self._tables.name).as_string(connection)
        found = connection.execute("SELECT to_regclass(%s)", (name,)).fetchone()
        if found is None or found[0] is None:
            raise self._tables.missing()
        self._tables.registration(connection)
        self._tables.check_rows_are_kept(connection)

    def write(self, connection: "Connection", columns: Sequence[str], ranges: Sequence[int]) -> None:
        """Stash the events of these ranges (`TransactionHook.write`)."""
        from psycopg import sql

        key, value = self._contents(connection)
        order = [sql.SQL("r.") + identifier(name) for name in (_RANGE, *_IN_ORDER) if name in columns]
        statement = self._tables.named(
            _WRITE,
            key=key,
            value=value,
            order=sql.SQL(", ").join(order),
        )
        given: dict[str, Any] = {"ranges": list(ranges), "topic": self._topic}
        ((largest, made, written),) = connection.execute(statement, given).fetchall()
        if (largest or 0) > self._max_bytes:
            raise SinkRejectedError(
                f"an event for topic {self._topic!r} has {largest} bytes, more than max_bytes={self._max_bytes}: "
                "nothing was written"
            )
        if written != made:
            raise SinkRejectedError(
                f"outbox {self._tables.name!r}: {made} events were to be written, but {written} were, so a trigger of "
                "the table skips rows. Nothing was written; remove the trigger"
            )

    def _contents(self, connection: "Connection") -> "tuple[Composable, Composable]":
        """Return the SQL of key and value for a row `r`. Raises `SinkRejectedError` for other types of columns."""
        from psycopg import sql

        kinds = {name: _Kind(*kind) for name, *kind in connection.execute(_KINDS)}
        key = None if self._key is None else _as_bytes("key", self._key, kinds)
        value = None if self._value is None else _as_bytes("value", self._value, kinds)
        whole_row = sql.SQL("convert_to((to_jsonb(r) - 'marshal_range')::text, 'UTF8')")
        return key or sql.SQL("NULL::bytea"), value or whole_row


class _Kind(NamedTuple):
    """A column's type."""

    name: str
    is_bytes: bool
    is_of_several: bool


def _as_bytes(field: str, column: str, kinds: Mapping[str, _Kind]) -> "Composable":
    from psycopg import sql

    kind = kinds[column]
    if kind.is_of_several:
        raise SinkRejectedError(
            f"{field}: column {column!r} is of type {kind.name}, which cannot be a key or value: nothing was written. "
            "Name a column of bytes, text, numbers or json, or leave `value` out to publish the row as JSON"
        )
    named = sql.SQL("r.") + identifier(column)
    if kind.is_bytes:
        return sql.SQL("{}::bytea").format(named)
    return sql.SQL("convert_to({}::text, 'UTF8')").format(named)
