"""The member that each partition is assigned to, if a coordinator leads the group: for `status` and `top`."""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

from marshal_dagster.cli.options import COORDINATOR_TOPIC_VARIABLE
from marshal_dagster.cli.world_view import Assigned, Assignee
from marshal_dagster.coordinator import DEFAULT_TOPIC
from marshal_dagster.coordinator.assignment_reader import SILENT_SESSIONS
from marshal_dagster.coordinator.group_view import read_groups
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.errors import MarshalError, TopicNotFoundError
from marshal_dagster.kafka.connection import KafkaConnection

_OLD_S: Final = 5.0
_TIMEOUT_S: Final = 3.0
"""Short, because `status` and `top` wait for an answer that is only an addition to what they show."""


@dataclass(slots=True)
class AssignmentCache:
    """Assignments, which are read again after some seconds.

    Without a coordinator's topics it looks once only.
    """

    connection: KafkaConnection
    topics: CoordinatorTopics = field(
        default_factory=lambda: CoordinatorTopics(os.environ.get(COORDINATOR_TOPIC_VARIABLE, DEFAULT_TOPIC))
    )
    _found: Assigned = field(default_factory=dict)
    _read_at_s: float | None = None
    _has_topics: bool = True

    def __post_init__(self) -> None:
        """Shorten the time-out of the connection."""
        self.connection = replace(self.connection, timeout_s=min(self.connection.timeout_s, _TIMEOUT_S))

    def of(self, groups: Collection[str]) -> Assigned:
        """Return the member of each partition, by group; groups that no coordinator leads are left out."""
        is_new = self._read_at_s is not None and time.monotonic() - self._read_at_s < _OLD_S
        if is_new or not self._has_topics:
            return self._found
        self._read_at_s = time.monotonic()
        try:
            views = read_groups(self.connection, self.topics, groups)
        except TopicNotFoundError:
            self._has_topics = False
            return {}
        except MarshalError:
            return {}
        self._found = {
            group: {
                place: Assignee(share.member, share.assigned_at_ms if place in share.gained else None)
                for share in view.shares.values()
                for place in share.places
            }
            for group, view in views.items()
            if view.silent_ms(time.time() * 1_000) < SILENT_SESSIONS * view.session_ms
        }
        return self._found
