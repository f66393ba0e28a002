"""Rows that Spark's tasks copy into a staging table of PostgreSQL, from which the driver's transaction moves them.

Each attempt to write a batch has an unlogged table of its own. Each attempt of a task copies its rows in one
transaction, and marks them with a number of its own. The driver learns the numbers from the results of the tasks that
counted. So rows of a task that died, or that Spark ran twice, are never moved.

The driver holds an advisory lock for the table while it works, and drops the table at the end. If it dies, the next
batch of the same output finds that nothing holds the lock, and drops the table.
"""

import pickle
import secrets
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString, Protocol

from marshal_dagster._internal.postgres import be_only_creator
from marshal_dagster.errors import MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.caching import without_partitions
from marshal_dagster.sinks.database.column_types import TableColumn
from marshal_dagster.sinks.database.dialect import RANGE_COLUMN, Dialect, Fragment, column_names
from marshal_dagster.sinks.database.pg_copy import column_text
from marshal_dagster.sinks.database.postgres_rights import check_may_create_tables
from marshal_dagster.sinks.database.staged_rows import PostgresRows, limited_columns, value_errors
from marshal_dagster.sinks.rejected_rows import RejectedRow, text_check
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.arrow_tasks import error_as_text, error_from_text, limited_batches
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t
from marshal_dagster.spark.task_secret import TaskSecret, task_secret

if TYPE_CHECKING:
    from pyarrow import Buffer, RecordBatch
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField

    from marshal_dagster._internal.postgres import Connection

PREFIX: Final = "marshal_staging_"
"""The beginning of the names of staging tables. A checksum of the output and a random number follow."""
_TASK: Final = "marshal_task_attempt"
_SETTING: Final = "marshal_dagster.task"
_ROWS_AT_ONCE: Final = 2_000
"""The rows of an Arrow batch, whose size is not known before they are computed."""
_RESULTS: Final = "task bigint, partition bigint, records bigint, have_offsets boolean, error string"
_BY_DRIVER: Final = "use written_by='driver', which needs no such right"
_BEFORE_FIELDS: Final = 3
_DOUBTFUL: Final = "doubtful"
"""The result of a task with a row that the table may reject or change."""
_COMMENT: Final = "Rows that a batch of marshal-dagster is writing. Its run drops this table, or the next run does"


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
    """The rows of a batch in a staging table (`EvaluatedRows`)."""

    counts: Mapping[int | None, int]
    """The number of rows, by partition."""
    all_have_offsets: bool
    """Whether each row has an offset."""
    rejected: RejectedRow | None
    """None: if a row may be rejected, the driver writes the batch."""
    table: str
    """The name of the staging table."""
    tasks: tuple[int, ...]
    """The marks of the task attempts whose rows count."""
    is_read_by_hook: bool
    """Whether a hook reads the rows, which expects a temporary table."""


@contextmanager
def rows_of_tasks(
    dialect: StagingDialect,
    frame: "DataFrame",
    done: Sequence[int],
    there: Mapping[str, TableColumn],
    *,
    is_read_by_hook: bool,
) -> Iterator[TaskRows | None]:
    """Compute the rows of a frame in tasks that copy them into a staging table, and drop the table after the block.

    Args:
        dialect: PostgreSQL's dialect, for the output.
        frame: The frame.
        done: The partitions whose rows are left out.
        there: The output's columns, by name.
        is_read_by_hook: Whether a hook reads the rows.

    Yields:
        The rows, or None if one of them may be rejected or changed by the table. Then nothing is staged.

    Raises:
        ConfigurationError: The role may not create tables in the schema.
        UnavailableError: The database cannot be reached.
        Exception: Spark's error for a task that failed or died, as it comes from the user's code too.
    """
    table = f"{_prefix(dialect)}{secrets.token_hex(8)}"
    with _held(dialect, table), _staging_table(dialect, table, frame.columns):
        results = _copy(dialect, table, frame, done, there)
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
            table=table,
            tasks=tuple({task for task, *_ in results}),
            is_read_by_hook=is_read_by_hook,
        )


def _prefix(dialect: StagingDialect) -> str:
    return f"{PREFIX}{zlib.crc32(dialect.output.encode()):08x}_"


@contextmanager
def _held(dialect: StagingDialect, table: str) -> Iterator[None]:
    """Hold the lock of a staging table, by which others see that its run lives."""
    holder = dialect.transaction(lambda _: None)
    connection = holder.__enter__()
    try:
        connection.execute("SELECT set_config('idle_in_transaction_session_timeout', '0', true)")
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (table,))
        yield
    finally:
        with suppress(MarshalError):  # the server may have ended it, which then changes nothing any more
            holder.__exit__(None, None, None)


@contextmanager
def _staging_table(dialect: StagingDialect, table: str, columns: Sequence[str]) -> Iterator[None]:
    with dialect.transaction(lambda _: None) as connection:
        check_may_create_tables(connection, dialect.output, dialect.schema, _BY_DRIVER)
        be_only_creator(connection)
        staging = Fragment(dialect.quoted(dialect.schema, table))
        names = Fragment(", ".join(map(dialect.quoted, column_names(columns)[1:])))
        dialect.execute(
            connection,
            "CREATE UNLOGGED TABLE {staging} WITH (autovacuum_enabled = false) "
            "AS SELECT {names} FROM {rows} WITH NO DATA",
            staging=staging,
            names=names,
        )
        dialect.execute(connection, f"ALTER TABLE {{staging}} ADD COLUMN {_TASK} bigint NOT NULL", staging=staging)
        default = f"ALTER {_TASK} SET DEFAULT current_setting('{_SETTING}')::bigint"
        dialect.execute(connection, f"ALTER TABLE {{staging}} {default}", staging=staging)
        dialect.execute(connection, f"COMMENT ON TABLE {{staging}} IS '{_COMMENT}'", staging=staging)
    _drop_abandoned(dialect)
    try:
        yield
    finally:
        _drop(dialect, table)


def _drop(dialect: StagingDialect, table: str) -> None:
    """Drop a staging table, unless a task is still writing to it; then the next batch drops it."""
    with suppress(MarshalError), dialect.transaction(lambda _: None) as connection:
        connection.execute("SELECT set_config('lock_timeout', '2s', true)")
        staging = Fragment(dialect.quoted(dialect.schema, table))
        dialect.execute(connection, "DROP TABLE IF EXISTS {staging}", staging=staging)


def _drop_abandoned(dialect: StagingDialect) -> None:
    """Drop the staging tables of this output whose runs have died."""
    with dialect.transaction(lambda _: None) as connection:
        found = connection.execute(
            "SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = %s AND starts_with(tablename, %s)",
            (dialect.schema, _prefix(dialect)),
        ).fetchall()
        try_lock: LiteralString = "SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))"
        dead = [name for (name,) in found if connection.execute(try_lock, (name,)).fetchone() == (True,)]
    for name in dead:
        _drop(dialect, name)


def _copy(
    dialect: StagingDialect, table: str, frame: "DataFrame", done: Sequence[int], there: Mapping[str, TableColumn]
) -> list[tuple[int, int | None, int, bool, str | None]]:
    """Run the tasks. Return their marks, and the number of rows of each partition that each has copied."""
    spark = frame.sparkSession
    has_offset = f.col(OFFSET_COLUMN).isNotNull() if OFFSET_COLUMN in frame.columns else f.lit(False)  # noqa: FBT003
    rows = without_partitions(frame, done).select(
        f.col(PARTITION_COLUMN).cast("bigint").alias("partition"),
        has_offset.alias("has_offset"),
        _is_doubtful(frame, there).alias("is_doubtful"),
        *(_field(column).alias(f"field_{number}") for number, column in enumerate(frame.schema.fields)),
    )
    with task_secret(spark, pickle.dumps(dialect)) as secret, limited_batches(spark, _ROWS_AT_ONCE):
        task = _CopyTask(secret, table, tuple(column_names(frame.columns)[1:]))
        found = rows.mapInArrow(task, _RESULTS).collect()
    return [tuple(row) for row in found]


def _field(column: "StructField") -> "Column":
    """Return a column as a field of CSV: an integer, or the text that PostgreSQL parses."""
    is_integer = isinstance(column.dataType, t.IntegralType)
    return f.col(quoted(column.name)) if is_integer else column_text(column.name, column.dataType)


def _is_doubtful(frame: "DataFrame", there: Mapping[str, TableColumn]) -> "Column":
    """Return the condition that a string of a row would be changed without an error.

    PostgreSQL itself rejects bytes that are not UTF-8, and NUL characters. Spark would replace them when it renders
    JSON. A column with a limited length may lose spaces at the end.
    """
    nested = [
        column for column in frame.schema.fields if isinstance(column.dataType, t.ArrayType | t.MapType | t.StructType)
    ]
    is_doubtful = f.lit(False)  # noqa: FBT003
    if nested:
        is_doubtful = text_check(t.StructType(nested), refuse_nul=True).problem.isNotNull()
    for index in limited_columns(frame.columns, there):
        text = f.col(quoted(frame.columns[index])).cast("string")
        is_doubtful = is_doubtful | f.coalesce(text.endswith(" "), f.lit(False))  # noqa: FBT003
    return is_doubtful


@dataclass(frozen=True, slots=True)
class _CopyTask:
    """The function that each Spark task runs on its rows. It yields a result for each partition of these."""

    dialect: TaskSecret
    table: str
    columns: Sequence[str]

    def __call__(self, batches: Iterable["RecordBatch"]) -> Iterator["RecordBatch"]:
        filled = (batch for batch in batches if len(batch))
        first = next(filled, None)
        if first is None:
            return
        dialect: StagingDialect = pickle.loads(self.dialect.value())  # noqa: S301 - the driver's own bytes
        task = secrets.randbits(62)
        try:
            counts, have_offsets = self._copy(dialect, task, first, filled)
        except _DoubtfulRowError:
            yield _result(task, None, 0, have_offsets=False, error=_DOUBTFUL)
        except MarshalError as error:
            yield _result(task, None, 0, have_offsets=False, error=error_as_text(error))
        else:
            for partition, count in counts.items():
                yield _result(task, partition, count, have_offsets=have_offsets)

    def _copy(
        self, dialect: StagingDialect, task: int, first: "RecordBatch", others: Iterator["RecordBatch"]
    ) -> tuple[Counter[int | None], bool]:
        """Copy all rows in one transaction. Return their number by partition, and whether all have offsets."""
        from psycopg import errors, sql

        names = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        statement = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
            sql.Identifier(dialect.schema, self.table), names
        )
        counts: Counter[int | None] = Counter()
        have_offsets = True
        with dialect.transaction(lambda _: None) as connection, connection.cursor() as cursor:
            for name, value in (("statement_timeout", "0"), ("synchronous_commit", "off"), (_SETTING, str(task))):
                cursor.execute("SELECT set_config(%s, %s, true)", (name, value))
            try:
                with cursor.copy(statement) as copy:
                    batch: RecordBatch | None = first
                    while batch is not None:
                        partition, has_offset, is_doubtful, *_ = batch.columns
                        if is_doubtful.true_count:
                            raise _DoubtfulRowError
                        have_offsets = have_offsets and has_offset.true_count == len(batch)
                        for entry in partition.value_counts():
                            counts[entry["values"].as_py()] += entry["counts"].as_py()
                        copy.write(_csv(batch.select(range(_BEFORE_FIELDS, batch.num_columns))))
                        batch = next(others, None)
            except value_errors():
                raise _DoubtfulRowError from None
            except errors.UndefinedTable:
                raise _staging_lost(dialect.output) from None
        return counts, have_offsets


def _staging_lost(output: str) -> UnavailableError:
    return UnavailableError(
        f"table {output}: the staging table of this batch was dropped or emptied, because the database was restarted "
        "or has ended the run's connection, so nothing was written. The next attempt of the batch writes the rows"
    )


class _DoubtfulRowError(Exception):
    """A row that the table may reject or change."""


def _csv(fields: "RecordBatch") -> "Buffer":
    """Return rows as CSV. All strings are quoted, so that an empty one is not null."""
    import pyarrow as pa
    import pyarrow.csv

    text = pa.BufferOutputStream()
    pyarrow.csv.write_csv(fields, text, pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed"))
    return text.getvalue()


def _result(
    task: int, partition: int | None, records: int, *, have_offsets: bool, error: str | None = None
) -> "RecordBatch":
    import pyarrow as pa

    columns = [
        pa.array([task], pa.int64()),
        pa.array([partition], pa.int64()),
        pa.array([records], pa.int64()),
        pa.array([have_offsets], pa.bool_()),
        pa.array([error], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, ["task", "partition", "records", "have_offsets", "error"])


class TaskStagedRows(PostgresRows):
    """The rows of a staging table as `pg_temp.marshal_rows`: a view, or a table if a hook reads them."""

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
        """Create the view or the table. Raises `UnavailableError` if the staging table was dropped."""
        from psycopg import errors

        try:
            self._create(connection, "TEMPORARY TABLE" if self._rows.is_read_by_hook else "TEMPORARY VIEW")
        except errors.UndefinedTable:
            raise _staging_lost(self._output) from None

    def move(self, connection: "Connection", wanted: Sequence[ClaimedRange], counts: Mapping[int | None, int]) -> None:
        """Move the rows. Raises as `PostgresRows.move`, and `UnavailableError` if a crash has removed staged rows."""
        try:
            super().move(connection, wanted, counts)
        except SinkRejectedError:
            ((left,),) = connection.execute("SELECT count(*) FROM pg_temp.marshal_rows").fetchall()
            if left < sum(self._rows.counts.values()):
                raise _staging_lost(self._output) from None
            raise

    def clear(self, connection: "Connection") -> None:
        """Drop the view, which would stay in a pooler's connection."""
        if not self._rows.is_read_by_hook:
            connection.execute("DROP VIEW IF EXISTS pg_temp.marshal_rows")

    def _rejected_row(self, connection: "Connection", taken: Mapping[int, int]) -> RejectedRow | None:
        if not self._rows.is_read_by_hook:
            connection.execute("DROP VIEW pg_temp.marshal_rows")
            self._create(connection, "TEMPORARY TABLE")
        return super()._rejected_row(connection, taken)

    def _create(self, connection: "Connection", kind: str) -> None:
        entries = ", ".join(f"({int(partition)}, {int(taken)}::bigint)" for partition, taken in self._ids.items())
        marks = ", ".join(map(str, self._rows.tasks)) or "NULL"
        names = ", ".join(f"staged.{self._dialect.quoted(name)}" for name in column_names(self._columns)[1:])
        order = " ORDER BY staged.ctid" if kind == "TEMPORARY TABLE" else ""
        self._dialect.execute(
            connection,
            f"CREATE {kind} marshal_rows {'ON COMMIT DROP ' if order else ''}AS SELECT entry.{RANGE_COLUMN}, {{names}} "
            f"FROM {{staging}} AS staged JOIN (VALUES {entries}) AS entry (number, {RANGE_COLUMN}) "
            f"ON staged.kafka_partition = entry.number WHERE staged.{_TASK} IN ({marks}){order}",
            names=Fragment(names),
            staging=Fragment(self._dialect.quoted(self._dialect.schema, self._rows.table)),
        )
