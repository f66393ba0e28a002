"""Spark at the edge of the house: sessions, reading exact offset ranges, a batch's jobs, and the sinks.

Imports `marshal_dagster.errors`, `marshal_dagster.protocol`, `marshal_dagster._internal.java`, psutil and the standard
library; pyspark and psycopg are imported inside functions only, so that a process without a JVM can import all of this.
Offset ranges come in from `marshal_dagster.batches`; DataFrames go to the user's function, its result to a sink, and
nothing calls back up.
"""
