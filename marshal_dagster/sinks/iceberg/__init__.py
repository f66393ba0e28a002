"""The sink for Iceberg tables (`marshal_dagster.sinks.IcebergSink`; docs/decisions/0022-iceberg.md)."""
