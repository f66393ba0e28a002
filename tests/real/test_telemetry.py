"""Metrics of a run on a real Kafka and Spark, with its own heartbeats."""

import time
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from tests.real.test_dagster_runs import MESSAGES, PARTITIONS, Site, _with_session, site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["site"]

INTERVAL_S = 2.0


def test_a_run_is_measured(site: Site, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """When the run has ended, the provider has its claims, heartbeats, commits and phases."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)

    def work(_context: object, _batch: object, frame: "DataFrame") -> None:
        frame.count()
        time.sleep(2 * INTERVAL_S)

    op = build_claimed_batch_op(work, name="work", topic=site.topic, spark_key="spark")
    result = build_claimed_batch_job(op).execute_in_process(
        instance=site.instance,
        resources={"claimer": site.claimer(heartbeat_interval_s=INTERVAL_S), "spark": _with_session(spark)},
    )
    data = reader.get_metrics_data()
    provider.shutdown()

    assert result.success
    assert data is not None
    measured: dict[str, Any] = {
        metric.name: metric.data.data_points for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    assert [point.value for point in measured["marshal.commits"]] == [PARTITIONS]
    assert [point.value for point in measured["marshal.offsets"]] == [MESSAGES]
    leases = {point.attributes["at"]: point for point in measured["marshal.lease.remaining"]}
    assert leases["heartbeat"].count >= 3  # the first one follows the claim
    # The lease that was left before a heartbeat, not after it (1.9). A later heartbeat comes at the soonest
    # 0.7 intervals after the one before it was sent, and some time passes between the two clock readings.
    assert 0 < leases["heartbeat"].min < 1.5 * INTERVAL_S
    phases = {point.attributes["phase"]: point.sum for point in measured["marshal.phase.duration"]}
    assert phases["process"] >= 2 * INTERVAL_S
