"""Assignment strategies: each partition is assigned, evenly, with few moves, and deterministically."""

import itertools
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marshal_dagster.coordinator.assignment import (
    STRATEGIES,
    Assignment,
    AssignmentInput,
    DataPartitionId,
    Subscriber,
    count_moves,
    range_assignment,
    round_robin_assignment,
    sticky_assignment,
    weighted_assignment,
)
from marshal_dagster.errors import ConfigurationError

TOPICS = ("orders", "payments", "refunds")


def board(partitions: int, members: int, previous: Assignment | None = None, capacity: int = 1) -> AssignmentInput:
    """Return an input with one topic."""
    places = {("orders", number): 1.0 for number in range(partitions)}
    names = [Subscriber(f"m{number}", frozenset({"orders"}), capacity) for number in range(members)]
    return AssignmentInput(places, names, previous or {})


@st.composite
def boards(draw: st.DrawFn) -> AssignmentInput:
    """Draw topics, members with any subscriptions and capacities, and a previous assignment."""
    counts = draw(st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 7), max_size=3))
    places = {
        (topic, number): float(draw(st.integers(0, 50))) for topic, count in counts.items() for number in range(count)
    }
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=6))
    members = [
        Subscriber(name, draw(st.frozensets(st.sampled_from(TOPICS))), draw(st.integers(1, 3))) for name in names
    ]
    previous = {place: draw(st.sampled_from("abcdefgh")) for place in places if draw(st.booleans())}
    return AssignmentInput(places, members, previous)


def spread(found: Assignment, of: AssignmentInput) -> list[Fraction]:
    """Return the number of partitions of each member, divided by its capacity."""
    counts = Counter(found.values())
    return [Fraction(counts[member.id], member.capacity) for member in of.members]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@given(of=boards())
@settings(max_examples=60)
def test_each_partition_goes_to_one_who_takes_it(strategy: object, of: AssignmentInput) -> None:
    """Each partition with a subscriber goes to one of its subscribers, and equal inputs have equal results."""
    assert callable(strategy)
    found = strategy(of)
    takers = {member.id: member.topics for member in of.members}
    assert set(found) == {place for place in of.places if any(place[0] in topics for topics in takers.values())}
    assert all(place[0] in takers[member] for place, member in found.items())
    assert found == strategy(of)
    assert sticky_assignment(AssignmentInput(of.places, of.members[::-1], of.previous)) == sticky_assignment(of)


BOTH = frozenset({"orders", "payments"})
NOTHING_AT_FIRST = AssignmentInput(
    {**{("payments", number): 1.0 for number in range(7)}, ("orders", 0): 1.0},
    [Subscriber("a", frozenset({"orders"})), Subscriber("b", BOTH), Subscriber("c", BOTH, 2)],
)
"""The member with most partitions cannot hand one over until another member has done so."""


@pytest.mark.slow
@given(of=boards())
@example(of=NOTHING_AT_FIRST)
@settings(max_examples=60)
def test_no_move_would_make_the_sticky_spread_more_even(of: AssignmentInput) -> None:
    """No partition can move from one member to another so that the loads become more even."""
    found = sticky_assignment(of)
    counts = Counter(found.values())
    for member in of.members:
        for other in of.members:
            after = Fraction(counts[other.id] + 1, other.capacity)
            if after < Fraction(counts[member.id], member.capacity):
                assert not any(place[0] in other.topics for place, name in found.items() if name == member.id)


@pytest.mark.slow
@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 8), st.integers(0, 4))
def test_sticky_moves_no_more_than_it_must(partitions: int, members: int, gone: int, come: int) -> None:
    """Only partitions of members that left move, and those that new members need for an even load."""
    before = sticky_assignment(board(partitions, members))
    names = [f"m{number}" for number in range(min(gone, members - 1), members)] + [f"n{each}" for each in range(come)]
    now = AssignmentInput(
        {("orders", number): 1.0 for number in range(partitions)},
        [Subscriber(name, frozenset({"orders"})) for name in names],
        before,
    )
    after = sticky_assignment(now)

    counts = Counter(after.values())
    assert max(counts[name] for name in names) - min(counts[name] for name in names) <= 1
    unassigned = sum(name not in names for name in before.values())
    needed = sum(max(0, counts[f"n{each}"]) for each in range(come))
    assert count_moves(before, after) <= unassigned + needed
    assert sticky_assignment(AssignmentInput(now.places, now.members, after)) == after


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("scale", [1, 1_000_000])
def test_capacity_is_a_share(strategy: Callable[[AssignmentInput], Assignment], scale: int) -> None:
    """A member with twice the capacity gets twice as many partitions, whatever the strategy."""
    topic = frozenset({"orders"})
    members = [Subscriber("small", topic, scale), Subscriber("large", topic, 2 * scale)]
    found = strategy(AssignmentInput({("orders", number): 1.0 for number in range(9)}, members))
    assert Counter(found.values()) == {"small": 3, "large": 6}


@given(of=boards())
def test_round_robin_with_equal_capacities_is_that_of_kafka(of: AssignmentInput) -> None:
    """Members take turns, and one that does not subscribe to the topic loses its turn."""
    members = sorted((Subscriber(member.id, member.topics) for member in of.members), key=lambda member: member.id)
    turns, expected = itertools.cycle(members), {}
    for place in sorted(of.places):
        if any(place[0] in member.topics for member in members):
            expected[place] = next(member.id for member in turns if place[0] in member.topics)
    assert round_robin_assignment(AssignmentInput(of.places, members)) == expected


@given(st.integers(0, 200), st.lists(st.integers(1, 1_000_000), min_size=1, max_size=9))
def test_range_and_round_robin_honour_capacities(partitions: int, capacities: list[int]) -> None:
    """Range rounds each share up or down. In turn, no member waits for more than its share of the turns."""
    members = [Subscriber(f"m{number}", frozenset({"orders"}), each) for number, each in enumerate(capacities)]
    of = AssignmentInput({("orders", number): 1.0 for number in range(partitions)}, members)
    shares = {member.id: Fraction(partitions * member.capacity, sum(capacities)) for member in members}
    counts = Counter(range_assignment(of).values())
    assert all(abs(counts[name] - share) < 1 for name, share in shares.items())
    counts = Counter(round_robin_assignment(of).values())
    turns = Fraction(partitions + len(members), sum(capacities))
    assert all(shares[each.id] - 1 <= counts[each.id] <= turns * each.capacity for each in members)


def test_weights_are_levelled() -> None:
    """A partition with half of the lag is assigned alone; an assignment that is already even stays as it is."""
    places: dict[DataPartitionId, float] = {
        ("orders", number): 1_000.0 if number == 3 else 100.0 for number in range(11)
    }
    of = AssignmentInput(places, board(0, 2).members)
    found = weighted_assignment(of)
    loads: Counter[str] = Counter()
    for place, name in found.items():
        loads[name] += round(places[place])
    assert loads == {"m0": 1_000, "m1": 1_000}
    assert weighted_assignment(AssignmentInput(places, of.members, found)) == found


def test_range_gives_neighbours_and_round_robin_deals() -> None:
    """Both match the assignors of the same name in Kafka's consumer."""
    assert list(range_assignment(board(5, 2)).values()) == ["m0", "m0", "m0", "m1", "m1"]
    assert list(round_robin_assignment(board(5, 2)).values()) == ["m0", "m1", "m0", "m1", "m0"]


def test_what_cannot_be_is_refused() -> None:
    """Duplicate ids, a capacity of 0 and negative weights are refused."""
    one = Subscriber("a", frozenset({"orders"}))
    with pytest.raises(ConfigurationError, match="same id"):
        AssignmentInput({}, [one, one])
    with pytest.raises(ConfigurationError, match="capacity of member 'a' is 0"):
        Subscriber("a", frozenset(), 0)
    with pytest.raises(ConfigurationError, match="below 0"):
        AssignmentInput({("orders", 0): -1.0}, [one])
