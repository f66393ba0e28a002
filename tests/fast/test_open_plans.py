"""Open plans in the world state: which are exhausted, and into which parts failed plans are divided for retries."""

import pytest

from marshal_dagster.protocol.open_plans import OpenPlan, exhausted, parts_to_retry, retry_commands


def plans(*attempts: int, group: str = "etl", topic: str = "orders") -> list[OpenPlan]:
    """Return one plan in each partition from 0, with these numbers of attempts."""
    return [OpenPlan(group, topic, partition, 0, 10, count) for partition, count in enumerate(attempts)]


@pytest.mark.parametrize(
    ("attempts", "parts"),
    [
        ([], []),
        ([0, 0, 0], []),
        ([1, 1, 1, 1], [(0, 1), (2, 3)]),
        ([1, 1, 1], [(0, 1), (2,)]),
        ([1], [(0,)]),
        ([2, 2, 2, 2, 2, 2, 2, 2], [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ([2, 0, 1, 1], [(2,), (3,), (0,)]),
        ([4] * 5, [(0,), (1,), (2,), (3,), (4,)]),
    ],
)
def test_parts_are_ever_smaller_and_single_before_the_last_attempt(
    attempts: list[int], parts: list[tuple[int, ...]]
) -> None:
    """Parts get smaller with each attempt and have one partition before the last attempt.

    New plans are in no part. Parts with the fewest attempts come first.
    """
    assert parts_to_retry(plans(*attempts)) == parts


@pytest.mark.parametrize("bad", [{0}, {63}, {3, 40}, {0, 1, 2, 3}])
@pytest.mark.parametrize("max_attempts", [2, 3, 5, 8])
def test_no_good_partition_is_given_up_for_a_bad_one(bad: set[int], max_attempts: int) -> None:
    """Over several runs of 64 partitions, bad partitions exhaust only themselves.

    Each attempt counts only for the partitions of its part, and one batch takes all new plans.
    """
    left = dict.fromkeys(range(64), 0)
    for _ in range(max_attempts + 1):
        now = [OpenPlan("etl", "orders", number, 0, 10, count) for number, count in left.items()]
        parts = parts_to_retry([plan for plan in now if plan.attempts < max_attempts], max_attempts)
        fresh = tuple(number for number, count in left.items() if count == 0)
        for part in [*parts, fresh]:
            for number in part:
                left[number] += 1
                if not bad & set(part):
                    del left[number]
    assert set(left) == bad


def test_commands_name_the_partition_where_it_is_one() -> None:
    """There is one command for each group and topic, with names quoted for a shell.

    A command names the partition if there is only one.
    """
    both = [*plans(5, 5), OpenPlan("my group", "a", 7, 0, 1, 5)]
    assert retry_commands(both) == "marshal-dagster retry etl orders; marshal-dagster retry 'my group' a 7"
    assert exhausted(plans(4, 5, 6)) == plans(4, 5, 6)[1:]
