"""Sinks: outputs that store each offset range once per generation, however often it is delivered.

`marshal_dagster.batches` passes a DataFrame and its offset ranges to a sink (protocol.md, section 6).

- `sink`: the `Sink` protocol and helpers that all sinks share.
- `row_writer`: whether Spark's tasks or the run's process write the rows.
- `output_groups`: the rule which consumer groups may write to an output.
- `files.sink`, `database.postgres`, `database.mariadb`, `delta.sink`, `iceberg.sink`, `kafka.sink`: the
  sinks of this library.
- `remote`: the sink of a run whose script alone reaches the output.
- `conformance`: test cases that every sink must pass.
- `files.commit_log`: the commit log of a file output, which does not need Spark.
- `database.sink`, `database.dialect`: the course of a write to any database, and what differs between engines.
- `database.ranges`: the tables that record which ranges a database output has.
- `report`: what a sink reports about its output; `database.maintenance`: the reports of a database, and its vacuum.
- `upsert_keys`, `database.upsert`: tables with one row for each key.
- `delta.table`: access to a Delta table through Spark; `delta.merge`: tables with one row for each key.
- `kafka.notes`: the notes that each transaction to an output topic writes.
- `kafka.records`: conversion of DataFrame rows to Kafka records.
- `kafka.tasks`, `database.task_rows`: writing from Spark's tasks, to Kafka and to PostgreSQL.
- `kafka.arrow_rows`, `database.batch_copy`: Arrow batches as Kafka records and as COPY, in tasks and the driver.
- `source_headers`: headers for output topics that are written at least once.

At module level this package imports the standard library, `marshal_dagster.errors`, `marshal_dagster.protocol` and
parts of `marshal_dagster.kafka` and `marshal_dagster.spark` that need no client. Kafka's client, pyspark and psycopg
are imported inside functions. The package imports each of its names on first use, so a run with one sink does not
load the others.
"""

from typing import TYPE_CHECKING

from marshal_dagster._internal.lazy_names import lazy_names

if TYPE_CHECKING:
    __all__: list[str]
    from marshal_dagster.protocol.idempotence import StoredPosition as StoredPosition
    from marshal_dagster.protocol.idempotence import StoredRanges as StoredRanges
    from marshal_dagster.protocol.idempotence import TakenRanges as TakenRanges
    from marshal_dagster.protocol.idempotence import Verdict as Verdict
    from marshal_dagster.protocol.idempotence import judge as judge
    from marshal_dagster.protocol.idempotence import judge_ranges as judge_ranges
    from marshal_dagster.sinks.database.mariadb import MariaDBSink as MariaDBSink
    from marshal_dagster.sinks.database.postgres import PostgresSink as PostgresSink
    from marshal_dagster.sinks.delta.sink import DeltaSink as DeltaSink
    from marshal_dagster.sinks.delta.table import delta_settings as delta_settings
    from marshal_dagster.sinks.files.sink import FileSink as FileSink
    from marshal_dagster.sinks.iceberg.sink import IcebergSink as IcebergSink
    from marshal_dagster.sinks.kafka.sink import KafkaSink as KafkaSink
    from marshal_dagster.sinks.kafka.sink import NewGeneration as NewGeneration
    from marshal_dagster.sinks.output_groups import OutputGroups as OutputGroups
    from marshal_dagster.sinks.remote import RemoteSink as RemoteSink
    from marshal_dagster.sinks.report import ReportingSink as ReportingSink
    from marshal_dagster.sinks.report import SinkReport as SinkReport
    from marshal_dagster.sinks.report import StoredGeneration as StoredGeneration
    from marshal_dagster.sinks.report import VacuumResult as VacuumResult
    from marshal_dagster.sinks.row_writer import RowWriter as RowWriter
    from marshal_dagster.sinks.sink import BeforeCommit as BeforeCommit
    from marshal_dagster.sinks.sink import Intervals as Intervals
    from marshal_dagster.sinks.sink import OffsetsRead as OffsetsRead
    from marshal_dagster.sinks.sink import Sink as Sink
    from marshal_dagster.sinks.sink import WriteResult as WriteResult
    from marshal_dagster.sinks.sink import check_columns as check_columns
    from marshal_dagster.sinks.sink import checked_after_read as checked_after_read
    from marshal_dagster.sinks.sink import refuse_foreign_rows as refuse_foreign_rows
    from marshal_dagster.sinks.source_headers import with_source_headers as with_source_headers
    from marshal_dagster.sinks.upsert_keys import WriteMode as WriteMode
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "marshal_dagster.protocol.idempotence": (
                "StoredPosition StoredRanges TakenRanges Verdict judge judge_ranges"
            ),
            "marshal_dagster.sinks.database.mariadb": "MariaDBSink",
            "marshal_dagster.sinks.database.postgres": "PostgresSink",
            "marshal_dagster.sinks.delta.sink": "DeltaSink",
            "marshal_dagster.sinks.delta.table": "delta_settings",
            "marshal_dagster.sinks.files.sink": "FileSink",
            "marshal_dagster.sinks.iceberg.sink": "IcebergSink",
            "marshal_dagster.sinks.kafka.sink": "KafkaSink NewGeneration",
            "marshal_dagster.sinks.output_groups": "OutputGroups",
            "marshal_dagster.sinks.remote": "RemoteSink",
            "marshal_dagster.sinks.report": "ReportingSink SinkReport StoredGeneration VacuumResult",
            "marshal_dagster.sinks.row_writer": "RowWriter",
            "marshal_dagster.sinks.sink": (
                "BeforeCommit Intervals OffsetsRead Sink WriteResult check_columns checked_after_read "
                "refuse_foreign_rows"
            ),
            "marshal_dagster.sinks.source_headers": "with_source_headers",
            "marshal_dagster.sinks.upsert_keys": "WriteMode",
        },
    )
