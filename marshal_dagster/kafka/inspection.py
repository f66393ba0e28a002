"""Look up values that only `marshal-dagster doctor` needs: rights, in-sync replicas, broker versions and quotas."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import confluent_kafka.admin

from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.acls import Needed, Right
from marshal_dagster.kafka.admin_client import Topics, authorized, url_safe
from marshal_dagster.kafka.errors import Request

_API: Final[Any] = confluent_kafka.admin
"""For the names that the client library's type hints do not export."""
_INTER_BROKER_VERSION: Final = "inter.broker.protocol.version"
"""A setting that every broker has up to Kafka 3.9; Kafka 4.0 removed it."""
FROM_4: Final = "4.0 or newer"


@dataclass(frozen=True, slots=True)
class Replicas:
    """The number of replicas of a partition, how many of them are in sync, and whether it has a leader."""

    assigned: int
    in_sync: int
    has_leader: bool


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic, with the rights of this user on it. `rights` is None if the brokers do not report rights."""

    name: str
    topic_id: str
    rights: frozenset[Right] | None
    replicas: Mapping[int, Replicas]


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that is alive. `version` comes from its settings; None if this user may not see them."""

    version: str | None


class KafkaInspector(Topics):
    """Requests that only checks need. They change nothing."""

    @property
    def throttled_s(self) -> float:
        """The longest time in seconds that a broker delayed this client because of a quota; 0.0 if none did."""
        return self._log.throttled_s

    def topic_info(self, topic: str) -> TopicInfo:
        """Look up this user's rights on a topic, and the state of its replicas.

        Raises:
            TopicNotFoundError: The topic does not exist.
            AuthorizationError: DESCRIBE on the topic is missing.
            UnavailableError: The brokers did not answer in time.
        """
        described = self._described(topic, with_rights=True)
        return TopicInfo(
            topic,
            url_safe(described.topic_id),
            authorized(described),
            {
                partition.id: Replicas(
                    len(partition.replicas),
                    len(partition.isr),
                    partition.leader is not None and partition.leader.id >= 0,
                )
                for partition in described.partitions
            },
        )

    def brokers(self) -> list[Broker]:
        """Look up the brokers that are alive, and their versions as far as this user may see them.

        Raises:
            UnavailableError: The brokers did not answer in time.
        """
        return [Broker(self._version_of(number)) for number in self._broker_ids()]

    def _version_of(self, broker: int) -> str | None:
        """Return the version in a broker's settings, because there is no request that the client library offers."""
        request = Request(f"look up the settings of broker {broker}", Needed((Right.DESCRIBE_CONFIGS,)))
        resource = _API.ConfigResource(_API.ResourceType.BROKER, str(broker))
        try:
            entries = self._ask_for_one(
                request, lambda client, left_s: client.describe_configs([resource], request_timeout=left_s)
            )
        except MarshalError:
            return None
        entry = entries.get(_INTER_BROKER_VERSION)
        return FROM_4 if entry is None else str(entry.value)
