"""Check the component: the definitions that a `defs.yaml` creates, and the errors of a wrong one."""

import re
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]
from dagster.components.testing import create_defs_folder_sandbox
from dagster_pyspark import LazyPySparkResource
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from marshal_dagster import component
from marshal_dagster.assets import decorator
from marshal_dagster.assets.decorator import ClaimedAsset, kafka_partitions_def
from marshal_dagster.batches import RangeOptions
from marshal_dagster.component import ClaimedTopicComponent, ConnectionModel, _ClaimedTopicScaffolder
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.ops.config import BatchSpec
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.rationalizer import RationalizerResource

pytestmark = [  # from Dagster's own loader
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "component" / "flights_component" / "defs" / "flights" / "defs.yaml"
TYPE = "marshal_dagster.component.ClaimedTopicComponent"
ATTRIBUTES: dict[str, Any] = {
    "topic": "orders",
    "group": "shops",
    "function": "process.py:count",
    "connection": {"bootstrap_servers": "127.0.0.1:1"},
}
PROCESS = '''
def count(context, batch, frame):
    """Count."""
def send(context, batch):
    """Send."""
    context.log.info(context.resources.pipes)
sink = object()
'''


def built(
    *,
    of: type[ClaimedTopicComponent] = ClaimedTopicComponent,
    type_name: str | None = None,
    **attributes: Any,  # noqa: ANN401 - the attributes in the file
) -> dg.Definitions:
    """Load a project with one such file."""
    given = {name: value for name, value in (ATTRIBUTES | attributes).items() if value is not None}
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=of,
            defs_yaml_contents={"type": type_name or f"{of.__module__}.{of.__name__}", "attributes": given},
        )
        (path / "process.py").write_text(PROCESS)
        with sandbox.load_component_and_build_defs(path) as (made, definitions):
            assert isinstance(made, of)
            elsewhere = dg.Definitions(resources={"pipes": object(), given.get("spark_key", "spark"): object()})
            dg.Definitions.validate_loadable(dg.Definitions.merge(definitions, elsewhere))
            return definitions


@dataclass(slots=True)
class Executed:
    """The batches that assets executed, in place of `BatchExecution`."""

    specs: list[BatchSpec] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    def __call__(self, spec: BatchSpec, context: object, config: Any, **_: object) -> "Executed":  # noqa: ANN401
        """Process a batch that is a text."""
        assert config.max_records == 7
        self.specs.append(spec)
        process: Any = spec.process
        self.results.append(process(context, "batch", "frame") if spec.with_frame else process(context, "batch"))
        return self

    def run(self) -> bool:
        """Return that there was nothing to do, so that no result is needed."""
        return False


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Executed:
    """Record what assets would execute."""
    executed = Executed()
    monkeypatch.setattr(decorator, "BatchExecution", executed)
    return executed


def unbound(found: dg.Definitions, key: dg.AssetKey) -> dg.AssetsDefinition:
    """Return an asset to which no resources are bound yet."""
    return next(one for one in found.assets or () if isinstance(one, dg.AssetsDefinition) and one.keys == {key})


def run_asset(found: dg.Definitions, key: dg.AssetKey) -> None:
    """Materialize an asset."""
    asset = unbound(found, key)
    assert dg.materialize([asset], resources=found.resources).success


OPTIONS: dict[str, Any] = {
    "allow_missing_topic": True,
    "allow_topic_without_id": True,
    "claim_entire_topic": True,
    "count_records": True,
    "max_attempts": 3,
    "min_partitions": 8,
    "start": "latest",
}


@pytest.mark.slow
def test_each_option_reaches_the_asset(executed: Executed) -> None:
    """What is set in YAML is what the run of the asset, its resources and Dagster get."""
    found = built(
        **OPTIONS,
        max_records=7,
        max_bytes=8,
        max_batches=9,
        time_budget_s=10.0,
        pool="spark",
        spark_config={"spark.driver.memory": "4g"},
        retry_policy={"max_retries": 4, "delay_s": 1.5, "backoff": "exponential", "jitter": "plus_minus"},
        allow_unsafe_topic=True,
        allow_branch_deployments=True,
        coordination_connection={"bootstrap_servers": "127.0.0.1:2"},
    )
    asset = found.resolve_assets_def(dg.AssetKey("count"))
    run_asset(found, dg.AssetKey("count"))
    (spec,) = executed.specs
    assert {name: getattr(spec, name) for name in OPTIONS} == OPTIONS
    limits = {name: getattr(config_defaults(asset), name) for name in ("max_bytes", "max_batches", "time_budget_s")}
    assert limits == {"max_bytes": 8, "max_batches": 9, "time_budget_s": 10.0}
    assert asset.op.pool == "spark"
    assert asset.op.retry_policy == dg.RetryPolicy(4, 1.5, dg.Backoff.EXPONENTIAL, dg.Jitter.PLUS_MINUS)
    resources = found.resources or {}
    claimer, rationalizer = resources["count_claimer"], resources["count_rationalizer"]
    assert isinstance(claimer, ClaimerResource)
    settings = spark_settings_of(resources["count_pyspark"])
    assert (settings["spark.driver.memory"], spec.spark_key) == ("4g", "count_pyspark")
    assert claimer.allow_unsafe_topic
    assert claimer.allow_branch_deployments
    assert claimer.coordination_connection is not None
    assert claimer.coordination_connection.bootstrap_servers == "127.0.0.1:2"
    assert isinstance(rationalizer, RationalizerResource)
    assert rationalizer.connection.bootstrap_servers == "127.0.0.1:2"
    assert rationalizer.data_connection is not None
    assert rationalizer.data_connection.bootstrap_servers == "127.0.0.1:1"


def config_defaults(asset: dg.AssetsDefinition) -> Any:  # noqa: ANN401 - a namespace
    """Return the defaults in the run config of an asset."""
    fields = asset.op.config_schema.config_type.fields  # type: ignore[union-attr] # it has fields
    return SimpleNamespace(**{name: one.default_value for name, one in fields.items() if one.default_provided})


@pytest.mark.slow
def test_claims_of_ranges_reach_claimer_and_asset(executed: Executed) -> None:
    """The group claims ranges, with the given size; the rest has the library's defaults."""
    found = built(ranges={"size": 5}, max_claims=3, spark_key=None, max_records=7)
    run_asset(found, dg.AssetKey("count"))
    (spec,) = executed.specs
    assert (spec.ranges, spec.max_claims) == (RangeOptions(size=5), 3)
    claimer = (found.resources or {})["count_claimer"]
    assert isinstance(claimer, ClaimerResource)
    assert claimer.claim_ranges


def spark_settings_of(resource: Any) -> dict[str, Any]:  # noqa: ANN401 - any resource
    """Return the settings of the component's own Spark resource."""
    with dg.build_resources({"spark": resource}) as made:
        spark = made.spark
        assert isinstance(spark, LazyPySparkResource)
        return spark.spark_config


@pytest.mark.slow
@pytest.mark.parametrize(("delivery", "failures"), [("at_most_once", "1"), ("at_least_once", None)])
def test_at_most_once_has_a_session_that_runs_no_task_twice(delivery: str, failures: str | None) -> None:
    """The component's own session has the settings for the delivery mode."""
    spark = (built(delivery=delivery).resources or {})["count_pyspark"]
    assert spark_settings_of(spark).get("spark.task.maxFailures") == failures


@pytest.mark.slow
@pytest.mark.parametrize("is_installed", [True, False])
def test_without_a_resource_of_its_own_the_run_starts_the_session(
    executed: Executed, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """A resource of the user's is taken; without dagster-pyspark the asset gets the settings itself."""
    if not is_installed:
        monkeypatch.setattr(component, "find_spec", lambda _: None)
    settings = {"spark.driver.memory": "4g"}
    found = built(max_records=7, **({"spark_key": "mine"} if is_installed else {"spark_config": settings}))
    resources = dict(found.resources or {})
    assert "count_pyspark" not in resources
    if is_installed:
        assert "mine" in unbound(found, dg.AssetKey("count")).required_resource_keys
        return
    run_asset(found, dg.AssetKey("count"))
    (spec,) = executed.specs
    assert (spec.spark_key, spec.spark_config) == (None, settings)


def test_a_kafka_partition_is_a_dagster_partition() -> None:
    """Asset and topic asset have partitions; there is neither a reprocess job nor a stale-claim sensor."""
    found = built(per_partition=True)
    graph = found.resolve_asset_graph()
    for key in (dg.AssetKey("count"), dg.AssetKey(["kafka", "orders"])):
        assert graph.get(key).partitions_def == kafka_partitions_def("orders")
    assert names(found.jobs) == {"count_job"}
    assert names(found.sensors) == {"count_failed_runs", "count_canceled_runs", "count_messages"}


def test_the_translation_changes_how_assets_appear() -> None:
    """Its templates may use topic and name; what it does not set stays."""
    translation = {
        "group_name": "{{ topic }}_group",
        "key_prefix": "eu",
        "owners": ["team:shops"],
        "tags": {"n": "{{ name }}"},
    }
    node = built(translation=translation).resolve_asset_graph().get(dg.AssetKey(["eu", "count"]))
    assert (node.group_name, node.owners, node.tags["n"]) == ("orders_group", ["team:shops"], "count")
    assert node.parent_keys == {dg.AssetKey(["kafka", "orders"])}
    assert node.kinds == {"kafka", "spark"}


@pytest.mark.slow
def test_each_topic_of_a_list_has_an_asset(executed: Executed, tmp_path: Path) -> None:
    """They share function and resources; each has its own job, sensors and output."""
    found = built(
        topic=None,
        topics=["orders", "returns.eu"],
        delivery="effectively_once",
        output_folder=str(tmp_path),
        schedule="* * * * *",
        max_records=7,
    )
    graph = found.resolve_asset_graph()
    assert {key.path[-1] for key in graph.materializable_asset_keys} == {"count_orders", "count_returns_eu"}
    assert names(found.jobs) == {
        "count_orders_job",
        "reprocess_count_orders",
        "count_returns_eu_job",
        "reprocess_count_returns_eu",
    }
    assert len(list(found.schedules or ())) == 2
    assert names(found.sensors) == {
        *("count_failed_runs", "count_canceled_runs", "count_orders_stale_claims", "count_returns_eu_stale_claims"),
        *("count_orders_messages", "count_returns_eu_messages"),
    }
    assert set(found.resources or {}) == {"count_claimer", "count_rationalizer", "count_pyspark"}
    for name in ("count_orders", "count_returns_eu"):
        run_asset(found, dg.AssetKey(name))
    assert [spec.topic for spec in executed.specs] == ["orders", "returns.eu"]
    assert [str(spec.sink) for spec in executed.specs] == [
        f"FileSink('{tmp_path}/{topic}', format='parquet')" for topic in ("orders", "returns.eu")
    ]


class Shops(ClaimedTopicComponent):
    """A component with a field of its own, whose execution and spec are overridden."""

    shop: str

    def get_asset_spec(self, asset: ClaimedAsset) -> dg.AssetSpec:
        """Add the shop to the spec."""
        return super().get_asset_spec(asset).merge_attributes(metadata={"shop": self.shop})

    def execute(self, context: dg.AssetExecutionContext, batch: Any, frame: Any) -> Any:  # noqa: ANN401
        """Return the arguments with the shop."""
        return self.shop, context.asset_key, batch, frame


def test_a_subclass_overrides_spec_and_execution(executed: Executed) -> None:
    """It needs no function, and its methods see its own fields."""
    found = built(of=Shops, function=None, shop="north", max_records=7)
    key = dg.AssetKey("orders")
    assert found.resolve_asset_graph().get(key).metadata["shop"] == "north"
    run_asset(found, key)
    assert executed.results == [("north", key, "batch", "frame")]


class Remote(ClaimedTopicComponent):
    """A component whose batches are processed outside of the run."""

    with_frame: bool = False
    required_resource_keys: list[str] = ["pipes"]  # noqa: RUF012 - pydantic copies it
    job: str
    seen: ClassVar[list[Any]] = []

    def execute_without_frame(self, context: dg.AssetExecutionContext, batch: Any) -> None:  # noqa: ANN401
        """Record the arguments, the job and the resource."""
        self.seen.append((context.asset_key, batch, self.job, context.resources.pipes))


def test_a_subclass_processes_batches_without_a_frame(executed: Executed) -> None:
    """The run starts no Spark, and the method has the resources that the component requires."""
    found = built(of=Remote, function=None, job="parse", max_records=7)
    key = dg.AssetKey("orders")
    assert set(found.resources or {}) == {"orders_claimer", "orders_rationalizer"}
    resources = {**(found.resources or {}), "pipes": "a client"}
    assert dg.materialize([unbound(found, key)], resources=resources).success
    assert Remote.seen == [(key, "batch", "parse", "a client")]
    (spec,) = executed.specs
    assert (spec.with_frame, spec.spark_key) == (False, None)


@pytest.mark.slow
def test_a_function_without_a_frame_needs_no_subclass(executed: Executed) -> None:
    """`with_frame` and the keys of resources may be set in YAML; the asset has the name of the function."""
    found = built(function="process.py:send", with_frame=False, required_resource_keys=["pipes"], max_records=7)
    asset = unbound(found, dg.AssetKey("send"))
    assert dg.materialize([asset], resources={**(found.resources or {}), "pipes": "a client"}).success
    assert executed.results == [None]


def test_the_component_is_a_public_name() -> None:
    """YAML may name it at the top level of the package."""
    assert built(of=ClaimedTopicComponent, type_name="marshal_dagster.ClaimedTopicComponent").assets


def names(found: Any) -> set[str]:  # noqa: ANN401 - jobs, schedules or sensors
    """Return the names of these definitions."""
    return {each.name for each in found or ()}


def test_all_that_belongs_to_a_topic_is_there() -> None:
    """The component creates both assets, jobs, schedule, checks, sensors and its own resources."""
    found = built(schedule="*/5 * * * *", max_lag=10)
    graph = found.resolve_asset_graph()
    count, topic = dg.AssetKey("count"), dg.AssetKey(["kafka", "orders"])
    assert graph.get(count).parent_keys == {topic}
    assert graph.get(topic).is_observable
    assert {key.name for key in graph.asset_check_keys} == {
        "stale_claims",
        "lag",
        "gaps",
        "rewinds",
        "double_commits",
        "exhausted_plans",
        "nothing_given_up_shops",
    }
    assert names(found.jobs) == {"count_job", "reprocess_count"}
    (schedule,) = found.schedules or ()
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert schedule.cron_schedule == "*/5 * * * *"
    assert schedule.default_status is dg.DefaultScheduleStatus.RUNNING
    assert names(found.sensors) == {"count_stale_claims", "count_failed_runs", "count_canceled_runs", "count_messages"}
    claimer = (found.resources or {})["count_claimer"]
    assert isinstance(claimer, ClaimerResource)
    assert (claimer.group, claimer.delivery, claimer.heartbeat_interval_s) == ("shops", "at_least_once", 10)


def test_what_is_not_wanted_is_left_out() -> None:
    """Without a cron string there is no schedule; sensors that are not listed are left out.

    The topic's asset exists only with its sensor.
    """
    found = built(sensors=[], running=False, name="other")
    assert names(found.schedules) == names(found.sensors) == set()
    assert names(found.jobs) == {"other_job", "reprocess_other"}
    assert not found.resolve_asset_graph().has(dg.AssetKey(["kafka", "orders"])) or (
        not found.resolve_asset_graph().get(dg.AssetKey(["kafka", "orders"])).is_observable
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"function": None}, "function is missing: .* or override execute in a subclass"),
    ({"function": None, "with_frame": False}, "override execute_without_frame in a subclass"),
    ({"with_frame": False}, r"a run calls it with \(context, batch\)"),
    ({"function": "process.py:send"}, r"a run calls it with \(context, batch, frame\)"),
    ({"function": "process.py:send", "with_frame": False, "count_records": True}, "count_records would have"),
    ({"topics": ["orders"]}, "set either topic or topics"),
    ({"topic": None}, "set either topic or topics"),
    ({"topic": None, "topics": ["a.b", "a-b"]}, "assets of the same name"),
    ({"per_partition": True, "schedule": "* * * * *"}, "need a Dagster partition"),
    ({"per_partition": True, "claim_entire_topic": True}, "claim_entire_topic does not work with per_partition"),
    ({"ranges": {"size": 0}}, "ranges.size is 0"),
    ({"spark_key": "spark", "spark_config": {"a": "b"}}, "spark_config does not apply"),
    ({"function": "process.py"}, r"must have the form file\.py:name or package\.module:name"),
    ({"function": "process.py:missing"}, "cannot be loaded"),
    ({"function": "no_such_module:count"}, "cannot be loaded"),
    ({"function": "missing.py:count"}, "cannot be loaded"),
    ({"delivery": "effectively_once"}, "there is no output: set output_folder or sink"),
    ({"output_folder": "a", "sink": "process.py:sink"}, "both set"),
    ({"output_folder": "a"}, "in at_least_once the function writes its results"),
    ({"sink": "process.py:sink", "delivery": "at_most_once"}, "in at_most_once the function writes its results"),
    ({"topic": "a/b"}, "not a name that Kafka allows"),
    ({"max_records": 0}, "must be above 0"),
    ({"delivery": "sometimes"}, "delivery"),
    ({"sensors": ["lag"]}, "sensors"),
    ({"unknown": 1}, "unknown"),
    ({"connection": {"bootstrap_servers": "127.0.0.1:1", "username": "me"}}, "username"),
    ({"connection": {"bootstrap_servers": "127.0.0.1"}}, "not host:port"),
    ({"group": "a/b"}, "cannot be a name"),
    ({"heartbeat_interval_s": 0.01}, "heartbeat_interval_s"),
    ({"max_records": "many"}, "max_records"),
    ({"min_partitions": 0}, "min_partitions is 0"),
    ({"max_lag": -1}, "max_lag is -1"),
    ({"running": "soon"}, "running"),
    ({"schedule": "every five minutes"}, "cron"),
    ({"retry_policy": {"backoff": "none"}}, "backoff"),
    ({"ranges": {"wait_s": -1.0}}, "neither may be negative"),
    ({"with_frame": False, "function": "process.py:send", "spark_config": {"a": "b"}}, "spark_config would have"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_what_is_wrong_is_named(wrong: dict[str, Any], said: str) -> None:
    """The error is raised when the definitions are loaded, not in a run.

    Dagster shows where it is, and the cause shows what is wrong.
    """
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Dagster raises several types
        built(**wrong)
    reported, error = "", cast("BaseException | None", caught.value)
    while error is not None:
        reported += f"{error}\n"
        error = error.__cause__ or error.__context__
    assert re.search(said, reported), reported


def problems_by_schema(attributes: dict[str, Any], of: type[BaseModel] | None = None) -> list[str]:
    """Return the errors of `dg check yaml`, which checks attributes by the component's JSON schema."""
    model = of or ClaimedTopicComponent.get_model_cls()
    assert model is not None
    return [error.message for error in Draft202012Validator(model.model_json_schema()).iter_errors(attributes)]


ONLY_BY_LOADING: list[dict[str, Any]] = [
    {"with_frame": False},
    {"function": "process.py:send"},
    {"function": "process.py:missing"},
    {"function": "no_such_module:count"},
    {"function": "missing.py:count"},
    {"topic": None, "topics": ["a.b", "a-b"]},
]
"""The mistakes that are not in the YAML alone: they need the function's file, or the rule for names of assets."""


@pytest.mark.parametrize("wrong", [wrong for wrong, _ in WRONG])
def test_the_schema_refuses_what_the_component_refuses(wrong: dict[str, Any]) -> None:
    """`dg check yaml` finds each mistake that is in the YAML alone, without loading anything."""
    given = {name: value for name, value in (ATTRIBUTES | wrong).items() if value is not None}
    assert bool(problems_by_schema(given)) is (wrong not in ONLY_BY_LOADING)


@pytest.mark.parametrize(
    "right",
    [
        {},
        OPTIONS,
        {"max_records": "100", "heartbeat_interval_s": "1e1", "running": "false"},
        {"max_records": "{{ env('MOST') }}", "delivery": "{{ env('DELIVERY') }}", "output_folder": "/data"},
        {"topic": "{{ env('TOPIC') }}", "running": "{{ env('RUNS') }}", "sensors": "{{ sensors }}"},
        {"delivery": "effectively_once", "sink": "my.sinks:orders", "schedule": "@daily"},
        {"topic": None, "topics": ["orders", "returns"], "translation": {"key_prefix": "shops"}},
        {"per_partition": True, "claim_entire_topic": False, "ranges": {"size": 5}},
    ],
)
def test_the_schema_takes_what_the_component_takes(right: dict[str, Any]) -> None:
    """Templates, numbers as text and all options are fine."""
    assert not problems_by_schema({name: value for name, value in (ATTRIBUTES | right).items() if value is not None})


def test_a_subclass_with_its_own_execution_needs_no_function() -> None:
    """Its schema requires its own fields, and a function only if the method for it is not overridden."""

    class Shops(ClaimedTopicComponent):
        """Processes batches itself."""

        shop: str

        def execute(self, context: object, batch: object, frame: object) -> None:
            """Process nothing."""

    attributes = {name: value for name, value in ATTRIBUTES.items() if name != "function"} | {"shop": "north"}
    assert not problems_by_schema(attributes, Shops.model())
    assert problems_by_schema(attributes | {"with_frame": False}, Shops.model()) == [
        "'function' is a required property"
    ]
    assert problems_by_schema(attributes | {"max_records": 0}, Shops.model())


CONNECTION_TEXTS: dict[str, Any] = {
    "username": "me",
    "password_variable": "SECRET",
    "oauth_token_endpoint_url": "https://login.example/token",
    "oauth_client_id": "me",
    "oauth_client_secret_variable": "SECRET",
    "oauth_scope": "kafka",
    "aws_region": "eu-west-1",
    "aws_profile": "shops",
    "kerberos_principal": "me@EXAMPLE",
    "kerberos_service_name": "kafka",
    "ssl_ca_pem": "-----BEGIN CERTIFICATE-----",
}


@pytest.mark.parametrize("protocol", [None, "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"])
@pytest.mark.parametrize("mechanism", [None, "PLAIN", "SCRAM-SHA-512", "AWS_MSK_IAM", "GSSAPI"])
def test_the_schema_of_a_connection_agrees_with_the_connection(protocol: str | None, mechanism: str | None) -> None:
    """For each protocol and mechanism with no, one or two other fields, both refuse the same."""
    base = {"bootstrap_servers": "127.0.0.1:1", "security_protocol": protocol, "sasl_mechanism": mechanism}
    schema = Draft202012Validator(ConnectionModel.model().model_json_schema())
    accepted = 0
    for names in [(), *combinations(CONNECTION_TEXTS, 1), *combinations(CONNECTION_TEXTS, 2)]:
        fields: dict[str, Any] = {name: value for name, value in base.items() if value is not None}
        fields |= {name: CONNECTION_TEXTS[name] for name in names}
        try:
            ConnectionModel(**fields).to_config()
        except ConfigurationError:
            is_right = False
        else:
            is_right = True
        assert schema.is_valid(fields) is is_right, fields
        accepted += is_right
    assert bool(accepted) is bool(possible(protocol, mechanism))


def possible(protocol: str | None, mechanism: str | None) -> bool:
    """Return whether some connection has this protocol and mechanism, with at most two other fields of text."""
    if mechanism is None:
        return not (protocol or "").startswith("SASL_")
    if mechanism == "AWS_MSK_IAM":
        return protocol == "SASL_SSL"
    return (protocol or "").startswith("SASL_") and mechanism != "GSSAPI"  # which needs a keytab


@pytest.mark.parametrize("folder", ["orders", "2024-orders.eu", "class"])
def test_what_is_scaffolded_can_be_loaded(folder: str, tmp_path: Path) -> None:
    """The folder's name may be any topic name; the scaffolded topic has that name."""
    path = tmp_path / folder
    path.mkdir()
    request = dg.ScaffoldRequest[Any](TYPE, path, "yaml", tmp_path, None)
    _ClaimedTopicScaffolder().scaffold(request)
    compile((path / "process.py").read_text(), "process.py", "exec")
    compile(next((tmp_path / "tests").glob("test_*.py")).read_text(), "test.py", "exec")
    attributes = yaml.safe_load((path / "defs.yaml").read_text())["attributes"]
    assert attributes["topic"] == folder
    assert attributes["function"].rpartition(":")[2].isidentifier()
    assert attributes["output_folder"].startswith("{{ context.project_root }}/")
    assert not attributes["running"]
    assert not problems_by_schema(attributes)


def test_scaffolding_keeps_files_that_exist(tmp_path: Path) -> None:
    """A test that the user has written stays."""
    path = tmp_path / "orders"
    path.mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_orders.py").write_text("mine")
    _ClaimedTopicScaffolder().scaffold(dg.ScaffoldRequest[Any](TYPE, path, "yaml", tmp_path, None))
    assert (tmp_path / "tests" / "test_orders.py").read_text() == "mine"


def test_secrets_are_named_by_their_variable() -> None:
    """A secret is referred to by its environment variable, so Dagster does not store its value."""
    connection = ConnectionModel(
        bootstrap_servers="127.0.0.1:1",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="SCRAM-SHA-256",
        username="me",
        password_variable="THE_PASSWORD",
    ).to_config()
    assert connection.__dict__["password"] == dg.EnvVar("THE_PASSWORD")
    assert connection.secrets_in_code() == []


def test_the_example_is_the_deployment_of_definitions_py() -> None:
    """The example has at most 20 lines, with the same topic, group, delivery mode, limits and schedule."""
    from definitions import defs
    from jobs import flights, settings

    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 20
    attributes = yaml.safe_load(text)["attributes"]
    claimer = (defs.resources or {})["claimer"]
    assert isinstance(claimer, ClaimerResource)
    assert (attributes["topic"], attributes["group"]) == (flights.TOPIC, claimer.group)
    assert attributes["delivery"] == claimer.delivery
    assert attributes["schedule"] == flights.flights_schedule.cron_schedule
    assert (attributes["max_records"], attributes["max_batches"]) == (settings.MAX_RECORDS, settings.MAX_BATCHES)
    assert attributes["function"].endswith(f":{flights.flights_by_carrier.name}")
