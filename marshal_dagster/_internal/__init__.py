"""Helpers that several packages share: file locks, processes, ports, Java and jars, PostgreSQL, a health server.

They know nothing of Kafka's protocol, Dagster or Spark. Modules here import only the standard library, psutil, psycopg,
`marshal_dagster.errors` and one another.
"""
