"""What each tool counts as unread in a data partition."""

import pytest

from marshal_dagster.assets.topics import PartitionProgress
from marshal_dagster.cli import position
from marshal_dagster.cli.world_view import DataTopicEnds, LagUnknownReason, unread_in
from marshal_dagster.protocol.state import Key, OffsetBounds, Phase, Range
from marshal_dagster.protocol.unread_records import UnreadRecords, unread_records
from marshal_dagster.sensors import _lag_reader

TOPIC_ID, OTHER_ID = "A" * 22, "B" * 22
DONE = Phase.DONE
CASES = [
    (Key(), (10, 30), (10, 20, 0, 0)),
    (Key(offset=30), (10, 30), (30, 0, 20, 0)),
    (Key(offset=31), (10, 30), None),
    (Key(offset=4), (10, 30), (10, 20, 0, 6)),
    (Key(offset=12, ranges=(Range(12, 15, DONE), Range(20, 25, DONE))), (10, 30), (15, 10, 5, 0)),
    (Key(offset=12, ranges=(Range(12, 15, Phase.PLANNED), Range(20, 25, Phase.CLAIMED))), (10, 30), (12, 18, 2, 0)),
    (Key(offset=4, ranges=(Range(4, 8, Phase.PLANNED), Range(8, 25, DONE))), (20, 30), (25, 5, 5, 4)),
    (Key(offset=4, ranges=(Range(6, 8, DONE), Range(22, 25, DONE))), (20, 30), (20, 7, 0, 14)),
    (Key(offset=12, ranges=(Range(25, 40, DONE),)), (10, 30), (12, 13, 2, 0)),
    (Key(offset=12, data_topic_id=OTHER_ID), (10, 30), None),
]


def seen_by_cli(key: Key, at: OffsetBounds, *, is_go: bool = False) -> UnreadRecords | LagUnknownReason:
    """Return what `status`, `top` and `lag` show."""
    return unread_in(DataTopicEnds(TOPIC_ID, {0: at}), 0, key, is_go=is_go)


def shown_position(key: Key, at: OffsetBounds, *, is_go: bool = False) -> position.Position:
    """Return what `position get` shows."""
    return position.Position("orders", 0, key, position.TopicOffsets(TOPIC_ID, {0: at}), is_go)


@pytest.mark.parametrize(("key", "at", "expected"), CASES)
def test_what_is_unread(key: Key, at: tuple[int, int], expected: tuple[int, ...] | None) -> None:
    """The first unread offset, the number of unread ones, the margin before it, and what was deleted."""
    found = unread_records(key, TOPIC_ID, OffsetBounds(*at), is_go=False)
    assert expected == (None if found is None else (found.first, found.records, found.margin, found.deleted))


def test_a_partition_that_no_record_names_is_unread_from_its_beginning() -> None:
    """Its position is the first offset that the topic has."""
    assert unread_records(None, TOPIC_ID, OffsetBounds(10, 30), is_go=False) == UnreadRecords(10, 20, 0, 0)


@pytest.mark.parametrize(("key", "at", "expected"), [case for case in CASES if case[2] and case[0].offset is not None])
def test_each_tool_shows_the_same_lag(key: Key, at: tuple[int, int], expected: tuple[int, ...]) -> None:
    """Done ranges are read, and deleted offsets cannot be read any more: in commands, checks, sensors and metrics."""
    bounds = OffsetBounds(*at)
    of_sensor = _lag_reader._position(key, is_claimed=False, max_attempts=5)
    unread = _lag_reader._unread(0, of_sensor, bounds)
    seen = seen_by_cli(key, bounds)
    assert isinstance(seen, UnreadRecords)
    assert {
        "status": seen.records,
        "position get": shown_position(key, bounds).lag,
        "asset": PartitionProgress(0, *at, key).lag,
        "sensor": 0 if unread is None else unread.records,
    } == dict.fromkeys(("status", "position get", "asset", "sensor"), expected[1])


def test_go_consumers_record_no_id_of_the_topic() -> None:
    """In their groups the position counts whatever id an earlier member has recorded, in each tool."""
    key, at = Key(offset=12, data_topic_id=OTHER_ID), OffsetBounds(10, 30)
    expected = UnreadRecords(12, 18, 2, 0)
    assert unread_records(key, TOPIC_ID, at, is_go=True) == seen_by_cli(key, at, is_go=True) == expected
    assert seen_by_cli(key, at) is LagUnknownReason.OTHER_TOPIC
    of_go, of_native = shown_position(key, at, is_go=True), shown_position(key, at)
    assert (of_go.lag, of_go.is_of_deleted_topic) == (18, False)
    assert (of_native.lag, of_native.is_of_deleted_topic) == (None, True)
