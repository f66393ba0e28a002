"""Read which member each partition is assigned to, for `status` and `top`. Only a group coordinator assigns."""

import math
import os
import time
from collections.abc import Collection
from dataclasses import replace
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
"""How long, in seconds, `status` and `top` wait for assignments, which they can do without."""


class AssignmentCache:
    """The assignments that coordinators published. They are read again after 5 s.

    If there are no coordinator topics, the cache stops looking for them.
    """

    def __init__(self, connection: KafkaConnection) -> None:
        """Take the coordinators' topics from the environment; nothing is read yet."""
        self._connection = replace(connection, timeout_s=min(connection.timeout_s, _TIMEOUT_S))
        self._topics = CoordinatorTopics(os.environ.get(COORDINATOR_TOPIC_VARIABLE, DEFAULT_TOPIC))
        self._found: Assigned = {}
        self._next_read_s = 0.0

    def of(self, groups: Collection[str]) -> Assigned:
        """Return the member that each partition is assigned to, by group.

        Groups without a live coordinator are left out. If Kafka cannot be reached, the result is empty.
        """
        if time.monotonic() < self._next_read_s:
            return self._found
        self._next_read_s = time.monotonic() + _OLD_S
        try:
            views = read_groups(self._connection, self._topics, groups)
        except TopicNotFoundError:
            self._next_read_s = math.inf
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
