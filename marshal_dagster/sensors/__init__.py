"""Sensors that watch the coordination log.

`stale_claims` asks for runs that redo what dead members left, `lag` for runs when much is unread; `run_failure` revokes
what a run held that Dagster says is over. `marshal_dagster.runs.abandoned_work` reads what is left out of the world
state, `_lag_reader` what is unread out of it and the data topic, `_run_history` which runs were asked for out of
Dagster's runs, `_dropped_ranges` what at-most-once runs possibly dropped; `_exhausted_plans` tells what is asked for no
more, `marshal_dagster.runs.abandoned_work` what keeps all runs from claiming, and `_cursor` is what a sensor remembers.
A tick reads what is new in the log, asks Dagster about the runs concerned, and ends: it starts no JVM. What it believes
by the clock is advice; the run that it asks for decides by claiming.
"""

from marshal_dagster.runs.abandoned_work import AbandonedPartition, abandoned_partitions
from marshal_dagster.sensors._exhausted_plans import (
    AlertHook,
    ExhaustedPlan,
    ExhaustedPlans,
    build_exhausted_plans_check,
)
from marshal_dagster.sensors._run_history import ASKED_TAG, REASON_TAG, STALE_CLAIM
from marshal_dagster.sensors.lag import LAG, LagCursor, build_lag_sensor
from marshal_dagster.sensors.run_failure import build_run_failure_sensors
from marshal_dagster.sensors.stale_claims import Grouping, StaleClaimCursor, build_stale_claim_sensor

__all__ = [
    "ASKED_TAG",
    "LAG",
    "REASON_TAG",
    "STALE_CLAIM",
    "AbandonedPartition",
    "AlertHook",
    "ExhaustedPlan",
    "ExhaustedPlans",
    "Grouping",
    "LagCursor",
    "StaleClaimCursor",
    "abandoned_partitions",
    "build_exhausted_plans_check",
    "build_lag_sensor",
    "build_run_failure_sensors",
    "build_stale_claim_sensor",
]
