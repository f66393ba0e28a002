"""Everything that uses Spark: sessions, reading exact offset ranges, the jobs of a batch, and decoding.

Batches (`marshal_dagster.batches`) pass in offset ranges, and get DataFrames for the user's function. This package
imports pyspark inside functions only, so a process without a JVM can import all of it. It calls no layer above it.
"""
