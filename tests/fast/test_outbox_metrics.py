"""A harvester's metrics, read back with OpenTelemetry's SDK."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from marshal_dagster._internal.postgres import Database
from marshal_dagster.errors import UnavailableError
from marshal_dagster.outbox import metrics as outbox_metrics
from marshal_dagster.outbox.harvest import HarvestCounts
from marshal_dagster.outbox.metrics import metrics_recorded
from marshal_dagster.outbox.schema import OutboxRegistration, OutboxTables
from marshal_dagster.outbox.status import OutboxStatus
from marshal_dagster.telemetry import metrics
from tests.conditions import wait_until

COUNTED_AT = "backlog.counted.timestamp"
TABLES = OutboxTables(Database("postgresql://127.0.0.1:1/db"), "billing")


class Meters:
    """A meter provider that keeps the measurements and counts its flushes."""

    def __init__(self) -> None:
        """Create a provider without measurements."""
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider([self.reader])
        self.flushes = 0
        self.provider.force_flush = self._flush  # type: ignore[method-assign]
        self._found: dict[str, Any] = {}

    def _flush(self, timeout_millis: float = 0.0) -> bool:
        del timeout_millis
        self.flushes += 1
        return True

    def values(self) -> dict[str, Any]:
        """Return the newest value of each instrument. Check that its only attribute is the outbox's name."""
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for metric in resource.scope_metrics[0].metrics:
                (point,) = metric.data.data_points
                assert dict(point.attributes or {}) == {"outbox": "billing"}
                self._found[metric.name.removeprefix("marshal.outbox.")] = getattr(point, "value", None)
        return self._found


class FakeOutboxInspector:
    """A backlog that counts its queries. With `fails` each query fails."""

    requested = 0
    closed = 0
    fails = False

    def __init__(self, tables: OutboxTables) -> None:
        """Check which outbox it belongs to."""
        assert tables is TABLES

    def status(self) -> OutboxStatus:
        """Return the outbox's status, or fail."""
        type(self).requested += 1
        if self.fails:
            raise UnavailableError("away")
        return OutboxStatus(OutboxRegistration("billing", "u", 1, 1, "h"), 12, 3.5, 1, None)

    def close(self) -> None:
        """Count the call."""
        type(self).closed += 1


@pytest.fixture
def backlog(monkeypatch: pytest.MonkeyPatch) -> type[FakeOutboxInspector]:
    """Replace the backlog of the database."""
    backlog = type("OwnBacklog", (FakeOutboxInspector,), {})
    monkeypatch.setattr(outbox_metrics, "OutboxInspector", backlog)
    monkeypatch.setattr(outbox_metrics, "COUNT_EACH_S", 0.01)
    return backlog


@pytest.fixture
def meters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meters]:
    """Turn OpenTelemetry on, with a separate provider."""
    meters = Meters()
    monkeypatch.setattr(api, "get_meter_provider", lambda: meters.provider)
    yield meters
    meters.provider.shutdown()


def test_what_a_harvester_does_is_counted(meters: Meters, backlog: type[FakeOutboxInspector]) -> None:
    """Counts are recorded once, from the start of the block to its end, and flushed. Earlier counts are left out."""
    counts = HarvestCounts(published=100, sessions=1)
    with metrics_recorded(TABLES, counts, lambda: False):
        counts.published += 5
        counts.sessions += 1
        wait_until(lambda: meters.values().get("published") == 5, "five records are counted")
        counts.published += 2
        counts.parked += 3
        counts.refused += 4
    assert meters.values() == {"published": 7, "parked": 3, "refused": 4, "sessions": 1, "leads": 0, COUNTED_AT: 0}
    assert (meters.flushes, backlog.requested, backlog.closed) == (1, 0, 1)


@pytest.mark.slow
def test_the_leader_measures_the_backlog_now_and_then(
    meters: Meters, backlog: type[FakeOutboxInspector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the leader queries rows and age, and not at each turn."""
    leads, turns = [False], [0]

    def takes_turn() -> bool:
        turns[0] += 1
        return leads[0]

    with metrics_recorded(TABLES, HarvestCounts(), takes_turn):
        wait_until(lambda: turns[0] > 3, "the harvester has taken turns")
        assert backlog.requested == 0
        leads[0] = True
        wait_until(lambda: backlog.requested > 0, "the backlog was queried")
        wait_until(lambda: turns[0] > 10, "the harvester has taken more turns")
        assert backlog.requested == 1
        wait_until(lambda: "backlog.age" in meters.values(), "the backlog was recorded")
        counted = dict.fromkeys(["published", "parked", "refused", "sessions"], 0)
        assert meters.values().pop(COUNTED_AT) > 0
        assert {**meters.values(), COUNTED_AT: 1} == {
            **counted,
            "leads": 1,
            "backlog": 12,
            "backlog.age": 3.5,
            COUNTED_AT: 1,
        }
        monkeypatch.setattr(outbox_metrics, "LOOK_EACH_S", 0.01)
        wait_until(lambda: backlog.requested > 1, "the backlog was queried again")


def test_a_backlog_that_cannot_be_counted_is_seen(
    meters: Meters, backlog: type[FakeOutboxInspector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last count stays, so its time shows that it is old: a lock of the whole table would look like no backlog."""
    monkeypatch.setattr(outbox_metrics, "LOOK_EACH_S", 0.01)
    now_s = [1_700_000_000.0]
    monkeypatch.setattr(outbox_metrics, "_now_s", lambda: now_s[0])
    leads = [False]
    with metrics_recorded(TABLES, HarvestCounts(), lambda: leads[0]):
        wait_until(lambda: meters.values().get(COUNTED_AT) == 0, "nothing was counted yet")
        leads[0] = True
        wait_until(lambda: meters.values()[COUNTED_AT] == 1_700_000_000.0, "the backlog was counted")
        backlog.fails = True
        now_s[0] += 600
        requested = backlog.requested
        wait_until(lambda: backlog.requested > requested + 1, "it was queried again")
        assert meters.values()[COUNTED_AT] == 1_700_000_000.0
        leads[0] = False
        wait_until(lambda: meters.values()["leads"] == 0, "it stands by")
        assert meters.values()[COUNTED_AT] == 1_700_000_000.0


def test_who_leads_no_more_reports_no_backlog(meters: Meters, backlog: type[FakeOutboxInspector]) -> None:
    """Otherwise the backlog that a former leader saw last would look like one that does not drain."""
    leads = [True]
    with metrics_recorded(TABLES, HarvestCounts(), lambda: leads[0]):
        wait_until(lambda: meters.values().get("backlog.age") == 3.5, "the leader reports the backlog")
        leads[0] = False
        wait_until(lambda: meters.values()["leads"] == 0, "it reports that it stands by")
        assert (meters.values()["backlog"], meters.values()["backlog.age"]) == (0, 0.0)
        requested = backlog.requested
        leads[0] = True
        wait_until(lambda: backlog.requested > requested, "the backlog is queried at once when it leads again")


def test_a_database_that_is_away_stops_no_counting(
    meters: Meters, backlog: type[FakeOutboxInspector], caplog: pytest.LogCaptureFixture
) -> None:
    """While the database is unavailable, counts are still recorded, and no warning is logged."""
    backlog.fails = True
    counts = HarvestCounts()
    with metrics_recorded(TABLES, counts, lambda: True):
        wait_until(lambda: backlog.requested > 0, "the backlog was queried")
        counts.published = 4
        wait_until(lambda: meters.values().get("published") == 4, "four records are counted")
    assert [record.levelname for record in caplog.records if record.levelno > 10] == []


def test_without_opentelemetry_nothing_is_measured(
    backlog: type[FakeOutboxInspector], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without OpenTelemetry there is no thread, no connection and no flush."""
    monkeypatch.setattr(metrics, "_is_in_use", lambda: False)
    monkeypatch.setattr(outbox_metrics, "flush", lambda: pytest.fail("flushed"))
    monkeypatch.setattr(threading, "Thread", lambda **_: pytest.fail("a thread was made"))
    with metrics_recorded(TABLES, HarvestCounts(), lambda: True):
        pass
    assert (backlog.requested, backlog.closed) == (0, 0)


def test_both_kinds_of_metrics_have_instruments_of_their_own(meters: Meters) -> None:
    """Claims and outboxes have separate instruments, and each is created once."""
    claims, outbox = metrics.metrics(), metrics.outbox_metrics()
    assert (type(claims), type(outbox)) == (metrics.Metrics, metrics.OutboxMetrics)
    assert metrics.metrics() is claims
    assert metrics.outbox_metrics() is outbox
    assert meters.values() == {}
