"""`doctor` on the senders of the newest records: wrong clocks, and settings and intervals other than the group's."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from marshal_dagster.cli.doctor_checks.finding import CheckState, Finding
from marshal_dagster.cli.doctor_checks.senders import NEWEST, RECENT_MS, check_senders, newest
from marshal_dagster.coordination.log import Chunk, PositionLostError
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    DataTopic,
    GroupSettings,
    GroupSettingsRecord,
    Heartbeat,
    Mark,
    Message,
    RangeHeartbeat,
    ReleaseGroup,
    ReleasingPartition,
    RuleSet,
    coordination_partition,
    render,
)
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog

PARTITIONS = 4
HOME = coordination_partition("orders", PARTITIONS)
OTHER = (HOME + 1) % PARTITIONS
BEAT = Heartbeat(instance="i", client="c", group="g", topic="orders", partition=0, time_s=0, offset=1)
RANGE_BEAT = RangeHeartbeat(instance="i", client="c", group="g", topic="orders", partition=0, time_s=0, epoch=0)
CLAIM = ClaimingPartition(instance="i", client="c", group="g", topic="orders", partition=0, time_s=0)
RELEASE = ReleasingPartition(instance="i", client="c", group="g", topic="orders", partition=0, time_s=0, offset=1)
FAST = GroupSettings(heartbeat_interval_ms=10_000)


@pytest.fixture
def clock() -> ManualClock:
    """A clock that runs only when a test advances it."""
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> MemoryBroker:
    """An empty coordination topic, whose broker uses that clock."""
    return MemoryBroker(PARTITIONS, now_ms=clock.wall_ms)


def send(broker: MemoryBroker, message: Message, *, ahead_ms: int = 0, partition: int = HOME) -> None:
    """Append a message whose sender's clock is `ahead_ms` later than the broker's."""
    broker.append(partition, render(replace(message, time_s=(broker.now_ms() + ahead_ms) // 1_000)))


def ask(broker: MemoryBroker, settings: GroupSettings, *, client: str = "c", partition: int = HOME) -> None:
    """Append a record that requests these settings."""
    send(
        broker,
        GroupSettingsRecord(instance="i", client=client, group="g", time_s=0, settings=settings),
        partition=partition,
    )


def findings(broker: MemoryBroker, clock: ManualClock) -> dict[str, Finding]:
    """Return the findings by name, after a check that each problem has a reason and a fix."""
    log = MemoryLog(broker)
    world = Rationalizer(log, timeout_s=1, clock=clock).catch_up()
    found = list(check_senders(newest(log, 1, clock.wall_ms()), world, clock.wall_ms()))
    assert all(each.state is CheckState.OK or all((each.why, each.fix)) for each in found)
    return {each.name: each for each in found}


def states(broker: MemoryBroker, clock: ManualClock) -> tuple[CheckState, CheckState]:
    """Return the states of both checks."""
    found = findings(broker, clock)
    return found["clocks"].state, found["members"].state


def test_an_empty_log_has_nothing_to_report(broker: MemoryBroker, clock: ManualClock) -> None:
    """Without records there is no finding."""
    assert states(broker, clock) == (CheckState.OK, CheckState.OK)


@pytest.mark.parametrize(("ahead_ms", "is_reported"), [(0, False), (5_000, False), (6_000, True), (3_600_000, True)])
def test_a_sender_whose_clock_is_ahead_is_reported(
    broker: MemoryBroker, clock: ManualClock, ahead_ms: int, *, is_reported: bool
) -> None:
    """A record cannot be sent after the broker received it, so one record is enough."""
    send(broker, CLAIM, ahead_ms=ahead_ms)
    finding = findings(broker, clock)["clocks"]
    assert (finding.state is CheckState.WARNING) == is_reported
    assert ("client c is" in finding.found and "ahead of the broker's" in finding.found) == is_reported
    assert (f"(coordination partitions {HOME})" in finding.found) == is_reported


@pytest.mark.parametrize(
    ("behind_ms", "is_reported"),
    [([9_000], False), ([9_000] * 3, True), ([9_000, 9_000, 2_000], False), ([5_000] * 3, False)],
)
def test_a_sender_whose_clock_is_behind_is_reported(
    broker: MemoryBroker, clock: ManualClock, behind_ms: list[int], *, is_reported: bool
) -> None:
    """A record may wait before it is sent, so several are needed, and the smallest difference counts."""
    for each in behind_ms:
        send(broker, BEAT, ahead_ms=-each)
    finding = findings(broker, clock)["clocks"]
    assert (finding.state is CheckState.WARNING, "behind the broker's" in finding.found) == (is_reported, is_reported)


def test_clocks_are_compared_for_each_client_and_coordination_partition(
    broker: MemoryBroker, clock: ManualClock
) -> None:
    """If one broker's clock is wrong, records in other brokers' partitions agree."""
    mark = Mark(instance="i", client="c", group="g", time_s=0)
    send(broker, mark, partition=OTHER)
    send(broker, mark, ahead_ms=60_000)
    send(broker, replace(mark, client="d"))
    found = findings(broker, clock)["clocks"].found
    assert (f"(coordination partitions {HOME})" in found, "client d" in found) == (True, False)


def test_what_was_long_ago_is_not_reported(broker: MemoryBroker, clock: ManualClock) -> None:
    """A clock that was wrong last week may have been corrected."""
    send(broker, CLAIM, ahead_ms=60_000)
    clock.advance(RECENT_MS)
    assert states(broker, clock)[0] is CheckState.WARNING
    clock.advance(1)
    assert states(broker, clock)[0] is CheckState.OK


@pytest.mark.slow
def test_of_a_long_log_the_end_is_read(broker: MemoryBroker, clock: ManualClock) -> None:
    """Only the newest records are checked."""
    send(broker, CLAIM, ahead_ms=60_000)
    for _ in range(NEWEST - 1):
        send(broker, BEAT)
    assert states(broker, clock)[0] is CheckState.WARNING
    send(broker, BEAT)
    assert states(broker, clock)[0] is CheckState.OK


def test_junk_is_passed_over(broker: MemoryBroker, clock: ManualClock) -> None:
    """An invalid record proves nothing about its sender."""
    broker.append(HOME, b"junk")
    broker.append(HOME, None)
    assert "0 records" in findings(broker, clock)["clocks"].found


def test_settings_that_were_refused_are_reported(broker: MemoryBroker, clock: ManualClock) -> None:
    """A request for different settings is reported with client id, settings and place."""
    ask(broker, FAST)
    ask(broker, GroupSettings(), client="d")
    finding = findings(broker, clock)["members"]
    assert finding.state is CheckState.WARNING
    assert "group g: client d requested settings that are not in force, heartbeat interval 60 s" in finding.found
    assert finding.found.endswith(f"in coordination partitions {HOME}")


def test_settings_that_were_in_force_before_are_not_reported(broker: MemoryBroker, clock: ManualClock) -> None:
    """Settings that are repeated, or changed in a pause by the pausing instance, are fine in each partition."""
    ask(broker, FAST)
    ask(broker, FAST, partition=OTHER)
    ask(broker, FAST)
    until_s = clock.wall_ms() // 1_000 + 60
    send(broker, ReleaseGroup(instance="i", client="c", group="g", time_s=0, expiry_s=until_s))
    ask(broker, GroupSettings())
    assert states(broker, clock) == (CheckState.OK, CheckState.OK)


@pytest.mark.parametrize("beat", [BEAT, RANGE_BEAT])
@pytest.mark.parametrize(
    ("gaps_ms", "is_reported"),
    [
        ([60_000] * 2, True),
        ([12_501] * 2, True),
        ([12_500] * 2, False),
        ([60_000], False),
        ([60_000, 60_000, 9_000], False),
    ],
)
def test_a_member_that_beats_too_seldom_is_reported(
    broker: MemoryBroker, clock: ManualClock, beat: Message, gaps_ms: list[int], *, is_reported: bool
) -> None:
    """Several gaps between an instance's heartbeats are all longer than the group's interval."""
    ask(broker, FAST)
    send(broker, beat)
    for gap_ms in gaps_ms:
        clock.advance(gap_ms)
        send(broker, beat)
    finding = findings(broker, clock)["members"]
    assert (finding.state is CheckState.WARNING) == is_reported
    assert ("heartbeats of client c come every" in finding.found) == is_reported


def test_beats_of_different_tenures_are_not_compared(broker: MemoryBroker, clock: ManualClock) -> None:
    """Intervals are measured for each instance, key and range."""
    ask(broker, FAST)
    for number in range(4):
        clock.advance(60_000)
        send(broker, replace(BEAT, instance=f"i{number}"))
        send(broker, replace(BEAT, partition=number))
        send(broker, replace(RANGE_BEAT, epoch=number))
    assert states(broker, clock)[1] is CheckState.OK


def test_the_beats_of_two_ranges_do_not_fill_each_others_gaps(broker: MemoryBroker, clock: ManualClock) -> None:
    """An instance with two ranges sends heartbeats for each; the gaps of one are not filled by the other."""
    ask(broker, FAST)
    for _ in range(3):
        for epoch in (1, 2):
            clock.advance(9_000)
            send(broker, replace(RANGE_BEAT, epoch=epoch))
    assert states(broker, clock)[1] is CheckState.WARNING


GO = GroupSettings(rule_set=RuleSet.GO)
NAMED = DataTopic(instance="i", client="c", group="g", topic="orders", partition=0, time_s=0, topic_id="A" * 22)


@pytest.mark.parametrize(
    ("settings", "messages", "passed_ms", "is_reported"),
    [
        (GroupSettings(), [CLAIM, BEAT], 0, True),
        (GroupSettings(), [CLAIM, BEAT], RECENT_MS, True),
        (GroupSettings(), [CLAIM, BEAT], RECENT_MS + 1, False),
        (GroupSettings(), [CLAIM, NAMED, BEAT], 0, False),
        (GroupSettings(), [CLAIM], 0, False),
        (GroupSettings(), [CLAIM, BEAT, RELEASE], 0, False),
        (GO, [CLAIM, BEAT], 0, False),
    ],
)
def test_an_owner_that_names_no_data_topic_is_reported(
    broker: MemoryBroker,
    clock: ManualClock,
    settings: GroupSettings,
    messages: list[Message],
    passed_ms: int,
    *,
    is_reported: bool,
) -> None:
    """Only a Go consumer or an older version sends heartbeats for a partition without a DataTopic record."""
    ask(broker, settings)
    for message in messages:
        send(broker, message)
    clock.advance(passed_ms)
    finding = findings(broker, clock)["members"]
    assert (finding.state is CheckState.WARNING) == is_reported
    assert ("client c holds 1 partitions and names no data topic" in finding.found) == is_reported


def test_of_a_log_that_is_only_observed_no_owner_is_judged(broker: MemoryBroker, clock: ManualClock) -> None:
    """The DataTopic record of an owner may have been deleted."""
    for message in (NAMED, CLAIM, BEAT):
        send(broker, message)
    broker.retain_from(HOME, 1)
    assert states(broker, clock)[1] is CheckState.OK


class CutLog(MemoryLog):
    """A log that retention cuts while it is read."""

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Return the records, then fail because retention has overtaken the reader."""
        yield from super().read_until(ends, timeout_s)
        raise PositionLostError(HOME)


def test_what_retention_takes_meanwhile_is_left_out(broker: MemoryBroker, clock: ManualClock) -> None:
    """Records read before retention overtook the reader are checked all the same."""
    send(broker, CLAIM)
    assert len(newest(CutLog(broker), 1, clock.wall_ms())) == 1


def test_a_few_of_many_are_shown(broker: MemoryBroker, clock: ManualClock) -> None:
    """A log full of wrong clocks gives a line of limited length."""
    for number in range(8):
        send(broker, replace(CLAIM, client=f"c{number}"), ahead_ms=60_000)
    assert findings(broker, clock)["clocks"].found.endswith(" and 3 more")
