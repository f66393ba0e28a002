"""The content of an outbox, for operators: the number of rows that wait, and the rows that are set aside."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, LiteralString

from marshal_dagster._internal.postgres import set_for_transaction
from marshal_dagster.outbox.schema import OutboxConnection, OutboxRegistration

if TYPE_CHECKING:
    from marshal_dagster._internal.postgres import Connection

_BACK: Final[LiteralString] = """
    WITH gone AS (DELETE FROM {parked} WHERE id = ANY(%s) OR %s RETURNING *),
    back AS (
        INSERT INTO {rows} (id, create_time, topic, key, value, header_keys, header_values)
        SELECT id, create_time, topic, key, value, header_keys, header_values FROM gone ORDER BY id
        RETURNING id
    )
    SELECT id, id IN (SELECT id FROM back) FROM gone ORDER BY id
    """


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The status of an outbox, as `OutboxResource.status` returns it.

    Example:
        ```python
        status = outbox.status()
        print(status.rows, status.oldest_age_s, status.parked)
        ```
    """

    registration: OutboxRegistration
    """The outbox's entry in the registry, with the last harvester."""
    rows: int
    """The number of rows that wait to be published."""
    oldest_age_s: float | None
    """The age of the row with the lowest id among them, in seconds; None if no row waits."""
    parked: int
    """The number of rows that are set aside because they cannot be published."""
    led_since: datetime | None
    """When the last harvesting session started; None if there was none."""


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """A row that is set aside: the harvester could not publish it, and moved it to a second table.

    `OutboxInspector.parked` returns these rows.
    """

    id: int
    """The row's id."""
    topic: str
    """The topic that it was to be published to."""
    key: bytes | None
    """Its key; None if it has none."""
    size: int
    """The size of its value in bytes."""
    reason: str
    """Why it could not be published."""
    parked_at: datetime
    """When it was set aside."""


class OutboxInspector(OutboxConnection):
    """Reads the status of an outbox, and lists, retries and deletes rows that are set aside. Not thread-safe.

    Each method raises `ConfigurationError` or `UnavailableError` if the database refuses or does not answer.
    """

    def status(self) -> OutboxStatus:
        """Count the rows of the outbox."""
        with self._asking() as connection:
            registration = self._tables.registration(connection)
            found = connection.execute(
                self._tables.named(
                    "SELECT (SELECT count(*) FROM {rows}), "
                    "(SELECT extract(epoch FROM now() - create_time)::float8 FROM {rows} ORDER BY id LIMIT 1), "
                    "(SELECT count(*) FROM {parked}), (SELECT led_since FROM {registry} WHERE name = %s)"
                ),
                (self._tables.name,),
            ).fetchone()
        rows, age_s, parked, led_since = found or (0, None, 0, None)
        return OutboxStatus(registration, rows, age_s, parked, led_since)

    def last_id(self) -> int | None:
        """Return the largest id of the waiting rows; None if no row waits."""
        with self._asking() as connection:
            found = connection.execute(self._tables.named("SELECT max(id) FROM {rows}"), ()).fetchone()
        return None if found is None else found[0]

    def first_id(self, last: int) -> int | None:
        """Return the smallest id of the waiting rows with an id up to `last`; None if there is none."""
        with self._asking() as connection:
            statement = self._tables.named("SELECT id FROM {rows} WHERE id <= %s ORDER BY id LIMIT 1")
            found = connection.execute(statement, (last,)).fetchone()
        return None if found is None else found[0]

    def parked(self, limit: int = 100, ids: Sequence[int] | None = None) -> list[ParkedRow]:
        """Return at most `limit` rows that are set aside, sorted by id; with `ids`, only those."""
        with self._asking() as connection:
            found = connection.execute(
                self._tables.named(
                    "SELECT id, topic, key, coalesce(octet_length(value), 0), reason, parked_at FROM {parked} "
                    "WHERE id = ANY(%s) OR %s ORDER BY id LIMIT %s"
                ),
                (list(ids or ()), ids is None, limit),
            )
            return [ParkedRow(*row) for row in found]

    def retry(self, ids: Sequence[int] | None) -> list[int]:
        """Move rows that are set aside back into the outbox, those with `ids` or all (None); return their ids.

        Later rows of their keys may have been published in the meantime, so the order of a key can be lost.
        """
        with self._asking() as connection:
            found = connection.execute(self._tables.named(_BACK), (list(ids or ()), ids is None)).fetchall()
            lost = sum(not is_back for _, is_back in found)
            if lost:
                raise self._tables.hindered(
                    f"{lost} of the {len(found)} rows to retry would be lost", "skips the insert"
                )
            return [number for number, _ in found]

    def drop(self, ids: Sequence[int]) -> list[int]:
        """Delete rows that are set aside, by id; return the ids of deleted rows."""
        with self._asking() as connection:
            found = connection.execute(
                self._tables.named("DELETE FROM {parked} WHERE id = ANY(%s) RETURNING id"), (list(ids),)
            )
            return sorted(number for (number,) in found)

    @contextmanager
    def _asking(self) -> "Iterator[Connection]":
        """Yield the connection for one transaction."""
        with self._using() as connection:
            from psycopg.pq import TransactionStatus

            if connection.info.transaction_status == TransactionStatus.IDLE:
                set_for_transaction(connection)
            yield connection
            connection.commit()
