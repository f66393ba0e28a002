"""Check what operators see and what is done if the log is cut while a command waits for confirmation.

When the operator answers, the log may already be another one.
"""

import logging
from functools import partial
from typing import Any

import pytest

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.admin.position_spec import ToOffsets
from marshal_dagster.admin.reprocess import RangeReprocessor
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.admin.revoke import ClaimRevoker
from marshal_dagster.cli import position, revoke
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import CoordinationLogChangedError, IncompleteLogError, MarshalError, PositionNotSetError
from marshal_dagster.protocol.messages import Heartbeat
from tests.admin_fixtures import FakeTopics, act, at_work_on, site_now
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import GROUP, OTHER_TOPIC_ID, TOPIC, TOPIC_ID, Site, about


@pytest.fixture
def site() -> Site:
    """Return a coordination topic for one test."""
    return Site()


def operator(site: Site, log: FaultyLog | None = None) -> GroupAdmin:
    """Return an operator's access to the group."""
    return GroupAdmin(Rationalizer(log or site.log(), clock=site.clock), GROUP, "ops", clock=site.clock)


def repositioning(site: Site) -> PositionResetter:
    """Return the operator's position reset."""
    topics: Any = FakeTopics()
    return PositionResetter(
        lambda _: Rationalizer(site.log(), clock=site.clock), topics, GROUP, TOPIC, "ops", site.clock
    )


# Revoking


def revoking(site: Site) -> ClaimRevoker:
    """Return the operator's revocation."""
    return ClaimRevoker(lambda _: Rationalizer(site.log(), clock=site.clock), GROUP, TOPIC, "ops", site.clock)


def test_who_revokes_takes_nothing_in_a_log_re_created(site: Site) -> None:
    """In the new log, another owner has the epoch that was shown."""
    site.owner_of(0, 1)
    work = revoking(site)
    shown = work.look()
    site.broker.recreate()
    alive = site.owner_of(0, 1)

    with pytest.raises(CoordinationLogChangedError, match="Nothing was revoked"):
        work.carry_out(shown)

    assert site.owner(0) == site.owner(1) == alive.member.instance


def test_who_revokes_takes_nothing_from_an_owner_that_was_not_shown(site: Site) -> None:
    """The log lost the claims that were shown, and another member's claims have the same offsets."""
    dead = site.owner_of(0, 1)
    work = revoking(site)
    shown = work.look()
    assert {each.owner.instance for each in shown} == {dead.member.instance}
    for partition in range(site.partitions):
        site.broker.truncate(partition, 0)
    alive = site.owner_of(0, 1)

    assert work.carry_out(shown) == []

    assert site.owner(0) == site.owner(1) == alive.member.instance


def test_who_revokes_hears_that_the_log_can_only_be_observed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention deletes the log while the operator is asked to confirm."""
    site = site_now()
    monkeypatch.setattr(revoke, "ClaimRevoker", partial(ClaimRevoker, clock=site.clock))
    at_work_on(site, monkeypatch, revoke)
    dead = site.owner_of(0)

    def agree(*_: object, **__: object) -> bool:
        site.overtake()
        return True

    monkeypatch.setattr("marshal_dagster.cli.revoke.typer.confirm", agree)
    answer = act(capsys, "revoke", GROUP, TOPIC, "--instance", dead.member.instance)

    assert answer.code != 0
    assert "recover`" in answer.err


# Positions


def test_position_set_does_not_say_that_it_set_what_it_did_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys that can only be observed have generation 0, which is no new generation."""
    site = site_now()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    site.owner_of(0, at=40).release()
    assert act(capsys, "position", "reset", GROUP, TOPIC, "--to-offset", "0=50", "--yes").code == 0
    owner = site.owner_of(0, at=50)

    def agree(*_: object, **__: object) -> bool:
        site.overtake()
        site.say(about(Heartbeat, owner.member.instance, 0, offset=50))
        return True

    monkeypatch.setattr("marshal_dagster.cli.position.typer.confirm", agree)
    answer = act(capsys, "position", "reset", GROUP, TOPIC, "--to-offset", "0=30")

    assert answer.code != 0
    assert "set: partitions 0;" not in answer.err


def test_what_was_set_in_a_log_that_is_only_observed_is_not_known(site: Site) -> None:
    """The log can only be observed, so the positions are not reported as set."""
    site.owner_of(0, at=10).release()
    operator(site).set_positions(TOPIC, {0: 50}, TOPIC_ID, wait_ms=0)
    owner = site.owner_of(0, at=50)
    work = repositioning(site)
    moves = work.look(ToOffsets(by_partition=((0, 30),)))
    site.overtake()
    site.say(about(Heartbeat, owner.member.instance, offset=50))

    with pytest.raises(IncompleteLogError):
        work.done(moves)


def test_who_reprocesses_blames_nobody_for_what_retention_did(site: Site) -> None:
    """The log can only be observed since the position was set back; no other operator is named as the cause."""
    site.owner_of(0, at=50).release()
    reprocessing = RangeReprocessor(repositioning(site))
    redo = reprocessing.look(0, 30, 40)

    def overtake(text: str) -> None:
        if "reprocesses from" in text:
            site.overtake()

    with pytest.raises(IncompleteLogError):
        reprocessing.carry_out([redo], wait_s=10, within_s=10, report=overtake)


@pytest.mark.parametrize("moment", range(30))
def test_positions_that_were_set_are_not_reported_as_not_set(
    site: Site, moment: int, caplog: pytest.LogCaptureFixture
) -> None:
    """From some call on, the log does not answer.

    A position that may have been set by then is not reported as unset.
    """
    caplog.set_level(logging.WARNING)
    site.owner_of(0, 1).release()
    log = site.log()
    ops = operator(site, log)
    passed = 0

    def pass_a_moment() -> None:
        nonlocal passed
        passed += 1
        log.is_down = passed > moment

    log.before_append = log.after_append = log.before_read = pass_a_moment
    try:
        ops.set_positions(TOPIC, {0: 9, 1: 3}, TOPIC_ID, wait_ms=0)
    except MarshalError as error:
        reported = f"{error} {caplog.text}"
        is_set = any(site.key(number).generation for number in (0, 1))
        assert not is_set or "no partition is known to be set" not in reported or "may have been set" in reported


@pytest.mark.parametrize(
    ("fault", "topic_id", "stands_at"),
    [(Fault.FAILED, OTHER_TOPIC_ID, None), (Fault.LOST_ACK, TOPIC_ID, 9)],
    ids=[
        "another data topic was named, which removes the offset, and the release was not written",
        "each record is in the log",
    ],
)
def test_what_may_have_become_of_a_position_is_reported(
    site: Site, fault: Fault, topic_id: str, stands_at: int | None
) -> None:
    """The release that sets the position was not acknowledged: the offset may be removed, or be the new one."""
    site.owner_of(0, at=50).release()
    log = site.log()
    log.fail(fault, of_type("ReleasingPartition"))

    with pytest.raises(PositionNotSetError, match="Check the present positions"):
        operator(site, log).set_positions(TOPIC, {0: 9}, topic_id, wait_ms=0)

    assert site.key().offset == stands_at
