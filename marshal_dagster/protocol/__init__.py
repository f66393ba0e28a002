"""The rules of the Marshal protocol: records in, world state and refusals out.

It imports the standard library only. No I/O, no clock, no thread, no Kafka, Spark or Dagster. The real broker,
the in-memory log and the replay command drive this same code. Read in the order of `docs/reference/protocol.md`:
`messages` (section 1), `messages` (1), `world` and `rules` (2 to 5 and 7), `leases` (6),
`idempotence` (the offsets of a batch), `snapshots` (a state as records), `replay` (a stored log as text).
"""
