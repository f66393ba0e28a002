"""The brokers below the library's `KafkaPublisher`: transactions with epochs, topics that may be missing, notes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from marshal_dagster.errors import AuthorizationError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.acls import Needed
from marshal_dagster.kafka.transactions import (
    Header,
    Headers,
    ProducerFencedError,
    RecordRejectedError,
    TransactionStillOpenError,
    UnnamedRecord,
)
from tests.outbox_simulator.network import Side
from tests.outbox_simulator.scenario import Poison
from tests.simulator.scheduler import Process

if TYPE_CHECKING:
    from tests.outbox_simulator.world import World

ANSWER_TIMEOUT_MS: Final = 1_500.0
NOTES: Final = "notes"
ID_HEADER: Final = "marshal-outbox-id"
UID: Final = "0123456789abcdef"
_SLICE_MS: Final = 50.0


class Sent(NamedTuple):
    """A record that was sent; `name` is the name by which its sender identifies it."""

    name: str
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers | Sequence[Header] | None


@dataclass(slots=True)
class Coordinator:
    """The brokers' state of a transactional id."""

    epoch: int = 0
    records: list[Sent] = field(default_factory=list)
    """The records of the open transaction."""
    times_out_ms: float = inf


class Brokers:
    """The stored records, and the epochs of the transactional ids."""

    def __init__(self, world: "World", missing: Mapping[str, float]) -> None:
        self.missing_until_ms = dict(missing)
        self.committed = 0
        self._notes: dict[str, bytes] = {}
        self._coordinators: dict[str, Coordinator] = {}
        self._world = world
        self._poison: dict[bytes, Poison] = {}

    def poison(self, value: bytes, poison: Poison) -> None:
        """Reject records with a value."""
        self._poison[value] = poison

    def has_topic(self, topic: str) -> bool:
        """Return whether a topic exists now."""
        is_there = self.missing_until_ms.get(topic, 0.0) <= self._world.scheduler.now_ms
        if not is_there:
            self._world.judge.refused_topics.add(topic)
        return is_there

    def is_refused(self, value: bytes | None, *, by_client: bool) -> bool:
        """Return whether a record is rejected now."""
        poison = self._poison.get(value or b"")
        now_ms = self._world.scheduler.now_ms
        is_refused = poison is not None and poison.is_client == by_client and poison.until_ms > now_ms
        if is_refused:
            self._world.judge.refused(int(value or b""))
        return is_refused

    def init(self, transactional_id: str) -> int:
        """Abort the open transaction of an id and return its next epoch; lower epochs are rejected from now on."""
        coordinator = self._coordinator(transactional_id)
        self._abort(coordinator)
        self._world.report("epoch {} of {}", coordinator.epoch, transactional_id)
        return coordinator.epoch

    def produce(self, transactional_id: str, epoch: int, records: Sequence[Sent], timeout_ms: float) -> None:
        """Add records to the open transaction, or to a new one."""
        coordinator = self._fencing(transactional_id, epoch)
        if not coordinator.records:
            coordinator.times_out_ms = self._world.scheduler.now_ms + timeout_ms
        for record in records:
            if not self.has_topic(record.topic):
                raise TopicNotFoundError(f"topic {record.topic!r} does not exist")
            if self.is_refused(record.value, by_client=False):
                first = next(each for each in records if each.topic == record.topic)
                raise RecordRejectedError(first.name, "the broker refused its batch", is_too_large=False)
        coordinator.records += records

    def commit(self, transactional_id: str, epoch: int) -> None:
        """Make the records of the open transaction visible to consumers."""
        coordinator = self._fencing(transactional_id, epoch)
        records, coordinator.records, coordinator.times_out_ms = coordinator.records, [], inf
        for record in records:
            if record.topic == NOTES:
                self._notes[(record.key or b"").decode()] = record.value or b""
                continue
            self.committed += 1
            uid, _, row = dict(record.headers or ())[ID_HEADER].decode().rpartition("-")  # type: ignore[union-attr]
            assert uid == UID
            self._world.judge.published(int(row), record.topic, record.key, int(record.value or b"-1"))
        self._world.outcomes["batches"] += bool(records)
        self._world.report("published {}", [(record.topic, record.key, record.value) for record in records])

    def abort(self, transactional_id: str, epoch: int) -> None:
        """Drop the records of the open transaction."""
        coordinator = self._fencing(transactional_id, epoch)
        coordinator.records, coordinator.times_out_ms = [], inf

    def has_open_notes(self) -> bool:
        """Return whether a transaction with a note is open."""
        return any(self._coordinator(coordinator).records for coordinator in self._coordinators)

    def notes(self) -> dict[str, bytes]:
        """Return the newest committed note of each key."""
        return dict(self._notes)

    def lose_notes(self) -> None:
        """Delete the notes."""
        self._notes.clear()
        self._world.judge.may_repeat = True

    def _fencing(self, transactional_id: str, epoch: int) -> Coordinator:
        coordinator = self._coordinator(transactional_id)
        if coordinator.epoch != epoch:
            self._world.outcomes["fenced"] += 1
            raise ProducerFencedError(0.0)
        return coordinator

    def _coordinator(self, transactional_id: str) -> Coordinator:
        coordinator = self._coordinators.setdefault(transactional_id, Coordinator())
        if coordinator.times_out_ms <= self._world.scheduler.now_ms:
            self._world.outcomes["transactions timed out"] += 1
            self._abort(coordinator)
        return coordinator

    def _abort(self, coordinator: Coordinator) -> None:
        coordinator.records, coordinator.times_out_ms = [], inf
        coordinator.epoch += 1


class Transaction:
    """Replaces `marshal_dagster.kafka.transactions.Transaction`."""

    def __init__(
        self, world: "World", process: Process, transactional_id: str, *, topics: Sequence[str], timeout_s: float
    ) -> None:
        assert topics[0] == NOTES
        self._world = world
        self._brokers = world.brokers
        self._process = process
        self._id = transactional_id
        self._timeout_ms = timeout_s * 1_000
        self._epoch: int | None = None
        self._records: list[Sent] = []
        self._is_open = False
        self._began_ms = 0.0

    def __enter__(self) -> Self:
        if self._world.lacks_right(self._process, Side.KAFKA):
            raise AuthorizationError("cannot write in a transaction")
        self._epoch = self._world.call(Side.KAFKA, lambda: self._brokers.init(self._id), ANSWER_TIMEOUT_MS)
        return self

    def __exit__(self, *_: object) -> None:
        """Abort the open transaction, if the brokers can be reached."""
        if not self._is_open or self._process.is_dead:
            return
        self._is_open = False
        try:
            self._world.call(Side.KAFKA, lambda: self._brokers.abort(self._id, self._own), ANSWER_TIMEOUT_MS)
        except (UnavailableError, ProducerFencedError):
            return

    def begin(self) -> None:
        """Begin a transaction."""
        self._is_open = True
        self._records = []
        self._began_ms = self._world.scheduler.now_ms

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        *,
        name: str,
        headers: Sequence[Header] | None = None,
        partition: int | None = None,
    ) -> None:
        """Send a record; it is in flight until `flush`."""
        del partition
        self._records.append(Sent(name, topic, key, value, headers))

    def send_many(self, records: Iterable[UnnamedRecord]) -> None:
        """Send records without names; they are in flight until `flush`."""
        for index, (topic, value, key, _, _, headers) in enumerate(records):
            if self._brokers.is_refused(value, by_client=True):
                raise RecordRejectedError("", "too large", is_too_large=True, index=index)
            self._records.append(Sent(str(index), topic, key, value, headers))

    def flush(self) -> None:
        """Wait until the brokers have all records that were sent."""
        epoch, records = self._own, self._records

        def produce() -> None:
            self._brokers.produce(self._id, epoch, records, self._timeout_ms)

        self._world.call(Side.KAFKA, produce, ANSWER_TIMEOUT_MS)
        took_ms = self._world.scheduler.now_ms - self._began_ms
        if took_ms > self._timeout_ms:
            raise ProducerFencedError(took_ms / 1_000)

    def commit(self) -> None:
        """Commit the transaction."""
        epoch = self._own
        self._world.call(Side.KAFKA, lambda: self._brokers.commit(self._id, epoch), ANSWER_TIMEOUT_MS)
        self._is_open = False

    @property
    def _own(self) -> int:
        if self._epoch is None:
            raise UnavailableError("init_transactions was not called")
        return self._epoch


class Notes:
    """Replaces `marshal_dagster.kafka.transactions.Notes`."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def newest(self, patience_s: float) -> dict[str, bytes]:
        """Return the newest notes, once no transaction is open."""
        scheduler, brokers = self._world.scheduler, self._world.brokers
        gives_up_ms = scheduler.now_ms + patience_s * 1_000
        while brokers.has_open_notes():
            if scheduler.now_ms > gives_up_ms:
                raise TransactionStillOpenError("a transaction is open")
            scheduler.sleep(_SLICE_MS)
        return self._world.call(Side.KAFKA, brokers.notes, ANSWER_TIMEOUT_MS)


class Topics:
    """Replaces `marshal_dagster.kafka.admin_client.Topics`."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def require(self, needed: Needed) -> None:
        """Raise `TopicNotFoundError` for a topic that does not exist."""
        topic = needed.topic or ""
        if not self._world.call(Side.KAFKA, lambda: self._world.brokers.has_topic(topic), ANSWER_TIMEOUT_MS):
            raise TopicNotFoundError(f"topic {topic!r} does not exist")

    def close(self) -> None:
        """Do nothing."""
