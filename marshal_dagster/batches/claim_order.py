"""The order in which a batch claims partitions, so that runs that start together try different ones first.

Only the claims decide who holds a partition. The order changes nothing but how many claims are refused.
"""

import random
from collections.abc import Iterable, Mapping


def preferred_partitions(lags: Mapping[int, int], instance: str, most: int | None) -> list[int]:
    """Return partitions in the order in which to claim them: those with the largest lag first.

    Runs that start together would all claim the same partitions. So, if a batch may have only some, lags of the same
    number of binary digits count as equal, and each instance has an order of its own for them.

    Args:
        lags: The number of unread offsets of each partition.
        instance: The instance id of the batch's claims.
        most: How many partitions the batch may have; None for all.

    Returns:
        The partitions of `lags`.
    """
    if most is None:
        return sorted(lags, key=lambda partition: (-lags[partition], partition))
    place = _places(lags, instance, most)
    return sorted(lags, key=lambda partition: (-lags[partition].bit_length(), place[partition // most], partition))


def own_order(partitions: Iterable[int], instance: str, most: int) -> list[int]:
    """Return partitions in this instance's own order, whatever their lags; `most` is how many a batch may have."""
    listed = list(partitions)
    place = _places(listed, instance, most)
    return sorted(listed, key=lambda partition: (place[partition // most], partition))


def _places(partitions: Iterable[int], instance: str, most: int) -> dict[int, float]:
    """Return the place of each block of `most` partitions in the instance's own order.

    Partitions of one block are claimed together, so that another run gets all of a batch or nothing.
    """
    chance = random.Random(instance)  # noqa: S311 - no secret
    return {block: chance.random() for block in sorted({partition // most for partition in partitions})}
