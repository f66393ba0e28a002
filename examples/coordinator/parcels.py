"""A deployment that shares a topic (docs/tutorials/several-deployments.md).

Each deployment has its own `MARSHAL_MEMBER`. All write to the same folder, each
message once.
"""

import os
from typing import TYPE_CHECKING

import dagster as dg
from dagster_pyspark import LazyPySparkResource

import marshal_dagster as marshal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KAFKA = marshal.KafkaConnectionConfig.from_environment()
SPARK = {
    "spark.master": os.environ.get("PARCELS_SPARK_MASTER", "local[*]"),
    "spark.driver.memory": "512m",
}
RUNNING = dg.DefaultSensorStatus.RUNNING

claimer = marshal.ClaimerResource(
    connection=KAFKA,
    group="parcels",
    delivery="effectively_once",
    heartbeat_interval_s=4,
    member=os.environ["MARSHAL_MEMBER"],
    member_session_s=6,
)
sink = marshal.FileSink(os.environ["PARCELS_FOLDER"])


@marshal.marshal_asset(topic="parcels", sink=sink, spark_key="pyspark")
def parcels(
    _: dg.AssetExecutionContext, __: marshal.ClaimedBatch, frame: "DataFrame"
) -> "DataFrame":
    """Keep each message as text."""
    return frame.selectExpr("partition", "offset", "string(value) AS parcel")


work = marshal.build_claimed_batch_job(parcels)
redo = marshal.build_reprocess_job(parcels)
defs = dg.Definitions(
    assets=[parcels],
    asset_checks=[marshal.build_claim_checks(parcels)],
    jobs=[work, redo],
    sensors=[
        marshal.build_group_member_sensor(work, default_status=RUNNING),
        marshal.build_stale_claim_sensor(redo, group="parcels", default_status=RUNNING),
    ],
    schedules=[
        marshal.build_claimed_batch_schedule(
            work, default_status=dg.DefaultScheduleStatus.RUNNING
        )
    ],
    resources={
        "claimer": claimer,
        "rationalizer": marshal.RationalizerResource(connection=KAFKA),
        "pyspark": LazyPySparkResource(
            spark_config=marshal.spark_settings(app_name="parcels", extra=SPARK)
        ),
    },
)
