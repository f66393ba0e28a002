"""Check how heartbeats keep claims alive, and how the work ends when a claim is uncertain.

See protocol.md, section 6, "Stay". The threads repeat `step`, `watch` and `ask`; most tests call these with a manual
clock.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from marshal_dagster.coordination.claimer import Claimer, Member
from marshal_dagster.coordination.heartbeats import LONGEST_PART, Heartbeats
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    BatchAbortedError,
    ClaimLostError,
    CoordinationLogChangedError,
    MarshalError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.testing import ManualClock, MemoryBroker, MemoryLog
from tests.conditions import wait_until
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


def test_a_lease_that_ended_reports_why_heartbeats_failed(site: Site) -> None:
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


def test_a_reason_to_stop_is_requested_often(site: Site) -> None:
    """The reasons are checked at least four times in each interval."""
    reasons: list[str | None] = [None]
    heartbeats = Heartbeats(site.owner_of(0), ignore, reasons_to_stop=[lambda: reasons[0]])
    assert heartbeats.ask() * 1_000 <= HI_MS / 4
    reasons[0] = "the run is over"

    with pytest.raises(BatchAbortedError, match="the run is over"):
        heartbeats.ask()


def test_who_cannot_report_a_reason_stops_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
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
    reported: list[MarshalError] = []
    heartbeats = Heartbeats(member, reported.append)
    began_ms = site.clock.lease_ms()

    work_until_stopped(heartbeats, site, heartbeats.watch)

    assert site.clock.lease_ms() - began_ms <= 2 * HI_MS - HI_MS / 10 + HI_MS / 4 + 10
    heartbeats.watch()
    assert [type(error) for error in reported] == [ClaimLostError]
    assert heartbeats.error is reported[0]


def test_the_lease_is_looked_at_from_the_start(site: Site) -> None:
    """A lease that ended before the block is found at once."""
    member = site.owner_of(0)
    reported: list[MarshalError] = []
    heartbeats = Heartbeats(member, reported.append)
    site.clock.advance(2 * HI_MS)

    heartbeats.watch()

    assert len(reported) == 1


def test_without_claims_there_is_nothing_to_watch(site: Site) -> None:
    """A member that released all its claims gets no error."""
    member = site.owner_of(0)
    reported: list[MarshalError] = []
    heartbeats = Heartbeats(member, reported.append)
    member.release()
    site.clock.advance(10 * HI_MS)
    before = site.values()

    heartbeats.watch()
    heartbeats.step()

    assert reported == []
    assert site.values() == before


# With threads: they look at the clock often, but only the test moves it


INTERVAL_MS = 200
DUE_MS = LONGEST_PART * INTERVAL_MS


class Running:
    """A member that holds partition 0, with a short heartbeat interval and a clock of its own."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.log = FaultyLog(MemoryLog(MemoryBroker(1, now_ms=self.clock.wall_ms)))
        rationalizer = Rationalizer(self.log, clock=self.clock)
        settings = GroupSettings(INTERVAL_MS)
        self.member = Claimer(rationalizer, Member(GROUP, "c", "run1.0"), TOPIC, settings, clock=self.clock)
        self.member.ensure_group_settings()
        self.member.claim([0])
        self.member.name_data_topic(TOPIC_ID)
        self.member.beat({0: 0})

    @property
    def beats(self) -> int:
        """Return the number of heartbeats in the log."""
        return self.log.types().count("Heartbeat")

    def await_beats(self, number: int) -> None:
        """Let time pass until the next heartbeat is due, and wait for that; repeat this."""
        for count in range(self.beats + 1, self.beats + number + 1):
            self.clock.advance(DUE_MS)
            wait_until(functools.partial(self._has_beats, count), "another heartbeat is in the log")

    def _has_beats(self, number: int) -> bool:
        return self.beats >= number


@pytest.fixture
def running() -> Running:
    """Return a member for heartbeats with threads."""
    return Running()


@pytest.mark.slow
def test_threads_keep_a_claim_alive(running: Running) -> None:
    """The claim outlives its lease many times while the block runs."""
    with Heartbeats(running.member, ignore) as heartbeats:
        running.await_beats(6)
        assert heartbeats.error is None
        running.member.check([0])


def test_a_hanging_broker_does_not_keep_the_work_going(running: Running) -> None:
    """While one thread waits for the broker, the other ends the work at the lease's end."""
    reported, hangs, may_continue = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        may_continue.wait()

    running.log.before_append = hang
    with Heartbeats(running.member, lambda _: reported.set()) as heartbeats:
        running.clock.advance(DUE_MS)
        hangs.wait()
        assert not reported.is_set()
        running.clock.advance(2 * INTERVAL_MS)
        reported.wait()
        assert isinstance(heartbeats.error, ClaimLostError)
        may_continue.set()


@pytest.mark.slow
def test_after_the_block_no_heartbeat_is_sent(running: Running) -> None:
    """The threads end with the block."""
    with Heartbeats(running.member, ignore) as heartbeats:
        assert [thread.is_alive() for thread in heartbeats._threads] == [True, True]
        running.await_beats(2)

    assert not any(thread.is_alive() for thread in heartbeats._threads)


def test_a_fault_in_the_heartbeats_ends_the_work(running: Running) -> None:
    """After an unexpected error, the work does not continue without heartbeats."""

    def broken() -> None:
        raise ValueError("a client that broke")

    running.log.before_append = broken
    reported: list[MarshalError] = []
    with Heartbeats(running.member, reported.append):
        running.clock.advance(DUE_MS)
        wait_until(lambda: bool(reported), "the loss is reported")

    assert isinstance(reported[0], BatchAbortedError)
    assert "a client that broke" in str(reported[0])


@pytest.mark.parametrize("how", ["a reason to stop", "a fault"])
def test_the_work_ends_before_a_line_is_logged(running: Running, how: str) -> None:
    """A log handler may block, so the callback is called before any line is logged."""
    reported = threading.Event()
    reported_first: list[bool] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                reported_first.append(reported.is_set())

    def broken() -> None:
        raise ValueError("a client that broke")

    handler, logger = Slow(), logging.getLogger("marshal_dagster")
    logger.addHandler(handler)
    try:
        if how == "a fault":
            running.log.before_append = broken
        reasons = [lambda: "enough"] if how == "a reason to stop" else []
        with Heartbeats(running.member, lambda _: reported.set(), reasons_to_stop=reasons):
            running.clock.advance(DUE_MS)
            reported.wait()
    finally:
        logger.removeHandler(handler)
    assert reported_first
    assert all(reported_first)


@pytest.mark.slow
def test_who_takes_long_to_report_a_reason_holds_up_no_heartbeat(running: Running) -> None:
    """Dagster's storage may hang longer than the lease; as the broker works, the claim is kept."""
    answered = threading.Event()

    def hang() -> None:
        answered.wait()

    with Heartbeats(running.member, ignore, reasons_to_stop=[hang]) as heartbeats:
        try:
            running.await_beats(6)
        finally:
            answered.set()
        assert heartbeats.error is None
        running.member.check([0])


def test_work_that_cannot_be_stopped_is_reported(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    """If the callback fails, the block's owner gets the error, and a line is logged."""

    def cannot(_: MarshalError) -> None:
        raise RuntimeError("no gateway")

    with (
        caplog.at_level(logging.ERROR),
        Heartbeats(running.member, cannot, reasons_to_stop=[lambda: "enough"]) as heartbeats,
    ):
        wait_until(lambda: heartbeats.error is not None, "the loss is kept for the owner of the block")

    assert "could not be stopped" in caplog.text


@pytest.mark.thorough
def test_beating_and_committing_at_once(running: Running) -> None:
    """With heartbeats and commits from two threads, the claim is kept and every commit counts."""
    member, offset, beats_seen = running.member, 0, 0
    running.log.before_append = lambda: time.sleep(0.001)
    with Heartbeats(member, ignore) as heartbeats:
        while offset < 199 or beats_seen < 6:
            if running.beats > beats_seen:
                beats_seen = running.beats
                running.clock.advance(DUE_MS)
            offset += 1
            member.plan({0: offset})
            member.commit({0: offset})
        assert heartbeats.error is None
    member.release()

    assert running.log.seen[-1].split("/")[-1] == str(offset)
