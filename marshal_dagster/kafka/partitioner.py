"""Which partition a record goes to."""

from enum import StrEnum

from marshal_dagster._internal.enums import enum_member


class Partitioner(StrEnum):
    """Which partition a record goes to by its key, as Kafka's client library (librdkafka) names the ways.

    Those of `murmur2` are what clients in Java do, Spark's writer among them. It must stay the same
    for as long as the order of keys matters.
    """

    MURMUR2_RANDOM = "murmur2_random"
    MURMUR2 = "murmur2"
    CONSISTENT_RANDOM = "consistent_random"
    CONSISTENT = "consistent"
    FNV1A_RANDOM = "fnv1a_random"
    FNV1A = "fnv1a"
    RANDOM = "random"

    @classmethod
    def of(cls, name: str) -> "Partitioner":
        """Give the one of this name. Raises `ConfigurationError`."""
        return enum_member(cls, "partitioner", name)
