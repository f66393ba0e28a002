"""Outputs that take each offset range once per generation, however often it is delivered (PROTOCOL.md 6).

`port` says what a sink is, `files`, `postgres`, `delta` and `kafka` are some, `conformance` is what each must do.
`commits` holds the files' commit log, which needs no Spark, `postgres_ranges` what the database's tables say,
`delta_table` is what Spark does for a Delta table; `kafka_notes` is what an output topic's transactions say, and
`kafka_records` makes records of rows. `headers` is for output topics that are written at least once.
Imports the standard library, `marshal_dagster.errors`, `marshal_dagster.protocol` and, of `marshal_dagster.kafka`, what
needs no client; that, pyspark and psycopg only inside functions. A frame and its ranges come in from
`marshal_dagster.delivery`.
"""

from marshal_dagster.protocol.ranges import (
    StoredPosition,
    StoredRanges,
    TakenRanges,
    Verdict,
    judge,
    judge_ranges,
)
from marshal_dagster.spark.sinks.delta import DeltaSink
from marshal_dagster.spark.sinks.delta_table import DELTA, delta_settings
from marshal_dagster.spark.sinks.files import FileSink
from marshal_dagster.spark.sinks.headers import with_source_headers
from marshal_dagster.spark.sinks.kafka import KafkaSink, NewGeneration
from marshal_dagster.spark.sinks.port import (
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Sink,
    WriteOutcome,
    check_columns,
    refuse_foreign_rows,
    then_checked,
)
from marshal_dagster.spark.sinks.postgres import PostgresSink

__all__ = [
    "DELTA",
    "BeforeCommit",
    "DeltaSink",
    "FileSink",
    "Intervals",
    "KafkaSink",
    "NewGeneration",
    "OffsetsRead",
    "PostgresSink",
    "Sink",
    "StoredPosition",
    "StoredRanges",
    "TakenRanges",
    "Verdict",
    "WriteOutcome",
    "check_columns",
    "delta_settings",
    "judge",
    "judge_ranges",
    "refuse_foreign_rows",
    "then_checked",
    "with_source_headers",
]
