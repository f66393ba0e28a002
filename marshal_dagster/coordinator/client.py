"""A member of a coordinated group in a plain Python process."""

import logging
import threading
import uuid
from collections.abc import Callable
from typing import Any, Final, Self

from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordinator.assignment import Place
from marshal_dagster.coordinator.member import Membership, Standing, Told
from marshal_dagster.coordinator.messages import Register, parse_order
from marshal_dagster.coordinator.wire import CoordinatorTopics, Reader, Writer, partition_of
from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.kafka.connection import KafkaConnection

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
_LEAVE_WITHIN_S: Final = 10.0

Work = Callable[[frozenset[Place]], None]


class CoordinatedMember:
    """Is told what to work on. Claim it in the coordination log before: what it is told here is advice.

    `stop` is called with partitions to give up, and returns once that is done; `start` with those to begin with. Both
    are called in the member's own thread.
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
        **registration: Any,  # noqa: ANN401 - the fields of a Register
    ) -> None:
        """Connect to nothing yet.

        `registration` are fields of a `Register`, such as `pattern` and `session_timeout_ms`, and the topics that it
        takes as `topics_wanted`.
        Raises `ConfigurationError` for what no record could carry.
        """
        fields = {"topics": registration.pop("topics_wanted", []), "session_timeout_ms": 6_000, **registration}
        try:
            register = Register.model_validate(
                {"group": group, "member": member, "epoch": 0, "tenure": uuid.uuid4().hex, **fields}
            )
        except ValueError as error:
            raise ConfigurationError(f"registration of member {member!r}: {error}".replace("\n", " ")) from None
        self._connection = connection
        self._topics = topics or CoordinatorTopics()
        self._clock = clock or SystemClock()
        self._register = register
        self._start, self._stop_work = start, stop
        self._membership: Membership | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def places(self) -> frozenset[Place]:
        """What it is to work on now."""
        return frozenset() if self._membership is None else self._membership.places

    @property
    def standing(self) -> Standing:
        """How it stands with its coordinator."""
        return Standing.LOOKING if self._membership is None else self._membership.standing

    @property
    def error(self) -> str | None:
        """Why it was refused."""
        return None if self._membership is None else self._membership.error

    @property
    def is_over(self) -> bool:
        """Whether it has ended, having left or because of an error."""
        return self._thread is not None and not self._thread.is_alive()

    def silent_ms(self) -> float:
        """Give for how long no coordinator has been heard."""
        return 0.0 if self._membership is None else self._membership.silent_ms(self._clock.lease_ms())

    def __enter__(self) -> Self:
        """Join. Raises `TopicMissing`, `UnavailableError`."""
        partitions = self._topics.partitions(self._connection)
        self._membership = Membership(self._register, self._clock.lease_ms())
        self._thread = threading.Thread(target=self._run, args=(self._membership, partitions), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group, with what it works on given up."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_WITHIN_S)

    def _run(self, membership: Membership, partitions: int) -> None:
        partition = partition_of(self._register.group, partitions)
        reader = Reader(self._connection, self._topics.orders)
        writer = Writer(self._connection, self._topics, partitions)
        reader.follow({partition: None})
        is_leaving = False
        try:
            while membership.standing is not Standing.GONE:
                for came in reader.read(_TICK_S):
                    order = parse_order(came.value)
                    if order is not None:
                        self._do(membership, membership.hear(order, self._clock.lease_ms()), writer)
                self._do(membership, membership.tick(self._clock.lease_ms()), writer)
                if self._is_over.is_set() and not is_leaving:
                    is_leaving = True
                    self._do(membership, membership.leave(), writer)
                writer.poll()
        except MarshalError as error:
            logger.warning("member %r of group %r: %s", self._register.member, self._register.group, error)
        finally:
            self._stop_work(membership.places)
            reader.close()
            writer.close()

    def _do(self, membership: Membership, told: Told, writer: Writer) -> None:
        """Do what is told: first what ends, then what begins, then say so."""
        if told.stop:
            self._stop_work(told.stop)
        if told.start:
            self._start(told.start)
        words = [*told.words, *(membership.stopped(told.stop).words if told.stop else ())]
        for word in words:
            writer.say(word)
