"""The content of an outbox, for operators: the number of rows that wait, and the rows that are set aside."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, LiteralString

from marshal_dagster._internal.postgres import DEFAULT_SCHEMA, set_for_transaction
from marshal_dagster.errors import MarshalError
from marshal_dagster.outbox.schema import DEFAULT_NAME, OutboxConnection, OutboxRegistration

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


_BLOCKING: Final[LiteralString] = """
    WITH locks AS (
        SELECT pid, mode, granted AND locktype = 'relation' AS holds_table FROM pg_catalog.pg_locks
        WHERE database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
        AND relation = pg_catalog.to_regclass(%(rows)s)
    )
    SELECT a.pid, a.usename::text, a.application_name, a.state, extract(epoch FROM now() - a.xact_start)::float8
    FROM pg_catalog.pg_stat_activity AS a
    WHERE a.pid <> pg_catalog.pg_backend_pid() AND (
        a.pid IN (SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(pid)) FROM locks)
        OR a.pid IN (SELECT pid FROM locks WHERE holds_table AND mode <> ALL(%(harmless)s))
    ) AND pg_catalog.cardinality(pg_catalog.pg_blocking_pids(a.pid)) = 0
    AND coalesce(a.xact_start < now() - interval '1 second', true)
    ORDER BY a.xact_start, a.pid LIMIT 10
    """
"""Selects the transactions that a session with a lock of the rows waits for, or that hold a lock of another kind.

A harvester waits only from time to time, so the second condition is needed too. A session that waits itself is left
out: what it waits for is selected.
"""
_HARMLESS_LOCKS: Final = ("AccessShareLock", "RowExclusiveLock", "ShareUpdateExclusiveLock", "SIReadLock")
"""The locks of readers, of writers that insert rows, of VACUUM, and of serializable transactions."""
_MOST_SHOWN: Final = 10
_LOCK_TIMEOUT: Final = "5s"
"""How long a statement waits for a lock. A transaction that locks the whole table would otherwise block operators."""


@dataclass(frozen=True, slots=True)
class BlockingTransaction:
    """An open transaction that a harvester waits for, as far as this user may see it.

    `OutboxInspector.blocking` returns these.
    """

    pid: int
    """The id of its server process, for `pg_terminate_backend`."""
    user: str | None
    """Its user."""
    application: str | None
    """The name that its program gave."""
    state: str | None
    """What it does, such as `idle in transaction`; None if this user may not see it."""
    open_s: float | None
    """How long the transaction has been open, in seconds; None if this user may not see it."""


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
        """Count the rows of the outbox. Tables that a harvester refuses are refused here too."""
        with self._connected() as connection:
            registration = self._tables.registration(connection)
            self._tables.check_tables(connection)
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

    def blocking(self) -> list[BlockingTransaction]:
        """Return the open transactions that harvesters wait for, the oldest first."""
        with self._connected() as connection:
            from psycopg import sql

            rows = sql.Identifier(self._tables.schema, self._tables.name).as_string(connection)
            found = connection.execute(_BLOCKING, {"rows": rows, "harmless": list(_HARMLESS_LOCKS)})
            return [BlockingTransaction(*row) for row in found]

    def last_id(self) -> int | None:
        """Return the largest id of the waiting rows; None if no row waits."""
        with self._connected() as connection:
            found = connection.execute(self._tables.named("SELECT max(id) FROM {rows}"), ()).fetchone()
        return None if found is None else found[0]

    def first_id(self, last: int) -> int | None:
        """Return the smallest id of the waiting rows with an id up to `last`; None if there is none."""
        with self._connected() as connection:
            statement = self._tables.named("SELECT id FROM {rows} WHERE id <= %s ORDER BY id LIMIT 1")
            found = connection.execute(statement, (last,)).fetchone()
        return None if found is None else found[0]

    def parked(self, limit: int = 100, ids: Sequence[int] | None = None) -> list[ParkedRow]:
        """Return at most `limit` rows that are set aside, sorted by id; with `ids`, only those."""
        with self._connected() as connection:
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
        with self._connected() as connection:
            from psycopg import errors

            try:
                found = connection.execute(self._tables.named(_BACK), (list(ids or ()), ids is None)).fetchall()
            except errors.UniqueViolation:
                raise MarshalError(self._copied_text(connection, ids)) from None
            lost = sum(not is_back for _, is_back in found)
            if lost:
                raise self._tables.hindered(
                    f"{lost} of the {len(found)} rows to retry would be lost", "skips the insert"
                )
            return [number for number, _ in found]

    def _copied_text(self, connection: "Connection", ids: Sequence[int] | None) -> str:
        """Return the error text about rows that are set aside, and also wait in the outbox."""
        connection.rollback()
        statement = self._tables.named(
            "SELECT id FROM {parked} JOIN {rows} USING (id) WHERE id = ANY(%s) OR %s ORDER BY id LIMIT %s"
        )
        found = connection.execute(statement, (list(ids or ()), ids is None, _MOST_SHOWN)).fetchall()
        return (
            f"outbox {self._tables.name!r}: nothing was moved, because rows with the ids "
            f"{', '.join(str(number) for (number,) in found)} wait in the outbox already. If they were copied there by "
            "hand, remove the rows that are set aside with `marshal-dagster outbox parked delete`"
        )

    def drop(self, ids: Sequence[int]) -> list[int]:
        """Delete rows that are set aside, by id; return the ids of deleted rows."""
        with self._connected() as connection:
            found = connection.execute(
                self._tables.named("DELETE FROM {parked} WHERE id = ANY(%s) RETURNING id"), (list(ids),)
            )
            return sorted(number for (number,) in found)

    @contextmanager
    def _connected(self) -> "Iterator[Connection]":
        """Yield the connection for one transaction."""
        with self._using() as connection:
            from psycopg.pq import TransactionStatus

            if connection.info.transaction_status == TransactionStatus.IDLE:
                set_for_transaction(connection)
            connection.execute("SELECT set_config('lock_timeout', %s, true)", (_LOCK_TIMEOUT,))
            self._tables.registration(connection)
            yield connection
            connection.commit()


def parked_command(name: str, schema: str) -> str:
    """Return the command that lists the rows of this outbox that are set aside."""
    names = () if name == DEFAULT_NAME else ("--name", name)
    schemas = () if schema == DEFAULT_SCHEMA else ("--schema", schema)
    return shlex.join(["marshal-dagster", "outbox", "parked", "list", *names, *schemas])
