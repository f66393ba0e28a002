"""Rows in Arrow batches as the records of Kafka transactions, in Spark's tasks and in the driver."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import TYPE_CHECKING

from marshal_dagster.kafka.transactions import (
    CHOSEN_PARTITION,
    NOW,
    Header,
    RecordRejectedError,
    Transaction,
    UnnamedRecord,
)
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.kafka.records import (
    HEADERS,
    KEY,
    OUTPUT_PARTITION,
    REPLACED_TIMES,
    TIMESTAMP,
    VALUE,
)
from marshal_dagster.sinks.sink import OFFSET_COLUMN

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch


class UnorderedError(Exception):
    """The rows of a range are not in the order of their messages."""


class ArrowRows:
    """The rows of a task or of the driver. Those of a range follow each other, in ascending order of their offsets."""

    def __init__(self, batches: Iterable["RecordBatch"], checked: Mapping[ClaimedRange, int] | None = None) -> None:
        """Set up.

        Args:
            batches: The rows.
            checked: The number of rows of each range, if their order must be checked.
        """
        self._batches = iter(batches)
        self._batch: RecordBatch | None = None
        self._checked = checked
        self.complete: set[int] = set()
        """The partitions whose records were all sent."""
        self._next()

    @property
    def partition(self) -> int | None:
        """The source partition of the next row, None at the end."""
        return None if self._batch is None else self._batch.column(0)[0].as_py()

    def send(self, transaction: Transaction, topic: str, wanted: ClaimedRange) -> int:
        """Send the records of a range, and return their number.

        Raises `UnorderedError` at the first row that is checked and not in its order.
        """
        sent, last = 0, -1
        for rows in self._of(wanted.partition):
            if self._checked is not None:
                last = _last_offset(rows, last)
            sent += transaction.send_many(_records(topic, rows))
        if self._checked is not None and sent < self._checked[wanted]:
            raise UnorderedError  # further rows of the range may follow after those of another range
        self.complete.add(wanted.partition)
        return sent

    def skip(self, partition: int) -> None:
        """Skip the remaining rows of a partition."""
        for _ in self._of(partition):
            pass

    def _of(self, partition: int) -> Iterator["RecordBatch"]:
        while self._batch is not None and self.partition == partition:
            batch, partitions = self._batch, self._batch.column(0)
            end = len(batch)
            others = partitions.to_numpy() != partition
            if others.any():
                end = int(others.argmax())
            if end == len(batch):
                self._next()
            else:
                self._batch = batch.slice(end)
            yield batch.slice(0, end)

    def _next(self) -> None:
        self._batch = next((batch for batch in self._batches if len(batch)), None)


def _last_offset(rows: "RecordBatch", before: int) -> int:
    """Return the offset of the last row. Raises `UnorderedError` if one is missing or lower than that before it."""
    if OFFSET_COLUMN not in rows.schema.names:
        return before
    column = rows.column(OFFSET_COLUMN)
    if column.null_count:
        raise UnorderedError
    offsets = column.to_numpy()
    if offsets[0] < before or (offsets[1:] < offsets[:-1]).any():
        raise UnorderedError
    return int(offsets[-1])


def _records(topic: str, rows: "RecordBatch") -> Iterable[UnnamedRecord]:
    """Return the records of rows. Raises `RecordRejectedError` if the client would send another record than one."""
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    given = {name: column for name, column in columns.items() if column.null_count < len(rows)}
    return zip(
        repeat(topic),
        columns[VALUE].to_pylist(),
        given[KEY].to_pylist() if KEY in given else repeat(None),
        _numbers(given.get(OUTPUT_PARTITION), CHOSEN_PARTITION, _is_negative),
        _numbers(given.get(TIMESTAMP), NOW, _is_replaced),
        _headers(given[HEADERS]) if HEADERS in given else repeat(None),
        strict=False,
    )


def _is_negative(partitions: "Array") -> bool:
    import pyarrow.compute as pc

    return bool(pc.any(pc.less(partitions, 0)).as_py())


def _is_replaced(timestamps: "Array") -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    return bool(pc.any(pc.is_in(timestamps, value_set=pa.array(list(REPLACED_TIMES), pa.int64()))).as_py())


def _numbers(column: "Array | None", default: int, is_wrong: Callable[["Array"], bool]) -> Iterable[int]:
    if column is None:
        return repeat(default)
    if is_wrong(column):
        raise RecordRejectedError("", "a partition or a timestamp is not valid", is_too_large=False)
    return column.fill_null(default).to_pylist()  # type: ignore[no-any-return]


def _headers(column: "Array") -> Iterator[list[Header] | None]:
    names, values = (fields.to_pylist() for fields in column.flatten().flatten())
    if None in names:
        raise RecordRejectedError("", "a header has no name", is_too_large=False)
    headers: list[Header] = list(zip(names, values, strict=True))
    start = 0
    for length in column.value_lengths().to_pylist():
        if length is None:
            yield None
            continue
        yield headers[start : start + length]
        start += length
