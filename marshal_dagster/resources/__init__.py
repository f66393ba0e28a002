"""Dagster resources: Kafka connections, claiming, reading the coordination log, Spark Connect, outbox."""
