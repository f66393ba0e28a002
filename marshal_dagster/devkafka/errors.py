"""Errors of the local Kafka cluster. Each message is one line and includes what to do next."""

from marshal_dagster.errors import MarshalError


class DevKafkaError(MarshalError):
    """Base class of the errors of the local Kafka cluster."""


class BrokerFailedError(DevKafkaError):
    """A broker could not be set up, ended during its start, or was not ready in time."""


class ClusterMismatchError(DevKafkaError):
    """The directory holds no cluster, or one that differs from the requested one."""


class ClusterLockedError(DevKafkaError):
    """Another command is using the directory."""
