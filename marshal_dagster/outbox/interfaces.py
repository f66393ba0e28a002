"""The protocols between a harvesting session and its two sides: the database (`Store`) and Kafka (`Publisher`).

`store` and `publisher` implement them; tests and the simulator have their own implementations.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from marshal_dagster.errors import MarshalError

ID_HEADER: Final = "marshal-outbox-id"
"""The header by which consumers recognise a repeated record. Its value is the outbox's uid, "-" and the row's id."""

Header = tuple[str, bytes | None]
"""The name and value of a record's header."""


class Row(NamedTuple):
    """A row of the outbox. Rows with the same topic and key are published in the order of their ids."""

    id: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] | None = None
    created_us: int = 0
    """When the row was written, in Unix microseconds by the database's clock."""


class OrderingKey(NamedTuple):
    """The topic and key of the rows among which order is kept.

    A row without a key has an ordering key of its own.
    """

    topic: str
    key: bytes | None
    row: int | None
    """The id of a row without a key; None otherwise."""

    @classmethod
    def of(cls, row: Row) -> "OrderingKey":
        """Return the ordering key of a row."""
        return cls(row.topic, row.key, row.id if row.key is None else None)


class RowRange(NamedTuple):
    """A reference to rows with consecutive ids, by these ids and the times when the rows were written.

    An id alone is not enough: after a restore of the database, or `TRUNCATE ... RESTART IDENTITY`, ids are assigned
    again. All changes to rows that were taken before use such references (`Store.turn`).
    """

    first: int
    """The first id."""
    last: int
    """The last id (inclusive)."""
    created_from_us: int
    """The earliest time at which a row was written, in Unix microseconds by the database's clock (inclusive)."""
    created_until_us: int
    """The latest such time (inclusive)."""

    @classmethod
    def of(cls, row: Row) -> "RowRange":
        """Return the reference to exactly this row."""
        return cls(row.id, row.id, row.created_us, row.created_us)


class PublishedBatch(NamedTuple):
    """References to the rows of a published batch: disjoint ranges, sorted by id."""

    ranges: Sequence[RowRange] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "PublishedBatch":
        """Return the batch with these rows, which are sorted by id."""
        breaks = [
            index
            for index, (row, following) in enumerate(pairwise(rows), 1)
            if following.id != row.id + 1 or following.created_us != row.created_us
        ]
        ends = [*breaks, len(rows)] if rows else []
        return cls(
            [
                RowRange(rows[start].id, rows[end - 1].id, rows[start].created_us, rows[start].created_us)
                for start, end in zip([0, *breaks], ends, strict=False)
            ]
        )

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return sum(rows.last - rows.first + 1 for rows in self.ranges)


@dataclass(frozen=True, slots=True)
class Parked:
    """A row to set aside, with the reason."""

    row: RowRange
    reason: str


@dataclass(frozen=True, slots=True)
class BatchTransaction:
    """The work of one database transaction: delete published rows, set rows aside, and take the next rows."""

    done: PublishedBatch = field(default_factory=PublishedBatch)
    """The published rows to delete."""
    parked: Collection[Parked] = ()
    """The rows to set aside."""
    limit: int = 0
    """The largest number of rows to take."""
    limit_bytes: int = 1
    """The largest total size of the keys, values and headers of the rows to take. One row is taken in any case."""
    held_lanes: Collection[OrderingKey] = ()
    """The ordering keys whose rows are not taken, because they wait after a refusal."""
    held_topics: Collection[str] = ()
    """The topics whose rows are not taken, because they wait after a refusal."""


class TransactionResult(NamedTuple):
    """The result of a `BatchTransaction`."""

    rows: list[Row]
    """The rows taken, sorted by id."""
    struck: int = 0
    """The number of rows deleted."""
    parked: int = 0
    """The number of rows set aside."""


class SessionSupersededError(MarshalError):
    """A later session harvests this outbox, so this one may not delete or take rows any more."""


class PublisherFencedError(MarshalError):
    """A later session publishes from this outbox, or the brokers have aborted the transaction of this one."""


class BatchUnsettledError(MarshalError):
    """It is unknown whether a batch was published. The next session checks that."""


class RowRejectedError(Exception):
    """A batch was refused because of one row, and nothing of it was published."""

    def __init__(self, reason: str, row: int | None = None) -> None:
        """Store the reason and the id of the row, or None if the row is unknown."""
        self.reason, self.row = reason, row
        super().__init__(reason)


class TopicRejectedError(Exception):
    """A batch was refused because one of its topics cannot be written to, and nothing of it was published."""

    def __init__(self, topic: str, reason: str) -> None:
        """Store the topic and the reason."""
        self.topic, self.reason = topic, reason
        super().__init__(f"{topic}: {reason}")


class Store(Protocol):
    """The rows of an outbox in its database. Each method raises `UnavailableError` if the database does not answer."""

    def begin(self) -> int:
        """Start a session, which ends all earlier sessions; return its number, larger than all earlier numbers."""
        ...

    def turn(self, session: int, turn: BatchTransaction) -> TransactionResult:
        """Carry out a `BatchTransaction` in one transaction of the database.

        A row is not set aside if a different row with the same id already is.

        Raises `SessionSupersededError`, without any change, if a later session has started.
        """
        ...


class Publisher(Protocol):
    """The Kafka side of an outbox. Once a session has started, earlier sessions can publish nothing more."""

    def begin(self) -> None:
        """Start a session after it has started in the `Store`, or initialise it again.

        This aborts the open transactions of earlier sessions, and fences their producers.

        Raises `PublisherFencedError`, `UnavailableError`.
        """
        ...

    def noted(self) -> PublishedBatch:
        """Return the rows of the last batch that any session has published.

        Raises `PublisherFencedError`, `UnavailableError`.
        """
        ...

    def refused(self, topics: Collection[str]) -> dict[str, str]:
        """Return the topics that cannot be written to, each with the reason. Raises `UnavailableError`."""
        ...

    def publish(self, rows: Sequence[Row], settle: Callable[[], None]) -> None:
        """Publish rows in this order, together with a note about them, all or nothing.

        `settle` is called when the brokers have accepted all rows, before they are committed. If it raises, nothing is
        published.

        Raises `RowRejectedError` or `TopicRejectedError` if nothing was published. The publisher has then initialised
        the session again, so the next `settle` must check by `Store.turn` that the session is still current.

        Raises `PublisherFencedError` or `BatchUnsettledError` if a new session must start.
        """
        ...
