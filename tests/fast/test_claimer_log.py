"""What a claimer does on a log that changed, or that Go consumers share (PROTOCOL.md 6 and 7).

On a log in memory whose faults a test chooses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.log import Ack, Append, Chunk, PositionLost
from marshal_dagster.errors import (
    ClaimLost,
    LogChanged,
    NotCertain,
)
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    Heartbeat,
    RevokingClaim,
    RuleSet,
    Settings,
)
from marshal_dagster.testing import MemoryLog
from tests.faulty_log import FaultyLog
from tests.members import (
    SETTINGS,
    TOPIC,
    Site,
    about,
)

GO = Settings(60_000, RuleSet.GO)


@pytest.fixture
def site() -> Site:
    """A coordination topic of its own."""
    return Site()


# A log that is not the one read before


@pytest.mark.parametrize(
    "change",
    [
        lambda site: site.broker.truncate(site.home, 1),
        lambda site: site.broker.make_anew(),
        lambda site: site.broker.make_anew(partitions=7),
    ],
    ids=["truncated", "made anew", "repartitioned"],
)
def test_a_log_that_changed_ends_every_claim(site: Site, change: Callable[[Site], None]) -> None:
    """When the log is another one, each step fails clearly, the claims are over, and nothing more is sent."""
    member = site.owner_of(0, 1)
    change(site)

    with pytest.raises(LogChanged):
        member.beat()
    before = [site.broker.records(number) for number in range(site.broker.identity.partitions)]

    with pytest.raises(ClaimLost, match=r"made anew|truncated"):
        member.check([0])
    member.release()
    assert not member.claims
    assert [site.broker.records(number) for number in range(site.broker.identity.partitions)] == before


def test_a_new_log_that_has_outgrown_the_old_one_is_noticed(site: Site) -> None:
    """A topic made anew is noticed by the next heartbeat or commit though it is longer than what one has read."""
    first, second = site.owner_of(0), site.owner_of(1)
    site.broker.make_anew()
    for _ in range(100):
        site.broker.append(site.home, b"anything")

    with pytest.raises(LogChanged, match="made anew"):
        first.beat()
    with pytest.raises(LogChanged, match="made anew"):
        second.commit({1: 10})


def test_another_member_of_the_process_hears_of_it(site: Site) -> None:
    """Once a rationalizer has seen that the log changed, all claims that rest on it are over."""
    member = site.owner_of(0)
    other = Claimer(member.rationalizer, member.member.anew(), TOPIC, SETTINGS, clock=site.clock)
    other.claim([1])
    site.broker.truncate(site.home, 1)

    with pytest.raises(LogChanged):
        other.agree_on_settings()
    with pytest.raises(ClaimLost, match="truncated"):
        member.check([0])


def test_a_log_cut_by_retention_ends_the_claims_of_a_reader_left_behind(site: Site) -> None:
    """A member whose reader was overtaken by retention holds nothing any more: it can only observe."""
    member = site.owner_of(0)
    site.overtake()

    with pytest.raises((ClaimLost, LogChanged)):
        member.beat()
    assert not member.claims
    with pytest.raises(NotCertain):
        site.claimer().claim([0])


@pytest.mark.parametrize("settings", [SETTINGS, Settings()], ids=["own settings", "defaults"])
def test_a_claim_that_retention_overtakes_is_none(site: Site, settings: Settings) -> None:
    """Who can only observe by the time that its claim is read back has won nothing, whatever looks accepted."""
    site.begin(0, settings=settings)
    log = site.log()
    member = site.claimer(settings=settings, log=log)
    member.agree_on_settings()
    log.before_append = site.overtake
    with pytest.raises(NotCertain):
        member.claim([0])
    assert not member.claims


class CutLog(MemoryLog):
    """Right after it has acknowledged the first record that asks for something, that one is lost."""

    has_cut = False

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append, and cut."""
        acks = super().append(records)
        offset = acks[0].offset
        if not self.has_cut and offset is not None and records[0].value.startswith(b"Claiming"):
            self.has_cut = True
            self.broker.truncate(records[0].partition, offset)
        return acks


def test_a_claim_that_was_lost_before_its_append_was_through_is_none(site: Site) -> None:
    """Two records were acknowledged where the log holds one: simulator seeds 537039 and 735423."""
    member = site.member(log=FaultyLog(CutLog(site.broker)))

    with pytest.raises(LogChanged, match="not the one that was acknowledged"):
        member.claim([0, 1, 2])

    assert not member.claims


def test_a_claim_of_ranges_that_was_lost_before_its_append_was_through_is_none(site: Site) -> None:
    """So it is with ranges."""
    site.begin(0, 1)
    member = site.range_claimer(log=FaultyLog(CutLog(site.broker)))

    with pytest.raises(LogChanged, match="not the one that was acknowledged"):
        member.claim({0: (0, 5), 1: (0, 5)})

    assert not member.claims


class OvertakenLog(MemoryLog):
    """Gives record by record; before the next one after a claim's first, retention deletes what was given."""

    has_overtaken = False

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read, and overtake in the middle of it."""
        for chunk in super().read_until(ends, timeout_s):
            for record in chunk.records:
                yield Chunk(chunk.partition, [record], record[0] + 1)
                if not self.has_overtaken and (record[2] or b"").startswith(b"Claiming"):
                    self.has_overtaken = True
                    self.broker.retain_from(chunk.partition, record[0] + 2)
                    raise PositionLost(chunk.partition)


def test_a_claim_that_retention_overtakes_once_it_was_read_is_none(site: Site) -> None:
    """What the record came to was told before retention took the state that it led to."""
    member = site.member(log=FaultyLog(OvertakenLog(site.broker)))

    with pytest.raises(NotCertain):
        member.claim([0, 1, 2])

    assert not member.claims


def test_who_gives_up_a_part_and_can_only_observe_then_holds_nothing(site: Site) -> None:
    """What retention overtook while the last words were read back is no claim any more."""
    log = site.log()
    member = site.owner_of(0, 1, log=log)
    log.before_append = site.overtake

    member.release([0])

    assert not member.claims
    with pytest.raises(ClaimLost, match="can only be observed"):
        member.check()


def test_who_gives_up_a_range_and_can_only_observe_then_holds_none(site: Site) -> None:
    """So it is with ranges: simulator seed 530395."""
    site.begin(0, 1)
    log = site.log()
    member = site.range_claimer(log=log)
    member.claim({0: (0, 5), 1: (0, 5)})
    log.before_append = site.overtake

    member.release([0])

    assert not member.claims
    with pytest.raises(ClaimLost, match="can only be observed"):
        member.check()


# A group shared with Go consumers


def test_a_member_waits_a_second_longer_in_a_group_shared_with_go(site: Site) -> None:
    """Under the rule set `go` a partition is asked for a second after its owner went stale."""
    site.owner_of(0, settings=GO)
    member = site.member(settings=GO)
    site.clock.advance(120_001)
    assert member.claimable([0]) == []
    assert member.claim([0]) == []

    site.clock.advance(1_000)

    assert len(member.claim([0])) == 1


def test_who_was_replaced_does_not_beat_the_claim_back(site: Site) -> None:
    """Under `go`, where a heartbeat takes a partition, a member reads before it beats: one that was replaced stops."""
    member = site.owner_of(0, settings=GO)
    epoch = member.claims[0].epoch
    site.say(about(RevokingClaim, "ops.1", epoch=epoch))
    site.say(about(ClaimingPartition, "go.1"))

    with pytest.raises(ClaimLost, match=r"go\.1"):
        member.beat()
    assert site.owner() == "go.1"


def test_who_is_displaced_by_a_heartbeat_stops(site: Site) -> None:
    """Under `go` the heartbeat of another takes the partition, and the owner that reads it is fenced."""
    member = site.owner_of(0, settings=GO)
    site.say(about(Heartbeat, "go.1", offset=0))

    with pytest.raises(ClaimLost, match=r"go\.1"):
        member.commit({0: 10})
