"""Check the coordinator and its members: how they join, leave and fail, which partitions move and which do not."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marshal_dagster.coordinator.assignment import DataPartitionId, sticky_assignment, weighted_assignment
from marshal_dagster.coordinator.group import GroupCoordinator, GroupEventKind, GroupRules
from marshal_dagster.coordinator.member import Membership, MemberState
from marshal_dagster.coordinator.messages import (
    NUMBERS_BELOW,
    Leave,
    Pong,
    Register,
    Registered,
    Started,
    StartFetcher,
    StopFetcher,
    Stopped,
    parse_coordinator_message,
    parse_member_message,
    places_of,
    render,
)
from marshal_dagster.errors import ConfigurationError
from tests.coordinator_world import GROUP, World, inject_fault


def started(members: int = 3, **fields: object) -> World:
    """Return a world whose members have joined and have their partitions."""
    world = World(**fields)  # type: ignore[arg-type]
    world.elect()
    for number in range(members):
        world.join(f"m{number}")
    world.until(world.is_even, 5_000)
    world.run(1_000)
    for worker in world.workers.values():
        worker.stopped_for = 0
    return world


def happened(world: World) -> list[GroupEventKind]:
    """Return the kinds of the events that the newest coordinator recorded."""
    return [event.happening for event in world.coordinators[-1].events]


def test_members_share_the_partitions() -> None:
    """Three members that join at the same time get eight partitions each."""
    world = started()
    assert sorted(len(worker.membership.places) for worker in world.workers.values()) == [8, 8, 8]


def test_only_what_changes_hands_stops() -> None:
    """A fourth member takes two partitions from each member; work on the others does not stop."""
    world = started()
    world.join("m3")
    world.until(world.is_even, 5_000)
    assert sorted(worker.stopped_for for worker in world.workers.values()) == [0, 2, 2, 2]


@pytest.mark.parametrize("dead", [1, 2])
def test_what_the_dead_had_is_taken_over_within_ten_seconds(dead: int) -> None:
    """The session timeout is 6 s, and at most one ping fails."""
    world = started(5)
    for number in range(dead):
        world.kill(f"m{number}")
    took_ms = world.until(world.is_even, 20_000)
    assert took_ms < 10_000
    assert happened(world).count(GroupEventKind.FAILED) == dead
    assert sum(worker.stopped_for for worker in world.workers.values()) == 0


def test_who_leaves_is_followed_at_once() -> None:
    """A member that leaves is removed at once; no ping has to fail first."""
    world = started()
    world.leave("m0")
    assert world.until(world.is_even, 5_000) < 1_000
    assert GroupEventKind.LEFT in happened(world)


def test_a_new_coordinator_moves_nothing() -> None:
    """Members register again with the partitions that they hold, so the membership is the same."""
    world = started()
    before = world.owners()
    world.depose(world.coordinators[0])
    world.run(3_000)
    world.elect()
    world.run(20_000)
    assert world.owners() == before
    assert GroupEventKind.REBALANCED not in happened(world)
    assert sum(worker.stopped_for for worker in world.workers.values()) == 0


def test_a_new_coordinator_waits_for_whom_an_older_one_has_struck_too() -> None:
    """A process that does not yet know that it was superseded may delete a share that its successor sent."""
    world = started()
    before = world.owners()
    world.depose(world.coordinators[0])
    del world.kept["m2"]
    world.workers["m2"].sleeps_until_ms = world.now_ms + 500
    world.elect()
    world.run(10_000)
    assert world.owners() == before


def test_a_member_that_died_with_the_coordinator_is_found() -> None:
    """A member that died with the coordinator does not register again in time; others get its partitions."""
    world = started()
    world.depose(world.coordinators[0])
    world.kill("m0")
    world.elect()
    world.until(world.is_even, 15_000)
    assert sum(worker.stopped_for for worker in world.workers.values()) == 0


def test_without_a_coordinator_members_stop_after_a_session_time_out() -> None:
    """Members stop work after a session timeout, not earlier, and from then on they look for a coordinator."""
    world = started()
    world.depose(world.coordinators[0])
    world.run(3_500)
    assert len(world.claims) == 24
    world.run(3_500)
    assert not world.claims
    assert {worker.membership.state for worker in world.workers.values()} == {MemberState.LOOKING}
    world.elect()
    world.until(world.is_even, 10_000)


def test_two_coordinators_at_once_end_with_the_newer() -> None:
    """Members follow the larger epoch; the older coordinator learns of it from them, and its messages are ignored."""
    world = started()
    old, new = world.coordinators[0], world.elect()
    world.run(10_000)
    assert world.is_even()
    assert GroupEventKind.SUPERSEDED in [event.happening for event in old.events]
    world.depose(old)
    world.kill("m0")
    world.until(world.is_even, 15_000)
    assert sorted(new.members) == ["m1", "m2"]


def test_partitions_that_are_added_are_worked_on() -> None:
    """New topics that match a member's pattern are assigned too."""
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


@pytest.mark.parametrize("phase", ["stopping", "starting"])
def test_what_changes_during_a_rebalance_is_not_forgotten(phase: str) -> None:
    """Partitions that are added while members stop, or while one starts, are assigned after the rebalance."""
    world = started()
    for worker in world.workers.values():
        worker.stops_in_ms = 1_000 if phase == "stopping" else 10
    newest = world.join("m3")
    world.run(100)
    newest.sleeps_until_ms = world.now_ms + (0 if phase == "stopping" else 1_000)
    world.run(500)
    world.topics["orders"] = 30
    world.until(world.is_even, 5_000)


def test_a_member_of_a_fixed_name_that_restarts_causes_no_rebalance() -> None:
    """A static member that comes back within the session timeout keeps its partitions."""
    world = World()
    world.elect()
    for name in ("a", "b", "c"):
        world.join(name, is_static=True)
    world.until(world.is_even, 5_000)
    world.run(1_000)
    before, count = world.owners(), happened(world).count(GroupEventKind.REBALANCED)
    world.workers["a"].is_dead = True
    world.run(1_000)
    world.join("a", is_static=True)
    world.run(10_000)
    assert world.owners() == before
    assert happened(world).count(GroupEventKind.REBALANCED) == count


def test_a_process_whose_fixed_name_another_has_taken_does_not_take_it_back() -> None:
    """A superseded process is refused, however often it registers; its successor keeps its partitions."""
    world = World()
    world.elect()
    old = world.join("a", is_static=True)
    world.until(world.is_even, 5_000)
    world.workers["old"] = world.workers.pop("a")
    new = world.join("a", is_static=True)
    world.run(30_000)
    assert (old.membership.state, old.membership.error) == (MemberState.REFUSED, "duplicate_id")
    assert (new.membership.state, len(new.membership.places)) == (MemberState.REGISTERED, 24)
    assert happened(world).count(GroupEventKind.FAILED) == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"session_timeout_ms": 499}, "session_timeout_too_short"),
        ({"session_timeout_ms": 0}, "session_timeout_too_short"),
        ({"session_timeout_ms": 3_600_001}, "session_timeout_too_long"),
        ({"pattern": "(a+)+"}, "bad_pattern"),
        ({"pattern": "a" * 250}, "bad_pattern"),
        ({"is_static": True}, "duplicate_id"),
    ],
)
def test_a_registration_that_cannot_be_is_refused(fields: dict[str, object], error: str) -> None:
    """The refusal names what is wrong."""
    world = started()
    if error == "duplicate_id":
        second = world.join("m9")
        world.until(world.is_even, 5_000)
        second.is_dead = True
        world.workers["other"] = world.workers.pop("m9")
    refused = world.join("m9", **fields)
    world.run(1_000)
    assert (refused.membership.state, refused.membership.error) == (MemberState.REFUSED, error)


def test_a_share_says_what_of_it_came_last() -> None:
    """A share lists the partitions that its member gained last, so readers can see what moved.

    The share of a member that only lost partitions lists those that it still has of its last gain.
    """
    world = started()

    def gained() -> dict[str, frozenset[DataPartitionId]]:
        return {name: places_of(share.gained) for name, share in world.kept.items()}

    def has() -> dict[str, frozenset[DataPartitionId]]:
        return {name: worker.membership.places for name, worker in world.workers.items()}

    first = has()
    world.join("m3")
    world.until(lambda: world.is_even() and "m3" in world.kept, 20_000)
    four = has()
    assert gained() == {name: first.get(name, places) & places for name, places in four.items()}
    world.leave("m3")
    world.until(lambda: "m3" not in world.workers and world.is_even(), 20_000)
    assert gained() == {name: places - four[name] for name, places in has().items()}


def test_one_that_does_not_stop_is_tried_again_and_reported() -> None:
    """The rebalance is given up after some retries, each after a pause; the other members continue."""
    world = started()
    for worker in world.workers.values():
        worker.stops_in_ms = 1e9
    world.join("m3")
    world.until(lambda: GroupEventKind.REBALANCE_GIVEN_UP in happened(world), 60_000)
    assert happened(world).count(GroupEventKind.REBALANCE_RETRIED) == world.rules.max_rebalance_retries


def test_those_who_come_together_are_shared_out_to_once() -> None:
    """A rebalance starts when no member has joined for a moment."""
    world = World()
    world.elect()
    world.run(2_000)
    for number in range(8):
        world.join(f"m{number}")
        world.run(50)
    world.until(world.is_even, 5_000)
    world.run(200)
    assert happened(world).count(GroupEventKind.REBALANCED) == 1


def test_a_rebalance_does_not_wait_for_ever_for_those_to_come() -> None:
    """If members keep joining, the rebalance starts after at most ten times `gather_ms`."""
    world = World()
    world.elect()
    world.run(2_000)
    for number in range(30):
        world.join(f"m{number}")
        world.run(50)
        if happened(world).count(GroupEventKind.REBALANCED) > 0:
            break
    assert world.rules.gather_ms * 10 <= world.now_ms - 2_000 <= world.rules.gather_ms * 10 + 200


def test_words_that_have_waited_are_all_heard_before_anything_is_worked_out() -> None:
    """Messages that arrived while a computation took long are all processed before the next computation starts."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0)
    leader.update_topics({"orders": 4}, 0)
    for number in range(4):
        register = Register(
            group=GROUP, member=f"m{number}", epoch=0, tenure="t", session_timeout_ms=6_000, topics=["orders"]
        )
        assert [order.kind for order in leader.receive(register, 5_000 + 900 * number)] == ["registered"]
    assert [order.kind for order in leader.tick(9_000)] == ["ping"] + ["start"] * 4


def test_those_who_keep_coming_do_not_hold_up_those_before_them() -> None:
    """New members wait for the current rebalance, which continues because none of its members changed."""
    world = started()
    for worker in world.workers.values():
        worker.stops_in_ms = 300
    for number in range(3, 60):
        world.join(f"m{number}")
        world.run(50)
    assert world.workers["m3"].membership.places


def weighed(weights: dict[int, float], members: int = 2) -> World:
    """Return a world of partitions with these weights, whose members have joined and have their partitions."""
    world = World(
        strategy=weighted_assignment,
        topics={"orders": len(weights)},
        weights={("orders", number): weight for number, weight in weights.items()},
    )
    world.elect()
    for number in range(members):
        world.join(f"m{number}")
    world.until(lambda: len(world.claims) == len(weights), 5_000)
    world.run(1_000)
    return world


def test_weights_are_spread() -> None:
    """One heavy partition counts as much as five light ones."""
    world = weighed({0: 500.0, **dict.fromkeys(range(1, 6), 100.0)})
    assert sorted(len(worker.membership.places) for worker in world.workers.values()) == [1, 5]


def test_work_moves_once_its_weight_has_changed_much() -> None:
    """A small change of weights moves nothing."""
    world = weighed(dict.fromkeys(range(12), 100.0))
    before = world.owners()
    world.weights = {("orders", number): 100.0 + number for number in range(12)}
    world.run(10_000)
    assert world.owners() == before
    heavy = ("orders", 0)
    world.weights[heavy] = 900.0
    world.run(10_000)
    of_heavy = [place for place, name in world.owners().items() if name == before[heavy]]
    assert heavy in of_heavy
    assert len(of_heavy) in {2, 3}


def test_who_joins_many_gets_a_share_by_weight() -> None:
    """A new member gets a full share by weight, though each other member exceeds the new average only slightly."""
    world = weighed(dict.fromkeys(range(110), 100.0), members=10)
    world.join("m10")
    world.run(8_000)
    assert sorted(len(worker.membership.places) for worker in world.workers.values()) == [10] * 11


def test_nothing_moves_before_it_is_weighed() -> None:
    """A new coordinator does not rebalance by number of partitions before it has the weights."""
    world = weighed({0: 500.0, **dict.fromkeys(range(1, 6), 100.0)})
    before, weights = world.owners(), world.weights
    world.depose(world.coordinators[0])
    world.weights = None
    world.elect()
    world.run(10_000)
    assert world.coordinators[-1].awaits_weights
    world.weights = weights
    world.run(10_000)
    assert world.owners() == before
    assert not any(worker.stopped_for for worker in world.workers.values())


def test_weights_that_cannot_be_found_out_hold_up_nobody() -> None:
    """If no weights can be found, all partitions have the same weight."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(weighted_assignment, weighs=True), 0.0)
    leader.update_topics({"orders": 4}, 0.0)
    leader.update_weights(leader.topics_wanted(), None)
    assert not any(isinstance(order, StartFetcher) for order in leader.tick(1.0))
    for name in ("a", "b"):
        register = {"group": GROUP, "member": name, "epoch": 0, "tenure": name, "session_timeout_ms": 6_000}
        leader.receive(Register.model_validate({**register, "topics": ["orders"]}), 10.0)
    assert not any(isinstance(order, StartFetcher) for order in leader.tick(2_000.0))
    leader.update_weights(leader.topics_wanted(), None)
    shares = [order.places["orders"] for order in leader.tick(2_100.0) if isinstance(order, StartFetcher)]
    assert sorted(map(len, shares)) == [2, 2]


def test_how_far_a_member_says_that_it_got_counts_where_it_works() -> None:
    """A position that a member reports counts only for partitions that are assigned to it."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0.0)
    leader.update_topics({"orders": 2}, 0.0)
    for name in ("a", "b"):
        fields = {"group": GROUP, "member": name, "epoch": 0, "tenure": name, "session_timeout_ms": 6_000}
        leader.receive(Register.model_validate({**fields, "topics": ["orders"], "auto_commit": True}), 10.0)
    leader.tick(1_000.0)
    (place,) = leader.assignment()["a"]
    actions = {"orders": {0: 70, 1: 80}}
    leader.receive(Pong(group=GROUP, member="a", epoch=1, tenure="a", round=1, offsets=actions), 1_010.0)
    assert leader.positions == {place: actions["orders"][place[1]]}


@pytest.mark.thorough
def test_a_thousand_members_share_ten_thousand_partitions() -> None:
    """All members join at once; later a tenth dies, and others take over its partitions within ten seconds.

    `python -m benchmarks coordinator` measures the same with five times as many.
    """
    world = World(topics={"orders": 10_000}, overhears=False)
    world.elect()
    for number in range(1_000):
        world.join(f"m{number}")
    world.until(world.is_even, 5_000)
    world.run(200)
    assert happened(world).count(GroupEventKind.REBALANCED) == 1
    for number in range(100):
        world.kill(f"m{number}")
    world.until(world.is_even, 10_000)
    world.run(200)
    assert happened(world).count(GroupEventKind.REBALANCED) == 2
    assert sum(worker.stopped_for for worker in world.workers.values()) == 0


def test_members_that_commit_by_themselves_wait_for_one_more_ping() -> None:
    """The offsets of the member's last pong must have arrived before it leaves."""
    world = World()
    world.elect()
    world.join("a", auto_commit=True)
    world.join("b")
    world.until(world.is_even, 5_000)
    world.leave("a")
    world.run(500)
    assert "a" in world.workers
    assert world.until(lambda: "a" not in world.workers, 5_000) > 1_000


def test_who_gave_all_up_and_comes_back_in_time_is_reported_again() -> None:
    """A member lost its last pings and stopped its work before the coordinator removed it; it gets its share again."""
    world = started()
    worker = world.workers["m0"]
    world._do(worker, worker.membership.tick(world.now_ms + world.session_ms))
    world.until(lambda: not worker.membership.places, 1_000)
    world.until(world.is_even, 5_000)


def test_what_was_stopped_for_a_rebalance_that_failed_is_begun_with_again() -> None:
    """Members stopped partitions for a new member that leaves before it gets any; they start them again."""
    world = started()
    for worker in world.workers.values():
        worker.stops_in_ms = 1_000
    world.join("m3")
    world.until(lambda: sum(each.stopped_for for each in world.workers.values()) == 6, 5_000)
    world.leave("m3")
    world.run(2_000)
    world.until(world.is_even, 5_000)


def test_an_order_that_was_overtaken_counts_for_nothing() -> None:
    """A late share or stop of an older rebalance is ignored; one of a later epoch counts, whatever its generation."""
    register = Register(group=GROUP, member="a", epoch=0, tenure="t", session_timeout_ms=6_000)
    member = Membership(register, 0)
    share = StartFetcher(group=GROUP, member="a", tenure="t", epoch=3, generation=7, places={"orders": [1, 2]})
    older = StopFetcher(group=GROUP, member="a", tenure="t", epoch=3, generation=6, places={"orders": [1]})
    both = {("orders", 1), ("orders", 2)}
    assert member.receive(share, 1).start == both
    assert not member.receive(share.model_copy(update={"generation": 6, "places": {}}), 2).messages
    assert not member.receive(older, 3).stop
    assert member.places == both
    assert member.receive(share.model_copy(update={"epoch": 4, "generation": 1, "places": {}}), 4).stop == both


def test_a_coordinator_that_was_stopped_takes_nobody_for_dead() -> None:
    """The pongs to its last ping have arrived but are unread; a member that then stays silent is still removed."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0)
    leader.receive(Register(group=GROUP, member="a", epoch=0, tenure="t", session_timeout_ms=6_000), 0)
    assert [order.kind for order in leader.tick(10)] == ["ping"]
    for now_ms in range(20_000, 25_900, 100):
        leader.tick(now_ms)
    assert leader.members == ["a"]
    leader.tick(26_100)
    assert leader.members == []


def test_a_coordinator_that_hears_nobody_for_a_while_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members still read its messages and continue; when it can read theirs again, each keeps its partitions."""
    world = started()
    before = world.owners()
    with monkeypatch.context() as deaf:
        deaf.setattr(world, "_send_message", lambda _: None)
        world.until(lambda: happened(world).count(GroupEventKind.FAILED) == 3, 10_000)
    world.until(world.is_even, 10_000)
    world.run(5_000)
    assert world.owners() == before
    assert sum(worker.stopped_for for worker in world.workers.values()) == 0


def test_who_wants_to_leave_and_is_not_known_any_more_is_gone() -> None:
    """The member does not register again: no coordinator would ever confirm that it left."""
    register = Register(group=GROUP, member="a", epoch=0, tenure="t", session_timeout_ms=6_000, auto_commit=True)
    member = Membership(register, 0)
    answer = Registered(group=GROUP, member="a", epoch=1, tenure="t")
    member.receive(answer, 1)
    member.leave()
    actions = member.receive(answer.model_copy(update={"error": "unknown_member"}), 2)
    assert (member.state, [type(message) for message in actions.messages]) == (MemberState.GONE, [Leave])


def test_who_was_refused_its_name_has_it_once_it_is_free() -> None:
    """A process may have been restarted before its predecessor was found dead."""
    world = started()
    world.kill("m0")
    second = world.join("m0")
    world.until(lambda: second.membership.state is MemberState.REFUSED, 2_000)
    world.until(world.is_even, 15_000)
    assert second.membership.error is None


def test_who_was_refused_its_fixed_name_does_not_take_it_from_another_by_asking() -> None:
    """Repeated registration does not take a static name from its newer owner, even after the coordinator changed."""
    world = World()
    world.elect()
    old = world.join("a", is_static=True)
    world.until(world.is_even, 5_000)
    new = world.join("a", is_static=True)
    world.until(lambda: old.membership.state is MemberState.REFUSED, 10_000)
    world.depose(world.coordinators[0])
    world.elect()
    world.run(30_000)
    assert (old.membership.state, new.membership.state) == (MemberState.REFUSED, MemberState.REGISTERED)
    assert new.stopped_for == 0


def test_a_coordinator_that_does_not_know_the_topics_yet_takes_nothing_from_anybody() -> None:
    """Members that register with partitions continue to work on them."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0)
    register = Register(
        group=GROUP, member="a", epoch=0, tenure="t", session_timeout_ms=6_000, topics=["orders"], holds={"orders": [0]}
    )
    assert [order.kind for order in leader.receive(register, 0)] == ["registered"]
    assert [order.kind for order in leader.tick(10)] == ["ping"]
    assert leader.update_topics({"orders": 1}, 20) == []


def test_whom_no_coordinator_heard_of_again_is_reported_once() -> None:
    """The failed member is reported once, so its share is deleted and the next coordinator does not wait for it."""
    world = started()
    world.depose(world.coordinators[0])
    world.kill("m0")
    world.elect()
    world.until(world.is_even, 15_000)
    actions = [event.members for event in world.coordinators[0].events if event.happening is GroupEventKind.FAILED]
    assert actions == [("m0",)]
    assert world.kept.keys() == {"m1", "m2"}


@pytest.mark.parametrize("leaves", [False, True])
def test_after_a_rebalance_was_given_up_what_changes_is_followed_at_once(leaves: bool) -> None:
    """The long pause ends when a member that was waited for has stopped, or when a member leaves."""
    world = started()
    for worker in world.workers.values():
        worker.stops_in_ms = 30_000 if not leaves else 1e9
    world.join("m3")
    world.until(lambda: GroupEventKind.REBALANCE_GIVEN_UP in happened(world), 30_000)
    for worker in world.workers.values():
        worker.stops_in_ms = 10
    if leaves:
        world.leave("m0")
        world.run(1_000)
        assert len(world.workers["m3"].membership.places) == 8
    else:
        world.until(world.is_even, 9_000)


def test_members_follow_a_coordinator_of_topics_that_were_re_created() -> None:
    """The new coordinator's epoch is smaller than any that members know; they find it after a session timeout."""
    world = World()
    world.terms = 1_000
    world.elect()
    for name in ("a", "b"):
        world.join(name)
    world.until(world.is_even, 5_000)
    world.depose(world.coordinators[0])
    world.terms = 0
    world.elect()
    for _ in range(20):
        world.run(500)
        for leader in world.coordinators[:]:
            if GroupEventKind.SUPERSEDED in [event.happening for event in leader.events]:
                world.depose(leader)
                world.elect()
    world.until(world.is_even, 10_000)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_befalls_them_the_work_is_shared_in_the_end(seed: int) -> None:
    """Records are lost, late and repeated; members and coordinators come, go, sleep and overlap.

    Once these faults stop, each partition is worked on within a bounded time, and evenly.
    """
    inject_fault(seed)


def test_what_others_gave_up_waits_for_nobody_who_does_not_stop() -> None:
    """A member that answers pings but never stops keeps its partitions; all others soon have an owner."""
    world = started(3)
    world.workers["m0"].stops_in_ms = 10**9
    world.join("m3")
    world.run(2_000)
    assert len(world.claims) < 24
    world.until(lambda: len(world.claims) == 24, 4_000)
    world.run(60_000)
    assert len(world.claims) == 24
    assert len(world.workers["m3"].membership.places) >= 4
    actions = happened(world)
    assert actions.count(GroupEventKind.REBALANCE_RETRIED) >= 4
    assert GroupEventKind.REBALANCE_GIVEN_UP in actions
    world.kill("m0")
    world.until(world.is_even, 15_000)


def test_an_answer_that_comes_late_counts_for_nothing() -> None:
    """A late or repeated pong to an old ping is ignored, so a member that answered later pings stays alive."""
    leader, now_ms = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0), 0.0
    leader.receive(Register(group=GROUP, member="a", epoch=0, tenure="t", session_timeout_ms=6_000), 0)
    late: Pong | None = None
    for _ in range(60):
        for order in leader.tick(now_ms):
            if order.kind == "ping":
                pong = Pong(group=GROUP, member="a", epoch=1, tenure="t", round=order.round)
                late = late or pong
                leader.receive(pong, now_ms + 100)
        if late is not None and now_ms > 5_000:
            leader.receive(late, now_ms + 150)
        now_ms += 500
    assert leader.members == ["a"]


@pytest.mark.parametrize("generation", [NUMBERS_BELOW - 1, 2**40])
def test_a_share_of_a_generation_that_cannot_be_stops_no_coordinator(generation: int) -> None:
    """Groups can count generations up to the largest number that a record can carry."""
    share = StartFetcher(group=GROUP, member="z", tenure="z", epoch=1, generation=generation, places={"orders": [1]})
    assert parse_coordinator_message(render(share)) == share
    leader = GroupCoordinator(GROUP, 2, GroupRules(sticky_assignment), 0, kept=[share])
    leader.update_topics({"orders": 2}, 0)
    leader.receive(
        Register(group=GROUP, member="a", epoch=0, tenure="t", topics=["orders"], session_timeout_ms=6_000), 0
    )
    orders = [order for now_ms in range(0, 10_000, 500) for order in leader.tick(now_ms)]
    assert {"orders": [0, 1]} in [order.places for order in orders if isinstance(order, StartFetcher)]


def test_a_stranger_deposes_nobody() -> None:
    """Only a member of the group, or one that registers, can have heard from a later coordinator."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0, is_later_epoch=lambda _: True)
    leader.receive(Pong(group=GROUP, member="z", epoch=NUMBERS_BELOW - 1, tenure="z", round=1), 0)
    assert leader.events == []
    leader.receive(Register(group=GROUP, member="a", epoch=2, tenure="t", session_timeout_ms=6_000), 0)
    assert [event.happening for event in leader.events] == [GroupEventKind.SUPERSEDED]


def test_an_epoch_is_believed_only_where_the_election_shows_it() -> None:
    """Epochs that members report end no term, however often they come: the coordinator continues to lead."""
    leader = GroupCoordinator(GROUP, 7, GroupRules(sticky_assignment), 0, is_later_epoch=lambda epoch: epoch == 9)
    member = {"group": GROUP, "member": "a", "tenure": "t"}
    register = Register.model_validate({**member, "epoch": 0, "session_timeout_ms": 6_000, "topics": ["orders"]})
    leader.receive(register, 0)
    for epoch in (8, 10, 2**60, NUMBERS_BELOW - 1):
        leader.receive(register.model_copy(update={"epoch": epoch}), 10)
        for kind in (Leave, Pong, Stopped, Started):
            fields = {**member, "epoch": epoch, "round": 1, "generation": 1}
            leader.receive(kind.model_validate(fields), 10)
    assert [event.happening for event in leader.events] == [GroupEventKind.JOINED]
    assert leader.members == ["a"]
    orders = [*leader.update_topics({"orders": 1}, 500), *leader.tick(1_000)]
    assert any(isinstance(order, StartFetcher) for order in orders)
    leader.receive(register.model_copy(update={"epoch": 9}), 1_000)
    assert leader.events[-1].happening is GroupEventKind.SUPERSEDED


def test_an_answer_to_a_ping_that_was_not_sent_counts_for_nothing() -> None:
    """Otherwise a member that answers every ping would count as dead after one forged pong."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0)
    leader.receive(Register(group=GROUP, member="a", epoch=0, tenure="t", session_timeout_ms=6_000), 0)
    for now_ms in range(0, 60_000, 500):
        leader.receive(Pong(group=GROUP, member="a", epoch=1, tenure="t", round=2**60 + now_ms), now_ms)
        for order in leader.tick(now_ms):
            if order.kind == "ping":
                leader.receive(Pong(group=GROUP, member="a", epoch=1, tenure="t", round=order.round), now_ms + 100)
    assert leader.members == ["a"]


@pytest.mark.parametrize(("session_ms", "waits_ms"), [(30_000, 30_000), (3_000, 10_000), (3_600_000, 60_000)])
def test_a_new_coordinator_waits_for_members_as_long_as_their_sessions_last(session_ms: int, waits_ms: int) -> None:
    """A static member may restart while coordinators change; the wait is at most a minute."""
    before = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0)
    before.update_topics({"orders": 4}, 0)
    for name in ("a", "b"):
        fields = {"topics": ["orders"], "session_timeout_ms": session_ms, "is_static": True}
        before.receive(
            Register.model_validate({**fields, "group": GROUP, "member": name, "epoch": 0, "tenure": name}), 0
        )
    for now_ms in range(0, 3_000, 100):
        before.tick(now_ms)
    kept = before.shares()
    assert {share.session_timeout_ms for share in kept} == {session_ms}
    after = GroupCoordinator(GROUP, 2, GroupRules(sticky_assignment), 0, kept=kept, recovery_ms=10_000)
    after.update_topics({"orders": 4}, 0)
    register = {"topics": ["orders"], "session_timeout_ms": session_ms, "is_static": True, "holds": kept[0].places}
    after.receive(Register.model_validate({**register, "group": GROUP, "member": "a", "epoch": 0, "tenure": "a"}), 0)
    actions = []
    for now_ms in range(0, 100_000, 500):
        for order in after.tick(now_ms):
            if order.kind == "ping":
                after.receive(Pong(group=GROUP, member="a", epoch=2, tenure="a", round=order.round), now_ms)
        if any(event.happening is GroupEventKind.FAILED for event in after.events):
            actions.append(now_ms)
    assert actions
    assert waits_ms <= actions[0] <= waits_ms + session_ms / 3 + 1_000


@pytest.mark.parametrize(
    "fields",
    [
        {"rebalance_backoff_ms": math.nan},
        {"gather_ms": math.inf},
        {"gather_ms": -1},
        {"min_session_ms": 0},
        {"min_session_ms": 3_600_001},
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, float]) -> None:
    """The error shows which values are accepted."""
    with pytest.raises(ConfigurationError, match=f"{next(iter(fields))}.*; it must be "):
        GroupRules(sticky_assignment, **fields)  # type: ignore[arg-type]


numbers = st.one_of(st.integers(-2, 3), st.sampled_from([2**31, NUMBERS_BELOW - 1, NUMBERS_BELOW, 2**63]), st.none())
names = st.one_of(st.sampled_from(["a", "b", "*", "", "/", "ö", "x" * 300]), st.text(max_size=5))
places = st.dictionaries(st.sampled_from(["orders", "other", "", ".."]), st.lists(numbers, max_size=3), max_size=2)
KINDS = ("register", "pong", "stopped", "started", "leave", "ping", "registered", "stop", "start")
records = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(
            ["register", "pong", "stopped", "started", "leave", "ping", "registered", "stop", "start", "what"]
        ),
        "group": st.just(GROUP),
        "member": names,
        "epoch": numbers,
        "tenure": names,
    },
    optional={
        "version": numbers,
        "round": numbers,
        "generation": numbers,
        "topics": st.lists(st.sampled_from(["orders", "other", "ö"]), max_size=2),
        "pattern": st.one_of(st.none(), st.sampled_from(["*", "o?d*", "[", "x" * 300])),
        "session_timeout_ms": st.one_of(numbers, st.just(6_000)),
        "capacity": numbers,
        "is_static": st.booleans(),
        "auto_commit": st.booleans(),
        "holds": places,
        "places": places,
        "offsets": st.dictionaries(st.sampled_from(["orders"]), st.dictionaries(st.integers(-1, 3), numbers)),
    },
)


@pytest.mark.thorough
@given(st.lists(st.one_of(records.map(json.dumps), st.text(max_size=20)), max_size=30))
@settings(max_examples=300)
def test_whatever_is_written_nobody_ends_by_it(values: list[str]) -> None:
    """Arbitrary records crash neither a coordinator, nor its successor that reads the kept shares, nor a member."""
    leader = GroupCoordinator(GROUP, 1, GroupRules(sticky_assignment), 0)
    leader.update_topics({"orders": 3}, 0)
    register = Register(group=GROUP, member="a", epoch=0, tenure="a", topics=["orders"], session_timeout_ms=6_000)
    member, now_ms, kept = Membership(register, 0), 0.0, []
    for text in values:
        value = text.encode("utf-8", "replace")
        message, order = parse_member_message(value), parse_coordinator_message(value)
        orders = [
            *(leader.receive(message, now_ms) if message else ()),
            *leader.tick(now_ms),
            *([order] if order else ()),
        ]
        kept += [each for each in orders if isinstance(each, StartFetcher)]
        for each in orders:
            for answer in member.receive(each, now_ms).messages:
                leader.receive(answer, now_ms)
        now_ms += 700
    heir = GroupCoordinator(GROUP, 2, GroupRules(sticky_assignment), now_ms, kept=kept)
    heir.update_topics({"orders": 3}, now_ms)
    for _ in range(100):
        now_ms += 1_000
        for each in heir.tick(now_ms):
            render(each)
