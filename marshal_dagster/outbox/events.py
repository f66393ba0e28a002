"""Outbox events for the rows of a claimed batch's result, written in the transaction that stores the result."""

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
_ADDRESS: Final = "inet"
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
"""SQL for the base type of each column, below its domains, and whether it is an array, a composite or a range."""


class OutgoingEvents:
    """An event in an outbox for each row of a batch's result. Use it as `companion` of a `PostgresSink`.

    The events of a range of offsets are written in the transaction that stores its rows. So they are written once, even
    if the range is delivered repeatedly. A new generation, which replaces rows, writes its events again.

    Example:
        ```python
        sink = PostgresSink(dsn, "delays", companion=OutgoingEvents("delays", key="flight"))
        ```
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
        """Configure the events.

        A column of type `bytea`, or of a domain over it, is published as it is. Any other column is published as
        PostgreSQL's text in UTF-8, with times in UTC and dates in ISO 8601. An array, a composite or a range cannot be
        a key or value: the batch then fails, and nothing is written.

        Args:
            topic: The topic to publish to.
            key: The column of the output with the event's key; by default events have no key.
            value: The column with the event's value; by default the whole row as JSON.
            outbox: The outbox's name.
            schema: The schema of the outbox's table.
            max_bytes: The largest size of key and value together, in bytes.

        Raises:
            ConfigurationError: A name is invalid, or `max_bytes` is out of range.
        """
        require_topic_name("topic", topic)
        self._topic, self._key, self._value = topic, key, value
        self._tables = tables_to_write(outbox, schema, max_bytes)
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"OutgoingEvents({self._topic!r}, key={self._key!r}, outbox={self._tables.name!r})"

    def check(self, connection: "Connection", columns: Sequence[str]) -> None:
        """Check that the outbox and the columns exist (`TransactionHook.check`).

        Args:
            connection: A connection to the sink's database.
            columns: The columns of the output.

        Raises:
            ConfigurationError: The outbox or a column does not exist, or the outbox has another version.
        """
        from psycopg import sql

        for field, name in (("key", self._key), ("value", self._value)):
            if name is not None and name not in columns:
                raise ConfigurationError(f"{field}: the output has no column {name!r}; it has {', '.join(columns)}")
        name = sql.Identifier(self._tables.schema, self._tables.name).as_string(connection)
        found = connection.execute("SELECT to_regclass(%s)", (name,)).fetchone()
        if found is None or found[0] is None:
            raise self._tables.missing()
        self._tables.registration(connection)
        self._tables.check_tables(connection)

    def write(self, connection: "Connection", columns: Sequence[str], ranges: Sequence[int]) -> None:
        """Write the events of these ranges (`TransactionHook.write`).

        Args:
            connection: The connection with the sink's transaction.
            columns: The columns of the output.
            ranges: The ids of the ranges whose rows are stored.

        Raises:
            SinkRejectedError: An event is too large, a column cannot be a key or value, or a trigger skips events.
        """
        from psycopg import sql

        key, value = self._contents(connection)
        # Rows of one message keep the order that they have in the result.
        names = [*(name for name in (_RANGE, *_IN_ORDER) if name in columns), "ctid"]
        order = [sql.SQL("r.") + identifier(name) for name in names]
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
                f"an event for topic {self._topic!r} has {largest} bytes, more than max_bytes={self._max_bytes}, so "
                "nothing was written; make events smaller, or raise max_bytes and the brokers' limit"
            )
        if written != made:
            raise SinkRejectedError(
                f"outbox {self._tables.name!r}: only {written} of {made} events could be written, because a trigger of "
                "the table skips rows. Nothing was written; remove the trigger"
            )

    def _contents(self, connection: "Connection") -> "tuple[Composable, Composable]":
        """Return the SQL of key and value for a row `r`. Raises `SinkRejectedError` for unsuitable column types."""
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
            f"{field}: column {column!r} has type {kind.name}, which cannot be a key or value, so nothing was written. "
            "Use a column of bytes, text, numbers or json, or omit `value` to publish the row as JSON"
        )
    named = sql.SQL("r.") + identifier(column)
    if kind.is_bytes:
        return sql.SQL("{}::bytea").format(named)
    if kind.name == _ADDRESS:  # a cast to text adds /32 to an address, which its output and its JSON do not have
        return sql.SQL("convert_to(abbrev({}::inet), 'UTF8')").format(named)
    return sql.SQL("convert_to({}::text, 'UTF8')").format(named)
