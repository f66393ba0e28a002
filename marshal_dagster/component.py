"""The component for Dagster's `dg` projects: it processes claimed batches of a data topic, configured in YAML.

`ClaimedTopicComponent` builds the asset, topic asset, jobs, schedule, checks, sensors and resources with the factories
of this package. `dg scaffold` writes an example of the YAML and of the function.
"""

from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from dagster import (
    AssetExecutionContext,
    AssetSpec,
    Backoff,
    Component,
    ComponentLoadContext,
    DefaultScheduleStatus,
    DefaultSensorStatus,
    Definitions,
    EnvVar,
    Jitter,
    RetryPolicy,
    Scaffolder,
    ScaffoldRequest,
    ScheduleDefinition,
    SensorDefinition,
    scaffold_component,
    scaffold_with,
)
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, Field, PrivateAttr

from marshal_dagster.admin.group_settings import LONGEST_INTERVAL_S, SHORTEST_INTERVAL_S
from marshal_dagster.assets.checks import build_claim_checks
from marshal_dagster.assets.decorator import ClaimedAsset, DagsterMarshalTranslator, marshal_asset
from marshal_dagster.assets.topics import build_topic_asset, build_topic_sensor
from marshal_dagster.batches import DEFAULT_MAX_ATTEMPTS, RangeOptions
from marshal_dagster.component_schema import (
    CheckedModel,
    Schema,
    connection_rules,
    text_matching,
    when,
    when_set,
    without,
)
from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.jobs.batch import (
    AnyJob,
    build_claimed_batch_job,
    build_claimed_batch_schedule,
    build_reprocess_job,
)
from marshal_dagster.kafka.authentication import SaslMechanism
from marshal_dagster.kafka.connection import DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S, SECRETS, SERVER
from marshal_dagster.ops.user_function import check_arguments, process_arguments
from marshal_dagster.protocol.messages import MAX_NAME_LENGTH, TOPIC
from marshal_dagster.resources.claimer import DEFAULT_HEARTBEAT_INTERVAL_S, ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.resources.launchpad import configured_in_code
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.runs.names import as_name
from marshal_dagster.sensors._exhausted_plans import build_exhausted_plans_check
from marshal_dagster.sensors.run_failure import build_run_failure_sensors
from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor
from marshal_dagster.sinks import FileSink
from marshal_dagster.spark.session import SINGLE_EXECUTION, spark_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from marshal_dagster.batches import ClaimedBatch

_FUNCTION = '''"""The function that processes the messages of a batch."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def {name}(context, batch, frame: DataFrame) -> DataFrame:
    """Count the messages of each partition."""
    return frame.groupBy("partition").agg(f.count("*").alias("messages"))
'''
_TEST = '''"""Test of the component `{name}`. It needs no Kafka; Spark starts on this machine."""

from pathlib import Path

import dagster as dg
import pytest

from marshal_dagster.testing import run_in_memory


@pytest.mark.parametrize("crash_at", [None, "after_write"])
def test_each_message_is_counted_once(crash_at):
    """A run that dies after its write loses and repeats nothing."""
    defs = dg.load_from_defs_folder(path_within_project=Path(__file__))
    job = defs.resolve_job_def("{name}_job")
    result = run_in_memory(job, {{"{topic}": ["a", "b", "c"]}}, crash_at=crash_at)
    assert [row["messages"] for row in result.rows] == [3]
'''


def _text(field: str, of: type[BaseModel] = KafkaConnectionConfig) -> str | None:
    """Return the description of a field of a resource or its config."""
    return of.model_fields[field].description


class ConnectionModel(CheckedModel):
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

    @classmethod
    def field_schemas(cls) -> dict[str, Schema]:
        """Return what must hold for fields, each by itself.

        Returns:
            A JSON schema by the field's name.
        """
        server = SERVER.pattern
        return {
            "bootstrap_servers": text_matching(rf"^\s*{server}(\s*,\s*{server})*\s*$"),
            "sasl_mechanism": text_matching(f"^({'|'.join(get_args(SaslMechanism))})$"),
            "timeout_s": {"exclusiveMinimum": 0, "maximum": LONGEST_TIMEOUT_S},
        }

    @classmethod
    def rules(cls) -> list[Schema]:
        """Return what must hold for several fields together.

        Returns:
            JSON schemas of the connection.
        """
        return connection_rules()

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
    """Writes a `defs.yaml` to fill in, the function that it names, and a test in the project's folder `tests`."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        """Write the YAML and the two Python files."""
        topic = request.target_path.name
        name = _as_function(topic)
        scaffold_component(
            request,
            {
                "topic": topic,
                "group": topic,
                "delivery": "effectively_once",
                "function": f"process.py:{name}",
                "output_folder": f"{{{{ context.project_root }}}}/data/{name}",
                "connection": {"bootstrap_servers": "{{ env('MARSHAL_BOOTSTRAP_SERVERS', '127.0.0.1:9092') }}"},
                "schedule": "*/5 * * * *",
                "running": False,
            },
        )
        _write_once(request.target_path / "process.py", _FUNCTION.format(name=name))
        if request.project_root is not None:
            _write_once(request.project_root / "tests" / f"test_{name}.py", _TEST.format(name=name, topic=topic))


def _write_once(path: Path, text: str) -> None:
    """Write a file, unless it exists."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _as_function(text: str) -> str:
    """Return a name for a function that Python and Dagster allow."""
    name = as_name(text)
    return name if name.isidentifier() and not iskeyword(name) else f"topic_{name}"


_RANGES: Final = RangeOptions()


class RangesModel(CheckedModel):
    """How ranges of offsets are claimed, instead of whole partitions."""

    size: int = Field(
        default=_RANGES.size,
        description="Maximum offsets of a range; offsets that retention has deleted do not count.",
    )
    prefetch_offsets: int = Field(
        default=_RANGES.prefetch_offsets,
        description="Offsets that may be claimed before they have a message, if no messages are unread.",
    )
    wait_s: float = Field(default=_RANGES.wait_s, description="Seconds to wait for messages at prefetched offsets.")

    @classmethod
    def field_schemas(cls) -> dict[str, Schema]:
        """Return what must hold for fields, each by itself.

        Returns:
            A JSON schema by the field's name.
        """
        return {"size": {"minimum": 1}, "prefetch_offsets": {"minimum": 0}, "wait_s": {"minimum": 0}}


class RetryPolicyModel(CheckedModel):
    """Dagster's retry policy of the asset."""

    max_retries: int = Field(default=1, description="Maximum number of retries.")
    delay_s: float | None = Field(default=None, description="Seconds before a retry (default: none).")
    backoff: Literal["linear", "exponential"] | None = Field(
        default=None, description="How the delay grows with each retry (default: it does not)."
    )
    jitter: Literal["full", "plus_minus"] | None = Field(
        default=None, description="How the delay is randomized (default: it is not)."
    )

    def to_policy(self) -> RetryPolicy:
        """Return Dagster's retry policy.

        Returns:
            The policy.
        """
        return RetryPolicy(
            max_retries=self.max_retries,
            delay=self.delay_s,
            backoff=None if self.backoff is None else Backoff[self.backoff.upper()],
            jitter=None if self.jitter is None else Jitter[self.jitter.upper()],
        )


class _ComponentTranslator(DagsterMarshalTranslator):
    """Returns the specs of a component, which a subclass of the component may override."""

    def __init__(self, component: "ClaimedTopicComponent") -> None:
        self.component = component

    def get_asset_spec(self, asset: ClaimedAsset) -> AssetSpec:
        """Return the component's spec of an asset."""
        return self.component.get_asset_spec(asset)


@dataclass(frozen=True, slots=True)
class _TopicNames:
    """The names of the definitions of one topic."""

    topic: str
    asset: str
    claimer_key: str
    rationalizer_key: str
    spark_key: str | None


@scaffold_with(_ClaimedTopicScaffolder)
class ClaimedTopicComponent(Component, CheckedModel):
    """Builds assets that process claimed batches of data topics, and everything that they need.

    For each topic it creates the asset, the topic asset, a job with schedule, the reprocess job, checks and sensors.
    The topics share the resources.

    Override `get_asset_spec`, `execute` or `execute_without_frame` in a subclass, and name the subclass as the type in
    YAML.

    Example:
        ```yaml
        type: marshal_dagster.ClaimedTopicComponent
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

    topic: str | None = Field(default=None, description="The data topic. Set either this or `topics`.")
    topics: list[str] | None = Field(
        default=None,
        description="Several data topics. Each has an asset `<name>_<topic>`, and its own folder in `output_folder`.",
    )
    group: str = Field(description=_text("group", ClaimerResource))
    function: str | None = Field(
        default=None,
        description="The function that processes a batch: `file.py:function` in the folder of this file, or "
        "`package.module:function`. It takes context, batch and frame; in effectively_once it returns the rows for the "
        "output. Left out only by a subclass that overrides `execute` or `execute_without_frame`.",
    )
    connection: ConnectionModel = Field(description="The Kafka cluster.")
    coordination_connection: ConnectionModel | None = Field(
        default=None, description=_text("coordination_connection", ClaimerResource)
    )
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
    translation: Annotated[
        TranslationFn[ClaimedAsset] | None,
        TranslationFnResolver[ClaimedAsset](lambda asset: {"asset": asset, "topic": asset.topic, "name": asset.name}),
    ] = Field(
        default=None,
        description="How the assets appear in Dagster: key, group, owners, tags, metadata, automation condition and "
        "more. Templates may use `topic`, `name` and `spec`.",
    )
    per_partition: bool = Field(
        default=False,
        description="Make each Kafka partition a Dagster partition. Runs are then started by an automation condition "
        "or a backfill, without schedule and without the sensor stale_claims.",
    )
    ranges: RangesModel | None = Field(
        default=None,
        description="Claim ranges of offsets, so that several runs process one partition at once, without the order of "
        "its messages. The same in all members of the group.",
    )
    pool: str | None = Field(default=None, description="Dagster's concurrency pool of the assets.")
    retry_policy: RetryPolicyModel | None = Field(default=None, description="Dagster's retry policy of the assets.")
    with_frame: bool = Field(
        default=True,
        description="Whether runs start Spark and read each batch (default). If false, the function takes context and "
        "batch, for example to process the batch with `run_with_pipes`.",
    )
    required_resource_keys: list[str] = Field(
        default_factory=list, description="Further resources that the function uses, such as a client of Dagster Pipes."
    )
    spark_config: dict[str, str] | None = Field(
        default=None, description="Spark settings that replace or extend those of the library."
    )
    spark_key: str | None = Field(
        default=None,
        description="The key of your own resource with a `spark_session` (default: a `LazyPySparkResource` of the "
        "component).",
    )
    coordination_topic: str = Field(
        default=DEFAULT_COORDINATION_TOPIC, description="The name of the coordination topic."
    )
    heartbeat_interval_s: float = Field(
        default=DEFAULT_HEARTBEAT_INTERVAL_S,
        description="Seconds between heartbeats; the same in all members of the group.",
    )
    allow_unsafe_topic: bool = Field(default=False, description=_text("allow_unsafe_topic", ClaimerResource))
    allow_branch_deployments: bool = Field(
        default=False, description=_text("allow_branch_deployments", ClaimerResource)
    )
    max_records: int | None = Field(
        default=None, description="Maximum offsets of a batch, over all its partitions (default: no limit)."
    )
    max_bytes: int | None = Field(
        default=None, description="Approximate maximum bytes of a batch, by a sample (default: no limit)."
    )
    max_batches: int | None = Field(default=None, description="Maximum number of batches of a run (default: no limit).")
    max_claims: int | None = Field(
        default=None, description="Maximum number of partitions of a batch (default: all that are free)."
    )
    claim_entire_topic: bool = Field(default=False, description="Claim either all partitions of the topic or none.")
    start: Literal["earliest", "latest"] = Field(
        default="earliest", description="Where a group without a position in the topic starts."
    )
    max_attempts: int = Field(
        default=DEFAULT_MAX_ATTEMPTS,
        description="How often runs retry a failed plan before they leave it to an operator.",
    )
    count_records: bool = Field(
        default=False, description="Record how many records each batch had. This costs an extra pass over the batch."
    )
    min_partitions: int | None = Field(
        default=None,
        description="Minimum number of Spark tasks that read a batch (default: one for each Kafka partition).",
    )
    allow_topic_without_id: bool = Field(
        default=False,
        description="Process a data topic without an id (brokers before Kafka 2.8) in at most once and effectively "
        "once, too.",
    )
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
        description="The sensors. `stale_claims` requests runs that repeat the work of dead ones. `dead_runs` is two "
        "sensors that revoke the claims of failed and canceled runs. `topic` is the topic's asset and a sensor that "
        "observes it. If several components use one topic, list `topic` in only one of them.",
    )
    max_lag: int | None = Field(
        default=None, description="Maximum unread offsets for the check `lag` (default: no check)."
    )
    running: bool = Field(
        default=True,
        description="Whether schedule and sensors run from the start (default). If false, start them in Dagster's UI.",
    )

    _function: Any = PrivateAttr(default=None)

    @classmethod
    def field_schemas(cls) -> dict[str, Schema]:
        """Return what must hold for fields, each by itself.

        Returns:
            A JSON schema by the field's name.
        """
        topic, in_module = text_matching(rf"^{TOPIC.pattern}$"), text_matching(r"^[^:]*[^:\s]:[^\W\d]\w*$")
        return {
            "topic": topic,
            "topics": {"items": {"type": "string", **topic}, "minItems": 1, "uniqueItems": True},
            "coordination_topic": topic,
            "group": text_matching(rf"^[^/\x00-\x1f]{{1,{MAX_NAME_LENGTH}}}$"),
            "function": in_module,
            "sink": in_module,
            "schedule": text_matching(r"^\s*(@\w+|\S+(\s+\S+){4})\s*$"),
            "heartbeat_interval_s": {"minimum": SHORTEST_INTERVAL_S, "maximum": LONGEST_INTERVAL_S},
            "max_lag": {"minimum": 0},
            "time_budget_s": {"exclusiveMinimum": 0},
            **{name: {"minimum": 1} for name in _COUNTS},
        }

    @classmethod
    def rules(cls) -> list[Schema]:
        """Return what must hold for several fields together.

        Returns:
            JSON schemas of the attributes.
        """
        no_function = [
            when("with_frame", [value], {"required": ["function"]}, or_missing=value)
            for value, execute in ((True, "execute"), (False, "execute_without_frame"))
            if getattr(cls, execute) is getattr(ClaimedTopicComponent, execute)
        ]
        has_output = {"anyOf": [{"required": ["output_folder"]}, {"required": ["sink"]}]}
        others = ("at_least_once", "at_most_once")
        return [
            {"anyOf": [{"required": ["topic"]}, {"required": ["topics"]}]},
            when_set("topic", without("topics")),
            when_set("output_folder", without("sink")),
            when("delivery", ["effectively_once"], has_output),
            when("delivery", others, without("output_folder", "sink"), or_missing=True),
            when("per_partition", [True], without("schedule")),
            when("per_partition", [True], {"properties": {"claim_entire_topic": {"enum": [False]}}}),
            when("with_frame", [False], without("min_partitions", "spark_key", "spark_config")),
            when("with_frame", [False], {"properties": {"count_records": {"enum": [False]}}}),
            when_set("spark_key", without("spark_config")),
            *no_function,
        ]

    def get_asset_spec(self, asset: ClaimedAsset) -> AssetSpec:
        """Return the spec of an asset; override it to change how assets appear in Dagster.

        Args:
            asset: Name, data topic and description of the asset.

        Returns:
            The spec of `DagsterMarshalTranslator`, changed by `translation`.

        Example:
            ```python
            class Orders(ClaimedTopicComponent):
                def get_asset_spec(self, asset):
                    return super().get_asset_spec(asset).replace_attributes(group_name="shops")
            ```
        """
        spec = DagsterMarshalTranslator().get_asset_spec(asset)
        return spec if self.translation is None else self.translation(spec, asset)

    def execute(self, context: AssetExecutionContext, batch: "ClaimedBatch", frame: "DataFrame") -> "DataFrame | None":
        """Process one batch; override it to process batches by the fields of your own component.

        Args:
            context: The context of the asset.
            batch: The batch, with its id, ranges and delivery mode.
            frame: The messages of exactly `batch.ranges`.

        Returns:
            The rows for the output in effectively_once; otherwise None. By default the result of `function`.

        Example:
            ```python
            class Shops(ClaimedTopicComponent):
                shop: str

                def execute(self, context, batch, frame):
                    return frame.where(frame.value == self.shop).groupBy("partition").count()
            ```
        """
        rows: DataFrame | None = self._function(context, batch, frame)
        return rows

    def execute_without_frame(self, context: AssetExecutionContext, batch: "ClaimedBatch") -> None:
        """Process one batch if `with_frame` is false, in the place of `execute`.

        Args:
            context: The context of the asset.
            batch: The batch, with its id, ranges and delivery mode.

        Example:
            ```python
            class OrdersOnEMR(ClaimedTopicComponent):
                with_frame: bool = False
                required_resource_keys: list[str] = ["emr"]
                job_flow: dict[str, Any]

                def execute_without_frame(self, context, batch):
                    run_with_pipes(context, batch, context.resources.emr, run_job_flow_params=self.job_flow)
            ```
        """
        self._function(context, batch)

    def build_defs(self, context: ComponentLoadContext) -> Definitions:
        """Build the definitions of the component.

        Args:
            context: Dagster's context, to load the function and the sink from the component's folder.

        Returns:
            The assets, topic assets, jobs, schedules, checks, sensors and resources.

        Raises:
            ConfigurationError: A field is invalid, or the function or sink was not found.
        """
        process = self._process(context)
        topics = self._topics()
        base = self.name or (str(process.__name__) if self.function else _as_function(topics[0]))
        claimer_key, rationalizer_key = f"{base}_claimer", f"{base}_rationalizer"
        own_spark_key = self._own_spark_key(base)
        parts = [
            self._topic_defs(
                _TopicNames(
                    topic,
                    base if self.topic else f"{base}_{as_name(topic)}",
                    claimer_key,
                    rationalizer_key,
                    own_spark_key or self.spark_key,
                ),
                process,
                context,
            )
            for topic in topics
        ]
        resources = {**self._resources(base), **self._spark_resources(base)}
        shared = Definitions(sensors=self._group_sensors(base, claimer_key), resources=resources)
        return Definitions.merge(shared, *parts)

    def _process(self, context: ComponentLoadContext) -> Any:  # noqa: ANN401 - a function that the user wrote
        """Return the function that processes batches, with the name and place of the user's code."""
        if self.function is not None:
            self._function = _load(context, self.function, "function")
            check_arguments(self._function, process_arguments({"with_frame": self.with_frame}))
        execute = self.execute if self.with_frame else self.execute_without_frame
        is_overridden = getattr(type(self), execute.__name__) is not getattr(ClaimedTopicComponent, execute.__name__)
        if self._function is None and not is_overridden:
            raise ConfigurationError(
                f"function is missing: name the function that processes a batch, or override {execute.__name__} in a "
                "subclass"
            )

        def process(*arguments: Any) -> Any:  # noqa: ANN401 - those of `execute` or `execute_without_frame`
            return execute(*arguments)

        return wraps(execute if is_overridden else self._function)(process)

    def _topics(self) -> list[str]:
        if (self.topic is None) == (not self.topics):
            raise ConfigurationError(f"group {self.group!r}: set either topic or topics (a list that is not empty)")
        topics = [self.topic] if self.topic is not None else list(self.topics or ())
        names = [as_name(topic) for topic in topics]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"group {self.group!r}: topics {topics} would have assets of the same name")
        return topics

    def _topic_defs(self, names: _TopicNames, process: Any, context: ComponentLoadContext) -> Definitions:  # noqa: ANN401
        """Return the definitions of one topic, without the resources."""
        topic, claimer_key = names.topic, names.claimer_key
        asset = marshal_asset(
            topic=topic,
            name=names.asset,
            translator=_ComponentTranslator(self),
            per_partition=self.per_partition,
            retry_policy=None if self.retry_policy is None else self.retry_policy.to_policy(),
            pool=self.pool,
            sink=self._sink(context, topic),
            ranges=None if self.ranges is None else RangeOptions(**self.ranges.model_dump()),
            claimer_key=claimer_key,
            required_resource_keys=self.required_resource_keys,
            spark_key=names.spark_key,
            spark_config=self.spark_config if names.spark_key == self.spark_key else None,  # the own resource has it
            **{name: getattr(self, name) for name in _WORK_OPTIONS},
        )(process)
        observes, redoes = "topic" in self.sensors, "stale_claims" in self.sensors and not self.per_partition
        job = build_claimed_batch_job(asset)
        redo = None if self.per_partition else build_reprocess_job(asset)
        return Definitions(
            assets=[
                *(
                    [build_topic_asset(topic, per_partition=self.per_partition, claimer_key=claimer_key)]
                    if observes
                    else []
                ),
                asset,
            ],
            asset_checks=[
                build_claim_checks(asset, max_lag=self.max_lag, claimer_key=claimer_key),
                *([build_exhausted_plans_check(topic, group=self.group)] if redoes else []),
            ],
            jobs=[job, *([] if redo is None else [redo])],
            schedules=self._schedules(job),
            sensors=self._topic_sensors(names, redo if redoes else None),
        )

    def _resources(self, base: str) -> dict[str, Any]:
        connection = self.connection.to_config()
        coordination = None if self.coordination_connection is None else self.coordination_connection.to_config()
        return {
            f"{base}_claimer": ClaimerResource(
                connection=connection,
                coordination_connection=coordination,
                coordination_topic=self.coordination_topic,
                group=self.group,
                delivery=self.delivery,
                heartbeat_interval_s=self.heartbeat_interval_s,
                claim_ranges=self.ranges is not None,
                allow_unsafe_topic=self.allow_unsafe_topic,
                allow_branch_deployments=self.allow_branch_deployments,
            ),
            f"{base}_rationalizer": RationalizerResource(
                connection=coordination or connection,
                data_connection=None if coordination is None else connection,
                coordination_topic=self.coordination_topic,
            ),
        }

    def _own_spark_key(self, base: str) -> str | None:
        """Return the key of the component's own Spark resource; None if it has none, or the extra is not installed."""
        has_own = self.with_frame and self.spark_key is None and find_spec("dagster_pyspark") is not None
        return f"{base}_pyspark" if has_own else None

    def _spark_resources(self, base: str) -> dict[str, Any]:
        """Return the resource that starts a session when a batch is read, after the claim."""
        key = self._own_spark_key(base)
        if key is None:
            return {}
        from dagster_pyspark import LazyPySparkResource

        single = SINGLE_EXECUTION if self.delivery == "at_most_once" else {}
        settings = spark_settings(app_name=base, extra={**single, **(self.spark_config or {})})
        return {key: configured_in_code(LazyPySparkResource(spark_config=dict(settings)))}

    def _schedules(self, job: AnyJob) -> list[ScheduleDefinition]:
        if self.schedule is None:
            return []
        status = DefaultScheduleStatus.RUNNING if self.running else DefaultScheduleStatus.STOPPED
        return [build_claimed_batch_schedule(job, cron_schedule=self.schedule, default_status=status)]

    @property
    def _sensor_status(self) -> DefaultSensorStatus:
        return DefaultSensorStatus.RUNNING if self.running else DefaultSensorStatus.STOPPED

    def _group_sensors(self, base: str, claimer_key: str) -> list[SensorDefinition]:
        if "dead_runs" not in self.sensors:
            return []
        status = self._sensor_status
        return [*build_run_failure_sensors(group=self.group, name=base, claimer_key=claimer_key, default_status=status)]

    def _topic_sensors(self, names: _TopicNames, redo: AnyJob | None) -> list[SensorDefinition]:
        found: list[SensorDefinition] = []
        if redo is not None:
            stale_claims = build_stale_claim_sensor(
                redo,
                group=self.group,
                name=f"{names.asset}_stale_claims",
                rationalizer_key=names.rationalizer_key,
                default_status=self._sensor_status,
            )
            found.append(stale_claims)
        if "topic" in self.sensors:
            topic_sensor = build_topic_sensor(
                names.topic,
                name=f"{names.asset}_messages",
                per_partition=self.per_partition,
                allow_missing_topic=self.allow_missing_topic,
                claimer_key=names.claimer_key,
                default_status=self._sensor_status,
            )
            found.append(topic_sensor)
        return found

    def _sink(self, context: ComponentLoadContext, topic: str) -> Any:  # noqa: ANN401 - a sink, or a function that returns one
        given, is_needed = self.output_folder or self.sink, self.delivery == "effectively_once"
        if self.output_folder is not None and self.sink is not None:
            raise ConfigurationError(f"topic {topic!r}: output_folder and sink are both set: remove one of them")
        if given is None and is_needed:
            raise ConfigurationError(
                f"topic {topic!r}: delivery is effectively_once, but there is no output: set output_folder or sink"
            )
        if given is not None and not is_needed:
            raise ConfigurationError(
                f"topic {topic!r}: in {self.delivery} the function writes its results itself; remove "
                "output_folder and sink, or use effectively_once"
            )
        if self.sink is not None:
            return _load(context, self.sink, "sink")
        if self.output_folder is None:
            return None
        return FileSink(self.output_folder if self.topic else f"{self.output_folder.rstrip('/')}/{topic}")


_COUNTS: Final = ("max_attempts", "max_batches", "max_bytes", "max_claims", "max_records", "min_partitions")
"""The fields that are at least 1."""
_WORK_OPTIONS: Final = (
    "allow_missing_topic",
    "allow_topic_without_id",
    "claim_entire_topic",
    "count_records",
    "max_attempts",
    "max_batches",
    "max_bytes",
    "max_claims",
    "max_records",
    "min_partitions",
    "start",
    "time_budget_s",
    "with_frame",
)
"""The fields of the component that are `WorkOptions` of the same name."""


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
