"""Writes one row for each key: the newest row replaces the stored one (decision 20).

Rows of a key are in a total order. Without `order_by`, they all come from one partition of one topic, and the order is
the generation and then the offset. With `order_by`, the value of that column comes first, and topic, partition,
generation and offset decide between equal values. The table holds the last row of each key in this order. So it does
not depend on how the rows are divided into batches, which run writes them, or when.

`sink` calls this after it has locked and judged the ranges, in the transaction of the ranges.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.database.dialect import (
    RENAMED,
    Connection,
    Dialect,
    Fragment,
    StagedRows,
    TransactionConflictError,
    ValueRejectedError,
    column_names,
)
from marshal_dagster.sinks.rejected_rows import RejectedRow, first_rejected
from marshal_dagster.sinks.upsert_keys import WITHOUT_ORDER, Keys

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

_LATEST: Final = "marshal_latest"
"""A temporary table with the newest row of each key of the batch."""
_GENERATION, _TOPIC_ID = "marshal_own_generation", "marshal_own_topic_id"
_RANK, _COUNT, _NULLS, _TIE = "marshal_own_rank", "marshal_own_count", "marshal_own_nulls", "marshal_own_tie"
_FIRST, _LAST = "marshal_own_first", "marshal_own_last"
_KEPT: Final = (_GENERATION, _TOPIC_ID, _COUNT, _NULLS, _TIE, _FIRST, _LAST)
RESERVED: Final = (*_KEPT, _RANK)
"""Names that no column of the result may have."""


def stored_keys(keys: Keys) -> list[str]:
    """Return the names of the keys' columns in the table."""
    return [RENAMED.get(name, name) for name in keys.columns]


class Upsert(Generic[Connection]):
    """The statements with which the newest row of each key replaces the stored one."""

    def __init__(self, dialect: Dialect[Connection], keys: Keys) -> None:
        """Store the arguments; nothing is executed.

        Args:
            dialect: Executes statements.
            keys: The columns by which rows replace each other.
        """
        self._dialect, self._keys = dialect, keys
        self._output = f"table {dialect.output}"

    def check_output(self, connection: Connection, types: "Mapping[str, DataType]") -> None:
        """Raise `ConfigurationError` unless a unique index of the table has exactly the keys and separates all values.

        Args:
            connection: The connection with the open transaction.
            types: The Spark types of the result's columns, by the table's names.
        """
        stored = stored_keys(self._keys)
        if inexact := self._dialect.inexact_keys(connection, {name: types[name] for name in stored}):
            raise ConfigurationError(
                f"{self._output}: different values of {', '.join(inexact)} would be the same key there, and rows "
                "would be lost. Give the column a type and a collation that distinguish all strings "
                '(docs/how-to/sinks.md, "One row for each key")'
            )
        if frozenset(stored) not in self._dialect.unique_indexes(connection):
            raise ConfigurationError(
                f"{self._output} has no unique index on ({', '.join(stored)}), by which mode='upsert' finds the row to "
                f"replace. Run {self._dialect.unique_index_statement(stored).replace('%%', '%')}"
            )
        order = self._keys.order_by
        if order is not None and not self._dialect.is_number_or_time(connection, RENAMED.get(order, order)):
            raise ConfigurationError(
                f"{self._output}: column {order!r} is not a number or a time, so the database would order it as text. "
                "Change the column's type, or use another column as order_by"
            )

    def move(
        self,
        connection: Connection,
        staged: StagedRows[Connection],
        columns: Sequence[str],
        wanted: Mapping[ClaimedRange, int],
        counts: Mapping[int | None, int],
    ) -> None:
        """Move the newest staged row of each key to the output, unless the stored row is newer.

        Args:
            connection: The connection with the open transaction, which holds the partitions' exclusive locks.
            staged: The staging table.
            columns: The frame's columns.
            wanted: The ranges to be written, with the ids of their entries in `marshal_taken_ranges`.
            counts: The number of rows, by partition.

        Raises:
            SinkRejectedError: No order decides between two rows, a key is null, or the table rejects a row.
            TransactionConflictError: Another transaction has inserted a row of a key meanwhile.
        """
        if not wanted:
            return
        names = column_names(columns)
        self._select_latest(connection, staged, names, wanted)
        self._check_latest(connection, staged, wanted, sum(counts.get(range_.partition, 0) for range_ in wanted))
        try:
            with staged.attempt(connection):
                self._write(connection, names, wanted)
        except ValueRejectedError as error:
            raise self._first_rejected(connection, staged, names, wanted) or SinkRejectedError(
                f"{self._output} cannot store the rows: {error}; nothing was written. Run the batch again"
            ) from None
        self._check_written(connection, wanted)

    def _select_latest(
        self, connection: Connection, staged: StagedRows[Connection], names: Sequence[str], wanted: Mapping[Any, int]
    ) -> None:
        keys, order = (
            [f"s.{self._quoted(name)}" for name in listed] for listed in (stored_keys(self._keys), self._order())
        )
        of_key = f"(PARTITION BY {', '.join(keys)})"
        newest_first = f"(PARTITION BY {', '.join(keys)} ORDER BY {', '.join(f'{column} DESC' for column in order)})"
        is_null = " OR ".join(f"{column} IS NULL" for column in (*keys, *order))
        is_tie = " AND ".join(f"lead({column}) OVER {newest_first} = {column}" for column in order)
        self._dialect.execute(
            connection,
            f"CREATE TEMPORARY TABLE {_LATEST} {self._dialect.temporary_clause} AS SELECT {{kept}} FROM "
            f"(SELECT {{all}}, e.generation AS {_GENERATION}, e.data_topic_id AS {_TOPIC_ID}, "
            f"row_number() OVER {{newest_first}} AS {_RANK}, count(*) OVER {{of_key}} AS {_COUNT}, "
            f"max(CASE WHEN {{is_null}} THEN 1 ELSE 0 END) OVER {{of_key}} AS {_NULLS}, "
            f"CASE WHEN {{is_tie}} THEN 1 ELSE 0 END AS {_TIE}, "
            f"min(s.kafka_partition) OVER {{of_key}} AS {_FIRST}, max(s.kafka_partition) OVER {{of_key}} AS {_LAST} "
            "FROM {staged} AS s JOIN {taken} AS e ON e.id = s.marshal_range WHERE {is_taken}) AS ranked "
            f"WHERE {_RANK} = 1",
            kept=Fragment(", ".join(map(self._quoted, (*names, *_KEPT)))),
            all=Fragment(", ".join(f"s.{self._quoted(name)}" for name in names)),
            newest_first=Fragment(newest_first),
            of_key=Fragment(of_key),
            is_null=Fragment(is_null),
            is_tie=Fragment(is_tie),
            staged=Fragment(staged.name),
            is_taken=self._dialect.one_of("s.marshal_range", wanted.values()),
        )

    def _order(self) -> list[str]:
        """Return the columns that order the rows of a key within a batch, the most important first."""
        if self._keys.order_by is None:
            return ["kafka_offset"]
        return [self._keys.order_by, "kafka_partition", "kafka_offset"]

    def _check_latest(
        self,
        connection: Connection,
        staged: StagedRows[Connection],
        wanted: Mapping[ClaimedRange, int],
        expected: int,
    ) -> None:
        """Raise an error if rows are missing, a key is null, or no order decides."""
        ((count,),) = self._dialect.execute(connection, f"SELECT coalesce(sum({_COUNT}), 0) FROM {_LATEST}").fetchall()
        if count != expected:
            raise staged.count_error(connection, expected, int(count))
        crosses = f"{_FIRST} <> {_LAST}" if self._keys.order_by is None else "1 = 0"
        found = self._dialect.execute(
            connection,
            f"SELECT marshal_range, kafka_offset, {_NULLS}, CASE WHEN {crosses} THEN 1 ELSE 0 END, {_FIRST}, {_LAST} "
            f"FROM {_LATEST} WHERE {_NULLS} = 1 OR {_TIE} = 1 OR {crosses} "
            "ORDER BY marshal_range, kafka_offset LIMIT 1",
        ).fetchall()
        for taken, offset, has_null, is_crossing, first, last in found:
            if has_null:
                named = ", ".join([*self._keys.columns, *self._order()[:-2]])
                raise self._error(wanted, taken, offset, f"one of {named} is null in a row with these keys")
            if is_crossing:
                reason = f"partitions {first} and {last} both have rows of its key. {WITHOUT_ORDER}"
                raise self._error(wanted, taken, offset, reason)
            raise self._error(wanted, taken, offset, "the message has two rows of this key, and no order decides")

    def _first_rejected(
        self,
        connection: Connection,
        staged: StagedRows[Connection],
        names: Sequence[str],
        wanted: Mapping[ClaimedRange, int],
    ) -> SinkRejectedError | None:
        """Return the error that names the first row which the table rejects, found by writing parts of the rows."""
        found = self._dialect.execute(connection, f"SELECT DISTINCT marshal_range, kafka_offset FROM {_LATEST}")
        rows = sorted((int(taken), int(offset)) for taken, offset in found.fetchall())

        def error_of(first: int, end: int) -> ValueRejectedError | None:
            try:
                with staged.attempt(connection):
                    self._write(connection, names, wanted, (rows[first], rows[end - 1]))
            except ValueRejectedError as error:
                return error
            return None

        rejected = first_rejected(len(rows), error_of)
        if rejected is None:
            return None
        first, error = rejected
        shown = {stored: name for name, stored in RENAMED.items()}
        column = None if error.column is None else shown.get(error.column, error.column)
        return self._error(wanted, *rows[first], str(error), column)

    def _write(
        self,
        connection: Connection,
        names: Sequence[str],
        wanted: Mapping[ClaimedRange, int],
        part: tuple[tuple[int, int], tuple[int, int]] | None = None,
    ) -> None:
        """Write the rows of `marshal_latest`, or of the part between two pairs of a range's id and an offset."""
        place = "(w.marshal_range, w.kafka_offset)"
        is_part = "" if part is None else f" AND {place} >= {part[0]} AND {place} <= {part[1]}"
        given = self._parameters(wanted)
        same_key = Fragment(self._same_key())
        assignments = {self._in_statement(name): f"w.{self._in_statement(name)}" for name in names}
        self._dialect.execute(
            connection,
            self._dialect.update_from(
                "{rows}", "r", f"{_LATEST} AS w", assignments, f"{{same_key}} AND {self._is_newer('w', 'r')}{is_part}"
            ),
            given,
            same_key=same_key,
        )
        self._dialect.execute(
            connection,
            f"INSERT INTO {{rows}} ({{columns}}) SELECT {{columns}} FROM {_LATEST} AS w "
            f"WHERE NOT EXISTS (SELECT 1 FROM {{rows}} AS r WHERE {{same_key}}){is_part} "
            + self._dialect.keep_stored_rows,
            given,
            columns=Fragment(", ".join(map(self._quoted, names))),
            keys=Fragment(", ".join(map(self._quoted, stored_keys(self._keys)))),
            same_key=same_key,
        )

    def _check_written(self, connection: Connection, wanted: Mapping[ClaimedRange, int]) -> None:
        """Raise an error unless the table has, for each key, the batch's newest row or a newer one."""
        is_own = "(r.marshal_range = w.marshal_range AND r.kafka_offset = w.kafka_offset)"
        found = self._dialect.execute(
            connection,
            "SELECT w.marshal_range, w.kafka_offset, w.kafka_partition, CASE WHEN r.marshal_range IS NULL THEN 1 "
            f"ELSE 0 END, r.kafka_partition, e.topic FROM {_LATEST} AS w LEFT JOIN {{rows}} AS r ON {{same_key}} "
            "LEFT JOIN {taken} AS e ON e.id = r.marshal_range "
            f"WHERE CASE WHEN {is_own} OR {self._is_newer('r', 'w')} THEN 0 ELSE 1 END = 1 "
            "ORDER BY w.marshal_range, w.kafka_offset LIMIT 1",
            self._parameters(wanted),
            same_key=Fragment(self._same_key()),
        ).fetchall()
        for taken, offset, partition, is_missing, stored_partition, topic in found:
            if is_missing:
                reason = "another unique index, a trigger or a rule of the table keeps it out"
                raise self._error(wanted, taken, offset, reason)
            if self._keys.order_by is not None:
                raise TransactionConflictError(
                    f"{self._output}: another writer, or a trigger, has changed a row that partition {partition}, "
                    f"offset {offset} replaces. Run the batch again"
                )
            if topic is None:
                reason = "the stored row of its key was not written by this sink, so no order decides. Delete that row"
            elif (topic, stored_partition) == (next(iter(wanted)).topic, partition):
                reason = (
                    "the stored row of its key is from another group and data topic, or a trigger of the table keeps it"
                )
            else:
                where = f"partition {stored_partition} of topic {topic!r}"
                reason = f"the stored row of its key is from {where}. {WITHOUT_ORDER}"
            raise self._error(wanted, taken, offset, reason)

    def _is_newer(self, one: str, other: str) -> str:
        """Return the condition that `one` of the stored row `r` and the batch's row `w` is newer than the `other`."""
        generations = {"r": "e.generation", "w": f"w.{_GENERATION}"}
        is_same_group = "e.member_group = %(member_group)s"
        newer = (
            f"r.kafka_partition = w.kafka_partition AND "
            f"(({is_same_group} AND {generations[one]} > {generations[other]}) OR "
            f"((NOT {is_same_group} OR e.generation = w.{_GENERATION}) AND {one}.kafka_offset > {other}.kafka_offset))"
        )
        entry = "SELECT 1 FROM {taken} AS e WHERE e.id = r.marshal_range"
        if self._keys.order_by is None:
            same_topic = f"e.topic = %(topic)s AND ({is_same_group} OR e.data_topic_id = w.{_TOPIC_ID})"
            return f"EXISTS ({entry} AND {same_topic} AND {newer})"
        topics = {"r": "e.topic", "w": "%(topic)s"}
        is_newer_entry = (
            f"EXISTS ({entry} AND ({topics[one]} > {topics[other]} OR (e.topic = %(topic)s AND "
            f"({one}.kafka_partition > {other}.kafka_partition OR ({newer})))))"
        )
        stored, own = (f"{alias}.{self._in_statement(self._keys.order_by)}" for alias in "rw")
        if one == "w":
            return f"({stored} IS NULL OR {own} > {stored} OR ({own} = {stored} AND {is_newer_entry}))"
        return f"({stored} > {own} OR ({stored} = {own} AND (NOT EXISTS ({entry}) OR {is_newer_entry})))"

    def _same_key(self) -> str:
        return " AND ".join(f"r.{self._quoted(name)} = w.{self._quoted(name)}" for name in stored_keys(self._keys))

    def _parameters(self, wanted: Mapping[ClaimedRange, int]) -> dict[str, object]:
        first = next(iter(wanted))
        return {"member_group": first.group, "topic": first.topic}

    def _error(
        self, wanted: Mapping[ClaimedRange, int], taken: int, offset: int, reason: str, column: str | None = None
    ) -> SinkRejectedError:
        partition = next(range_.partition for range_, number in wanted.items() if number == taken)
        return RejectedRow(partition, offset, column, reason).error(self._output, list(wanted))

    def _quoted(self, name: str) -> str:
        return self._dialect.quoted(name)

    def _in_statement(self, name: str) -> str:
        """Return a quoted name for a statement, in which fragments are filled in."""
        return self._quoted(name).replace("{", "{{").replace("}", "}}")
