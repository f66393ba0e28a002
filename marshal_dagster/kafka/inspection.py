"""What only a check asks of a cluster: a principal's rights, replicas in sync, brokers."""

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
"""A setting that every broker has up to Kafka 3.9; 4.0 did away with it."""
FROM_4: Final = "4.0 or newer"


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many replicas a partition has, and how many of them are in sync with its leader, if it has one."""

    assigned: int
    in_sync: int
    has_leader: bool


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """A topic as the one who asks has it; `rights` None: the brokers do not tell."""

    name: str
    topic_id: str
    rights: frozenset[Right] | None
    replicas: Mapping[int, Replicas]


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that is alive; `version` as far as its settings tell, None where they may not be seen."""

    version: str | None


class KafkaInspector(Topics):
    """Questions that nothing but a check needs answered; they change nothing."""

    @property
    def throttled_s(self) -> float:
        """The longest time (seconds) for which a broker had this client wait, because of a quota; 0.0 without any."""
        return self._log.throttled_s

    def topic_info(self, topic: str) -> TopicInfo:
        """Look up what this principal may do with a topic, and how its replicas are.

        Raises:
            TopicNotFoundError: it does not exist.
            AuthorizationError: DESCRIBE on the topic.
            UnavailableError: no answer in time.
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
        """Look up the brokers that are alive, and of which version each is as far as it tells.

        Raises:
            UnavailableError: no answer in time.
        """
        return [Broker(self._version_of(number)) for number in self._broker_ids()]

    def _version_of(self, broker: int) -> str | None:
        """Tell from a broker's settings: Kafka has no request for its version, and the client library shows none."""
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
