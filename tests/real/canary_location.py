"""A code location in which every secret setting has a value. `test_security` searches where these values appear.

The run writes its first batch to PostgreSQL and Kafka from Spark's tasks, and fails in Spark in the second. Before it
ends it saves the pages of the Spark UI, the arguments of all processes, and the functions of its tasks.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.kafka.clients import check_reachable
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.sinks import KafkaSink, PostgresSink
from marshal_dagster.spark.reader import read_ranges
from tests.real.canaries import arguments_of_processes, functions_kept, seen_on_pages
from tests.session_settings import QUICK_PLANS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = Path(os.environ["TEST_FOLDER"])
PREFIXES = os.environ["TEST_PREFIXES"].split()
"""The prefixes of the variables of more connections, with each of which Spark reads one record."""
OUTPUTS = dict(zip(("MARSHAL_DATA_", "MARSHAL_"), os.environ["TEST_OUTPUTS"].split(), strict=True))
"""The prefixes of the variables of connections, and the topic that tasks with this connection write to."""
SPARK = {
    "spark.master": "local[1]",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.dir": FOLDER.as_uri(),
    **QUICK_PLANS,
}


def _look(spark: "SparkSession") -> None:
    (FOLDER / "pages").write_bytes(seen_on_pages(str(spark.sparkContext.uiWebUrl)))
    (FOLDER / "processes").write_text(arguments_of_processes())


def _work(context: dg.OpExecutionContext, batch: ClaimedBatch, frame: "DataFrame") -> "DataFrame":
    rows = frame.selectExpr("partition", "offset", "cast(value as string) as text")
    if batch.ranges[0].start > 0:
        try:
            rows.selectExpr("raise_error('on purpose')").collect()
        finally:
            _look(frame.sparkSession)
    for prefix in PREFIXES:
        connection = KafkaConnection.from_environment(prefix=prefix)
        check_reachable(connection)
        other = read_ranges(frame.sparkSession, connection.spark_options(), "orders", {0: (0, 1)})
        context.log.info("%r %r", connection, other.collect())
        other.explain(extended=True)
    sink.create_tables(rows.schema)
    for prefix, topic in OUTPUTS.items():
        writer = KafkaSink(KafkaConnection.from_environment(prefix=prefix), topic)
        writer.write(rows.withColumnRenamed("text", "value"), batch.ranges, dict)
    context.log.info("%s %r %r", batch, rows.count(), context.resources.claimer)
    frame.explain(extended=True)
    return rows


kept = ExitStack()
kept.enter_context(functions_kept(FOLDER / "functions"))
sink = PostgresSink(os.environ["TEST_DSN"], "canaries")
work = build_claimed_batch_op(_work, name="work", topic="orders", sink=sink, spark_config=SPARK, max_records=1)
works_then_fails = build_claimed_batch_job(work, name="works_then_fails")

defs = dg.Definitions(
    jobs=[works_then_fails],
    resources={
        "claimer": ClaimerResource(
            connection=KafkaConnectionConfig.from_environment(prefix="MARSHAL_DATA_"),
            coordination_connection=KafkaConnectionConfig.from_environment(),
            group=os.environ["TEST_GROUP"],
            delivery="effectively_once",
        )
    },
)
