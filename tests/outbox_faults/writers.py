"""Writers of rows: each transaction writes to the outbox and to a second table, which records what was committed.

Either one writer alone uses a key, or a lock serialises the transactions that write it. So the `id` of a key's rows in
the second table rises in the order of their commits.
"""

import random
import threading
import uuid
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.writer import Outbox, OutboxRecord

SMALL_TOPIC_BYTES: Final = 20_000
"""The highest number of bytes of a batch in the small topic."""
LARGER_THAN_THE_TOPIC: Final = 30_000
LARGER_THAN_THE_CLIENT: Final = 1_100_000
LONGEST_TRANSACTION_S: Final = 2.5
KEYS_OF_A_WRITER: Final = 5
SHARED_KEYS: Final = 3

Connection = psycopg.Connection[tuple[Any, ...]]

_TRUTH: Final[LiteralString] = """
    CREATE TABLE {truth} (id bigserial PRIMARY KEY, topic text NOT NULL, key text, value text NOT NULL,
    is_poisoned boolean NOT NULL)
    """


@dataclass(frozen=True, slots=True)
class Fact:
    """A row that was committed; facts of a key are in the order of their commits."""

    topic: str
    key: str | None
    value: str
    is_poisoned: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """The outbox of the rows, and the topics of its records."""

    outbox: str
    plain: str
    small: str
    missing: str

    def named(self, statement: LiteralString) -> sql.Composed:
        """Insert the name of the second table into a statement."""
        return sql.SQL(statement).format(truth=sql.Identifier(f"{self.outbox}_truth"))


class Counted:
    """What the writers of a run did."""

    def __init__(self) -> None:
        self.committed = self.rolled_back = self.failed = self.long = 0


class Writer(threading.Thread):
    """Writes transaction after transaction until it is asked to stop, even if its connection fails."""

    def __init__(self, number: int, dsn: str, places: Places, seed: int, counted: Counted) -> None:
        super().__init__(name=f"writer {number}", daemon=True)
        self.over = threading.Event()
        self.poisons = threading.Event()
        self.failure: BaseException | None = None
        self._number = number
        self._dsn = dsn
        self._places = places
        self._chance = random.Random(f"{seed} {number}")
        self._counted = counted
        self._outbox = Outbox(places.outbox, max_bytes=10_000_000)

    def run(self) -> None:
        """Write until the thread is asked to stop."""
        try:
            while not self.over.is_set():
                try:
                    with psycopg.connect(self._dsn, connect_timeout=5) as connection:
                        while not self.over.is_set():
                            self._write(connection)
                            self.over.wait(self._chance.uniform(0.0, 0.05))
                except psycopg.OperationalError:
                    self._counted.failed += 1
                    self.over.wait(0.2)
        except BaseException as error:  # noqa: BLE001 - the run reports it
            self.failure = error

    def _write(self, connection: Connection) -> None:
        """Write one transaction, which is sometimes rolled back or slow."""
        facts = self._facts(connection)
        with connection.cursor() as cursor:
            cursor.executemany(
                self._places.named("INSERT INTO {truth} (topic, key, value, is_poisoned) VALUES (%s, %s, %s, %s)"),
                [(fact.topic, fact.key, fact.value[:60], fact.is_poisoned) for fact in facts],
            )
        self._outbox.stash(
            connection, [OutboxRecord(fact.topic, fact.value, fact.key, {"writer": "w"}) for fact in facts]
        )
        fate = self._chance.random()
        if fate < 0.12:
            self.over.wait(self._chance.uniform(0.2, LONGEST_TRANSACTION_S))
            self._counted.long += 1
        if 0.06 < fate < 0.2:
            connection.rollback()
            self._counted.rolled_back += 1
            return
        connection.commit()
        self._counted.committed += 1

    def _facts(self, connection: Connection) -> list[Fact]:
        chance = self._chance
        keys: list[str | None] = [None, *(f"w{self._number}k{number}" for number in range(KEYS_OF_A_WRITER))]
        if chance.random() < 0.3:
            shared = chance.randrange(SHARED_KEYS)
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, %s))", (self._places.outbox, shared))
            keys = [f"shared{shared}"]
        count = chance.randint(50, 300) if chance.random() < 0.03 else chance.randint(1, 8)
        facts = [self._fact(chance.choice(keys)) for _ in range(count)]
        if self.poisons.is_set() and chance.random() < 0.15:
            facts.insert(chance.randint(0, len(facts)), self._poisoned(chance.choice(keys)))
        return facts

    def _fact(self, key: str | None) -> Fact:
        topic = self._places.small if self._chance.random() < 0.3 else self._places.plain
        return Fact(topic, key, _value(self._chance.randint(40, 1_000)))

    def _poisoned(self, key: str | None) -> Fact:
        places = self._places
        match self._chance.randrange(3):
            case 0:
                return Fact(places.missing, key, _value(50), is_poisoned=True)
            case 1:
                return Fact(places.small, key, _value(LARGER_THAN_THE_TOPIC), is_poisoned=True)
            case _:
                return Fact(places.plain, key, _value(LARGER_THAN_THE_CLIENT), is_poisoned=True)


def _value(size: int) -> str:
    """Return a value whose first 36 characters are a unique name."""
    return str(uuid.uuid4()).ljust(size, "x")


def name_of(value: bytes | str | None) -> str:
    """Return the unique name of a value."""
    text = value.decode() if isinstance(value, bytes) else value
    return (text or "")[:36]


def create_truth(connection: Connection, places: Places) -> None:
    """Create the second table."""
    connection.execute(places.named(_TRUTH))


def read_truth(connection: Connection, places: Places) -> list[Fact]:
    """Return all rows that were committed."""
    found = connection.execute(places.named("SELECT topic, key, value, is_poisoned FROM {truth} ORDER BY id"))
    return [Fact(topic, key, name_of(value), is_poisoned) for topic, key, value, is_poisoned in found]


def read_parked(connection: Connection, tables: OutboxTables) -> dict[str, str]:
    """Return the parked rows with their reasons."""
    found = connection.execute(tables.named("SELECT substring(value FROM 1 FOR 36), reason FROM {parked}"), ())
    return {bytes(value).decode(): reason for value, reason in found}


def read_waiting(connection: Connection, tables: OutboxTables) -> set[str]:
    """Return the rows that are still in the outbox."""
    found = connection.execute(tables.named("SELECT substring(value FROM 1 FOR 36) FROM {rows}"), ())
    return {bytes(value).decode() for (value,) in found}
