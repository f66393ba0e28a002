"""Outputs that take each offset range once per generation, however often it is delivered (protocol.md, section 6).

`sink` says what a sink is, `files.sink`, `database.postgres`, `delta.sink` and `kafka.sink` are some, `conformance` is
what each must do. `files.commit_log` holds the files' commit log, which needs no Spark, `database.postgres_ranges` what
the database's tables say, `delta.table` is what Spark does for a Delta table; `kafka.notes` is what an output topic's
transactions say, and `kafka.records` makes records of rows. `source_headers` is for output topics that are written at
least once. Imports the standard library, `marshal_dagster.errors`, `marshal_dagster.protocol` and, of
`marshal_dagster.kafka`, what needs no client; that, pyspark and psycopg only inside functions. A frame and its ranges
come in from `marshal_dagster.batches`.
"""

from marshal_dagster.protocol.idempotence import StoredPosition, StoredRanges, TakenRanges, Verdict, judge, judge_ranges
from marshal_dagster.sinks.database.postgres import PostgresSink
from marshal_dagster.sinks.delta.sink import DeltaSink
from marshal_dagster.sinks.delta.table import DELTA, delta_settings
from marshal_dagster.sinks.files.sink import FileSink
from marshal_dagster.sinks.kafka.sink import KafkaSink, NewGeneration
from marshal_dagster.sinks.sink import (
    BeforeCommit,
    Intervals,
    OffsetsRead,
    Sink,
    WriteResult,
    check_columns,
    checked_after_read,
    refuse_foreign_rows,
)
from marshal_dagster.sinks.source_headers import with_source_headers

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
    "WriteResult",
    "check_columns",
    "checked_after_read",
    "delta_settings",
    "judge",
    "judge_ranges",
    "refuse_foreign_rows",
    "with_source_headers",
]
