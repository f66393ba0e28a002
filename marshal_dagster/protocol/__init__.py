"""The rules of the Marshal protocol: log records go in, and the state or a refusal comes out.

The package imports the standard library and `marshal_dagster.errors` only. It has no I/O, clock, thread, Kafka, Spark
or Dagster. The code that uses a real broker, the in-memory log and the replay command all run these rules. Read the
modules in the order of `docs/reference/protocol.md`: `messages` (section 1), `state` and `staleness` (3), `rules`
(4, 7 and 8.3), `range_set` (8.2), `world` (2, 3 and 5), `snapshots` (5), `leases` and `batch_planning` (6),
`idempotence` (6 and 8.4), `range_choice` (8.4), `open_plans` (6), `replay` (a stored log as text).
"""
