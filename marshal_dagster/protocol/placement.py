"""Which coordination partition a topic's records lie in (PROTOCOL.md 1)."""

from functools import lru_cache
from hashlib import md5


@lru_cache(maxsize=65_536)
def coordination_partition(topic: str, coordination_partitions: int) -> int:
    """Give the coordination partition, 0 to `coordination_partitions` - 1, that holds all records of `topic`.

    The first 8 bytes of md5(topic), read as a little-endian unsigned integer, modulo the partition count.
    """
    digest = md5(topic.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") % coordination_partitions
