"""Test `settings` as a user calls it, on an in-memory log."""

from functools import partial

import pytest

from marshal_dagster.admin.group_settings import GroupSettingsAdmin
from marshal_dagster.admin.settings_change import SettingsChanger
from marshal_dagster.cli import settings as settings_command
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, render
from tests.admin_fixtures import act, at_work_on, site_now
from tests.members import GROUP, HI_MS, RANGES, SETTINGS, Site, settings_record

SHOW = ("settings", "show", GROUP)
SET = ("settings", "set", GROUP)
OFF = ("settings", "disable-ranges", GROUP)
IN_JSON = {
    "heartbeat_interval_ms": HI_MS,
    "rule_set": "native",
    "delivery": "at_least_once",
    "features": ["ranges"],
    "accepted": True,
    "certain": True,
}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """An empty coordination topic."""
    site = site_now()
    monkeypatch.setattr(settings_command, "GroupSettingsAdmin", partial(GroupSettingsAdmin, clock=site.clock))
    at_work_on(site, monkeypatch, settings_command)
    return site


def features(site: Site) -> set[tuple[str, ...]]:
    """Return the features in force in the coordination partitions."""
    return {world.groups[GROUP].settings.features for world in site.world().partitions.values()}


def test_the_settings_in_force_are_shown(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal settings of all coordination partitions are shown in one row."""
    site.begin(0, settings=RANGES)
    answer = act(capsys, *SHOW)
    assert (answer.code, answer.err) == (0, "")
    assert [line.split() for line in answer.out.splitlines()[2:]] == [
        ["0-3", "10", "s", "native", "at_least_once", "ranges", "-"]
    ]
    shown = act(capsys, *SHOW, "--json").json
    assert shown == {
        "group": GROUP,
        "differ": False,
        "coordination_partitions": [{"partition": number, **IN_JSON} for number in range(4)],
    }


def test_settings_that_differ_are_reported(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A half-written record leaves the defaults elsewhere; a partition that can only be observed is marked."""
    site.broker.append(site.home, render(settings_record(GroupSettings(HI_MS, delivery=DeliveryMode.AT_MOST_ONCE))))
    other = next(number for number in range(4) if number != site.home)
    site.broker.append(other, b"anything")
    site.broker.append(other, b"anything")
    site.broker.retain_from(other, 1)
    answer = act(capsys, *SHOW)
    assert (answer.code, "the settings differ, because they were written" in answer.err.splitlines()[-1]) == (0, True)
    assert f"{site.home}  " in answer.out
    assert "at_most_once" in answer.out
    assert answer.out.count("default: no settings record yet") == 2
    assert answer.out.count("only observed") == 1
    assert act(capsys, *SHOW, "--json").json["differ"]


def test_a_change_of_delivery_warns_only_a_group_with_partitions(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new group has no plans that could end."""
    change = ("--delivery", "effectively_once", "--dry-run")
    new = act(capsys, *SET, "--new-group", *change)
    assert (new.code, new.err) == (0, "")
    site.begin(0)
    assert "open plans end" in act(capsys, *SET, *change).error


def test_settings_of_a_group_that_is_not_known_are_an_error(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The group's name is most likely misspelt."""
    site.begin(0)
    for command, advice in (("show", "It has no settings"), ("disable-ranges", "It has no ranges to disable")):
        answer = act(capsys, "settings", command, "other", *(["--yes"] if command != "show" else []))
        assert (answer.code, "the log has no group 'other'" in answer.error) == (2, True)
        assert answer.error.endswith(advice)  # these commands have no option --new-group


def test_ranges_are_switched_off(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranges after an offset are shown and forgotten, and the group resumes."""
    site.begin(0, 1, settings=RANGES, at=50)
    site.holder_of({0: (60, 70)}, plans=True).release()
    answer = act(capsys, *OFF, "--yes")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "Ranges are disabled.")
    assert "orders/0         50  [60, 70) planned: forgotten, and processed again" in answer.out
    assert "orders/1" not in answer.out
    assert answer.err.splitlines()[0] == "the group is paused for at least 20 s"
    assert (features(site), site.key(0).offset, site.ranges()) == ({()}, 50, [])
    assert len(site.member().claim([0, 1])) == 2
    before = site.values()
    again = act(capsys, *OFF, "--yes")
    assert (again.code, again.error, again.out) == (0, "ranges are already disabled in group 'etl'", "")
    assert site.values() == before


def test_a_dry_run_of_switching_off_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run shows the result."""
    site.begin(0, settings=RANGES, at=50)
    holder = site.holder_of({0: (60, 70)})
    before = site.values()
    answer = act(capsys, *OFF, "--dry-run")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "A dry run: nothing was written.")
    shown = act(capsys, *OFF, "--dry-run", "--json").json
    assert shown["dry_run"]
    assert shown["coordination_partitions"][2] == {
        "partition": 2,
        "before": IN_JSON,
        "after": IN_JSON | {"features": []},
    }
    assert shown["positions"] == [
        {"topic": "orders", "partition": 0, "offset": 50, "notes": [f"held by {holder.member.instance}"]}
    ]
    assert site.values() == before


@pytest.mark.parametrize(("agreed", "left"), [(True, set()), (False, {"ranges"})])
def test_a_person_is_requested_before_ranges_go(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, agreed: bool, left: set[str]
) -> None:
    """Without consent nothing changes; with --json there is no prompt."""
    site.begin(0, settings=RANGES)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: agreed)
    assert "then add --yes" in act(capsys, *OFF, "--json").error
    answer = act(capsys, *OFF)
    assert (answer.code, ("nothing was written" in answer.err)) == (0 if agreed else 1, not agreed)
    assert {each for some in features(site) for each in some} == left


def test_members_that_stay_keep_ranges_on(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing was changed, and the exit code shows it."""
    site.begin(0, settings=RANGES)
    site.holder_of({0: (0, 5)})
    answer = act(capsys, *OFF, "--yes", "--wait", "5s")
    lines = answer.err.splitlines()
    assert (answer.code, lines[0]) == (
        1,
        "the group is paused for at least 20 s; waiting up to 5s for the owners of partitions to leave",
    )
    assert lines[-2] == "ranges are still enabled in coordination partitions 0-3"
    assert "are still claimed by live members" in lines[-1]


def test_where_ranges_are_still_on_may_not_be_known(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker fails before the command can read them."""
    site.begin(0, settings=RANGES)
    look = GroupSettingsAdmin.look

    def is_gone(*_: object, **__: object) -> None:
        raise UnavailableError("the broker is gone")

    def breaks_down(*_: object, **__: object) -> None:
        monkeypatch.setattr(GroupSettingsAdmin, "look", is_gone)
        is_gone()

    monkeypatch.setattr(SettingsChanger, "switch_ranges_off", breaks_down)
    answer = act(capsys, *OFF, "--yes")
    monkeypatch.setattr(GroupSettingsAdmin, "look", look)
    assert (answer.code, "could not read where ranges are still enabled (the broker is gone)" in answer.err) == (
        3,
        True,
    )


def test_ranges_stay_where_the_log_is_only_observed(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """In such a log the settings are unknown, so nothing is shown or asked."""
    site.begin(0, settings=RANGES)
    site.broker.retain_from(site.home, 1)
    answer = act(capsys, *OFF, "--dry-run")
    assert (answer.code, answer.out, "marshal-dagster recover" in answer.err.splitlines()[-1]) == (1, "", True)


def test_what_a_group_that_loses_ranges_is_like_is_warned_of(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Effectively-once output contains what will be processed again."""
    site.begin(0, settings=GroupSettings(HI_MS, delivery=DeliveryMode.EFFECTIVELY_ONCE, features=("ranges",)))
    assert "delivers effectively once" in act(capsys, *OFF, "--dry-run").error


def test_a_group_without_ranges_has_nothing_to_switch_off(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON shows equal settings before and after."""
    site.begin(0, settings=SETTINGS)
    partitions = act(capsys, *OFF, "--dry-run", "--json").json["coordination_partitions"]
    assert [partition["before"] for partition in partitions] == [partition["after"] for partition in partitions]
    assert len(partitions) == site.partitions
