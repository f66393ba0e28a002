"""The resource that reads the coordination log, for sensors and checks, and the base of `ClaimerResource`.

Reading needs no right to write.
"""

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
"""The text by which errors of Kafka's client report a missing right."""


def require_rights(connection: KafkaConnection, topic: str, *, to_write: bool) -> None:
    """Check that this user may read the coordination topic, and with `to_write` also write it.

    Raises `AuthorizationError`, `TopicNotFoundError` and `UnavailableError`.
    """
    from marshal_dagster.kafka.acls import Right, on_topic
    from marshal_dagster.kafka.admin_client import Topics

    with Topics(connection) as topics:
        topics.require(on_topic(topic, Right.READ, *((Right.WRITE,) if to_write else ())))


class CoordinationResource(CheckedResource):
    """Base class of the resources that read the coordination log.

    All resources of a process with the same settings share one rationalizer, so each use reads only new records.
    """

    coordination_topic: str = Field(
        default=DEFAULT_COORDINATION_TOPIC, description="The name of the coordination topic."
    )

    _topic_is_allowed = field_validator("coordination_topic")(check_topic)

    def coordination(self) -> KafkaConnection:
        """Return the connection to the cluster of the coordination topic. Raises `ConfigurationError`."""
        raise NotImplementedError

    def data(self) -> KafkaConnection:
        """Return the connection to the cluster of the data topics. Raises `ConfigurationError`."""
        raise NotImplementedError

    def open_data(self) -> "Topics":
        """Open a client for metadata of the data topics.

        Returns:
            The client. The caller closes it.

        Raises:
            ConfigurationError: A field is invalid.
        """
        from marshal_dagster.kafka.admin_client import Topics

        return Topics(self.data())

    def rationalizer(self) -> "Rationalizer":
        """Return this process's rationalizer for these settings, which computes the state from the log.

        Returns:
            The rationalizer. The first use opens it.

        Raises:
            ConfigurationError: A field is invalid.
            TopicNotFoundError: The coordination topic does not exist.
            UnavailableError: Kafka cannot be reached.
        """
        from marshal_dagster.coordination.rationalizer_cache import shared_rationalizer

        return shared_rationalizer(self.coordination(), self.coordination_topic)

    @contextmanager
    def world(self) -> "Iterator[World]":
        """Read to the current end of the log and yield the world state, which does not change inside the block.

        Yields:
            The world state.

        Raises:
            MarshalError: As in `rationalizer`.
            CoordinationLogChangedError: The log is not the one read before.
            AuthorizationError: This user may not read the log.
        """
        rationalizer = self.rationalizer()
        with rationalizer.lock:
            try:
                world = rationalizer.catch_up()
            except UnavailableError as error:
                if NOT_AUTHORIZED in str(error):  # the error does not name the missing right
                    require_rights(self.coordination(), self.coordination_topic, to_write=False)
                raise
            yield world


class RationalizerResource(CoordinationResource):
    """Reads the coordination log, for sensors and checks. It needs no right to write.

    Example:
        ```python
        rationalizer = RationalizerResource(connection=KafkaConnectionConfig(bootstrap_servers="localhost:9092"))
        ```
    """

    connection: KafkaConnectionConfig = Field(description="The Kafka cluster with the coordination topic.")
    data_connection: KafkaConnectionConfig | None = Field(
        default=None,
        description="The Kafka cluster with the data topics (default: the cluster of the coordination topic).",
    )

    def coordination(self) -> KafkaConnection:
        """Return the connection to the cluster of the coordination topic. Raises `ConfigurationError`."""
        return self.connection.to_connection("connection")

    def data(self) -> KafkaConnection:
        """Return the connection to the cluster of the data topics. Raises `ConfigurationError`."""
        if self.data_connection is not None:
            return self.data_connection.to_connection("data_connection")
        return self.coordination()
