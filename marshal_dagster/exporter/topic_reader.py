"""Look up the data topics of all groups at once: their ids, the offsets of their partitions, and their retention."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from marshal_dagster.errors import AuthorizationError, MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka.admin_client import TopicDescription
from marshal_dagster.protocol.state import OffsetBounds

_LOOK_AGAIN_S: Final = 300.0
"""How long a missing topic, and a topic's id, partitions and retention are not looked up again.

Each look-up of an id leaks 0.1 KB in the client library, which an exporter of many topics would notice within days.
"""

_TRY_AGAIN_S: Final = 60.0
"""How long a topic, or its retention, is not looked up again if the cluster gave no answer."""
_KEPT_S: Final = 60.0
"""How long the last offsets of a topic are used if the cluster gives no answer, or was not asked because of another."""


class TopicClient(Protocol):
    """The requests of `marshal_dagster.kafka.admin_client.Topics` that the exporter uses."""

    def describe(self, topic: str) -> TopicDescription:
        """Look up a topic's id and partitions."""

    def offsets(self, topic: str, partitions: Collection[int]) -> dict[int, OffsetBounds]:
        """Look up the first and the next offset of partitions."""

    def offsets_at(self, topic: str, partitions: Collection[int], at_ms: int) -> dict[int, int]:
        """Look up the first offset of a time or later; a partition without such a record is left out."""

    def settings(self, topic: str) -> dict[str, str]:
        """Look up the settings of a topic."""


@dataclass(frozen=True, slots=True)
class ExportedTopic:
    """A data topic: its id, and the offsets of each of its partitions."""

    topic_id: str
    bounds: Mapping[int, OffsetBounds]
    retention_s: float | None = None


class TopicReader:
    """Looks up data topics. It asks once for all groups, and skips topics that are missing for some minutes."""

    def __init__(self, client: TopicClient) -> None:
        """Use `client`, which the caller closes."""
        self.client = client
        self._skipped_until_s: dict[str, float] = {}
        self._unanswered: set[str] = set()
        self._described: dict[str, tuple[float, TopicDescription]] = {}
        self._last: dict[str, tuple[float, ExportedTopic]] = {}
        self._retention: dict[str, tuple[float, float | None]] = {}

    def read(self, topics: Collection[str], at_s: float) -> dict[str, ExportedTopic | None]:
        """Look up `topics`. The value is None for a topic that cannot be looked up now.

        Once there is no answer, the remaining topics wait for the next call, which leaves out this one for a minute and
        then tries it last. So neither a cluster that is away nor a topic without a leader costs a timeout for each
        topic. Meanwhile all of these have their last offsets, for a minute. Raises `MarshalError` for errors that do
        not depend on a topic.

        Args:
            topics: The names of the topics.
            at_s: The present time in unix seconds.
        """
        found: dict[str, ExportedTopic | None] = dict.fromkeys(sorted(topics))
        for topic in sorted(found, key=self._unanswered.__contains__):
            if self._skipped_until_s.get(topic, 0.0) > at_s:
                continue
            try:
                self._last[topic] = at_s, self._look_up(topic, at_s)
            except (TopicNotFoundError, AuthorizationError):
                self._described.pop(topic, None)
                self._last.pop(topic, None)
                self._skipped_until_s[topic] = at_s + _LOOK_AGAIN_S
            except UnavailableError:
                self._skipped_until_s[topic] = at_s + _TRY_AGAIN_S
                self._unanswered.add(topic)
                break
            self._unanswered.discard(topic)
        for topic in found:
            looked_at_s, last = self._last.get(topic, (float("-inf"), None))
            found[topic] = last if at_s - looked_at_s <= _KEPT_S else None
        return found

    def _look_up(self, topic: str, at_s: float) -> ExportedTopic:
        described = self._describe(topic, at_s)
        try:
            bounds = self.client.offsets(topic, described.partitions)
        except TopicNotFoundError:
            bounds = {}
        before = self._last[topic][1].bounds if topic in self._last else {}
        if not bounds or any(at.end < before[number].end for number, at in bounds.items() if number in before):
            self._described.pop(topic, None)  # it may have been deleted and re-created
            described = self._describe(topic, at_s)
            bounds = self.client.offsets(topic, described.partitions)
        return ExportedTopic(described.topic_id, bounds, self._retention_s(topic, at_s))

    def _describe(self, topic: str, at_s: float) -> TopicDescription:
        looked_at_s, described = self._described.get(topic, (float("-inf"), None))
        if described is None or at_s - looked_at_s >= _LOOK_AGAIN_S:
            described = self.client.describe(topic)
            self._described[topic] = at_s, described
        return described

    def _retention_s(self, topic: str, at_s: float) -> float | None:
        looked_at_s, retention_s = self._retention.get(topic, (float("-inf"), None))
        if at_s - looked_at_s < _LOOK_AGAIN_S:
            return retention_s
        try:
            settings = self.client.settings(topic)
        except UnavailableError:
            self._retention[topic] = at_s - _LOOK_AGAIN_S + _TRY_AGAIN_S, retention_s
            return retention_s
        except MarshalError:  # the user may lack DESCRIBE_CONFIGS, which the rest does not need
            settings = {}
        kept_ms = int(settings.get("retention.ms", "-1"))
        is_deleted = "delete" in settings.get("cleanup.policy", "delete")
        retention_s = kept_ms / 1_000 if kept_ms >= 0 and is_deleted else None
        self._retention[topic] = at_s, retention_s
        return retention_s
