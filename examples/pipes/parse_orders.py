"""Read the batch of a run with Spark, and write it to the output that the run names."""

from dagster_pipes import open_dagster_pipes

from marshal_dagster import (
    FileSink,
    KafkaConnection,
    spark_settings,
    start_session,
    submitted_batch,
)

with open_dagster_pipes() as pipes:
    spark = start_session(spark_settings(app_name="parse orders"))
    with submitted_batch(pipes, KafkaConnection.from_environment()) as batch:
        orders = batch.read(spark).selectExpr(
            "partition", "offset", "CAST(value AS STRING) AS text"
        )
        batch.write(FileSink(batch.output, format="json"), orders)
        batch.metadata["spark"] = spark.version
    spark.stop()
