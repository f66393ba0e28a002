"""The resource that reads the coordination log; it needs no right to write."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from pydantic import Field, field_validator

from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.resources.connection import CheckedResource, KafkaConnectionConfig, check_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from marshal_dagster.coordination.rationalizer import Rationalizer
    from marshal_dagster.kafka.admin_client import Topics
    from marshal_dagster.protocol.world import World


NOT_AUTHORIZED: Final = "authorization failed"
"""What Kafka's client says in an error that a missing right causes."""


def require_rights(connection: KafkaConnection, topic: str, *, to_write: bool) -> None:
    """Make sure that this user may read, or write too, the coordination topic.

    Raises `AuthorizationError`, `TopicNotFoundError`, `UnavailableError`.
    """
    from marshal_dagster.kafka.acls import Right, on_topic
    from marshal_dagster.kafka.admin_client import Topics

    with Topics(connection) as topics:
        topics.require(on_topic(topic, Right.READ, *((Right.WRITE,) if to_write else ())))


class CoordinationResource(CheckedResource):
    """What resources have in common that read the coordination log.

    All resources of a process with the same settings share one rationalizer, so each use reads new records only.
    """

    coordination_topic: str = Field(
        default=DEFAULT_COORDINATION_TOPIC, description="The topic that is the coordination log."
    )

    _topic_is_allowed = field_validator("coordination_topic")(check_topic)

    def coordination(self) -> KafkaConnection:
        """Return the connection to the cluster of the coordination topic. Raises `ConfigurationError`."""
        raise NotImplementedError

    def data(self) -> KafkaConnection:
        """Return the connection to the cluster of the data topics. Raises `ConfigurationError`."""
        raise NotImplementedError

    def open_data(self) -> "Topics":
        """Open what asks the cluster of the data topics; the caller closes it. Raises `ConfigurationError`."""
        from marshal_dagster.kafka.admin_client import Topics

        return Topics(self.data())

    def rationalizer(self) -> "Rationalizer":
        """Return this process's rationalizer for these settings, opened now if it is the first use.

        Raises `ConfigurationError`, `TopicNotFoundError` for the coordination topic, `UnavailableError`.
        """
        from marshal_dagster.coordination.rationalizer_cache import shared_rationalizer

        return shared_rationalizer(self.coordination(), self.coordination_topic)

    @contextmanager
    def world(self) -> "Iterator[World]":
        """Read to the present end of the log and yield the world state, which stays as it is inside the block.

        Raises what `rationalizer` does, `CoordinationLogChangedError`, and `AuthorizationError` where this user may
        not read the log.
        """
        rationalizer = self.rationalizer()
        with rationalizer.lock:
            try:
                world = rationalizer.catch_up()
            except UnavailableError as error:
                if NOT_AUTHORIZED in str(error):  # the log shows only that a right is missing, and not which
                    require_rights(self.coordination(), self.coordination_topic, to_write=False)
                raise
            yield world


class RationalizerResource(CoordinationResource):
    """Reads the coordination log; needs no right to write. For sensors and checks."""

    connection: KafkaConnectionConfig = Field(description="The Kafka cluster that has the coordination topic.")
    data_connection: KafkaConnectionConfig | None = Field(
        default=None, description="The cluster that has the data topics; by default that of the coordination topic."
    )

    def coordination(self) -> KafkaConnection:
        """Return the connection to the cluster of the coordination topic. Raises `ConfigurationError`."""
        return self.connection.to_connection("connection")

    def data(self) -> KafkaConnection:
        """Return the connection to the cluster of the data topics. Raises `ConfigurationError`."""
        if self.data_connection is not None:
            return self.data_connection.to_connection("data_connection")
        return self.coordination()
