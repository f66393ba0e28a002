"""A real Apache Kafka for one machine: one broker or three, in KRaft mode, on 127.0.0.1 only.

Maven coordinates name the jars (`jars`), a Java 17 or newer runs them, and `KafkaCluster` starts, looks at and stops
the broker processes of one directory. Imports the standard library and psutil, and of this package the exceptions,
`_internal`, `java`, `ports` and `processes` alone. All that is said to Kafka from here
is the metadata request of `readiness`.
"""

from marshal_dagster.devkafka.cluster import KafkaCluster, running_kafka
from marshal_dagster.devkafka.errors import BrokerFailedError, ClusterLockedError, ClusterMismatchError, DevKafkaError
from marshal_dagster.devkafka.jars import KAFKA_VERSION, ensure_jars
from marshal_dagster.devkafka.status import BrokerStatus, KafkaStatus
from marshal_dagster.errors import PortInUseError

__all__ = [
    "KAFKA_VERSION",
    "BrokerFailedError",
    "BrokerStatus",
    "ClusterLockedError",
    "ClusterMismatchError",
    "DevKafkaError",
    "KafkaCluster",
    "KafkaStatus",
    "PortInUseError",
    "ensure_jars",
    "running_kafka",
]
