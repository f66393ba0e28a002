"""The resource for an outbox: the database with its rows, and the Kafka cluster for its events.

The drain job, the backlog sensor and the outbox check use it. A service (`marshal-dagster outbox harvest`) publishes
rows within milliseconds. Without a service, runs of the drain job publish them.
"""

from contextlib import closing
from typing import TYPE_CHECKING, Any

from dagster import EnvVar, MetadataValue
from pydantic import Field

from marshal_dagster._internal.postgres import DEFAULT_SCHEMA, Database
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.options import (
    DEFAULT_OPTIONS,
    MAX_ATTEMPTS_TEXT,
    MAX_IN_FLIGHT_TEXT,
    NAME_TEXT,
    PARTITIONER_TEXT,
    SCHEMA_TEXT,
    TOPIC_PATIENCE_TEXT,
    HarvesterOptions,
)
from marshal_dagster.outbox.schema import DEFAULT_NAME, OutboxTables
from marshal_dagster.outbox.status import OutboxInspector, OutboxStatus, parked_command
from marshal_dagster.resources.connection import CheckedResource, KafkaConnectionConfig, secret_in_code

if TYPE_CHECKING:
    from marshal_dagster.outbox.harvester import Harvester


class OutboxResource(CheckedResource):
    """An outbox in a PostgreSQL database, and the Kafka cluster to which its rows are published.

    Example:
        ```python
        resources = {
            "outbox": OutboxResource(
                connection=KafkaConnectionConfig(bootstrap_servers="localhost:9092"), dsn=EnvVar("OUTBOX_DSN")
            )
        }
        ```
    """

    connection: KafkaConnectionConfig = Field(description="The Kafka cluster to which the rows are published.")
    dsn: str = Field(
        repr=False,
        description='Connection string of the database: EnvVar("NAME") in code, {"env": "NAME"} in YAML.',
    )
    outbox: str = Field(default=DEFAULT_NAME, description=NAME_TEXT)
    database_schema: str = Field(default=DEFAULT_SCHEMA, description=SCHEMA_TEXT)
    max_in_flight_records: int = Field(
        default=DEFAULT_OPTIONS.limits.max_in_flight_records, ge=1, description=MAX_IN_FLIGHT_TEXT
    )
    max_attempts: int = Field(default=DEFAULT_OPTIONS.limits.max_attempts, ge=1, description=MAX_ATTEMPTS_TEXT)
    topic_patience_s: float = Field(
        default=DEFAULT_OPTIONS.limits.topic_patience_s, ge=0, description=TOPIC_PATIENCE_TEXT
    )
    partitioner: str = Field(default=str(DEFAULT_OPTIONS.partitioner), description=PARTITIONER_TEXT)

    def get_resource_definition(self) -> Any:  # noqa: ANN401 - Dagster exports no name for it
        """Return Dagster's definition of this resource; reject a password in plain text."""
        dsn = self.__dict__["dsn"]
        if not isinstance(dsn, EnvVar) and Database(dsn).has_password:
            raise secret_in_code("OutboxResource: dsn", "dsn")
        return super().get_resource_definition()

    def tables(self) -> OutboxTables:
        """Return the tables of the outbox, without a connection to the database.

        Returns:
            The tables.

        Raises:
            ConfigurationError: A field is invalid, or the environment variable of `dsn` is missing.
        """
        return OutboxTables(Database(self._dsn()), self.outbox, self.database_schema)

    def create(self, *, notifies: bool = True, replication: int | None = None) -> None:
        """Create the missing tables and topics of the outbox, like `marshal-dagster outbox init`.

        Args:
            notifies: Whether a trigger notifies the harvester of new rows (PostgreSQL's NOTIFY).
            replication: The number of replicas of the topics (default: three, or the number of brokers if it is
                smaller).

        Raises:
            ConfigurationError: A field is invalid.
            AuthorizationError: This user may not create the topics.
            UnavailableError: The database or Kafka cannot be reached.
        """
        from marshal_dagster.outbox.harvester import OutboxTopics

        registration = self.tables().create(notifies=notifies)
        OutboxTopics.of(registration.uid).create(self.connection.to_connection("connection"), replication)

    def harvester(self) -> "Harvester":
        """Return a harvester for the outbox. It connects when it runs.

        Returns:
            The harvester.

        Raises:
            ConfigurationError: A field is invalid.
        """
        from marshal_dagster.outbox.harvester import Harvester

        limits = HarvestLimits(
            max_in_flight_records=self.max_in_flight_records,
            max_attempts=self.max_attempts,
            topic_patience_s=self.topic_patience_s,
        )
        options = HarvesterOptions(limits=limits, partitioner=self.partitioner)
        return Harvester(self.tables(), self.connection.to_connection("connection"), options)

    def status(self) -> OutboxStatus:
        """Return the backlog of the outbox.

        Returns:
            The number of rows that wait, the age of the oldest, and the number of rows that are set aside.

        Raises:
            ConfigurationError: A field is invalid.
            UnavailableError: The database cannot be reached.
        """
        with closing(OutboxInspector(self.tables())) as backlog:
            return backlog.status()

    def _dsn(self) -> str:
        """Return the connection string, also outside a run, where Dagster has not resolved an `EnvVar`."""
        dsn = self.__dict__["dsn"]
        if not isinstance(dsn, EnvVar):
            return str(dsn)
        found = dsn.get_value()
        if not found:
            raise ConfigurationError(f"OutboxResource: dsn: environment variable {dsn.env_var_name} is not set")
        return found


def backlog_text(outbox: OutboxResource, status: OutboxStatus) -> str:
    """Return a sentence with the number of waiting rows and the age of the oldest, and of rows that are set aside."""
    name = status.registration.name
    aside = f"; {parked_text(outbox, status.parked)}" if status.parked else ""
    if status.oldest_age_s is None:
        return f"outbox {name!r} is empty{aside}"
    return f"{status.rows} rows wait in outbox {name!r}, the oldest for {status.oldest_age_s:.1f} s{aside}"


def parked_text(outbox: OutboxResource, parked: int) -> str:
    """Return a sentence with the number of rows that are set aside, and what an operator can do."""
    return f"{parked} rows are set aside: {parked_advice(outbox)}"


def parked_advice(outbox: OutboxResource) -> str:
    """Return what an operator can do about rows that are set aside."""
    return f"`{parked_command(outbox.outbox, outbox.database_schema)}` shows why, `outbox parked retry` retries them"


def backlog_metadata(status: OutboxStatus) -> dict[str, MetadataValue[Any]]:
    """Return the backlog as Dagster metadata."""
    return {
        "rows waiting": MetadataValue.int(status.rows),
        "seconds the oldest waits": MetadataValue.float(status.oldest_age_s or 0.0),
        "rows set aside": MetadataValue.int(status.parked),
    }
