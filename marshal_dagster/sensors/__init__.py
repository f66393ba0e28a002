"""Sensors that watch the coordination log.

`stale_claims` requests runs that redo what dead members left, `lag` runs when much is unread; `run_failure` revokes
what a run held that Dagster reports as over. `marshal_dagster.runs.abandoned_work` finds what is left in the world
state and what keeps all runs from claiming, `_lag_reader` what is unread, `_run_history` which runs were requested
before, `_dropped_ranges` what at-most-once runs possibly dropped, `_exhausted_plans` what is requested no more;
`_cursor` is what a sensor remembers. A tick reads what is new in the log, asks Dagster about the runs concerned, and
ends: it starts no JVM. What it concludes by the clock is advice; the run that it requests decides by claiming.
"""
