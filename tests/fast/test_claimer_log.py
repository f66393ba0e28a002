"""How a claimer reacts to a log that changed or that Go consumers share (protocol.md, sections 6 and 7).

The log is in memory, and each test chooses its faults.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.coordination.base_claimer import BaseClaimer
from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.log import Ack, Append, Chunk, PositionLostError
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import LOOK_AGAIN_MS, Rationalizer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import (
    ClaimLostError,
    ConfigurationError,
    CoordinationLogChangedError,
    GoGroupError,
    IncompleteLogError,
    PlanRejectedError,
    SettingsMismatchError,
    TimestampTypeError,
    UnavailableError,
)
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import (
    ClaimingMessages,
    ClaimingPartition,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    Mark,
    ReleasingPartition,
    RuleSet,
)
from marshal_dagster.protocol.state import Owner
from marshal_dagster.testing import MemoryLog, MemorySnapshotTopic
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import (
    GROUP,
    HI_MS,
    RANGES,
    SETTINGS,
    TOPIC,
    TOPIC_ID,
    Site,
    about,
    faulty,
    messages_sent_by,
    settings_record,
)

GO = GroupSettings(60_000, RuleSet.GO)
C = TypeVar("C", Claimer, RangeClaimer)


@pytest.fixture
def site() -> Site:
    """An empty coordination topic."""
    return Site()


# A log that was replaced, truncated or cut


@pytest.mark.parametrize(
    "change",
    [
        lambda site: site.broker.truncate(site.home, 1),
        lambda site: site.broker.recreate(),
        lambda site: site.broker.recreate(partitions=7),
    ],
    ids=["truncated", "re-created", "repartitioned"],
)
def test_a_log_that_changed_ends_every_claim(site: Site, change: Callable[[Site], None]) -> None:
    """If the log was replaced, each step fails with a clear error, the claims end, and nothing more is sent."""
    member = site.owner_of(0, 1)
    change(site)

    with pytest.raises(CoordinationLogChangedError):
        member.beat()
    before = [site.broker.records(number) for number in range(site.broker.identity.partitions)]

    with pytest.raises(ClaimLostError, match=r"re-created|truncated"):
        member.check([0])
    member.release()
    assert not member.claims
    assert [site.broker.records(number) for number in range(site.broker.identity.partitions)] == before


def test_a_new_log_that_has_outgrown_the_old_one_is_noticed(site: Site) -> None:
    """The next heartbeat or commit detects a re-created topic, even if it has more records than were read."""
    first, second = site.owner_of(0), site.owner_of(1)
    second.plan({1: 10})
    site.broker.recreate()
    for _ in range(100):
        site.broker.append(site.home, b"anything")

    with pytest.raises(CoordinationLogChangedError, match="deleted and re-created"):
        first.beat()
    with pytest.raises(CoordinationLogChangedError, match="deleted and re-created"):
        second.commit({1: 10})


def test_another_member_of_the_process_hears_of_it(site: Site) -> None:
    """Once a rationalizer has detected that the log changed, all claims that use it end."""
    member = site.owner_of(0)
    other = Claimer(member.rationalizer, member.member.with_new_instance(), TOPIC, SETTINGS, clock=site.clock)
    other.claim([1])
    site.broker.truncate(site.home, 1)

    with pytest.raises(CoordinationLogChangedError):
        other.ensure_group_settings()
    with pytest.raises(ClaimLostError, match="truncated"):
        member.check([0])


def test_a_log_cut_by_retention_ends_the_claims_of_a_reader_left_behind(site: Site) -> None:
    """A member whose reader was overtaken by retention can only observe and holds nothing."""
    member = site.owner_of(0)
    site.overtake()

    with pytest.raises((ClaimLostError, CoordinationLogChangedError)):
        member.beat()
    assert not member.claims
    with pytest.raises(IncompleteLogError):
        site.claimer().claim([0])


@pytest.mark.parametrize("settings", [SETTINGS, GroupSettings()], ids=["own settings", "defaults"])
def test_a_claim_that_retention_overtakes_is_none(site: Site, settings: GroupSettings) -> None:
    """If the member can only observe when its claim is read back, it has won nothing, whatever looks accepted."""
    site.begin(0, settings=settings)
    log = site.log()
    member = site.claimer(settings=settings, log=log)
    member.ensure_group_settings()
    log.before_append = site.overtake
    with pytest.raises(IncompleteLogError):
        member.claim([0])
    assert not member.claims


class CutLog(MemoryLog):
    """A log that loses the first claim just after its acknowledgement."""

    has_cut = False

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append the records, then truncate."""
        acks = super().append(records)
        offset = acks[0].offset
        if not self.has_cut and offset is not None and records[0].value.startswith(b"Claiming"):
            self.has_cut = True
            self.broker.truncate(records[0].partition, offset)
        return acks


def test_a_claim_that_was_lost_before_its_append_was_through_is_none(site: Site) -> None:
    """Two records were acknowledged where the log has only one: simulator seeds 537039 and 735423."""
    member = site.member(log=FaultyLog(CutLog(site.broker)))

    with pytest.raises(CoordinationLogChangedError, match="not the one that was acknowledged"):
        member.claim([0, 1, 2])

    assert not member.claims


def test_a_claim_of_ranges_that_was_lost_before_its_append_was_through_is_none(site: Site) -> None:
    """The same applies to ranges."""
    site.begin(0, 1)
    member = site.range_claimer(log=FaultyLog(CutLog(site.broker)))

    with pytest.raises(CoordinationLogChangedError, match="not the one that was acknowledged"):
        member.claim({0: (0, 5), 1: (0, 5)})

    assert not member.claims


class OvertakenLog(MemoryLog):
    """A log that returns single records. After a claim's first record retention deletes what was returned."""

    has_overtaken = False

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Return the records, and let retention delete some of them in between."""
        for chunk in super().read_until(ends, timeout_s):
            for record in chunk.records:
                yield Chunk(chunk.partition, [record], record[0] + 1)
                if not self.has_overtaken and (record[2] or b"").startswith(b"Claiming"):
                    self.has_overtaken = True
                    self.broker.retain_from(chunk.partition, record[0] + 2)
                    raise PositionLostError(chunk.partition)


def test_a_claim_that_retention_overtakes_once_it_was_read_is_none(site: Site) -> None:
    """The result of the record was reported before retention removed the state that contains it."""
    member = site.member(log=FaultyLog(OvertakenLog(site.broker)))

    with pytest.raises(IncompleteLogError):
        member.claim([0, 1, 2])

    assert not member.claims


def test_who_gives_up_a_part_and_can_only_observe_then_holds_nothing(site: Site) -> None:
    """If retention overtakes the reader while a release is read back, the other claims end too."""
    log = site.log()
    member = site.owner_of(0, 1, log=log)
    log.before_append = site.overtake

    member.release([0])

    assert not member.claims
    with pytest.raises(ClaimLostError, match="can only be observed"):
        member.check()


def test_who_gives_up_a_range_and_can_only_observe_then_holds_none(site: Site) -> None:
    """The same applies to ranges: simulator seed 530395."""
    site.begin(0, 1)
    log = site.log()
    member = site.range_claimer(log=log)
    member.claim({0: (0, 5), 1: (0, 5)})
    log.before_append = site.overtake

    member.release([0])

    assert not member.claims
    with pytest.raises(ClaimLostError, match="can only be observed"):
        member.check()


def test_who_gives_up_a_part_of_a_log_that_is_truncated_holds_nothing(site: Site) -> None:
    """A release raises no error, but the truncation that it detects ends all claims."""
    log = site.log()
    member = site.owner_of(0, 1, log=log)
    log.after_append = lambda: site.broker.truncate(site.home, 1)

    member.release([0])

    assert not member.claims


def test_a_claim_under_settings_that_changed_in_a_truncated_log_ends_those_before(site: Site) -> None:
    """The release of the new claim detects that the log was truncated, so the earlier claims end too."""
    log = site.log()
    member = site.owner_of(0, log=log)

    def change_and_truncate() -> None:
        log.after_append = lambda: site.broker.truncate(site.home, 1)
        member._reader = replace(
            member._reader, settings=GroupSettings(2 * HI_MS)
        )  # instead of the group's, which only an operator can change

    log.after_append = change_and_truncate
    with pytest.raises(SettingsMismatchError):
        member.claim([1])

    assert not member.claims


def test_what_another_reads_of_the_same_log_ends_claims(site: Site) -> None:
    """Two claimers share a reader: if retention overtakes it during a step of one, the other's check detects it."""
    first = site.owner_of(0, 1)
    second = Claimer(first.rationalizer, Member(GROUP, "c", "run9.0"), TOPIC, SETTINGS, clock=site.clock)
    site.overtake()

    with pytest.raises(IncompleteLogError):
        second.ensure_group_settings()

    with pytest.raises(ClaimLostError, match="can only be observed"):
        first.check([0])


def test_a_step_that_fails_once_the_reader_observes_keeps_no_claim(site: Site) -> None:
    """If the broker fails after retention has overtaken the reader, the claims end all the same."""
    log = site.log()
    member = site.owner_of(0, 1, log=log)
    log.before_append = site.overtake
    reads = iter((None, UnavailableError("the broker does not answer")))

    def before_read() -> None:
        error = next(reads)
        if error is not None:
            raise error

    log.before_read = before_read
    with pytest.raises(UnavailableError):
        member.beat()

    assert not member.claims


def test_settings_are_not_agreed_on_in_a_log_that_is_only_observed(site: Site) -> None:
    """A member with claims loses them when it agrees again; one that is overtaken while it writes has none agreed."""
    member = site.owner_of(0, 1)
    site.overtake()
    with pytest.raises(IncompleteLogError):
        member.ensure_group_settings()
    assert not member.claims

    fresh = Site()
    log = fresh.log()
    first = fresh.claimer(log=log)
    log.before_append = fresh.overtake
    with pytest.raises(IncompleteLogError):
        first.ensure_group_settings()


def test_of_a_log_that_is_only_observed_nothing_was_seen_revoked(site: Site) -> None:
    """Every revocation looks accepted there, even one of an epoch that never existed."""
    log = site.log()
    member = site.owner_of(0, log=log)
    site.owner_of(1)
    log.before_append = site.overtake

    assert member.revoke([(1, 9_999)]) == frozenset()
    assert not member.claims


def test_what_may_have_been_given_up_at_a_new_position_is_held_no_more(site: Site) -> None:
    """The log fails after the record was written, so another member may have claimed the partition."""
    log = site.log()
    member = site.owner_of(0, log=log)
    site.pause(1_000, member.member.instance)
    member.rationalizer.catch_up()

    def before_read() -> None:
        raise UnavailableError("the broker does not answer")

    log.before_read = before_read
    with pytest.raises(UnavailableError):
        member.set_positions({0: 9}, TOPIC_ID)

    assert not member.claims
    assert site.key().offset == 9


def test_the_key_to_a_topic_may_be_lost_while_the_others_are_requested(site: Site) -> None:
    """A heartbeat in another thread detects the loss while dead owners are looked up."""
    site.owner_of(1)
    member = site.owner_of(0)

    def is_dead(_: Owner) -> bool:
        def lose() -> None:
            site.overtake()
            with pytest.raises(ClaimLostError):
                member.beat()

        beating = threading.Thread(target=lose)
        beating.start()
        beating.join()
        return False

    with pytest.raises((ClaimLostError, IncompleteLogError)):
        member.claim_entire_topic([0, 1, 2], is_dead=is_dead)


# A log that is read from a snapshot


@pytest.fixture
def begun(site: Site) -> tuple[Claimer, FaultyLog, int]:
    """A claimer whose reader started from a snapshot, its log, and the offset from which it reads."""
    site.owner_of(0, 1).release()
    mark = Mark(instance="m.0", client="m", group="m", time_s=0)
    for _ in range(30):
        site.say(mark)
    topic = MemorySnapshotTopic(site.partitions)
    Snapshots(topic).write(site.world().partitions[site.home], site.broker.identity)
    end = site.broker.bounds(site.home).end
    site.broker.retain_from(site.home, end - 15)
    log = site.log()
    reader = Rationalizer(log, clock=site.clock, snapshots=Snapshots(topic))
    claimer = Claimer(reader, Member(GROUP, "c", "run9.0"), TOPIC, SETTINGS, clock=site.clock)
    claimer.ensure_group_settings()
    return claimer, log, end


def test_an_acknowledgement_where_something_was_read_before_reports_a_truncated_log(
    site: Site, begun: tuple[Claimer, FaultyLog, int]
) -> None:
    """Retention deletes from the start, so records missing just before the snapshot's end were lost, not deleted."""
    member, log, end = begun
    assert len(member.claim([0, 1])) == 2
    log.before_append = lambda: site.broker.truncate(site.home, end - 5)

    with pytest.raises(CoordinationLogChangedError, match="acknowledged a record at offset"):
        member.beat()

    assert not member.claims


def test_an_operator_hears_of_a_truncated_log_too(site: Site, begun: tuple[Claimer, FaultyLog, int]) -> None:
    """A pause acknowledged at an offset that was read before has not been read back."""
    member, log, end = begun
    operator = GroupAdmin(member.rationalizer, GROUP, "ops", clock=site.clock)

    def truncate() -> None:
        log.before_append = lambda: None
        site.broker.truncate(site.home, end - 5)

    log.before_append = truncate
    with pytest.raises(CoordinationLogChangedError, match="acknowledged a record at offset"):
        operator.pause(site.clock.wall_ms() // 1_000 + 500)


def test_what_was_not_acknowledged_is_revoked_once_the_reader_is_certain_again(site: Site) -> None:
    """A reader that could only observe meanwhile still has its pending claims."""
    topic = MemorySnapshotTopic(site.partitions)
    log = site.log()
    reader = Rationalizer(log, topics=[TOPIC], clock=site.clock, snapshots=Snapshots(topic))
    member = Claimer(reader, Member(GROUP, "c", "run1.0"), TOPIC, SETTINGS, clock=site.clock)
    member.ensure_group_settings()
    member.claim([0])
    log.fail(Fault.LATE, of_type("ClaimingPartition", partition=1), 1)
    member.claim([1])
    log.arrive()
    state = site.world().partitions[site.home]
    log.before_append = lambda: site.broker.retain_from(site.home, state.next_offset)
    member.release([0])
    log.recover()
    Snapshots(topic).write(state, site.broker.identity)
    site.clock.advance(LOOK_AGAIN_MS + 1)

    member.release()

    assert [value for value in log.seen if value.startswith("RevokingClaim") and f"/{TOPIC}/1/" in value]


# Records with their sender's timestamp


def claimer_beside(member: BaseClaimer[Any], kind: type[C]) -> C:
    """Return another claimer of the same process, which shares the rationalizer."""
    return kind(member.rationalizer, member.member.with_new_instance(), TOPIC, member.settings, clock=member.clock)


def fail_next_reading(member: BaseClaimer[Any], when: str = "before_read") -> None:
    """Let the member's next read fail, before or after it has returned the records."""
    log = faulty(member)

    def fail_once() -> None:
        setattr(log, when, lambda: None)
        raise UnavailableError("the broker does not answer")

    setattr(log, when, fail_once)


@pytest.mark.parametrize("overtaken", ["own", "other"])
def test_first_settings_are_not_written_if_a_coordination_partition_can_only_be_observed(
    site: Site, overtaken: str
) -> None:
    """It is not known there whether Go consumers use the group; simulator seed 304022."""
    partition = site.home if overtaken == "own" else (site.home + 1) % site.partitions
    site.broker.append(partition, b"anything")
    log = site.log()
    claimer = site.claimer(log=log)
    site.say(Mark(instance="m.0", client="m", group="m", time_s=0))

    def overtake() -> None:
        log.after_read = lambda: None
        site.broker.append(partition, b"anything")
        site.broker.retain_from(partition, site.broker.bounds(partition).end)

    log.after_read = overtake
    with pytest.raises(IncompleteLogError, match=rf"coordination partitions \[{partition}\]"):
        claimer.ensure_group_settings()

    assert not any(record.startswith("GroupSettings") for record in log.seen)


def test_a_log_truncated_as_a_failed_reading_goes_on_ends_every_claim(site: Site) -> None:
    """The repeated read requests the log's ends twice; simulator seed 13141."""
    member = site.owner_of(0)
    log = faulty(member)
    site.say(Mark(instance="m.0", client="m", group="m", time_s=0))
    fail_next_reading(member, "after_read")
    with pytest.raises(UnavailableError):
        member.ensure_group_settings()
    end = site.broker.bounds(site.home).end
    log.after_bounds = lambda: site.broker.truncate(site.home, end - 1)

    with pytest.raises(CoordinationLogChangedError, match=f"ends at {end - 1}, but was read up to {end}"):
        member.ensure_group_settings()

    assert not member.claims
    with pytest.raises(ClaimLostError, match="truncated"):
        member.beat()


def test_a_log_truncated_as_a_reader_begins_again_ends_every_claim(site: Site) -> None:
    """A reader that retention has overtaken looks up the log's ends again; simulator seed 473339."""
    member = site.owner_of(0)
    read = site.broker.bounds(site.home).end
    site.overtake()
    looks = itertools.count(1)

    def truncate_before_the_third_look() -> None:
        if next(looks) == 2:
            site.broker.truncate(site.home, read - 1)

    faulty(member).after_bounds = truncate_before_the_third_look
    with pytest.raises(CoordinationLogChangedError, match=f"ends at {read - 1}, but was read up to {read}"):
        member.ensure_group_settings()

    assert not member.claims


@pytest.mark.parametrize("step", ["claim", "plan", "commit", "beat", "name", "release"])
def test_a_record_with_its_senders_timestamp_does_nothing_for_its_member(site: Site, step: str) -> None:
    """The record counts in the state, but the member loses its claims, sends nothing more and names the setting."""
    member = site.member()
    if step in {"plan", "beat", "commit", "release"}:
        member = site.owner_of(0)
    if step in {"commit", "release"}:
        member.plan({0: 10})
    if step == "name":
        assert member.claim([0])
    site.broker.is_sender_timed = True
    before = len(site.values())
    steps: dict[str, Callable[[], object]] = {
        "claim": lambda: member.claim([0]),
        "plan": lambda: member.plan({0: 10}),
        "commit": lambda: member.commit({0: 10}),
        "beat": member.beat,
        "name": lambda: member.name_data_topic(TOPIC_ID),
        "release": member.release,
    }

    if step == "release":
        member.release()
    else:
        with pytest.raises(TimestampTypeError, match=r"message\.timestamp\.type=LogAppendTime"):
            steps[step]()

    assert member.claims == {}
    member.release()
    assert len(site.values()) == before + 1


def test_at_most_once_drops_what_a_record_with_its_senders_timestamp_has_committed(site: Site) -> None:
    """The log has moved the offset, so no member may process the messages before it."""
    member = site.owner_of(0, settings=replace(SETTINGS, delivery=DeliveryMode.AT_MOST_ONCE))
    member.plan({0: 10})
    site.broker.is_sender_timed = True

    with pytest.raises(TimestampTypeError):
        member.commit_before_processing({0: 10})

    assert site.key().offset == 10


@pytest.mark.parametrize("step", ["claim", "claim a range", "revoke", "set a position"])
def test_a_process_sends_nothing_after_a_release_with_its_senders_timestamp(step: str) -> None:
    """A release raises no error, but what it detects applies to every claimer of the process."""
    site = Site()
    member = site.owner_of(0, settings=RANGES)
    whole = claimer_beside(member, Claimer)
    steps: dict[str, Callable[[], object]] = {
        "claim": lambda: whole.claim([1]),
        "claim a range": lambda: claimer_beside(member, RangeClaimer).claim({0: (0, 5)}),
        "revoke": lambda: whole.revoke([(0, 1)]),
        "set a position": lambda: whole.take_over_and_release({0: 3}),
    }
    site.broker.is_sender_timed = True
    member.release()
    before = site.values()

    with pytest.raises(TimestampTypeError, match=r"message\.timestamp\.type=LogAppendTime"):
        steps[step]()

    assert site.values() == before


@pytest.mark.parametrize("mode", [DeliveryMode.AT_LEAST_ONCE, DeliveryMode.EFFECTIVELY_ONCE])
def test_a_commit_that_is_read_late_does_not_count_with_its_senders_timestamp(site: Site, mode: DeliveryMode) -> None:
    """The acknowledged record is the member's own, even if the read that follows it fails."""
    member = site.owner_of(0, settings=replace(SETTINGS, delivery=mode))
    member.plan({0: 10})
    site.broker.is_sender_timed = True
    fail_next_reading(member)

    with pytest.raises(TimestampTypeError):
        member.commit({0: 10})

    assert (member.claims, site.key().offset) == ({}, 10)


def test_a_release_that_is_read_late_ends_all_with_its_senders_timestamp(site: Site) -> None:
    """After a failed read a release is not read back at once; the next read detects its timestamp."""
    member = site.owner_of(0)
    fail_next_reading(member)
    with pytest.raises(UnavailableError):
        member.beat()
    site.broker.is_sender_timed = True
    member.release()
    before = site.values()
    assert before[-1].startswith("ReleasingPartition/")

    with pytest.raises(TimestampTypeError):
        claimer_beside(member, Claimer).ensure_group_settings()
    with pytest.raises(TimestampTypeError):
        claimer_beside(member, Claimer).claim([1])

    assert site.values() == before


@pytest.mark.parametrize("step", ["check", "look", "release"])
def test_a_displacement_counts_though_the_reading_that_shows_it_fails(step: str) -> None:
    """The displaced member sends neither a release nor a heartbeat, which would take the partition back."""
    site = Site()
    member = site.owner_of(0, settings=GO)
    site.say(about(Heartbeat, "go0-1", offset=0))
    before = site.values()
    fail_next_reading(member, "after_read")

    if step in {"check", "look"}:
        with pytest.raises(ClaimLostError, match="no longer this instance's"):
            getattr(member, step)()
    else:
        with pytest.raises(UnavailableError):
            claimer_beside(member, Claimer).ensure_group_settings()
    member.release()

    assert site.values() == before


@pytest.mark.parametrize("is_released", [False, True])
def test_what_another_step_of_the_process_has_read_counts_though_it_failed(is_released: bool) -> None:
    """No plan is sent if the log as read shows that another member, or none, has the claim."""
    site = Site()
    member = site.owner_of(0, settings=GO)
    site.say(about(Heartbeat, "go0-1", offset=0))
    if is_released:
        site.say(about(ReleasingPartition, "go0-1", offset=0))
    before = site.values()
    fail_next_reading(member, "after_read")
    with pytest.raises(UnavailableError):
        claimer_beside(member, Claimer).ensure_group_settings()

    with pytest.raises(ClaimLostError, match="no longer this instance's"):
        member.plan({0: 3})

    assert site.values() == before


@pytest.mark.parametrize("kind", [Claimer, RangeClaimer])
def test_a_reader_that_went_on_from_a_newer_snapshot_holds_nothing(kind: type[Claimer] | type[RangeClaimer]) -> None:
    """Records between its claims and the snapshot were never read: a Go consumer may have moved an offset there."""
    site = Site()
    settings = SETTINGS if kind is Claimer else RANGES
    site.begin(0, settings=settings, at=0)
    topic = MemorySnapshotTopic(site.partitions)
    reader = Rationalizer(site.log(), topics=[TOPIC], clock=site.clock, snapshots=Snapshots(topic))
    member = kind(reader, Member(GROUP, "c", "run1.0"), TOPIC, settings, clock=site.clock)
    member.ensure_group_settings()
    member.claim([0]) if isinstance(member, Claimer) else member.claim({0: (0, 9)})
    site.say(about(ClaimingPartition, "run2.0", 1))
    state = site.world().partitions[site.home]
    Snapshots(topic).write(state, site.broker.identity)
    site.broker.retain_from(site.home, state.next_offset)

    with pytest.raises(ClaimLostError, match="continued from a snapshot newer than its claims"):
        member.plan({0: 9})

    before = site.values()
    member.release()
    assert not member.claims
    assert site.values() == before


def test_others_records_with_senders_timestamps_stop_nobody(site: Site) -> None:
    """Records of others are read as they are; only its own records prove that a member cannot work."""
    site.broker.is_sender_timed = True
    site.say(Mark(instance="other.1", client="c", group=GROUP, time_s=0))
    site.broker.is_sender_timed = False

    assert site.owner_of(0).claims.keys() == {0}


# A group shared with Go consumers


def go_consumer_at(site: Site, offset: int = 30, partition: int = 0) -> None:
    """Write the records by which a Go consumer holds a partition."""
    site.say(about(ClaimingPartition, "1320e57a", partition=partition))
    site.say(about(Heartbeat, "1320e57a", partition=partition, offset=offset))


def test_a_member_waits_a_second_longer_in_a_group_shared_with_go(site: Site) -> None:
    """Rule set `go` claims a partition one second after its owner became stale."""
    site.owner_of(0, settings=GO)
    member = site.member(settings=GO)
    site.clock.advance(120_001)
    assert member.claimable([0]) == []
    assert member.claim([0]) == []

    site.clock.advance(1_000)

    assert len(member.claim([0])) == 1


def test_a_member_writes_only_what_go_knows(site: Site) -> None:
    """The member writes no settings, topic id or revocation, because a Go consumer that starts would stop there."""
    go_consumer_at(site, partition=1)
    member = site.owner_of(0, settings=GO)
    member.plan({0: 10})
    member.commit({0: 10})
    member.claim([1], is_dead=lambda _: True)
    with pytest.raises(GoGroupError):
        member.revoke([(1, 0)])
    member.release()

    kinds = {value.split("/", 1)[0] for value in site.values()}
    assert kinds == {"ClaimingPartition", "Heartbeat", "ClaimingMessages", "ReleasingPartition"}
    assert site.owner(1) == "1320e57a"


def test_a_member_dates_its_records_two_seconds_back(site: Site) -> None:
    """Go takes a time later than its own clock for stale."""
    member = site.owner_of(0, settings=GO)
    other = site.owner_of(1, settings=GO)
    times = {int(value.split("/")[2]) for value in site.values()}

    assert times == {site.clock.wall_ms() // 1_000 - 2}
    assert member.member.instance != other.member.instance


@pytest.mark.parametrize("settings", [SETTINGS, replace(GO, heartbeat_interval_ms=30_000, rule_set=RuleSet.NATIVE)])
def test_a_native_member_writes_nothing_into_a_group_of_go_consumers(site: Site, settings: GroupSettings) -> None:
    """A key with an offset and without a data topic id indicates Go consumers; an operator must decide."""
    go_consumer_at(site)
    before = [site.broker.bounds(number).end for number in range(site.partitions)]

    with pytest.raises(GoGroupError, match="settings set etl --go-consumers-stopped"):
        site.claimer(settings=settings).ensure_group_settings()

    assert [site.broker.bounds(number).end for number in range(site.partitions)] == before


def test_a_native_group_begins_on_a_topic_of_go_consumers_only_when_a_person_allows_it(site: Site) -> None:
    """The first record unknown to Go is refused for other groups, too. Once the log has such records, members start."""
    go = replace(about(Heartbeat, "1320e57a", offset=3), group="go")
    site.say(go)
    with pytest.raises(GoGroupError, match="'go' has orders/0"):
        site.claimer().ensure_group_settings()
    site.say(replace(settings_record(SETTINGS), group="another"))

    site.claimer().ensure_group_settings()

    assert site.owner_of(0).claims.keys() == {0}


def test_a_member_that_shares_the_group_needs_no_settings(site: Site) -> None:
    """A member with the default settings of rule set `go` joins Go consumers and writes no settings."""
    go_consumer_at(site)
    site.member(settings=GO)

    assert "GroupSettings" not in {value.split("/", 1)[0] for value in site.values()}
    assert not site.world().group_of(GROUP, TOPIC).settings_accepted


def test_a_client_id_that_a_go_consumer_uses_is_refused(site: Site) -> None:
    """Go takes any claim with its own client id for its own."""
    go_consumer_at(site)
    rationalizer = site.reader(site.log(), topics=[TOPIC])
    member = Claimer(rationalizer, Member(GROUP, "other", "run1.0"), TOPIC, GO, clock=site.clock)
    rationalizer.catch_up()

    with pytest.raises(ConfigurationError, match="another client_id"):
        member.claim([1])


def test_a_claim_without_acknowledgement_is_released_by_the_same_instance(site: Site) -> None:
    """Go knows no revocation. A key without an offset becomes stale, because a release would set an offset."""
    site.say(about(ClaimingPartition, "1320e57a"))
    site.say(about(Heartbeat, "1320e57a", offset=30))
    site.say(about(ReleasingPartition, "1320e57a", offset=30))
    member = site.member(settings=GO)
    faulty(member).fail(Fault.LOST_ACK, of_type("ClaimingPartition"))

    assert member.claim([0, 1]) == []
    assert (site.owner(0), site.key(0).offset) == (None, 30)
    member.release()

    assert site.owner(1) == member.member.instance
    assert "RevokingClaim" not in messages_sent_by(site, member.member.instance)


def test_who_was_replaced_does_not_beat_the_claim_back(site: Site) -> None:
    """Under `go` a heartbeat takes a partition, so a member reads before it sends one and stops if it was replaced."""
    member = site.owner_of(0, settings=GO)
    site.clock.advance(120_001)
    site.say(about(ClaimingPartition, "1320e57a"))
    member.claims[0].lease = Lease(60_000, site.clock.lease_ms())

    with pytest.raises(ClaimLostError, match="1320e57a"):
        member.beat()
    assert site.owner() == "1320e57a"


def test_who_is_displaced_by_a_heartbeat_stops(site: Site) -> None:
    """Under `go` another member's heartbeat takes the partition, and the owner that reads it is fenced."""
    member = site.owner_of(0, settings=GO)
    site.say(about(Heartbeat, "1320e57a", offset=0))

    with pytest.raises(ClaimLostError, match="1320e57a"):
        member.commit({0: 10})


@pytest.mark.parametrize("look", [Claimer.check, Claimer.look])
def test_a_displacement_is_seen_at_once(site: Site, look: Callable[[Claimer], None]) -> None:
    """Each check before a write reads the log; if the broker does not answer, the check passes."""
    member = site.owner_of(0, settings=GO)
    log = faulty(member)
    log.is_down = True
    look(member)
    log.recover()
    site.say(about(Heartbeat, "1320e57a", offset=0))

    with pytest.raises(ClaimLostError, match="1320e57a"):
        look(member)


def test_a_heartbeat_that_takes_the_partition_back_is_no_claim(site: Site) -> None:
    """The heartbeat has a different epoch than the claim, so the member is displaced all the same."""
    member = site.owner_of(0, settings=GO)

    def displace() -> None:
        site.say(about(Heartbeat, "1320e57a", offset=0))

    faulty(member).before_append = displace

    with pytest.raises(ClaimLostError):
        member.beat()

    assert site.owner() == member.member.instance
    assert member.claims == {}


def test_a_dead_owner_is_freed_by_a_heartbeat_and_a_release(site: Site) -> None:
    """A new instance takes over at the offset and releases; an owner without an offset must become stale."""
    go_consumer_at(site, offset=30)
    site.say(about(ClaimingPartition, "1320e57a", partition=1))
    member = site.claimer(settings=GO)

    assert member.take_over_and_release({0: None, 1: None}) == {0}
    assert [(site.owner(n), site.key(n).offset) for n in (0, 1)] == [(None, 30), ("1320e57a", None)]


def test_a_position_is_set_by_a_heartbeat_and_a_release(site: Site) -> None:
    """Under `go` a heartbeat can also lower an offset, and it ends an open plan."""
    go_consumer_at(site, offset=30)
    site.say(about(ClaimingMessages, "1320e57a", plan_end=40))
    member = site.claimer(settings=GO)

    assert member.take_over_and_release({0: 12}) == {0}
    assert (site.owner(), site.key().offset, site.key().plan_end, site.key().generation) == (None, 12, None, 0)


# A Go consumer in a group with other rules


def test_a_member_stops_when_an_offset_moves_without_a_plan(site: Site) -> None:
    """Only a Go consumer commits without a plan; one that did so before this claim stops no member."""
    foreign = site.owner_of(1)
    site.say(about(Heartbeat, foreign.member.instance, partition=1, offset=7))
    member = site.owner_of(0)
    member.beat()
    site.say(about(Heartbeat, foreign.member.instance, partition=1, offset=9))

    with pytest.raises(ClaimLostError, match="moved the offset of orders/1 without a plan"):
        member.beat()


def test_no_permission_beside_a_go_consumer(site: Site) -> None:
    """In at most once, a member that reads a Go consumer's commit together with its own stops and reports it."""
    settings = replace(SETTINGS, delivery=DeliveryMode.AT_MOST_ONCE)
    foreign, member = site.owner_of(1, settings=settings), site.owner_of(0, settings=settings)
    member.plan({0: 10})

    def go_consumer_commits() -> None:
        site.say(about(Heartbeat, foreign.member.instance, partition=1, offset=9))

    faulty(member).after_append = go_consumer_commits

    with pytest.raises(ClaimLostError, match="moved the offset of orders/1 without a plan"):
        member.commit_before_processing({0: 10})
    assert (member.claims, site.key().offset) == ({}, 10)


def test_a_commit_needs_a_plan(site: Site) -> None:
    """In a group with settings no member moves an offset without a plan; nothing is sent."""
    member = site.owner_of(0)
    before = site.values()

    with pytest.raises(PlanRejectedError, match="has no open plan"):
        member.commit({0: 10})

    assert site.values() == before
