"""Times of records, which are their senders': they lie in the future, are 0, or are in nanoseconds."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

FUTURE_MS: Final = 3_600_000
"""A record whose time is so far ahead of this machine's clock has a wrong one; new brokers refuse such by default."""


def hidden_by_future(topics: "Topics", topic: str, found: Mapping[int, int]) -> dict[int, int]:
    """Return, of the offsets that `Topics.offsets_at` found, those of records whose time lies in the future.

    Kafka finds the first record of a time or later. One with a time in the future, or in nanoseconds, is such a record
    for each time, and hides what comes after it. Raises what `Topics.offsets_at` does.
    """
    if not found:
        return {}
    future = topics.offsets_at(topic, found, round(time.time() * 1_000) + FUTURE_MS)
    return {partition: offset for partition, offset in found.items() if future.get(partition) == offset}
