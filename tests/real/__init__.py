"""Tests that use a real Kafka, Spark, Dagster or PostgreSQL. The suite starts these services and stops them by pid."""
