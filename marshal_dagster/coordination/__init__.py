"""The shell round the rules: a coordination log to append to and read back, and who does it.

It imports `protocol`, `kafka` and confluent-kafka, knows nothing of batches, Spark or Dagster. Records come from
a `CoordinationLog` (Kafka here, in memory in `marshal_dagster.testing`), the `Rationalizer` lets them act on the world
state, the `Claimer` appends on behalf of one instance and asks that state what came of it, `Heartbeats` keeps its
claims alive. Nothing here applies what it wrote: it appends, reads back, and asks.
"""
