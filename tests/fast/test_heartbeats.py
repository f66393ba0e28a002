"""Check how heartbeats keep claims alive, and how the work ends when a claim is uncertain.

See protocol.md, section 6, "Stay". The threads repeat `step`, `watch` and `ask`; most tests call these with a manual
clock.
"""

import logging
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.heartbeats import Heartbeats
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    CoordinationLogChangedError,
    MarshalError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.testing import MemoryBroker, MemoryLog
from tests.conditions import WITHIN_S, wait_until
from tests.faulty_log import FaultyLog
from tests.members import GROUP, HI_MS, TOPIC, TOPIC_ID, Site, faulty


@pytest.fixture
def site() -> Site:
    """Return a coordination topic for one test."""
    return Site()


def beats(site: Site) -> int:
    """Return the number of heartbeats in the log."""
    return sum(value.startswith("Heartbeat/") for value in site.values())


def ignore(_: MarshalError) -> None:
    """Ignore the error."""


def work_until_stopped(heartbeats: Heartbeats, site: Site, step: Callable[[], float], most: int = 1_000) -> None:
    """Repeat `step` as its thread does, with the site's clock, until the heartbeats end."""
    for _ in range(most):
        site.clock.advance(step() * 1_000)
        if heartbeats.error is not None:
            return


def test_a_heartbeat_whose_reading_failed_ends_the_work_by_what_it_showed(site: Site) -> None:
    """The work does not wait for the next heartbeat: simulator seed 443869."""
    member = site.owner_of(0)
    heartbeats = Heartbeats(member, ignore, seed=0)
    site.broker.is_sender_timed = True
    site.clock.advance(HI_MS)

    def fail() -> None:
        raise UnavailableError("the broker does not answer")

    faulty(member).after_read = fail

    with pytest.raises(ClaimLostError, match="sender's timestamp"):
        heartbeats.step()

    assert not member.claims


@pytest.mark.parametrize("seed", range(20))
def test_a_heartbeat_comes_before_each_interval_is_over(site: Site, seed: int) -> None:
    """The time between two heartbeats is 0.7 to 0.9 intervals."""
    heartbeats = Heartbeats(site.owner_of(0), ignore, seed=seed)
    sent_ms: list[float] = [site.clock.lease_ms()]
    for _ in range(100):
        before = beats(site)
        site.clock.advance(heartbeats.step() * 1_000)
        heartbeats.step()
        if beats(site) > before:
            sent_ms.append(site.clock.lease_ms())

    gaps = [later - earlier for earlier, later in pairwise(sent_ms)]
    assert len(gaps) > 10
    assert min(gaps) >= 0.7 * HI_MS
    assert max(gaps) <= 0.9 * HI_MS + 1
    assert max(gaps) - min(gaps) > 0.02 * HI_MS


def test_the_time_a_heartbeat_takes_delays_the_next_one_not(site: Site) -> None:
    """The interval counts from the time when the last heartbeat was sent, however long its acknowledgement took."""
    member = site.owner_of(0)
    heartbeats = Heartbeats(member, ignore, seed=1)
    site.clock.advance(0.9 * HI_MS)
    faulty(member).after_append = lambda: site.clock.advance(0.4 * HI_MS)

    assert heartbeats.step() * 1_000 <= 0.5 * HI_MS
    site.clock.advance(0.5 * HI_MS)
    before = beats(site)
    heartbeats.step()
    assert beats(site) == before + 1


def test_a_claim_won_a_while_ago_is_beaten_for_at_once(site: Site) -> None:
    """If the block starts late, the first heartbeat is sent without a further wait."""
    member = site.owner_of(0)
    site.clock.advance(0.95 * HI_MS)
    before = beats(site)

    Heartbeats(member, ignore).step()

    assert beats(site) == before + 1


def test_a_heartbeat_that_failed_is_followed_by_another_at_once(site: Site) -> None:
    """After an unacknowledged heartbeat, the next is sent within a fiftieth of the interval."""
    member = site.owner_of(0)
    heartbeats = Heartbeats(member, ignore)
    site.clock.advance(HI_MS)
    faulty(member).is_down = True
    assert heartbeats.step() * 1_000 <= HI_MS / 50
    faulty(member).recover()
    before = beats(site)

    site.clock.advance(HI_MS / 50)
    heartbeats.step()

    assert beats(site) == before + 1
    assert heartbeats.error is None


def test_a_lease_that_ended_tells_why_heartbeats_failed(site: Site) -> None:
    """The error that ends the work has the reason of the last failure, for example a missing topic."""
    member = site.owner_of(0)
    heartbeats = Heartbeats(member, ignore)
    faulty(member).is_down = True
    for part in (0.95, 0.05):
        site.clock.advance(part * HI_MS)
        heartbeats.step()
    site.clock.advance(HI_MS)

    heartbeats.watch()

    assert isinstance(heartbeats.error, ClaimLostError)
    assert "The last heartbeat failed: the broker does not answer. Nothing more is committed" in str(heartbeats.error)


def test_a_lost_claim_ends_the_heartbeats(site: Site) -> None:
    """A refused heartbeat ends them; the error names the new owner."""
    member = site.owner_of(0)
    heartbeats = Heartbeats(member, ignore)
    successor = site.member()
    successor.claim([0], is_dead=lambda _: True)
    site.clock.advance(HI_MS)

    with pytest.raises(ClaimLostError, match=successor.member.instance):
        heartbeats.step()


def test_a_log_that_changed_ends_the_heartbeats(site: Site) -> None:
    """The heartbeats end if the log was deleted and re-created."""
    heartbeats = Heartbeats(site.owner_of(0), ignore)
    site.broker.recreate()
    site.clock.advance(HI_MS)

    with pytest.raises(CoordinationLogChangedError):
        heartbeats.step()


def test_a_reason_to_stop_is_asked_for_often(site: Site) -> None:
    """The reasons are checked at least four times in each interval."""
    reasons: list[str | None] = [None]
    heartbeats = Heartbeats(site.owner_of(0), ignore, reasons_to_stop=[lambda: reasons[0]])
    assert heartbeats.ask() * 1_000 <= HI_MS / 4
    reasons[0] = "the run is over"

    with pytest.raises(BatchAbortedError, match="the run is over"):
        heartbeats.ask()


@pytest.mark.thorough
def test_who_takes_long_to_tell_a_reason_holds_up_no_heartbeat() -> None:
    """Dagster's storage may hang longer than the lease; as the broker works, the claim is kept."""
    member, log = running_member(500)
    answered = threading.Event()

    def hang() -> None:
        answered.wait(60)

    with Heartbeats(member, ignore, reasons_to_stop=[hang]) as heartbeats:
        try:
            wait_until(lambda: log.types().count("Heartbeat") >= 6, "six heartbeats are in the log")
        finally:
            answered.set()
        assert heartbeats.error is None
        member.check([0])


def test_who_cannot_tell_a_reason_stops_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """If a reason cannot be checked, heartbeats continue."""

    def broken() -> str | None:
        raise OSError("Dagster's database is away")

    heartbeats = Heartbeats(site.owner_of(0), ignore, reasons_to_stop=[broken])
    with caplog.at_level(logging.WARNING):
        heartbeats.ask()
    assert "so the batch continues" in caplog.text


def test_an_ended_lease_ends_the_work_once(site: Site) -> None:
    """The callback gets the error once, at the first check after the lease's end."""
    member = site.owner_of(0)
    told: list[MarshalError] = []
    heartbeats = Heartbeats(member, told.append)
    began_ms = site.clock.lease_ms()

    work_until_stopped(heartbeats, site, heartbeats.watch)

    assert site.clock.lease_ms() - began_ms <= 2 * HI_MS - HI_MS / 10 + HI_MS / 4 + 10
    heartbeats.watch()
    assert [type(error) for error in told] == [ClaimLostError]
    assert heartbeats.error is told[0]


def test_the_lease_is_looked_at_from_the_start(site: Site) -> None:
    """A lease that ended before the block is found at once."""
    member = site.owner_of(0)
    told: list[MarshalError] = []
    heartbeats = Heartbeats(member, told.append)
    site.clock.advance(2 * HI_MS)

    heartbeats.watch()

    assert len(told) == 1


def test_without_claims_there_is_nothing_to_watch(site: Site) -> None:
    """A member that released all its claims gets no error."""
    member = site.owner_of(0)
    told: list[MarshalError] = []
    heartbeats = Heartbeats(member, told.append)
    member.release()
    site.clock.advance(10 * HI_MS)
    before = site.values()

    heartbeats.watch()
    heartbeats.step()

    assert told == []
    assert site.values() == before


# With threads, and with the clocks of this machine


def running_member(interval_ms: int) -> tuple[Claimer, FaultyLog]:
    """Return a member that holds partition 0, with the machine's clocks."""
    log = FaultyLog(MemoryLog(MemoryBroker(1)))
    member = Claimer(Rationalizer(log), Member(GROUP, "c", "run1.0"), TOPIC, GroupSettings(interval_ms))
    member.ensure_group_settings()
    member.claim([0])
    member.name_data_topic(TOPIC_ID)
    member.beat({0: 0})
    return member, log


@pytest.mark.thorough
def test_threads_keep_a_claim_alive() -> None:
    """The claim outlives its lease many times while the block runs."""
    member, log = running_member(500)
    with Heartbeats(member, ignore) as heartbeats:
        began = time.monotonic()
        wait_until(lambda: log.types().count("Heartbeat") >= 6, "six heartbeats are in the log")
        assert heartbeats.error is None
        assert time.monotonic() - began > 1
        member.check([0])


@pytest.mark.thorough
def test_a_hanging_broker_does_not_keep_the_work_going() -> None:
    """While one thread waits for the broker, the other ends the work at the lease's end."""
    member, log = running_member(300)
    told = threading.Event()
    goes_on = threading.Event()

    def hang() -> None:
        goes_on.wait(20)

    log.before_append = hang
    with Heartbeats(member, lambda _: told.set()) as heartbeats:
        assert told.wait(WITHIN_S)
        assert isinstance(heartbeats.error, ClaimLostError)
        goes_on.set()


def test_after_the_block_no_heartbeat_is_sent() -> None:
    """The threads end with the block."""
    member, log = running_member(100)
    before = threading.active_count()
    with Heartbeats(member, ignore):
        assert threading.active_count() == before + 2
        wait_until(lambda: log.types().count("Heartbeat") >= 3, "three heartbeats are in the log")

    assert threading.active_count() == before


def test_a_fault_in_the_heartbeats_ends_the_work() -> None:
    """After an unexpected error, the work does not continue without heartbeats."""
    member, log = running_member(200)

    def broken() -> None:
        raise ValueError("a client that broke")

    log.before_append = broken
    told: list[MarshalError] = []
    with Heartbeats(member, told.append):
        wait_until(lambda: bool(told), "the loss is reported")

    assert isinstance(told[0], BatchAbortedError)
    assert "a client that broke" in str(told[0])


@pytest.mark.parametrize("how", ["a reason to stop", "a fault"])
def test_the_work_ends_before_a_line_is_logged(how: str) -> None:
    """A log handler may block, so the callback is called before any line is logged."""
    member, log = running_member(200)
    told = threading.Event()
    told_first: list[bool] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                told_first.append(told.is_set())

    def broken() -> None:
        raise ValueError("a client that broke")

    handler, logger = Slow(), logging.getLogger("marshal_dagster")
    logger.addHandler(handler)
    try:
        if how == "a fault":
            log.before_append = broken
        reasons = [lambda: "enough"] if how == "a reason to stop" else []
        with Heartbeats(member, lambda _: told.set(), reasons_to_stop=reasons):
            wait_until(told.is_set, "the loss is reported")
    finally:
        logger.removeHandler(handler)
    assert told_first
    assert all(told_first)


def test_work_that_cannot_be_stopped_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """If the callback fails, the block's owner gets the error, and a line is logged."""
    member, _ = running_member(100)

    def cannot(_: MarshalError) -> None:
        raise RuntimeError("no gateway")

    with caplog.at_level(logging.ERROR), Heartbeats(member, cannot, reasons_to_stop=[lambda: "enough"]) as heartbeats:
        wait_until(lambda: heartbeats.error is not None, "the loss is kept for the owner of the block")

    assert "could not be stopped" in caplog.text


@pytest.mark.thorough
def test_beating_and_committing_at_once() -> None:
    """With heartbeats and commits from two threads, the claim is kept and every commit counts."""
    member, log = running_member(200)
    log.before_append = lambda: time.sleep(0.001)
    with Heartbeats(member, ignore) as heartbeats:
        for offset in range(1, 200):
            member.plan({0: offset})
            member.commit({0: offset})
        assert heartbeats.error is None
    member.release()

    assert log.seen[-1].split("/")[-1] == "199"
