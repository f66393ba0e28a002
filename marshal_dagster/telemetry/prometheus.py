"""The OpenTelemetry instruments of this process in Prometheus' text format, for a service that serves them itself.

OpenTelemetry's reader for Prometheus renders them, so each metric has one definition. A provider that the process has
set up itself receives the same measurements.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

from marshal_dagster._internal.extras import Extra, has_extra, require_extra
from marshal_dagster.telemetry.metrics import add_provider, remove_provider

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider, Observation

_READER_OPTIONS: Final = {"disable_target_info": True, "scope_info_enabled": False}
"""Options of the reader, so that no label names this library as the source. Older versions lack the second."""

Render = Callable[[], bytes]
"""Returns metrics in Prometheus' text format; raises `ConfigurationError` without the extra `prometheus`."""


@contextmanager
def prometheus_metrics() -> Iterator[Render]:
    """Record the instruments of this process for Prometheus while the block runs, and yield what renders them.

    Without the extra `prometheus` nothing is recorded, and each rendering raises `ConfigurationError`. Enter the block
    before the harvester or the coordinator starts.

    Yields:
        A function that returns the present values.

    Example:
        ```python
        with prometheus_metrics() as render, HealthServer(harvester.health, port=8080, metrics=render):
            harvester.run()
        ```
    """
    if not has_extra(Extra.PROMETHEUS):
        yield _render_nothing
        return
    import prometheus_client
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk import metrics as sdk

    known = inspect.signature(PrometheusMetricReader).parameters
    own = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=own)
    registry = own if "registry" in known else prometheus_client.REGISTRY
    options: dict[str, Any] = {**_READER_OPTIONS, "registry": registry}
    reader = PrometheusMetricReader(**{name: value for name, value in options.items() if name in known})
    provider = sdk.MeterProvider([reader], shutdown_on_exit=False)
    lasting = cast("MeterProvider", _LastingProvider(provider))
    add_provider(lasting)
    try:
        yield lambda: prometheus_client.generate_latest(registry)
    finally:
        remove_provider(lasting)
        provider.shutdown()


class _LastingProvider:
    """A provider whose gauges keep their values, because older versions forget a gauge's value after each scrape."""

    def __init__(self, provider: "MeterProvider") -> None:
        self._provider = provider

    def get_meter(self, name: str, version: str) -> "_LastingMeter":
        return _LastingMeter(self._provider.get_meter(name, version))


class _LastingMeter:
    def __init__(self, meter: "Meter") -> None:
        self.create_counter = meter.create_counter
        self.create_histogram = meter.create_histogram
        self._meter = meter

    def create_gauge(self, name: str, unit: str, description: str) -> "_LastingGauge":
        gauge = _LastingGauge()
        self._meter.create_observable_gauge(name, [gauge.observe], unit, description)
        return gauge


class _LastingGauge:
    def __init__(self) -> None:
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, amount: float, attributes: Mapping[str, str] | None = None) -> None:
        self._values[tuple(sorted((attributes or {}).items()))] = amount

    def observe(self, _: object) -> "list[Observation]":
        from opentelemetry.metrics import Observation

        return [Observation(amount, dict(attributes)) for attributes, amount in list(self._values.items())]


def _render_nothing() -> bytes:
    require_extra(Extra.PROMETHEUS, "/metrics")
    return b""
