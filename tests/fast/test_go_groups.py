"""What a person does where Go consumers are at work: positions, pauses, settings, revocation.

See protocol.md, sections 6 and 7.
"""

from collections.abc import Sequence
from functools import partial

import pytest

from marshal_dagster.admin.go_groups import Way
from marshal_dagster.admin.group_settings import GroupSettingsAdmin
from marshal_dagster.admin.pause import GroupPauser
from marshal_dagster.admin.position_spec import ToOffsets
from marshal_dagster.admin.reset_positions import PositionResetter
from marshal_dagster.admin.revoke import ClaimRevoker
from marshal_dagster.admin.settings_change import SettingsChanger
from marshal_dagster.cli import pause, position, revoke
from marshal_dagster.cli import settings as settings_command
from marshal_dagster.coordination.log import Ack, Append
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    GoGroupError,
    GroupPausedError,
    PositionNotSetError,
    SettingsMismatchError,
    SettingsNotSetError,
    TimestampTypeError,
)
from marshal_dagster.protocol.messages import (
    WITHOUT_SETTINGS,
    ClaimingMessages,
    ClaimingPartition,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    parse,
    render,
)
from tests.admin_fixtures import (
    GO_TYPES,
    FakeTopics,
    act,
    at_work_on,
    go_left,
    go_owner,
    site_now,
    types,
    write_first_settings,
)
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import GROUP, HI_MS, RANGES, SETTINGS, TOPIC, TOPIC_ID, Site, about, settings_record

SET = ("position", "reset", GROUP, TOPIC)
STOPPED = ("--go-consumers-stopped", GROUP)
GO_STALE_MS = 121_001


@pytest.fixture
def topics() -> FakeTopics:
    """The data topic."""
    return FakeTopics()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, topics: FakeTopics) -> Site:
    """A coordination topic without records, on which commands work."""
    site = site_now()
    at_work_on(site, monkeypatch, position, pause, revoke, settings_command, topics=topics)
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    monkeypatch.setattr(revoke, "ClaimRevoker", partial(ClaimRevoker, clock=site.clock))
    monkeypatch.setattr(settings_command, "GroupSettingsAdmin", partial(GroupSettingsAdmin, clock=site.clock))
    return site


def reader_on(site: Site) -> Rationalizer:
    """Open a reader that has read the log."""
    reader = Rationalizer(site.log(), clock=site.clock)
    reader.catch_up()
    return reader


def operator_on(site: Site) -> SettingsChanger:
    """Open an operator."""
    return SettingsChanger(reader_on(site), GROUP, "ops", clock=site.clock)


def in_force(site: Site, group: str = GROUP) -> set[GroupSettings]:
    """Return the settings of a group, over all coordination partitions."""
    world = site.world()
    known = [partition.groups.get(group) for partition in world.partitions.values()]
    return {world.defaults if each is None else each.settings for each in known}


def others_keys(site: Site) -> None:
    """Let a Go consumer of another group have a key on the coordination topic."""
    for kind, tail in ((ClaimingPartition, {}), (Heartbeat, {"offset": 5})):
        message = kind(instance="gohost", client="c", group="others", topic=TOPIC, partition=0, time_s=0, **tail)
        site.say(message)


# Positions


@pytest.mark.parametrize("to", [30, 50, 90])
def test_a_position_is_set_in_a_go_group_without_a_pause(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics, to: int
) -> None:
    """Lower, equal and higher ones, by records that Go knows, and in Kafka's own group offsets."""
    go_left(site, 0, 1)
    answer = act(capsys, *SET, "--to-offset", f"0={to}", "--yes", *STOPPED)
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "The positions of partitions 0 were set.")
    key = site.key(0)
    assert (key.offset, key.owner, key.generation) == (to, None, 0)
    assert site.key(1).offset == 50
    assert types(site) <= GO_TYPES
    assert topics.committed == {0: to}


def test_a_member_dates_its_records_two_seconds_back(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Go takes a time ahead of its own clock for stale."""
    go_left(site, 0)
    before = len(site.values())
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes", *STOPPED).code == 0
    messages = [parse(value.encode()) for value in site.values()[before:]]
    now_s = site.clock.wall_ms() // 1_000
    assert messages
    assert {each.time_s - now_s for each in messages} == {-2}  # type: ignore[union-attr]


@pytest.mark.parametrize("has_keys", [True, False])
def test_in_a_group_without_settings_a_person_says_first_who_shares_it(
    site: Site, capsys: pytest.CaptureFixture[str], has_keys: bool
) -> None:
    """Else nothing is written, and the error names both ways; a dry run is refused too."""
    if has_keys:
        go_left(site, 0)
    before = site.values()
    for how in ("--yes", "--dry-run"):
        refused = act(capsys, *SET, "--to-offset", "0=30", "--new-group", how)
        assert (refused.code, refused.out) == (1, "")
        assert f"settings set {GROUP}" in refused.error
        assert f"--go-consumers-stopped {GROUP}" in refused.error
    assert site.values() == before


def test_the_groups_name_confirms_that_its_consumers_are_stopped(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another name there is a mistake, in every command that takes one."""
    go_left(site, 0)
    before = site.values()
    wrong = ("--go-consumers-stopped", "other")
    for command in (
        (*SET, "--to-offset", "0=30", "--yes"),
        ("position", "import", GROUP, TOPIC, "--consumer-group", "x", "--yes"),
        ("pause", GROUP, "--for", "1h"),
        ("resume", GROUP),
        ("settings", "set", GROUP, "--yes"),
    ):
        refused = act(capsys, *command, *wrong)
        assert (refused.code, "names 'other', but the group is 'etl'" in refused.error) == (2, True), command
    assert site.values() == before


def test_a_group_with_native_settings_keeps_its_way(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """It is paused, whatever a person says of Go consumers, and a new generation begins."""
    site.owner_of(0, at=50).release()
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes", *STOPPED).code == 0
    assert "ReleaseGroup" in types(site)
    assert (site.key(0).offset, site.key(0).generation > 0) == (30, True)


def test_settings_by_which_a_group_is_shared_with_go_are_no_settings_to_pause_by(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older version wrote such records."""
    write_first_settings(site, WITHOUT_SETTINGS)
    go_left(site, 0)
    before = site.values()
    refused = act(capsys, *SET, "--to-offset", "0=30", "--yes")
    assert (refused.code, "Go consumers share group 'etl'" in refused.error, site.values()) == (1, True, before)
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes", *STOPPED).code == 0
    assert (site.key(0).offset, "ReleaseGroup" in types(site)) == (30, False)


def test_half_written_settings_are_completed_before_a_position_is_set(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a person who says that its Go consumers are stopped for good: it has one of their keys without settings."""
    go_left(site, 0)
    site.broker.append((site.home + 1) % site.partitions, render(settings_record(SETTINGS)))
    before = site.values()
    refused = act(capsys, *SET, "--to-offset", "0=30", "--yes", *STOPPED)
    assert (refused.code, f"settings set {GROUP}" in refused.error, site.values()) == (1, True, before)
    complete = ("settings", "set", GROUP, "--yes")
    for command in (complete, ("pause", GROUP, "--for", "1h")):
        assert (act(capsys, *command).code, site.values()) == (1, before)
    assert act(capsys, *complete, *STOPPED).code == 0
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes").code == 0


def test_an_open_plan_ends_only_with_another_offset(site: Site) -> None:
    """A position at the same offset leaves it."""
    instance = go_owner(site, 0, 1)
    for partition in (0, 1):
        site.say(about(ClaimingMessages, instance, partition, plan_end=60))
    site.clock.advance(GO_STALE_MS)
    operator_on(site).set_go_positions(TOPIC, {0: 50, 1: 40}, wait_ms=0)
    assert (site.key(0).plan_end, site.key(1).plan_end) == (60, None)


def test_live_owners_are_waited_for(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is revoked; who stays is named, and nothing was written."""
    go_owner(site, 0)
    before = site.values()
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes", "--wait", "5s", *STOPPED)
    assert (answer.code, "are still claimed by live members" in answer.err, site.values()) == (1, True, before)
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes", "--wait", "3m", *STOPPED).code == 0
    assert (site.key(0).offset, types(site) <= GO_TYPES) == (30, True)


def test_a_position_that_another_takes_back_is_not_set(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that was not stopped beats in between."""
    go_left(site, 0)
    log = site.log()
    operator = SettingsChanger(Rationalizer(log, clock=site.clock), GROUP, "ops", clock=site.clock)
    append = FaultyLog.append

    def beat_before_a_release(self: FaultyLog, records: Sequence[Append]) -> Sequence[Ack]:
        if any(record.value.startswith(b"Releasing") for record in records):
            site.say(about(Heartbeat, "gohost-8", offset=70))
        return append(self, records)

    monkeypatch.setattr(FaultyLog, "append", beat_before_a_release)
    with pytest.raises(PositionNotSetError, match="still claimed"):
        operator.set_go_positions(TOPIC, {0: 10}, wait_ms=0)


@pytest.mark.parametrize("problem", ["refused", None])
def test_kafkas_own_offsets_must_follow_in_a_go_group(
    site: Site,
    capsys: pytest.CaptureFixture[str],
    topics: FakeTopics,
    monkeypatch: pytest.MonkeyPatch,
    problem: str | None,
) -> None:
    """Go starts at these where it finds offset 0; a commit that is not there when read back is a failure too."""
    go_left(site, 0)
    topics.problem = problem
    if problem is None:
        monkeypatch.setattr(FakeTopics, "group_offsets", lambda *_: {0: 11})
    answer = act(capsys, *SET, "--to-offset", "0=0", "--yes", "--allow-out-of-range", *STOPPED)
    assert (answer.code, "not in Kafka's own group offsets" in answer.err) == (1, True)
    assert "set: partitions 0" in answer.err
    assert site.key(0).offset == 0


def test_a_paused_go_group_is_not_moved(site: Site) -> None:
    """An older version paused it: its members would not claim either."""
    go_left(site, 0)
    site.pause(60)
    with pytest.raises(GroupPausedError):
        operator_on(site).set_go_positions(TOPIC, {0: 10}, wait_ms=0)


def test_first_positions_are_adopted_in_a_go_group(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics
) -> None:
    """In the same way, when its consumers are stopped."""
    topics.committed.update({0: 30, 1: 40, 2: 50})
    adopt = ("position", "import", GROUP, TOPIC, "--consumer-group", "loader", "--yes")
    assert f"--go-consumers-stopped {GROUP}" in act(capsys, *adopt).error
    assert site.values() == []
    assert act(capsys, *adopt, *STOPPED).code == 0
    assert [site.key(number).offset for number in range(3)] == [30, 40, 50]
    assert types(site) <= GO_TYPES


def test_who_knows_the_members_settings_gives_them_first(site: Site, topics: FakeTopics) -> None:
    """Before the group is paused or claimed: without them a late release would count as Go's and move the offset."""
    with_settings = partial(PositionResetter, lambda _: reader_on(site), topics, GROUP, TOPIC, "ops", site.clock)  # type: ignore[arg-type]
    work = with_settings(settings=SETTINGS)
    moves = work.look(ToOffsets(each=30), new_group=True)
    assert work.way() is Way.SETTINGS_FIRST
    work.carry_out(moves, wait_s=0)
    assert (site.key(0).offset, in_force(site)) == (30, {SETTINGS})
    first = [value.partition("/")[0] for value in site.values()]
    assert first.index("GroupSettings") < first.index("ReleaseGroup") < first.index("ClaimingPartition")


def test_settings_are_not_given_where_go_consumers_are(site: Site, topics: FakeTopics) -> None:
    """Of this group, or of another one on a topic where no group has settings."""
    others_keys(site)
    before = site.values()
    work = PositionResetter(lambda _: reader_on(site), topics, GROUP, TOPIC, "ops", site.clock, SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(GoGroupError, match="group 'others' has orders/0"):
        work.look(ToOffsets(each=30), new_group=True)
    go_left(site, 0)
    with pytest.raises(GoGroupError, match="Go consumers use group 'etl'"):
        work.look(ToOffsets(each=30))
    assert site.values()[: len(before)] == before


def test_the_protocols_way_refuses_a_go_group(site: Site) -> None:
    """Nothing is written, not even a pause."""
    go_left(site, 0)
    before = site.values()
    with pytest.raises(GoGroupError, match="settings set etl"):
        operator_on(site).set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    assert site.values() == before


# Pauses


def test_a_go_group_is_paused_only_when_a_person_allows_it(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest Go consumers do not know the record."""
    go_left(site, 0)
    before = site.values()
    for command in (("pause", GROUP, "--for", "1h"), ("resume", GROUP), ("pause", GROUP, "--for", "1h", "--dry-run")):
        refused = act(capsys, *command)
        assert (refused.code, "newer than January 2017" in refused.err) == (1, True)
    assert site.values() == before
    assert act(capsys, "pause", GROUP, "--for", "1h", *STOPPED).code == 0
    assert site.world().group_of(GROUP, TOPIC).is_paused(site.clock.wall_ms())
    assert act(capsys, "resume", GROUP, *STOPPED).code == 0
    assert not site.world().group_of(GROUP, TOPIC).is_paused(site.clock.wall_ms())


def test_a_native_group_is_paused_beside_a_go_group(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings are in the log already: a person has allowed records that Go does not know."""
    others_keys(site)
    write_first_settings(site)
    assert act(capsys, "pause", GROUP, "--for", "1h").code == 0


def test_a_group_gets_its_settings_before_it_is_paused(site: Site) -> None:
    """Where these are known; not where Go consumers are."""
    pausing = GroupPauser(reader_on(site), GROUP, "ops", site.clock, SETTINGS)
    pausing.look()
    pausing.preview(site.clock.wall_ms() // 1_000 + 60)
    assert site.values() == []
    pausing.pause(site.clock.wall_ms() // 1_000 + 60)
    assert in_force(site) == {SETTINGS}
    other = Site(site.clock)
    go_left(other, 0)
    before = other.values()
    pausing = GroupPauser(reader_on(other), GROUP, "ops", other.clock, SETTINGS)
    pausing.look()
    with pytest.raises(GoGroupError):
        pausing.pause(site.clock.wall_ms() // 1_000 + 60)
    assert other.values() == before


# Settings


def test_a_new_group_gets_settings_without_a_pause(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not named is as a member has it by default."""
    set_ = ("settings", "set", GROUP, "--delivery", "effectively_once")
    assert "give --new-group" in act(capsys, *set_, "--yes").error
    answer = act(capsys, *set_, "--new-group", "--yes")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "The settings were set.")
    assert in_force(site) == {GroupSettings(10_000, delivery=DeliveryMode.EFFECTIVELY_ONCE)}
    assert types(site) == {"GroupSettings"}
    again = act(capsys, *set_, "--yes")
    assert (again.code, "has these settings already" in again.error) == (0, True)


def test_settings_are_changed_in_a_pause(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not named stays; the pause that was in force is put back, and nobody keeps a position."""
    site.owner_of(0, at=50, settings=RANGES).release()
    site.pause(900)
    until_s = site.world().group_of(GROUP, TOPIC).paused_until_s
    answer = act(capsys, "settings", "set", GROUP, "--heartbeat-interval", "20", "--yes")
    assert answer.code == 0
    assert in_force(site) == {GroupSettings(20_000, features=("ranges",))}
    assert (site.key(0).offset, site.world().group_of(GROUP, TOPIC).paused_until_s) == (50, until_s)


def test_a_group_that_was_not_paused_goes_on_after_its_settings_changed(site: Site) -> None:
    """Members that are configured so can claim."""
    site.owner_of(0, at=50).release()
    other = GroupSettings(20_000)
    operator_on(site).set_settings(other, wait_ms=0)
    assert site.member(settings=other).claim([0])


def test_a_dry_run_of_settings_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows what would be; a person who does not agree changes nothing either."""
    site.owner_of(0, at=50).release()
    before = site.values()
    shown = act(capsys, "settings", "set", GROUP, "--ranges", "--dry-run", "--json").json
    assert {tuple(row["after"]["features"]) for row in shown["coordination_partitions"]} == {("ranges",)}
    assert {tuple(row["before"]["features"]) for row in shown["coordination_partitions"]} == {()}
    assert site.values() == before


def test_a_person_is_asked_before_settings_change(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And warned that another delivery begins a new generation."""
    site.owner_of(0, at=50).release()
    before = site.values()
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    answer = act(capsys, "settings", "set", GROUP, "--delivery", "at_most_once")
    assert (answer.code, site.values()) == (1, before)
    assert "begins a new generation" in answer.err


def test_members_that_stay_keep_their_settings(site: Site) -> None:
    """They are named; the group is not paused afterwards. What is known to be dead is revoked."""
    owner = site.owner_of(0, at=50)
    with pytest.raises(SettingsNotSetError, match="orders/0 is still claimed"):
        operator_on(site).set_settings(GroupSettings(20_000), wait_ms=HI_MS / 2)
    assert in_force(site) == {SETTINGS}
    assert not site.world().group_of(GROUP, TOPIC).is_paused(site.clock.wall_ms())
    operator_on(site).set_settings(
        GroupSettings(20_000), wait_ms=0, is_dead=lambda each: each.instance == owner.member.instance
    )
    assert (in_force(site), site.owner()) == ({GroupSettings(20_000)}, None)


def test_dead_holders_of_ranges_are_revoked_before_settings_change(site: Site) -> None:
    """Nobody waits for them."""
    site.begin(0)
    site.holder_of({0: (0, 5)})
    operator_on(site).set_settings(GroupSettings(20_000, features=("ranges",)), wait_ms=0, is_dead=lambda _: True)
    assert in_force(site) == {GroupSettings(20_000, features=("ranges",))}


def test_settings_that_were_not_acknowledged_are_completed(site: Site) -> None:
    """By another try."""
    site.owner_of(0, at=50).release()
    log = site.log()
    log.fail(Fault.FAILED, of_type("GroupSettings"))
    with pytest.raises(SettingsNotSetError, match="try again to complete the change"):
        SettingsChanger(Rationalizer(log, clock=site.clock), GROUP, "ops", clock=site.clock).set_settings(
            GroupSettings(20_000), wait_ms=0
        )
    assert not site.world().group_of(GROUP, TOPIC).is_paused(site.clock.wall_ms())
    operator_on(site).set_settings(GroupSettings(20_000), wait_ms=0)
    assert in_force(site) == {GroupSettings(20_000)}


@pytest.mark.parametrize("whose", ["its own", "another group's", "by a record"])
def test_where_go_consumers_are_settings_need_a_persons_word(
    site: Site, capsys: pytest.CaptureFixture[str], whose: str
) -> None:
    """That no Go consumer will use the topic again."""
    if whose == "another group's":
        others_keys(site)
    else:
        if whose == "by a record":
            write_first_settings(site, WITHOUT_SETTINGS)
        go_owner(site, 0)
    before = site.values()
    set_ = ("settings", "set", GROUP, "--rules", "native", "--new-group", "--wait", "3m", "--yes")
    refused = act(capsys, *set_)
    assert (refused.code, f"--go-consumers-stopped {GROUP}" in refused.error, site.values()) == (1, True, before)
    answer = act(capsys, *set_, *STOPPED)
    assert (answer.code, in_force(site)) == (0, {SETTINGS})
    assert "records that Go consumers do not know" in answer.err
    assert "RevokingClaim" not in types(site)
    if whose != "another group's":
        assert (site.key(0).offset, site.owner(), "ReleaseGroup" in types(site)) == (50, None, True)


def test_nothing_is_revoked_in_a_go_group_before_it_gets_settings(site: Site) -> None:
    """Though it is known that its owner is dead: Go consumers do not know the record."""
    go_owner(site, 0)
    with pytest.raises(SettingsNotSetError, match="orders/0 is still claimed"):
        operator_on(site).set_settings(SETTINGS, wait_ms=0, is_dead=lambda _: True)
    assert "RevokingClaim" not in types(site)


def test_a_group_goes_back_to_the_rules_of_go(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """With Go's heartbeat interval; a group without settings has them already."""
    site.owner_of(0, at=50).release()
    assert act(capsys, "settings", "set", GROUP, "--rules", "go", "--yes").code == 0
    assert in_force(site) == {WITHOUT_SETTINGS}
    answer = act(capsys, "settings", "set", "new", "--rules", "go", "--new-group", "--yes")
    assert (answer.code, "has these settings already" in answer.error) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rules", "gopher"), "--rules: 'gopher'; give native or go"),
        (("--delivery", "twice"), "--delivery: 'twice'; give at_most_once"),
        (("--rules", "go", "--delivery", "at_most_once"), "can only promise at_least_once"),
        (("--rules", "go", "--ranges"), "cannot be used with rule set 'go'"),
        (("--json",), "then add --yes"),
    ],
)
def test_settings_that_no_group_can_have_are_refused(
    site: Site, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Before anything is written."""
    before = site.values()
    answer = act(capsys, "settings", "set", GROUP, "--new-group", *arguments)
    assert (answer.code, says in answer.error, site.values()) == (2, True, before)


def test_settings_that_differ_are_completed_by_naming_them_all(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else says which of them stay."""
    site.broker.append(site.home, render(settings_record(SETTINGS)))
    other = (site.home + 1) % site.partitions
    site.broker.append(other, render(settings_record(GroupSettings(20_000))))
    assert "differ between coordination partitions" in act(capsys, "settings", "set", GROUP, "--yes").error
    every = ("--heartbeat-interval", "30", "--rules", "native", "--delivery", "at_least_once")
    assert act(capsys, "settings", "set", GROUP, *every, "--yes").code == 0
    assert in_force(site) == {GroupSettings(30_000)}


def test_who_is_configured_otherwise_reads_how_settings_are_changed(site: Site) -> None:
    """The error names the command."""
    site.member()
    with pytest.raises(SettingsMismatchError, match="settings set etl"):
        site.member(settings=GroupSettings(20_000))


# Revocation


def test_a_dead_go_owner_is_taken_over_and_released(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """By records that Go knows, at the offset where it is; a key without an offset goes stale by itself."""
    instance = go_owner(site, 0, 1)
    site.say(about(ClaimingPartition, instance, 2))
    answer = act(capsys, "revoke", GROUP, TOPIC, "--instance", instance, "--yes")
    assert answer.code == 1
    assert "takes its partitions back with its next heartbeat" in answer.err
    assert "No member holds partitions 0-1 now" in answer.out
    assert "partitions 2 were not freed: they have no offset" in answer.err
    assert [site.owner(number) for number in range(3)] == [None, None, instance]
    assert [site.key(number).offset for number in range(3)] == [50, 50, None]
    assert types(site) <= GO_TYPES


def test_a_live_go_owner_that_is_back_is_no_success(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is reported is what the log shows afterwards."""
    instance = go_owner(site, 0)
    carry_out = ClaimRevoker.carry_out

    def beats(*arguments: object) -> object:
        taken = carry_out(*arguments)  # type: ignore[arg-type]
        site.say(about(Heartbeat, instance, offset=51))
        return taken

    monkeypatch.setattr(ClaimRevoker, "carry_out", beats)
    answer = act(capsys, "revoke", GROUP, TOPIC, "--instance", instance, "--yes", "--json")
    assert (answer.code, [each["revoked"] for each in answer.json["claims"]]) == (1, [False])
    assert "their owner is alive and took them back" in answer.err


# Timestamps


def test_records_with_their_senders_timestamp_end_what_a_person_does(site: Site) -> None:
    """They count for nothing, and none follows."""
    site.owner_of(0, at=50).release()
    offset = site.key(0).offset
    operators = [operator_on(site) for _ in range(3)]
    site.broker.is_sender_timed = True
    with pytest.raises(TimestampTypeError, match=r"message\.timestamp\.type"):
        operators[0].pause(site.clock.wall_ms() // 1_000 + 60)
    count = len(site.values())
    with pytest.raises(TimestampTypeError):
        operators[1].set_positions(TOPIC, {0: 10}, TOPIC_ID, wait_ms=0)
    with pytest.raises(TimestampTypeError):
        operators[2].set_settings(GroupSettings(20_000), wait_ms=0)
    assert len(site.values()) == count + 2
    assert site.key(0).offset == offset
