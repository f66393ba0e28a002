"""Test `reprocess` as a user calls it, on an in-memory log, with members that work during its sleeps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.cli import position
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.testing import ManualClock
from tests.admin_fixtures import FakeTopics, act, at_work_on, site_now
from tests.members import GROUP, HI_MS, RANGES, SETTINGS, TOPIC, TOPIC_ID, Site

STOOD, STEP = 80, 15
AGAIN = ("reprocess", GROUP, TOPIC, "--partition", "0", "--from", "30", "--to", "50")


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Members:
    """A clock by which members process the next offsets of partition 0 during each sleep, if they are allowed to."""

    site: Site
    clock: ManualClock
    done: list[tuple[int, int]] = field(default_factory=list)
    at_next: Callable[[], object] = nothing
    are_there: bool = True

    def wall_ms(self) -> int:
        """Return the site's time."""
        return self.clock.wall_ms()

    def lease_ms(self) -> float:
        """Return the site's time."""
        return self.clock.lease_ms()

    def sleep_ms(self, duration_ms: float) -> None:
        """Run the next event, let members work, and then let the time pass."""
        happens, self.at_next = self.at_next, nothing
        happens()
        if self.are_there:
            self.work()
        self.clock.advance(duration_ms)

    def work(self) -> None:
        """Process one batch."""
        member = self.site.member(settings=SETTINGS)
        at = self.site.key().offset
        if member.paused_until_s() is not None or at is None or at >= STOOD or not member.claim([0]):
            return
        member.beat({0: at})
        end = at + STEP
        member.plan({0: end})
        member.commit({0: end})
        member.release()
        self.done.append((at, end))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """A group at offset 80."""
    site = site_now()
    site.owner_of(0, at=STOOD).release()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    return site


@pytest.fixture
def members(site: Site, monkeypatch: pytest.MonkeyPatch) -> Members:
    """The members of the group."""
    members = Members(site, site.clock)
    monkeypatch.setattr(position, "SystemClock", lambda: members)
    return members


def is_paused(site: Site) -> bool:
    """Return whether the group is paused in any coordination partition."""
    groups = [world.groups.get(GROUP) for world in site.world().partitions.values()]
    return any(group is not None and group.is_paused(site.clock.wall_ms()) for group in groups)


def test_a_range_is_done_again(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """The members process from its start to its end, or one batch further.

    Then the group continues at its old position.
    """
    site = members.site
    answer = act(capsys, *AGAIN, "--yes")
    assert answer.code == 0
    assert answer.out.splitlines()[1:] == [
        "partition  log start  log end  position  again from  up to  note",
        "0                 20      100        80          30     50  -",
        "Processed again up to 50.",
    ]
    assert answer.err.splitlines() == [
        "the group reprocesses from 30 on; its position before was 80",
        "the group continues at 80",
    ]
    assert members.done == [(30, 45), (45, 60)]
    assert (site.key().offset, is_paused(site), site.owner()) == (STOOD, False, None)


def test_members_that_went_beyond_are_not_set_back(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """If the range ends at the group's old position, the members may already be beyond it."""
    answer = act(capsys, "reprocess", GROUP, TOPIC, "-p", 0, "--from", 30, "--to", STOOD, "--yes", "--json")
    assert (answer.json["reached"], answer.json["goes_on_at"], answer.json["stood_at"]) == (90, 90, STOOD)
    assert members.done[-1] == (75, 90)
    assert (members.site.key().offset, is_paused(members.site)) == (90, False)
    assert members.site.values()[members.site.key().generation].endswith("/30"), "another position was set"


def test_the_group_goes_on_where_it_stood_with_nobody_at_work(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets that the group committed while the operator was asked count."""

    def agree(*_: object, **__: object) -> bool:
        owner = members.site.owner_of(0, at=STOOD)
        owner.plan({0: 90})
        owner.commit({0: 90})
        owner.release()
        return True

    monkeypatch.setattr("typer.confirm", agree)
    answer = act(capsys, *AGAIN)
    assert (answer.code, members.site.key().offset) == (0, 90)
    assert "its position before was 90" in answer.err


def test_members_that_are_not_through_in_time_are_told(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """The group continues at its old position, and the exit code shows that the range is not complete."""
    members.are_there = False
    answer = act(capsys, *AGAIN, "--yes", "--within", "1m")
    assert (answer.code, members.site.key().offset, is_paused(members.site)) == (1, STOOD, False)
    assert "did not finish within 1m: the offsets from 30 up to 50 were not committed again" in answer.err


def test_who_interrupts_it_has_the_group_go_on(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """The group continues at its old position."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    members.at_next = interrupt
    answer = act(capsys, *AGAIN, "--yes")
    assert (answer.code, members.site.key().offset, is_paused(members.site)) == (130, STOOD, False)
    assert answer.err.splitlines()[-1] == "the group continues at 80"


def test_a_broker_that_is_away_for_a_while_is_waited_for(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has a time limit."""
    keys, failures = PositionResetter.keys, [UnavailableError("away")] * 2

    def away(self: PositionResetter, numbers: list[int]) -> object:
        if members.done and failures:
            raise failures.pop()
        return keys(self, numbers)

    monkeypatch.setattr(PositionResetter, "keys", away)
    assert (act(capsys, *AGAIN, "--yes").code, failures) == (0, [])


def test_a_broker_that_stays_away_leaves_word(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message states that the group may process more than requested again, but not less."""
    keys = PositionResetter.keys

    def away(self: PositionResetter, numbers: list[int]) -> object:
        if members.done:
            raise UnavailableError("away")
        return keys(self, numbers)

    monkeypatch.setattr(PositionResetter, "keys", away)
    answer = act(capsys, *AGAIN, "--yes", "--within", "2s")
    assert (answer.code, is_paused(members.site)) == (3, False)
    assert "if the group's position is before 80, it processes all offsets up to there again" in answer.err


def test_a_way_back_that_fails_half_way_is_told(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position may be set, so the group processes more than requested again; it is not left paused."""
    set_positions = GroupAdmin.set_positions

    def half(self: GroupAdmin, topic: str, offsets: dict[int, int], topic_id: str, **_: object) -> None:
        set_positions(self, topic, offsets, topic_id, wait_ms=0)
        raise UnavailableError("the broker is gone")

    monkeypatch.setattr(GroupAdmin, "set_positions", half)
    answer = act(capsys, *AGAIN, "--yes")
    assert (answer.code, members.site.key().offset, is_paused(members.site)) == (3, 30, False)
    assert (
        answer.err.splitlines()[0] == "if the group's position is before 80, it processes all offsets up to there again"
    )


def test_members_that_stay_keep_it_from_beginning(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was set, and the group is resumed."""
    owner = members.site.owner_of(0, at=STOOD)
    answer = act(capsys, *AGAIN, "--yes", "--wait", "5s")
    assert (answer.code, f"still claimed by {owner.member.instance}" in answer.err) == (1, True)
    assert (members.site.key().generation, is_paused(members.site)) == (0, False)
    assert act(capsys, *AGAIN, "--yes", "--wait", f"{3 * HI_MS // 1_000}s").code == 0, "it waited for a stale owner"


@pytest.mark.parametrize("late", [False, True])
def test_a_position_that_another_sets_meanwhile_stays(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Another operator sets it before the range starts, or while members process it."""

    def another() -> bool:
        members.are_there = False
        log = Rationalizer(members.site.log(), clock=members.clock)
        GroupAdmin(log, GROUP, "other", clock=members.clock).set_positions(TOPIC, {0: 20}, TOPIC_ID, wait_ms=0)
        return True

    if late:
        members.at_next = another
    monkeypatch.setattr("typer.confirm", lambda *_, **__: late or another())
    answer = act(capsys, *AGAIN)
    assert (answer.code, members.site.key().offset, is_paused(members.site)) == (1, 20, False)
    assert "another process has set the position of orders/0 meanwhile" in answer.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--from", "50", "--to", "50"), "is empty"),
        (("--from", "30", "--to", "81"), "is at 80 in orders/0 and has not processed all offsets up to 81"),
        (("--from", "10", "--to", "50"), "offsets 10 to 20 (exclusive) are deleted"),
        (("--partition", "1"), "has no position in orders/1"),
        (("--partition", "7"), "has no partition 7"),
        (("--json",), "then add --yes"),
        (("--within", "x"), "--within: 'x' is not a duration"),
    ],
)
def test_what_cannot_be_done_again_is_one_line(
    members: Members, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Nothing is written."""
    before = members.site.values()
    answer = act(capsys, *AGAIN, *arguments)
    assert (answer.code, says in answer.error, members.site.values()) == (2, True, before)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (GroupSettings(HI_MS, delivery=DeliveryMode.AT_MOST_ONCE), "delivers at most once"),
        (GroupSettings(60_000, rule_set=RuleSet.GO), "Go consumers share group"),
        (RANGES, "claim ranges after the offset"),
    ],
)
def test_groups_in_which_it_could_not_be_kept_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: GroupSettings, says: str
) -> None:
    """In such groups more than the range would be processed again, or the position would not last."""
    site = site_now()
    site.owner_of(0, at=STOOD, settings=settings).release()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    before = site.values()
    answer = act(capsys, *AGAIN, "--yes")
    assert (answer.code, says in answer.error, site.values()) == (2, True, before)


def test_a_group_that_is_paused_does_nothing_again(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """A paused group must be resumed first; one that is paused meanwhile stays paused at its old position."""
    members.site.pause(60)
    refused = act(capsys, *AGAIN, "--yes")
    assert (refused.code, "is paused, so no member would reprocess the range" in refused.error) == (2, True)
    members.site.pause(-1)
    members.at_next = partial(members.site.pause, 3_600, "boss.1")
    answer = act(capsys, *AGAIN, "--yes", "--within", "1m")
    assert (answer.code, members.site.key().offset, is_paused(members.site)) == (1, STOOD, True)


def test_a_pause_that_another_begins_meanwhile_stays(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """The new pause may also replace the one under which the position is set."""
    owner = members.site.owner_of(0, at=STOOD)

    def pause() -> None:
        members.site.pause(7_200, "boss.1")
        owner.release()

    members.at_next = pause
    answer = act(capsys, *AGAIN, "--yes", "--within", "1m")
    assert (answer.code, members.site.key().offset, is_paused(members.site)) == (1, STOOD, True)
    assert members.done == []


def test_a_dry_run_of_reprocessing_writes_nothing(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run shows the result."""
    before = members.site.values()
    assert act(capsys, *AGAIN, "--dry-run").out.splitlines()[-1] == "A dry run: nothing was written."
    shown = act(capsys, *AGAIN, "--dry-run", "--json").json
    assert [shown[name] for name in ("dry_run", "start", "end", "stood_at", "reached")] == [True, 30, 50, STOOD, None]
    assert members.site.values() == before


def test_a_person_is_asked_before_reprocessing(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without consent nothing changes."""
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    before = members.site.values()
    assert (act(capsys, *AGAIN).code, members.site.values()) == (1, before)


def test_an_open_plan_and_effectively_once_are_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of an effectively-once group must be replaced."""
    site = site_now()
    owner = site.owner_of(0, at=STOOD, settings=GroupSettings(HI_MS, delivery=DeliveryMode.EFFECTIVELY_ONCE))
    owner.plan({0: 90})
    owner.release()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    answer = act(capsys, *AGAIN, "--dry-run")
    assert "delivers effectively once" in answer.error
    assert "the plan up to 90 ends" in answer.out
