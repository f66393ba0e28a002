"""Writing rows into an outbox, in the database transaction of the caller."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, LiteralString

from marshal_dagster._internal.postgres import DEFAULT_SCHEMA
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.topic_names import require_topic_name
from marshal_dagster.outbox.interfaces import ID_HEADER
from marshal_dagster.outbox.schema import DEFAULT_MAX_BYTES, DEFAULT_NAME, tables_to_write

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy.engine import Connection as SqlAlchemyConnection
    from sqlalchemy.orm import Session

_ROWS_AT_ONCE: Final = 1_000
_UNKNOWN: Final = -1
"""The row count of a driver that does not report one."""

_COLUMNS: Final = ("topic", "key", "value", "header_keys", "header_values")
_NULL: Final = "-"
_INSERT: Final[LiteralString] = """
    INSERT INTO {rows} (topic, key, value, header_keys, header_values)
    SELECT {topic}::text, {key}::bytea, {value}::bytea, {header_keys}::text[],
        (SELECT array_agg(CASE WHEN h.hex <> '-' THEN decode(h.hex, 'hex') END ORDER BY h.place)
        FROM unnest({header_values}::text[]) WITH ORDINALITY AS h (hex, place))
    """
"""SQL that writes a row. The headers' contents are hexadecimal, and null is `-`.

How an array of bytes would be read depends on settings of the caller's session: `array_nulls`, and
`standard_conforming_strings`.
"""

Text = str | bytes | None
"""The content of a key, value or header. Text is written as UTF-8."""


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """A record to publish to Kafka. Text is written as UTF-8.

    Example:
        ```python
        record = OutboxRecord("orders.paid", '{"order": 17}', key="17", headers={"source": "shop"})
        ```
    """

    topic: str
    """The topic to publish to. It must exist."""
    value: Text
    """The value; None is a tombstone, which deletes the key's record from a compacted topic."""
    key: Text = None
    """The key. Records with the same topic and key are published in order."""
    headers: Mapping[str, Text] | Sequence[tuple[str, Text]] = field(default=())
    """The headers, as a mapping or as pairs of name and content."""


class Outbox:
    """A writer of records into an outbox, in a transaction of yours. Thread-safe: it has no connection and no state.

    Example:
        ```python
        outbox = Outbox()
        with psycopg.connect(dsn) as connection:
            connection.execute("UPDATE orders SET state = 'paid' WHERE id = 17")
            outbox.stash(connection, [OutboxRecord("orders.paid", '{"order": 17}', key="17")])
        ```
    """

    def __init__(
        self, name: str = DEFAULT_NAME, *, schema: str = DEFAULT_SCHEMA, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        """Name the outbox.

        Args:
            name: The outbox's name.
            schema: The schema of its table.
            max_bytes: The largest size of key, value and headers of a record together, in bytes.

        Raises:
            ConfigurationError: A name is invalid, or `max_bytes` is out of range.
        """
        self._tables = tables_to_write(name, schema, max_bytes)
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"Outbox({self._tables.name!r}, schema={self._tables.schema!r})"

    def stash(self, connection: "psycopg.Connection[Any]", records: Iterable[OutboxRecord]) -> int:
        """Write records, in this order, in the current transaction of a psycopg connection.

        Do not use autocommit mode: each batch of 1,000 records is then committed separately.

        Args:
            connection: A connection of psycopg 3.
            records: The records to publish.

        Returns:
            The number of records written.

        Raises:
            ConfigurationError: A record cannot be published; it and the other records of its thousand are not written.
                Or a trigger of the table skips records: then roll the transaction back.
            psycopg.Error: The database refused the rows.
        """
        count = 0
        with connection.cursor() as cursor:
            for rows in self._batches(records):
                cursor.executemany(self._statement(), rows)
                self._check_written(len(rows), cursor.rowcount, connection)
                count += len(rows)
        return count

    async def stash_async(self, connection: "psycopg.AsyncConnection[Any]", records: Iterable[OutboxRecord]) -> int:
        """Write records as `stash` does, over an asynchronous psycopg connection.

        Args:
            connection: An asynchronous connection of psycopg 3.
            records: The records to publish.

        Returns:
            The number of records written.

        Raises:
            ConfigurationError: A record cannot be published; it and the other records of its thousand are not written.
                Or a trigger of the table skips records: then roll the transaction back.
            psycopg.Error: The database refused the rows.
        """
        count = 0
        async with connection.cursor() as cursor:
            for rows in self._batches(records):
                await cursor.executemany(self._statement(), rows)
                self._check_written(len(rows), cursor.rowcount, connection)
                count += len(rows)
        return count

    def stash_sqlalchemy(self, session: "Session | SqlAlchemyConnection", records: Iterable[OutboxRecord]) -> int:
        """Write records as `stash` does, over SQLAlchemy 2 with psycopg as its driver.

        With an `AsyncSession`, call
        `await session.run_sync(lambda session: outbox.stash_sqlalchemy(session, records))`.

        Args:
            session: A session or connection of SQLAlchemy 2.
            records: The records to publish.

        Returns:
            The number of records written.

        Raises:
            ConfigurationError: A record cannot be published; it and the other records of its thousand are not written.
                Or a trigger of the table skips records: then roll the transaction back.
            sqlalchemy.exc.SQLAlchemyError: The database refused the rows.
        """
        from sqlalchemy import text

        statement = text(self._sqlalchemy_text())
        count = 0
        for rows in self._batches(records):
            given = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
            result = session.execute(statement, given, execution_options={"preserve_rowcount": True})
            self._check_written(len(rows), getattr(result, "rowcount", _UNKNOWN))
            count += len(rows)
        return count

    def _statement(self) -> Any:  # noqa: ANN401 - psycopg's
        from psycopg import sql

        return self._tables.named(_INSERT, **dict.fromkeys(_COLUMNS, sql.Placeholder()))

    def _sqlalchemy_text(self) -> str:
        """Return the statement with SQLAlchemy's placeholders; SQLAlchemy itself doubles percent signs."""
        from psycopg import sql

        rows = sql.Identifier(self._tables.schema, self._tables.name).as_string(None).replace(":", "\\:")
        return _INSERT.replace("::", "\\:\\:").format(rows=rows, **{name: f":{name}" for name in _COLUMNS})

    def _check_written(
        self,
        wanted: int,
        written: int,
        connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any] | None" = None,
    ) -> None:
        """Raise `ConfigurationError` if fewer rows were written than wanted; pass if the number is not known yet."""
        from psycopg.pq import PipelineStatus

        is_known = connection is None or connection.info.pipeline_status is PipelineStatus.OFF
        if is_known and _UNKNOWN < written < wanted:
            raise ConfigurationError(
                f"outbox {self._tables.name!r}: {wanted - written} of {wanted} records were not written, because a "
                "trigger or rule of its table skips rows. Roll this transaction back, and remove the trigger or rule"
            )

    def _batches(self, records: Iterable[OutboxRecord]) -> Iterator[list[tuple[Any, ...]]]:
        if isinstance(records, OutboxRecord):
            raise ConfigurationError(
                "records is a single OutboxRecord; it must be a sequence of them, such as [record]"
            )
        rows = (self._row(record) for record in records)
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            yield batch

    def _row(self, record: OutboxRecord) -> tuple[Any, ...]:
        """Return a record's columns. Raises `ConfigurationError`."""
        if not isinstance(record, OutboxRecord):
            raise ConfigurationError(
                f"records has an entry of type {type(record).__name__}; each must be an OutboxRecord"
            )
        if not isinstance(record.topic, str):
            raise ConfigurationError(f"topic is of type {type(record.topic).__name__}; it must be text")
        require_topic_name("topic", record.topic)
        key, value = _bytes("key", record.key), _bytes("value", record.value)
        headers = _headers(record.headers)
        if any(name == ID_HEADER for name, _ in headers):
            raise ConfigurationError(f"headers: {ID_HEADER!r} is reserved for the harvester; remove it")
        contents = [key, value, *(content for _, content in headers)]
        size = sum(len(content or b"") for content in contents) + sum(len(name.encode()) for name, _ in headers)
        if size > self._max_bytes:
            raise ConfigurationError(
                f"a record for topic {record.topic!r} has {size} bytes, more than max_bytes={self._max_bytes}; make it "
                "smaller, or raise max_bytes and the brokers' limit (about a million bytes by default)"
            )
        if not headers:
            return record.topic, key, value, None, None
        contents_hex = [_NULL if content is None else content.hex() for _, content in headers]
        return record.topic, key, value, [name for name, _ in headers], contents_hex


def _headers(given: object) -> list[tuple[str, bytes | None]]:
    """Return headers as pairs. Raises `ConfigurationError`."""
    if isinstance(given, Mapping):
        given = given.items()
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise ConfigurationError(
            f"headers is of type {type(given).__name__}; it must be a mapping, or pairs of name and content"
        )
    headers = []
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004 - a pair has two
            raise ConfigurationError(
                f"headers has an entry of type {type(pair).__name__}; each must be a pair of name and content"
            )
        name, content = pair
        if not isinstance(name, str):
            raise ConfigurationError(f"headers has a name of type {type(name).__name__}; it must be text")
        if "\0" in name:
            raise ConfigurationError(
                f"headers: the name {name!r} has a NUL character, which text in PostgreSQL cannot contain; remove it"
            )
        _encoded("headers: the name", name)
        headers.append((name, _bytes(f"header {name!r}", content)))
    return headers


def _bytes(what: str, given: object) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return _encoded(what, given)
    raise ConfigurationError(f"{what} is of type {type(given).__name__}; it must be bytes, text or None")


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{what}: character {error.start} is half of a surrogate pair, which UTF-8 cannot encode; give bytes, "
            "or text without it"
        ) from None
