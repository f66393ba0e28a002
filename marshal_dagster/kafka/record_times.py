"""Find records with wrong timestamps. Senders set timestamps, so some are in the future, 0, or in nanoseconds."""

import time
from collections.abc import Collection, Iterator, Mapping
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


def record_ages(
    topics: "Topics", topic: str, places: Collection[tuple[int, int]], now_ms: int
) -> dict[tuple[int, int], int]:
    """Return about how old the record at each place is, in ms; the true age is at most a sixth more.

    It needs DESCRIBE on the topic and reads no record. It searches for the largest age at which the record is still not
    older, with a few look-ups of offsets by time. Records with a timestamp in the future hide those after them.

    Args:
        topics: The cluster of the topic.
        topic: The data topic.
        places: Partitions and offsets, each of a record that the topic has.
        now_ms: The present time in unix ms.

    Raises:
        AuthorizationError: This user may not describe the topic.
        UnavailableError: Kafka does not answer.
    """
    bounds = dict.fromkeys(places, (0, len(_AGES_MS)))
    while searched := {place: sum(at) // 2 for place, at in bounds.items() if at[0] < at[1]}:
        for middle in sorted(set(searched.values())):
            here = [place for place, at in searched.items() if at == middle]
            first = topics.offsets_at(topic, {partition for partition, _ in here}, now_ms - _AGES_MS[middle])
            for place in here:
                partition, offset = place
                low, high = bounds[place]
                is_older = first.get(partition, offset + 1) > offset
                bounds[place] = (middle + 1, high) if is_older else (low, middle)
    return {place: _AGES_MS[low - 1] if low else 0 for place, (low, _) in bounds.items()}


def _ages() -> Iterator[int]:
    age_ms = 500.0
    while age_ms < _OLDEST_MS:
        yield int(age_ms)
        age_ms *= 1.15


_OLDEST_MS: Final = 400 * 86_400_000
_AGES_MS: Final = tuple(_ages())
"""The ages that the search distinguishes, each 15 % more than the one before."""
