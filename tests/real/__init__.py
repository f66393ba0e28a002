"""Tests on a real Kafka, Spark, Dagster and Postgres, started by the suite and stopped by their pid."""
