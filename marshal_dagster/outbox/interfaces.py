"""What the harvest needs of a database and of Kafka; tests and the simulator bring their own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from marshal_dagster.errors import MarshalError

ID_HEADER: Final = "marshal-outbox-id"
"""By which consumers know a record that comes again: the outbox's uid, "-", and the row's id."""

Header = tuple[str, bytes | None]


class Row(NamedTuple):
    """A row of the outbox, in the order in which it is published: by `id`."""

    id: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] | None = None
    created_us: int = 0
    """When it was written, by the database's clock, in microseconds."""


class OrderingKey(NamedTuple):
    """What keeps its order: the rows of one key in one topic; a row without a key is alone in its lane."""

    topic: str
    key: bytes | None
    row: int | None

    @classmethod
    def of(cls, row: Row) -> "OrderingKey":
        """Give a row's lane."""
        return cls(row.topic, row.key, row.id if row.key is None else None)


class RowReference(NamedTuple):
    """A row by its id and the time when it was written: microseconds of the database's clock, both bounds included.

    An id alone does not identify a row: a restored database, and `TRUNCATE ... RESTART IDENTITY`, give ids again. All
    changes to rows that were taken before use such references (`Store.turn`).
    """

    id: int
    created_from_us: int
    created_until_us: int

    @classmethod
    def of(cls, row: Row) -> "RowReference":
        """Return the reference to exactly this row."""
        return cls(row.id, row.created_us, row.created_us)


class PublishedBatch(NamedTuple):
    """The rows of a batch that was published."""

    rows: Collection[RowReference] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "PublishedBatch":
        """Return the batch of these rows."""
        return cls([RowReference.of(row) for row in rows])


@dataclass(frozen=True, slots=True)
class Parked:
    """A row that is set aside, and why."""

    row: RowReference
    reason: str


@dataclass(frozen=True, slots=True)
class BatchTransaction:
    """What is done in one transaction of the database: strike, set aside, and take the next rows."""

    done: PublishedBatch = field(default_factory=PublishedBatch)
    parked: Collection[Parked] = ()
    limit: int = 0
    """How many rows are taken at most."""
    limit_bytes: int = 1
    """How many bytes of keys, values and headers they have at most; a row is taken whatever it has."""
    held_lanes: Collection[OrderingKey] = ()
    """Whose rows are not taken now."""
    held_topics: Collection[str] = ()


class TransactionResult(NamedTuple):
    """What a turn came to: the rows taken, by rising id; how many were struck, and how many set aside."""

    rows: list[Row]
    struck: int = 0
    parked: int = 0


class SessionSupersededError(MarshalError):
    """A later session harvests this outbox: this one may strike and take nothing any more."""


class PublisherFencedError(MarshalError):
    """A later session publishes from this outbox, or the brokers have ended this one's transaction."""


class BatchUnsettledError(MarshalError):
    """It is not known whether a batch was published, or struck; the next session finds out."""


class RowRejectedError(Exception):
    """Nothing of a batch was published, because of one row: `row` is its id, None where that is not known."""

    def __init__(self, reason: str, row: int | None = None) -> None:
        """Keep them."""
        self.reason, self.row = reason, row
        super().__init__(reason)


class TopicRejectedError(Exception):
    """Nothing of a batch was published, because a topic of it cannot be written to."""

    def __init__(self, topic: str, reason: str) -> None:
        """Keep them."""
        self.topic, self.reason = topic, reason
        super().__init__(f"{topic}: {reason}")


class Store(Protocol):
    """The outbox's rows. Each method raises `UnavailableError` when the database does not answer."""

    def begin(self) -> int:
        """Begin a session and give its number, larger than all before; those end by it."""
        ...

    def turn(self, session: int, turn: BatchTransaction) -> TransactionResult:
        """Carry out a turn in one transaction.

        Where another row under the same id is set aside already, as after one was copied back by hand, a row stays.
        Raises `SessionSupersededError`, with nothing done, once a later session has begun.
        """
        ...


class Publisher(Protocol):
    """Kafka's end. What is published by one session cannot be by another that began before."""

    def begin(self) -> None:
        """Begin a session, once it has begun in the `Store`, or begin anew in one.

        That ends for good what earlier ones have sent, and refuses what they still send.

        Raises `PublisherFencedError`, `UnavailableError`.
        """
        ...

    def noted(self) -> PublishedBatch:
        """Give the rows of the last batch that was published, by any session.

        Raises `PublisherFencedError`, `UnavailableError`.
        """
        ...

    def refused(self, topics: Collection[str]) -> dict[str, str]:
        """Give which of these topics cannot be written to, and why. Raises `UnavailableError`."""
        ...

    def publish(self, rows: Sequence[Row]) -> None:
        """Publish rows in this order, with a note of which these are: all of it, or nothing.

        Raises `RowRejectedError` and `TopicRejectedError`, with nothing published and begun anew: make sure by a turn
        that the session goes on before the next one. `PublisherFencedError` and `BatchUnsettledError`, after which a
        new session is to begin.
        """
        ...
