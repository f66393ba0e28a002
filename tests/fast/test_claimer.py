"""How a claimer gets partitions: settings, claims, dead owners and the data topic's id (protocol.md, section 6).

The log is in memory, and each test chooses its faults.
"""

import logging
import threading

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    ClaimLostError,
    ConfigurationError,
    GroupPausedError,
    IncompleteLogError,
    SettingsMismatchError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import (
    ClaimingPartition,
    DeliveryMode,
    GroupSettings,
    ReleaseGroup,
    RevokingClaim,
    RuleSet,
    coordination_partition,
    render,
)
from marshal_dagster.protocol.state import Owner
from marshal_dagster.testing import MemoryLog
from tests.conditions import WITHIN_S
from tests.faulty_log import Fault, FaultyLog, InterruptError, of_type
from tests.members import (
    GROUP,
    HI_MS,
    OTHER_TOPIC_ID,
    SETTINGS,
    TOPIC,
    TOPIC_ID,
    Site,
    about,
    faulty,
    messages_sent_by,
    raiser,
    settings_record,
)


@pytest.fixture
def site() -> Site:
    """An empty coordination topic."""
    return Site()


# The member's names and settings


def test_each_tenure_has_an_instance_id_of_its_own() -> None:
    """An instance id consists of the run's id, a dot and a unique part."""
    ids = {new_instance_id("run1") for _ in range(100)}

    assert len(ids) == 100
    assert all(one.startswith("run1.") for one in ids)
    assert Member("g", "c", "run1.aa").with_new_instance().instance.rpartition(".")[0] == "run1"


@pytest.mark.parametrize("field", ["group", "client", "instance"])
@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "a\ud800", "x" * 256])
def test_a_name_that_no_record_carries_is_refused(field: str, name: str) -> None:
    """A group, client or instance id that would break a record is an error that names the field."""
    fields = {"group": "g", "client": "c", "instance": "i"} | {field: name}

    with pytest.raises(ConfigurationError, match=field):
        Member(**fields)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (GroupSettings(HI_MS, features=("ranges", "unheard_of")), r"features \['unheard_of'\]"),
        (GroupSettings(60_000, RuleSet.GO, features=("ranges",)), "'ranges' cannot be used with rule set 'go'"),
        (GroupSettings(60_000, RuleSet.GO, DeliveryMode.AT_MOST_ONCE), "at_least_once"),
        (GroupSettings(60_000, RuleSet.GO, DeliveryMode.EFFECTIVELY_ONCE), "at_least_once"),
        (GroupSettings(HI_MS, RuleSet.GO), "60000"),
        (GroupSettings(0), "heartbeat interval"),
    ],
)
def test_settings_that_a_member_cannot_keep_are_refused(site: Site, settings: GroupSettings, said: str) -> None:
    """A member does not start with settings that it does not know or that its rule set cannot guarantee."""
    with pytest.raises(ConfigurationError, match=said):
        site.claimer(settings=settings)


def test_a_log_that_holds_records_back_too_long_is_refused(site: Site) -> None:
    """A record may wait at most a quarter of the heartbeat interval to be sent; a slower log is refused."""

    class SlowLog(MemoryLog):
        delivery_timeout_ms = HI_MS // 4 + 1

    with pytest.raises(ConfigurationError, match="heartbeat interval"):
        site.claimer(log=FaultyLog(SlowLog(site.broker)))


def test_a_topic_that_is_not_followed_is_refused(site: Site) -> None:
    """A claimer needs a rationalizer that follows its topic's coordination partition."""
    others = (f"topic{number}" for number in range(100))
    elsewhere = next(name for name in others if coordination_partition(name, site.partitions) != site.home)
    rationalizer = Rationalizer(site.log(), topics=[elsewhere], clock=site.clock)

    with pytest.raises(ConfigurationError, match="does not follow"):
        Claimer(rationalizer, Member(GROUP, "c", "run1.0"), TOPIC, SETTINGS)


# Settings


def test_the_first_member_gives_the_group_its_settings_everywhere(site: Site) -> None:
    """A group without settings gets those of its first member, in every coordination partition."""
    site.member()

    found = [partition.groups[GROUP].settings for partition in site.world().partitions.values()]
    assert found == [SETTINGS] * site.partitions


def test_a_member_of_other_settings_does_not_claim(site: Site) -> None:
    """A member whose configuration differs claims nothing, and the error names the value that differs."""
    site.member()
    other = site.claimer(settings=GroupSettings(20_000))

    with pytest.raises(SettingsMismatchError, match=r"heartbeat interval.*20000 here, 10000 in force"):
        other.ensure_group_settings()
    with pytest.raises(SettingsMismatchError):
        other.claim([0])
    assert site.owner() is None


def test_a_group_that_uses_a_feature_unknown_here_is_left_alone(site: Site) -> None:
    """A member does not claim if the group's settings have a feature that it does not know."""
    for partition in range(site.partitions):
        site.broker.append(partition, render(settings_record(GroupSettings(HI_MS, features=("unheard_of",)))))

    with pytest.raises(SettingsMismatchError, match="unheard_of"):
        site.claimer().ensure_group_settings()


def test_half_written_settings_are_completed(site: Site) -> None:
    """Settings that reached only some coordination partitions are written to the others."""
    elsewhere = (site.home + 1) % site.partitions
    site.broker.append(elsewhere, render(settings_record(SETTINGS)))

    site.member()

    found = [partition.groups[GROUP].settings_accepted for partition in site.world().partitions.values()]
    assert found == [True] * site.partitions


def test_half_written_settings_are_not_completed_with_other_values(site: Site) -> None:
    """A member with different settings does not complete settings that are half written."""
    elsewhere = (site.home + 1) % site.partitions
    site.broker.append(elsewhere, render(settings_record(GroupSettings(20_000))))

    with pytest.raises(SettingsMismatchError, match="20000 in force"):
        site.claimer().ensure_group_settings()
    assert site.values() == []


def test_settings_in_the_log_without_acknowledgement_count(site: Site) -> None:
    """Settings without an acknowledgement are found by reading, and apply."""
    member = site.claimer()
    faulty(member).fail(Fault.LOST_ACK)

    member.ensure_group_settings()

    assert member.group.settings_accepted


def test_settings_that_did_not_reach_the_log_are_reported_as_that(site: Site) -> None:
    """If the settings could not be written, the error reports that, not a difference in settings."""
    member = site.claimer()
    faulty(member).fail(Fault.FAILED)

    with pytest.raises(UnavailableError, match="settings"):
        member.ensure_group_settings()


def test_settings_that_change_while_a_claim_is_under_way_end_it(site: Site) -> None:
    """A claim won under settings that changed before it was read back is released without use."""
    site.member()
    member = site.member()
    site.pause(60)
    site.say(settings_record(GroupSettings(20_000)))
    site.say(ReleaseGroup(instance="ops.1", client="ops", group=GROUP, time_s=0, expiry_s=0))

    with pytest.raises(SettingsMismatchError):
        member.claim([0])

    assert site.owner() is None
    assert not member.claims


# Claiming


def test_many_partitions_are_claimed_with_one_append(site: Site) -> None:
    """All partitions are claimed with one append, and all that are free are won."""
    member = site.member()
    appends: list[int] = []
    log = faulty(member)
    log.before_append = lambda: appends.append(len(log.seen))
    before = len(log.seen)

    won = member.claim(range(100))

    assert sorted(claim.partition for claim in won) == list(range(100))
    assert appends == [before + 100]


def test_a_claim_names_its_epoch(site: Site) -> None:
    """The epoch of a claim is the log offset of its record."""
    member = site.member()

    (claim,) = member.claim([7])

    ((offset, _, value),) = [
        each for each in site.broker.records(site.home) if b"ClaimingPartition" in (each[2] or b"")
    ]
    assert claim.epoch == offset
    assert b"/7" in (value or b"")


def test_what_a_live_owner_holds_is_not_won(site: Site) -> None:
    """Only partitions without a live owner are won."""
    site.owner_of(1)
    member = site.member()

    won = member.claim([0, 1, 2])

    assert [claim.partition for claim in won] == [0, 2]


def test_a_stale_owner_is_replaced(site: Site) -> None:
    """A partition is won once its owner has been silent for more than two heartbeat intervals."""
    site.owner_of(0)
    member = site.member()
    site.clock.advance(2 * HI_MS)
    assert member.claim([0]) == []

    site.clock.advance(1)
    assert len(site.member().claim([0])) == 1


def test_of_two_the_first_in_the_log_wins(site: Site) -> None:
    """If two members claim at the same time, both read the same winner."""
    first, second = site.member(), site.member()

    def first_is_faster() -> None:
        first.claim([0])

    faulty(second).before_append = first_is_faster

    assert second.claim([0]) == []
    assert list(first.claims) == [0]
    assert site.owner() == first.member.instance


def test_a_twin_with_the_same_instance_id_is_not_mistaken_for_oneself(site: Site) -> None:
    """A claim is won only by a record that this process appended, which its log offset identifies."""
    site.member()
    twin = site.claimer(instance="run.same")
    member = site.claimer(instance="run.same")
    twin.claim([0])

    assert member.claim([0]) == []


def test_a_partition_is_requested_once_in_a_tenure(site: Site) -> None:
    """An instance appends one ClaimingPartition for each partition, even after a release."""
    site.owner_of(1)
    member = site.member()

    member.claim([0, 0, 1])
    member.claim([0, 1])
    member.release()
    member.claim([0, 1])

    assert messages_sent_by(site, member.member.instance).count("ClaimingPartition") == 2


def test_no_more_claims_than_allowed(site: Site) -> None:
    """At most `max_claims` partitions are claimed, including those already held."""
    member = site.member()
    member.claim([0])

    won = member.claim([1, 2, 3, 4], max_claims=3)

    assert [claim.partition for claim in won] == [1, 2]
    assert member.claim([5], max_claims=3) == []


def test_a_paused_group_is_not_claimed(site: Site) -> None:
    """If another instance paused the group, nothing is claimed, and the error states until when and by whom."""
    member = site.member()
    site.pause(60)
    member.rationalizer.catch_up()

    with pytest.raises(GroupPausedError, match="by ops;"):
        member.claim([0])
    assert member.paused_until_s() is not None
    assert not any("ClaimingPartition" in value for value in site.values())


def test_a_pause_that_is_over_by_the_members_clock_is_tried(site: Site) -> None:
    """The member's own clock decides whether a pause is over, because the log time of a silent log does not advance."""
    member = site.member()
    site.pause(60)
    member.rationalizer.catch_up()
    site.clock.advance(60_000)

    assert member.paused_until_s() is None
    assert len(member.claim([0])) == 1


def test_who_paused_the_group_may_claim(site: Site) -> None:
    """The instance that paused the group may claim."""
    site.member()
    site.pause(60, instance="ops.7")
    member = site.claimer(instance="ops.7")

    assert len(member.claim([0])) == 1


def test_nobody_claims_from_a_log_that_is_only_observed(site: Site) -> None:
    """If retention has cut the log, a member neither agrees on settings nor claims."""
    site.owner_of(0)
    site.broker.retain_from(site.home, 2)
    member = site.claimer()

    for step in (member.ensure_group_settings, lambda: member.claim([1])):
        with pytest.raises(IncompleteLogError, match="only be observed"):
            step()
    assert messages_sent_by(site, member.member.instance) == []


def test_a_claim_without_acknowledgement_is_not_continued(site: Site) -> None:
    """A claim without an acknowledgement is not held; another instance id revokes what it won."""
    member = site.member()
    faulty(member).fail(Fault.LOST_ACK, of_type("ClaimingPartition", partition=1))

    won = member.claim([0, 1, 2])

    assert [claim.partition for claim in won] == [0, 2]
    assert site.owner(1) is None
    assert "RevokingClaim" not in messages_sent_by(site, member.member.instance)
    assert len(site.member().claim([1])) == 1


def test_a_claim_that_arrives_late_is_revoked_on_leaving(site: Site) -> None:
    """A claim that reaches the log late is looked up again and revoked when the member releases."""
    member = site.member()
    faulty(member).fail(Fault.LATE, of_type("ClaimingPartition", partition=1))
    member.claim([0, 1])
    faulty(member).arrive()
    assert site.owner(1) == member.member.instance

    member.release()

    assert site.owner(1) is None


@pytest.mark.parametrize("where", ["before_append", "after_append", "before_read"])
def test_an_interrupted_claim_leaves_nothing_behind(site: Site, where: str) -> None:
    """Wherever a claim is interrupted, the release that follows revokes it."""
    member = site.member()
    setattr(faulty(member), where, raiser(InterruptError()))
    with pytest.raises(InterruptError):
        member.claim([0, 1])
    faulty(member).recover()

    member.release()

    assert (site.owner(0), site.owner(1)) == (None, None)
    assert len(site.member().claim([0, 1])) == 2


def test_a_claim_that_cannot_be_read_back_leaves_nothing_behind(site: Site) -> None:
    """A claim that was appended before the broker failed is revoked by a later release."""
    member = site.member()
    faulty(member).after_append = lambda: setattr(faulty(member), "is_down", True)
    with pytest.raises(UnavailableError):
        member.claim([0])
    faulty(member).recover()

    member.release()

    assert site.owner(0) is None


def test_unacknowledged_records_are_reported_in_one_line(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A thousand records without an acknowledgement cause one log line, not a thousand."""
    member = site.member()
    faulty(member).fail(Fault.FAILED)

    with caplog.at_level(logging.WARNING):
        member.claim(range(1_000))

    assert [record.getMessage() for record in caplog.records if "acknowledge" in record.getMessage()] == [
        "group 'etl': 1000 of 1000 records (ClaimingPartition) were not acknowledged: no acknowledgement came"
    ]


def test_the_entire_topic_or_nothing(site: Site) -> None:
    """If partition 0 is not won, no other partition is claimed."""
    site.owner_of(0)
    member = site.member()

    assert member.claim_entire_topic(range(4)) == []
    assert messages_sent_by(site, member.member.instance) == []


def test_the_entire_topic_is_claimed(site: Site) -> None:
    """If partition 0 is won, all others that are free are claimed."""
    site.owner_of(2)
    member = site.member()

    won = member.claim_entire_topic(range(4))

    assert sorted(claim.partition for claim in won) == [0, 1, 3]


# Dead owners


def test_claims_of_the_dead_are_revoked_and_taken(site: Site) -> None:
    """Claims of an owner known to be dead are revoked by their epoch and won with the same append."""
    dead = site.owner_of(0, 1)
    site.owner_of(2)
    member = site.member()

    won = member.claim([0, 1, 2], is_dead=lambda owner: owner.instance == dead.member.instance)

    assert [claim.partition for claim in won] == [0, 1]
    assert messages_sent_by(site, member.member.instance)[:2] == ["RevokingClaim", "RevokingClaim"]


def test_an_owner_is_judged_once_and_without_holding_others_up(site: Site) -> None:
    """Whether an owner is dead is determined once for all its claims, while other threads continue to read."""
    site.owner_of(*range(50))
    member = site.member()
    requested: list[Owner] = []

    def is_dead(owner: Owner) -> bool:
        requested.append(owner)
        free = threading.Thread(target=member.rationalizer.catch_up)
        free.start()
        free.join(WITHIN_S)
        assert not free.is_alive()
        return True

    assert len(member.claimable(range(50), is_dead=is_dead)) == 50
    assert len(requested) == 1
    member.claim(range(50), is_dead=is_dead)
    assert len(requested) == 2


def test_a_claim_made_after_the_look_is_not_revoked(site: Site) -> None:
    """A revocation names the epoch that was seen, so an instance that claimed meanwhile keeps the partition."""
    dead = site.owner_of(0)
    member = site.member()

    def other_comes() -> None:
        faulty(member).before_append = lambda: None
        site.say(about(RevokingClaim, "ops.1", epoch=dead.claims[0].epoch))
        site.say(about(ClaimingPartition, "other.1"))

    faulty(member).before_append = other_comes

    assert member.claim([0], is_dead=lambda _: True) == []
    assert site.owner(0) == "other.1"


def test_claimable_leaves_out_what_is_held_and_what_failed_too_often(site: Site) -> None:
    """Partitions can be claimed if they have no live owner and their plan has attempts left."""
    owner = site.owner_of(0, 1)
    owner.plan({1: 5})
    owner.release([1])
    site.member().claim([1])
    member = site.member()
    assert member.claimable([0, 1, 2]) == [2]

    site.clock.advance(2 * HI_MS + 1)

    assert member.claimable([0, 1, 2], max_attempts=1) == [0, 2]
    assert member.claimable([0, 1, 2], max_attempts=2) == [0, 1, 2]


def test_revoke_reports_what_it_took(site: Site) -> None:
    """Only claims that still have the given epoch are revoked and returned."""
    owner = site.owner_of(0, 1)
    epochs = {number: claim.epoch for number, claim in owner.claims.items()}
    member = site.member()

    assert member.revoke([(0, epochs[0]), (1, epochs[1] + 1)]) == frozenset({(0, epochs[0])})
    assert site.owner(0) is None
    assert site.owner(1) == owner.member.instance


def test_a_revocation_of_ones_own_former_claim_comes_from_another_instance(site: Site) -> None:
    """An instance that released a partition sends no further record for it, not even a revocation."""
    member = site.owner_of(0)
    epoch = member.claims[0].epoch
    member.release()
    before = messages_sent_by(site, member.member.instance)

    member.revoke([(0, epoch)])

    assert messages_sent_by(site, member.member.instance) == before


# The data topic


def test_the_data_topic_is_written_down(site: Site) -> None:
    """A DataTopic record is written only for a partition that has no data topic id."""
    member = site.member()
    member.claim([0])

    member.name_data_topic(TOPIC_ID)
    member.name_data_topic(TOPIC_ID)

    assert site.key().data_topic_id == TOPIC_ID
    assert messages_sent_by(site, member.member.instance).count("DataTopic") == 1


def test_without_the_data_topics_id_a_claim_is_released(site: Site) -> None:
    """If the data topic's id was not accepted, the claim is released, and the other claims remain."""
    member = site.member()
    member.claim([0, 1])
    faulty(member).fail(Fault.FAILED, of_type("DataTopic", partition=1))

    with pytest.raises(ClaimLostError, match=r"orders/1.*data topic"):
        member.name_data_topic(TOPIC_ID)

    assert site.owner(1) is None
    assert site.owner(0) == member.member.instance


def test_a_data_topic_id_without_acknowledgement_is_found_by_reading(site: Site) -> None:
    """An id in the log counts, even if its acknowledgement was lost."""
    member = site.member()
    member.claim([0])
    faulty(member).fail(Fault.LOST_ACK, of_type("DataTopic"))

    member.name_data_topic(TOPIC_ID)

    assert member.claims[0].data_topic_id == TOPIC_ID


def test_another_data_topic_id_is_not_replaced(site: Site) -> None:
    """A different id than the cluster's is not replaced: an operator must set the position."""
    site.owner_of(0).release()
    member = site.member()
    member.claim([0])

    member.name_data_topic(OTHER_TOPIC_ID)

    assert site.key().data_topic_id == TOPIC_ID
    assert "DataTopic" not in messages_sent_by(site, member.member.instance)
