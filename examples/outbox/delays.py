"""Write the delay of each flight as a PostgreSQL row and an event."""

import os
from typing import TYPE_CHECKING

import dagster as dg
from dagster_pyspark import LazyPySparkResource

import marshal_dagster as marshal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KAFKA = marshal.KafkaConnectionConfig.from_environment()
SPARK = {"spark.master": os.environ.get("DELAYS_SPARK_MASTER", "local[*]")}

events = marshal.OutgoingEvents("delays", key="carrier")
sink = marshal.PostgresSink(os.environ["DELAYS_DSN"], "flight_delays", companion=events)
outbox = marshal.OutboxResource(connection=KAFKA, dsn=dg.EnvVar("DELAYS_DSN"))


@marshal.marshal_asset(
    topic="flights",
    sink=sink,
    spark_key="pyspark",
    max_records=int(os.environ.get("DELAYS_MAX_RECORDS", "20000")),
)
def flight_delays(
    _: dg.AssetExecutionContext, __: marshal.ClaimedBatch, frame: "DataFrame"
) -> "DataFrame":
    """Arrival delay of each flight in minutes; null if it never arrived."""
    parsed = "from_json(string(value), 'carrier STRING, flight INT, arr_delay DOUBLE')"
    return frame.selectExpr("partition", "offset", f"{parsed} AS parsed").select(
        "partition", "offset", "parsed.*"
    )


work = marshal.build_claimed_batch_job(flight_delays)
redo = marshal.build_reprocess_job(flight_delays)
drain = marshal.build_outbox_drain_job()
defs = dg.Definitions(
    assets=[flight_delays],
    asset_checks=[
        marshal.build_claim_checks(flight_delays),
        marshal.build_outbox_check(flight_delays),
    ],
    jobs=[work, redo, drain],
    sensors=[
        marshal.build_stale_claim_sensor(
            redo, group="delays", default_status=dg.DefaultSensorStatus.RUNNING
        ),
        marshal.build_outbox_backlog_sensor(
            drain, default_status=dg.DefaultSensorStatus.RUNNING
        ),
    ],
    resources={
        "claimer": marshal.ClaimerResource(
            connection=KAFKA, group="delays", delivery="effectively_once"
        ),
        "rationalizer": marshal.RationalizerResource(connection=KAFKA),
        "outbox": outbox,
        "pyspark": LazyPySparkResource(
            spark_config=marshal.spark_settings(app_name="delays", extra=SPARK)
        ),
    },
)
