"""Dagster resources.

`claimer` claims partitions for ops and assets, `rationalizer` reads the coordination log for sensors and checks.
`connection` is the configuration of a Kafka cluster. `outbox` and `spark_connect` give access to an outbox and to a
Spark Connect server. `launchpad` keeps the settings of resources out of launchpads.
"""
