"""The op that claims partitions of a topic, processes their messages with Spark, and commits.

`claimed_batch` builds the op. `config` has its options and run config. `execution` carries out one execution of it.
Jobs (`marshal_dagster.jobs`) and assets (`marshal_dagster.assets`) are built on this package.
"""
