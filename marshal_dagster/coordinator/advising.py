"""What a process should claim, by what coordinators have written: read anew when it is some seconds old."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.coordinator.looking import GroupView, read_group
from marshal_dagster.coordinator.wire import CoordinatorTopics
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection

SILENT_SESSIONS: Final = 2
"""After so many session time-outs without a word of it a coordinator's assignments count no more."""
_OLD_S: Final = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Portion:
    """Which partitions of a topic a member is to claim, and that in a sentence."""

    partitions: frozenset[int]
    text: str


def portion_of(view: GroupView, member: str, topic: str, session_ms: float, now_ms: float) -> Portion | None:
    """Give what `member` is to claim of `topic`; None when it may claim all that is free.

    That is so while the coordinator is silent, and when it leads nobody. Times are milliseconds, `now_ms` by the clock
    that brokers have.
    """
    if not view.shares or view.silent_ms(now_ms) >= SILENT_SESSIONS * session_ms:
        return None
    share = view.shares.get(member)
    numbers = frozenset() if share is None else frozenset(number for name, number in share.places if name == topic)
    given = sum(name == topic for each in view.shares.values() for name, _ in each.places)
    told = f"the coordinator has assigned {len(numbers)} of {given} partitions of topic {topic!r} to member {member!r}"
    if share is None:
        others = ", ".join(sorted(view.shares))
        told = f"the coordinator knows no member {member!r}, only {others}: is its sensor on?"
    return Portion(numbers, told)


@dataclass(slots=True)
class Adviser:
    """Tells one member of a group what to claim; for one thread. What cannot be read limits nobody."""

    connection: KafkaConnection
    topics: CoordinatorTopics
    group: str
    member: str
    session_ms: float
    read: Callable[[KafkaConnection, CoordinatorTopics, str], GroupView] = read_group
    _view: GroupView | None = field(default=None, init=False)
    _read_at_s: float = field(default=0.0, init=False)

    def portion(self, topic: str) -> Portion | None:
        """Give what to claim of `topic` now; None when it may be all that is free."""
        if self._view is None or time.monotonic() - self._read_at_s >= _OLD_S:
            try:
                self._view = self.read(self.connection, self.topics, self.group)
            except MarshalError as error:
                logger.warning("what is assigned to member %r is not known: %s", self.member, error)
                return None
            self._read_at_s = time.monotonic()
        return portion_of(self._view, self.member, topic, self.session_ms, time.time() * 1_000)
