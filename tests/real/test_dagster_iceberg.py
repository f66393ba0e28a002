"""From a claim in a Dagster run to an Iceberg table, on a real Kafka and Spark."""

from typing import TYPE_CHECKING

import dagster as dg
import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, StringType

import marshal_dagster as marshal
from tests.iceberg_tables import MESSAGES_SCHEMA, NAME, IcebergTarget, catalog_name, create_table
from tests.real.test_cli_coordinator import run_cli
from tests.real.test_dagster_runs import MESSAGES, PARTITIONS, Site, _with_session, site

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["site"]
EACH = MESSAGES // PARTITIONS


def test_runs_of_an_op_fill_a_table_and_correct_it(site: Site, spark: "SparkSession") -> None:
    """The op drains the topic in batches. After the positions are set back, a run replaces the rows from there on."""
    source = NestedField(4, "marshal_source", StringType())
    create_table(site.folder, Schema(*MESSAGES_SCHEMA.fields, source))
    target = IcebergTarget(site.folder, source_column="marshal_source")
    sink = marshal.IcebergSink(
        NAME,
        catalog=catalog_name(site.folder),
        catalog_properties=target.properties(),
        source_column="marshal_source",
    )
    version = "first"

    def texts(_: dg.OpExecutionContext, batch: marshal.ClaimedBatch, frame: "DataFrame") -> "DataFrame":  # noqa: ARG001
        return frame.selectExpr("partition", "offset", f"concat('{version} ', string(value)) AS value")

    op = marshal.build_claimed_batch_op(
        texts, name="work", topic=site.topic, sink=sink, max_records=15, spark_key="spark"
    )
    resources = {"claimer": site.claimer(delivery="effectively_once"), "spark": _with_session(spark)}

    def run() -> None:
        job = marshal.build_claimed_batch_job(op)
        assert job.execute_in_process(instance=site.instance, resources=resources).success

    def versions() -> list[tuple[int, int, str]]:
        return [(partition, offset, value.split()[0]) for partition, offset, value in target.found()]

    run()
    assert versions() == [(number, offset, "first") for number in range(PARTITIONS) for offset in range(EACH)]
    snapshots = len(target.table().snapshots())
    run()
    assert len(target.table().snapshots()) == snapshots, "there was nothing to write"

    environment = {
        "MARSHAL_BOOTSTRAP_SERVERS": site.connection.bootstrap_servers,
        "MARSHAL_COORDINATION_TOPIC": site.coordination_topic,
    }
    assert (
        run_cli("position", "reset", site.group, site.topic, "--to-offset", "0=4", "--yes", environment=environment)
        == 0
    )
    version = "second"
    run()
    expected = [(0, offset, "first" if offset < 4 else "second") for offset in range(EACH)]
    assert versions() == expected + [(1, offset, "first") for offset in range(EACH)]
