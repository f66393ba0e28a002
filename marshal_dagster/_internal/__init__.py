"""Helpers that several packages share: file locks, processes, ports, Java and jars, PostgreSQL, a health server.

They do not depend on Kafka, Dagster or Spark. Modules here import only the standard library, psutil, psycopg,
`marshal_dagster.errors` and one another.
"""
