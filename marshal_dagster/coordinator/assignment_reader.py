"""What a process should claim, by what coordinators have written: read again when it is some seconds old."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from marshal_dagster.batches.request import Advice
from marshal_dagster.coordinator.group_view import GroupAssignments, MemberAssignment, read_group
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection

SILENT_SESSIONS: Final = 2
"""A coordinator that was silent for so many session time-outs limits no member any more."""
_OLD_S: Final = 5.0

logger = logging.getLogger(__name__)


def assigned_partitions(
    view: GroupAssignments, member: str, topic: str, session_ms: float, now_ms: float
) -> Advice | None:
    """Return what `member` is to claim of `topic`; None when it may claim all that is free.

    That is so while the coordinator is silent, and when it has no members; also when it was heard in the future,
    because then it is unknown for how long it has been silent. Times are milliseconds: `now_ms` by this process's
    clock, the coordinator's last ping by the brokers'.
    """
    silent_ms = view.silent_ms(now_ms)
    if view.shares and silent_ms < -session_ms:
        logger.warning(
            "group %r: its coordinator was heard %.0f s in the future, and limits no member: set this "
            "host's clock or the brokers' right",
            view.group,
            -silent_ms / 1_000,
        )
    if not view.shares or not -session_ms <= silent_ms < SILENT_SESSIONS * session_ms:
        return None
    share = view.shares.get(member)
    numbers = frozenset() if share is None else frozenset(number for name, number in share.places if name == topic)
    given = sum(name == topic for other in view.shares.values() for name, _ in other.places)
    text = f"the coordinator has assigned {len(numbers)} of {given} partitions of topic {topic!r} to member {member!r}"
    if share is None:
        others = ", ".join(sorted(view.shares))
        text = f"the coordinator knows no member {member!r}, only {others}: is its sensor on?"
    return Advice(numbers, text + _moved(share, topic))


def _moved(share: MemberAssignment | None, topic: str) -> str:
    """Return which of its partitions a member was given last, and when, in words."""
    gained = [] if share is None else sorted(number for name, number in share.gained if name == topic)
    if share is None or not gained:
        return ""
    try:
        at = f"at {datetime.fromtimestamp(share.assigned_at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        at = f"at {share.assigned_at_ms} ms, a time beyond the calendar,"
    return f"; {at} it was given {', '.join(map(str, gained))}"


@dataclass(slots=True)
class AssignmentReader:
    """Reads what one member of a group is to claim; for one thread.

    While it cannot read, what it read last counts, for as long as the coordinator may be silent.
    """

    connection: KafkaConnection
    topics: CoordinatorTopics
    group: str
    member: str
    session_ms: float
    read: Callable[[KafkaConnection, CoordinatorTopics, str], GroupAssignments] = read_group
    _view: GroupAssignments | None = field(default=None, init=False)
    _read_at_s: float = field(default=0.0, init=False)

    def assigned_partitions(self, topic: str) -> Advice | None:
        """Return what to claim of `topic` now; None when it may be all that is free."""
        if self._view is None or time.monotonic() - self._read_at_s >= _OLD_S:
            try:
                self._view = self.read(self.connection, self.topics, self.group)
                self._read_at_s = time.monotonic()
            except MarshalError as error:
                logger.warning("what is assigned to member %r cannot be read now: %s", self.member, error)
        if self._view is None:
            return None
        return assigned_partitions(self._view, self.member, topic, self.session_ms, time.time() * 1_000)
