"""The deployable code location: it only combines definitions. Loading it needs neither Kafka nor Java."""

from dagster import Definitions
from dagster_pyspark import LazyPySparkResource

from jobs.flights import (
    GROUP,
    flights_asset,
    flights_checks,
    flights_job,
    flights_schedule,
    reprocess_flights_job,
)
from jobs.operators import (
    import_flights_positions_job,
    pause_flights_job,
    reprocess_flights_range_job,
    resume_flights_job,
    retry_flights_plans_job,
    revoke_flights_job,
    set_flights_position_job,
)
from jobs.settings import CONNECTION, COORDINATION_TOPIC, HEARTBEAT_INTERVAL_S, SPARK_MASTER
from marshal_dagster.resources.claimer import ClaimerResource
from marshal_dagster.resources.launchpad import configured_in_code
from marshal_dagster.resources.rationalizer import RationalizerResource
from marshal_dagster.spark.session import spark_settings
from sensors.stale_claims import stale_flights_sensor

defs = Definitions(
    assets=[flights_asset],
    asset_checks=[flights_checks],
    jobs=[
        flights_job,
        reprocess_flights_job,
        pause_flights_job,
        resume_flights_job,
        set_flights_position_job,
        import_flights_positions_job,
        reprocess_flights_range_job,
        retry_flights_plans_job,
        revoke_flights_job,
    ],
    schedules=[flights_schedule],
    sensors=[stale_flights_sensor],
    resources={
        "claimer": ClaimerResource(
            connection=CONNECTION,
            coordination_topic=COORDINATION_TOPIC,
            group=GROUP,
            heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
            delivery="effectively_once",
        ),
        "rationalizer": RationalizerResource(connection=CONNECTION, coordination_topic=COORDINATION_TOPIC),
        "pyspark": configured_in_code(
            LazyPySparkResource(spark_config=spark_settings(app_name="flights", extra={"spark.master": SPARK_MASTER}))
        ),
    },
)
