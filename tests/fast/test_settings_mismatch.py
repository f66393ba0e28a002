"""The commands and the job that the error for mismatching settings recommends do solve the mismatch."""

import re
import shlex
from functools import partial

import pytest

from marshal_dagster.admin.group_settings import GroupSettingsAdmin
from marshal_dagster.cli import settings as settings_command
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import SettingsMismatchError
from marshal_dagster.protocol.messages import ClaimingPartition, DeliveryMode, GroupSettings, RuleSet
from tests.admin_fixtures import act, at_work_on, site_now, write_first_settings
from tests.members import GROUP, HI_MS, RANGES, SETTINGS, Site, about

EXACTLY = GroupSettings(HI_MS, delivery=DeliveryMode.EFFECTIVELY_ONCE)
GO = GroupSettings(60_000, RuleSet.GO)
PAIRS = [
    pytest.param(GroupSettings(12_346), SETTINGS, id="interval"),
    pytest.param(EXACTLY, SETTINGS, id="delivery"),
    pytest.param(GroupSettings(20_000, RuleSet.NATIVE, DeliveryMode.AT_MOST_ONCE), EXACTLY, id="both"),
    pytest.param(RANGES, SETTINGS, id="ranges here"),
    pytest.param(SETTINGS, RANGES, id="ranges in force"),
    pytest.param(GroupSettings(20_000), RANGES, id="ranges in force, and another interval"),
    pytest.param(GO, SETTINGS, id="go here"),
    pytest.param(GO, RANGES, id="go here, ranges in force"),
    pytest.param(SETTINGS, GO, id="go in force"),
]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return an empty coordination topic."""
    site = site_now()
    monkeypatch.setattr(settings_command, "GroupSettingsAdmin", partial(GroupSettingsAdmin, clock=site.clock))
    at_work_on(site, monkeypatch, settings_command)
    return site


def advised(error: SettingsMismatchError) -> list[list[str]]:
    """Return the arguments of the commands that the error recommends."""
    return [shlex.split(command) for command in re.findall(r"`marshal-dagster ([^`]*)`", str(error))]


def mismatch(site: Site, ours: GroupSettings) -> SettingsMismatchError:
    """Return the error of a member whose settings differ."""
    with pytest.raises(SettingsMismatchError, match="build_settings_job") as raised:
        site.claimer(settings=ours).ensure_group_settings()
    return raised.value


@pytest.mark.parametrize(("ours", "in_force"), PAIRS)
def test_the_commands_in_the_error_end_it(
    site: Site, capsys: pytest.CaptureFixture[str], ours: GroupSettings, in_force: GroupSettings
) -> None:
    """The commands, run in order, give the group the member's settings and keep its positions."""
    write_first_settings(site, in_force)
    site.begin(0, settings=in_force, at=50)
    commands = advised(mismatch(site, ours))
    assert commands
    for command in commands:
        answer = act(capsys, *command, "--yes")
        assert answer.code == 0, (command, answer.err)
    site.claimer(settings=ours).ensure_group_settings()
    assert site.key(0).offset == 50


@pytest.mark.parametrize(("ours", "in_force"), PAIRS)
def test_the_job_in_the_error_ends_it(site: Site, ours: GroupSettings, in_force: GroupSettings) -> None:
    """The job changes the settings to those of its claimer. If ranges are enabled, it disables them step by step."""
    write_first_settings(site, in_force)
    site.begin(0, settings=in_force, at=50)
    if in_force is RANGES:
        site.holder_of({0: (60, 70)}, plans=True).release()
    mismatch(site, ours)
    stopped = in_force.rule_set is RuleSet.GO
    admin = GroupSettingsAdmin(lambda _: Rationalizer(site.log(), clock=site.clock), GROUP, "ops", site.clock, stopped)
    admin.set_settings(ours, wait_s=60)
    site.claimer(settings=ours).ensure_group_settings()
    assert (site.key(0).offset, site.ranges()) == (50, [])


def test_a_group_that_cannot_be_given_settings_gets_them_by_the_command(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """An owner from before the first settings blocks them. The command waits until that owner is stale."""
    site.say(about(ClaimingPartition, "old.0", 0))
    (command,) = advised(mismatch(site, EXACTLY))
    assert act(capsys, *command, "--yes").code == 0
    site.claimer(settings=EXACTLY).ensure_group_settings()
