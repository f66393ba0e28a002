"""Elect a leader for each partition of a Kafka topic. The outbox harvester and the coordinator use it.

The members of a consumer group share the partitions of a leader topic. The member that owns a partition leads it, as
long as it reads back the beats that it publishes there. The algorithm is Fast NELI, of the goNELI library; here each
term also has a fencing number. `rules` has the algorithm without I/O, and `elector` runs it over Kafka.
"""
