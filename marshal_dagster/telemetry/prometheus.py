"""The OpenTelemetry instruments of this process in Prometheus' text format, for a service that serves them itself.

OpenTelemetry's reader for Prometheus renders them, so each metric has one definition. A provider that the process has
set up itself receives the same measurements.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from marshal_dagster._internal.extras import Extra, has_extra, require_extra
from marshal_dagster.telemetry.metrics import add_provider, remove_provider

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
    from opentelemetry.sdk.metrics import MeterProvider

    known = inspect.signature(PrometheusMetricReader).parameters
    own = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=own)
    registry = own if "registry" in known else prometheus_client.REGISTRY
    options: dict[str, Any] = {**_READER_OPTIONS, "registry": registry}
    reader = PrometheusMetricReader(**{name: value for name, value in options.items() if name in known})
    provider = MeterProvider([reader], shutdown_on_exit=False)
    add_provider(provider)
    try:
        yield lambda: prometheus_client.generate_latest(registry)
    finally:
        remove_provider(provider)
        provider.shutdown()


def _render_nothing() -> bytes:
    require_extra(Extra.PROMETHEUS, "/metrics")
    return b""
