"""Times of records, which senders set: some are in the future, 0, or in nanoseconds."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

FUTURE_MS: Final = 3_600_000
"""A time that is further ahead of this machine's clock is wrong; new brokers refuse such records by default."""


def hidden_by_future(topics: "Topics", topic: str, found: Mapping[int, int]) -> dict[int, int]:
    """Return, of the offsets that `Topics.offsets_at` found, those of records whose time is in the future.

    Kafka finds the first record of a time or later. A record with a time in the future, or in nanoseconds, matches
    every time, and hides the records after it. Raises what `Topics.offsets_at` does.
    """
    if not found:
        return {}
    future = topics.offsets_at(topic, found, round(time.time() * 1_000) + FUTURE_MS)
    return {partition: offset for partition, offset in found.items() if future.get(partition) == offset}
