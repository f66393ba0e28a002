"""Jobs with which an operator manages the group from Dagster's launchpad."""

from jobs.flights import GROUP, TOPIC
from marshal_dagster.jobs.admin import (
    build_import_positions_job,
    build_pause_job,
    build_reprocess_range_job,
    build_resume_job,
    build_retry_job,
    build_revoke_job,
    build_set_position_job,
)

pause_flights_job = build_pause_job(name="pause_flights", group=GROUP)
resume_flights_job = build_resume_job(name="resume_flights", group=GROUP)
set_flights_position_job = build_set_position_job(name="set_flights_position", group=GROUP, topic=TOPIC)
import_flights_positions_job = build_import_positions_job(name="import_flights_positions", group=GROUP, topic=TOPIC)
reprocess_flights_range_job = build_reprocess_range_job(name="reprocess_flights_range", group=GROUP, topic=TOPIC)
retry_flights_plans_job = build_retry_job(name="retry_flights_plans", group=GROUP, topic=TOPIC)
revoke_flights_job = build_revoke_job(name="revoke_flights", group=GROUP, topic=TOPIC)
