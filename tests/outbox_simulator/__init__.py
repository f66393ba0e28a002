"""Whole outboxes under faults, on a virtual clock.

The library's own code runs, from `Harvester` down to `PostgresStore`, `KafkaPublisher` and `Elector`. The database, the
brokers, the group's coordinator and the network are simulated, with the scheduler of `tests.simulator`.
"""
