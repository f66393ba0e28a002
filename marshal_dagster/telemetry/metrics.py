"""OpenTelemetry's instruments, where OpenTelemetry is in use in this process.

Who uses it has imported its API by the time a batch is claimed; where nobody has, nothing is imported, made or counted.
No attribute is a partition, a run or an instance: their number has no bound. Log lines name them.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider

FLUSH_TIMEOUT_S: Final = 5.0
"""How long the end of an op waits for its metrics to be handed over."""

_API: Final = "opentelemetry.metrics"
_PROVIDER_NAMED: Final = "OTEL_PYTHON_METER_PROVIDER"
"""By this variable the API finds a provider that nobody has set."""
_PHASE_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_LEASE_BOUNDS_S: Final = (0.0, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 60, 90, 120, 300, 600, 1800, 3600, 7200)

logger = logging.getLogger(__name__)

Instruments = TypeVar("Instruments")


class Metrics:
    """The instruments of claims and batches. Every measurement has the attributes `group` and `topic`."""

    def __init__(self, meter: "Meter") -> None:
        self.claims = meter.create_counter(
            "marshal.claims", "{claim}", "Partitions or ranges asked for, by what came of it, and claims lost."
        )
        self.commits = meter.create_counter("marshal.commits", "{commit}", "Commits sent, by what came of each.")
        self.refused = meter.create_counter(
            "marshal.records.refused", "{record}", "Own records that the rules refused, by type and reason."
        )
        self.lease_remaining = meter.create_histogram(
            "marshal.lease.remaining",
            "s",
            "What was left of the shortest lease when heartbeats or commits had come back, before they renewed it.",
            explicit_bucket_boundaries_advisory=_LEASE_BOUNDS_S,
        )
        self.batches = meter.create_counter("marshal.batches", "{batch}", "Batches, by what each came to.")
        self.offsets = meter.create_counter(
            "marshal.offsets", "{offset}", "Offsets in batches, by what became of them."
        )
        self.phase_duration = meter.create_histogram(
            "marshal.phase.duration",
            "s",
            "How long each phase of a batch took.",
            explicit_bucket_boundaries_advisory=_PHASE_BOUNDS_S,
        )
        self.batch_lag = meter.create_gauge(
            "marshal.batch.lag", "{offset}", "What a batch left unread in the partitions that it claimed."
        )
        self.lag = meter.create_gauge("marshal.lag", "{offset}", "What the group has not read of the whole topic.")


class OutboxMetrics:
    """The instruments of an outbox's harvester. Every measurement has the attribute `outbox`, its name."""

    def __init__(self, meter: "Meter") -> None:
        self.published = meter.create_counter("marshal.outbox.published", "{row}", "Rows published.")
        self.parked = meter.create_counter("marshal.outbox.parked", "{row}", "Rows set aside.")
        self.refused = meter.create_counter(
            "marshal.outbox.refused", "{refusal}", "Refusals of rows and topics, each before another try."
        )
        self.sessions = meter.create_counter("marshal.outbox.sessions", "{session}", "Sessions of harvesting begun.")
        self.backlog = meter.create_gauge("marshal.outbox.backlog", "{row}", "Rows that wait, as the leader sees them.")
        self.backlog_age = meter.create_gauge(
            "marshal.outbox.backlog.age", "s", "For how long the oldest of them waits."
        )


class CoordinatorMetrics:
    """The instruments of a group coordinator. Every measurement but `groups` has the attribute `group`."""

    def __init__(self, meter: "Meter") -> None:
        self.groups = meter.create_gauge("marshal.coordinator.groups", "{group}", "Groups that this process leads.")
        self.members = meter.create_gauge("marshal.coordinator.members", "{member}", "Members of a group led here.")
        self.assigned = meter.create_gauge("marshal.coordinator.assigned", "{partition}", "Partitions assigned in it.")
        self.rebalances = meter.create_counter(
            "marshal.coordinator.rebalances", "{rebalance}", "Rebalances, by what came of each."
        )
        self.moved = meter.create_counter("marshal.coordinator.moved", "{partition}", "Partitions that changed hands.")
        self.failed = meter.create_counter("marshal.coordinator.failed", "{member}", "Members that no longer answered.")


def metrics() -> Metrics | None:
    """Give the instruments of claims, or None where OpenTelemetry is not in use in this process. Never raises."""
    return _made(Metrics)


def outbox_metrics() -> OutboxMetrics | None:
    """Give the instruments of an outbox, or None as `metrics`. Never raises."""
    return _made(OutboxMetrics)


def coordinator_metrics() -> CoordinatorMetrics | None:
    """Give the instruments of a coordinator, or None as `metrics`. Never raises."""
    return _made(CoordinatorMetrics)


def record_lag(group: str, topic: str, lag: int) -> None:
    """Note how many offsets of `topic` the group has not read in all."""
    instruments = metrics()
    if instruments is not None:
        instruments.lag.set(lag, {"group": group, "topic": topic})


def flush(timeout_s: float = FLUSH_TIMEOUT_S) -> None:
    """Have the metrics handed over now, as far as that takes no longer than `timeout_s`. Never raises.

    A run's process may end without the handlers by which a provider does so by itself.
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
    # In a thread: an exporter that tries again does not always keep to the time.
    thread = threading.Thread(target=_quietly, args=(force, timeout_s), name="flush metrics", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning("the metrics could not be handed over within %g s; the run goes on without", timeout_s)


def _is_in_use() -> bool:
    return _API in sys.modules or bool(os.environ.get(_PROVIDER_NAMED))


def _made(kind: "Callable[[Meter], Instruments]") -> Instruments | None:
    if not _is_in_use():
        return None
    try:
        from opentelemetry.metrics import get_meter_provider

        instruments: Instruments = _of(kind, get_meter_provider())
    except Exception as error:  # noqa: BLE001 - whatever it is, work goes on without metrics
        _log_disabled_metrics(type(error).__name__)
        return None
    return instruments


@lru_cache(maxsize=3)  # of one provider, all kinds
def _of(kind: "Callable[[Meter], Instruments]", provider: "MeterProvider") -> Instruments:
    return kind(provider.get_meter("marshal_dagster", version("marshal-dagster")))


@lru_cache(maxsize=1)
def _log_disabled_metrics(why: str) -> None:
    logger.warning("OpenTelemetry is in use here, but there are no metrics of marshal-dagster: %s", why)


def _quietly(force: Callable[..., Any], timeout_s: float) -> None:
    try:
        force(timeout_millis=timeout_s * 1_000)
    except Exception as error:  # noqa: BLE001 - every exporter raises its own
        # Its text may name the collector's address, and some carry a token in that.
        logger.warning("the metrics could not be handed over: %s", type(error).__name__)
