"""Name the ways in which a producer chooses the partition of a record. The outbox and the Kafka sink offer them."""

from enum import StrEnum

from marshal_dagster._internal.enums import enum_member


class Partitioner(StrEnum):
    """How a producer chooses the partition of a record by its key, in the names of librdkafka.

    `murmur2` and `murmur2_random` choose as Java clients do, including Spark's writer. Do not change the partitioner of
    a topic while the order of records with the same key matters.
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
        """Return the partitioner with this name.

        Raises:
            ConfigurationError: No partitioner has this name.
        """
        return enum_member(cls, "partitioner", name)
