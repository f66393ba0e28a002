"""Outputs that take each offset range once per generation, however often it is delivered (protocol.md, section 6).

`sink` says what a sink is, `output_groups` which groups may write to one, `files.sink`, `database.postgres`,
`delta.sink` and `kafka.sink` are some, `conformance` is what each must do. `files.commit_log` holds the files' commit
log, which needs no Spark, `database.postgres_ranges` what the database's tables say, `delta.table` is what Spark does
for a Delta table; `kafka.notes` is what an output topic's transactions say, and `kafka.records` makes records of rows.
`source_headers` is for output topics that are written at least once. Imports the standard library,
`marshal_dagster.errors`, `marshal_dagster.protocol` and, of `marshal_dagster.kafka`, what needs no client; that,
pyspark and psycopg only inside functions. A frame and its ranges come in from `marshal_dagster.batches`.
"""

from marshal_dagster.protocol.idempotence import StoredPosition as StoredPosition
from marshal_dagster.protocol.idempotence import StoredRanges as StoredRanges
from marshal_dagster.protocol.idempotence import TakenRanges as TakenRanges
from marshal_dagster.protocol.idempotence import Verdict as Verdict
from marshal_dagster.protocol.idempotence import judge as judge
from marshal_dagster.protocol.idempotence import judge_ranges as judge_ranges
from marshal_dagster.sinks.database.postgres import PostgresSink as PostgresSink
from marshal_dagster.sinks.delta.sink import DeltaSink as DeltaSink
from marshal_dagster.sinks.delta.table import DELTA as DELTA
from marshal_dagster.sinks.delta.table import delta_settings as delta_settings
from marshal_dagster.sinks.files.sink import FileSink as FileSink
from marshal_dagster.sinks.kafka.sink import KafkaSink as KafkaSink
from marshal_dagster.sinks.kafka.sink import NewGeneration as NewGeneration
from marshal_dagster.sinks.output_groups import OutputGroups as OutputGroups
from marshal_dagster.sinks.sink import BeforeCommit as BeforeCommit
from marshal_dagster.sinks.sink import Intervals as Intervals
from marshal_dagster.sinks.sink import OffsetsRead as OffsetsRead
from marshal_dagster.sinks.sink import Sink as Sink
from marshal_dagster.sinks.sink import WriteResult as WriteResult
from marshal_dagster.sinks.sink import check_columns as check_columns
from marshal_dagster.sinks.sink import checked_after_read as checked_after_read
from marshal_dagster.sinks.sink import refuse_foreign_rows as refuse_foreign_rows
from marshal_dagster.sinks.source_headers import with_source_headers as with_source_headers
