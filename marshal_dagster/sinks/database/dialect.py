"""The port for databases: what a `DatabaseSink` needs of a database engine (docs/how-to/database-dialect.md).

`sink` decides what is written. A `Dialect` has the SQL and the driver of one engine. Statements that all engines
accept are written once, here and in `ranges`, with these conventions:

- Names of tables and of a dialect's fragments are placeholders in braces: `{positions}`, `{taken}`, `{rows}`.
- Values are named parameters, as in `%(output)s`.
- Names are quoted with double quotes where an engine reserves them, such as `"partition"`.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.rejected_rows import RejectedRow
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, Intervals, changed_result

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

POSITIONS: Final = "marshal_ranges"
"""The table with the position and generation of each partition."""
TAKEN: Final = "marshal_taken_ranges"
"""The table with an entry for each range that was written."""
RANGE_COLUMN: Final = "marshal_range"
"""The column of the output with the id of the row's entry in `marshal_taken_ranges`."""
RENAMED: Final = {PARTITION_COLUMN: "kafka_partition", OFFSET_COLUMN: "kafka_offset"}
"""The columns of a frame that have another name in the output."""

Connection = TypeVar("Connection")


class LocksOutdatedError(Exception):
    """The transaction is to begin again, because another writer has changed the state that it started from."""


MOST_CONFLICTS: Final = 10
"""How often work begins again after a conflict with another transaction."""


class TransactionConflictError(UnavailableError):
    """The database ended the transaction because of another one, such as by a deadlock; it can begin again at once."""


class ValueRejectedError(Exception):
    """The table has rejected a value; the reason is the message."""

    def __init__(self, reason: str, column: str | None = None) -> None:
        super().__init__(reason)
        self.column = column
        """The table's column, None if unknown."""


class LockMode(Enum):
    """How a transaction locks its partitions from the judgement of its ranges until it ends."""

    NOT = "not"
    SHARED = "shared"
    ALONE = "alone"


class Kind(StrEnum):
    """A kind of column in the sink's own tables and in the relations of its statements."""

    NAME = "name"
    """A text that is compared exactly: case, accents and spaces at its end count."""
    INTEGER = "integer"
    BIGINT = "bigint"
    BOOLEAN = "boolean"
    ID = "id"
    """The primary key, a bigint that the database assigns to each new row."""
    INSTANT = "instant"
    """The time of the insert, by default."""


@dataclass(frozen=True, slots=True)
class OwnTable:
    """One of the sink's own tables."""

    columns: Mapping[str, Kind]
    optional: Collection[str] = ()
    """The columns that may be null."""
    key: Sequence[str] = ()
    """The primary key, if no column is of the kind `ID`."""
    indexes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The columns of each index, by its name."""


_KEY: Final = ("output", "member_group", "topic", "partition")
OWN_TABLES: Final[Mapping[str, OwnTable]] = {
    POSITIONS: OwnTable(
        {
            "output": Kind.NAME,
            "member_group": Kind.NAME,
            "topic": Kind.NAME,
            "partition": Kind.INTEGER,
            "coordination_topic_id": Kind.NAME,
            "data_topic_id": Kind.NAME,
            "generation": Kind.BIGINT,
            "epoch": Kind.BIGINT,
            "position": Kind.BIGINT,
            "version": Kind.INTEGER,
            "changed_at": Kind.INSTANT,
        },
        optional={"coordination_topic_id", "data_topic_id", "generation", "epoch", "position"},
        key=_KEY,
    ),
    TAKEN: OwnTable(
        {
            "id": Kind.ID,
            "output": Kind.NAME,
            "member_group": Kind.NAME,
            "topic": Kind.NAME,
            "partition": Kind.INTEGER,
            "coordination_topic_id": Kind.NAME,
            "data_topic_id": Kind.NAME,
            "generation": Kind.BIGINT,
            "epoch": Kind.BIGINT,
            "start_offset": Kind.BIGINT,
            "first_readable": Kind.BIGINT,
            "end_offset": Kind.BIGINT,
            "row_count": Kind.BIGINT,
            "has_offsets": Kind.BOOLEAN,
            "version": Kind.INTEGER,
            "taken_at": Kind.INSTANT,
        },
        indexes={
            "marshal_taken_ranges_by_key": (*_KEY, "end_offset"),
            "marshal_taken_ranges_by_generation": (*_KEY, "generation", "end_offset"),
        },
    ),
}
"""The sink's own tables, by name."""

RANGE_KINDS: Final[Mapping[str, Kind]] = {
    "partition": Kind.INTEGER,
    "coordination_topic_id": Kind.NAME,
    "data_topic_id": Kind.NAME,
    "generation": Kind.BIGINT,
    "epoch": Kind.BIGINT,
    "start": Kind.BIGINT,
    "first_readable": Kind.BIGINT,
    "end": Kind.BIGINT,
    "in_any_order": Kind.BOOLEAN,
}
"""The fields of a `ClaimedRange` that statements use."""
COLUMN_NAMES: Final = {"start": "start_offset", "end": "end_offset"}
"""Names in SQL of the fields that have another one there."""


CREATE_OFFSETS: Final = (
    'CREATE TEMPORARY TABLE marshal_offsets ("partition" integer, first_offset bigint, end_offset bigint)'
)
OFFSETS_OF_STAGED: Final = """
    INSERT INTO marshal_offsets SELECT kafka_partition, min(kafka_offset), max(kafka_offset) + 1
    FROM (SELECT r.kafka_partition, r.kafka_offset, r.kafka_offset - dense_rank() OVER
    (PARTITION BY r.kafka_partition ORDER BY r.kafka_offset) AS run FROM {staged} AS r
    JOIN {wanted} ON r.kafka_partition = w."partition" AND r.kafka_offset >= w.first_readable
    AND r.kafka_offset < w.end_offset) AS own GROUP BY kafka_partition, run
    """
"""Adds the offsets of the staged rows to `marshal_offsets`, as intervals."""
IS_OLDER: Final = """EXISTS (
    SELECT 1 FROM {taken} AS t JOIN {wanted} ON t."partition" = w."partition"
    AND t.data_topic_id = w.data_topic_id AND t.generation < w.generation
    JOIN marshal_offsets AS o ON o."partition" = w."partition"
    WHERE t.output = %(output)s AND t.member_group = %(member_group)s AND t.topic = %(topic)s
    AND t.id = {rows}.marshal_range AND {rows}.kafka_partition = w."partition"
    AND {rows}.kafka_offset >= o.first_offset AND {rows}.kafka_offset < o.end_offset)
    """
"""The condition that a row of the output is of an older generation, at an offset in `marshal_offsets`."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A part of a statement, with its parameters."""

    text: str
    parameters: Mapping[str, object] = field(default_factory=dict)


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """The number of rows that the statement returned, or inserted, updated or deleted."""
        ...

    def fetchall(self) -> Sequence[Any]:
        """Return the rows."""
        ...


class TypedColumn(Protocol):
    """A column of the output, and which values it stores."""

    @property
    def shown(self) -> str:
        """The declared type."""
        ...

    @property
    def is_generated(self) -> bool:
        """Whether the database computes each value."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the column stores whole numbers as numbers, as those by which the sink finds rows must."""
        ...

    def holds(self, data_type: "DataType") -> bool:
        """Return whether the column stores each value of a Spark type unchanged, or rejects it."""
        ...


class EvaluatedRows(Protocol):
    """The rows of a batch, evaluated once, in the form in which the dialect loads them."""

    @property
    def counts(self) -> Mapping[int | None, int]:
        """The number of rows, by partition."""
        ...

    @property
    def all_have_offsets(self) -> bool:
        """Whether each row has an offset."""
        ...

    @property
    def rejected(self) -> RejectedRow | None:
        """The first row with a value that the database would change or reject, or None."""
        ...


class StagedRows(ABC, Generic[Connection]):
    """The rows of a batch in a staging table, where they wait until the sink moves them to the output.

    The sink calls `stage` before it locks its ranges, and `move` after it has judged them. A staging table that ends
    with the transaction, as a temporary table does, leaves nothing. One that executors fill is created before, by
    `Dialect.evaluated_by_tasks`.
    """

    name: str
    """The staging table for FROM, with the output's columns. In the dialects here it also has `marshal_range`."""
    has_offsets: bool
    """Whether it has the column `kafka_offset`."""

    @abstractmethod
    def stage(self, connection: Connection, wanted: Sequence[ClaimedRange]) -> None:
        """Create the staging table with the output's column types, and load all rows into it.

        Args:
            connection: The connection with the open transaction.
            wanted: The ranges of the batch, for errors.

        Raises:
            SinkRejectedError: The database would change or rejects a row, or the number of rows has changed.
        """

    @abstractmethod
    def move(self, connection: Connection, wanted: Sequence[ClaimedRange], counts: Mapping[int | None, int]) -> None:
        """Move the rows of `wanted` to the output, in the open transaction.

        Args:
            connection: The connection with the open transaction.
            wanted: The ranges to be written.
            counts: The number of rows, by partition.

        Raises:
            SinkRejectedError: The table rejects a row, or the number of moved rows differs from `counts`.
        """

    def attempt(self, connection: Connection) -> AbstractContextManager[None]:
        """Run statements that write rows, after whose rejection the transaction continues.

        Raises `ValueRejectedError` if the table rejects a value. By default the database's error is raised as it is.
        """
        del connection
        return nullcontext()

    def count_error(self, connection: Connection, expected: int, found: int) -> MarshalError:
        """Return the error for a staging table with another number of rows than expected."""
        del connection
        return changed_result("the staging table of the batch", expected, found)

    def clear(self, connection: Connection) -> None:
        """Remove what the transaction's end would not remove. By default nothing is left."""


class Dialect(ABC, Generic[Connection]):
    """The SQL and the driver of a database engine, for one output table.

    Each method with a connection runs in the transaction that `transaction` began. No method may commit.
    """

    lock_clauses: Mapping[LockMode, str] = {LockMode.NOT: "", LockMode.ALONE: "FOR UPDATE"}
    """What a SELECT of positions ends with. `SHARED` is missing if writers of a partition always exclude each other."""
    keep_existing: str = 'ON CONFLICT (output, member_group, topic, "partition") DO NOTHING'
    """What an INSERT of positions ends with, so that existing ones are kept."""
    keep_ids: str = ""
    """What an INSERT of given values for a column of the kind `ID` has before its SELECT."""
    delete_statement: str = f"DELETE FROM {{rows}} WHERE {IS_OLDER}"
    """Deletes the rows of older generations at the offsets in `marshal_offsets`."""
    count_statement: str = f"SELECT count(*) FROM {{rows}} WHERE {IS_OLDER}"
    """Counts these rows."""
    keep_stored_rows: str = "ON CONFLICT ({keys}) DO NOTHING"
    """What an INSERT of rows ends with, so that a row with the same keys is kept."""
    add_column_statement: str = "ALTER TABLE {rows} ADD COLUMN IF NOT EXISTS {column}"
    """Adds a column to the output, unless another transaction has added it. In MariaDB it commits by itself."""
    temporary_clause: str = ""
    """What a temporary table is declared with, so that it ends with the transaction or the connection."""

    def __init__(self, schema: str, table: str) -> None:
        """Store the names.

        Args:
            schema: The schema (in MariaDB: the database) of all tables.
            table: The table for the rows.
        """
        self.schema, self.table = schema, table
        self.output = f"{schema}.{table}"

    # The driver

    @abstractmethod
    def transaction(self, reached: Callable[[str], None]) -> AbstractContextManager[Connection]:
        """Open a connection with one transaction, which is committed at the end and rolled back after any error.

        The isolation level is read committed. The driver's errors are raised as errors of this library, in one line
        and without the password.

        Args:
            reached: Called with "committing" before the commit and with "committed" after it.

        Returns:
            A context manager of the connection.
        """

    @abstractmethod
    def run(self, connection: Connection, statement: str, parameters: Mapping[str, object]) -> Cursor:
        """Execute a statement with named parameters such as `%(topic)s`. Percent signs in names are doubled."""

    # The SQL

    @abstractmethod
    def quoted(self, *names: str) -> str:
        """Return a quoted name, with percent signs doubled; several names are joined by dots."""

    @abstractmethod
    def relation(self, alias: str, columns: Mapping[str, Kind], rows: Iterable[Sequence[object]]) -> Fragment:
        """Return a relation of the given rows, for FROM, with this alias. Parameters begin with the alias."""

    def one_of(self, expression: str, numbers: Iterable[int]) -> Fragment:
        """Return the condition that an expression is one of these numbers; false if there are none.

        A statement has at most one of these conditions.
        """
        listed = ", ".join(str(int(number)) for number in numbers)
        return Fragment(f"({expression} IN ({listed}))" if listed else "(1 = 0)")

    def update_from(self, table: str, alias: str, given: str, assignments: Mapping[str, str], condition: str) -> str:
        """Return the UPDATE of the rows of `table` that match a row of the relation `given`.

        The expressions of `assignments`, by column, all see the values from before the update.
        """
        assigned = ", ".join(f"{column} = {expression}" for column, expression in assignments.items())
        return f"UPDATE {table} AS {alias} SET {assigned} FROM {given} WHERE {condition}"

    @abstractmethod
    def lock_topic(self, connection: Connection, topic: str, *, shared: bool) -> None:
        """Lock a topic of the output until the transaction ends, shared or exclusively."""

    def lock_names(self, connection: Connection, names: Sequence[str]) -> None:
        """Take exclusive locks with these names until the transaction ends, always in the same order.

        Only called if `lock_clauses` has `SHARED`.
        """

    # Tables

    @abstractmethod
    def create_own_tables(self, connection: Connection) -> None:
        """Create the tables of `OWN_TABLES` and their indexes that are missing, safely beside other creators."""

    @abstractmethod
    def create_output(self, connection: Connection, rows: "StructType", keys: Sequence[str] = ()) -> None:
        """Create the table for the rows, unless it exists, with an index by which the rows of a range are found.

        Args:
            connection: The connection with the open transaction.
            rows: The schema of the frame.
            keys: The table's columns that get a unique index; none if rows are only appended.
        """

    def add_columns(self, connection: Connection, columns: "Mapping[str, DataType]") -> None:
        """Add columns of these Spark types to the output. They may be null, and have no default."""
        for name, data_type in columns.items():
            declared = f"{self.quoted(name)} {self.column_type(name, data_type)} NULL"
            self.execute(connection, self.add_column_statement, column=Fragment(declared))

    @abstractmethod
    def column_type(self, name: str, data_type: "DataType") -> str:
        """Return the type of a column for a Spark type. Raises `ConfigurationError` for a type that has none."""

    @abstractmethod
    def columns(self, connection: Connection) -> Collection[str]:
        """Return the output's columns; none if the table does not exist or may not be read.

        The sink compares what it gets before and after a batch is processed. So a mapping of the names to the types
        shows a type that was changed meanwhile.
        """

    @abstractmethod
    def check_output(self, connection: Connection, types: "Mapping[str, DataType]") -> None:
        """Raise `ConfigurationError` if a table could lose rows, or a column would store other values.

        Args:
            connection: The connection with the open transaction.
            types: The Spark types of the columns that are written, by the output's column names.
        """

    def _check_column_types(self, types: "Mapping[str, DataType]", there: Mapping[str, TypedColumn]) -> None:
        """Raise `ConfigurationError` unless each column of the output stores the values of its Spark type unchanged.

        Args:
            types: The Spark types, by the output's column names.
            there: The output's columns.
        """
        for name in types:
            if there[name].is_generated:
                raise ConfigurationError(
                    f"table {self.output}: column {name!r} is generated, so it cannot hold the result's values. Drop "
                    "the column from the result, or make it a plain column"
                )
        own = {RANGE_COLUMN, *RENAMED.values()}
        wrong = [
            f"column {name!r} is {there[name].shown}, and the result's is {data_type.simpleString()}: make it {wanted}"
            for name, data_type in types.items()
            if (wanted := self.column_type(name, data_type))
            and not (there[name].holds(data_type) and (name not in own or there[name].is_whole))
        ]
        if wrong:
            raise ConfigurationError(
                f"table {self.output} would store other values than the result has: {'; '.join(wrong)}. Or cast the "
                "column in the result to a type that the table's column stores unchanged"
            )

    def unique_indexes(self, connection: Connection) -> Collection[frozenset[str]]:
        """Return the columns of each unique index of the output. Only called for `mode="upsert"`."""
        del connection
        raise ConfigurationError(f"{type(self).__name__} has no unique_indexes, so mode='upsert' cannot be used")

    def unique_index_statement(self, keys: Sequence[str]) -> str:
        """Return the statement that creates a unique index on these columns of the output."""
        name = f"marshal_keys_{zlib.crc32(self.table.encode()):08x}"
        columns = ", ".join(map(self.quoted, keys))
        return f"CREATE UNIQUE INDEX {self.quoted(name)} ON {self.quoted(self.schema, self.table)} ({columns})"

    def inexact_keys(self, connection: Connection, keys: "Mapping[str, DataType]") -> list[str]:
        """Return the keys of which the database takes different values of these Spark types for equal.

        A column of strings is one if its collation ignores case, accents or spaces. By default there is none.
        """
        del connection, keys
        return []

    def changed_by_update(self, connection: Connection) -> Collection[str]:
        """Return the output's columns that an UPDATE changes without naming them; by default none."""
        del connection
        return ()

    def is_number_or_time(self, connection: Connection, column: str) -> bool:
        """Return whether the database orders a column's values as numbers or times. By default it does."""
        del connection, column
        return True

    # Rows

    @abstractmethod
    def evaluated(self, frame: "DataFrame", done: Sequence[int]) -> AbstractContextManager[EvaluatedRows]:
        """Evaluate a frame once on the executors, without the rows of the partitions `done`."""

    @contextmanager
    def evaluated_by_tasks(
        self,
        frame: "DataFrame",
        done: Sequence[int],
        ids: Mapping[int, int],
        *,
        is_read_by_hook: bool,
    ) -> Iterator[EvaluatedRows | None]:
        """Evaluate a frame once in tasks that stage its rows, without the rows of the partitions `done`.

        Args:
            frame: The frame.
            done: The partitions whose rows are left out.
            ids: What `reserved_ids` returned.
            is_read_by_hook: Whether a hook reads the staged rows.

        Yields:
            The staged rows, or None if the driver must write the batch: a row may be rejected, or the dialect has no
            staging by tasks.
        """
        del frame, done, ids, is_read_by_hook
        yield None

    def reserved_ids(self, connection: Connection, enter: Callable[[], Mapping[int, int]]) -> Mapping[int, int]:
        """Return ids for the entries of ranges in `marshal_taken_ranges`, by partition, for `evaluated_by_tasks`.

        Args:
            connection: The connection with the open transaction.
            enter: Inserts the entries and returns their ids. They must not be committed.

        Returns:
            Ids that the database assigns to nothing else, or none: it then assigns them when the rows are moved.
        """
        del connection, enter
        return {}

    def drop_abandoned(self) -> None:
        """Remove what `evaluated_by_tasks` of dead runs has left, in a transaction of its own; by default nothing."""

    @abstractmethod
    def staged_rows(
        self,
        connection: Connection,
        ids: Mapping[int, int],
        columns: Sequence[str],
        rows: Any,  # noqa: ANN401 - see below
    ) -> StagedRows[Connection]:
        """Return the staging table of a batch, which `StagedRows.stage` creates.

        Args:
            connection: The connection with the open transaction.
            ids: The id of each range's entry in `marshal_taken_ranges`, by partition.
            columns: The frame's columns.
            rows: What `evaluated` returned.
        """

    def delete_older(
        self,
        connection: Connection,
        wanted: Sequence[ClaimedRange],
        key: Mapping[str, object],
        offsets: Mapping[int, Intervals],
        staged: StagedRows[Connection],
    ) -> int:
        """Delete the rows of older generations at the given offsets and those of the staged rows.

        Compaction can have removed messages since their rows were computed, so both are needed.

        Args:
            connection: The connection with the open transaction.
            wanted: The ranges whose older rows are replaced.
            key: The values of `output`, `member_group` and `topic` in `marshal_taken_ranges`.
            offsets: The offsets that the batch has read, by partition.
            staged: The new rows.

        Returns:
            How many of these rows still exist, because a trigger or rule of the table keeps them.
        """
        self.execute(connection, CREATE_OFFSETS)
        read = [(range_.partition, *bounds) for range_ in wanted for bounds in offsets.get(range_.partition, ())]
        kinds = {"partition": Kind.INTEGER, "first_offset": Kind.BIGINT, "end_offset": Kind.BIGINT}
        self.execute(
            connection,
            'INSERT INTO marshal_offsets SELECT "partition", first_offset, end_offset FROM {read}',
            read=self.relation("w", kinds, read),
        )
        if staged.has_offsets:
            self.execute(
                connection,
                OFFSETS_OF_STAGED,
                staged=Fragment(staged.name),
                wanted=self.ranges("w", wanted, "partition", "first_readable", "end"),
            )
        given = self.ranges("w", wanted, "partition", "data_topic_id", "generation")
        self.execute(connection, self.delete_statement, key, wanted=given)
        ((left,),) = self.execute(connection, self.count_statement, key, wanted=given).fetchall()
        return int(left)

    # Statements

    def named(self, statement: str, **fragments: str) -> str:
        """Return a statement with the names of the tables and these fragments filled in."""
        return statement.format(
            positions=self.quoted(self.schema, POSITIONS),
            taken=self.quoted(self.schema, TAKEN),
            rows=self.quoted(self.schema, self.table),
            **fragments,
        )

    def execute(
        self,
        connection: Connection,
        statement: str,
        parameters: Mapping[str, object] | None = None,
        **fragments: Fragment,
    ) -> Cursor:
        """Execute a statement with the names of the tables, these fragments and all parameters filled in."""
        given = dict(parameters or {})
        for fragment in fragments.values():
            given.update(fragment.parameters)
        return self.run(
            connection, self.named(statement, **{name: part.text for name, part in fragments.items()}), given
        )

    def ranges(self, alias: str, ranges: Iterable[ClaimedRange], *fields: str) -> Fragment:
        """Return a relation with these fields of ranges (`RANGE_KINDS`, `COLUMN_NAMES`)."""
        columns = {COLUMN_NAMES.get(name, name): RANGE_KINDS[name] for name in fields}
        return self.relation(alias, columns, [[getattr(range_, name) for name in fields] for range_ in ranges])


def column_names(columns: Iterable[str]) -> list[str]:
    """Return the table's column names for a frame's columns, preceded by the column of the range."""
    return [RANGE_COLUMN, *(RENAMED.get(name, name) for name in columns)]
