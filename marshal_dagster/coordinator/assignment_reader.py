"""The partitions that a run should claim, from the coordinators' messages; they are cached for a few seconds."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.batches.request import Advice
from marshal_dagster.coordinator.group_view import GroupAssignments, MemberAssignment, read_group
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection

SILENT_SESSIONS: Final = 2
"""After this many session timeouts without a message of the coordinator, members may claim any free partition."""
_OLD_S: Final = 5.0

logger = logging.getLogger(__name__)


def assigned_partitions(
    view: GroupAssignments, member: str, topic: str, session_ms: float, now_ms: float
) -> Advice | None:
    """Return the partitions of `topic` that `member` should claim; None if it may claim any free partition.

    It may do so while the coordinator is silent, and if the coordinator has no members or assigns no partition of the
    topic to any. It may also do so if the last ping is in the future: the clocks differ then, so the time of silence is
    unknown.

    Times are in milliseconds: `now_ms` by the clock of this process, the time of the last ping by the brokers' clock.
    """
    silent_ms = view.silent_ms(now_ms)
    if view.shares and silent_ms < -session_ms:
        logger.warning(
            "group %r: its coordinator's last message is %.0f s in the future, so its assignment is ignored; "
            "synchronize the clocks of this host and of the brokers",
            view.group,
            -silent_ms / 1_000,
        )
    if not view.shares or not -session_ms <= silent_ms < SILENT_SESSIONS * session_ms:
        return None
    share = view.shares.get(member)
    numbers = frozenset() if share is None else frozenset(number for name, number in share.places if name == topic)
    given = sum(name == topic for other in view.shares.values() for name, _ in other.places)
    if not given:
        logger.warning(
            "group %r: its coordinator assigns no partition of topic %r to any member, so member %r claims what is "
            "free; check that the group member sensor of a deployment names the topic, and that the coordinator reads "
            "the cluster of the data topics (--data-connection)",
            view.group,
            topic,
            member,
        )
        return None
    text = (
        f"the coordinator of group {view.group!r} has assigned {len(numbers)} of {given} partitions of topic {topic!r} "
        f"to member {member!r}"
    )
    if share is None:
        others = ", ".join(sorted(view.shares))
        text = (
            f"the coordinator of group {view.group!r} has no member {member!r}, only {others}; check that the group "
            "member sensor of this deployment is running"
        )
    return Advice(numbers, text + _moved(share, topic))


def _moved(share: MemberAssignment | None, topic: str) -> str:
    """Return a text about the partitions that were assigned to the member last, and when; empty if there are none."""
    gained = [] if share is None else sorted(number for name, number in share.gained if name == topic)
    if share is None or not gained:
        return ""
    at = utc_to_second(share.assigned_at_ms // 1_000)
    return f"; at {at} it added partitions {', '.join(map(str, gained))}"


@dataclass(slots=True)
class AssignmentReader:
    """A reader of the partitions that one member of a group should claim. Not thread-safe.

    If reading fails, the last assignment that was read is used until the coordinator counts as silent.
    """

    connection: KafkaConnection
    topics: CoordinatorTopics
    group: str
    member: str
    session_ms: float
    """The member's session timeout in milliseconds."""
    read: Callable[[KafkaConnection, CoordinatorTopics, str], GroupAssignments] = read_group
    _view: GroupAssignments | None = field(default=None, init=False)
    _read_at_s: float = field(default=0.0, init=False)

    def assigned_partitions(self, topic: str) -> Advice | None:
        """Return the partitions of `topic` to claim now; None if the member may claim any free partition."""
        if self._view is None or time.monotonic() - self._read_at_s >= _OLD_S:
            try:
                self._view = self.read(self.connection, self.topics, self.group)
                self._read_at_s = time.monotonic()
            except MarshalError as error:
                logger.warning(
                    "group %r: the assignment of member %r could not be read, the last one read is used: %s",
                    self.group,
                    self.member,
                    error,
                )
        if self._view is None:
            return None
        return assigned_partitions(self._view, self.member, topic, self.session_ms, time.time() * 1_000)
