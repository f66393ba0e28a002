"""Rows written into an outbox, in the transaction of whoever writes them."""

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

_INSERT: Final[LiteralString] = "INSERT INTO {rows} (topic, key, value, header_keys, header_values) "

Text = str | bytes | None


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """What is to be published; text is written as UTF-8, a value of None is a tombstone."""

    topic: str
    value: Text
    key: Text = None
    headers: Mapping[str, Text] | Sequence[tuple[str, Text]] = field(default=())


class Outbox:
    """Writes records into an outbox. Needs no connection of its own and keeps nothing: one may serve all threads."""

    def __init__(
        self, name: str = DEFAULT_NAME, *, schema: str = DEFAULT_SCHEMA, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        """Name the outbox. `max_bytes` is what key, value and headers of a record may have together.

        Raises `ConfigurationError` for values that cannot be.
        """
        self._tables = tables_to_write(name, schema, max_bytes)
        self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"Outbox({self._tables.name!r}, schema={self._tables.schema!r})"

    def stash(self, connection: "psycopg.Connection[Any]", records: Iterable[OutboxRecord]) -> int:
        """Write records, in this order, in the present transaction of a psycopg connection; give how many.

        A connection in autocommit writes each thousand by itself: use a transaction. Raises `ConfigurationError`, with
        nothing of its thousand written, for a record that cannot be published; psycopg's errors.
        """
        count = 0
        with connection.cursor() as cursor:
            for rows in self._batches(records):
                cursor.executemany(self._statement(), rows)
                count += len(rows)
        return count

    async def stash_async(self, connection: "psycopg.AsyncConnection[Any]", records: Iterable[OutboxRecord]) -> int:
        """Write records as `stash` does, over an asynchronous psycopg connection."""
        count = 0
        async with connection.cursor() as cursor:
            for rows in self._batches(records):
                await cursor.executemany(self._statement(), rows)
                count += len(rows)
        return count

    def stash_sqlalchemy(self, session: "Session | SqlAlchemyConnection", records: Iterable[OutboxRecord]) -> int:
        """Write records as `stash` does, over SQLAlchemy 2 and psycopg.

        Of an `AsyncSession` use `await session.run_sync(lambda session: outbox.stash_sqlalchemy(session, records))`.
        """
        from sqlalchemy import ARRAY, LargeBinary, String, column, insert, table

        names = ("topic", "key", "value", "header_keys", "header_values")
        kinds: tuple[Any, ...] = (String(), LargeBinary(), LargeBinary(), ARRAY(String()), ARRAY(LargeBinary()))
        columns: list[Any] = [column(name, kind) for name, kind in zip(names, kinds, strict=True)]
        target = insert(table(self._tables.name, *columns, schema=self._tables.schema))
        count = 0
        for rows in self._batches(records):
            session.execute(target, [dict(zip(names, row, strict=True)) for row in rows])
            count += len(rows)
        return count

    def _statement(self) -> Any:  # noqa: ANN401 - psycopg's
        return self._tables.named(_INSERT + "VALUES (%s, %s, %s, %s, %s)")

    def _batches(self, records: Iterable[OutboxRecord]) -> Iterator[list[tuple[Any, ...]]]:
        if isinstance(records, OutboxRecord):
            raise ConfigurationError("records: one OutboxRecord; give several, such as [record]")
        rows = (self._row(record) for record in records)
        while batch := list(islice(rows, _ROWS_AT_ONCE)):
            yield batch

    def _row(self, record: OutboxRecord) -> tuple[Any, ...]:
        """Give a record's columns. Raises `ConfigurationError`."""
        if not isinstance(record, OutboxRecord):
            raise ConfigurationError(f"records: {type(record).__name__}; give objects of OutboxRecord")
        if not isinstance(record.topic, str):
            raise ConfigurationError(f"topic: {type(record.topic).__name__}; give text")
        require_topic_name("topic", record.topic)
        key, value = _bytes("key", record.key), _bytes("value", record.value)
        headers = _headers(record.headers)
        if any(name == ID_HEADER for name, _ in headers):
            raise ConfigurationError(f"headers: {ID_HEADER!r} is the harvester's own; leave it out")
        contents = [key, value, *(content for _, content in headers)]
        size = sum(len(content or b"") for content in contents) + sum(len(name.encode()) for name, _ in headers)
        if size > self._max_bytes:
            raise ConfigurationError(
                f"a record for topic {record.topic!r} has {size} bytes; {self._max_bytes} are allowed (max_bytes), and "
                "brokers take about a million by default"
            )
        if not headers:
            return record.topic, key, value, None, None
        return record.topic, key, value, [name for name, _ in headers], [content for _, content in headers]


def _headers(given: object) -> list[tuple[str, bytes | None]]:
    """Return headers as pairs. Raises `ConfigurationError`."""
    if isinstance(given, Mapping):
        given = given.items()
    if not isinstance(given, Iterable) or isinstance(given, str | bytes):
        raise ConfigurationError(f"headers: {type(given).__name__}; give a mapping, or pairs of name and content")
    headers = []
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:  # noqa: PLR2004 - a pair has two
            raise ConfigurationError(f"headers: {type(pair).__name__}; give pairs of name and content")
        name, content = pair
        if not isinstance(name, str):
            raise ConfigurationError(f"headers: a name is of type {type(name).__name__}; give text")
        if "\0" in name:
            raise ConfigurationError(f"headers: the name {name!r} has a NUL, which PostgreSQL's text cannot have")
        _encoded("headers: the name", name)
        headers.append((name, _bytes(f"header {name!r}", content)))
    return headers


def _bytes(what: str, given: object) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return _encoded(what, given)
    raise ConfigurationError(f"{what}: {type(given).__name__}; give bytes, text or None")


def _encoded(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{what}: character {error.start} is half of a surrogate pair, which UTF-8 cannot encode; give bytes, "
            "or text without it"
        ) from None
