"""Reads and writes the coordination log: claims, heartbeats, plans, commits, group settings and snapshots.

`marshal_dagster.protocol` has the rules, and this package carries them out. It imports `protocol`, `kafka` and
confluent-kafka, and does not know batches, Spark or Dagster.

- `CoordinationLog` is the log itself: Kafka here, in memory in `marshal_dagster.testing`.
- `Rationalizer` reads the log and applies each record to the world state.
- `Claimer` and `RangeClaimer` append records for one instance. They take the results from the world state.
- `Heartbeats` keeps the claims of one claimer alive.

No class applies its own records directly: it appends them, reads them back, and looks at the state.
"""
