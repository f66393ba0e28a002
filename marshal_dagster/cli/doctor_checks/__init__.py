"""What `doctor` looks at, a module for each theme.

Each check takes what was looked up and gives findings; looking is done by `kafka/` and `coordination/`. Nothing here
writes to a topic or imports Spark.
"""
