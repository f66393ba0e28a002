"""Test `pause` and `resume` as a user calls them, on an in-memory log."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from marshal_dagster.cli import pause
from marshal_dagster.cli.connections import operator_name
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.testing import ManualClock
from tests.cli import Answer, call
from tests.faulty_log import Fault, FaultyLog, of_type
from tests.members import GROUP, TOPIC, Site

HOUR_S = 3_600


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """A coordination topic that commands find at any server, with a group that has claimed before."""
    site = Site(ManualClock(time.time_ns() // 1_000_000))
    site.owner_of(0, at=50).release()
    use(site.log(), monkeypatch)
    return site


def use(log: FaultyLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands read and write `log`."""
    monkeypatch.setattr(pause, "open_reader", lambda *_, **__: Rationalizer(log))


def act(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Run a command line."""
    return call(capsys, *arguments, "-b", "somewhere:1")


def paused_until(site: Site) -> set[int | None]:
    """Return when the pause ends, as the coordination partitions have it."""
    groups = [world.groups.get(GROUP) for world in site.world().partitions.values()]
    now_ms = site.clock.wall_ms()
    return {group.paused_until_s if group is not None and group.is_paused(now_ms) else None for group in groups}


def iso(at_s: int) -> str:
    """Return a time in ISO 8601."""
    return datetime.fromtimestamp(at_s, UTC).isoformat()


def ends(rows: list[dict[str, Any]], when: str) -> set[tuple[int | None, bool]]:
    """Return the ends of the pauses in JSON rows."""
    return {(row[when]["paused_until"], row[when]["paused"]) for row in rows}


def test_a_group_is_paused_and_resumed(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The pause starts now; the table shows the state before and after, with equal partitions in one row."""
    now_s = site.clock.wall_ms() // 1_000
    answer = act(capsys, "pause", GROUP, "--for", "2h")
    assert (answer.code, answer.err) == (0, "")
    (until_s,) = paused_until(site)
    assert until_s is not None
    assert now_s + 2 * HOUR_S <= until_s <= site.clock.wall_ms() // 1_000 + 2 * HOUR_S + 1
    (row,) = answer.out.splitlines()[2:]
    assert row.startswith("0-3                      not paused  paused until ")
    assert row.endswith(f" by {operator_name()}")
    answer = act(capsys, "resume", GROUP)
    assert (answer.code, answer.err) == (0, "")
    assert paused_until(site) == {None}
    assert answer.out.rstrip().endswith("not paused")


def test_a_pause_until_a_time_is_reported_as_json(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has the state before and after for each coordination partition."""
    until_s = site.clock.wall_ms() // 1_000 + HOUR_S
    answer = act(capsys, "pause", GROUP, "--until", iso(until_s), "--json")
    assert (answer.code, answer.json["dry_run"], paused_until(site)) == (0, False, {until_s})
    rows = answer.json["coordination_partitions"]
    assert [row["partition"] for row in rows] == [0, 1, 2, 3]
    assert (ends(rows, "before"), ends(rows, "after")) == ({(None, False)}, {(until_s, True)})
    rows = act(capsys, "resume", GROUP, "--json").json["coordination_partitions"]
    assert (ends(rows, "before"), ends(rows, "after")) == ({(until_s, True)}, {(0, False)})


def test_a_dry_run_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run shows the result and writes nothing."""
    before = site.values()
    until_s = site.clock.wall_ms() // 1_000 + HOUR_S
    answer = act(capsys, "pause", GROUP, "--until", iso(until_s), "--dry-run")
    assert (answer.code, answer.out.splitlines()[-1]) == (0, "A dry run: nothing was written.")
    assert act(capsys, "resume", GROUP, "--dry-run").code == 0
    shown = act(capsys, "pause", GROUP, "--until", iso(until_s), "--dry-run", "--json").json
    assert (shown["dry_run"], ends(shown["coordination_partitions"], "after")) == (True, {(until_s, True)})
    assert site.values() == before


def test_a_pause_that_is_over_is_refused_before_it_is_written(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a pause would resume the group. Log time decides if it is later than this machine's clock."""
    site.pause(HOUR_S)
    now_s = site.clock.wall_ms() // 1_000
    answer = act(capsys, "pause", GROUP, "--until", iso(now_s - 1))
    assert (answer.code, "--until: this time has passed" in answer.error) == (2, True)
    assert paused_until(site) == {now_s + HOUR_S}
    site.clock.advance(10 * HOUR_S * 1_000)
    site.pause(HOUR_S)
    before = site.values()
    assert act(capsys, "pause", GROUP, "--until", iso(now_s + 2 * HOUR_S)).code == 2
    assert site.values() == before
    assert act(capsys, "pause", GROUP, "--for", "2h").code == 0
    assert paused_until(site) == {-(-site.clock.wall_ms() // 1_000) + 2 * HOUR_S}


def test_a_pause_that_shortens_another_says_so(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator may need the longer pause, so a warning is printed."""
    site.pause(3 * HOUR_S)
    answer = act(capsys, "pause", GROUP, "--for", "1h")
    assert (answer.code, "the new pause ends earlier than the pause in force" in answer.error) == (0, True)
    assert "not paused" not in answer.out
    assert "ends earlier" not in act(capsys, "pause", GROUP, "--for", "4h").err


def test_a_pause_in_one_part_only_is_shown_and_mended(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A pause that is half written has a row of its own; another pause completes it."""
    until_s = site.clock.wall_ms() // 1_000 + HOUR_S
    site.pause(HOUR_S)
    site.broker.append(2, f"ReleaseGroup/1/1/x.1/x/{GROUP}//0/0".encode())
    rows = act(capsys, "pause", GROUP, "--until", iso(until_s)).out.splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [["0-1,", "3"], ["2", "not"]]
    assert paused_until(site) == {until_s}


@pytest.mark.parametrize("command", [["pause", "fligths", "--for", "1h"], ["resume", "fligths"]], ids=" ".join)
def test_a_group_that_the_log_does_not_name_is_refused(
    site: Site, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """A misspelt name is an error, because its user would rely on the pause; `--new-group` allows a new group."""
    before = site.values()
    answer = act(capsys, *command)
    assert (answer.code, f"the log has no group 'fligths'; it has '{GROUP}'" in answer.error) == (2, True)
    assert site.values() == before
    if command[0] == "pause":
        refused = act(capsys, *command, "--new-group")
        assert refused.code == 1
        assert "settings set --bootstrap-servers somewhere:1 fligths --new-group`" in refused.error
        assert site.values() == before
        assert act(capsys, *command, "--new-group", "--go-consumers-stopped", "fligths").code == 0
        assert site.world().group_of("fligths", TOPIC).paused_until_s is not None


def test_what_could_not_be_written_is_one_line(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the coordination partitions and what to do; the exit code means that Kafka did not answer."""
    log = site.log()
    log.fail(Fault.FAILED, of_type("ReleaseGroup"))
    use(log, monkeypatch)
    answer = act(capsys, "resume", GROUP)
    assert (answer.code, answer.out) == (3, "")
    assert "could not be written to coordination partitions [0, 1, 2, 3]" in answer.err.splitlines()[-1]
    assert answer.err.count("4 of 4 records (ReleaseGroup) were not acknowledged") == 1


def test_resuming_what_runs_says_so(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """This is no error, because the group already runs."""
    answer = act(capsys, "resume", GROUP)
    assert (answer.code, answer.error) == (0, f"group '{GROUP}' is not paused")
    assert paused_until(site) == {None}


def test_who_acts_is_named_in_the_log(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The client id is user and machine, or `operator` if a record cannot carry that name."""
    act(capsys, "pause", GROUP, "--for", "1h")
    assert site.values()[-1].split("/")[4] == operator_name()


@pytest.mark.parametrize("name", ["a/b", ""])
def test_a_user_whose_name_no_record_can_carry_is_an_operator(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A slash would end the field of the record."""
    monkeypatch.setattr("getpass.getuser", lambda: name)
    monkeypatch.setattr("socket.gethostname", lambda: "h/i")
    assert operator_name() == "operator"


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers often have such users."""

    def nameless() -> str:
        raise KeyError(4_711)

    monkeypatch.setattr("getpass.getuser", nameless)
    monkeypatch.setattr("socket.gethostname", lambda: "pod")
    monkeypatch.setattr("os.getuid", lambda: 4_711)
    assert operator_name() == "4711@pod"


@pytest.mark.usefixtures("site")
def test_a_reason_stays_with_its_pause(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason and the sender stay with the pause until the next record about it."""
    why = "the database moves"
    answer = act(capsys, "pause", GROUP, "--for", "2h", "--reason", f" {why} ")
    assert answer.out.rstrip().endswith(f" by {operator_name()} (reason: {why})")
    shown = act(capsys, "pause", GROUP, "--for", "3h", "--json").json["coordination_partitions"]
    assert {(row["before"]["paused_by_client"], row["before"]["pause_reason"]) for row in shown} == {
        (operator_name(), why)
    }
    assert {row["after"]["pause_reason"] for row in shown} == {None}


def test_a_dry_run_shows_the_reason_and_writes_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is the one that the pause would show."""
    answer = act(capsys, "pause", GROUP, "--for", "2h", "--reason", "why not", "--dry-run")
    assert "(reason: why not)" in answer.out
    assert paused_until(site) == {None}


@pytest.mark.parametrize("reason", ["two\nlines", "x" * 201, "\x1b[31mred"])
def test_a_reason_that_no_record_can_carry_is_refused(
    site: Site, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    """Nothing is written."""
    answer = act(capsys, "pause", GROUP, "--for", "2h", "--reason", reason)
    assert answer.code == 2
    assert "--reason: the reason of a pause must be one line of at most 200 visible characters" in answer.error
    assert paused_until(site) == {None}
