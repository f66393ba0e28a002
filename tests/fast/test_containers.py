"""The examples for containers: they follow their schemas, and name commands, variables and files that exist."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator

from marshal_dagster._internal.health_server import LIVE, READY
from marshal_dagster.cli import outbox
from marshal_dagster.kafka.connection import KafkaConnection
from tests.fast.test_docs import parse

TOP = Path(__file__).parents[2]
FOLDER = TOP / "examples" / "compose"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
STAGES = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKLOADS = list(yaml.safe_load_all((TOP / "examples" / "kubernetes" / "services.yaml").read_text()))
CONTAINERS = [workload["spec"]["template"]["spec"]["containers"][0] for workload in WORKLOADS]
OURS = ["harvester", "coordinator", "exporter"]
ADDRESS_OPTIONS = {"--health", "--listen"}


def instruction(stage: str, name: str) -> list[str]:
    """Return the arguments of the instruction of a stage that begins with `name` and has the form of JSON."""
    (found,) = re.findall(rf"^{name} (\[.*\])$", STAGES[stage], re.MULTILINE)
    arguments: list[str] = json.loads(found)
    return arguments


def commands() -> list[list[str]]:
    """Return each command line of marshal-dagster in the examples."""
    given = [service["command"] for service in SERVICES.values() if "command" in service]
    given += [instruction(stage, "CMD") for stage in OURS] + [container["args"] for container in CONTAINERS]
    return [command for command in given if command[0] == "marshal-dagster"]


def listens_at(command: list[str]) -> tuple[str, str]:
    """Return host and port at which a service serves its probes."""
    (option,) = ADDRESS_OPTIONS & set(command)
    host, _, port = command[command.index(option) + 1].partition(":")
    return host, port


@pytest.mark.slow
def test_the_compose_file_follows_the_schema() -> None:
    """The schema is that of the Compose Specification, which check-jsonschema contains."""
    schema = json.loads((files("check_jsonschema.builtin_schemas") / "vendor" / "compose-spec.json").read_text())
    assert [error.message for error in Draft202012Validator(schema).iter_errors(COMPOSE)] == []
    misspelt = {"services": {"kafka": {**SERVICES["kafka"], "depend_on": []}}}
    assert not Draft202012Validator(schema).is_valid(misspelt)


@pytest.mark.slow
def test_the_dockerfile_has_no_fault() -> None:
    """Hadolint reports nothing."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_each_command_is_one(command: list[str]) -> None:
    """The command line accepts its name and its options."""
    parse(command[1:])


def test_each_service_of_ours_is_there() -> None:
    """Compose takes the commands of the images, and Kubernetes has the same ones."""
    for name, container in zip(OURS, CONTAINERS, strict=True):
        assert SERVICES[name]["build"]["target"] == container["name"] == name
        assert not {"command", "healthcheck"} & SERVICES[name].keys()
        assert container["args"] == instruction(name, "CMD")


@pytest.mark.parametrize("stage", OURS)
def test_a_health_check_is_that_of_readiness(stage: str) -> None:
    """It requests /ready at the port of the command, which other containers reach too."""
    host, port = listens_at(instruction(stage, "CMD"))
    assert host == "0.0.0.0"  # noqa: S104 - other containers scrape it
    assert f"http://127.0.0.1:{port}{READY}" in instruction(stage, "    CMD")[-1]  # of HEALTHCHECK
    assert re.findall(r"^EXPOSE (\d+)$", STAGES[stage], re.MULTILINE) == [port]


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: str(container["name"]))
def test_the_probes_of_a_pod_are_those_of_the_service(container: dict[str, Any]) -> None:
    """Liveness and readiness differ, because a restart does not help if Kafka is down."""
    (port,) = container["ports"]
    assert str(port["containerPort"]) == listens_at(container["args"])[1]
    assert container["livenessProbe"]["httpGet"] == {"path": LIVE, "port": port["name"]}
    assert container["readinessProbe"]["httpGet"] == {"path": READY, "port": port["name"]}


def test_each_variable_is_read() -> None:
    """Each variable of our containers is a field of the connection, or the command line or an example reads it."""
    connection = {f"MARSHAL_{field.upper()}" for field in KafkaConnection.__dataclass_fields__}
    read = "".join(
        path.read_text()
        for path in [
            Path(outbox.__file__),
            FOLDER / "dagster.yaml",
            *(TOP / "examples" / "outbox").glob("*.*"),
            *(TOP / "examples" / "coordinator").glob("*.*"),
        ]
    )
    given = {name for service in SERVICES.values() if "build" in service for name in service["environment"]}
    assert "MARSHAL_BOOTSTRAP_SERVERS" in given
    assert [name for name in sorted(given - connection) if f'"{name}"' not in read and f": {name}\n" not in read] == []


def test_each_image_is_pinned() -> None:
    """A tag names a version with at least its minor number; our own has the version of the package."""
    version = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["version"]
    bases = [image for image in re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) if image not in STAGES]
    own = [container["image"] for container in CONTAINERS]
    for image in [*bases, *own, *(service["image"] for service in SERVICES.values())]:
        assert re.fullmatch(r".+:v?\d+\.\d+[\w.-]*", image), image
        assert "marshal-dagster/" not in image or image.endswith(f":{version}"), image


def test_dagster_has_the_locked_versions() -> None:
    """The packages that the image pins are those that the tests run with, as far as these have them."""
    lock = dict(re.findall(r"^([\w-]+)==([\w.]+)", (TOP / "requirements.lock").read_text(), re.MULTILINE))
    pinned = dict(re.findall(r"([\w-]+)==([\w.]+)", STAGES["dagster"]))
    assert {"dagster-pyspark", "dagster-webserver", "dagster-postgres"} <= pinned.keys()
    assert pinned.pop("dagster-postgres") == pinned["dagster-pyspark"]
    assert pinned == {name: lock[name] for name in pinned}


def test_each_file_that_is_mounted_or_copied_exists() -> None:
    """A missing file would become an empty folder, or fail the build."""
    mounts = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", ())]
    sources = [FOLDER / source for source, *_ in mounts if source.startswith(".")]
    copied = [name for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]]
    sources += [TOP / name for name in copied if not name.startswith("--")]
    assert len(sources) > len(copied)
    assert [path for path in sources if not path.exists()] == []
    assert {source for source, *_ in mounts if not source.startswith(".")} == COMPOSE["volumes"].keys()


def test_prometheus_and_grafana_find_what_is_mounted() -> None:
    """The paths of their settings are those of the mounts, and each service is scraped at its port."""
    mounted = {volume.split(":")[1] for name in ("prometheus", "grafana") for volume in SERVICES[name]["volumes"]}
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert set(settings["rule_files"]) <= mounted
    (provider,) = yaml.safe_load((FOLDER / "grafana-dashboards.yaml").read_text())["providers"]
    assert provider["options"]["path"] in mounted
    scraped = [
        (name, target["port"]) for target in settings["scrape_configs"][0]["dns_sd_configs"] for name in target["names"]
    ]
    assert sorted(scraped) == sorted((name, int(listens_at(instruction(name, "CMD"))[1])) for name in OURS)


def test_a_service_waits_only_for_what_can_happen() -> None:
    """A service that others wait for has a health check, or ends and does not restart."""
    for name, service in SERVICES.items():
        for other, wait in service.get("depends_on", {}).items():
            assert other in SERVICES, (name, other)
            if wait["condition"] == "service_healthy":
                assert "test" in SERVICES[other]["healthcheck"], (name, other)
            else:
                assert SERVICES[other].get("restart", "no") == "no", (name, other)


def test_ports_are_those_of_this_machine() -> None:
    """None of the services has authentication."""
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_page_and_the_files_state_that_they_were_not_run() -> None:
    """No container engine was available."""
    page = (TOP / "docs" / "how-to" / "containers.md").read_text()
    assert "**were not run**" in page
    for path in (FOLDER / "compose.yaml", FOLDER / "Dockerfile", TOP / "examples" / "kubernetes" / "services.yaml"):
        assert re.search(r"not run|no container engine", path.read_text()), path
