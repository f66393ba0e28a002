"""The resource that names an outbox.

A service (`marshal-dagster outbox harvest`) publishes within milliseconds. The job is for who has none: it publishes
what is there and ends, as often as the sensor or a schedule asks for it.
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
from marshal_dagster.outbox.status import OutboxInspector, OutboxStatus
from marshal_dagster.resources.connection import CheckedResource, KafkaConnectionConfig, secret_in_code

if TYPE_CHECKING:
    from marshal_dagster.outbox.harvester import Harvester


class OutboxResource(CheckedResource):
    """An outbox in a PostgreSQL database, and the Kafka cluster that its rows are published to."""

    connection: KafkaConnectionConfig = Field(description="The Kafka cluster that the rows are published to.")
    dsn: str = Field(
        repr=False,
        description='The database\'s connection string: EnvVar("NAME") in code, {"env": "NAME"} in YAML.',
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
        """Return what Dagster stores of this resource; refuses secrets in plain text."""
        dsn = self.__dict__["dsn"]
        if not isinstance(dsn, EnvVar) and Database(dsn).has_password:
            raise secret_in_code("OutboxResource: dsn", "dsn")
        return super().get_resource_definition()

    def tables(self) -> OutboxTables:
        """Name the outbox's tables; nothing is connected to. Raises `ConfigurationError`."""
        return OutboxTables(Database(self._dsn()), self.outbox, self.database_schema)

    def create(self, *, notifies: bool = True, replication: int | None = None) -> None:
        """Make what is missing of the outbox: its tables and its topics, as `marshal-dagster outbox init` does.

        Raises `ConfigurationError`, `AuthorizationError`, `UnavailableError`.
        """
        from marshal_dagster.outbox.harvester import OutboxTopics

        registration = self.tables().create(notifies=notifies)
        OutboxTopics.of(registration.uid).create(self.connection.to_connection("connection"), replication)

    def harvester(self) -> "Harvester":
        """Make a harvester, which connects when it runs. Raises `ConfigurationError`."""
        from marshal_dagster.outbox.harvester import Harvester

        limits = HarvestLimits(
            max_in_flight_records=self.max_in_flight_records,
            max_attempts=self.max_attempts,
            topic_patience_s=self.topic_patience_s,
        )
        options = HarvesterOptions(limits=limits, partitioner=self.partitioner)
        return Harvester(self.tables(), self.connection.to_connection("connection"), options)

    def status(self) -> OutboxStatus:
        """Look at the backlog. Raises `ConfigurationError`, `UnavailableError`."""
        with closing(OutboxInspector(self.tables())) as backlog:
            return backlog.status()

    def _dsn(self) -> str:
        """Give the connection string, also outside of a run, where Dagster has not put it in an `EnvVar`'s place."""
        dsn = self.__dict__["dsn"]
        if not isinstance(dsn, EnvVar):
            return str(dsn)
        found = dsn.get_value()
        if not found:
            raise ConfigurationError(f"OutboxResource: dsn: the environment has no variable {dsn.env_var_name}")
        return found


def backlog_text(status: OutboxStatus) -> str:
    """Return how many rows wait and for how long, as a sentence."""
    if status.oldest_age_s is None:
        return f"outbox {status.registration.name!r} is empty"
    return f"{status.rows} rows wait in outbox {status.registration.name!r}, the oldest for {status.oldest_age_s:.1f} s"


def backlog_metadata(status: OutboxStatus) -> dict[str, MetadataValue[Any]]:
    """Return the backlog as Dagster metadata."""
    return {
        "rows waiting": MetadataValue.int(status.rows),
        "seconds the oldest waits": MetadataValue.float(status.oldest_age_s or 0.0),
        "rows set aside": MetadataValue.int(status.parked),
    }
