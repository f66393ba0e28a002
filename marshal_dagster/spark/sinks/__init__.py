"""Outputs that take each offset range once per generation, however often it is delivered (PROTOCOL.md 6).

`port` says what a sink is, `files` and `postgres` are two of them; `commits` holds the files' commit log, which needs
no Spark, and `postgres_ranges` what the database's tables say. Imports the standard library, `marshal_dagster.errors`
and `marshal_dagster.protocol`; pyspark and psycopg only inside functions. A frame and its ranges come in from
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
from marshal_dagster.spark.sinks.files import FileSink
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
    "BeforeCommit",
    "FileSink",
    "Intervals",
    "OffsetsRead",
    "PostgresSink",
    "Sink",
    "StoredPosition",
    "StoredRanges",
    "TakenRanges",
    "Verdict",
    "WriteOutcome",
    "check_columns",
    "judge",
    "judge_ranges",
    "refuse_foreign_rows",
    "then_checked",
]
