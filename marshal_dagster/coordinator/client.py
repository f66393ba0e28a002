"""A member of a coordinated group in a plain Python process."""

import logging
import queue
import threading
import uuid
from collections.abc import Callable
from typing import Any, Final, Self

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordinator.assignment import DataPartitionId
from marshal_dagster.coordinator.member import MemberActions, Membership, MemberState, Offsets
from marshal_dagster.coordinator.messages import (
    LONGEST_SESSION_MS,
    NUMBERS_BELOW,
    CoordinatorMessage,
    Leave,
    Ping,
    Register,
    parse_coordinator_message,
)
from marshal_dagster.coordinator.transport import (
    CLIENT_FAILURES,
    CoordinatorTopics,
    Reader,
    Writer,
    end_of,
    partition_of,
)
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import KafkaConnection

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
_BUSY_TICK_S: Final = 0.01
_AGAIN_AFTER_S: Final = 0.5
_STOP_WITHIN_S: Final = 10.0
"""Leaving may take so much longer than a session time-out, within which a coordinator has to be heard."""

Work = Callable[[frozenset[DataPartitionId]], None]


class CoordinatedMember:
    """A member to which a coordinator assigns partitions. Claim them in the coordination log: this is only advice.

    `stop` is called with partitions to give up, and returns once that is done; `start` with those to begin with. Both
    are called in one thread of the member, one after another, while another thread answers the coordinator. If one of
    them raises, the member stops all work, leaves the group, and joins again after a session time-out.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        group: str,
        member: str,
        *,
        start: Work,
        stop: Work,
        topics: CoordinatorTopics | None = None,
        clock: Clock | None = None,
        offsets: Callable[[], Offsets] = dict,
        **registration: Any,  # noqa: ANN401 - the fields of a Register
    ) -> None:
        """Connect to nothing yet.

        `registration` are fields of a `Register`, such as `pattern` and `session_timeout_ms`, and the topics that it
        takes as `topics_wanted`. With `auto_commit` each answer to a ping has what `offsets` returns, the next
        offset of each partition; it is called in the member's thread.
        Who commits offsets does so in `stop`, before it returns.
        Raises `ConfigurationError` for what no record could carry.
        """
        fields = {"topics": registration.pop("topics_wanted", []), "session_timeout_ms": 6_000, **registration}
        try:
            register = Register.model_validate(
                {"group": group, "member": member, "epoch": 0, "tenure": uuid.uuid4().hex, **fields}
            )
        except ValueError as error:
            raise ConfigurationError(f"registration of member {member!r}: {error}".replace("\n", " ")) from None
        if not 1 <= register.session_timeout_ms <= LONGEST_SESSION_MS:
            raise ConfigurationError(
                f"registration of member {member!r}: session_timeout_ms is {register.session_timeout_ms}; give 1 to "
                f"{LONGEST_SESSION_MS}"
            )
        self._connection = connection
        self._topics = topics or CoordinatorTopics()
        self._clock = clock or SystemClock()
        self._register = register
        self._offsets = offsets
        self._work = _WorkThread(f"member {register.member!r} of group {register.group!r}", start, stop)
        self._membership: Membership | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def places(self) -> frozenset[DataPartitionId]:
        """What it is to work on now."""
        return frozenset() if self._membership is None else self._membership.places

    @property
    def state(self) -> MemberState:
        """What it is to its coordinator."""
        return MemberState.LOOKING if self._membership is None else self._membership.state

    @property
    def error(self) -> str | None:
        """Why it was refused."""
        return None if self._membership is None else self._membership.error

    @property
    def is_over(self) -> bool:
        """Whether it has ended, having left or because of an error."""
        return self._thread is not None and not self._thread.is_alive()

    def silent_ms(self) -> float:
        """Return for how long no coordinator has been heard."""
        return 0.0 if self._membership is None else self._membership.silent_ms(self._clock.lease_ms())

    def __enter__(self) -> Self:
        """Join. Raises `TopicNotFoundError`, `AuthorizationError`, `UnavailableError`."""
        self._topics.check_member(self._connection)
        partitions = self._topics.partitions(self._connection)
        at = end_of(self._connection, self._topics.coordinator_messages, partition_of(self._register.group, partitions))
        self._membership = Membership(self._register, self._clock.lease_ms())
        self._thread = threading.Thread(target=self._run, args=(self._membership, partitions, at), daemon=True)
        self._work.begin()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group and give up all work; wait for that, a session time-out and ten seconds at most."""
        self._is_over.set()
        if self._thread is None:
            return
        within_s = self._register.session_timeout_ms / 1_000 + _STOP_WITHIN_S
        self._thread.join(within_s)
        if self._thread.is_alive():
            logger.warning("%s: it has not left within %g s; work may go on", self._work.name, within_s)

    def _run(self, membership: Membership, partitions: int, at: int) -> None:
        try:
            while True:
                at = self._take_part(membership, partitions, at)
                if self._is_over.wait(self._register.session_timeout_ms / 1_000):
                    break
                self._work.take_failure()
                register = self._register.model_copy(update={"tenure": uuid.uuid4().hex})
                membership = self._membership = Membership(register, self._clock.lease_ms())
        finally:
            if self.places:
                self._work.do(MemberActions(stop=self.places))
            self._work.end()

    def _take_part(self, membership: Membership, partitions: int, at: int) -> int:
        """Take part until it has left, with one client after another; return the offset up to which it has read."""
        partition = partition_of(self._register.group, partitions)
        while True:
            reader = Reader(self._connection, self._topics.coordinator_messages)
            writer = Writer(self._connection, self._topics, partitions)
            try:
                reader.follow({partition: at})
                while membership.state is not MemberState.GONE:
                    at = self._turn(membership, reader, writer, at)
                self._work.wait()
                self._report_done(membership, writer)
                return at
            except CLIENT_FAILURES as error:
                logger.warning("%s: %s; it connects again", self._work.name, error)
                self._is_over.wait(_AGAIN_AFTER_S)
            except Exception:
                logger.exception("%s: it goes on", self._work.name)
                self._is_over.wait(_AGAIN_AFTER_S)
            finally:
                reader.close()
                writer.close()

    def _turn(self, membership: Membership, reader: Reader, writer: Writer, at: int) -> int:
        for record in reader.read(_BUSY_TICK_S if self._work.is_busy else _TICK_S):
            at = record.offset + 1
            message = parse_coordinator_message(record.value)
            if message is not None:
                self._do(membership.receive(message, self._clock.lease_ms(), self._positions(message)), writer)
        self._do(membership.tick(self._clock.lease_ms()), writer)
        self._report_done(membership, writer)
        is_to_go = self._is_over.is_set() or self._work.take_failure()
        if is_to_go and membership.state not in {MemberState.LEAVING, MemberState.GONE}:
            self._do(membership.leave(), writer)
        writer.poll()
        return at

    def _positions(self, message: CoordinatorMessage) -> Offsets:
        if not isinstance(message, Ping) or not self._register.auto_commit:
            return {}
        try:
            return {place: at for place, at in self._offsets().items() if 0 <= at < NUMBERS_BELOW}
        except Exception:
            logger.exception("%s: how far it got is not known", self._work.name)
            return {}

    def _do(self, actions: MemberActions, writer: Writer) -> None:
        """Have work stopped and started, and report once that is done; messages that need no work are sent at once."""
        is_last = any(isinstance(message, Leave) for message in actions.messages)
        if actions.stop or actions.start or is_last:
            self._work.do(actions)
            return
        for message in actions.messages:
            writer.send_to_coordinator(message)

    def _report_done(self, membership: Membership, writer: Writer) -> None:
        for actions in self._work.done():
            reports = membership.stopped(actions.stop).messages if actions.stop else ()
            for message in (*actions.messages, *reports):
                writer.send_to_coordinator(message)


class _WorkThread:
    """Stops and starts work in a thread of its own, one thing after another."""

    def __init__(self, name: str, start: Work, stop: Work) -> None:
        self.name = name
        self._start, self._stop = start, stop
        self._due: queue.SimpleQueue[MemberActions | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[MemberActions] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._changed = threading.Condition()
        self._open = 0
        """How many actions have not been done."""

    @property
    def is_busy(self) -> bool:
        return self._open > 0

    def begin(self) -> None:
        threading.Thread(target=self._run, name=f"work of {self.name}", daemon=True).start()

    def end(self) -> None:
        self._due.put(None)

    def do(self, actions: MemberActions) -> None:
        with self._changed:
            self._open += 1
        self._due.put(actions)

    def done(self) -> list[MemberActions]:
        """Return what has been done since the last call."""
        return [self._done.get() for _ in range(self._done.qsize())]

    def wait(self) -> None:
        """Wait until all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)

    def take_failure(self) -> bool:
        """Return whether something has failed since the last call."""
        has_failed = self._failed.is_set()
        self._failed.clear()
        return has_failed

    def _run(self) -> None:
        while (actions := self._due.get()) is not None:
            try:
                if actions.stop:
                    self._stop(actions.stop)
                if actions.start:
                    self._start(actions.start)
            except Exception:
                logger.exception(
                    "%s: what the coordinator has assigned cannot be done; it leaves, and joins again later", self.name
                )
                self._failed.set()
            self._done.put(actions)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()
