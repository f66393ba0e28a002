"""A real Apache Kafka for one machine: one broker or three, in KRaft mode, on 127.0.0.1 only.

It serves `marshal-dagster kafka up`, the demo and the tests. `KafkaCluster` starts, inspects and stops the broker
processes of one directory. The jars come from a Maven repository (`jars`) and run on a Java 17 or newer. This package
uses no Kafka client: its only request to a broker is the metadata request of `readiness`.
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
