"""A real Apache Kafka for one machine: one broker or three, in KRaft mode, on 127.0.0.1 only.

Maven coordinates name the jars (`jars`), a Java 17 or newer runs them, and `KafkaCluster` starts, looks at and stops
the broker processes of one directory. Imports the standard library and psutil, and of this package the exceptions,
`_internal`, `java`, `ports` and `processes` alone. All that is said to Kafka from here
is the metadata request of `readiness`.
"""

from marshal_dagster.devkafka.cluster import BrokerStatus as BrokerStatus
from marshal_dagster.devkafka.cluster import KafkaCluster as KafkaCluster
from marshal_dagster.devkafka.cluster import KafkaStatus as KafkaStatus
from marshal_dagster.devkafka.cluster import running_kafka as running_kafka
from marshal_dagster.devkafka.errors import BrokerFailedError as BrokerFailedError
from marshal_dagster.devkafka.errors import ClusterLockedError as ClusterLockedError
from marshal_dagster.devkafka.errors import ClusterMismatchError as ClusterMismatchError
from marshal_dagster.devkafka.errors import DevKafkaError as DevKafkaError
from marshal_dagster.devkafka.jars import KAFKA_VERSION as KAFKA_VERSION
from marshal_dagster.devkafka.jars import ensure_jars as ensure_jars
from marshal_dagster.errors import PortInUseError as PortInUseError
