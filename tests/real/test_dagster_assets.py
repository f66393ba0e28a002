"""Assets, their topic and their checks on a real Kafka and Spark."""

from typing import TYPE_CHECKING

import dagster as dg
from dagster._core.definitions.observe import observe
from pyspark.sql import functions as f

import marshal_dagster as marshal
from tests.real.test_dagster_runs import MESSAGES, Site, _with_session, site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["site"]


def test_an_asset_from_new_messages_to_its_checks(site: Site, spark: "SparkSession") -> None:
    """A topic is observed, then materialized by batches into files and checked. A second run materializes nothing."""
    sink = marshal.FileSink(site.folder / "out")

    @marshal.marshal_asset(topic=site.topic, sink=sink, max_records=15, spark_key="spark")
    def counted(context: dg.AssetExecutionContext, batch: marshal.ClaimedBatch, frame: "DataFrame") -> "DataFrame":
        """Count the messages of each partition."""
        context.log.info("working on %s", batch.batch_id)
        return frame.groupBy("partition").agg(f.count("*").alias("messages"))

    topic = marshal.build_topic_asset(site.topic)
    checks = marshal.build_claim_checks(counted, max_lag=0)
    resources = {"claimer": site.claimer(delivery="effectively_once"), "spark": _with_session(spark)}

    assert observe([topic], instance=site.instance, resources=resources).success
    (seen,) = site.instance.fetch_observations(topic.key, limit=1).records
    assert seen.asset_observation is not None
    assert seen.asset_observation.metadata["lag"].value == MESSAGES

    result = dg.materialize([counted, checks], instance=site.instance, resources=resources)
    assert [check.passed for check in result.get_asset_check_evaluations()] == [True] * len(marshal.ClaimCheck)
    materialized = site.instance.fetch_materializations(counted.key, limit=9).records
    offsets = [one.asset_materialization.metadata["offsets"].value for one in materialized if one.asset_materialization]
    assert offsets == [10, 15, 15]
    assert {row["messages"] for row in sink.read(spark).groupBy().sum("messages").toDF("messages").collect()} == {
        MESSAGES
    }

    again = dg.materialize([counted], instance=site.instance, resources=resources)
    assert again.success
    assert len(site.instance.fetch_materializations(counted.key, limit=9).records) == 3
