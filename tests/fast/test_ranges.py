"""The arithmetic of ranges: how far plans go, and what an output does with a range (PROTOCOL.md 6)."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marshal_dagster.errors import SinkRefused
from marshal_dagster.protocol.ranges import ClaimedRange, StoredPosition, Verdict, judge, plan_ends

LOG_ID, OTHER_LOG_ID = "L" * 22, "M" * 22
TOPIC_ID, OTHER_TOPIC_ID = "T" * 22, "U" * 22
RANGE = ClaimedRange(
    LOG_ID, "etl", "orders", TOPIC_ID, 3, generation=20, epoch=50, start=100, end=110, first_readable=100
)
STORED = StoredPosition(LOG_ID, TOPIC_ID, generation=20, epoch=50, position=100)

available = st.dictionaries(
    st.integers(0, 50),
    st.tuples(st.integers(0, 1_000), st.integers(0, 300)).map(lambda at: (at[0], at[0] + at[1])),
    max_size=12,
)
"""Position and end offset of some partitions; none is behind its position."""


def lags_left(offered: dict[int, tuple[int, int]], ends: dict[int, int]) -> dict[int, int]:
    """Give what is left to read of each partition after the plans."""
    return {partition: end - ends.get(partition, start) for partition, (start, end) in offered.items()}


# Plans


@given(available)
def test_without_a_limit_plans_go_to_the_end(offered: dict[int, tuple[int, int]]) -> None:
    """Every partition that has something is in, to its end; the others have no plan."""
    assert plan_ends(offered, None) == {n: end for n, (start, end) in offered.items() if end > start}


@given(available, st.integers(0, 4_000))
@example({0: (0, 5), 1: (0, 5)}, 0)
@example({0: (0, 5), 1: (0, 5), 2: (0, 5)}, 1)
def test_the_limit_is_used_up_and_never_passed(offered: dict[int, tuple[int, int]], most: int) -> None:
    """All plans together span `max_records` offsets, or all there are; each is a part of what its partition has."""
    ends = plan_ends(offered, most)

    assert sum(end - offered[n][0] for n, end in ends.items()) == min(most, sum(e - s for s, e in offered.values()))
    assert all(offered[n][0] < end <= offered[n][1] for n, end in ends.items())


@given(available, st.integers(0, 4_000))
def test_the_largest_lags_are_levelled(offered: dict[int, tuple[int, int]], most: int) -> None:
    """Nothing is taken from a partition while another has more than one offset more left to read."""
    ends = plan_ends(offered, most)
    left = lags_left(offered, ends)

    assert all(left[n] >= max(left.values()) - 1 for n in ends)


@given(available, st.integers(0, 4_000))
def test_plans_do_not_depend_on_the_order(offered: dict[int, tuple[int, int]], most: int) -> None:
    """The same partitions in another order get the same plans."""
    assert plan_ends(dict(reversed(offered.items())), most) == plan_ends(offered, most)


@given(st.dictionaries(st.integers(0, 5), st.tuples(st.just(0), st.integers(0, 6)), max_size=4), st.integers(0, 10))
def test_plans_are_those_of_taking_one_by_one(offered: dict[int, tuple[int, int]], most: int) -> None:
    """Levelling comes to the same as taking each next offset from where most is left, the lowest partition first."""
    left = {n: end - start for n, (start, end) in offered.items()}
    for _ in range(min(most, sum(left.values()))):
        largest = max(left, key=lambda n: (left[n], -n))
        left[largest] -= 1

    assert lags_left(offered, plan_ends(offered, most)) == left


# A range


def test_a_range_says_what_it_is() -> None:
    """Its width, its lost part and its words."""
    cut = dataclasses.replace(RANGE, first_readable=104)

    assert (RANGE.width, RANGE.lost, str(RANGE)) == (10, None, "orders/3 [100, 110)")
    assert (cut.width, cut.lost) == (10, (100, 104))
    assert dataclasses.replace(RANGE, first_readable=110).lost == (100, 110)
    assert dataclasses.replace(RANGE, start=0, first_readable=0, end=0).width == 0


@pytest.mark.parametrize(("start", "readable", "end"), [(-1, 0, 1), (5, 4, 9), (5, 10, 9), (5, 5, 4)], ids=str)
def test_no_range_that_cannot_be(start: int, readable: int, end: int) -> None:
    """Start, first readable and end rise, from 0 on."""
    with pytest.raises(ValueError, match="not a range"):
        dataclasses.replace(RANGE, start=start, first_readable=readable, end=end)


# What an output does with it


@pytest.mark.parametrize(
    ("stored", "verdict"),
    [
        (None, Verdict.REPLACE),
        ({}, Verdict.TAKE),
        ({"epoch": 49}, Verdict.TAKE),
        ({"position": 110}, Verdict.SKIP),
        ({"position": 110, "epoch": 49}, Verdict.SKIP),
        ({"generation": 19, "position": 100}, Verdict.REPLACE),
        ({"generation": 19, "position": 110}, Verdict.REPLACE),
        ({"generation": 19, "position": 7}, Verdict.REPLACE),
        ({"generation": 19, "position": 500, "data_topic_id": OTHER_TOPIC_ID}, Verdict.REPLACE),
        ({"epoch": 51}, "fencing token 50 is lower than 51"),
        ({"epoch": 51, "position": 110}, "fencing token 50 is lower than 51"),
        ({"epoch": 51, "generation": 19}, "fencing token 50 is lower than 51"),
        ({"generation": 21}, "generation 20 is older than 21"),
        ({"generation": 21, "position": 110}, "generation 20 is older than 21"),
        ({"coordination_topic_id": OTHER_LOG_ID}, "coordination topic was made anew"),
        ({"coordination_topic_id": OTHER_LOG_ID, "position": 110}, "coordination topic was made anew"),
        ({"coordination_topic_id": OTHER_LOG_ID, "generation": 19}, "coordination topic was made anew"),
        ({"data_topic_id": OTHER_TOPIC_ID}, "data topic was made anew"),
        ({"data_topic_id": OTHER_TOPIC_ID, "position": 110}, "data topic was made anew"),
        ({"position": 99}, "stands at 99, which is neither"),
        ({"position": 101}, "stands at 101, which is neither"),
        ({"position": 109}, "stands at 109, which is neither"),
        ({"position": 111}, "stands at 111, which is neither"),
    ],
    ids=str,
)
def test_what_an_output_does_with_a_range(stored: dict[str, Any] | None, verdict: Verdict | str) -> None:
    """Taken when it follows on, skipped when it is there, else refused with the reason and what to do."""
    holds = None if stored is None else dataclasses.replace(STORED, **stored)
    if isinstance(verdict, Verdict):
        assert judge(holds, RANGE) is verdict
        return
    with pytest.raises(SinkRefused, match=verdict) as raised:
        judge(holds, RANGE)
    assert "orders/3 [100, 110) of group 'etl'" in str(raised.value)


def test_no_two_writers_of_a_plan_can_both_take_it() -> None:
    """Whichever of any number of owners writes first, in whatever order the others come: the rows are there once."""
    owners = [dataclasses.replace(RANGE, epoch=epoch) for epoch in (50, 60, 70)]
    for order in itertools.permutations(owners):
        stored, taken = STORED, 0
        for one in order:
            try:
                verdict = judge(stored, one)
            except SinkRefused:
                continue
            if verdict is Verdict.TAKE:
                taken += 1
                stored = StoredPosition(LOG_ID, TOPIC_ID, one.generation, one.epoch, one.end)
        assert taken == 1
