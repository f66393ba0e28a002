"""Find records with wrong timestamps. Senders set timestamps, so some are in the future, 0, or in nanoseconds."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

FUTURE_MS: Final = 3_600_000
"""A timestamp that is more than an hour later than this machine's clock is wrong. New brokers refuse such records."""


def hidden_by_future(topics: "Topics", topic: str, found: Mapping[int, int]) -> dict[int, int]:
    """Return those of the offsets in `found` whose records have a timestamp in the future.

    `Topics.offsets_at` found them. Kafka looks for the first record with a timestamp or a later one. A record with a
    timestamp in the future, or in nanoseconds, matches every time and hides the records after it. Raises as
    `Topics.offsets_at`.
    """
    if not found:
        return {}
    future = topics.offsets_at(topic, found, round(time.time() * 1_000) + FUTURE_MS)
    return {partition: offset for partition, offset in found.items() if future.get(partition) == offset}
