"""A code location in which every secret setting has a value. `test_security` searches where these values appear.

The run writes its first batch to PostgreSQL and fails in Spark in the second. Before it ends it saves the pages of the
Spark UI and the arguments of all processes.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import dagster as dg
import psutil

from marshal_dagster.batches import ClaimedBatch
from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.kafka.clients import check_reachable
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.connection import KafkaConnectionConfig
from marshal_dagster.sinks import PostgresSink
from marshal_dagster.spark.reader import read_ranges
from tests.conditions import WITHIN_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FOLDER = Path(os.environ["TEST_FOLDER"])
PREFIXES = os.environ["TEST_PREFIXES"].split()
"""The prefixes of the variables of more connections, with each of which Spark reads one record."""
PAGES = ("environment/", "SQL/", "SQL/execution/?id=0", "jobs/", "stages/", "executors/")
ANSWERS = ("environment", "sql?details=true&planDescription=true", "jobs", "stages")
SPARK = {
    "spark.master": "local[1]",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.dir": FOLDER.as_uri(),
}


def _look(spark: "SparkSession") -> None:
    context = spark.sparkContext
    site = str(context.uiWebUrl)
    addresses = [
        *(f"{site}/{page}" for page in PAGES),
        *(f"{site}/api/v1/applications/{context.applicationId}/{answer}" for answer in ANSWERS),
    ]
    seen = []
    for address in addresses:
        with urlopen(address, timeout=WITHIN_S) as answer:  # noqa: S310 - the URL of the test's own session
            seen.append(answer.read())
    (FOLDER / "pages").write_bytes(b"\n".join(seen))
    arguments = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    (FOLDER / "processes").write_text("\n".join(arguments))


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
    context.log.info("%s %r %r", batch, rows.count(), context.resources.claimer)
    frame.explain(extended=True)
    return rows


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
