"""Script for `spark-submit`: convert the orders of the submitted batch to JSON files."""

import sys

from dagster_pipes import open_dagster_pipes
from pyspark.sql import SparkSession

from marshal_dagster.batches.submitted import submitted_batch
from marshal_dagster.sinks import FileSink

with open_dagster_pipes() as pipes, submitted_batch() as batch:
    spark = SparkSession.builder.getOrCreate()
    orders = batch.read(spark).selectExpr("partition", "offset", "CAST(value AS STRING) AS text")
    outcome = batch.write(FileSink(sys.argv[1], format="json"), orders)
    pipes.log.info("batch %s: %d ranges were written", batch.batch_id, len(outcome.taken))
    pipes.report_custom_message({"ranges": len(outcome.taken), "spark": spark.version})
    spark.stop()
