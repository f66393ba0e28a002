"""What can go wrong with a Kafka of one's own; each message is one line that says what to do next."""

from marshal_dagster.errors import MarshalError


class DevKafkaError(MarshalError):
    """Root of the errors of the Kafka for one machine."""


class BrokerFailedError(DevKafkaError):
    """A broker could not be set up, ended while it started, or was not ready in time."""


class ClusterMismatchError(DevKafkaError):
    """The directory holds another cluster than the one asked for, or none."""


class ClusterLockedError(DevKafkaError):
    """Another command is at work on the directory."""
