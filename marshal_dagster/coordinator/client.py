"""A member of a coordinated group in a plain Python process: runs `member` over Kafka, with the work in a thread."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

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
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.connection import KafkaConnection

if TYPE_CHECKING:
    from marshal_dagster.coordinator.transport import CoordinatorTopics, Reader, Writer

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
_BUSY_TICK_S: Final = 0.01
_AGAIN_AFTER_S: Final = 0.5
_STOP_WITHIN_S: Final = 10.0
"""How much longer than a session timeout leaving may take. The session timeout covers a silent coordinator."""

Work = Callable[[frozenset[DataPartitionId]], None]
"""A function that starts or stops processing partitions, and returns when that is done."""


class CoordinatedMember:
    """A member of a group, to which the coordinator assigns partitions. Use it as a context manager.

    The assignment is only advice: claim a partition in the coordination log before you process it.

    The member calls `start` and `stop` in one thread, one after another, while another thread answers the coordinator.
    If one of them raises, the member stops all work, leaves the group, and joins again after a session timeout.

    Example:
        ```python
        def begin(partitions: frozenset[tuple[str, int]]) -> None:
            workers.start(partitions)


        def give_up(partitions: frozenset[tuple[str, int]]) -> None:
            workers.stop_and_commit(partitions)


        with CoordinatedMember(
            connection, "parcels", "worker-7", start=begin, stop=give_up, topics_wanted=["parcels"]
        ) as member:
            workers.run_until_signal()
        ```
    """

    def __init__(
        self,
        connection: KafkaConnection,
        group: str,
        member: str,
        *,
        start: Work,
        stop: Work,
        topics: "CoordinatorTopics | None" = None,
        clock: Clock | None = None,
        offsets: Callable[[], Offsets] = dict,
        **registration: Any,  # noqa: ANN401 - the fields of a Register
    ) -> None:
        """Configure the member; it connects when the context is entered.

        Args:
            connection: The cluster with the coordinator's topics.
            group: The group's name.
            member: The member's name, unique in the group.
            start: Called with partitions to start processing.
            stop: Called with partitions to stop processing. It returns once their processing has stopped and their
                offsets are committed, because another member may start with them right after that.
            topics: The coordinator's topics; by default those with the default name.
            clock: The member's clock; by default that of the system.
            offsets: With `auto_commit=True`, returns the next offset of each partition for the answer to a ping. It is
                called in the thread that answers the coordinator.
            **registration: The topics to subscribe to, as `topics_wanted` (a list of names), and further fields of the
                registration: `pattern` (topic names, with `*` and `?`), `capacity` (share of the work relative to other
                members, 1 by default), `session_timeout_ms` (1 to 3,600,000; 6,000 by default), `is_static` (whether a
                process that comes back under this name in time gets its partitions back), `auto_commit`.

        Raises:
            ConfigurationError: A field of the registration is unknown, malformed or out of range.
        """
        fields = {"topics": registration.pop("topics_wanted", []), "session_timeout_ms": 6_000, **registration}
        try:
            register = Register.model_validate(
                {"group": group, "member": member, "epoch": 0, "tenure": uuid.uuid4().hex, **fields}
            )
        except ValueError as error:
            raise ConfigurationError(
                f"member {member!r} of group {group!r} cannot register: {error}".replace("\n", " ")
            ) from None
        if not 1 <= register.session_timeout_ms <= LONGEST_SESSION_MS:
            raise ConfigurationError(
                f"member {member!r} of group {group!r}: session_timeout_ms is {register.session_timeout_ms}; it must "
                f"be from 1 to {LONGEST_SESSION_MS}"
            )
        self._connection = connection
        self._topics = topics or _default_topics()
        self._clock = clock or SystemClock()
        self._register = register
        self._offsets = offsets
        self._work = _WorkThread(f"member {register.member!r} of group {register.group!r}", start, stop)
        self._membership: Membership | None = None
        self._failure: Exception | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def places(self) -> frozenset[DataPartitionId]:
        """The partitions that are assigned to the member now."""
        return frozenset() if self._membership is None else self._membership.places

    @property
    def state(self) -> MemberState:
        """The state of the member's registration with the coordinator."""
        return MemberState.LOOKING if self._membership is None else self._membership.state

    @property
    def error(self) -> str | None:
        """Why the coordinator refused the member, such as `duplicate_id`; None if it did not."""
        return None if self._membership is None else self._membership.error

    @property
    def failure(self) -> Exception | None:
        """The error that keeps the member from talking to the coordinator now; None if there is none."""
        return self._failure

    @property
    def is_over(self) -> bool:
        """Whether the member has ended: it has left the group, or an error has stopped it."""
        return self._thread is not None and not self._thread.is_alive()

    def silent_ms(self) -> float:
        """Return the time since the last message of a coordinator, in milliseconds; 0 before the member joins."""
        return 0.0 if self._membership is None else self._membership.silent_ms(self._clock.lease_ms())

    def __enter__(self) -> Self:
        """Join the group, in a background thread.

        Raises:
            TopicNotFoundError: One of the coordinator's topics does not exist.
            AuthorizationError: The user may not read or write one of these topics.
            UnavailableError: The brokers do not answer in time.
        """
        from marshal_dagster.coordinator.transport import end_of, partition_of

        self._topics.check_member(self._connection)
        partitions = self._topics.partitions(self._connection)
        at = end_of(self._connection, self._topics.coordinator_messages, partition_of(self._register.group, partitions))
        self._membership = Membership(self._register, self._clock.lease_ms())
        self._thread = threading.Thread(target=self._run, args=(self._membership, partitions, at), daemon=True)
        self._work.begin()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all work and leave the group; wait for that, for a session timeout and ten seconds at most."""
        self._is_over.set()
        if self._thread is None:
            return
        within_s = self._register.session_timeout_ms / 1_000 + _STOP_WITHIN_S
        self._thread.join(within_s)
        if self._thread.is_alive():
            logger.warning(
                "%s: it did not leave within %g s, so its work may still run; check what its `stop` function waits for",
                self._work.name,
                within_s,
            )

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
        """Take part in the group until the member has left, with new clients after each failure.

        Returns the offset of the next message to read.
        """
        from marshal_dagster.coordinator.transport import partition_of

        partition = partition_of(self._register.group, partitions)
        while True:
            try:
                with self._clients(partitions) as (reader, writer):
                    reader.follow({partition: at})
                    while membership.state is not MemberState.GONE:
                        at = self._turn(membership, reader, writer, at)
                        self._failure = None
                    self._work.wait()
                    self._report_done(membership, writer)
                    return at
            except Exception as error:  # noqa: BLE001 - after any error the member continues with new clients
                self._note_failure(error)
            time.sleep(_AGAIN_AFTER_S)
            if self._has_left_without_clients(membership):
                return at

    @contextmanager
    def _clients(self, partitions: int) -> "Iterator[tuple[Reader, Writer]]":
        """Yield new clients. Raises `ConfigurationError` if they cannot be made, such as without a key file."""
        from marshal_dagster.coordinator.transport import Reader, Writer

        with (
            closing(Reader(self._connection, self._topics.coordinator_messages)) as reader,
            closing(Writer(self._connection, self._topics, partitions)) as writer,
        ):
            yield reader, writer

    def _note_failure(self, error: Exception) -> None:
        """Record a failure of the clients, and log it unless it is the present one."""
        from marshal_dagster.coordinator.transport import CLIENT_FAILURES

        before, self._failure = self._failure, error
        if str(error) == str(before):
            return
        if isinstance(error, (*CLIENT_FAILURES, ConfigurationError)):
            logger.warning("%s: connection lost, it reconnects: %s", self._work.name, error)
        else:
            logger.error("%s: unexpected error, it reconnects; report this as a bug", self._work.name, exc_info=error)

    def _has_left_without_clients(self, membership: Membership) -> bool:
        """Stop all work if no coordinator was heard for a session timeout; return whether the member has left.

        It leaves then if it is over. The coordinator notices that by its silence.
        """
        now_ms = self._clock.lease_ms()
        stop = membership.tick(now_ms).stop
        if self._is_over.is_set() and membership.silent_ms(now_ms) >= membership.session_ms:
            stop |= membership.leave().stop
        if stop:
            self._work.do(MemberActions(stop=stop))
        if membership.state is not MemberState.GONE:
            return False
        self._work.wait()
        return True

    def _turn(self, membership: Membership, reader: "Reader", writer: "Writer", at: int) -> int:
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
            logger.exception("%s: `offsets` has failed, so no offsets are reported to the coordinator", self._work.name)
            return {}

    def _do(self, actions: MemberActions, writer: "Writer") -> None:
        """Queue work to stop and start, with the messages to send afterwards; send other messages at once."""
        is_last = any(isinstance(message, Leave) for message in actions.messages)
        if actions.stop or actions.start or is_last:
            self._work.do(actions)
            return
        for message in actions.messages:
            writer.send_to_coordinator(message)

    def _report_done(self, membership: Membership, writer: "Writer") -> None:
        for actions in self._work.done():
            reports = membership.stopped(actions.stop).messages if actions.stop else ()
            for message in (*actions.messages, *reports):
                writer.send_to_coordinator(message)


def _default_topics() -> "CoordinatorTopics":
    from marshal_dagster.coordinator.transport import CoordinatorTopics

    return CoordinatorTopics()


class _WorkThread:
    """A thread that calls `start` and `stop`, one call after another."""

    def __init__(self, name: str, start: Work, stop: Work) -> None:
        self.name = name
        self._start, self._stop = start, stop
        self._due: queue.SimpleQueue[MemberActions | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[MemberActions] = queue.SimpleQueue()
        self._failed = threading.Event()
        self._changed = threading.Condition()
        self._open = 0
        """The number of actions that are not finished."""

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
        """Return the actions that were finished since the last call."""
        return [self._done.get() for _ in range(self._done.qsize())]

    def wait(self) -> None:
        """Wait until all actions are finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)

    def take_failure(self) -> bool:
        """Return whether an action has failed since the last call."""
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
                    "%s: its `start` or `stop` has failed; it leaves the group, and joins again after a session "
                    "timeout",
                    self.name,
                )
                self._failed.set()
            self._done.put(actions)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()
