"""Check a deployment as a member of a coordinated group: its sensor, its membership, and what its runs may claim."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import pytest

from marshal_dagster import ClaimerResource, ConfigurationError, KafkaConnectionConfig, UnavailableError
from marshal_dagster.coordinator import assignment_reader
from marshal_dagster.coordinator.assignment_reader import AssignmentReader, assigned_partitions
from marshal_dagster.coordinator.group_view import GroupAssignments, MemberAssignment
from marshal_dagster.coordinator.member import MemberState
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.jobs.batch import build_claimed_batch_job
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.ops.claimed_batch import build_claimed_batch_op
from marshal_dagster.sensors import group_membership
from marshal_dagster.sensors.group_membership import build_group_member_sensor, process_member
from tests.conditions import WITHIN_S, wait_until

CONNECTION = KafkaConnection(bootstrap_servers="127.0.0.1:1")
SESSION_MS = 6_000
NOW_MS = 1_000_000

op = build_claimed_batch_op(lambda *_: None, topic="parcels", name="take")
job = build_claimed_batch_job(op)


@dataclass
class Member:
    """The attributes of a `CoordinatedMember`."""

    places: frozenset[tuple[str, int]] = frozenset()
    state: MemberState = MemberState.REGISTERED
    error: str | None = None
    failure: Exception | None = None
    silence_ms: float = 0.0
    is_over: bool = False

    def silent_ms(self) -> float:
        """Return the time since the last message of a coordinator."""
        return self.silence_ms

    def __exit__(self, *_: object) -> None:
        """End the membership."""
        self.is_over = True


@dataclass
class Joined:
    """The memberships that were started."""

    members: list[Member] = field(default_factory=list)
    interests: list[group_membership.Subscription] = field(default_factory=list)

    def join(self, _: object, __: object, ___: str, interest: group_membership.Subscription) -> Any:  # noqa: ANN401 - a stand-in
        """Start a membership."""
        self.interests.append(interest)
        self.members.append(Member())
        return self.members[-1]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    """Yield memberships that need no Kafka."""
    made = Joined()
    monkeypatch.setattr(group_membership, "_join", made.join)
    yield made
    for key, membership in list(group_membership._kept.items()):
        group_membership._leave(key, membership)


def claimer(**fields: Any) -> ClaimerResource:  # noqa: ANN401 - any field
    """Return a claimer of the member `east`."""
    connection = KafkaConnectionConfig(bootstrap_servers="127.0.0.1:1")
    return ClaimerResource(**{"connection": connection, "group": "parcels", "member": "east", **fields})


def tick(sensor: dg.SensorDefinition, cursor: str | None = None, **fields: Any) -> dg.SensorResult:  # noqa: ANN401
    """Evaluate the sensor once."""
    with dg.build_sensor_context(cursor=cursor, resources={"claimer": claimer(**fields)}) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def view(**shares: list[int]) -> GroupAssignments:
    """Return a group whose coordinator was heard a second ago."""
    made = {
        name: MemberAssignment(name, "t", 4, 2, frozenset(("parcels", number) for number in numbers))
        for name, numbers in shares.items()
    }
    return GroupAssignments("parcels", 2, made, NOW_MS - 1_000)


def test_the_sensor_keeps_one_membership_and_asks_for_runs_of_what_is_new(joined: Joined) -> None:
    """The sensor requests a run when the member gains partitions, not when it keeps or loses them."""
    sensor = build_group_member_sensor(job, capacity=2)
    first = tick(sensor)
    assert joined.interests == [group_membership.Subscription(("parcels",), None, 2)]
    joined.members[0].places = frozenset({("parcels", 0), ("parcels", 1)})
    gained = tick(sensor, first.cursor)
    joined.members[0].places = frozenset({("parcels", 1)})
    lost = tick(sensor, gained.cursor)
    joined.members[0].places = frozenset({("parcels", 1), ("parcels", 2)})
    other = tick(sensor, lost.cursor)

    assert len(joined.members) == 1
    assert [len(each.run_requests or ()) for each in (first, gained, lost, other)] == [0, 1, 0, 1]
    assert (gained.run_requests or ())[0].tags["marshal/member"] == "east"
    assert "registered, with 1 of 'parcels'" in str(lost.skip_reason)


def test_a_tick_reports_that_no_coordinator_is_heard(joined: Joined) -> None:
    """Runs then claim what is free, so nothing else shows that the work is not spread."""
    sensor = build_group_member_sensor(job)
    tick(sensor)
    (member,) = joined.members
    member.silence_ms = 59_000
    assert "coordinator" not in str(tick(sensor).skip_reason)
    member.silence_ms = 60_000
    assert "no coordinator has sent a message for 60 s" in str(tick(sensor).skip_reason)
    member.failure = UnavailableError("no key file")
    assert "; no key file" in str(tick(sensor).skip_reason)


def test_a_group_whose_brokers_are_slow_keeps_no_other_waiting(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tick that waits for a broker blocks only the ticks of its own membership."""
    interest = group_membership.Subscription(("parcels",), None, 1)
    waits, may_go_on = threading.Event(), threading.Event()

    def join(of: ClaimerResource, *rest: Any) -> Any:  # noqa: ANN401 - a stand-in
        if of.group == "slow":
            waits.set()
            may_go_on.wait()
        return joined.join(of, *rest)

    monkeypatch.setattr(group_membership, "_join", join)
    slow = threading.Thread(target=process_member, args=(claimer(group="slow"), interest, 60.0))
    other = threading.Thread(target=process_member, args=(claimer(), interest, 60.0))
    slow.start()
    waits.wait()
    other.start()
    other.join(WITHIN_S)
    is_held_up = other.is_alive()
    may_go_on.set()
    slow.join()
    assert not is_held_up


def test_schedules_alone_may_start_runs(joined: Joined) -> None:
    """The sensor then only keeps the member alive."""
    sensor = build_group_member_sensor(job, asks_for_runs=False)
    first = tick(sensor)
    joined.members[0].places = frozenset({("parcels", 0)})
    assert not tick(sensor, first.cursor).run_requests


@pytest.mark.thorough
def test_a_member_whose_sensor_is_off_leaves(joined: Joined) -> None:
    """The membership ends if ticks stop; a later tick starts another membership."""
    interest = group_membership.Subscription(("parcels",), None, 1)
    process_member(claimer(), interest, 10_000)
    (kept,) = group_membership._kept.values()
    first = kept.timer
    process_member(claimer(), interest, 60)
    assert first is not None
    first.join()  # it was cancelled
    assert [member.is_over for member in joined.members] == [False]
    process_member(claimer(), interest, 0.01)
    wait_until(lambda: all(each.is_over for each in joined.members), "the membership has ended")
    process_member(claimer(), interest, 60)
    assert [each.is_over for each in joined.members] == [True, False]


@pytest.mark.parametrize(
    ("error", "said", "joins"),
    [
        ("duplicate_id", "Give each deployment its own name", 1),
        ("session_timeout_too_short", "member_session_s is 30, less than the coordinator's --min-session", 2),
        ("bad_pattern", "a pattern may have", 2),
    ],
)
def test_a_refusal_is_reported_with_what_to_do(joined: Joined, error: str, said: str, joins: int) -> None:
    """After a refusal that may be temporary, the next tick registers again."""
    sensor = build_group_member_sensor(job)
    tick(sensor)
    joined.members[0].error = error
    interest = group_membership.Subscription(("parcels",), None, 1)
    assert group_membership._refused("east", claimer(), error).startswith(
        "member 'east' of group 'parcels' was refused: "
    )
    assert said in group_membership._refused("east", claimer(), error)
    process_member(claimer(), interest, 60)
    assert len(joined.members) == joins
    if joins == 1:
        with pytest.raises(ConfigurationError, match="was refused"):
            tick(sensor)


def test_what_cannot_be_is_refused(joined: Joined) -> None:
    """A claimer without a member name, a capacity of 0 and a name that no record can carry are refused."""
    with pytest.raises(ConfigurationError, match=r"resource 'claimer' has no member"):
        tick(build_group_member_sensor(job), member=None)
    with pytest.raises(ConfigurationError, match="capacity is 0"):
        build_group_member_sensor(job, capacity=0)
    with pytest.raises(ConfigurationError, match="cannot be a name"):
        claimer(member="a/b")
    assert not joined.members


@pytest.mark.parametrize(
    ("of", "now_ms", "expected"),
    [
        (view(east=[0, 1], west=[2]), NOW_MS, ({0, 1}, "2 of 3 partitions of topic 'parcels' to member 'east'")),
        (view(east=[], west=[2]), NOW_MS, (set(), "0 of 1 partitions")),
        (view(west=[2]), NOW_MS, (set(), "has no member 'east', only west; check that the")),
        (view(), NOW_MS, None),
        (view(east=[], west=[]), NOW_MS, None),
        (view(east=[0], west=[2]), NOW_MS + 2 * SESSION_MS - 1_001, ({0}, "1 of 2 partitions")),
        (view(east=[0], west=[2]), NOW_MS + 2 * SESSION_MS - 1_000, None),
        (GroupAssignments("parcels", 2, view(east=[0]).shares, None), NOW_MS, None),
    ],
    ids=["share", "nothing", "unknown", "no members", "no partition", "heard", "silent", "never heard"],
)
def test_a_member_is_limited_to_its_share_while_the_coordinator_lives(
    of: GroupAssignments, now_ms: int, expected: tuple[set[int], str] | None
) -> None:
    """There is no limit if the coordinator was silent for two session timeouts, or has assigned nothing to any member.

    Otherwise all runs would end without work, and the topic would never be processed.
    """
    found = assigned_partitions(of, "east", "parcels", SESSION_MS, now_ms)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.partitions == expected[0]
    assert expected[1] in found.text


def test_the_last_message_to_a_member_is_reported() -> None:
    """The text shows when the member last gained partitions, so a batch's metadata show rebalances."""
    gained = frozenset({("parcels", 1), ("other", 2)})
    share = MemberAssignment(
        "east", "t", 2, 1, frozenset({("parcels", 0), *gained}), SESSION_MS, gained, 1_795_438_800_000
    )
    found = assigned_partitions(
        GroupAssignments("parcels", 1, {"east": share}, NOW_MS), "east", "parcels", SESSION_MS, NOW_MS
    )
    assert found is not None
    assert "; at 2026-11-23 13:00:00Z it added partitions 1" in found.text


@pytest.mark.parametrize("at_ms", [2**63 - 1, -(2**63), 1_795_438_800_000_000_000])
def test_a_time_beyond_the_calendar_stops_no_reader(at_ms: int) -> None:
    """A time outside of the calendar, such as one in nanoseconds, is shown as a number."""
    place = frozenset({("parcels", 1)})
    share = MemberAssignment("east", "t", 2, 1, place, SESSION_MS, place, at_ms)
    found = assigned_partitions(
        GroupAssignments("parcels", 1, {"east": share}, NOW_MS), "east", "parcels", SESSION_MS, NOW_MS
    )
    assert found is not None
    assert f"; at {at_ms // 1_000} s after 1970 it added partitions 1" in found.text


def test_a_coordinator_heard_in_the_future_limits_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """One clock is wrong then, so nothing is known about the coordinator's silence; a small difference is accepted."""
    ahead = GroupAssignments("parcels", 2, view(east=[1]).shares, NOW_MS + SESSION_MS + 1)
    assert assigned_partitions(ahead, "east", "parcels", SESSION_MS, NOW_MS) is None
    assert "message is 6 s in the future" in caplog.text
    little = GroupAssignments("parcels", 2, view(east=[1]).shares, NOW_MS + SESSION_MS)
    assert assigned_partitions(little, "east", "parcels", SESSION_MS, NOW_MS) is not None


def reads(*views: GroupAssignments | Exception) -> tuple[list[int], Callable[..., GroupAssignments]]:
    """Return a reader of these views, with its count of calls."""
    left, count = list(views), [0]

    def read(*_: object) -> GroupAssignments:
        count[0] += 1
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return count, read


def test_what_cannot_be_read_limits_nobody() -> None:
    """The next batch reads the assignment again; a successful read is used for some seconds."""
    recent = GroupAssignments("parcels", 2, view(east=[1]).shares, round(time.time() * 1_000))
    count, read = reads(UnavailableError("no broker"), recent)
    adviser = AssignmentReader(CONNECTION, CoordinatorTopics(), "parcels", "east", SESSION_MS, read)
    assert adviser.assigned_partitions("parcels") is None
    for _ in range(3):
        found = adviser.assigned_partitions("parcels")
        assert found is not None
        assert found.partitions == {1}
    assert count == [2]


def test_what_was_read_last_counts_while_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last assignment counts as long as a coordinator may be silent.

    So during a short outage of the brokers, a member does not claim partitions of other members.
    """
    monkeypatch.setattr(assignment_reader, "_OLD_S", 0.0)
    recent = GroupAssignments("parcels", 2, view(east=[1]).shares, round(time.time() * 1_000))
    count, read = reads(recent, UnavailableError("no broker"), UnavailableError("no broker"))
    adviser = AssignmentReader(CONNECTION, CoordinatorTopics(), "parcels", "east", SESSION_MS, read)
    for _ in range(2):
        found = adviser.assigned_partitions("parcels")
        assert found is not None
        assert found.partitions == {1}
    later_s = time.time() + 2 * SESSION_MS / 1_000 + 1
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert adviser.assigned_partitions("parcels") is None
    assert count == [3]
