"""The sink for Iceberg tables (`marshal_dagster.sinks.IcebergSink`; docs/contributing/decisions/0022-iceberg.md)."""
