"""What is in an outbox, looked at and looked after by people."""

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
    """How an outbox stands: rows that wait, the age of the oldest in seconds, rows set aside, and who harvests."""

    registration: OutboxRegistration
    rows: int
    oldest_age_s: float | None
    parked: int
    led_since: datetime | None


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """A row that is set aside; `size` is its value's, in bytes."""

    id: int
    topic: str
    key: bytes | None
    size: int
    reason: str
    parked_at: datetime


class OutboxInspector(OutboxConnection):
    """Questions about an outbox over one connection, made when it is needed; for one thread."""

    def status(self) -> OutboxStatus:
        """Count what is there. Raises, as all here, `ConfigurationError` and `UnavailableError`."""
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
        """Give the newest row that waits, None where none does."""
        with self._asking() as connection:
            found = connection.execute(self._tables.named("SELECT max(id) FROM {rows}"), ()).fetchone()
        return None if found is None else found[0]

    def is_empty_up_to(self, last: int) -> bool:
        """Tell whether no row up to `last` waits."""
        with self._asking() as connection:
            statement = self._tables.named("SELECT EXISTS (SELECT FROM {rows} WHERE id <= %s)")
            found = connection.execute(statement, (last,)).fetchone()
        return found is not None and not found[0]

    def parked(self, limit: int = 100, ids: Sequence[int] | None = None) -> list[ParkedRow]:
        """Give rows that are set aside, of these ids or any, the oldest first."""
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
        """Put rows that are set aside back, by id, or all; give those that were there.

        They come after what was published of their keys meanwhile.
        """
        with self._asking() as connection:
            found = connection.execute(self._tables.named(_BACK), (list(ids or ()), ids is None)).fetchall()
            lost = sum(not is_back for _, is_back in found)
            if lost:
                raise self._tables.hindered(
                    f"{lost} of {len(found)} rows that are put back", "skips them, and they would be lost"
                )
            return [number for number, _ in found]

    def drop(self, ids: Sequence[int]) -> list[int]:
        """Delete rows that are set aside, by id; give those that were there."""
        with self._asking() as connection:
            found = connection.execute(
                self._tables.named("DELETE FROM {parked} WHERE id = ANY(%s) RETURNING id"), (list(ids),)
            )
            return sorted(number for (number,) in found)

    @contextmanager
    def _asking(self) -> "Iterator[Connection]":
        """Yield the connection for one transaction."""
        from psycopg.pq import TransactionStatus

        with self._using() as connection:
            if connection.info.transaction_status == TransactionStatus.IDLE:
                set_for_transaction(connection)
            yield connection
            connection.commit()
