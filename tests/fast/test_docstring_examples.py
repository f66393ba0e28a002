"""The Python examples in the docstrings of the library, executed. What would reach a service is a mock.

The mocks of `SERVICES` refuse an unknown member and a call that the real signature does not allow.
"""

import ast
import importlib
import inspect
import os
import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import MagicMock, create_autospec

import dagster as dg
import pytest
from dagster_pipes import PipesMappingParamsLoader, open_dagster_pipes
from dagster_pyspark import LazyPySparkResource

import marshal_dagster
import marshal_dagster.testing
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.protocol.idempotence import TakenRanges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytest.importorskip(
    "confluent_kafka.schema_registry", reason="the environments of the lowest versions lack its packages"
)
pytestmark = pytest.mark.slow  # a sweep of several seconds

LIBRARY: Final = Path(marshal_dagster.__file__).parent
RANGE: Final = marshal_dagster.ClaimedRange("log", "shops", "orders", "data", 0, 0, 7, start=0, end=5, first_readable=0)
CERTIFICATE: Final = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
INTERNAL: Final[Mapping[str, str]] = {
    "coordinator.assignment": "sticky_assignment weighted_assignment",
    "coordinator.service": "Coordinator",
    "coordinator.transport": "CoordinatorTopics read_coordinator_messages",
    "outbox.backoff": "HarvestLimits",
    "outbox.harvester": "OutboxTopics",
    "outbox.migration": "OutboxMigration",
    "outbox.old_tables": "GoharvestTable",
    "outbox.options": "HarvesterOptions",
    "outbox.schema": "OutboxTables",
    "protocol.replay": "parse_lines",
    "protocol.world": "World",
    "sinks.conformance": "CASES",
}
"""Names of the library that are not public, but are used in the example of another module."""
SERVICES: Final = (
    "BatchSession",
    "CoordinatedMember",
    "Coordinator",
    "CoordinatorTopics",
    "Database",
    "Exporter",
    "Harvester",
    "HealthServer",
    "KafkaCluster",
    "KafkaSink",
    "MariaDBSink",
    "OutboxMigration",
    "OutboxTables",
    "OutboxTopics",
    "PostgresSink",
    "TopicReader",
    "check_columns",
    "decode_avro",
    "decode_json",
    "decode_protobuf",
    "infer_json_schema",
    "open_rationalizer",
    "prometheus_metrics",
    "read_coordinator_messages",
    "read_group",
    "read_groups",
    "run_once",
    "run_with_pipes",
    "start_session",
    "submitted_batch",
    "telemetry_observer",
    "with_source_headers",
)
"""Names of the library that need a service or a Spark session when they are called, or when their object is used."""
OWN: Final = (
    "before_commit",
    "context",
    "decoded",
    "file",
    "frame",
    "groups_with_ranges",
    "logger",
    "offsets_read",
    "options",
    "outbox",
    "partition",
    "psycopg",
    "ranges_with_rows",
    "records",
    "result",
    "rows",
    "sink",
    "spark",
    "topics",
    "workers",
    "write",
)
"""Objects of the reader's program, of the library or of Spark, which the examples only use."""


@dataclass(frozen=True)
class Example:
    """A Python block of a docstring."""

    module: str
    name: str
    code: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('marshal_dagster.')}.{self.name}"


def examples() -> Iterator[Example]:
    """Yield the Python blocks of all docstrings of classes and functions."""
    for path in sorted(LIBRARY.rglob("*.py")):
        module = ".".join(path.relative_to(LIBRARY.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                for block in re.findall(r"^ *```python\n(.*?)^ *```$", docstring, re.MULTILINE | re.DOTALL):
                    yield Example(module, node.name, dedent(block))


EXAMPLES: Final = tuple(examples())
PUBLIC: Final = frozenset([*marshal_dagster.__all__, *marshal_dagster.testing.__all__])


@cache
def mock_of(kind: type) -> Any:  # noqa: ANN401 - a mock of an instance
    """Return a mock of an instance. No example depends on what another one did to it."""
    return create_autospec(kind, instance=True)


@cache
def names_of_the_library() -> dict[str, Any]:
    """Return what a reader imports. What needs a service is a mock."""
    names = {name: value for name, value in vars(dg).items() if not name.startswith("_")}
    for package in (marshal_dagster, marshal_dagster.testing):
        names |= {name: getattr(package, name) for name in package.__all__}
    for module, internal in INTERNAL.items():
        imported = importlib.import_module(f"marshal_dagster.{module}")
        names |= {name: getattr(imported, name) for name in internal.split()}
    return names | {
        "LazyPySparkResource": LazyPySparkResource,
        "Path": Path,
        "PipesMappingParamsLoader": PipesMappingParamsLoader,
        "marshal_dagster": marshal_dagster,
        "open_dagster_pipes": create_autospec(open_dagster_pipes),
        "os": os,
        "pytest": pytest,
        "signal": create_autospec(signal),
    }


def names_of_the_reader(example: Example, folder: Path) -> dict[str, Any]:
    """Return what an example takes from its reader's own code."""

    def orders_per_shop_op(context: object, batch: object, frame: object) -> None:
        """Process a batch of orders."""

    @marshal_dagster.marshal_asset(topic="orders", sink=marshal_dagster.FileSink("/data/orders_per_shop"))
    def orders_per_shop(context: object, batch: object, frame: "DataFrame | list[dict[str, Any]]") -> Any:  # noqa: ANN401, ARG001 - rows
        """Count the order of each record."""
        assert isinstance(frame, list)
        return [{"partition": row["partition"], "shop": row["value"].decode(), "count": 1} for row in frame]

    of_tests = example.module.startswith("marshal_dagster.testing")
    kafka = marshal_dagster.KafkaConnectionConfig(bootstrap_servers="broker:9092")
    return {name: MagicMock(name=name) for name in OWN} | {
        "JOB_FLOW": {},
        "batch": mock_of(marshal_dagster.ClaimedBatch),
        "claimer": mock_of(marshal_dagster.ClaimerResource),
        "connection": marshal_dagster.KafkaConnection(bootstrap_servers="broker:9092"),
        "count_op": marshal_dagster.build_claimed_batch_op(orders_per_shop_op, name="count_shops", topic="orders"),
        "dsn": "postgresql://me@localhost/shop",
        "harvester": mock_of(marshal_dagster.Harvester),
        "job": marshal_dagster.build_claimed_batch_job(orders_per_shop),
        "kafka": marshal_dagster.testing.MemoryKafka() if of_tests else kafka,
        "orders": orders_per_shop,
        "orders_per_shop": orders_per_shop,
        "range_": RANGE,
        "ranges": (RANGE, RANGE),
        "ranges_in_output": (RANGE,),
        "redo_job": marshal_dagster.build_reprocess_job(orders_per_shop),
        "session": mock_of(marshal_dagster.BatchSession),
        "stored": None,
        "tables": mock_of(OutboxTables),
        "taken": TakenRanges(),
        "tmp_path": folder,
        "wanted": RANGE,
    }


def test_each_name_is_in_an_example() -> None:
    """There are many examples, and a name in `SERVICES` or `OWN` is in one of them."""
    text = "\n".join(example.code for example in EXAMPLES)
    assert len(EXAMPLES) > 100
    assert [name for name in (*SERVICES, *OWN) if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_example_of_a_docstring_runs(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name exists, each call is one that the library accepts, and a test in an example passes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", "kafka-1:9092")
    monkeypatch.setenv("REGISTRY_TOKEN", "secret")
    monkeypatch.setattr("confluent_kafka.schema_registry.SchemaRegistryClient", MagicMock())
    Path("kafka.toml").write_text('bootstrap_servers = "kafka-1:9092"')
    Path("ca.pem").write_text(CERTIFICATE)
    names = dict(names_of_the_library())
    if example.name not in PUBLIC:
        names |= vars(importlib.import_module(example.module))
    names |= names_of_the_reader(example, tmp_path)
    names["sink"].check.return_value = []
    names |= {name: create_autospec(names[name]) for name in SERVICES if name in names and name in example.code}
    exec(compile(example.code.replace("/etc/kafka/", ""), str(example), "exec"), names)  # noqa: S102 - the docstring's own code
    for name, value in list(names.items()):
        if name.startswith("test_") and not inspect.signature(value).parameters:
            value()
