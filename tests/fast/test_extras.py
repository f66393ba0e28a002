"""Check the optional dependencies: each is declared, and code that lacks one names it in one line."""

import logging
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from marshal_dagster._internal.extras import MODULES, Extra, has_extra
from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.kafka.token_callbacks import aws_msk_iam_callback
from marshal_dagster.outbox.schema import OutboxTables
from marshal_dagster.outbox.status import OutboxInspector
from marshal_dagster.resources.spark_connect import SparkConnectResource
from marshal_dagster.sinks import DeltaSink, FileSink, IcebergSink, MariaDBSink, PostgresSink
from marshal_dagster.sinks.conformance.target import part
from marshal_dagster.spark.connect_session import connect
from marshal_dagster.spark.decoding import SchemaFiles, decode_protobuf
from marshal_dagster.spark.session import start_session
from marshal_dagster.telemetry import metrics
from marshal_dagster.telemetry.prometheus import prometheus_metrics

TOP = Path(__file__).parents[2]
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]


class Missing:
    """A finder that knows no module of a package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for the package and its modules; let other finders look for the others."""
        del path, target
        if name == self._package or name.startswith(f"{self._package}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def uninstall(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let imports of a package fail, as if it were not installed."""
    forget(monkeypatch, package)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package be imported again when it is used next."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)


def _decode() -> None:
    decode_protobuf(None, SchemaFiles({}), message="m", descriptors=b"")  # type: ignore[arg-type] # it fails before


def _start_server() -> None:
    with tempfile.TemporaryDirectory() as folder:
        SparkConnectResource(folder=folder).start_server()


def _render_metrics() -> None:
    with prometheus_metrics() as render:
        render()


POSTGRES = "postgresql://127.0.0.1:1/none"
USES: Sequence[tuple[Extra, Callable[[], object]]] = (
    (Extra.SPARK, lambda: start_session({"spark.master": "local"})),
    (Extra.SPARK, lambda: DeltaSink("/none").verdicts([part(0, 0, 1)])),
    (Extra.CONNECT, lambda: connect("sc://127.0.0.1:1")),
    (Extra.CONNECT, _start_server),
    (Extra.POSTGRES, lambda: Database(POSTGRES).connect()),
    (Extra.POSTGRES, lambda: PostgresSink(POSTGRES, "t").verdicts([part(0, 0, 1)])),
    (Extra.POSTGRES, lambda: PostgresSink(POSTGRES, "t").create_tables()),
    (Extra.POSTGRES, lambda: OutboxTables(Database(POSTGRES)).create()),
    (Extra.POSTGRES, lambda: OutboxInspector(OutboxTables(Database(POSTGRES))).status()),
    (Extra.ICEBERG, lambda: IcebergSink("shop.orders").verdicts([part(0, 0, 1)])),
    (Extra.MARIADB, lambda: MariaDBSink("mariadb://127.0.0.1:1/none", "t").verdicts([part(0, 0, 1)])),
    (Extra.OBJECT_STORE, lambda: FileSink("s3://lake/orders").verdicts([part(0, 0, 1)])),
    (Extra.PROTOBUF, _decode),
    (Extra.PROMETHEUS, _render_metrics),
    (Extra.MSK, lambda: aws_msk_iam_callback("eu-central-1", None, None)),
)


def test_each_extra_of_the_project_is_known() -> None:
    """The names are those of pyproject.toml, and there is no extra `ui`."""
    assert set(Extra) == set(PROJECT["optional-dependencies"]) == set(MODULES)


def test_the_core_needs_none_of_the_extras() -> None:
    """No dependency of the core is one of an extra."""
    core = {line.split(">")[0] for line in PROJECT["dependencies"]}
    extras = {line.split(">")[0].split("[")[0] for lines in PROJECT["optional-dependencies"].values() for line in lines}
    assert core == {"confluent-kafka", "dagster", "psutil", "pydantic", "rich", "typer"}
    assert not core & extras


@pytest.mark.parametrize(("extra", "use"), USES)
def test_a_missing_extra_is_one_line_that_names_it(
    extra: Extra, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised where the extra is used."""
    uninstall(monkeypatch, MODULES[extra])
    if extra is Extra.CONNECT:  # its client looks for its packages when it is imported
        forget(monkeypatch, "pyspark.sql.connect")
    assert not has_extra(extra)
    with pytest.raises(ConfigurationError) as raised:
        use()
    text = str(raised.value)
    assert f"pip install 'marshal-dagster[{extra.value}]'" in text
    assert "\n" not in text


@pytest.mark.parametrize("use", [_start_server, lambda: connect("sc://127.0.0.1:1")])
def test_without_pyspark_spark_connect_names_its_own_extra(
    use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That extra brings PySpark as well."""
    uninstall(monkeypatch, "pyspark")
    with pytest.raises(ConfigurationError, match=r"^[^\n]*pip install 'marshal-dagster\[connect\]'[^\n]*$"):
        use()


def test_missing_metrics_are_one_warning_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The work continues without metrics."""
    uninstall(monkeypatch, "opentelemetry")
    monkeypatch.setenv("OTEL_PYTHON_METER_PROVIDER", "sdk_meter_provider")
    metrics._log_missing_extra.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert metrics.metrics() is None
        assert metrics.metrics() is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        "OTEL_PYTHON_METER_PROVIDER is set, but OpenTelemetry is not installed: pip install 'marshal-dagster[metrics]'"
    )


def test_every_extra_is_in_the_table_of_the_documentation() -> None:
    """`make extras` has written a row for the core and for each extra."""
    page = (TOP / "docs" / "how-to" / "install.md").read_text()
    assert "| core |" in page
    assert [extra for extra in Extra if f"| `{extra.value}` |" not in page] == []
