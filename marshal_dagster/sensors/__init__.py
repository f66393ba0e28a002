"""Factories of Dagster sensors that watch a group.

- `stale_claims`: requests runs that repeat the work which dead members left.
- `lag`: requests runs if many messages are unread, or old ones are.
- `run_failure`: revokes the claims of runs that failed or were canceled.
- `group_membership`: registers this code location with a coordinator.
- `outbox_backlog`: requests runs that publish the rows of an outbox.

Modules with `_` are their helpers: the lag (`_lag_reader`), earlier runs (`_run_history`), ranges that at-most-once
runs possibly dropped (`_dropped_ranges`), exhausted plans (`_exhausted_plans`) and the cursor (`_cursor`). A tick reads
new records of the coordination log, queries Dagster for the runs concerned, and ends. It starts no JVM. A sensor only
requests runs. Whether a claim is stale is decided when the run claims.
"""
