"""Which responses count as answers when the offsets of many partitions are queried."""

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from marshal_dagster.kafka import group_offsets
from marshal_dagster.kafka.offsets import NONE_AT, _offset_of

TIME_MS = 1_700_000_000_000


class Answer(TopicPartition):
    """An answer with an error. Only the client library can set the error of a `TopicPartition`."""

    error: KafkaError | None = KafkaError(KafkaError.LEADER_NOT_AVAILABLE)


def test_an_offset_is_an_answer() -> None:
    """An offset is an answer. For a query by time, "no record is that recent" is one too."""
    assert _offset_of(TopicPartition("t", 0, 7), OFFSET_END, 0, {}) == 7
    assert _offset_of(TopicPartition("t", 0, 0), OFFSET_BEGINNING, 0, {}) == 0
    assert _offset_of(TopicPartition("t", 0, NONE_AT), TIME_MS, NONE_AT, {}) == NONE_AT
    assert _offset_of(TopicPartition("t", 0, 7), 7, NONE_AT, {0: 8}) == 7


@pytest.mark.parametrize(
    ("answer", "at", "least"),
    [
        (Answer("t", 0, 7), OFFSET_END, 0),
        (TopicPartition("t", 0, OFFSET_END), OFFSET_END, 0),
        (TopicPartition("t", 0, OFFSET_BEGINNING), OFFSET_BEGINNING, 0),
        (TopicPartition("t", 0, TIME_MS), TIME_MS, NONE_AT),
    ],
    ids=["error", "no end", "no beginning", "left as it was asked"],
)
def test_what_was_not_reported_is_no_answer(answer: TopicPartition, at: int, least: int) -> None:
    """An unanswered query is an error.

    The client library leaves the query in place, where a time looks like an offset.
    """
    with pytest.raises(KafkaException):
        _offset_of(answer, at, least, {0: 7})


def test_committed_offsets_go_in_requests_of_limited_size() -> None:
    """The client's time for a request grows with the square of its partitions."""
    places = [TopicPartition("orders", number, number) for number in range(2 * group_offsets.AT_ONCE + 1)]
    parts = list(group_offsets._parts(places))

    assert [len(part) for part in parts] == [group_offsets.AT_ONCE, group_offsets.AT_ONCE, 1]
    assert [place.partition for part in parts for place in part] == list(range(2 * group_offsets.AT_ONCE + 1))
