"""A sensor that finds the stale claims of dead runs of the flights job, and requests the run that reprocesses them."""

from typing import Final

from dagster import DefaultSensorStatus

from jobs.flights import GROUP, reprocess_flights_job
from marshal_dagster.sensors.stale_claims import build_stale_claim_sensor

INTERVAL_S: Final = 5

stale_flights_sensor = build_stale_claim_sensor(
    reprocess_flights_job,
    group=GROUP,
    name="stale_flights",
    minimum_interval_s=INTERVAL_S,
    default_status=DefaultSensorStatus.RUNNING,
)
