"""The component for Dagster's `dg` projects: it processes claimed batches of a data topic, configured in YAML.

`ClaimedTopicComponent` builds the asset, topic asset, jobs, schedule, checks, sensors and resources with the factories
of this package. `dg scaffold` writes an example of the YAML and of the function.
"""

from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Any, Literal

from dagster import (
    Component,
    ComponentLoadContext,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    Definitions,
    EnvVar,
    Model,
    Resolvable,
    Scaffolder,
    ScaffoldRequest,
    ScheduleDefinition,
    SensorDefinition,
    scaffold_component,
    scaffold_with,
)
from pydantic import BaseModel, Field

from marshal_dagster.assets.checks import build_claim_checks
from marshal_dagster.assets.decorator import marshal_asset
from marshal_dagster.assets.topics import build_topic_asset, build_topic_sensor
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs.batch import (
    AnyJob,
    build_claimed_batch_job,
    build_claimed_batch_schedule,
    build_reprocess_job,
)
from marshal_dagster.kafka.connection import DEFAULT_TIMEOUT_S, SECRETS
from marshal_dagster.ops.user_function import PROCESS_ARGUMENTS, check_arguments
from marshal_dagster.resources.claimer import DEFAULT_HEARTBEAT_INTERVAL_S, ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.names import as_name
from marshal_dagster.sensors._exhausted_plans import build_exhausted_plans_check
from marshal_dagster.sensors.run_failure import build_run_failure_sensors
from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor
from marshal_dagster.sinks import FileSink

_FUNCTION = '''"""The function that processes the messages of a batch."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def {name}(context, batch, frame: DataFrame) -> DataFrame:
    """Count the messages of each partition."""
    return frame.groupBy("partition").agg(f.count("*").alias("messages"))
'''


def _text(field: str, of: type[BaseModel] = KafkaConnectionConfig) -> str | None:
    """Return the description of a field of a resource or its config."""
    return of.model_fields[field].description


class ConnectionModel(Model, Resolvable):
    """The address of a Kafka cluster. The fields for secrets hold the names of environment variables."""

    bootstrap_servers: str = Field(description=_text("bootstrap_servers"))
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = Field(
        default="PLAINTEXT", description=_text("security_protocol")
    )
    sasl_mechanism: str | None = Field(default=None, description=_text("sasl_mechanism"))
    username: str | None = Field(default=None, description=_text("username"))
    password_variable: str | None = Field(
        default=None, description="The environment variable with the password for SASL."
    )
    password_file: str | None = Field(default=None, description=_text("password_file"))
    oauth_token_endpoint_url: str | None = Field(default=None, description=_text("oauth_token_endpoint_url"))
    oauth_client_id: str | None = Field(default=None, description=_text("oauth_client_id"))
    oauth_client_secret_variable: str | None = Field(
        default=None, description="The environment variable with the client's secret."
    )
    oauth_client_secret_file: str | None = Field(default=None, description=_text("oauth_client_secret_file"))
    oauth_scope: str | None = Field(default=None, description=_text("oauth_scope"))
    oauth_extensions: str | None = Field(default=None, description=_text("oauth_extensions"))
    oauth_ca_location: str | None = Field(default=None, description=_text("oauth_ca_location"))
    oauth_azure_resource: str | None = Field(default=None, description=_text("oauth_azure_resource"))
    oauth_callback: str | None = Field(default=None, description=_text("oauth_callback"))
    aws_region: str | None = Field(default=None, description=_text("aws_region"))
    aws_profile: str | None = Field(default=None, description=_text("aws_profile"))
    aws_role_arn: str | None = Field(default=None, description=_text("aws_role_arn"))
    kerberos_principal: str | None = Field(default=None, description=_text("kerberos_principal"))
    kerberos_keytab: str | None = Field(default=None, description=_text("kerberos_keytab"))
    kerberos_service_name: str | None = Field(default=None, description=_text("kerberos_service_name"))
    ssl_ca_location: str | None = Field(default=None, description=_text("ssl_ca_location"))
    ssl_ca_pem: str | None = Field(default=None, description=_text("ssl_ca_pem"))
    ssl_certificate_location: str | None = Field(default=None, description=_text("ssl_certificate_location"))
    ssl_certificate_pem: str | None = Field(default=None, description=_text("ssl_certificate_pem"))
    ssl_key_location: str | None = Field(default=None, description=_text("ssl_key_location"))
    ssl_key_pem_variable: str | None = Field(
        default=None, description="The environment variable with the private key as PEM text."
    )
    ssl_key_password_variable: str | None = Field(
        default=None, description="The environment variable with the password of the private key."
    )
    ssl_key_password_file: str | None = Field(default=None, description=_text("ssl_key_password_file"))
    ssl_keystore_location: str | None = Field(default=None, description=_text("ssl_keystore_location"))
    ssl_keystore_password_variable: str | None = Field(
        default=None, description="The environment variable with the password of the key store."
    )
    ssl_keystore_password_file: str | None = Field(default=None, description=_text("ssl_keystore_password_file"))
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, description=_text("timeout_s"))
    client_settings: dict[str, str] = Field(default={}, description=_text("client_settings"))
    spark_source_options: dict[str, str] = Field(default={}, description=_text("spark_source_options"))
    spark_class_prefix: str | None = Field(default=None, description=_text("spark_class_prefix"))

    def to_config(self) -> KafkaConnectionConfig:
        """Return the connection as a field of the resources.

        Returns:
            The connection. Secrets are references to environment variables (`EnvVar`).

        Raises:
            ConfigurationError: A field is invalid.
        """
        fields: dict[str, Any] = self.model_dump(exclude_none=True)
        for name in SECRETS:
            if variable := fields.pop(f"{name}_variable", None):
                fields[name] = EnvVar(variable)
        return KafkaConnectionConfig(**fields)


class _ClaimedTopicScaffolder(Scaffolder[Any]):
    """Writes a `defs.yaml` to fill in, and the function that it names."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write the YAML and the Python file."""
        topic = request.target_path.name
        name = _as_function(topic)
        scaffold_component(
            request,
            {
                "topic": topic,
                "group": topic,
                "delivery": "effectively_once",
                "function": f"process.py:{name}",
                "output_folder": f"data/{name}",
                "connection": {"bootstrap_servers": "localhost:9092"},
                "schedule": "*/5 * * * *",
            },
        )
        Path(request.target_path, "process.py").write_text(_FUNCTION.format(name=name), encoding="utf-8")


def _as_function(text: str) -> str:
    """Return a name for a function that Python and Dagster allow."""
    name = as_name(text)
    return name if name.isidentifier() and not iskeyword(name) else f"topic_{name}"


@scaffold_with(_ClaimedTopicScaffolder)
class ClaimedTopicComponent(Component, Model, Resolvable):
    """Builds an asset that processes claimed batches of one data topic, and everything that the asset needs.

    It creates the asset, the topic asset, a job with schedule, the reprocess job, checks, sensors and resources.

    Example:
        ```yaml
        type: marshal_dagster.component.ClaimedTopicComponent
        attributes:
          topic: orders
          group: shops
          function: process.py:orders_per_shop
          delivery: effectively_once
          output_folder: data/orders_per_shop
          connection:
            bootstrap_servers: localhost:9092
          schedule: "*/5 * * * *"
        ```
    """

    topic: str = Field(description="The data topic.")
    group: str = Field(description=_text("group", ClaimerResource))
    function: str = Field(
        description="The function that processes a batch: `file.py:function` in the folder of this file, or "
        "`package.module:function`. It takes context, batch and frame; in effectively_once it returns the rows for the "
        "output."
    )
    connection: ConnectionModel = Field(description="The Kafka cluster.")
    delivery: Literal["at_most_once", "at_least_once", "effectively_once"] = Field(
        default="at_least_once", description="The delivery guarantee for each message."
    )
    output_folder: str | None = Field(
        default=None, description="The folder of a `FileSink`, for effectively_once. Set either this or `sink`."
    )
    sink: str | None = Field(
        default=None,
        description="For effectively_once: a `Sink`, or a function that takes the context and returns one, in the "
        "notation of `function`. Set either this or `output_folder`.",
    )
    name: str | None = Field(default=None, description="The name of the asset (default: the name of the function).")
    coordination_topic: str = Field(
        default=DEFAULT_COORDINATION_TOPIC, description="The name of the coordination topic."
    )
    heartbeat_interval_s: float = Field(
        default=DEFAULT_HEARTBEAT_INTERVAL_S,
        description="Seconds between heartbeats; the same in all members of the group.",
    )
    max_records: int | None = Field(
        default=None, description="Maximum offsets of a batch, over all its partitions (default: no limit)."
    )
    max_batches: int | None = Field(default=None, description="Maximum number of batches of a run (default: no limit).")
    allow_missing_topic: bool = Field(
        default=False, description="Let runs and ticks succeed if the data topic does not exist (default: they fail)."
    )
    time_budget_s: float | None = Field(
        default=None, description="Seconds after which a run starts no further batch (default: no limit)."
    )
    schedule: str | None = Field(
        default=None, description="When runs start, as a cron expression (default: no schedule)."
    )
    sensors: list[Literal["stale_claims", "dead_runs", "topic"]] = Field(
        default=["stale_claims", "dead_runs", "topic"],
        description="The sensors. stale_claims: requests runs that repeat the work of dead ones. dead_runs: two "
        "sensors that revoke the claims of failed and canceled runs. topic: the topic's asset and a sensor that "
        "observes it; if several components use one topic, list it in only one of them.",
    )
    max_lag: int | None = Field(
        default=None, description="Maximum unread offsets for the check `lag` (default: no check)."
    )
    running: bool = Field(
        default=True,
        description="Whether schedule and sensors run from the start (default). If false, start them in Dagster's UI.",
    )

    def build_defs(self, context: ComponentLoadContext) -> Definitions:
        """Build the definitions of the component.

        Args:
            context: Dagster's context, to load the function and the sink from the component's folder.

        Returns:
            The asset, topic asset, jobs, schedule, checks, sensors and resources.

        Raises:
            ConfigurationError: A field is invalid, or the function or sink was not found.
        """
        function = _load(context, self.function, "function")
        check_arguments(function, PROCESS_ARGUMENTS)
        name = self.name or str(function.__name__)
        claimer_key, rationalizer_key = f"{name}_claimer", f"{name}_rationalizer"
        connection = self.connection.to_config()
        asset = marshal_asset(
            topic=self.topic,
            name=name,
            sink=self._sink(context),
            max_records=self.max_records,
            max_batches=self.max_batches,
            allow_missing_topic=self.allow_missing_topic,
            time_budget_s=self.time_budget_s,
            claimer_key=claimer_key,
        )(function)
        observes, redoes = "topic" in self.sensors, "stale_claims" in self.sensors
        job, redo = build_claimed_batch_job(asset), build_reprocess_job(asset)
        return Definitions(
            assets=[*([build_topic_asset(self.topic, claimer_key=claimer_key)] if observes else []), asset],
            asset_checks=[
                build_claim_checks(asset, max_lag=self.max_lag, claimer_key=claimer_key),
                *([build_exhausted_plans_check(self.topic, group=self.group)] if redoes else []),
            ],
            jobs=[job, redo],
            schedules=self._schedules(job),
            sensors=self._sensors(name, redo, claimer_key, rationalizer_key),
            resources={
                claimer_key: ClaimerResource(
                    connection=connection,
                    coordination_topic=self.coordination_topic,
                    group=self.group,
                    delivery=self.delivery,
                    heartbeat_interval_s=self.heartbeat_interval_s,
                ),
                rationalizer_key: RationalizerResource(
                    connection=connection, coordination_topic=self.coordination_topic
                ),
            },
        )

    def _schedules(self, job: AnyJob) -> list[ScheduleDefinition]:
        if self.schedule is None:
            return []
        status = DefaultScheduleStatus.RUNNING if self.running else DefaultScheduleStatus.STOPPED
        return [build_claimed_batch_schedule(job, cron_schedule=self.schedule, default_status=status)]

    def _sensors(self, name: str, redo: AnyJob, claimer_key: str, rationalizer_key: str) -> list[SensorDefinition]:
        status = DefaultSensorStatus.RUNNING if self.running else DefaultSensorStatus.STOPPED
        group = self.group
        found: list[SensorDefinition] = []
        if "stale_claims" in self.sensors:
            stale_claims = build_stale_claim_sensor(
                redo,
                group=group,
                name=f"{name}_stale_claims",
                rationalizer_key=rationalizer_key,
                default_status=status,
            )
            found.append(stale_claims)
        if "dead_runs" in self.sensors:
            found += build_run_failure_sensors(group=group, name=name, claimer_key=claimer_key, default_status=status)
        if "topic" in self.sensors:
            messages = f"{name}_messages"
            topic_sensor = build_topic_sensor(
                self.topic,
                name=messages,
                allow_missing_topic=self.allow_missing_topic,
                claimer_key=claimer_key,
                default_status=status,
            )
            found.append(topic_sensor)
        return found

    def _sink(self, context: ComponentLoadContext) -> Any:  # noqa: ANN401 - a sink, or a function that returns one
        given, is_needed = self.output_folder or self.sink, self.delivery == "effectively_once"
        if self.output_folder is not None and self.sink is not None:
            raise ConfigurationError(f"topic {self.topic!r}: output_folder and sink are both set: remove one of them")
        if given is None and is_needed:
            raise ConfigurationError(
                f"topic {self.topic!r}: delivery is effectively_once, but there is no output: set output_folder or sink"
            )
        if given is not None and not is_needed:
            raise ConfigurationError(
                f"topic {self.topic!r}: in {self.delivery} the function writes its results itself; remove "
                "output_folder and sink, or use effectively_once"
            )
        if self.sink is not None:
            return _load(context, self.sink, "sink")
        return None if self.output_folder is None else FileSink(self.output_folder)


def _load(context: ComponentLoadContext, named: str, field: str) -> Any:  # noqa: ANN401 - a user's function or sink
    place, colon, name = named.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigurationError(f"{field} is {named!r}; it must have the form file.py:name or package.module:name")
    try:
        is_file = place.endswith(".py")
        module = context.load_defs_relative_python_module(Path(place)) if is_file else import_module(place)
        return getattr(module, name)
    except (ImportError, FileNotFoundError, AttributeError) as error:
        raise ConfigurationError(f"{field} {named!r} cannot be loaded: {error}") from error
