"""The component as a user sees it: scaffolded and checked by `dg`, and the example's definitions on a real Kafka."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import dagster as dg
import pytest
import yaml  # type: ignore[import-untyped]
from dagster.components.testing import create_defs_folder_sandbox

from marshal_dagster._internal.ports import free_port
from marshal_dagster.cli.main import run as marshal
from marshal_dagster.component import ClaimedTopicComponent
from marshal_dagster.kafka.admin_client import Topics
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops import execution
from marshal_dagster.sinks import FileSink
from tests.conditions import WITHIN_S, wait_until
from tests.real.conftest import MakeTopic
from tests.real.forked_runs import FORKED, execute_dg, fork_server
from tests.topics import reserved

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parents[2] / "examples" / "component"
TUTORIAL = EXAMPLE.parent / "dg_project"
PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "dg-project.md"
TYPE = "marshal_dagster.component.ClaimedTopicComponent"


DG = str(Path(sys.executable).parent / "dg")


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """The process from which `dg` is forked: what it imports takes four seconds of a core."""
    with fork_server("dagster_dg_cli.cli", "dagster.components.core.component_tree", "marshal_dagster.component"):
        yield


def run_dg(folder: Path, *arguments: str, fails: bool = False) -> str:
    """Run `dg` in a project and return its output."""
    printed, errors = folder / "dg.out", folder / "dg.err"
    process = FORKED.Process(target=execute_dg, args=(dict(os.environ), folder, arguments, (printed, errors)))
    process.start()
    process.join(WITHIN_S)
    exit_code = process.exitcode
    process.kill()
    text = printed.read_text()
    assert exit_code is not None, f"dg did not end: {text}{errors.read_text()}"
    assert (exit_code != 0) is fails, text + errors.read_text()
    return text


def run(folder: Path, *command: str, fails: bool = False) -> str:
    """Run a command in a project and return its output."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    printed: str = result.stdout
    assert (result.returncode != 0) is fails, printed + result.stderr
    return printed


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, as `create-dagster` and `pip install -e .` leave it, with the scaffold of the tutorial."""
    for name in ("pyproject.toml", "flights_component/__init__.py", "flights_component/definitions.py"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        target.write_text((EXAMPLE / name).read_text())
    (tmp_path / "flights_component" / "defs").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_dg(tmp_path, "scaffold", "defs", "marshal_dagster.ClaimedTopicComponent", "orders")
    return tmp_path


def test_dg_finds_scaffolds_and_checks_it(project: Path) -> None:
    """`dg` lists the component. The unchanged scaffold loads, passes its own test, and is that of the tutorial's page.

    `dg check yaml` refuses a mistake in the file as `dg check defs` does.
    """
    assert TYPE in {one["key"] for one in json.loads(run_dg(project, "list", "components", "--json"))["items"]}
    run_dg(project, "check", "yaml")
    run_dg(project, "check", "defs")
    assert "reprocess_orders" in run_dg(project, "list", "defs", "--json")
    assert "2 passed" in run(project, sys.executable, "-m", "pytest", "-q", "tests")
    defs = project / "flights_component" / "defs" / "orders" / "defs.yaml"
    assert f"```yaml\n{defs.read_text()}```\n" in PAGE.read_text()
    defs.write_text(defs.read_text().replace("running: false", "max_records: 0"))
    assert "max_records" in run_dg(project, "check", "yaml", fails=True)
    run_dg(project, "check", "defs", fails=True)


def test_the_tutorial_materializes_the_asset(
    project: Path, kafka: str, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the tutorial's page count 60,000 orders with `dg launch`, and `dg dev` serves the project."""
    orders = project / "flights_component" / "defs" / "orders"
    shutil.copy(TUTORIAL / "process.py", orders / "process.py")
    shutil.copy(TUTORIAL / "test_orders.py", project / "tests" / "test_orders.py")
    shutil.copy(TUTORIAL / "shop_totals.py", project)
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", kafka)
    with reserved(topics, "__marshal"), reserved(topics, "orders"):
        assert marshal(["topic", "create"]) == 0
        run(project, sys.executable, str(TUTORIAL.parent / "tutorial" / "orders.py"))
        assert "2 passed" in run(project, sys.executable, "-m", "pytest", "-q", "tests")
        run(project, DG, "launch", "--assets", "orders")
        printed = run(project, sys.executable, "shop_totals.py")
        assert dict(re.findall(r"\| *(\w+)\| *(\d+)\|", printed)) == dict.fromkeys(("north", "south", "west"), "20000")
        assert b"orders_job" in served(project)


def served(project: Path) -> bytes:
    """Start `dg dev`, return the jobs that it serves, and end it as Ctrl-C does."""
    port = free_port()
    command = [DG, "dev", "--port", str(port)]
    query = json.dumps({"query": "{repositoriesOrError{... on RepositoryConnection{nodes{jobs{name}}}}}"}).encode()
    request = Request(f"http://127.0.0.1:{port}/graphql", query, {"Content-Type": "application/json"})

    def answer() -> bytes | None:
        try:
            with urlopen(request) as response:  # noqa: S310 - an address of this machine
                jobs: bytes = response.read()
        except OSError:
            return None
        return jobs if b"orders_job" in jobs else None

    with (project / "dev.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=project, stdout=log, stderr=log)
        try:
            return wait_until(answer, "dg dev serves the project")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WITHIN_S)


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
