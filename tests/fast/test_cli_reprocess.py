"""Test `reprocess` as a user calls it, on an in-memory log, with members that work during its sleeps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.admin.reprocess import RangeReprocessor, TimeWindow
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.cli import position
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.testing import ManualClock
from tests.admin_fixtures import START, FakeTopics, act, at_work_on, site_now
from tests.members import GROUP, HI_MS, RANGES, SETTINGS, TOPIC, TOPIC_ID, Site

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

STOOD, STEP = 80, 15
AGAIN = ("reprocess", GROUP, TOPIC, "--partition", "0", "--from", "30", "--to", "50")


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Members:
    """A clock by which members process the next offsets of each partition during each sleep, if they may."""

    site: Site
    clock: ManualClock
    done: list[tuple[int, int]] = field(default_factory=list)
    at_next: Callable[[], object] = nothing
    are_there: bool = True
    ends: dict[int, int] = field(default_factory=lambda: {0: STOOD})
    """For each partition, the offset from which on nothing is unread."""

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
        """Process one batch of each partition."""
        for partition, last in self.ends.items():
            member = self.site.member(settings=SETTINGS)
            at = self.site.key(partition).offset
            if member.paused_until_s() is not None or at is None or at >= last or not member.claim([partition]):
                continue
            member.beat({partition: at})
            end = at + STEP
            member.plan({partition: end})
            member.commit({partition: end})
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
        "Partition 0: processed again up to 50.",
    ]
    assert answer.err.splitlines() == [
        "orders/0: the group reprocesses from 30 on; its position before was 80",
        "orders/0: the group continues at 80",
    ]
    assert members.done == [(30, 45), (45, 60)]
    assert (site.key().offset, is_paused(site), site.owner()) == (STOOD, False, None)


def test_members_that_went_beyond_are_not_set_back(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """If the range ends at the group's old position, the members may already be beyond it."""
    answer = act(capsys, "reprocess", GROUP, TOPIC, "-p", 0, "--from", 30, "--to", STOOD, "--yes", "--json")
    (row,) = answer.json["partitions"]
    assert (row["reached"], row["goes_on_at"], row["stood_at"]) == (90, 90, STOOD)
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


def test_members_that_are_not_through_in_time_are_reported(
    members: Members, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert answer.err.splitlines()[-1] == "orders/0: the group continues at 80"


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


def test_a_way_back_that_fails_half_way_is_reported(
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
        answer.err.splitlines()[0]
        == "orders/0: if the group's position is before 80, it processes all offsets up to there again"
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
        (("--from-datetime", "2026-01-31"), "give either --partition, --from and --to (offsets), or --from-datetime"),
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


@pytest.mark.slow
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
    (row,) = shown["partitions"]
    assert shown["dry_run"]
    assert [row[name] for name in ("start", "end", "stood_at", "reached")] == [30, 50, STOOD, None]
    assert members.site.values() == before


def test_a_person_is_requested_before_reprocessing(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without consent nothing changes."""
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    before = members.site.values()
    assert (act(capsys, *AGAIN).code, members.site.values()) == (1, before)


def test_an_open_plan_and_effectively_once_are_reported(
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


# By time

FROM, TO = "1970-01-01T00:00:01.500Z", "1970-01-01T00:00:03.500Z"
WINDOW = ("reprocess", GROUP, TOPIC, "--from-datetime", FROM, "--to-datetime", TO)
"""The window of time with the offsets from 30 up to 70."""


def test_a_window_of_time_is_done_again_in_all_partitions(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """Each partition's range ends at the window's end, or where the group is; each continues at its old position."""
    members.site.owner_of(1, at=60).release()
    members.ends[1] = 60
    answer = act(capsys, *WINDOW, "--yes")
    assert answer.code == 0
    assert [" ".join(line.split()) for line in answer.out.splitlines()[1:]] == [
        "partition log start log end position again from up to note",
        "0 20 100 80 30 70 -",
        "1 20 100 60 30 60 the group has not processed the messages from 60 on",
        "2 - - - - - the group has no position",
        "Partition 0: processed again up to 70.",
        "Partition 1: processed again up to 60.",
    ]
    assert sorted(members.done) == [(30, 45), (30, 45), (45, 60), (45, 60), (60, 75)]
    assert [members.site.key(number).offset for number in range(3)] == [STOOD, 60, None]
    assert not is_paused(members.site)


@pytest.mark.slow
def test_a_partition_that_is_done_waits_for_no_other(members: Members, capsys: pytest.CaptureFixture[str]) -> None:
    """Its position is restored at once, so no message after its range is processed again meanwhile."""
    members.site.owner_of(1, at=STOOD).release()
    answer = act(capsys, *WINDOW, "--yes", "--within", "1m", "--json")  # no member processes partition 1
    assert answer.code == 1
    assert [(row["reached"], row["goes_on_at"]) for row in answer.json["partitions"]] == [(75, STOOD), (30, STOOD)]
    assert answer.json["left_out"] == {"2": "the group has no position"}
    assert members.done == [(30, 45), (45, 60), (60, 75)]
    assert "orders/1: the members did not finish within 1m" in answer.err


def test_a_position_that_another_sets_keeps_no_other_from_its_old_one(
    members: Members, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the partition; the others continue where they were."""
    members.site.owner_of(1, at=STOOD).release()
    members.are_there = False

    def another() -> None:
        log = Rationalizer(members.site.log(), clock=members.clock)
        GroupAdmin(log, GROUP, "other", clock=members.clock).set_positions(TOPIC, {0: 20}, TOPIC_ID, wait_ms=0)

    members.at_next = another
    answer = act(capsys, *WINDOW, "--yes")
    assert (answer.code, is_paused(members.site)) == (1, False)
    assert [members.site.key(number).offset for number in range(2)] == [20, STOOD]
    assert "another process has set the position of orders/0 meanwhile" in answer.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("window", "why", "code"),
    [
        ((1, 1), "no message in this window", 0),
        ((80, 90), "not processed yet", 1),
        ((200, 300), "no message in this window", 0),
    ],
)
def test_a_window_without_processed_messages_is_nothing_to_do(
    members: Members, capsys: pytest.CaptureFixture[str], window: tuple[int, int], why: str, code: int
) -> None:
    """Nothing is written. The exit code is 1 if the window has messages, because these are not processed again."""
    before = members.site.values()
    times = [f"1970-01-01T00:00:{at * 50 / 1_000:06.3f}Z" for at in (window[0], window[1] + 0.02)]
    answer = act(capsys, "reprocess", GROUP, TOPIC, "--from-datetime", times[0], "--to-datetime", times[1], "-p", 0)
    assert (answer.code, why in answer.out, members.site.values()) == (code, True, before)
    assert answer.out.splitlines()[-1] == "There is nothing to process again."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--from-datetime", TO), "the window of time is empty"),
        (("--to-datetime", "yesterday"), "--to-datetime: 'yesterday' is not an ISO 8601 time with a time zone"),
        (("--to", "5"), "give either --partition, --from and --to (offsets), or --from-datetime and --to-datetime"),
        (("--partition", "7"), "has no partition 7"),
    ],
)
def test_a_window_that_cannot_be_is_one_line(
    members: Members, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Nothing is written."""
    before = members.site.values()
    answer = act(capsys, *WINDOW, *arguments)
    assert (answer.code, says in answer.error, members.site.values()) == (2, True, before)


def test_a_wrong_timestamp_that_hides_the_end_of_a_window_is_named(
    members: Members, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages after it would be left out silently. After the group's position it hides nothing."""
    at_work_on(members.site, monkeypatch, position, topics=FakeTopics(future={0: 55}))
    answer = act(capsys, *WINDOW, "--yes")
    assert answer.code == 2
    assert "orders/0: the message at offset 55 has a timestamp in the future" in answer.error
    at_work_on(members.site, monkeypatch, position, topics=FakeTopics(future={0: STOOD}))
    assert act(capsys, *WINDOW, "--yes").code == 0


class TimedTopics(FakeTopics):
    """A topic with one partition whose timestamps are out of order."""

    times_ms = (9, 3, 4, 12, 5, 6, 15, 15, 11, 20, 19, 25)

    def offsets_at(self, _: str, __: object, at_ms: int) -> dict[int, int]:
        """Return the first offset with that timestamp or a later one."""
        found = [START + offset for offset, time_ms in enumerate(self.times_ms) if time_ms >= at_ms]
        return {0: found[0]} if found else {}


@pytest.mark.parametrize("length_ms", [1, 2, 5, 7, 30])
def test_each_message_is_in_exactly_one_of_adjacent_windows(members: Members, length_ms: int) -> None:
    """Their ranges follow each other without gap or overlap, whatever the order of the timestamps."""
    topics = TimedTopics(partitions=(0,))
    resetter = PositionResetter(
        lambda _: Rationalizer(members.site.log(), clock=members.clock),
        cast("Topics", topics),
        GROUP,
        TOPIC,
        "ops",
        clock=members.clock,
    )
    ranges = []
    for start_ms in range(0, 30, length_ms):
        found = RangeReprocessor(resetter).look_at_window(TimeWindow(start_ms, start_ms + length_ms))
        ranges += [(plan.back.offset, plan.end) for plan in found.plans]
    assert [start for start, _ in ranges] == [START, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == STOOD
