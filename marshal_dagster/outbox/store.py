"""The PostgreSQL side of a harvester: takes rows, deletes published rows and sets others aside, in one transaction."""

import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, LiteralString

from marshal_dagster._internal.postgres import identifier
from marshal_dagster._internal.texts import first_few
from marshal_dagster.outbox.interfaces import (
    BatchTransaction,
    PublishedBatch,
    Row,
    RowRange,
    SessionSupersededError,
    TransactionResult,
)
from marshal_dagster.outbox.schema import OutboxConnection, OutboxTables

if TYPE_CHECKING:
    from psycopg import Cursor
    from psycopg.sql import Composable, Composed

    from marshal_dagster._internal.postgres import Connection

logger = logging.getLogger(__name__)

_MOST_SHOWN: Final = 10
_SETTINGS: Final = (
    "-c statement_timeout=60s -c lock_timeout=20s -c idle_in_transaction_session_timeout=5s -c enable_seqscan=off"
)
"""Settings of the harvester's session in PostgreSQL.

A leader that freezes during a turn blocks the next leader until `idle_in_transaction_session_timeout`.

Sequential scans are off, because the statistics of a nearly empty table change with each autovacuum. PostgreSQL would
sometimes read and sort the whole table, including dead rows, instead of using the index.
"""

_ANSWER_TIMEOUT_S: Final = 15.0
"""How long, in seconds, a leader waits for an answer of PostgreSQL before it gives up the connection."""

_CREATED_US: Final[LiteralString] = "least(extract(epoch FROM create_time) * 1000000, 9223372036854775807)::bigint"
"""SQL for when a row was written, in Unix microseconds. Times after the year 294246 do not fit into a bigint."""

_IS_MEANT: Final[LiteralString] = "r.id = w.id AND {created_us} BETWEEN w.created_from_us AND w.created_until_us"
"""SQL condition for setting a row aside: it is the row that a `RowRange` identifies."""

_IS_DONE: Final[LiteralString] = """
    id BETWEEN %(first_id)s AND %(last_id)s
    AND id <= (%(lasts)s::bigint[])[width_bucket(id, %(firsts)s::bigint[])]
    AND {created_us} BETWEEN (%(from_us)s::bigint[])[width_bucket(id, %(firsts)s::bigint[])]
    AND (%(until_us)s::bigint[])[width_bucket(id, %(firsts)s::bigint[])]
    """
"""SQL condition for deleting a row: it is one of a `PublishedBatch`.

`width_bucket` finds the range of an id by a binary search in the sorted first ids. A join would take twice the time.
"""

_TAKE: Final[LiteralString] = """
    SELECT id, topic, key, value, header_keys, header_values, {created_us} FROM (
        SELECT *, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) AS total FROM (
            SELECT *, coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0)
                + CASE WHEN header_keys IS NULL THEN 0 ELSE (
                    SELECT coalesce(sum(octet_length(name) + coalesce(octet_length(content), 0)), 0)
                    FROM unnest(header_keys, header_values) AS header (name, content)
                ) END AS size
            FROM {rows} AS r WHERE {free} ORDER BY id LIMIT %(limit)s
        ) AS first
    ) AS summed WHERE total = size OR total <= %(limit_bytes)s ORDER BY id
    """
_FREE_TOPICS: Final[LiteralString] = "topic <> ALL(%(topics)s::text[])"
_FREE_ROWS: Final[LiteralString] = "id <> ALL(%(ids)s::bigint[])"
_FREE_LANES: Final[LiteralString] = """
    NOT EXISTS (SELECT FROM unnest(%(lane_topics)s::text[], %(lane_keys)s::bytea[]) AS held (topic, key)
    WHERE held.topic = r.topic AND held.key = r.key)
    """
_STRIKE: Final[LiteralString] = "DELETE FROM {rows} WHERE {is_done}"
_LEFT: Final[LiteralString] = "SELECT count(*) FROM {rows} WHERE {is_done}"
_PARK: Final[LiteralString] = """
    WITH wanted AS (
        SELECT * FROM unnest(%(ids)s::bigint[], %(from_us)s::bigint[], %(until_us)s::bigint[], %(reasons)s::text[])
        AS w (id, created_from_us, created_until_us, reason)
    ),
    gone AS (
        DELETE FROM {rows} AS r USING wanted AS w WHERE {is_meant} AND NOT EXISTS (
            SELECT FROM {parked} AS p WHERE p.id = r.id
            AND (p.topic, p.key, p.value, p.header_keys, p.header_values)
                IS DISTINCT FROM (r.topic, r.key, r.value, r.header_keys, r.header_values)
        ) RETURNING r.*, w.reason
    ),
    kept AS (
        INSERT INTO {parked} (id, create_time, topic, key, value, header_keys, header_values, reason)
        SELECT id, create_time, topic, key, value, header_keys, header_values, reason FROM gone
        ON CONFLICT (id) DO NOTHING RETURNING id
    )
    SELECT (SELECT count(*) FROM kept), (SELECT count(*) FROM gone WHERE id NOT IN (SELECT id FROM kept)
        AND NOT EXISTS (SELECT FROM {parked} AS p WHERE p.id = gone.id)),
        ARRAY(SELECT r.id FROM {rows} AS r JOIN wanted AS w ON {is_meant} WHERE r.id NOT IN (SELECT id FROM gone)
        ORDER BY r.id)
    """
"""SQL that sets rows aside.

It returns the number of these rows, the number of rows that are in neither table, and the ids of those that wait.

A row that is set aside already was copied back by hand. It is deleted from the outbox, and its first reason stays: the
harvester has no right to change it. If a different row with the same id is set aside, the row waits, so that neither
is lost.
"""


class PostgresStore(OutboxConnection):
    """The rows of an outbox in PostgreSQL (`marshal_dagster.outbox.interfaces.Store`). Not thread-safe."""

    def __init__(self, tables: OutboxTables, leader: str | None = None) -> None:
        """Use these tables; `leader` is the name that operators see, by default `HOST:PID` of this process."""
        super().__init__(tables)
        self._leader = leader or f"{socket.gethostname()}:{os.getpid()}"
        self._waiting: list[int] = []
        """The rows that could not be set aside in the last attempt."""

    def begin(self) -> int:
        """Start a session (`Store.begin`)."""
        with self._using() as connection:
            found = connection.execute(
                self._tables.named(
                    "UPDATE {registry} SET session = session + 1, leader = %s, led_since = now() "
                    "WHERE name = %s RETURNING session"
                ),
                (self._leader, self._tables.name),
            ).fetchone()
            connection.commit()
            if found is None:
                raise self._tables.missing()
            return int(found[0])

    def turn(self, session: int, turn: BatchTransaction) -> TransactionResult:
        """Carry out a `BatchTransaction` (`Store.turn`)."""
        with self._using() as connection:
            return self._turn(connection, session, turn)

    def wait(self, timeout_s: float) -> None:
        """Wait for a notification of new rows, for `timeout_s` seconds at most."""
        if timeout_s <= 0:
            return
        with self._using() as connection:
            for _ in connection.notifies(timeout=timeout_s, stop_after=1):
                pass
            connection.commit()

    def _connect(self) -> "Connection":
        connection = self._tables.database.connect(options=_SETTINGS, answer_timeout_s=_ANSWER_TIMEOUT_S)
        try:
            self._tables.registration(connection)
            self._tables.check_tables(connection)
            connection.execute(self._tables.named("LISTEN {name}", name=identifier(self._tables.channel)), ())
            # Without it, a deleted row could come back after a crash of the server and be published again.
            connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
            connection.commit()
        except BaseException:
            connection.close()
            raise
        return connection

    def _turn(self, connection: "Connection", session: int, turn: BatchTransaction) -> TransactionResult:
        named = self._named
        writes = bool(turn.done.ranges or turn.parked)
        ask: LiteralString = "SELECT session FROM {registry} WHERE name = %s"
        with connection.pipeline():
            found = connection.execute(named(ask + " FOR SHARE" if writes else ask), (self._tables.name,))
            struck = parking = None
            if turn.done.ranges:
                struck = connection.execute(named(_STRIKE), _done(turn.done))
            if turn.parked:
                reasons = [parked.reason for parked in turn.parked]
                columns = _columns([parked.row for parked in turn.parked])
                parking = connection.execute(named(_PARK), {**columns, "ids": columns["firsts"], "reasons": reasons})
            rows = None if turn.limit == 0 else connection.execute(*self._take(turn), binary=True)
        present = found.fetchone()
        if present is None or present[0] != session:
            connection.rollback()
            raise SessionSupersededError(
                f"outbox {self._tables.name!r}: session {session} has ended, because another harvester has taken over"
            )
        if _count(struck) < turn.done.row_count:
            self._check_struck(connection, turn)
        set_aside, lost, waiting = (0, 0, []) if parking is None else parking.fetchone() or (0, 0, [])
        if lost:
            connection.rollback()
            raise self._tables.hindered(f"{lost} rows to set aside would be lost", "skips the insert")
        if parking is not None:
            self._warn_of(waiting)
        taken = [] if rows is None else [_row(found) for found in rows]
        connection.commit()
        return TransactionResult(taken, _count(struck), set_aside)

    def _warn_of(self, waiting: list[int]) -> None:
        """Log which rows can neither be published nor set aside, once while these are the same rows."""
        before, self._waiting = self._waiting, waiting
        if waiting and waiting != before:
            logger.warning(
                "outbox %r: rows %s can neither be published nor set aside, because other rows with the same ids are "
                "set aside. Delete those with `marshal-dagster outbox parked delete`, or correct why these cannot be "
                "published",
                self._tables.name,
                first_few(waiting, _MOST_SHOWN),
            )

    def _check_struck(self, connection: "Connection", turn: BatchTransaction) -> None:
        """Raise `ConfigurationError` if a published row still exists.

        If none does, another session has deleted the missing ones, which is no error.
        """
        left = connection.execute(self._named(_LEFT), _done(turn.done)).fetchone()
        if left is not None and left[0]:
            connection.rollback()
            raise self._tables.hindered(
                f"{left[0]} published rows could not be deleted and would be published again", "skips the deletion"
            )

    def _named(self, statement: LiteralString, **names: "Composable") -> "Composed":
        """Return a statement with the names of the tables, and the conditions of this module, filled in."""
        from psycopg import sql

        created_us = sql.SQL(_CREATED_US)
        is_meant = sql.SQL(_IS_MEANT).format(created_us=created_us)
        is_done = sql.SQL(_IS_DONE).format(created_us=created_us)
        return self._tables.named(statement, created_us=created_us, is_meant=is_meant, is_done=is_done, **names)

    def _take(self, turn: BatchTransaction) -> tuple[Any, dict[str, Any]]:
        from psycopg import sql

        free: list[LiteralString] = []
        ids = [lane.row for lane in turn.held_lanes if lane.row is not None]
        lanes = [lane for lane in turn.held_lanes if lane.row is None]
        if turn.held_topics:
            free.append(_FREE_TOPICS)
        if ids:
            free.append(_FREE_ROWS)
        if lanes:
            free.append(_FREE_LANES)
        condition = sql.SQL(" AND ").join(map(sql.SQL, free)) if free else sql.SQL("true")
        return self._named(_TAKE, free=condition), {
            "limit": turn.limit,
            "limit_bytes": turn.limit_bytes,
            "topics": list(turn.held_topics),
            "ids": ids,
            "lane_topics": [lane.topic for lane in lanes],
            "lane_keys": [lane.key for lane in lanes],
        }


def _done(batch: PublishedBatch) -> dict[str, Any]:
    """Return the parameters of `_IS_DONE`."""
    return {**_columns(batch.ranges), "first_id": batch.ranges[0].first, "last_id": batch.ranges[-1].last}


def _columns(ranges: Sequence[RowRange]) -> dict[str, list[int]]:
    firsts, lasts, from_us, until_us = map(list, zip(*ranges, strict=True))
    return {"firsts": firsts, "lasts": lasts, "from_us": from_us, "until_us": until_us}


def _count(done: "Cursor[Any] | None") -> int:
    return 0 if done is None else done.rowcount


def _row(found: Sequence[Any]) -> Row:
    number, topic, key, value, names, values, created_us = found
    headers = None if names is None else list(zip(names, values, strict=True))
    return Row(number, topic, key, value, headers, created_us)
