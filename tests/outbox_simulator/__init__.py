"""Whole outboxes under faults, on a virtual clock.

The code is the library's own, from `Harvester` down to `PostgresStore`, `KafkaPublisher` and `Elector`; the database,
the brokers, the group's coordinator and the network are simulated. Scheduling is that of `tests.simulator`.
"""
