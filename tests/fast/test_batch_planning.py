"""The offset at which the owner of a partition starts to read (protocol.md, section 6, "Where to start")."""

import pytest

from marshal_dagster.errors import DataLossError, StartPositionError
from marshal_dagster.protocol.batch_planning import (
    Position,
    StartPolicy,
    first_offset,
    other_incarnation,
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
    """If the state has an offset, reading starts there, even if retention has deleted that record."""
    for offset in (0, 5, 50, 90):
        key = Key(offset=offset, generation=generation)
        assert first_offset(NAME, key, EXTENT, policy, group_offset=group_offset, is_new=is_new) == offset


@pytest.mark.parametrize("policy", StartPolicy)
@pytest.mark.parametrize("group_offset", [None, 40])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_later_generation_without_offset_starts_at_zero(
    policy: StartPolicy, group_offset: int | None, is_new: bool
) -> None:
    """An operator chose another data topic, so Kafka's group offset and the policy no longer apply."""
    key = Key(generation=7)
    assert first_offset(NAME, key, EXTENT, policy, group_offset=group_offset, is_new=is_new) == 0


@pytest.mark.parametrize("policy", StartPolicy)
@pytest.mark.parametrize("is_new", [False, True])
def test_kafkas_offset_comes_before_the_policy(policy: StartPolicy, is_new: bool) -> None:
    """The group's committed offset in Kafka comes next, even if it is 0 or retention has deleted that record."""
    for offset in (0, 5, 40):
        assert first_offset(NAME, Key(), EXTENT, policy, group_offset=offset, is_new=is_new) == offset


@pytest.mark.parametrize("policy", StartPolicy)
def test_a_new_partition_starts_at_zero(policy: StartPolicy) -> None:
    """A partition that was added after the group first claimed the topic starts at 0, whatever the policy."""
    assert first_offset(NAME, Key(), EXTENT, policy, group_offset=None, is_new=True) == 0


def test_the_policy_comes_last() -> None:
    """The policy starts at the earliest offset or at the latest, or fails."""
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
    """Reading goes from the offset to the end; a position past the last stable offset waits."""
    for accepted in (False, True):
        found = position(NAME, offset, extent, allow_data_loss=accepted)
        assert (found, found.lag) == (expected, lag)


@pytest.mark.parametrize(
    ("offset", "extent", "expected"),
    [(9, OffsetBounds(10, 90), Position(9, 10, 90)), (0, OffsetBounds(90, 90), Position(0, 90, 90))],
    ids=str,
)
def test_a_position_that_retention_took(offset: int, extent: OffsetBounds, expected: Position) -> None:
    """Reading starts at the first record left; without `allow_data_loss` an error names the deleted messages."""
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
    """The topic is the same if the key has no id or the cluster's id, and its offset is not beyond the end."""
    assert other_incarnation(key, TOPIC_ID, EXTENT) is None


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
    """The topic is another one if the id differs, or the offset is beyond the end."""
    assert said in (other_incarnation(key, TOPIC_ID, EXTENT) or "")


def test_another_incarnation_without_ids() -> None:
    """Without an id to compare with, as in a Go group, only an offset beyond the end shows it."""
    assert other_incarnation(Key(offset=50, data_topic_id=OTHER_TOPIC_ID), None, EXTENT) is None
    assert "91 lies beyond" in (other_incarnation(Key(offset=91, data_topic_id=OTHER_TOPIC_ID), None, EXTENT) or "")
