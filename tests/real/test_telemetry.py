"""Metrics of a run on a real Kafka and Spark, with its own heartbeats."""

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from marshal_dagster.coordination import heartbeats
from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from tests.conditions import wait_until
from tests.real.test_dagster_runs import MESSAGES, PARTITIONS, Site, _with_session, site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["site"]

INTERVAL_S = 60.0
"""So long that the lease outlasts a process that is stopped for a while."""
BEAT_PART = 0.1
"""The part of the interval after which the heartbeat comes for which the test waits."""
LEAST_LEASE_S = (1.9 - BEAT_PART / 2) * INTERVAL_S
"""More than is left of a lease before that heartbeat, and less than after it."""


def points(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Return the measurements by the name of their instrument."""
    data = reader.get_metrics_data()
    scopes = data.resource_metrics[0].scope_metrics if data is not None and data.resource_metrics else []
    return {metric.name: metric.data.data_points for scope in scopes for metric in scope.metrics}


def least_lease_s(measured: Mapping[str, Any]) -> float:
    """Return the shortest lease that was left before a heartbeat."""
    leases = measured.get("marshal.lease.remaining", [])
    return min((float(point.min) for point in leases if point.attributes["at"] == "heartbeat"), default=math.inf)


def test_a_run_is_measured(site: Site, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """When the run has ended, the provider has its claims, heartbeats, commits and phases."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    for name in ("SHORTEST_PART", "LONGEST_PART"):
        monkeypatch.setattr(heartbeats, name, BEAT_PART)

    def work(_context: object, _batch: object, frame: "DataFrame") -> None:
        began_s = time.monotonic()
        frame.count()
        wait_until(lambda: least_lease_s(points(reader)) < LEAST_LEASE_S, "a heartbeat is measured", pause_s=0.1)
        worked_s.append(time.monotonic() - began_s)

    worked_s: list[float] = []
    op = build_claimed_batch_op(work, name="work", topic=site.topic, spark_key="spark")
    result = build_claimed_batch_job(op).execute_in_process(
        instance=site.instance,
        resources={"claimer": site.claimer(heartbeat_interval_s=INTERVAL_S), "spark": _with_session(spark)},
    )
    measured = points(reader)
    provider.shutdown()

    assert result.success
    assert [point.value for point in measured["marshal.commits"]] == [PARTITIONS]
    assert [point.value for point in measured["marshal.offsets"]] == [MESSAGES]
    assert 0 < least_lease_s(measured) < LEAST_LEASE_S
    phases = {point.attributes["phase"]: point.sum for point in measured["marshal.phase.duration"]}
    assert phases["process"] >= worked_s[0]
