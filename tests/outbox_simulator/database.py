"""The simulated database below the library's own `PostgresStore`: transactions, row locks, lost connections."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from marshal_dagster.errors import ConfigurationError, UnavailableError
from tests.outbox_simulator.network import Side
from tests.simulator.scheduler import Process, Task

if TYPE_CHECKING:
    from tests.outbox_simulator.world import World

ANSWER_TIMEOUT_MS: Final = 2_000.0
LOCK_TIMEOUT_MS: Final = 1_000.0
NO_RIGHT: Final = "permission denied; grant the missing right to this role"
IDLE_TIMEOUT_MS: Final = 3_000.0
"""How long the server keeps an open transaction of an idle client."""


class Stored(NamedTuple):
    """A row as it is stored."""

    id: int
    topic: str
    key: bytes | None
    value: bytes
    created_us: int


@dataclass(eq=False, slots=True)
class Transaction:
    """A client's transaction; its changes become visible with the commit."""

    process: str
    deleted: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    session: int | None = None
    is_over: bool = False
    is_sent: bool = False
    """Whether the client has given up on a commit that is still on its way to the server."""
    began_ms: float = 0.0


class Database:
    """The committed tables, and the locks on the registry's row."""

    def __init__(self, world: "World") -> None:
        self.rows: dict[int, Stored] = {}
        self.parked: dict[int, Stored] = {}
        self.session = 0
        self.restarts = 0
        self.up_from_ms = 0.0
        self._world = world
        self._open: dict[Transaction, None] = {}
        self._sharers: dict[Transaction, None] = {}
        self._owner: Transaction | None = None
        self._waiters: list[Task] = []

    def begin(self, process: str) -> Transaction:
        """Begin a transaction, which is rolled back if its client is idle for long."""
        transaction = Transaction(process, began_ms=self._world.scheduler.now_ms)
        self._open[transaction] = None
        return transaction

    def hang_up(self, process: str) -> None:
        """End the transactions of a dead process."""
        for transaction in tuple(self._open):
            if transaction.process == process and not transaction.is_sent:
                self.end(transaction)

    def execute(self, transaction: Transaction, statement: str, parameters: Any) -> list[tuple[Any, ...]]:  # noqa: ANN401
        """Execute a statement of the library; it may wait for a lock."""
        if transaction.is_over:
            raise UnavailableError("the connection was lost")
        if statement.startswith("SELECT session"):
            if "FOR SHARE" in statement:
                self._lock(transaction, is_exclusive=False)
            return [(self.session,)]
        if statement.startswith("UPDATE {registry}"):
            self._lock(transaction, is_exclusive=True)
            transaction.session = self.session + 1
            return [(transaction.session,)]
        if "WITH wanted" in statement:
            removed = self._remove(transaction, transaction.parked, statement, parameters)
            return [(len(removed), 0, [])]  # no trigger and no row with the same id keeps rows
        if "DELETE FROM {rows}" in statement:
            return self._remove(transaction, transaction.deleted, statement, parameters)
        if "SELECT count(*) FROM {rows}" in statement:
            return [(0,)]  # no trigger keeps deleted rows
        if "sum(size)" in statement:
            return self._take(transaction, statement, parameters)
        raise NotImplementedError(statement)

    def commit(self, transaction: Transaction) -> None:
        """Make a transaction's changes visible."""
        self._end_idle()
        if transaction.is_over:
            raise UnavailableError("the connection was lost")
        judge = self._world.judge
        if transaction.session is not None:
            self.session = transaction.session
            judge.begun(transaction.process, self.session)
            self._world.report("session {} of {}", self.session, transaction.process)
            self._world.outcomes["sessions"] += 1
        struck = [number_of(self.rows.pop(each)) for each in transaction.deleted if each in self.rows]
        moved = [self.rows.pop(each) for each in transaction.parked if each in self.rows]
        parked = [number_of(row) for row in moved]
        self._world.outcomes["rows set aside"] += len(parked)
        self.parked |= {row.id: row for row in moved}
        if transaction.deleted or transaction.parked:
            judge.struck(transaction.process, struck, parked)
            self._world.report("{} strikes {}, sets aside {}", transaction.process, struck, parked)
        self.end(transaction)

    def end(self, transaction: Transaction) -> None:
        """Roll back a transaction, unless it has ended."""
        transaction.is_over = True
        self._open.pop(transaction, None)
        self._sharers.pop(transaction, None)
        if self._owner is transaction:
            self._owner = None
        for waiter in self._waiters:
            self._world.scheduler.wake(waiter)

    def restart(self, down_ms: float) -> None:
        """Lose all connections and all that is not committed, and be down for a while."""
        self.restarts += 1
        self.up_from_ms = self._world.scheduler.now_ms + down_ms
        for transaction in tuple(self._open):
            self.end(transaction)

    def put_back(self, row_id: int) -> None:
        """Put a parked row back, as an operator does."""
        self.rows[row_id] = self.parked.pop(row_id)
        self._world.judge.put_back(number_of(self.rows[row_id]))

    def truncate(self) -> bool:
        """Empty the tables, as an operator does, unless a transaction that uses them prevents it."""
        self._end_idle()
        if self._open:
            return False
        gone = [*self.rows.values(), *self.parked.values()]
        self.rows, self.parked = {}, {}
        self._world.judge.removed([number_of(row) for row in gone])
        return True

    def _lock(self, transaction: Transaction, *, is_exclusive: bool) -> None:
        scheduler = self._world.scheduler
        gives_up_ms = scheduler.now_ms + LOCK_TIMEOUT_MS
        self._end_idle()
        while self._is_locked(transaction, is_exclusive=is_exclusive):
            task = scheduler.current
            if scheduler.now_ms >= gives_up_ms or task is None:
                raise UnavailableError("canceling statement due to lock timeout")
            self._waiters.append(task)
            try:
                scheduler.park(gives_up_ms - scheduler.now_ms)
            finally:
                self._waiters.remove(task)
        if transaction.is_over:
            raise UnavailableError("the connection was lost")
        if is_exclusive:
            self._owner = transaction
        else:
            self._sharers[transaction] = None

    def _end_idle(self) -> None:
        oldest_ms = self._world.scheduler.now_ms - IDLE_TIMEOUT_MS
        for transaction in [each for each in self._open if each.began_ms < oldest_ms]:
            self.end(transaction)

    def _is_locked(self, transaction: Transaction, *, is_exclusive: bool) -> bool:
        if self._owner not in (None, transaction):
            return True
        return is_exclusive and any(sharer is not transaction for sharer in self._sharers)

    def _remove(
        self, transaction: Transaction, removed: list[int], statement: str, wanted: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        gone = {*transaction.deleted, *transaction.parked}
        is_by_time = "{is_meant}" in statement or "{is_done}" in statement
        found = [
            row_id
            for first, last, from_us, until_us in zip(
                wanted["firsts"], wanted["lasts"], wanted["from_us"], wanted["until_us"], strict=True
            )
            for row_id in range(first, last + 1)
            if row_id in self.rows and row_id not in gone
            if not is_by_time or from_us <= self.rows[row_id].created_us <= until_us
        ]
        removed += found
        return [(row_id,) for row_id in found]

    def _take(self, transaction: Transaction, statement: str, wanted: dict[str, Any]) -> list[tuple[Any, ...]]:
        gone = {*transaction.deleted, *transaction.parked}
        topics = wanted["topics"] if "topic <> ALL" in statement else ()
        ids = wanted["ids"] if "id <> ALL" in statement else ()
        held = zip(wanted["lane_topics"], wanted["lane_keys"], strict=True) if "NOT EXISTS" in statement else ()
        lanes = set(held)
        found = [
            row
            for row in self.rows.values()
            if row.id not in gone and row.topic not in topics and row.id not in ids
            if (row.topic, row.key) not in lanes
        ]
        if "ORDER BY id LIMIT" in statement:
            found.sort()
        else:
            self._world.chance.shuffle(found)
        taken, size = [], 0
        for row in found[: wanted["limit"]]:
            width = len(row.key or b"") + len(row.value)
            if size and size + width > wanted["limit_bytes"]:
                break
            size += width
            taken.append((*row[:4], None, None, row.created_us))
        if "<= %(limit_bytes)s ORDER BY id" not in statement:
            self._world.chance.shuffle(taken)
        if taken:
            self._world.judge.took(transaction.process)
        return taken


def number_of(row: Stored) -> int:
    """Return the number of a row, which is its value."""
    return int(row.value)


class Cursor:
    """The result of a statement after its execution."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    @property
    def rowcount(self) -> int:
        """Return the number of rows of the result."""
        return len(self.found)

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the first row."""
        return self.found[0] if self.found else None

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.found)


class Connection:
    """The part of a process's connection that `PostgresStore` uses."""

    def __init__(self, world: "World", process: Process) -> None:
        self._world = world
        self._database = world.database
        self._process = process
        self._restarts = world.database.restarts
        self._transaction: Transaction | None = None
        self._queue: list[tuple[Cursor, str, Any]] | None = None

    def execute(self, statement: str, parameters: Any = None, *, binary: bool = False) -> Cursor:  # noqa: ANN401
        """Execute a statement, now or with the pipeline."""
        del binary
        cursor = Cursor()
        if statement.startswith("LISTEN") or "set_config" in statement:
            return cursor
        if self._queue is None:
            self._round_trip([(cursor, statement, parameters)])
        else:
            self._queue.append((cursor, statement, parameters))
        return cursor

    def pipeline(self) -> "Pipeline":
        """Return a block whose statements are executed at its end, in one round trip."""
        return Pipeline(self)

    def queue(self) -> None:
        """Queue the statements from now on."""
        self._queue = []

    def flush(self) -> None:
        """Execute the queued statements."""
        queue, self._queue = self._queue, None
        self._round_trip(queue or [])

    def commit(self) -> None:
        """Commit, if there was a statement."""
        transaction = self._transaction
        if transaction is None:
            return

        def is_late() -> None:
            transaction.is_sent = True

        self._call(lambda: self._database.commit(transaction), is_late)
        self._transaction = None

    def rollback(self) -> None:
        """Roll back the transaction."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            self._database.end(transaction)

    def close(self) -> None:
        """Close the connection; a commit that was sent may still be executed."""
        if self._transaction is not None and not self._transaction.is_sent:
            self._database.end(self._transaction)

    def notifies(self, *, timeout: float, stop_after: int) -> Iterator[None]:
        """Wait for rows or for the timeout."""
        assert stop_after == 1
        self.require()
        self._world.wait_for_rows(timeout * 1_000)
        self.require()
        yield

    def _round_trip(self, statements: list[tuple[Cursor, str, Any]]) -> None:
        if self._transaction is None:
            self._transaction = self._database.begin(self._process.name)
        transaction = self._transaction

        def carry_out() -> None:
            for number, (cursor, statement, parameters) in enumerate(statements):
                if number and self._world.chance.random() < 0.05:
                    self._world.scheduler.sleep(self._world.chance.random() * 3)
                cursor.found = self._database.execute(transaction, statement, parameters)

        self._call(carry_out)

    def _call(self, effect: Callable[[], None], is_late: Callable[[], None] = lambda: None) -> None:
        def carry_out() -> None:
            self.require()
            effect()

        self._world.call(Side.DATABASE, carry_out, ANSWER_TIMEOUT_MS, is_late)

    def require(self) -> None:
        """Raise `UnavailableError` if the server has restarted since, or is down."""
        if self._restarts != self._database.restarts or self._database.up_from_ms > self._world.scheduler.now_ms:
            raise UnavailableError("the connection was lost")


class Pipeline:
    """A block of statements that are executed together."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.queue()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Execute the statements."""
        if kind is None:
            self._connection.flush()


class Tables:
    """The names of the tables and the connection, in place of `OutboxTables`; `name` is that of the outbox."""

    name = "outbox"
    channel = "marshal_outbox"

    def __init__(self, world: "World", process: Process) -> None:
        self._world = world
        self._process = process
        self.database = self

    def connect(self, options: str, answer_timeout_s: float) -> Connection:
        """Connect to the database."""
        del options, answer_timeout_s
        connection = Connection(self._world, self._process)
        self._world.call(Side.DATABASE, connection.require, ANSWER_TIMEOUT_MS)
        return connection

    def registration(self, connection: Connection) -> None:
        """Look up the outbox; a missing right makes that fail."""
        del connection
        if self._world.lacks_right(self._process, Side.DATABASE):
            raise ConfigurationError(NO_RIGHT)

    def check_tables(self, connection: Connection) -> None:
        """Do nothing, because the check needs the tables of a real database."""

    def named(self, statement: str, **names: Any) -> str:  # noqa: ANN401
        """Return the text of a statement, with the conditions for the rows to take."""
        free = names.get("free")
        return statement if free is None else statement + free.as_string(None)

    def translated_errors(self) -> AbstractContextManager[None]:
        """Pass errors through, because they already are the library's."""
        return nullcontext()
