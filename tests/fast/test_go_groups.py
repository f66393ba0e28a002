"""Check an operator's actions in groups that Go consumers use: positions, pauses, settings and revocation.

See protocol.md, sections 6 and 7.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from marshal_dagster.admin.go_groups import Way, require_pause_allowed, way_to_set
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
    DataTopic,
    DeliveryMode,
    GroupSettings,
    Heartbeat,
    ReleasingPartition,
    parse,
    render,
)
from marshal_dagster.protocol.world import World
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
    """Return the data topic."""
    return FakeTopics()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, topics: FakeTopics) -> Site:
    """Return a coordination topic without records, on which the commands work."""
    site = site_now()
    at_work_on(site, monkeypatch, position, pause, revoke, settings_command, topics=topics)
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    monkeypatch.setattr(revoke, "ClaimRevoker", partial(ClaimRevoker, clock=site.clock))
    monkeypatch.setattr(settings_command, "GroupSettingsAdmin", partial(GroupSettingsAdmin, clock=site.clock))
    return site


def reader_on(site: Site) -> Rationalizer:
    """Return a reader that has read the log."""
    reader = Rationalizer(site.log(), clock=site.clock)
    reader.catch_up()
    return reader


def operator_on(site: Site) -> SettingsChanger:
    """Return an operator of the group."""
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
    """Any position is set by records that Go knows, and in Kafka's own group offsets."""
    go_left(site, 0, 1)
    answer = act(capsys, *SET, "--to-offset", f"0={to}", "--yes", *STOPPED)
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "The positions of partitions 0 were set.")
    key = site.key(0)
    assert (key.offset, key.owner, key.generation) == (to, None, 0)
    assert site.key(1).offset == 50
    assert types(site) <= GO_TYPES
    assert topics.committed == {0: to}


def test_a_member_dates_its_records_two_seconds_back(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A Go consumer treats a record from the future as stale."""
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
    """Without the operator's statement nothing is written; the error names both options, for a dry run too."""
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
    """Each command with this option refuses another group's name."""
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
    """The group is paused and starts a new generation, whether the operator mentions Go consumers or not."""
    site.owner_of(0, at=50).release()
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes", *STOPPED).code == 0
    assert "ReleaseGroup" in types(site)
    assert (site.key(0).offset, site.key(0).generation > 0) == (30, True)


def test_a_data_topic_id_means_nothing_in_a_go_group(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Its consumers read on after a topic was re-created, so their offset is one of the present topic."""
    instance = go_owner(site, 0)
    site.say(about(DataTopic, instance, topic_id="7tPg1PQ3SOOgBg6Ha5P9nw"))
    site.say(about(ReleasingPartition, instance, offset=50))
    assert site.key(0).data_topic_id == "7tPg1PQ3SOOgBg6Ha5P9nw"
    answer = act(capsys, *SET, "--shift-by", "-20", "--partitions", "0", "--dry-run", *STOPPED)
    assert (answer.code, "-20" in answer.out, "re-created" in answer.out + answer.err) == (0, True, False)


def test_settings_by_which_a_group_is_shared_with_go_are_no_settings_to_pause_by(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older versions wrote such settings records."""
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
    """The operator must confirm that the Go consumers are stopped, because the group has a key of theirs."""
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
    """A position at the present offset does not end the plan."""
    instance = go_owner(site, 0, 1)
    for partition in (0, 1):
        site.say(about(ClaimingMessages, instance, partition, plan_end=60))
    site.clock.advance(GO_STALE_MS)
    operator_on(site).set_go_positions(TOPIC, {0: 50, 1: 40}, wait_ms=0)
    assert (site.key(0).plan_end, site.key(1).plan_end) == (60, None)


def test_live_owners_are_waited_for(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """No claim is revoked; if the owner stays, the error names it, and nothing is written."""
    go_owner(site, 0)
    before = site.values()
    answer = act(capsys, *SET, "--to-offset", "0=30", "--yes", "--wait", "5s", *STOPPED)
    assert (answer.code, "are still claimed by live members" in answer.err, site.values()) == (1, True, before)
    assert act(capsys, *SET, "--to-offset", "0=30", "--yes", "--wait", "3m", *STOPPED).code == 0
    assert (site.key(0).offset, types(site) <= GO_TYPES) == (30, True)


def test_a_position_that_another_takes_back_is_not_set(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that was not stopped sends a heartbeat before the release."""
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
    """Go reads these offsets if it finds offset 0, so a commit that cannot be read back is a failure."""
    go_left(site, 0)
    topics.problem = problem
    if problem is None:
        monkeypatch.setattr(FakeTopics, "group_offsets", lambda *_: {0: 11})
    answer = act(capsys, *SET, "--to-offset", "0=0", "--yes", "--allow-out-of-range", *STOPPED)
    assert (answer.code, "not in Kafka's own group offsets" in answer.err) == (1, True)
    assert "set: partitions 0" in answer.err
    assert site.key(0).offset == 0


def test_a_paused_go_group_is_not_moved(site: Site) -> None:
    """An older version may have paused the group; then its members would not claim either."""
    go_left(site, 0)
    site.pause(60)
    with pytest.raises(GroupPausedError):
        operator_on(site).set_go_positions(TOPIC, {0: 10}, wait_ms=0)


def test_first_positions_are_adopted_in_a_go_group(
    site: Site, capsys: pytest.CaptureFixture[str], topics: FakeTopics
) -> None:
    """The import works in the same way, if the consumers are stopped."""
    topics.committed.update({0: 30, 1: 40, 2: 50})
    adopt = ("position", "import", GROUP, TOPIC, "--consumer-group", "loader", "--yes")
    assert f"--go-consumers-stopped {GROUP}" in act(capsys, *adopt).error
    assert site.values() == []
    assert act(capsys, *adopt, *STOPPED).code == 0
    assert [site.key(number).offset for number in range(3)] == [30, 40, 50]
    assert types(site) <= GO_TYPES


def test_who_knows_the_members_settings_gives_them_first(site: Site, topics: FakeTopics) -> None:
    """The settings come before the pause and the claims.

    Without them, a late release would count as Go's and move the offset.
    """
    with_settings = partial(PositionResetter, lambda _: reader_on(site), topics, GROUP, TOPIC, "ops", site.clock)  # type: ignore[arg-type]
    work = with_settings(settings=SETTINGS)
    moves = work.look(ToOffsets(each=30), new_group=True)
    assert work.way() is Way.SETTINGS_FIRST
    work.carry_out(moves, wait_s=0)
    assert (site.key(0).offset, in_force(site)) == (30, {SETTINGS})
    first = [value.partition("/")[0] for value in site.values()]
    assert first.index("GroupSettings") < first.index("ReleaseGroup") < first.index("ClaimingPartition")


def test_settings_are_not_given_where_go_consumers_are(site: Site, topics: FakeTopics) -> None:
    """Go consumers of the group itself prevent this, and those of any group on a topic where no group has settings."""
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
    """The group's settings are in the log, so an operator has already allowed records that Go does not know."""
    others_keys(site)
    write_first_settings(site)
    assert act(capsys, "pause", GROUP, "--for", "1h").code == 0


def test_a_group_gets_its_settings_before_it_is_paused(site: Site) -> None:
    """The settings are written if they are known, and if no Go consumer uses the group."""
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
    """Settings that are not given have a member's defaults."""
    set_ = ("settings", "set", GROUP, "--delivery", "effectively_once")
    assert "give --new-group" in act(capsys, *set_, "--yes").error
    answer = act(capsys, *set_, "--new-group", "--yes")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "The settings were set.")
    assert in_force(site) == {GroupSettings(10_000, delivery=DeliveryMode.EFFECTIVELY_ONCE)}
    assert types(site) == {"GroupSettings"}
    again = act(capsys, *set_, "--yes")
    assert (again.code, "has these settings already" in again.error) == (0, True)


def test_settings_are_changed_in_a_pause(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Other settings stay as they are; an earlier pause is restored, and positions do not change."""
    site.owner_of(0, at=50, settings=RANGES).release()
    site.pause(900)
    until_s = site.world().group_of(GROUP, TOPIC).paused_until_s
    answer = act(capsys, "settings", "set", GROUP, "--heartbeat-interval", "20", "--yes")
    assert answer.code == 0
    assert in_force(site) == {GroupSettings(20_000, features=("ranges",))}
    assert (site.key(0).offset, site.world().group_of(GROUP, TOPIC).paused_until_s) == (50, until_s)


def test_a_group_that_was_not_paused_goes_on_after_its_settings_changed(site: Site) -> None:
    """Members with the new configuration can claim."""
    site.owner_of(0, at=50).release()
    other = GroupSettings(20_000)
    operator_on(site).set_settings(other, wait_ms=0)
    assert site.member(settings=other).claim([0])


def test_a_dry_run_of_settings_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run shows the new settings."""
    site.owner_of(0, at=50).release()
    before = site.values()
    shown = act(capsys, "settings", "set", GROUP, "--ranges", "--dry-run", "--json").json
    assert {tuple(row["after"]["features"]) for row in shown["coordination_partitions"]} == {("ranges",)}
    assert {tuple(row["before"]["features"]) for row in shown["coordination_partitions"]} == {()}
    assert site.values() == before


def test_a_person_is_requested_before_settings_change(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without confirmation nothing changes; the question warns that another delivery mode starts a new generation."""
    site.owner_of(0, at=50).release()
    before = site.values()
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    answer = act(capsys, "settings", "set", GROUP, "--delivery", "at_most_once")
    assert (answer.code, site.values()) == (1, before)
    assert "begins a new generation" in answer.err


def test_members_that_stay_keep_their_settings(site: Site) -> None:
    """The error names them, and the pause ends; claims of owners that are known to be dead are revoked."""
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
    """The change does not wait for dead owners."""
    site.begin(0)
    site.holder_of({0: (0, 5)})
    operator_on(site).set_settings(GroupSettings(20_000, features=("ranges",)), wait_ms=0, is_dead=lambda _: True)
    assert in_force(site) == {GroupSettings(20_000, features=("ranges",))}


def test_settings_that_were_not_acknowledged_are_completed(site: Site) -> None:
    """A second call completes the change."""
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
    """The operator must confirm that no Go consumer will use the topic again."""
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
    """Go consumers do not know the record, so even a dead owner's claim is not revoked."""
    go_owner(site, 0)
    with pytest.raises(SettingsNotSetError, match="orders/0 is still claimed"):
        operator_on(site).set_settings(SETTINGS, wait_ms=0, is_dead=lambda _: True)
    assert "RevokingClaim" not in types(site)


def test_a_group_goes_back_to_the_rules_of_go(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The heartbeat interval becomes Go's; a group without settings already has these rules."""
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
    """Nothing is written."""
    before = site.values()
    answer = act(capsys, "settings", "set", GROUP, "--new-group", *arguments)
    assert (answer.code, says in answer.error, site.values()) == (2, True, before)


def test_settings_that_differ_are_completed_by_naming_them_all(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings that differ cannot be kept, so the operator must give all of them."""
    site.broker.append(site.home, render(settings_record(SETTINGS)))
    other = (site.home + 1) % site.partitions
    site.broker.append(other, render(settings_record(GroupSettings(20_000))))
    assert "differ between coordination partitions" in act(capsys, "settings", "set", GROUP, "--yes").error
    every = ("--heartbeat-interval", "30", "--rules", "native", "--delivery", "at_least_once")
    assert act(capsys, "settings", "set", GROUP, *every, "--yes").code == 0
    assert in_force(site) == {GroupSettings(30_000)}


def test_who_is_configured_otherwise_reads_how_settings_are_changed(site: Site) -> None:
    """The error names the command that changes settings."""
    site.member()
    with pytest.raises(SettingsMismatchError, match="settings set etl"):
        site.member(settings=GroupSettings(20_000))


# Revocation


def test_a_dead_go_owner_is_taken_over_and_released(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Records that Go knows release the partition at its offset; a key without an offset must become stale."""
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
    """The command reports what the log shows afterwards."""
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
    """A record with the producer's timestamp does not count, and the command writes no further record."""
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


@pytest.mark.parametrize("refused", [require_pause_allowed, partial(way_to_set, topic=TOPIC, settings=None)])
def test_the_command_for_a_new_group_is_complete(refused: Callable[..., object]) -> None:
    """A command that is printed must work: `settings set` needs an option for a group without records."""
    world = World(1)
    world.start(0, 0)
    with pytest.raises(GoGroupError, match=f"`marshal-dagster settings set {GROUP} --new-group`"):
        refused(world, GROUP, stopped=False)
