"""An outbox in Dagster: the resource that names it, the job that drains it, a sensor and a check on its backlog.

A service (`marshal-dagster outbox harvest`) publishes within milliseconds. The job is for who has none: it publishes
what is there and ends, as often as the sensor or a schedule asks for it.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetKey,
    AssetsDefinition,
    DefaultSensorStatus,
    EnvVar,
    ExecutorDefinition,
    Failure,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    asset_check,
    in_process_executor,
    job,
    op,
)
from pydantic import Field

from marshal_dagster.errors import ConfigurationError, MarshalError
from marshal_dagster.outbox.holds import Limits
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
from marshal_dagster.outbox.tables import DEFAULT_NAME
from marshal_dagster.postgres import DEFAULT_SCHEMA, Database
from marshal_dagster.resources import CheckedResource, KafkaConnectionConfig, resource_of, secret_in_code
from marshal_dagster.runs import UNFINISHED, forwarded_logs
from marshal_dagster.sensors.names import DEFAULT_INTERVAL_S

if TYPE_CHECKING:
    from marshal_dagster.outbox.harvester import Harvester
    from marshal_dagster.outbox.looking import OutboxStatus
    from marshal_dagster.outbox.tables import OutboxTables

OUTBOX_TAG: Final = "marshal/outbox"


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
    max_attempts: int = Field(
        default=DEFAULT_OPTIONS.limits.max_attempts,
        ge=1,
        description=MAX_ATTEMPTS_TEXT,
    )
    topic_patience_s: float = Field(
        default=DEFAULT_OPTIONS.limits.topic_patience_s,
        ge=0,
        description=TOPIC_PATIENCE_TEXT,
    )
    partitioner: str = Field(
        default=DEFAULT_OPTIONS.partitioner,
        description=PARTITIONER_TEXT,
    )

    def get_resource_definition(self) -> Any:  # noqa: ANN401 - Dagster exports no name for it
        """Give what Dagster stores of this resource; refuses secrets in plain text."""
        for name in self.connection.secrets_in_code():
            raise ConfigurationError(secret_in_code(f"OutboxResource: connection.{name}", name))
        dsn = self.__dict__["dsn"]
        if not isinstance(dsn, EnvVar) and Database(dsn).has_password:
            raise ConfigurationError(secret_in_code("OutboxResource: dsn", "dsn"))
        return super().get_resource_definition()

    def tables(self) -> "OutboxTables":
        """Name the outbox's tables; nothing is connected to. Raises `ConfigurationError`."""
        from marshal_dagster.outbox.tables import OutboxTables

        return OutboxTables(Database(self._dsn()), self.outbox, self.database_schema)

    def create(self, *, notifies: bool = True, replication: int | None = None) -> None:
        """Make what is missing of the outbox: its tables and its topics, as `marshal-dagster outbox init` does.

        Raises `ConfigurationError`, `RightMissing`, `UnavailableError`.
        """
        from marshal_dagster.outbox.harvester import OutboxTopics

        standing = self.tables().create(notifies=notifies)
        OutboxTopics.of(standing.uid).create(self.connection.to_connection("connection"), replication)

    def harvester(self) -> "Harvester":
        """Make a harvester, which connects when it runs. Raises `ConfigurationError`."""
        from marshal_dagster.outbox.harvester import Harvester

        limits = Limits(
            max_in_flight_records=self.max_in_flight_records,
            max_attempts=self.max_attempts,
            topic_patience_s=self.topic_patience_s,
        )
        options = HarvesterOptions(limits=limits, partitioner=self.partitioner)
        return Harvester(self.tables(), self.connection.to_connection("connection"), options)

    def status(self) -> "OutboxStatus":
        """Look at the backlog. Raises `ConfigurationError`, `UnavailableError`."""
        from marshal_dagster.outbox.looking import Backlog

        with closing(Backlog(self.tables())) as backlog:
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


def build_outbox_drain_job(
    *,
    name: str = "drain_outbox",
    outbox_key: str = "outbox",
    executor_def: ExecutorDefinition = in_process_executor,
    tags: Mapping[str, str] | None = None,
) -> JobDefinition:
    """Build the job that publishes what the outbox of resource `outbox_key` has when it starts, and ends.

    Where a service publishes at the same time, it waits until that has done it. Rows that were set aside meanwhile fail
    the run once all else is published; how many of what stands in its metadata.
    """

    def drain(context: OpExecutionContext) -> None:
        _drain(context, resource_of(OutboxResource, context.resources, outbox_key))

    work = op(name=f"{name}_op", required_resource_keys={outbox_key})(drain)

    def do() -> None:
        work()

    about = "Publishes what is in the outbox, and ends."
    return job(name=name, description=about, executor_def=executor_def, tags=dict(tags or {}))(do)


def build_outbox_backlog_sensor(
    drain_job: JobDefinition,
    *,
    more_than_rows: int = 0,
    older_than_s: float | None = None,
    name: str = "outbox_backlog",
    minimum_interval_s: int = DEFAULT_INTERVAL_S,
    outbox_key: str = "outbox",
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
) -> SensorDefinition:
    """Build the sensor that asks for a run of `drain_job` when rows wait, and none is under way.

    It asks when more than `more_than_rows` wait, or when the oldest has waited for longer than `older_than_s` seconds.
    Raises `ConfigurationError`.
    """
    if more_than_rows < 0 or (older_than_s is not None and older_than_s < 0):
        raise ConfigurationError(
            f"more_than_rows is {more_than_rows}, older_than_s is {older_than_s}; they must be 0 or more"
        )

    # Dagster hands over resources by keyword too when a test calls the sensor directly.
    def evaluate(context: SensorEvaluationContext, **_resources: object) -> SensorResult | SkipReason:
        """Look at the backlog once."""
        status = resource_of(OutboxResource, context.resources, outbox_key).status()
        told = _told(status)
        age_s = status.oldest_age_s or 0.0
        if status.rows <= more_than_rows and (older_than_s is None or age_s <= older_than_s):
            return SkipReason(told)
        under_way = RunsFilter(job_name=drain_job.name, statuses=list(UNFINISHED))
        if context.instance.get_run_records(under_way, limit=1):
            return SkipReason(f"{told}; a run of {drain_job.name!r} is under way")
        context.log.info("%s: asking for a run", told)
        return SensorResult(run_requests=[RunRequest(tags={OUTBOX_TAG: status.standing.name})])

    return SensorDefinition(
        name=name,
        evaluation_fn=evaluate,
        minimum_interval_seconds=minimum_interval_s,
        description="Asks for a run that drains the outbox when rows wait.",
        job=drain_job,
        default_status=default_status,
        required_resource_keys={outbox_key},
    )


def build_outbox_check(
    asset: AssetsDefinition | AssetKey | str,
    *,
    max_age_s: float = 60.0,
    max_parked: int = 0,
    blocking: bool = False,
    name: str = "outbox_backlog",
    outbox_key: str = "outbox",
) -> AssetChecksDefinition:
    """Build the check, of an asset whose events go through the outbox, that these are published.

    It fails when the oldest row has waited for longer than `max_age_s` seconds, or when more than `max_parked` are set
    aside: as an error where it is `blocking`, else as a warning. Raises `ConfigurationError`.
    """
    if max_age_s < 0 or max_parked < 0:
        raise ConfigurationError(f"max_age_s is {max_age_s}, max_parked is {max_parked}; they must be 0 or more")

    def check(context: AssetCheckExecutionContext) -> AssetCheckResult:
        status = resource_of(OutboxResource, context.resources, outbox_key).status()
        problems = _problems(status, max_age_s, max_parked)
        return AssetCheckResult(
            passed=not problems,
            severity=AssetCheckSeverity.ERROR if blocking else AssetCheckSeverity.WARN,
            description="; ".join(problems) or _told(status),
            metadata=_metadata(status),
        )

    return asset_check(
        asset=asset,
        name=name,
        description="The outbox's rows are published soon.",
        blocking=blocking,
        required_resource_keys={outbox_key},
    )(check)


def _drain(context: OpExecutionContext, outbox: OutboxResource) -> None:
    harvester, start_s = outbox.harvester(), time.monotonic()
    with forwarded_logs(context), _in_one_line():
        before = outbox.status()
        context.log.info(_told(before))
        published = harvester.drain()
        after = outbox.status()
    context.add_output_metadata(
        {
            "published": published,
            "set aside": harvester.counts.parked,
            "seconds": round(time.monotonic() - start_s, 3),
            **_metadata(after),
        }
    )
    if harvester.counts.parked:
        raise Failure(
            f"{harvester.counts.parked} rows of outbox {outbox.outbox!r} were set aside: `marshal-dagster outbox "
            "parked` shows why, `outbox retry` puts them back; all else is published",
            allow_retries=False,
        )


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except MarshalError as error:
        raise Failure(str(error)) from None


def _problems(status: "OutboxStatus", max_age_s: float, max_parked: int) -> list[str]:
    problems = []
    if status.oldest_age_s is not None and status.oldest_age_s > max_age_s:
        problems.append(
            f"the oldest of {status.rows} rows has waited for {status.oldest_age_s:.0f} s, more than {max_age_s:g} s: "
            "is a harvester running?"
        )
    if status.parked > max_parked:
        problems.append(f"{status.parked} rows are set aside: `marshal-dagster outbox parked` shows why")
    return problems


def _told(status: "OutboxStatus") -> str:
    if status.oldest_age_s is None:
        return f"outbox {status.standing.name!r} is empty"
    return f"{status.rows} rows wait in outbox {status.standing.name!r}, the oldest for {status.oldest_age_s:.1f} s"


def _metadata(status: "OutboxStatus") -> dict[str, MetadataValue[Any]]:
    return {
        "rows waiting": MetadataValue.int(status.rows),
        "seconds the oldest waits": MetadataValue.float(status.oldest_age_s or 0.0),
        "rows set aside": MetadataValue.int(status.parked),
    }
