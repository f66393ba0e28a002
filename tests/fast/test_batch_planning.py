"""Where the owner of a partition starts to read (protocol.md, section 6, "Where to start")."""

import pytest

from marshal_dagster.errors import DataLossError, DataTopicChangedError, StartPositionError
from marshal_dagster.protocol.batch_planning import (
    Position,
    StartPolicy,
    check_incarnation,
    first_offset,
    position,
)
from marshal_dagster.protocol.state import Key, OffsetBounds

TOPIC_ID, OTHER_TOPIC_ID = "T" * 22, "U" * 22
NAME = "orders/3 of group 'etl'"
EXTENT = OffsetBounds(10, 90)


@pytest.mark.parametrize("policy", StartPolicy)
@pytest.mark.parametrize("group_offset", [None, 40])
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("generation", [0, 7])
def test_the_states_offset_comes_first(
    policy: StartPolicy, group_offset: int | None, is_new: bool, generation: int
) -> None:
    """Nobody starts anywhere else than at the state's offset while there is one, not even at what retention took."""
    for offset in (0, 5, 50, 90):
        key = Key(offset=offset, generation=generation)
        assert first_offset(NAME, key, EXTENT, policy, group_offset=group_offset, is_new=is_new) == offset


@pytest.mark.parametrize("policy", StartPolicy)
@pytest.mark.parametrize("group_offset", [None, 40])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_later_generation_without_offset_starts_at_zero(
    policy: StartPolicy, group_offset: int | None, is_new: bool
) -> None:
    """A person named another data topic: what Kafka and the policy say belongs to the one before."""
    key = Key(generation=7)
    assert first_offset(NAME, key, EXTENT, policy, group_offset=group_offset, is_new=is_new) == 0


@pytest.mark.parametrize("policy", StartPolicy)
@pytest.mark.parametrize("is_new", [False, True])
def test_kafkas_offset_comes_before_the_policy(policy: StartPolicy, is_new: bool) -> None:
    """The group's committed offset in Kafka is a start, 0 and one that retention took too."""
    for offset in (0, 5, 40):
        assert first_offset(NAME, Key(), EXTENT, policy, group_offset=offset, is_new=is_new) == offset


@pytest.mark.parametrize("policy", StartPolicy)
def test_a_new_partition_starts_at_zero(policy: StartPolicy) -> None:
    """Whatever the policy: the group has claimed others of that topic before."""
    assert first_offset(NAME, Key(), EXTENT, policy, group_offset=None, is_new=True) == 0


def test_the_policy_comes_last() -> None:
    """At the earliest offset, at the latest, or not at all."""
    starts = {
        policy: first_offset(NAME, Key(), EXTENT, policy, group_offset=None, is_new=False)
        for policy in (StartPolicy.EARLIEST, StartPolicy.LATEST)
    }
    assert starts == {StartPolicy.EARLIEST: 10, StartPolicy.LATEST: 90}
    with pytest.raises(StartPositionError, match="or choose the policy 'earliest' or 'latest'"):
        first_offset(NAME, Key(), EXTENT, StartPolicy.FAIL, group_offset=None, is_new=False)


@pytest.mark.parametrize(
    ("offset", "extent", "expected", "lag"),
    [
        (10, OffsetBounds(10, 90), Position(10, 10, 90), 80),
        (50, OffsetBounds(10, 90), Position(50, 50, 90), 40),
        (90, OffsetBounds(10, 90), Position(90, 90, 90), 0),
        (0, OffsetBounds(0, 0), Position(0, 0, 0), 0),
        (95, OffsetBounds(10, 90), Position(95, 95, 95), 0),
    ],
    ids=str,
)
def test_a_position_within_what_is_there(offset: int, extent: OffsetBounds, expected: Position, lag: int) -> None:
    """Read from the offset to the end; one past the last stable offset waits."""
    for accepted in (False, True):
        found = position(NAME, offset, extent, allow_data_loss=accepted)
        assert (found, found.lag) == (expected, lag)


@pytest.mark.parametrize(
    ("offset", "extent", "expected"),
    [(9, OffsetBounds(10, 90), Position(9, 10, 90)), (0, OffsetBounds(90, 90), Position(0, 90, 90))],
    ids=str,
)
def test_a_position_that_retention_took(offset: int, extent: OffsetBounds, expected: Position) -> None:
    """The offset stays, what is left begins later; without leave to lose messages it is an error that names them."""
    assert position(NAME, offset, extent, allow_data_loss=True) == expected
    with pytest.raises(DataLossError, match=rf"{NAME}: retention deleted messages {offset} to {extent.start} \("):
        position(NAME, offset, extent, allow_data_loss=False)


@pytest.mark.parametrize(
    "key",
    [
        Key(),
        Key(offset=90),
        Key(offset=0, data_topic_id=TOPIC_ID),
        Key(offset=90, data_topic_id=TOPIC_ID),
        Key(data_topic_id=TOPIC_ID),
    ],
    ids=str,
)
def test_the_same_incarnation(key: Key) -> None:
    """A key without an id, or with the cluster's, whose offset the topic has reached."""
    check_incarnation(NAME, key, TOPIC_ID, EXTENT)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (Key(offset=50, data_topic_id=OTHER_TOPIC_ID), f"topic id {OTHER_TOPIC_ID}, the cluster's is {TOPIC_ID}"),
        (Key(data_topic_id=OTHER_TOPIC_ID), f"topic id {OTHER_TOPIC_ID}"),
        (Key(offset=91, data_topic_id=TOPIC_ID), "91 lies beyond the topic's end 90"),
        (Key(offset=91), "91 lies beyond the topic's end 90"),
    ],
    ids=str,
)
def test_another_incarnation(key: Key, said: str) -> None:
    """Another id, or an offset that the topic has not reached: nothing is read until an operator sets the position."""
    with pytest.raises(DataTopicChangedError, match=said) as raised:
        check_incarnation(NAME, key, TOPIC_ID, EXTENT)
    assert str(raised.value).startswith(NAME)
    assert "Nothing is read until an operator sets the position" in str(raised.value)
