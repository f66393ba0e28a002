"""Check the component: the definitions that a `defs.yaml` creates, and the errors of a wrong one."""

import re
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]
from dagster.components.testing import create_defs_folder_sandbox

from marshal_dagster.component import ClaimedTopicComponent, ConnectionModel, _ClaimedTopicScaffolder
from marshal_dagster.resources.claimer import ClaimerResource

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
sink = object()
'''


def built(**attributes: Any) -> dg.Definitions:  # noqa: ANN401 - the attributes in the file
    """Load a project with one such file."""
    given = {name: value for name, value in (ATTRIBUTES | attributes).items() if value is not None}
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=ClaimedTopicComponent, defs_yaml_contents={"type": TYPE, "attributes": given}
        )
        (path / "process.py").write_text(PROCESS)
        with sandbox.load_component_and_build_defs(path) as (component, definitions):
            assert isinstance(component, ClaimedTopicComponent)
            dg.Definitions.validate_loadable(definitions)
            return definitions


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
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
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], said: str) -> None:
    """The error is raised when the definitions are loaded, not in a run.

    Dagster shows where it is, and the cause shows what is wrong.
    """
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Dagster raises several types
        built(**wrong)
    told, error = "", cast("BaseException | None", caught.value)
    while error is not None:
        told += f"{error}\n"
        error = error.__cause__ or error.__context__
    assert re.search(said, told), told


@pytest.mark.parametrize("folder", ["orders", "2024-orders.eu", "class"])
def test_what_is_scaffolded_can_be_loaded(folder: str, tmp_path: Path) -> None:
    """The folder's name may be any topic name; the scaffolded topic has that name."""
    path = tmp_path / folder
    path.mkdir()
    request = dg.ScaffoldRequest[Any](TYPE, path, "yaml", None, None)
    _ClaimedTopicScaffolder().scaffold(request)
    compile((path / "process.py").read_text(), "process.py", "exec")
    attributes = yaml.safe_load((path / "defs.yaml").read_text())["attributes"]
    assert attributes["topic"] == folder
    assert attributes["function"].rpartition(":")[2].isidentifier()


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
