"""The contract of every snapshot topic; the topic in Kafka runs the same tests."""

from abc import ABC, abstractmethod

import pytest

from marshal_dagster.coordination.snapshots import SnapshotTopic
from marshal_dagster.errors import TopicNotFoundError
from marshal_dagster.protocol.snapshots import Record
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import MemorySnapshotTopic
from tests.conditions import WITHIN_S

ROWS = [Record(b"a", b"1"), Record(b"b", b"2"), Record(b"a", None), Record(b"c", b"")]


class SnapshotTopicPort(ABC):
    """The tests. `topic` is empty and has two partitions."""

    @pytest.fixture
    @abstractmethod
    def topic(self) -> SnapshotTopic:
        """Return an empty topic with two partitions."""

    def test_an_empty_topic_has_nothing_to_read(self, topic: SnapshotTopic) -> None:
        """The bounds of an empty partition are equal, and a read of it returns at once."""
        assert topic.bounds([0, 1]) == {0: OffsetBounds(0, 0), 1: OffsetBounds(0, 0)}
        assert topic.read(topic.bounds([0, 1]), WITHIN_S) == {0: [], 1: []}

    def test_what_was_appended_is_read_in_order(self, topic: SnapshotTopic) -> None:
        """Each partition returns its keys and values unchanged, including deletions."""
        topic.append(0, ROWS)
        topic.append(1, ROWS[:1])
        bounds = topic.bounds([0, 1])
        assert bounds == {0: OffsetBounds(0, 4), 1: OffsetBounds(0, 1)}
        read = topic.read(bounds, WITHIN_S)
        assert {number: [tuple(row) for row in rows] for number, rows in read.items()} == {
            0: [(b"a", b"1"), (b"b", b"2"), (b"a", None), (b"c", b"")],
            1: [(b"a", b"1")],
        }

    def test_only_what_was_requested_is_read(self, topic: SnapshotTopic) -> None:
        """A read ends at the given offset. The next one may be of any range, including an earlier one."""
        topic.append(0, ROWS)
        for start, end in ((1, 3), (0, 1), (3, 4), (2, 2)):
            assert len(topic.read({0: OffsetBounds(start, end)}, WITHIN_S)[0]) == end - start

    def test_appending_nothing_is_nothing(self, topic: SnapshotTopic) -> None:
        """Appending no records changes nothing."""
        topic.append(1, [])
        assert topic.bounds([1]) == {1: OffsetBounds(0, 0)}

    def test_a_partition_that_is_not_there_is_missing(self, topic: SnapshotTopic) -> None:
        """A topic with fewer partitions than the coordination topic raises TopicNotFoundError."""
        with pytest.raises(TopicNotFoundError):
            topic.bounds([0, 2])

    def test_a_closed_topic_can_be_used_again(self, topic: SnapshotTopic) -> None:
        """A closed topic can be used again, because `close` only releases connections."""
        topic.append(0, ROWS[:1])
        for _ in range(2):
            topic.close()
            assert len(topic.read(topic.bounds([0]), WITHIN_S)[0]) == 1


class TestMemorySnapshotTopic(SnapshotTopicPort):
    """Run the tests against the topic in memory."""

    @pytest.fixture
    def topic(self) -> SnapshotTopic:
        """Return a topic with two partitions."""
        return MemorySnapshotTopic(2)

    def test_compaction_leaves_offsets_as_they_are(self) -> None:
        """Compaction keeps the offset of the last record of each key, and removes deleted keys."""
        topic = MemorySnapshotTopic(1)
        topic.append(0, [Record(b"a", b"1"), Record(b"b", b"1"), Record(b"b", b"2"), Record(b"a", None)])
        topic.compact()
        assert topic.bounds([0]) == {0: OffsetBounds(0, 4)}
        assert topic.read({0: OffsetBounds(2, 3)}, WITHIN_S) == {0: [(b"b", b"2")]}
        assert topic.read({0: OffsetBounds(0, 4)}, WITHIN_S) == {0: [(b"b", b"2")]}
