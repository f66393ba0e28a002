"""The component as a user sees it: scaffolded and checked by `dg`, and the example's definitions on a real Kafka."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]
from dagster.components.testing import create_defs_folder_sandbox

from marshal_dagster.component import ClaimedTopicComponent
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops import execution
from marshal_dagster.sinks import FileSink
from tests.conditions import WITHIN_S
from tests.real.conftest import MakeTopic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "component"
TYPE = "marshal_dagster.component.ClaimedTopicComponent"


def run_dg(folder: Path, *arguments: str) -> str:
    """Run `dg` in a project and return its output."""
    command = [str(Path(sys.executable).parent / "dg"), *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    printed: str = result.stdout
    assert result.returncode == 0, printed + result.stderr
    return printed


def test_dg_finds_scaffolds_and_checks_it(tmp_path: Path) -> None:
    """In an empty project, `dg` lists and scaffolds the component, and the unchanged scaffold loads."""
    for name in ("pyproject.toml", "flights_component/__init__.py", "flights_component/definitions.py"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        target.write_text((EXAMPLE / name).read_text())
    (tmp_path / "flights_component" / "defs").mkdir()
    assert TYPE in {one["key"] for one in json.loads(run_dg(tmp_path, "list", "components", "--json"))["items"]}
    run_dg(tmp_path, "scaffold", "defs", TYPE, "orders")
    run_dg(tmp_path, "check", "defs")
    assert "reprocess_orders" in run_dg(tmp_path, "list", "defs", "--json")


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # raised by Dagster's loader
@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")
def test_the_example_counts_flights(  # noqa: PLR0917 - fixtures
    connection: KafkaConnection,
    coordination_topic: str,
    topic: MakeTopic,
    spark: "SparkSession",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The example's job drains a topic of flights, and its checks pass."""
    from confluent_kafka import Producer

    name = topic(2)
    producer = Producer({"bootstrap.servers": connection.bootstrap_servers})
    for number in range(20):
        producer.produce(name, json.dumps({"carrier": "UA", "dep_delay": number}), partition=number % 2)
    assert producer.flush(WITHIN_S) == 0
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", connection.bootstrap_servers)
    monkeypatch.setenv("MARSHAL_COORDINATION_TOPIC", coordination_topic)
    monkeypatch.setenv("MARSHAL_OUTPUT", str(tmp_path))
    monkeypatch.setattr(execution, "start_session", lambda _: spark)
    folder = EXAMPLE / "flights_component" / "defs" / "flights"
    contents = yaml.safe_load((folder / "defs.yaml").read_text().replace("topic: flights", f"topic: {name}"))
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(component_cls=ClaimedTopicComponent, defs_yaml_contents=contents)
        (path / "process.py").write_text((folder / "process.py").read_text())
        with (
            sandbox.load_component_and_build_defs(path) as (_, definitions),
            dg.DagsterInstance.ephemeral() as instance,
        ):
            job = definitions.resolve_job_def("flights_by_carrier_job")
            result = job.execute_in_process(instance=instance)
    assert result.success
    assert {each.passed for each in result.get_asset_check_evaluations()} == {True}
    total = sum(row["flights"] for row in FileSink(tmp_path / "flights_by_carrier").read(spark).collect())
    assert total == 20
