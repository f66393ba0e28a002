"""Test `position get` and `position reset` as a user calls them, on an in-memory log."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from marshal_dagster.admin.operator import GroupAdmin
from marshal_dagster.cli import position, settings
from marshal_dagster.cli.connections import WRITING
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import UnavailableError
from marshal_dagster.kafka.acls import Right
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.leases import delivery_timeout_ms
from marshal_dagster.protocol.messages import ClaimingPartition, DataTopic, DeliveryMode, GroupSettings, RuleSet
from tests.admin_fixtures import END, START, WRITTEN, FakeTopics, act, at_work_on, site_now, write_first_settings
from tests.members import GROUP, HI_MS, OTHER_TOPIC_ID, RANGES, TOPIC, TOPIC_ID, Site, about

ELSEWHERE = "orders-10"
SET = ("position", "reset", GROUP, TOPIC)


@pytest.fixture
def topics() -> FakeTopics:
    """The data topic."""
    return FakeTopics()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, topics: FakeTopics) -> Site:
    """A group at offset 50 in two of three partitions; the command uses the site's clock."""
    site = site_now()
    site.owner_of(0, 1, at=50).release()
    at_work_on(site, monkeypatch, position, settings, topics=topics)
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    return site


def standing(site: Site) -> list[int | None]:
    """Return the group's offset in each partition."""
    return [site.key(number).offset for number in range(3)]


def is_paused(site: Site) -> bool:
    """Return whether the group is paused in any coordination partition."""
    groups = [world.groups.get(GROUP) for world in site.world().partitions.values()]
    return any(group is not None and group.is_paused(site.clock.wall_ms()) for group in groups)


def cells(table: str) -> list[list[str]]:
    """Return the cells of each row of a partition."""
    return [line.split() for line in table.splitlines() if line[:1].isdigit() or line.startswith(f"{TOPIC}/")]


def test_positions_are_shown_beside_what_the_topic_holds(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics
) -> None:
    """A partition without a position is shown, too."""
    topics.committed[1] = 44
    answer = act(capsys, "position", "get", GROUP)
    assert (answer.code, answer.err) == (0, "")
    assert cells(answer.out) == [
        ["orders/0", "20", "100", "50", "50", "-", "0", "-"],
        ["orders/1", "20", "100", "50", "50", "44", "0", "-"],
        ["orders/2", "20", "100", "-", "-", "-", "0", "-"],
    ]
    rows = act(capsys, "position", "get", GROUP, TOPIC, "--json").json["positions"]
    assert rows[1] == {
        "topic": TOPIC,
        "partition": 1,
        "log_start": START,
        "log_end": END,
        "offset": 50,
        "lag": 50,
        "committed_in_kafka": 44,
        "generation": 0,
        "notes": [],
    }
    assert site.key(2).offset is None


def test_what_to_think_of_stands_beside_a_position(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics
) -> None:
    """Notes show an open plan and a topic that was deleted and re-created."""
    site.owner_of(0).plan({0: 70})
    rows = act(capsys, "position", "get", GROUP, "--json").json["positions"]
    assert [row["notes"] for row in rows] == [["planned up to 70"], [], []]
    topics.topic_id = OTHER_TOPIC_ID
    rows = act(capsys, "position", "get", GROUP, "--json").json["positions"]
    note = "the topic was deleted and re-created"
    assert [(row["lag"], row["notes"][0]) for row in rows[:2]] == [(None, note)] * 2


def test_positions_are_shown_though_the_topic_is_missing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The offsets come from the log, and a line reports the missing topic; an unknown group is an error."""
    site.say(replace(about(ClaimingPartition, "x"), topic=ELSEWHERE))
    answer = act(capsys, "position", "get", GROUP, ELSEWHERE)
    assert (answer.code, answer.error) == (0, f"topic '{ELSEWHERE}' does not exist")
    assert answer.out.splitlines()[-1].split() == [f"{ELSEWHERE}/0", *"-----", "0", "-"]
    answer = act(capsys, "position", "get", GROUP, "ordres")
    assert (answer.code, answer.out, answer.error) == (5, "", "marshal-dagster: topic 'ordres' does not exist")
    answer = act(capsys, "position", "get", "other")
    assert (answer.code, "the log has no group 'other'" in answer.error) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        (["--to-offset", "30"], [30, 30, 30]),
        (["--to-offset", "0=30,2=40"], [30, 50, 40]),
        (["--to-earliest"], [START] * 3),
        (["--to-latest", "--partitions", "1-2"], [50, END, END]),
        (["--shift-by", "-10", "--partitions", "0,1"], [40, 40, None]),
        (["--to-datetime", "1970-01-01T00:00:03.001Z"], [61, 61, 61]),
        (["--to-offset", str(WRITTEN)], [WRITTEN] * 3),
    ],
)
def test_positions_are_set(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    topics: FakeTopics,
    arguments: list[str],
    after: list[int | None],
) -> None:
    """Every way to specify offsets works.

    Other partitions keep theirs, the group resumes, and Kafka's offsets follow.
    """
    before = standing(site)
    answer = act(capsys, *SET, *arguments, "--yes")
    assert (answer.code, answer.err) == (0, "")
    assert standing(site) == after
    assert not is_paused(site)
    moved = {n: at for n, at in enumerate(after) if site.key(n).generation}
    assert topics.committed == moved
    assert cells(answer.out) == [
        [str(n), "20", "100", str(before[n] or "-"), str(at), f"{at - before[n]:+d}" if before[n] else "-", "-"]  # type: ignore[operator]
        for n, at in moved.items()
    ]
    assert "were set." in answer.out.splitlines()[-1]


def test_a_time_that_no_record_has_is_pointed_out(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The position is then the end of the partition."""
    assert site.key(0).offset == 50
    young = act(capsys, *SET, "--to-datetime", "2100-01-01T00:00:00Z", "--dry-run", "--json").json["positions"]
    assert [(row["after"], row["notes"]) for row in young] == [(END, ["no record is that recent"])] * 3
    old = act(capsys, *SET, "--to-datetime", "1970-01-01T00:00:03Z", "--dry-run", "--json").json["positions"]
    assert [(row["after"], row["notes"]) for row in old] == [(60, [])] * 3


def test_a_record_with_a_time_in_the_future_is_reported(
    site: Site, topics: FakeTopics, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a record is the first one that is late enough, so partition and offset are named."""
    assert site.key(0).offset == 50
    topics.future = {0: 45, 1: 90}
    answer = act(capsys, *SET, "--to-datetime", "1970-01-01T00:00:03Z", "--dry-run", "--json")
    assert [row["after"] for row in answer.json["positions"]] == [45, 60, 60]
    assert (
        f"{TOPIC}/0: the first record with that time or later, offset 45, has a timestamp in the future" in answer.err
    )
    assert f"{TOPIC}/1" not in answer.err


def test_a_dry_run_of_positions_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run shows the result without a prompt."""
    before = site.values()
    answer = act(capsys, *SET, "--to-earliest", "--dry-run")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "A dry run: nothing was written.")
    shown = act(capsys, *SET, "--to-earliest", "--dry-run", "--json").json
    assert (shown["dry_run"], [row["after"] for row in shown["positions"]]) == (True, [START] * 3)
    assert [row["set"] for row in shown["positions"]] == [False] * 3
    assert site.values() == before


@pytest.mark.parametrize(("agreed", "after"), [(True, (0, 30)), (False, (1, 50))])
def test_a_person_is_requested(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    agreed: bool,
    after: tuple[int, int],
) -> None:
    """Without consent nothing changes."""
    monkeypatch.setattr("typer.confirm", lambda *_, **__: agreed)
    answer = act(capsys, *SET, "--to-offset", "0=30")
    assert (answer.code, site.key(0).offset) == after
    assert ("nothing was written" in answer.err) == (not agreed)


def test_what_was_set_is_reported_as_json(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer has the new generation; with JSON there is no prompt, so `--yes` is needed."""
    refused = act(capsys, *SET, "--to-earliest", "--json")
    assert (refused.code, "then add --yes" in refused.error) == (2, True)
    answer = act(capsys, *SET, "--to-offset", "0=30", "--json", "--yes")
    assert answer.json["positions"] == [
        {
            "partition": 0,
            "log_start": START,
            "log_end": END,
            "before": 50,
            "after": 30,
            "set": True,
            "generation": site.key(0).generation,
            "notes": [],
        }
    ]


@pytest.mark.parametrize(
    ("offset", "why"), [(START - 1, "offsets 19 to 20 (exclusive) are deleted"), (WRITTEN + 1, "beyond the end 110")]
)
def test_an_offset_outside_the_log_is_refused_unless_reported(
    site: Site, capsys: pytest.CaptureFixture[str], offset: int, why: str
) -> None:
    """An offset within an open transaction is in range, because that record exists."""
    before = site.values()
    answer = act(capsys, *SET, "--to-offset", f"1={offset}", "--yes")
    assert (answer.code, f"orders/1: offset {offset}: {why}" in answer.error) == (2, True)
    assert site.values() == before
    answer = act(capsys, *SET, "--to-offset", f"1={offset}", "--yes", "--allow-out-of-range")
    assert (answer.code, why in answer.out, site.key(1).offset) == (0, True, offset)


def test_what_ends_and_who_is_at_work_stand_in_the_table(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A note shows a plan that ends and an owner that has to leave."""
    owner = site.owner_of(0, at=50)
    owner.plan({0: 70})
    answer = act(capsys, *SET, "--to-offset", "0=30", "--dry-run")
    assert f"the plan up to 70 ends; held by {owner.member.instance}" in answer.out


def test_ranges_ahead_are_warned_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges planned or done after the offset are processed again or never."""
    site = site_now()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    site.begin(0, at=50)
    site.holder_of({0: (60, 70)}, settings=RANGES, plans=True).release()
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes")
    assert "[60, 70) planned: processed again, or never" in answer.out
    assert (answer.code, site.key(0).offset, site.ranges()) == (0, 30, [])


def test_members_are_waited_for_and_named_if_they_stay(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing was set, the exit code is 1, and the group is resumed."""
    owner = site.owner_of(0, at=50)
    answer = act(capsys, *SET, "--to-offset", "0=30,1=30", "--yes", "--wait", "5s")
    assert answer.code == 1
    lines = answer.err.splitlines()
    assert lines[0] == "the group is paused; waiting up to 5s for the owners of partitions to leave"
    assert lines[-2] == "set: partitions none; not set: 0-1"
    assert "partitions [0] of topic 'orders' are still claimed by live members" in lines[-1]
    assert (standing(site)[:2], is_paused(site)) == ([50, 50], False)
    assert f"held by {owner.member.instance}" in answer.out
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes", "--wait", f"{3 * HI_MS // 1_000}s").code == 0
    assert site.key(0).offset == 30


@pytest.mark.parametrize("error", [UnavailableError("the broker is gone"), KeyboardInterrupt()], ids=repr)
def test_what_was_set_half_way_is_reported(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The report comes from the log, whether an error or an interrupt ended the command."""
    set_positions = GroupAdmin.set_positions

    def half(self: GroupAdmin, topic: str, offsets: dict[int, int], topic_id: str, **_: object) -> None:
        set_positions(self, topic, {0: offsets[0]}, topic_id, wait_ms=0)
        raise error

    monkeypatch.setattr(GroupAdmin, "set_positions", half)
    answer = act(capsys, *SET, "--to-offset", "30", "--yes")
    assert answer.code == (3 if isinstance(error, UnavailableError) else 130)
    assert "set: partitions 0; not set: 1-2" in answer.err
    assert [site.key(number).offset for number in range(3)] == [30, 50, None]
    assert "were set." not in answer.out


def test_a_topic_that_was_named_anew_is_not_a_position_that_was_set(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new topic id starts a generation, too, but leaves no offset."""
    topics.topic_id = OTHER_TOPIC_ID

    def stops_early(*_: object, **__: object) -> None:
        site.pause(60, "ops.1")
        site.say(about(ClaimingPartition, "ops.1"))
        site.say(about(DataTopic, "ops.1", topic_id=OTHER_TOPIC_ID))
        raise UnavailableError("the broker is gone")

    monkeypatch.setattr(GroupAdmin, "set_positions", stops_early)
    answer = act(capsys, *SET, "--to-offset", "0=0", "--allow-out-of-range", "--yes")
    assert (site.key(0).generation > 0, site.key(0).offset) == (True, None)
    assert "set: partitions none; not set: 0" in answer.err


def test_nobody_is_requested_by_a_log_that_is_only_observed(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state in such a log may be wrong."""
    site.broker.retain_from(site.home, 1)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: pytest.fail("asked"))
    answer = act(capsys, *SET, "--to-earliest")
    assert (answer.code, "marshal-dagster recover" in answer.err.splitlines()[-1], answer.out) == (1, True, "")


def test_an_unknown_group_may_be_one_whose_records_were_deleted(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """In an incomplete log every command names `recover`, and not only a name that may be right."""
    for partition in range(site.partitions):
        site.broker.retain_from(partition, site.broker.bounds(partition).end)
    for command in (SET, ("retry", GROUP, TOPIC)):
        answer = act(capsys, *command, *(["--to-earliest"] if command is SET else []))
        last = answer.err.splitlines()[-1]
        assert answer.code == 1
        assert f"the coordination partition of topic '{TOPIC}' no longer begins at offset 0" in last
    for command in (("position", "get", GROUP), ("settings", "show", GROUP), ("settings", "set", GROUP, "--ranges")):
        answer = act(capsys, *command)
        assert answer.code == 1
        last = answer.err.splitlines()[-1]
        assert f"the log has no group '{GROUP}' and no other group. But coordination partitions" in last
        assert last.endswith("run `marshal-dagster recover`")


@pytest.mark.usefixtures("site")
def test_a_position_that_another_process_sets_meanwhile_is_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command lists only what it set, and ends with exit code 1."""
    set_positions = GroupAdmin.set_positions

    def then_set_back(self: GroupAdmin, topic: str, offsets: dict[int, int], topic_id: str, **_: object) -> None:
        set_positions(self, topic, offsets, topic_id, wait_ms=0)
        set_positions(self, topic, {0: 20}, topic_id, wait_ms=0)

    monkeypatch.setattr(GroupAdmin, "set_positions", then_set_back)
    answer = act(capsys, *SET, "--to-offset", "0=30,1=30", "--yes")
    assert (answer.code, answer.out.splitlines()[-1]) == (1, "The positions of partitions 1 were set.")
    assert "partitions 0 do not have these positions" in answer.error


def test_that_the_group_stays_paused_is_reported(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the broker fails before the pause can be ended, the error also reports the positions that were set."""
    logs = [breaking := site.log(), site.log()]

    def breaks_down() -> None:
        if breaking.types()[-1] == "ReleaseGroup" and "ReleasingPartition" in breaking.types():
            breaking.is_down = True

    breaking.before_append = breaks_down
    monkeypatch.setattr(position, "open_reader", lambda *_, **__: Rationalizer(logs.pop(), clock=site.clock))
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes")
    assert answer.code == 3
    assert "stays paused for at least 3600 s: resume it" in answer.err
    assert "set: partitions 0; not set: none" in answer.err
    assert (site.key(0).offset, is_paused(site)) == (30, True)


def test_offsets_that_kafka_does_not_take_are_reported(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics
) -> None:
    """Only lag tools read those offsets, so the positions are set all the same."""
    topics.problem = "READ is missing"
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes")
    assert (answer.code, site.key(0).offset) == (0, 30)
    assert "READ is missing" in answer.error


def test_a_topic_that_was_re_created_meanwhile_is_found_out(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic is re-created while the operator is asked, so nothing is set."""

    def agree(*_: object, **__: object) -> bool:
        topics.topic_id = OTHER_TOPIC_ID
        return True

    monkeypatch.setattr("typer.confirm", agree)
    before = site.values()
    answer = act(capsys, *SET, "--to-offset", "0=30")
    assert (answer.code, "was deleted and re-created meanwhile" in answer.err, site.values()) == (1, True, before)


def test_a_topic_that_is_re_created_while_positions_are_set_is_reported(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positions have no meaning in the new topic."""
    set_positions = GroupAdmin.set_positions

    def slowly(self: GroupAdmin, topic: str, offsets: dict[int, int], topic_id: str, **_: object) -> None:
        set_positions(self, topic, offsets, topic_id, wait_ms=0)
        topics.topic_id = OTHER_TOPIC_ID

    monkeypatch.setattr(GroupAdmin, "set_positions", slowly)
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes")
    assert (answer.code, "the positions were set in the deleted one" in answer.err) == (1, True)
    assert (site.key(0).offset, topics.committed) == (30, {})


def test_a_position_in_a_topic_that_is_no_more_is_no_measure(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics
) -> None:
    """A position of the deleted topic cannot be shifted; an offset in the new topic can be set."""
    topics.topic_id = OTHER_TOPIC_ID
    refused = act(capsys, *SET, "--shift-by", "-5", "--partitions", "0", "--yes")
    assert (refused.code, "orders/0 cannot be shifted from its present position" in refused.error) == (2, True)
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes")
    assert cells(answer.out)[0][:6] == ["0", "20", "100", "50", "30", "-"]
    assert "the topic was deleted and re-created" in answer.out
    assert (site.key(0).offset, site.key(0).data_topic_id) == (30, OTHER_TOPIC_ID)


def test_the_log_is_written_as_the_groups_members_do(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record may wait only as long as the group's heartbeat interval allows."""
    requested: list[int] = []

    def open_reader(
        connection: KafkaConnection, topic: str, *, interval_ms: int, rights: tuple[Right, ...]
    ) -> Rationalizer:
        requested.append(interval_ms)
        assert (connection.bootstrap_servers, topic, rights) == ("somewhere:1", "__marshal", WRITING)
        return Rationalizer(site.log(), clock=site.clock)

    monkeypatch.setattr(position, "open_reader", open_reader)
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes").code == 0
    assert requested[-1] == site.world().group_of(GROUP, TOPIC).settings.heartbeat_interval_ms == HI_MS


def test_a_group_whose_settings_change_meanwhile_is_set_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new settings may allow less waiting than those for which the log was opened."""
    site, requested = site_now(), list[int]()
    write_first_settings(site, GroupSettings(60_000))
    monkeypatch.setattr(position, "Topics", lambda *_, **__: FakeTopics())
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)

    def open_reader(*_: object, interval_ms: int, rights: object) -> Rationalizer:
        assert rights == WRITING
        requested.append(interval_ms)
        log = site.log()
        cast("Any", log.log).delivery_timeout_ms = delivery_timeout_ms(interval_ms)
        rationalizer = Rationalizer(log, clock=site.clock)
        if len(requested) == 2:  # the first reader is only for the look
            rationalizer.catch_up()
            site.pause(60)
            write_first_settings(site)
            site.pause(-60)
        return rationalizer

    monkeypatch.setattr(position, "open_reader", open_reader)
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes")
    assert answer.code == 0, answer.err
    assert requested[-1] == HI_MS
    assert site.key(0).offset == 30


def test_a_group_that_has_never_claimed_can_begin_somewhere(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A new group needs `--new-group`, because its name is most likely misspelt otherwise."""
    command = ("position", "reset", "new", TOPIC, "--to-latest", "--yes")
    refused = act(capsys, *command)
    assert (refused.code, "give --new-group" in refused.error) == (2, True)
    before = site.values()
    refused = act(capsys, *command, "--new-group")
    assert (refused.code, "settings set new" in refused.error) == (1, True)
    assert site.values() == before
    assert act(capsys, "settings", "set", "new", "--new-group", "--yes").code == 0
    assert act(capsys, *command).code == 0
    assert site.world().key("new", TOPIC, 2).offset == END


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (GroupSettings(60_000, rule_set=RuleSet.GO), "the next heartbeat of one that is not stopped"),
        (GroupSettings(HI_MS, delivery=DeliveryMode.EFFECTIVELY_ONCE), "delivers effectively once"),
    ],
)
def test_what_a_group_is_like_is_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: GroupSettings, warning: str
) -> None:
    """Go consumers may still run, and effectively-once output must be replaced."""
    site = site_now()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    site.owner_of(0, at=50, settings=settings).release()
    is_go = settings.rule_set is RuleSet.GO
    says = ("--go-consumers-stopped", GROUP) if is_go else ()
    assert warning in act(capsys, *SET, "--to-offset", "0=30", "--dry-run", *says).error


SINKS = """
class Output:
    requested = []

    def __init__(self, answer):
        self.answer = answer

    def can_replace(self, ranges):
        self.requested.extend(ranges)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

can = Output(None)
cannot = Output("rows there have no offsets")
lost = Output(OSError("the disk is gone"))
number = 7

def make():
    return cannot

def fail():
    return 1 // 0
"""


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A group that delivers effectively once, and sinks in a module in the working folder."""
    site = site_now()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    site.owner_of(0, 1, at=50, settings=GroupSettings(HI_MS, delivery=DeliveryMode.EFFECTIVELY_ONCE)).release()
    (tmp_path / "sinks_here.py").write_text(SINKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "sinks_here", raising=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("can", ""),
        ("cannot", "the sink would reject the records that are read again: rows there have no offsets"),
        ("make", "the sink would reject the records that are read again: rows there have no offsets"),
        ("lost", "the sink failed to report whether it can replace its output: the disk is gone"),
    ],
)
@pytest.mark.usefixtures("once")
def test_a_sink_that_is_named_is_requested(capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    """The command passes all ranges that will be read again, for each partition."""
    offsets = ("--to-offset", "0=30,1=10,2=100", "--allow-out-of-range", "--dry-run")
    answer = act(capsys, *SET, *offsets, "--sink", f"sinks_here:{name}")
    assert (answer.code, answer.err.strip().removeprefix("marshal-dagster: ")) == (0, said)
    requested = sys.modules["sinks_here"].Output.requested
    assert [str(range_) for range_ in requested] == [f"{TOPIC}/0 [30, {END})", f"{TOPIC}/1 [10, {END})"]
    assert [(range_.group, range_.data_topic_id, range_.first_readable) for range_ in requested] == [
        (GROUP, TOPIC_ID, 30),
        (GROUP, TOPIC_ID, START),
    ]


@pytest.mark.usefixtures("once")
def test_a_sink_that_is_not_named_could_not_be_requested(capsys: pytest.CaptureFixture[str]) -> None:
    """The operator is informed that the check was not possible."""
    answer = act(capsys, *SET, "--to-offset", "0=30", "--dry-run")
    assert "a sink that cannot rejects them. To check this, name the sink" in answer.error


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sinks_here", "--sink: 'sinks_here'; give it as module:name"),
        ("sinks here:can", "--sink: 'sinks here:can'; give it as module:name"),
        ("sinks_there:can", "--sink: 'sinks_there:can' failed to load: ModuleNotFoundError: No module named"),
        ("sinks_here:might", "failed to load: AttributeError: "),
        ("sinks_here:fail", "failed to load: ZeroDivisionError: "),
        ("sinks_here:number", "--sink: 'sinks_here:number' is not a sink: name an object with `can_replace`"),
        ("sinks_here:Output", "--sink: 'sinks_here:Output' is not a sink: name an object with `can_replace`"),
    ],
)
@pytest.mark.usefixtures("once")
def test_what_is_no_sink_is_refused(capsys: pytest.CaptureFixture[str], name: str, said: str) -> None:
    """A name that is not a sink is refused before anything else."""
    answer = act(capsys, *SET, "--to-offset", "0=30", "--dry-run", "--sink", name)
    assert answer.code == 2
    assert said in answer.error
