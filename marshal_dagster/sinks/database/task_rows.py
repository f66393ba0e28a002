"""Rows that Spark's tasks copy into staging tables of PostgreSQL, from which the driver's transaction moves them.

Each attempt of a task creates an unlogged table of its own and copies its rows, in one transaction. The driver learns
the tables from the results of the tasks that counted. So rows of a task that died, or that Spark ran twice, are never
moved. The rows already have their ranges' ids, so that PostgreSQL moves them as they are stored.

The driver holds an advisory lock for its attempt to write the batch while it works, and drops the tables at the end. If
it dies, the next batch of any output in the schema finds that nothing holds the lock, and drops the tables. So does a
vacuum.
"""

import math
import pickle
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, LiteralString, Protocol

from marshal_dagster.errors import MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.caching import without_partitions
from marshal_dagster.sinks.database.batch_copy import BatchCopy, DoubtfulRowError
from marshal_dagster.sinks.database.column_types import TableColumn, table_columns, with_exact_floats
from marshal_dagster.sinks.database.dialect import Dialect, Fragment
from marshal_dagster.sinks.database.postgres_rights import check_may_create_tables
from marshal_dagster.sinks.database.staged_rows import PostgresRows
from marshal_dagster.sinks.rejected_rows import RejectedRow
from marshal_dagster.spark.arrow_tasks import error_as_text, error_from_text, limited_batches, sparing_next_tasks
from marshal_dagster.spark.task_secret import TaskSecret, task_secret

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame

    from marshal_dagster._internal.postgres import Connection

PREFIX: Final = "marshal_staging_"
"""The beginning of the names of staging tables. What follows: a checksum of the output, and random numbers of the
attempt to write a batch and of the task's attempt."""
_NUMBER_BYTES: Final = 8
_NAME: Final = f"^({PREFIX}[0-9a-f]{{8}}_[0-9a-f]{{16}})_[0-9a-f]{{16}}$"
"""The name of a staging table, with that of the attempt."""
_MOST_TABLES: Final = 500
"""The most tasks. The transaction that drops their tables takes some five locks for each, and PostgreSQL's lock table
has 6,400 entries unless it is set otherwise."""
_CLEAN_UP_S: Final = 10.0
"""After this time a batch tries no further table of dead runs."""
_STAYS_OPEN: Final[LiteralString] = "SELECT set_config('idle_in_transaction_session_timeout', '0', true)"
_ROWS_AT_ONCE: Final = 2_000
"""The rows of an Arrow batch, whose size is not known before they are computed."""
_RESULTS: Final = "task string, partition bigint, records bigint, have_offsets boolean, error string"
_BY_DRIVER: Final = "use written_by='driver', which needs no such right"
_DOUBTFUL: Final = "doubtful"
"""The result of a task with a row that the table may reject or change."""
_COMMENT: Final = "Rows that a batch of marshal-dagster is writing. Its run drops this table, or the next run does"

_GIVEN_BY_DEFAULT: Final[LiteralString] = """
    SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END
    FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace,
        aclexplode(c.relacl) AS a
    WHERE n.nspname = %s AND c.relname = %s AND a.grantee <> c.relowner
    """
"""Selects the other roles that have rights on a new table, by ALTER DEFAULT PRIVILEGES."""


class StagingDialect(Protocol):
    """The parts of PostgreSQL's dialect that staging uses, in the driver and in tasks."""

    schema: str
    table: str
    output: str

    def transaction(self, reached: Callable[[str], None]) -> "AbstractContextManager[Connection]":
        """Open a connection with one transaction."""
        ...

    def execute(
        self,
        connection: "Connection",
        statement: str,
        parameters: Mapping[str, object] | None = None,
        **fragments: Fragment,
    ) -> Any:  # noqa: ANN401 - a cursor
        """Execute a statement."""
        ...

    def quoted(self, *names: str) -> str:
        """Return a quoted name, with percent signs doubled."""
        ...


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The rows of a batch in staging tables (`EvaluatedRows`)."""

    counts: Mapping[int | None, int]
    """The number of rows, by partition."""
    all_have_offsets: bool
    """Whether each row has an offset."""
    rejected: RejectedRow | None
    """None: if a row may be rejected, the driver writes the batch."""
    tables: tuple[str, ...]
    """The names of the staging tables whose rows count."""
    is_read_by_hook: bool
    """Whether a hook reads the rows, which expects a temporary table."""


@contextmanager
def rows_of_tasks(
    dialect: StagingDialect, frame: "DataFrame", done: Sequence[int], ids: Mapping[int, int], *, is_read_by_hook: bool
) -> Iterator[TaskRows | None]:
    """Compute the rows of a frame in tasks that copy them into staging tables, and drop these after the block.

    Args:
        dialect: PostgreSQL's dialect, for the output.
        frame: The frame.
        done: The partitions whose rows are left out.
        ids: The id of each range's entry in `marshal_taken_ranges`, by partition.
        is_read_by_hook: Whether a hook reads the rows.

    Yields:
        The rows, or None if one of them may be rejected or changed by the table. Then nothing is staged.

    Raises:
        ConfigurationError: The role may not create tables in the schema.
        UnavailableError: The database cannot be reached.
        Exception: Spark's error for a task that failed or died, as it comes from the user's code too.
    """
    with _attempt(dialect) as (attempt, there):
        rows = with_exact_floats(without_partitions(frame, done), there)
        results = _copy(dialect, attempt, rows, ids, there)
        if any(error == _DOUBTFUL for *_, error in results):
            yield None
            return
        for *_, error in results:
            if error:
                raise error_from_text(error)
        counts: Counter[int | None] = Counter()
        for _, partition, records, _, _ in results:
            counts[partition] += records
        yield TaskRows(
            counts=counts,
            all_have_offsets=all(have_offsets for _, _, _, have_offsets, _ in results),
            rejected=None,
            tables=tuple(dict.fromkeys(f"{attempt}_{task}" for task, *_ in results)),
            is_read_by_hook=is_read_by_hook,
        )


def drop_abandoned(dialect: StagingDialect) -> None:
    """Drop the staging tables of dead runs in the schema.

    Args:
        dialect: PostgreSQL's dialect, for any output in the schema.
    """
    with dialect.transaction(lambda _: None) as connection:
        connection.execute(_STAYS_OPEN)
        _drop_abandoned(dialect, connection, math.inf)


def _prefix(dialect: StagingDialect) -> str:
    return f"{PREFIX}{zlib.crc32(dialect.output.encode()):08x}_"


@contextmanager
def _attempt(dialect: StagingDialect) -> Iterator[tuple[str, Mapping[str, TableColumn]]]:
    """Hold the lock of an attempt, by which others see that its run lives, and drop its tables after the block.

    Yields:
        The beginning of the names of its tables, and the output's columns.
    """
    attempt = f"{_prefix(dialect)}{secrets.token_hex(_NUMBER_BYTES)}"
    is_done = False
    try:
        with dialect.transaction(lambda _: None) as connection:
            connection.execute(_STAYS_OPEN)
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (attempt,))
            check_may_create_tables(connection, dialect.output, dialect.schema, _BY_DRIVER)
            _drop_abandoned(dialect, connection, time.monotonic() + _CLEAN_UP_S)
            there = table_columns(connection, dialect.schema, dialect.table)
            try:
                yield attempt, there
            finally:
                _drop_left(dialect, connection, attempt)
            is_done = True
    except MarshalError:
        if not is_done:  # else the server has ended the transaction of the lock, which changes nothing any more
            raise


def _tables(dialect: StagingDialect, connection: "Connection", prefix: str) -> list[str]:
    found = connection.execute(
        "SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = %s AND starts_with(tablename, %s)",
        (dialect.schema, prefix),
    )
    return [name for (name,) in found]


def _drop_abandoned(dialect: StagingDialect, connection: "Connection", until_s: float) -> None:
    """Drop the tables of one dead run after another until that time. The rest is left to the next batch."""
    for tables in _abandoned(dialect, connection):
        _drop(dialect, tables, until_s)
        if time.monotonic() > until_s:
            return


def _abandoned(dialect: StagingDialect, connection: "Connection") -> list[list[str]]:
    """Return the staging tables in the schema that the role may drop, by dead run; those of this output first."""
    try_lock: LiteralString = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))"
    by_attempt: dict[str, list[str]] = {}
    for attempt, name in connection.execute(
        "SELECT (regexp_match(relname, %s))[1], relname FROM pg_catalog.pg_class "
        "JOIN pg_catalog.pg_namespace AS schema ON schema.oid = relnamespace "
        "WHERE nspname = %s AND relkind = 'r' AND relname ~ %s AND pg_has_role(relowner, 'USAGE') "
        "ORDER BY NOT starts_with(relname, %s)",
        (_NAME, dialect.schema, _NAME, _prefix(dialect)),
    ):
        by_attempt.setdefault(attempt, []).append(name)
    dead = [attempt for attempt in by_attempt if connection.execute(try_lock, (attempt,)).fetchone() == (True,)]
    return [by_attempt[attempt] for attempt in dead]


def _drop_left(dialect: StagingDialect, connection: "Connection", attempt: str) -> None:
    """Drop the tables of an attempt. Usually the transaction that moved the rows has dropped them."""
    import psycopg

    try:
        _drop(dialect, _tables(dialect, connection, attempt))
    except psycopg.Error:
        with suppress(MarshalError), dialect.transaction(lambda _: None) as another:
            _drop(dialect, _tables(dialect, another, attempt))


def _drop(dialect: StagingDialect, tables: Sequence[str], until_s: float = math.inf) -> None:
    """Drop staging tables, except those that a transaction still uses: the next batch drops them.

    After the time `until_s` of the monotonic clock no further table is tried.
    """
    if not tables:
        return
    try:
        with dialect.transaction(lambda _: None) as connection:
            connection.execute("SELECT set_config('lock_timeout', '2s', true)")
            staging = Fragment(", ".join(dialect.quoted(dialect.schema, table) for table in tables))
            dialect.execute(connection, "DROP TABLE IF EXISTS {staging}", staging=staging)
    except MarshalError:
        for table in tables if len(tables) > 1 else ():
            if time.monotonic() > until_s:
                return
            _drop(dialect, [table])


def _copy(
    dialect: StagingDialect, attempt: str, frame: "DataFrame", ids: Mapping[int, int], there: Mapping[str, TableColumn]
) -> list[tuple[str, int | None, int, bool, str | None]]:
    """Run the tasks. Return their numbers, and the number of rows of each partition that each has copied."""
    spark, copied = frame.sparkSession, BatchCopy.of(frame, ids, there)
    with task_secret(spark, pickle.dumps(dialect)) as secret, limited_batches(spark, _ROWS_AT_ONCE):
        task = _CopyTask(secret, attempt, copied)
        found = copied.rows(frame, there).coalesce(_MOST_TABLES).mapInArrow(task, _RESULTS).collect()
    return [tuple(row) for row in found]


@dataclass(frozen=True, slots=True)
class _CopyTask:
    """The function that each Spark task runs on its rows. It yields a result for each partition of these."""

    dialect: TaskSecret
    attempt: str
    copied: BatchCopy

    def __call__(self, batches: Iterable["RecordBatch"]) -> Iterator["RecordBatch"]:
        filled = (batch for batch in batches if len(batch))
        first = next(filled, None)
        if first is None:
            return
        dialect: StagingDialect = pickle.loads(self.dialect.value())  # noqa: S301 - the driver's own bytes
        task = secrets.token_hex(_NUMBER_BYTES)
        try:
            with sparing_next_tasks():
                counts, have_offsets = self._copy(dialect, task, chain([first], filled))
        except DoubtfulRowError:
            yield _result(task, None, 0, have_offsets=False, error=_DOUBTFUL)
        except MarshalError as error:
            yield _result(task, None, 0, have_offsets=False, error=error_as_text(error))
        else:
            for partition, count in counts.items():
                yield _result(task, partition, count, have_offsets=have_offsets)

    def _copy(
        self, dialect: StagingDialect, task: str, batches: Iterable["RecordBatch"]
    ) -> tuple[Counter[int | None], bool]:
        """Copy all rows in one transaction. Return their number by partition, and whether all have offsets."""
        table = f"{self.attempt}_{task}"
        with dialect.transaction(lambda _: None) as connection, connection.cursor() as cursor:
            for name, value in (("statement_timeout", "0"), ("synchronous_commit", "off")):
                cursor.execute("SELECT set_config(%s, %s, true)", (name, value))
            self._create(dialect, connection, table)
            return self.copied.copy(cursor, (dialect.schema, table), batches, is_new=True)

    def _create(self, dialect: StagingDialect, connection: "Connection", table: str) -> None:
        staging = Fragment(dialect.quoted(dialect.schema, table))
        dialect.execute(
            connection,
            "CREATE UNLOGGED TABLE {staging} WITH (autovacuum_enabled = false) "
            "AS SELECT {names} FROM {rows} WITH NO DATA",
            staging=staging,
            names=Fragment(", ".join(map(dialect.quoted, self.copied.columns))),
        )
        dialect.execute(connection, f"COMMENT ON TABLE {{staging}} IS '{_COMMENT}'", staging=staging)
        given = connection.execute(_GIVEN_BY_DEFAULT, (dialect.schema, table)).fetchall()
        if given:
            roles = Fragment(", ".join(role.replace("%", "%%") for (role,) in given))
            dialect.execute(connection, "REVOKE ALL ON {staging} FROM {roles}", staging=staging, roles=roles)


def _staging_lost(output: str) -> UnavailableError:
    return UnavailableError(
        f"table {output}: the staging table of this batch was dropped or emptied, because the database was restarted "
        "or has ended the run's connection, so nothing was written. The next attempt of the batch writes the rows"
    )


def _result(
    task: str, partition: int | None, records: int, *, have_offsets: bool, error: str | None = None
) -> "RecordBatch":
    import pyarrow as pa

    columns = [
        pa.array([task], pa.string()),
        pa.array([partition], pa.int64()),
        pa.array([records], pa.int64()),
        pa.array([have_offsets], pa.bool_()),
        pa.array([error], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, ["task", "partition", "records", "have_offsets", "error"])


class TaskStagedRows(PostgresRows):
    """The rows of staging tables as `pg_temp.marshal_rows`: a view, or a table if a hook reads them."""

    def __init__(
        self,
        dialect: "Dialect[Connection]",
        error_text: Callable[[Any], str],
        ids: Mapping[int, int],
        columns: Sequence[str],
        rows: TaskRows,
    ) -> None:
        """Store the arguments; see `PostgresRows`."""
        super().__init__(dialect, error_text, ids, columns)
        self._rows = rows

    def stage(self, connection: "Connection", wanted: Sequence[ClaimedRange]) -> None:  # noqa: ARG002 - no row is refused
        """Create the view or the table. Raises `UnavailableError` if a staging table was dropped."""
        from psycopg import errors

        try:
            if self._rows.is_read_by_hook:
                self._create_table(connection)
            else:
                view = f"CREATE TEMPORARY VIEW marshal_rows AS {self._selected()}"
                self._dialect.execute(connection, view, names=self._names())
        except errors.UndefinedTable:
            raise _staging_lost(self._output) from None

    def move(self, connection: "Connection", wanted: Sequence[ClaimedRange], counts: Mapping[int | None, int]) -> None:
        """Move the rows. Raises as `PostgresRows.move`, and `UnavailableError` if a crash has removed staged rows."""
        try:
            super().move(connection, wanted, counts)
        except SinkRejectedError:
            if self._is_emptied(connection):
                raise _staging_lost(self._output) from None
            raise

    def count_error(self, connection: "Connection", expected: int, found: int) -> MarshalError:
        """Return the error for missing rows, which a crash of the server may have removed."""
        if self._is_emptied(connection):
            return _staging_lost(self._output)
        return super().count_error(connection, expected, found)

    def _is_emptied(self, connection: "Connection") -> bool:
        ((left,),) = connection.execute("SELECT count(*) FROM pg_temp.marshal_rows").fetchall()
        return bool(left < sum(self._rows.counts.values()))

    def clear(self, connection: "Connection") -> None:
        """Drop the staging tables, and the view, which would stay in a pooler's connection."""
        if not self._rows.is_read_by_hook:
            connection.execute("DROP VIEW IF EXISTS pg_temp.marshal_rows")
        if self._rows.tables:
            names = ", ".join(self._dialect.quoted(self._dialect.schema, table) for table in self._rows.tables)
            self._dialect.execute(connection, "DROP TABLE IF EXISTS {names}", names=Fragment(names))

    def _rejected_row(self, connection: "Connection", taken: Mapping[int, int]) -> RejectedRow | None:
        if not self._rows.is_read_by_hook:
            connection.execute("DROP VIEW pg_temp.marshal_rows")
            self._create_table(connection)
        return super()._rejected_row(connection, taken)

    def _create_table(self, connection: "Connection") -> None:
        """Create the table with the rows in the order of the copies, which a parallel plan would change."""
        connection.execute("SELECT set_config('max_parallel_workers_per_gather', '0', true)")
        self._dialect.execute(
            connection,
            f"CREATE TEMPORARY TABLE marshal_rows ON COMMIT DROP AS {self._selected()}",
            names=self._names(),
        )

    def _selected(self) -> str:
        """Return the SELECT of all rows. Without a staging table it has none."""
        quoted = [self._dialect.quoted(self._dialect.schema, table) for table in self._rows.tables]
        return " UNION ALL ".join(f"SELECT {{names}} FROM {table}" for table in quoted) or (
            "SELECT {names} FROM {rows} WHERE false"
        )
