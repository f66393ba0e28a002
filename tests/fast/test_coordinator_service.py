"""How a coordinator's process is, and what it measures, without a broker."""

import time
from collections.abc import Iterator

import pytest
from opentelemetry import metrics as api
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from marshal_dagster.coordinator.group import Event, Happening
from marshal_dagster.coordinator.measuring import Measuring
from marshal_dagster.coordinator.service import Coordinator
from marshal_dagster.errors import UnavailableError
from marshal_dagster.health import IDLE_AFTER_S
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.telemetry import metrics


@pytest.fixture
def coordinator() -> Coordinator:
    """One that has not begun."""
    return Coordinator(KafkaConnection(bootstrap_servers="127.0.0.1:1"))


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    """What is measured."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(api, "get_meter_provider", lambda: provider)
    metrics._of.cache_clear()
    yield reader
    metrics._of.cache_clear()


def values(reader: InMemoryMetricReader) -> dict[str, dict[str, float]]:
    """Give what each instrument has come to, by the values of its attributes."""
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name.removeprefix("marshal.coordinator."): {
            "/".join(map(str, (point.attributes or {}).values())): getattr(point, "value", 0.0)
            for point in metric.data.data_points
        }
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }


def test_a_coordinator_that_stands_by_is_healthy(coordinator: Coordinator) -> None:
    """It leads nothing."""
    told = coordinator.health()
    assert told.pop("idle_s") < 5
    assert told == {
        "healthy": True,
        "role": "standby",
        "partitions": 0,
        "groups": 0,
        "members": 0,
        "failure": None,
        "failing_s": 0.0,
    }


def test_a_coordinator_that_hangs_is_not(coordinator: Coordinator) -> None:
    """Its thread has done nothing for longer than any wait of its own takes."""
    coordinator._alive_at_s = time.monotonic() - IDLE_AFTER_S + 5
    assert coordinator.health()["healthy"]
    coordinator._alive_at_s -= 10
    assert not coordinator.health()["healthy"]


def test_a_coordinator_that_fails_is_given_time(coordinator: Coordinator) -> None:
    """Until it succeeds."""
    coordinator._note(UnavailableError("away"))
    coordinator._failing_from_s -= 40
    coordinator._note(UnavailableError("still away"))
    assert (coordinator.health()["healthy"], coordinator.health()["failure"]) == (True, "still away")
    assert not coordinator.health(failing_after_s=30)["healthy"]
    coordinator._note(None)
    assert (coordinator.health()["healthy"], coordinator.health()["failing_s"]) == (True, 0.0)


def test_what_happens_in_groups_is_counted(reader: InMemoryMetricReader) -> None:
    """Rebalances by what came of them, partitions that moved, members that failed."""
    measuring = Measuring()
    measuring.happened("etl", Event(Happening.REBALANCED, moved=7))
    measuring.happened("etl", Event(Happening.REBALANCED, moved=2))
    measuring.happened("etl", Event(Happening.REBALANCE_RETRIED, ("a",)))
    measuring.happened("other", Event(Happening.FAILED, ("a", "b")))
    measuring.happened("other", Event(Happening.JOINED, ("c",)))
    assert values(reader) == {
        "rebalances": {"etl/done": 2, "etl/tried_again": 1},
        "moved": {"etl": 9},
        "failed": {"other": 2},
    }


def test_how_groups_stand_is_noted(reader: InMemoryMetricReader) -> None:
    """A group that another process leads now has nothing here."""
    measuring = Measuring()
    measuring.look({"etl": {"a": frozenset({("t", 0), ("t", 1)}), "b": frozenset({("t", 2)})}, "other": {}})
    assert values(reader) == {
        "groups": {"": 2},
        "members": {"etl": 2, "other": 0},
        "assigned": {"etl": 3, "other": 0},
    }
    measuring.look({"other": {"a": frozenset({("t", 0)})}})
    assert values(reader) == {
        "groups": {"": 1},
        "members": {"etl": 0, "other": 1},
        "assigned": {"etl": 0, "other": 1},
    }
    measuring.end()
    assert values(reader)["assigned"]["other"] == 0


def test_without_opentelemetry_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor asked for."""
    monkeypatch.setattr(metrics, "_is_in_use", lambda: False)
    measuring = Measuring()
    measuring.happened("etl", Event(Happening.REBALANCED, moved=7))
    measuring.look({"etl": {}})
    measuring.end()
    assert measuring._metrics is None
