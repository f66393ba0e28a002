"""The endpoints of a service: /live and /ready for probes, and /metrics in Prometheus' text format."""

import gzip
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from marshal_dagster._internal.health_server import HealthServer
from marshal_dagster.cli.service import health_server
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.exporter.definitions import DEFINITIONS
from marshal_dagster.telemetry import metrics
from marshal_dagster.telemetry.prometheus import prometheus_metrics
from tests.conditions import WITHIN_S
from tests.fast.test_extras import uninstall
from tools import metrics_tables


@pytest.fixture(autouse=True)
def _own_instruments() -> Iterator[None]:
    """Create the instruments again for each test."""
    metrics._of.cache_clear()
    yield
    metrics._of.cache_clear()
    assert not metrics._added


def ask(address: str, path: str) -> tuple[int, str, str]:
    """Send a request, and return its status, content type and body."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=WITHIN_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the samples in Prometheus' text format, by their names."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def report(**fields: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON values
    """Return a health report."""
    return {"healthy": True, "live": True, "ready": True, **fields}


@pytest.mark.slow
@pytest.mark.parametrize("field", ["healthy", "live", "ready"])
@pytest.mark.parametrize("is_well", [True, False])
def test_each_probe_has_its_own_answer(field: str, is_well: bool) -> None:
    """Only the path of the field that is false answers 503."""
    with HealthServer(lambda: report(**{field: is_well})) as server:
        status = {path: ask(server.address, f"/{path}")[0] for path in ("health", "live", "ready")}
    name = "health" if field == "healthy" else field
    assert status == {"health": 200, "live": 200, "ready": 200} | {name: 200 if is_well else 503}


@pytest.mark.slow
def test_a_report_without_these_fields_counts_as_healthy_or_not() -> None:
    """A report of an own service may have `healthy` alone."""
    with HealthServer(lambda: {"healthy": False}) as server:
        assert [ask(server.address, path)[0] for path in ("/live", "/ready")] == [503, 503]


@pytest.mark.slow
def test_the_instruments_are_rendered_by_their_one_definition() -> None:
    """Counters, gauges and histograms have Prometheus' names, and no label of the library's own."""
    with health_server(report, "0") as server:
        outbox, claims = metrics.outbox_metrics(), metrics.metrics()
        assert server is not None
        assert outbox is not None
        assert claims is not None
        outbox.published.add(5, {"outbox": "billing"})
        outbox.published.add(2, {"outbox": "billing"})
        outbox.backlog_age.set(3.5, {"outbox": "billing"})
        claims.lease_remaining.record(4.0, {"group": "shops", "topic": "orders", "at": "commit"})
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for _ in range(2):  # a gauge stays until it is set again
            status, content_type, text = ask(server.address, "/metrics")
            assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
            found = samples(text)
            assert found["marshal_outbox_published_total"] == [({"outbox": "billing"}, 7.0)]
            assert found["marshal_outbox_backlog_age_seconds"] == [({"outbox": "billing"}, 3.5)]
        buckets = {float(labels["le"]): value for labels, value in found["marshal_lease_remaining_seconds_bucket"]}
        assert (buckets[2.5], buckets[5.0], buckets[float("inf")]) == (0, 1, 1)
        assert "process_resident_memory_bytes" in found
        assert not any(name.startswith("target") for name in found)


def test_a_provider_of_the_process_gets_the_same_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus does not replace the OpenTelemetry that the user has set up."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(api, "get_meter_provider", lambda: provider)
    with prometheus_metrics() as render:
        coordinator, claims = metrics.coordinator_metrics(), metrics.metrics()
        assert coordinator is not None
        assert claims is not None
        coordinator.moved.add(3, {"group": "etl"})
        coordinator.groups.set(2)
        claims.phase_duration.record(0.2, {"group": "shops", "topic": "orders", "phase": "read"})
        text = render().decode()
    data = reader.get_metrics_data()
    assert data is not None
    own = {found.name: found.data.data_points for found in data.resource_metrics[0].scope_metrics[0].metrics}
    assert {name: getattr(points[0], "value", None) for name, points in own.items()} == {
        "marshal.coordinator.moved": 3,
        "marshal.coordinator.groups": 2,
        "marshal.phase.duration": None,
    }
    found = samples(text)
    assert found["marshal_coordinator_moved_total"] == [({"group": "etl"}, 3.0)]
    assert found["marshal_coordinator_groups"] == [({}, 2.0)]
    assert found["marshal_phase_duration_seconds_count"][0][1] == 1
    provider.shutdown()


@pytest.mark.slow
def test_without_the_extra_only_the_probes_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """/metrics is one line that names the extra."""
    for name in ("opentelemetry.exporter", "prometheus_client"):
        uninstall(monkeypatch, name)
    before = set(sys.modules)
    with health_server(report, "0") as server:
        assert server is not None
        status, content_type, text = ask(server.address, "/metrics")
        assert [ask(server.address, path)[0] for path in ("/live", "/ready")] == [200, 200]
    assert (status, content_type) == (501, "text/plain; charset=utf-8")
    assert text.count("\n") == 1
    assert "pip install 'marshal-dagster[prometheus]'" in text
    assert not any(name.startswith("opentelemetry.sdk") for name in set(sys.modules) - before)


@pytest.mark.slow
def test_a_server_without_metrics_names_the_paths_that_it_has() -> None:
    """An embedded server has /metrics only if it is given something that renders them."""
    with HealthServer(report) as server:
        status, _, text = ask(server.address, "/metrics")
    assert (status, text) == (404, '{"error": "not found: use /health, /live, /ready"}\n')


def test_an_address_that_cannot_be_used_names_the_option() -> None:
    """The error is raised before anything listens."""
    with pytest.raises(ConfigurationError, match=r"^--health: 'x' is not an address"), health_server(report, "x"):
        pass


@pytest.mark.slow
def test_a_long_body_is_compressed_if_the_client_accepts_that() -> None:
    """A scrape of many partitions is a tenth of its size."""
    long = b"marshal_x 1\n" * 10_000
    with HealthServer(report, metrics=lambda: long) as server:
        assert ask(server.address, "/metrics")[2].encode() == long
        connection = http.client.HTTPConnection(server.address, timeout=WITHIN_S)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        packed = answer.read()
        assert answer.getheader("Content-Encoding") == "gzip"
        connection.close()
    assert gzip.decompress(packed) == long
    assert len(packed) < len(long) / 10


def test_the_tables_of_the_page_are_the_definitions() -> None:
    """`make dashboards` writes them."""
    page = metrics_tables.PAGE.read_text(encoding="utf-8")
    assert metrics_tables.with_tables(page) == page
    assert {name for name in metrics_tables.tables() if f"metrics of {name}," not in page} == set()


def test_the_names_of_the_tables_are_those_of_a_scrape() -> None:
    """Each instrument is recorded once, and the scrape has exactly the names that the tables and alerts use."""
    kinds = (metrics.metrics, metrics.outbox_metrics, metrics.coordinator_metrics)
    with prometheus_metrics() as render:
        for kind in kinds:
            for instrument in vars(kind()).values():
                for record in ("add", "set", "record"):
                    with suppress(AttributeError):  # an instrument has one of them
                        getattr(instrument, record)(1, {})
        found = {name for name in samples(render().decode()) if name.startswith("marshal_")}
    own = {definition.name for definition in DEFINITIONS}
    assert {name for name in metrics_tables.exposed_names() if name not in own} == {
        name for name in found if not name.endswith("_created")
    }
