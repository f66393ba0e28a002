"""Check the arithmetic of ranges: the ends of plans, and what a sink does with a range (protocol.md, section 6)."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange, plan_ends
from marshal_dagster.protocol.idempotence import StoredPosition, TakenRanges, Verdict, judge, judge_ranges

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
"""The position and the end offset of some partitions; no position is above its end."""


def lags_left(offered: dict[int, tuple[int, int]], ends: dict[int, int]) -> dict[int, int]:
    """Return the number of unread offsets of each partition after its plan."""
    return {partition: end - ends.get(partition, start) for partition, (start, end) in offered.items()}


# Plans


@pytest.mark.slow
@given(available)
def test_without_a_limit_plans_go_to_the_end(offered: dict[int, tuple[int, int]]) -> None:
    """Every partition with unread offsets has a plan to its end; the others have no plan."""
    assert plan_ends(offered, None) == {n: end for n, (start, end) in offered.items() if end > start}


@pytest.mark.slow
@given(available, st.integers(0, 4_000))
@example({0: (0, 5), 1: (0, 5)}, 0)
@example({0: (0, 5), 1: (0, 5), 2: (0, 5)}, 1)
def test_the_limit_is_used_up_and_never_passed(offered: dict[int, tuple[int, int]], most: int) -> None:
    """All plans together have `max_records` offsets, or all available ones; each plan is within its partition."""
    ends = plan_ends(offered, most)

    assert sum(end - offered[n][0] for n, end in ends.items()) == min(most, sum(e - s for s, e in offered.values()))
    assert all(offered[n][0] < end <= offered[n][1] for n, end in ends.items())


@pytest.mark.slow
@given(available, st.integers(0, 4_000))
def test_the_largest_lags_are_levelled(offered: dict[int, tuple[int, int]], most: int) -> None:
    """A partition gets no offset while another one has at least two unread offsets more."""
    ends = plan_ends(offered, most)
    left = lags_left(offered, ends)

    assert all(left[n] >= max(left.values()) - 1 for n in ends)


@pytest.mark.slow
@given(available, st.integers(0, 4_000))
def test_plans_do_not_depend_on_the_order(offered: dict[int, tuple[int, int]], most: int) -> None:
    """The order of the partitions does not change their plans."""
    assert plan_ends(dict(reversed(offered.items())), most) == plan_ends(offered, most)


few = st.dictionaries(st.integers(0, 5), st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4)


@pytest.mark.slow
@given(few, st.integers(0, 10))
def test_plans_are_those_of_taking_one_by_one(partitions: dict[int, tuple[int, int]], most: int) -> None:
    """The result is that of a loop which takes each next offset from the partition with the most unread offsets.

    Of equal ones it takes the lowest partition. Unread offsets count to the log's end, which may be above the end of
    what is available.
    """
    offered = {n: (0, width) for n, (width, _) in partitions.items()}
    log_ends = {n: width + more for n, (width, more) in partitions.items()}
    taken = dict.fromkeys(partitions, 0)
    for _ in range(min(most, sum(width for width, _ in partitions.values()))):
        open_ones = [n for n, (width, _) in partitions.items() if taken[n] < width]
        taken[max(open_ones, key=lambda n: (log_ends[n] - taken[n], -n))] += 1

    assert plan_ends(offered, most, log_ends) == {n: width for n, width in taken.items() if width}


# A range


def test_a_range_says_what_it_is() -> None:
    """A range has a width, a lost part and a text."""
    cut = dataclasses.replace(RANGE, first_readable=104)

    assert (RANGE.width, RANGE.lost, str(RANGE)) == (10, None, "orders/3 [100, 110)")
    assert (cut.width, cut.lost) == (10, (100, 104))
    assert dataclasses.replace(RANGE, first_readable=110).lost == (100, 110)
    assert dataclasses.replace(RANGE, start=0, first_readable=0, end=0).width == 0


@pytest.mark.parametrize(("start", "readable", "end"), [(-1, 0, 1), (5, 4, 9), (5, 10, 9), (5, 5, 4)], ids=str)
def test_no_range_that_cannot_be(start: int, readable: int, end: int) -> None:
    """Start, first readable offset and end must be in order, from 0 on."""
    with pytest.raises(ValueError, match="invalid range"):
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
        ({"coordination_topic_id": OTHER_LOG_ID}, "coordination topic was deleted and re-created"),
        ({"coordination_topic_id": OTHER_LOG_ID, "position": 110}, "coordination topic was deleted and re-created"),
        ({"coordination_topic_id": OTHER_LOG_ID, "generation": 19}, "coordination topic was deleted and re-created"),
        ({"data_topic_id": OTHER_TOPIC_ID}, "data topic was deleted and re-created"),
        ({"data_topic_id": OTHER_TOPIC_ID, "position": 110}, "data topic was deleted and re-created"),
        ({"position": 99}, "is at position 99, which is neither"),
        ({"position": 101}, "is at position 101, which is neither"),
        ({"position": 109}, "is at position 109, which is neither"),
        ({"position": 111}, "is at position 111, which is neither"),
    ],
    ids=str,
)
def test_what_an_output_does_with_a_range(stored: dict[str, Any] | None, verdict: Verdict | str) -> None:
    """A range is taken if it follows, skipped if it is present, and otherwise refused, with reason and remedy."""
    holds = None if stored is None else dataclasses.replace(STORED, **stored)
    if isinstance(verdict, Verdict):
        assert judge(holds, RANGE) is verdict
        return
    with pytest.raises(SinkRejectedError, match=verdict) as raised:
        judge(holds, RANGE)
    assert "orders/3 [100, 110) of group 'etl'" in str(raised.value)


def test_no_two_writers_of_a_plan_can_both_take_it() -> None:
    """Whichever owner writes first, and in whatever order the others follow, the rows are stored once."""
    owners = [dataclasses.replace(RANGE, epoch=epoch) for epoch in (50, 60, 70)]
    for order in itertools.permutations(owners):
        stored, taken = STORED, 0
        for one in order:
            try:
                verdict = judge(stored, one)
            except SinkRejectedError:
                continue
            if verdict is Verdict.TAKE:
                taken += 1
                stored = StoredPosition(LOG_ID, TOPIC_ID, one.generation, one.epoch, one.end)
        assert taken == 1


def test_a_position_alone_takes_no_ranges_in_any_order() -> None:
    """A sink that keeps only a position refuses them, whatever it holds."""
    for stored in (None, STORED, dataclasses.replace(STORED, position=110)):
        with pytest.raises(SinkRejectedError, match="keeps only a position"):
            judge(stored, dataclasses.replace(RANGE, in_any_order=True))


# What an output that knows its ranges does with one


def one(start: int, end: int, **others: Any) -> ClaimedRange:  # noqa: ANN401 - any field
    """Return a range that may come in any order."""
    values: dict[str, Any] = {"start": start, "end": end, "first_readable": start, "in_any_order": True, **others}
    return dataclasses.replace(RANGE, **values)


def whole(start: int, end: int, **others: Any) -> ClaimedRange:  # noqa: ANN401 - any field
    """Return a range of a group whose members claim whole partitions."""
    return one(start, end, in_any_order=False, **others)


def holding(*taken: ClaimedRange) -> TakenRanges:
    """Return the state of a sink that has taken these ranges."""
    held = TakenRanges()
    for each in taken:
        held.add(each)
    return held


def verdict_on(held: TakenRanges, wanted: ClaimedRange) -> Verdict:
    """Return the verdict on a range."""
    return judge_ranges(held.beside(wanted), wanted)


AHEAD = (one(100, 110), one(130, 140, epoch=90), one(110, 120))
"""The range [120, 130) is missing."""


@pytest.mark.parametrize(
    ("taken", "wanted", "verdict"),
    [
        ((), one(300, 310), Verdict.REPLACE),
        (AHEAD, one(120, 130), Verdict.TAKE),
        (AHEAD, one(122, 125), Verdict.TAKE),
        (AHEAD, one(50, 60), Verdict.TAKE),
        (AHEAD, one(900, 999), Verdict.TAKE),
        (AHEAD, one(120, 130, epoch=3), Verdict.TAKE),
        (AHEAD, one(100, 110), Verdict.SKIP),
        (AHEAD, one(110, 120, epoch=3), Verdict.SKIP),
        (AHEAD, one(130, 140, epoch=99), Verdict.SKIP),
        (AHEAD, one(115, 115), Verdict.SKIP),
        (AHEAD, one(125, 125), Verdict.SKIP),
        (AHEAD, one(100, 120), r"the output holds \[100, 110\) of the same generation, which overlaps"),
        (AHEAD, one(100, 109), r"the output holds \[100, 110\) of the same generation, which overlaps"),
        (AHEAD, one(101, 110), r"the output holds \[100, 110\) of the same generation, which overlaps"),
        (AHEAD, one(119, 130), r"the output holds \[110, 120\) of the same generation, which overlaps"),
        (AHEAD, one(120, 131), r"the output holds \[130, 140\) of the same generation, which overlaps"),
        (AHEAD, one(0, 999), r"the output holds \[100, 110\) of the same generation, which overlaps"),
        (AHEAD, one(100, 110, generation=21, epoch=3), Verdict.REPLACE),
        (AHEAD, one(105, 135, generation=21, data_topic_id=OTHER_TOPIC_ID), Verdict.REPLACE),
        (AHEAD, one(120, 130, generation=19), "generation 19 is older than 20"),
        (AHEAD, one(100, 110, generation=19), "generation 19 is older than 20"),
        (AHEAD, one(120, 130, data_topic_id=OTHER_TOPIC_ID), "data topic was deleted and re-created"),
        (AHEAD, one(100, 110, data_topic_id=OTHER_TOPIC_ID), "data topic was deleted and re-created"),
        (AHEAD, one(120, 130, coordination_topic_id=OTHER_LOG_ID), "coordination topic was deleted and re-created"),
        (
            AHEAD,
            one(120, 130, coordination_topic_id=OTHER_LOG_ID, generation=21),
            "coordination topic was deleted and re-created",
        ),
        ((one(0, 10), one(100, 110, generation=21)), one(0, 10, generation=21), Verdict.TAKE),
        # Ranges that were done in order before the group enabled range claims, in the same generation.
        ((whole(100, 110), whole(110, 120)), one(100, 110, epoch=3), Verdict.SKIP),
        ((whole(100, 110), whole(110, 120)), one(120, 130), Verdict.TAKE),
        ((whole(100, 110), whole(110, 120)), one(150, 160), Verdict.TAKE),
        ((whole(100, 110), whole(110, 120)), one(110, 130), r"the output holds \[110, 120\)"),
        (
            (whole(100, 110), whole(110, 120)),
            one(90, 100),
            "in order up to 120 in the same generation, but does not hold",
        ),
        ((whole(100, 110), one(120, 130), whole(110, 120)), one(90, 100), "in order up to 120"),
        # The group has disabled range claims without a new generation.
        (AHEAD, whole(140, 150, epoch=99), "is none of them and does not follow them without a gap"),
        (AHEAD, whole(130, 140, epoch=99), "is none of them and does not follow them without a gap"),
        (AHEAD, whole(120, 130, epoch=99), "is none of them and does not follow them without a gap"),
        (AHEAD, whole(0, 50, epoch=99, generation=21), Verdict.REPLACE),
        ((*AHEAD, one(120, 130)), whole(140, 150, epoch=90), Verdict.TAKE),
        ((*AHEAD, one(120, 130)), whole(140, 150, epoch=89), "fencing token 89 is lower than 90"),
        ((*AHEAD, one(120, 130)), whole(130, 140, epoch=90), Verdict.SKIP),
        ((*AHEAD, one(120, 130)), whole(125, 140, epoch=90), "is none of them and does not follow them without a gap"),
        ((*AHEAD, one(120, 130)), whole(120, 130, epoch=90), "is at position 140, which is neither"),
        ((*AHEAD, one(120, 130)), whole(145, 150, epoch=90), "is at position 140, which is neither"),
        ((whole(90, 90), *AHEAD, one(120, 130)), whole(140, 150, epoch=90), "without a gap"),
        ((one(100, 110), whole(110, 130)), whole(120, 130), Verdict.SKIP),
        ((one(0, 10, epoch=99), one(7, 9, generation=21, epoch=5)), whole(9, 12, generation=21, epoch=5), Verdict.TAKE),
    ],
    ids=str,
)
def test_what_an_output_does_with_a_range_in_any_order(
    taken: tuple[ClaimedRange, ...], wanted: ClaimedRange, verdict: Verdict | str
) -> None:
    """A range is taken if no offset of it is present, and skipped if exactly this range is; others are refused."""
    held = holding(*taken)
    if isinstance(verdict, Verdict):
        assert verdict_on(held, wanted) is verdict
        return
    with pytest.raises(SinkRejectedError, match=verdict) as raised:
        verdict_on(held, wanted)
    assert str(raised.value).startswith(f"{wanted} of group 'etl'")


def naive(taken: list[ClaimedRange], wanted: ClaimedRange) -> Verdict | None:
    """Return the verdict by a second implementation that uses single offsets; None means refused."""
    generation = max((each.generation for each in taken), default=-1)
    if wanted.generation != generation:
        return Verdict.REPLACE if wanted.generation > generation else None
    ground = {
        offset: (each.start, each.end)
        for each in taken
        if each.generation == generation
        for offset in range(each.start, each.end)
    }
    met = {ground.get(offset) for offset in range(wanted.start, wanted.end)}
    if met <= {(wanted.start, wanted.end)}:
        return Verdict.SKIP
    if met != {None}:
        return None
    ends = [each.end for each in taken if each.generation == generation and not each.in_any_order]
    return None if wanted.start < max(ends, default=0) else Verdict.TAKE


some_ranges = st.tuples(st.integers(0, 30), st.integers(0, 6), st.integers(20, 22), st.integers(1, 99)).map(
    lambda at: one(at[0], at[0] + at[1], generation=at[2], epoch=at[3])
)


@pytest.mark.slow
@given(st.integers(0, 12), st.lists(some_ranges, max_size=40))
def test_ranges_in_any_order_are_judged_as_by_a_set_of_offsets(in_order: int, wanted: list[ClaimedRange]) -> None:
    """Any ranges, with replays and new generations, after a prefix that may have been written in order."""
    taken = [whole(start, start + 3) for start in range(0, in_order, 3)]
    held = holding(*taken)
    for each in [*wanted, *wanted]:
        expected = naive(taken, each)
        if expected is None:
            with pytest.raises(SinkRejectedError):
                verdict_on(held, each)
            continue
        assert verdict_on(held, each) is expected
        if expected is not Verdict.SKIP:
            taken.append(each)
            held.add(each)


@pytest.mark.slow
@given(st.sets(st.integers(1, 60), max_size=12), st.randoms(use_true_random=False), st.data())
def test_planned_ranges_are_taken_once_in_any_order(cuts: set[int], dice: Any, data: st.DataObject) -> None:  # noqa: ANN401
    """Adjacent plans, delivered several times by any owners, are each taken once; none is refused."""
    bounds = [0, *sorted(cuts), 61]
    plans = [one(start, end) for start, end in itertools.pairwise(bounds)]
    missing = data.draw(st.sampled_from(plans))
    deliveries = [dataclasses.replace(each, epoch=dice.randint(1, 99)) for each in plans * 3 if each != missing]
    dice.shuffle(deliveries)
    held, taken = TakenRanges(), []
    for delivery in deliveries:
        if verdict_on(held, delivery) is not Verdict.SKIP:
            held.add(delivery)
            taken.append((delivery.start, delivery.end))
    assert sorted(taken) == [(plan.start, plan.end) for plan in plans if plan != missing]
    if taken:
        beside = held.beside(missing)
        assert beside is not None
        assert beside.overlapping is None
        assert beside.position == (None if missing.start and missing.end < 61 else max(end for _, end in taken))
