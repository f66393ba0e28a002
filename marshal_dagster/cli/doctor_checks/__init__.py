"""The checks of `doctor`, one module for each theme.

Each check returns findings (see `finding`) about what `kafka/` and `coordination/` read. Nothing here writes to a topic
or imports Spark.
"""
