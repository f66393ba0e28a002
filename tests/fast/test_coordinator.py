"""The coordinator and its members: who joins, leaves and fails; what moves, and what goes on meanwhile."""

import pytest

from marshal_dagster.coordinator.group import Happening
from marshal_dagster.coordinator.member import Standing
from tests.coordinator_world import World, befall


def started(members: int = 3, **fields: object) -> World:
    """Begin a world in which all is settled."""
    world = World(**fields)  # type: ignore[arg-type]
    world.elect()
    for number in range(members):
        world.join(f"m{number}")
    world.until(world.is_even, 5_000)
    world.run(1_000)
    for worker in world.workers.values():
        worker.stopped_for = 0
    return world


def happened(world: World) -> list[Happening]:
    """Give what the newest coordinator tells of."""
    return [event.happening for event in world.coordinators[-1].events]


def test_members_share_the_partitions() -> None:
    """Three that come about at once have eight each."""
    world = started()
    assert sorted(len(each.membership.places) for each in world.workers.values()) == [8, 8, 8]


def test_only_what_changes_hands_stops() -> None:
    """A fourth member takes two of each; the other partitions are worked on without a pause."""
    world = started()
    world.join("m3")
    world.until(world.is_even, 5_000)
    assert sorted(each.stopped_for for each in world.workers.values()) == [0, 2, 2, 2]


@pytest.mark.parametrize("dead", [1, 2])
def test_what_the_dead_had_is_taken_over_within_ten_seconds(dead: int) -> None:
    """At a session time-out of 6 s, with at most one failed ping."""
    world = started(5)
    for number in range(dead):
        world.kill(f"m{number}")
    took_ms = world.until(world.is_even, 20_000)
    assert took_ms < 10_000
    assert happened(world).count(Happening.FAILED) == dead
    assert sum(each.stopped_for for each in world.workers.values()) == 0


def test_who_leaves_is_followed_at_once() -> None:
    """No ping need fail."""
    world = started()
    world.leave("m0")
    assert world.until(world.is_even, 5_000) < 1_000
    assert Happening.LEFT in happened(world)


def test_a_new_coordinator_moves_nothing() -> None:
    """The members register again with what they have; the membership is the same."""
    world = started()
    before = dict(world.claims)
    world.depose(world.coordinators[0])
    world.run(3_000)
    world.elect()
    world.run(20_000)
    assert world.claims == before
    assert Happening.REBALANCED not in happened(world)
    assert sum(each.stopped_for for each in world.workers.values()) == 0


def test_a_member_that_died_with_the_coordinator_is_found() -> None:
    """It does not register again in time; what it had goes to the others."""
    world = started()
    world.depose(world.coordinators[0])
    world.kill("m0")
    world.elect()
    world.until(world.is_even, 15_000)
    assert sum(each.stopped_for for each in world.workers.values()) == 0


def test_without_a_coordinator_members_stop_after_a_session_time_out() -> None:
    """Not earlier; and look for one from then on."""
    world = started()
    world.depose(world.coordinators[0])
    world.run(3_500)
    assert len(world.claims) == 24
    world.run(3_500)
    assert not world.claims
    assert {each.membership.standing for each in world.workers.values()} == {Standing.LOOKING}
    world.elect()
    world.until(world.is_even, 10_000)


def test_two_coordinators_at_once_end_with_the_newer() -> None:
    """Members follow the larger epoch; the older one hears of it, and what it says counts for nothing."""
    world = started()
    old, new = world.coordinators[0], world.elect()
    world.run(10_000)
    assert world.is_even()
    assert Happening.SUPERSEDED in [event.happening for event in old.events]
    world.depose(old)
    world.kill("m0")
    world.until(world.is_even, 15_000)
    assert sorted(new.members) == ["m1", "m2"]


def test_partitions_that_are_added_are_worked_on() -> None:
    """As are topics that appear and match what a member takes."""
    world = started(2)
    world.topics["orders"] = 30
    world.until(world.is_even, 5_000)
    world = World(topics={"orders": 4})
    world.elect()
    for name in ("a", "b"):
        world.join(name, topics=[], pattern="ord*")
    world.until(world.is_even, 5_000)
    world.topics["orders.late"] = 4
    world.until(world.is_even, 5_000)


def test_a_member_of_a_fixed_name_that_restarts_causes_no_rebalance() -> None:
    """It comes back within the session time-out and has what it had."""
    world = World()
    world.elect()
    for name in ("a", "b", "c"):
        world.join(name, is_static=True)
    world.until(world.is_even, 5_000)
    world.run(1_000)
    before, count = dict(world.claims), happened(world).count(Happening.REBALANCED)
    world.workers["a"].is_dead = True
    world.run(1_000)
    world.join("a", is_static=True)
    world.run(10_000)
    assert world.claims == before
    assert happened(world).count(Happening.REBALANCED) == count


def test_a_process_whose_fixed_name_another_has_taken_does_not_take_it_back() -> None:
    """It is refused, however often it asks; its successor keeps what it had."""
    world = World()
    world.elect()
    old = world.join("a", is_static=True)
    world.until(world.is_even, 5_000)
    world.workers["old"] = world.workers.pop("a")
    new = world.join("a", is_static=True)
    world.run(30_000)
    assert (old.membership.standing, old.membership.error) == (Standing.REFUSED, "duplicate_id")
    assert (new.membership.standing, len(new.membership.places)) == (Standing.REGISTERED, 24)
    assert happened(world).count(Happening.FAILED) == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"session_timeout_ms": 499}, "session_timeout_too_short"),
        ({"pattern": "(a+)+"}, "bad_pattern"),
        ({"is_static": True}, "duplicate_id"),
    ],
)
def test_a_registration_that_cannot_be_is_refused(fields: dict[str, object], error: str) -> None:
    """With what is wrong; the others go on."""
    world = started()
    if error == "duplicate_id":
        second = world.join("m9")
        world.until(world.is_even, 5_000)
        second.is_dead = True
        world.workers["other"] = world.workers.pop("m9")
    refused = world.join("m9", **fields)
    world.run(1_000)
    assert (refused.membership.standing, refused.membership.error) == (Standing.REFUSED, error)


def test_one_that_does_not_stop_is_tried_again_and_told_of() -> None:
    """The rebalance is given up after some tries, each with a pause before it; the others work on."""
    world = started()
    for worker in world.workers.values():
        worker.stops_in_ms = 1e9
    world.join("m3")
    world.until(lambda: Happening.REBALANCE_GIVEN_UP in happened(world), 60_000)
    assert happened(world).count(Happening.REBALANCE_RETRIED) == world.rules.max_rebalance_retries


def test_those_who_come_together_are_shared_out_to_once() -> None:
    """A rebalance begins when nobody has come for a moment."""
    world = World()
    world.elect()
    for number in range(8):
        world.join(f"m{number}")
        world.run(50)
    world.until(world.is_even, 5_000)
    world.run(200)
    assert happened(world).count(Happening.REBALANCED) == 1


def test_a_rebalance_does_not_wait_for_ever_for_those_to_come() -> None:
    """Where members come and come, the work of those who are there begins within ten such moments."""
    world = World()
    world.elect()
    for number in range(30):
        world.join(f"m{number}")
        world.run(50)
        if happened(world).count(Happening.REBALANCED) > 0:
            break
    assert world.rules.gather_ms * 10 <= world.now_ms <= world.rules.gather_ms * 10 + 200


@pytest.mark.thorough
def test_five_thousand_members_share_fifty_thousand_partitions() -> None:
    """They all come at once; later a tenth of them dies, and within ten seconds others work on what those had."""
    world = World(topics={"orders": 50_000}, overhears=False)
    world.elect()
    for number in range(5_000):
        world.join(f"m{number}")
    world.until(world.is_even, 5_000)
    world.run(200)
    assert happened(world).count(Happening.REBALANCED) == 1
    for number in range(500):
        world.kill(f"m{number}")
    world.until(world.is_even, 10_000)
    world.run(200)
    assert happened(world).count(Happening.REBALANCED) == 2
    assert sum(each.stopped_for for each in world.workers.values()) == 0


def test_members_that_commit_by_themselves_wait_for_one_more_ping() -> None:
    """So that the offsets of their last answer have arrived before they go."""
    world = World()
    world.elect()
    world.join("a", auto_commit=True)
    world.join("b")
    world.until(world.is_even, 5_000)
    world.leave("a")
    world.run(500)
    assert "a" in world.workers
    assert world.until(lambda: "a" not in world.workers, 5_000) > 1_000


@pytest.mark.parametrize("seed", range(40))
def test_whatever_befalls_them_the_work_is_shared_in_the_end(seed: int) -> None:
    """Records lost, late and repeated, members that flap, sleep and die, coordinators that come and overlap.

    Once all that stops, each partition is worked on within a bounded time, and evenly.
    """
    befall(seed)
