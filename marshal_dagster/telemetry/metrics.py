"""The OpenTelemetry instruments of the library.

They exist only if the process uses OpenTelemetry: its API was imported before the first batch, or an environment
variable names a provider. Otherwise nothing is imported or counted. A service that serves its own metrics adds a
provider of its own (`add_provider`); the instruments then record to both.

No attribute is a partition, a run or an instance, because their number is unbounded. Log lines name them.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from marshal_dagster._internal.extras import Extra

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider

FLUSH_TIMEOUT_S: Final = 5.0
"""How long the end of an op waits for the export of its metrics."""

_API: Final = "opentelemetry.metrics"
_PROVIDER_NAMED: Final = "OTEL_PYTHON_METER_PROVIDER"
"""The environment variable by which the API finds a provider if none was set in code."""
_PHASE_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_LEASE_BOUNDS_S: Final = (0.0, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 60, 90, 120, 300, 600, 1800, 3600, 7200)

logger = logging.getLogger(__name__)

Instruments = TypeVar("Instruments")

_added: "Final[list[MeterProvider]]" = []
"""The providers of this process's own."""


class Metrics:
    """The instruments of claims and batches. Each measurement has the attributes `group` and `topic`."""

    def __init__(self, meter: "Meter") -> None:
        self.claims = meter.create_counter(
            "marshal.claims", "{claim}", "Claims of partitions or ranges by outcome, including claims that were lost."
        )
        self.commits = meter.create_counter("marshal.commits", "{commit}", "Commits sent, by outcome.")
        self.refused = meter.create_counter(
            "marshal.records.refused",
            "{record}",
            "Records of this process in the coordination log that the protocol's rules refused, by type and reason.",
        )
        self.lease_remaining = meter.create_histogram(
            "marshal.lease.remaining",
            "s",
            "Remaining time of the shortest lease when heartbeats or commits were read back, before they renewed it.",
            explicit_bucket_boundaries_advisory=_LEASE_BOUNDS_S,
        )
        self.batches = meter.create_counter("marshal.batches", "{batch}", "Batches, by outcome.")
        self.offsets = meter.create_counter(
            "marshal.offsets", "{offset}", "Offsets in batches, by their state at the end of the batch."
        )
        self.phase_duration = meter.create_histogram(
            "marshal.phase.duration",
            "s",
            "Duration of each phase of a batch.",
            explicit_bucket_boundaries_advisory=_PHASE_BOUNDS_S,
        )
        self.batch_lag = meter.create_gauge(
            "marshal.batch.lag", "{offset}", "Unread offsets in the partitions that a batch claimed, after the batch."
        )
        self.lag = meter.create_gauge("marshal.lag", "{offset}", "Unread offsets of the group in the whole topic.")


class OutboxMetrics:
    """The instruments of an outbox harvester. Each measurement has the attribute `outbox`, the outbox's name."""

    def __init__(self, meter: "Meter") -> None:
        self.published = meter.create_counter("marshal.outbox.published", "{row}", "Rows published.")
        self.parked = meter.create_counter(
            "marshal.outbox.parked", "{row}", "Rows set aside because they cannot be published."
        )
        self.refused = meter.create_counter(
            "marshal.outbox.refused",
            "{refusal}",
            "Rejections of rows and topics; each is retried, or its rows are set aside.",
        )
        self.sessions = meter.create_counter("marshal.outbox.sessions", "{session}", "Harvesting sessions started.")
        self.leads = meter.create_gauge("marshal.outbox.leads", "{harvester}", "1 if this process harvests, else 0.")
        self.backlog = meter.create_gauge("marshal.outbox.backlog", "{row}", "Rows that wait to be published.")
        self.backlog_age = meter.create_gauge(
            "marshal.outbox.backlog.age", "s", "Age of the oldest row that waits to be published."
        )
        self.backlog_counted_at = meter.create_gauge(
            "marshal.outbox.backlog.counted.timestamp",
            "s",
            "When this process last counted the backlog, in unix seconds; 0 before the first time.",
        )


class CoordinatorMetrics:
    """The instruments of a group coordinator. All but the first three have the attribute `group`."""

    def __init__(self, meter: "Meter") -> None:
        self.groups = meter.create_gauge("marshal.coordinator.groups", "{group}", "Groups that this process leads.")
        self.partitions = meter.create_gauge(
            "marshal.coordinator.partitions", "{partition}", "Partitions of the coordinator's topics."
        )
        self.led = meter.create_gauge(
            "marshal.coordinator.led", "{partition}", "Partitions of the coordinator's topics that this process leads."
        )
        self.members = meter.create_gauge(
            "marshal.coordinator.members", "{member}", "Members of a group that this process leads."
        )
        self.assigned = meter.create_gauge(
            "marshal.coordinator.assigned", "{partition}", "Partitions assigned to members."
        )
        self.rebalances = meter.create_counter(
            "marshal.coordinator.rebalances", "{rebalance}", "Rebalances, by outcome."
        )
        self.moved = meter.create_counter(
            "marshal.coordinator.moved", "{partition}", "Partitions moved between members."
        )
        self.failed = meter.create_counter(
            "marshal.coordinator.failed", "{member}", "Members removed because they did not answer."
        )


def add_provider(provider: "MeterProvider") -> None:
    """Record the measurements to `provider` too, beside the provider of the process. Call it before the work begins.

    Args:
        provider: A provider of this process's own, such as that of a reader for Prometheus.
    """
    _added.append(provider)


def remove_provider(provider: "MeterProvider") -> None:
    """Create no more instruments of `provider`, which `add_provider` added."""
    _added.remove(provider)


def metrics() -> Metrics | None:
    """Return the instruments of claims and batches; None if this process does not use OpenTelemetry. Never raises."""
    return _made(Metrics)


def outbox_metrics() -> OutboxMetrics | None:
    """Return the instruments of an outbox; None if this process does not use OpenTelemetry. Never raises."""
    return _made(OutboxMetrics)


def coordinator_metrics() -> CoordinatorMetrics | None:
    """Return the instruments of a coordinator; None if this process does not use OpenTelemetry. Never raises."""
    return _made(CoordinatorMetrics)


def record_lag(group: str, topic: str, lag: int) -> None:
    """Set the gauge `marshal.lag` to the number of offsets of `topic` that the group has not read."""
    instruments = metrics()
    if instruments is not None:
        instruments.lag.set(lag, {"group": group, "topic": topic})


def flush(timeout_s: float = FLUSH_TIMEOUT_S) -> None:
    """Export the metrics now, and wait up to `timeout_s` seconds for that. Never raises.

    Without this call the last metrics of a run could be lost, because its process may end without exit handlers.
    """
    if not _is_in_use():
        return
    try:
        from opentelemetry.metrics import get_meter_provider

        force = getattr(get_meter_provider(), "force_flush", None)
    except Exception as error:  # noqa: BLE001 - as above
        _log_disabled_metrics(type(error).__name__)
        return
    if force is None:
        return
    # This runs in a thread, because an exporter that retries may exceed its timeout.
    thread = threading.Thread(target=_quietly, args=(force, timeout_s), name="flush metrics", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning(
            "the metrics could not be exported within %g s, and the run continues without that; check the "
            "OpenTelemetry exporter and its collector",
            timeout_s,
        )


def _is_in_use() -> bool:
    return _API in sys.modules or bool(os.environ.get(_PROVIDER_NAMED))


def _made(kind: "Callable[[Meter], Instruments]") -> Instruments | None:
    if not _is_in_use():
        return None
    try:
        from opentelemetry.metrics import get_meter_provider

        instruments: Instruments = _of(kind, (get_meter_provider(), *_added))
    except ModuleNotFoundError:
        _log_missing_extra()
        return None
    except Exception as error:  # noqa: BLE001 - after any error the work continues without metrics
        _log_disabled_metrics(type(error).__name__)
        return None
    return instruments


@lru_cache(maxsize=3)  # the three classes of instruments of the same providers
def _of(kind: "Callable[[Meter], Instruments]", providers: "tuple[MeterProvider, ...]") -> Instruments:
    meters = [provider.get_meter("marshal_dagster", version("marshal-dagster")) for provider in providers]
    return kind(meters[0] if len(meters) == 1 else cast("Meter", _Meters(meters)))


class _Meters:
    """A meter whose instruments record to the instruments of several meters."""

    def __init__(self, meters: "Sequence[Meter]") -> None:
        self._meters = meters

    def create_counter(self, *definition: Any) -> "_Instruments":  # noqa: ANN401 - as the meter
        return _Instruments([meter.create_counter(*definition) for meter in self._meters])

    def create_gauge(self, *definition: Any) -> "_Instruments":  # noqa: ANN401 - as the meter
        return _Instruments([meter.create_gauge(*definition) for meter in self._meters])

    def create_histogram(self, *definition: Any, **bounds: Any) -> "_Instruments":  # noqa: ANN401 - as the meter
        return _Instruments([meter.create_histogram(*definition, **bounds) for meter in self._meters])


class _Instruments:
    """The instruments of one definition in several meters."""

    def __init__(self, instruments: Sequence[Any]) -> None:
        self._instruments = instruments

    def add(self, amount: float, attributes: Mapping[str, str] | None = None) -> None:
        for instrument in self._instruments:
            instrument.add(amount, attributes)

    def set(self, amount: float, attributes: Mapping[str, str] | None = None) -> None:
        for instrument in self._instruments:
            instrument.set(amount, attributes)

    def record(self, amount: float, attributes: Mapping[str, str] | None = None) -> None:
        for instrument in self._instruments:
            instrument.record(amount, attributes)


@lru_cache(maxsize=1)
def _log_missing_extra() -> None:
    logger.warning("%s is set, but OpenTelemetry is not installed: %s", _PROVIDER_NAMED, Extra.METRICS.command)


@lru_cache(maxsize=1)
def _log_disabled_metrics(why: str) -> None:
    logger.warning(
        "this process uses OpenTelemetry, but there are no metrics of marshal-dagster: %s when its instruments were "
        "created; check the version of OpenTelemetry",
        why,
    )


def _quietly(force: Callable[..., Any], timeout_s: float) -> None:
    try:
        force(timeout_millis=timeout_s * 1_000)
    except Exception as error:  # noqa: BLE001 - each exporter raises its own errors
        # The error's text is not logged: it may contain the collector's address, and that may contain a token.
        logger.warning(
            "the metrics could not be exported: %s; check the OpenTelemetry exporter and its collector",
            type(error).__name__,
        )
