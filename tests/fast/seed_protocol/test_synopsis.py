"""Check the section "Synopsis" of the seed protocol."""

from contextlib import suppress

import pytest

from marshal_dagster.coordination.log import DEFAULT_COORDINATION_TOPIC
from marshal_dagster.errors import ClaimLostError, CoordinationLogChangedError
from marshal_dagster.protocol.messages import DeliveryMode, Heartbeat
from tests.batch_fixtures import Scene
from tests.fast.seed_protocol.sentences import sentence
from tests.faulty_log import Fault
from tests.members import HI_MS, Site, about, faulty
from tests.real.kill_points import KillableLog, KilledError, KillPoint, Side

APPENDS = ("GroupSettings", "ClaimingPartition", "DataTopic", "Heartbeat", "ClaimingMessages", "ReleasingPartition")


@sentence("Synopsis", "sentence 1", "Any number of consumers divide the work and share nothing except Kafka")
def test_synopsis_sentence_1_members_share_nothing_but_the_log(site: Site) -> None:
    """Members that only share the topic hold every partition, and none twice."""
    members = [site.member() for _ in range(5)]
    for member in members:
        member.rationalizer.catch_up()
        member.claim(member.claimable(range(10)), max_claims=2)
    assert site.member().claim(range(10)) == []

    held = [(claim, member.member.instance) for member in members for claim in member.claims]
    assert sorted(held) == [(number, site.owner(number)) for number in range(10)]


@sentence("Synopsis", "sentence 2", "The protocol gives the guarantees of a lock service without one")
def test_synopsis_sentence_2_exclusion_succession_and_fencing(site: Site) -> None:
    """A successor gets a silent owner's partition with a higher token; the late owner changes nothing."""
    first = site.owner_of(0)
    epoch = first.claims[0].epoch
    assert site.member().claim([0]) == []
    site.clock.advance(2 * HI_MS + 1)
    second = site.owner_of(0)

    site.say(about(Heartbeat, first.member.instance, offset=5))
    assert second.claims[0].epoch > epoch
    assert (site.owner(), site.key().offset) == (second.member.instance, 0)


@sentence("Synopsis", "sentence 3", "A separate topic is the transaction log that determines all state")
def test_synopsis_sentence_3_nothing_counts_that_is_not_in_the_log(site: Site) -> None:
    """A member's state is what a reader of the log finds; a record that did not reach the log has no effect."""
    member = site.owner_of(0)
    member.plan({0: 5})
    claim, key = member.claims[0], site.key()
    assert (claim.offset, claim.plan_end, claim.epoch) == (key.offset, key.plan_end, key.owner and key.owner.epoch)

    faulty(member).fail(Fault.FAILED)
    with pytest.raises(ClaimLostError):
        member.commit({0: 5})
    assert (site.key().offset, site.key().plan_end) == (0, 5)
    assert DEFAULT_COORDINATION_TOPIC == "__marshal"


@sentence("Synopsis", "sentence 4", "The order within a partition is enough, except after an unclean election")
def test_synopsis_sentence_4_order_decides_and_a_truncated_log_ends_every_claim(site: Site) -> None:
    """The first record in the log wins, whichever was sent first; no member trusts a log that lost records."""
    first, second = site.member(), site.member()

    def first_is_faster() -> None:
        first.claim([0])

    faulty(second).before_append = first_is_faster
    assert second.claim([0]) == []
    assert list(first.claims) == [0]

    site.broker.truncate(site.home, site.broker.bounds(site.home).end - 2)
    with pytest.raises(CoordinationLogChangedError):
        second.rationalizer.catch_up()
    with pytest.raises(CoordinationLogChangedError):
        first.beat({0: 0})
    assert not first.claims


@pytest.mark.slow
@sentence("Synopsis", "sentence 5", "The protocol handles failures at any step")
def test_synopsis_sentence_5_a_member_may_die_at_any_step() -> None:
    """Whichever append is a member's last, written or not: others process the rest, once."""
    for at in (KillPoint(side, record) for record in APPENDS for side in Side):
        scene = Scene()
        scene.data.make(partitions=2, messages=5)
        log = KillableLog(scene.log(), at)
        with suppress(KilledError):
            scene.drain(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE, log=log), max_records=4)
        assert log.dead, at
        scene.wait_until_stale()
        scene.drain(scene.delivery(DeliveryMode.EFFECTIVELY_ONCE))

        assert scene.sink.counts() == dict.fromkeys(scene.data.all_messages(), 1), at
