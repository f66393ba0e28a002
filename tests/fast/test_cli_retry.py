"""`retry` as a user calls it, and how `status`, `top` and `doctor` show such plans, on an in-memory log."""

import io
import shlex
from dataclasses import replace

import pytest

from marshal_dagster.cli import output, position, world_reader
from marshal_dagster.cli.doctor_checks.coordination_log import check_world
from marshal_dagster.cli.doctor_checks.finding import CheckState
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.protocol.messages import WITHOUT_SETTINGS
from marshal_dagster.protocol.open_plans import OpenPlan, skip_command, way_out
from marshal_dagster.protocol.state import Phase
from tests.admin_fixtures import FakeTopics, act, at_work_on, site_now
from tests.members import GROUP, HI_MS, OTHER_TOPIC_ID, TOPIC, Site

ALL = range(3)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    """A group at offset 50; its plan up to 80 in partition 1 was tried six times, that of partition 2 once."""
    site = site_now()
    owner = site.owner_of(*ALL, at=50)
    owner.plan({1: 80, 2: 70})
    owner.release()
    for _ in range(5):
        again = site.member()
        again.claim([1])
        again.release()
    topics = FakeTopics()
    at_work_on(site, monkeypatch, position, world_reader, topics=topics)
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    monkeypatch.setattr(world_reader, "SystemClock", lambda: site.clock)
    return site


def attempts(site: Site) -> list[tuple[int | None, int | None, int]]:
    """Return offset, plan and attempts of each partition."""
    keys = [site.key(number) for number in ALL]
    return [(key.offset, key.plan_end, key.plan_attempts) for key in keys]


def test_exhausted_plans_are_tried_again(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Their plans end and their offsets stay. Other plans are unchanged, and no pause remains."""
    assert attempts(site) == [(50, None, 0), (50, 80, 5), (50, 70, 0)]
    answer = act(capsys, "retry", GROUP, TOPIC, "--yes")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[-2].split() == ["1", "50", "80", "6"]
    assert attempts(site) == [(50, None, 0), (50, None, 0), (50, 70, 0)]
    assert not any(
        group.is_paused(site.clock.wall_ms())
        for world in site.world().partitions.values()
        for group in world.groups.values()
    )
    answer = act(capsys, "retry", GROUP, TOPIC, "--yes")
    assert (answer.code, answer.error) == (1, f"group '{GROUP}' has no exhausted plan in topic '{TOPIC}'")


def test_the_plan_of_one_partition_is_tried_again_though_it_failed_once(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """After fixing the cause an operator need not wait; a partition without such a plan is an error."""
    assert act(capsys, "retry", GROUP, TOPIC, 2, "--yes").code == 0
    assert attempts(site) == [(50, None, 0), (50, 80, 5), (50, None, 0)]
    answer = act(capsys, "retry", GROUP, TOPIC, 0, "--yes")
    assert (answer.code, f"has no plan in {TOPIC}/0: there is nothing to retry" in answer.error) == (1, True)


def test_a_plan_that_a_live_member_holds_is_left_to_it(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the member; without a partition the command ignores a plan that is held."""
    holder = site.member()
    assert holder.claim([1])
    before = site.values()
    answer = act(capsys, "retry", GROUP, TOPIC, 1, "--yes")
    assert answer.code == 1
    assert f"the plan of group '{GROUP}' in {TOPIC}/1 is being processed by '{holder.member.instance}'" in answer.error
    assert (act(capsys, "retry", GROUP, TOPIC, "--yes").code, site.values()) == (1, before)


def test_what_a_member_does_meanwhile_stays_done(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A member takes the plan and commits it while the operator is asked: the position is not set back."""

    def commit_meanwhile(*_: object, **__: object) -> bool:
        member = site.member()
        assert member.claim([2])
        member.commit({2: 70})
        member.release()
        return True

    monkeypatch.setattr("typer.confirm", commit_meanwhile)
    assert act(capsys, "retry", GROUP, TOPIC, 2).code == 0
    assert attempts(site) == [(50, None, 0), (50, 80, 5), (70, None, 0)]


def test_a_pause_stays_in_force(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of a paused group ends, too. A note states that the group must be resumed."""
    site.pause(600)
    answer = act(capsys, "retry", GROUP, TOPIC, "--yes")
    assert (answer.code, attempts(site)[1]) == (0, (50, None, 0))
    assert f"group '{GROUP}' is paused until" in answer.err
    assert all(
        group.is_paused(site.clock.wall_ms())
        for world in site.world().partitions.values()
        for group in world.groups.values()
    )


def test_a_plan_in_a_go_group_is_taken_once_more_by_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No record that Go knows ends a plan without a new offset, so the error names the option of a run."""
    site = site_now()
    at_work_on(site, monkeypatch, position, topics=FakeTopics())
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    owner = site.owner_of(0, settings=WITHOUT_SETTINGS, at=50)
    owner.plan({0: 80})
    owner.release()
    before = site.values()
    answer = act(capsys, "retry", GROUP, TOPIC, 0, "--yes")
    assert (answer.code, site.values()) == (1, before)
    assert "`retry_exhausted: true` in its run config" in answer.error


def test_plans_of_ranges_are_tried_again(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan after the offset ends. Ranges done after it are processed again, and a note reports it."""
    ranged = site_now()
    site.broker, site.clock = ranged.broker, ranged.clock
    site.begin(*ALL, at=50)
    for start in (60, 70):
        holder = site.holder_of({1: (start, start + 10)}, plans=True)
        if start == 70:
            holder.commit({1: 80})
        holder.release()
    for _ in range(5):
        again = site.range_claimer()
        assert again.claim({1: (60, 70)})
        again.release()
    assert [range_.attempts for range_ in site.key(1).ranges if range_.phase is Phase.PLANNED] == [5]
    answer = act(capsys, "retry", GROUP, TOPIC, "--yes")
    assert (answer.code, site.key(1).offset, site.ranges(1)) == (0, 50, [])
    assert f"{TOPIC}/1 [70, 80) is done: it will be processed again too" in answer.err


def test_a_dry_run_and_json_write_nothing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The plans are shown; a misspelt topic is an error."""
    before = site.values()
    answer = act(capsys, "retry", GROUP, TOPIC, "--dry-run", "--json")
    assert answer.json == {
        "group": GROUP,
        "topic": TOPIC,
        "dry_run": True,
        "plans": [{"partition": 1, "start": 50, "end": 80, "tries": 6}],
    }
    assert act(capsys, "retry", GROUP, "ordres").code == 5
    assert act(capsys, "retry", GROUP, TOPIC, "--json").code == 2
    assert site.values() == before


COMMAND = f"marshal-dagster retry {GROUP} {TOPIC} 1"
SKIP = f"marshal-dagster position reset {GROUP} {TOPIC} --to-offset 1=80"


@pytest.mark.usefixtures("site")
def test_status_and_top_show_exhausted_plans_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They come first, with the commands that retry them and that skip them, in JSON too."""
    monkeypatch.setattr(output, "wait", lambda _: None)
    text = f"{TOPIC}/1 [50, 80) of group '{GROUP}' was tried 6 times"
    for name in ("status", "top"):
        answer = act(capsys, name)
        assert answer.code == 0, answer.err
        first = " ".join(answer.out.split("Group etl\n" if name == "status" else "#owners")[0].split())
        assert text in first, name
        assert f"fix the cause and run `{COMMAND}` or skip its offsets: `{SKIP}`" in first, name
        shown = act(capsys, name, "--json").json
        assert shown["exhausted_plans"] == [
            {
                "group": GROUP,
                "topic": TOPIC,
                "partition": 1,
                "start": 50,
                "end": 80,
                "tries": 6,
                "retry": COMMAND,
                "skip": SKIP,
            }
        ]
    assert "exhausted: " not in act(capsys, "status", "--max-attempts", 6).out
    act(capsys, "retry", GROUP, TOPIC, "--yes")
    assert "was tried 6 times" not in act(capsys, "status").out


def test_status_shows_a_command_that_skips_an_exhausted_plan(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command sets the position to the end of the plan, which is then no longer exhausted."""
    monkeypatch.setattr(position, "SystemClock", lambda: site.clock)
    (plan,) = act(capsys, "status", "--json").json["exhausted_plans"]
    answer = act(capsys, *shlex.split(plan["skip"])[1:], "--yes")
    assert (answer.code, attempts(site)[1]) == (0, (80, None, 0))
    assert act(capsys, "status", "--json").json["exhausted_plans"] == []


def test_no_command_skips_a_plan_that_begins_after_the_position() -> None:
    """It would skip the offsets before the plan too, which no run has processed."""
    plan = OpenPlan(GROUP, TOPIC, 1, 60, 70, 5)
    assert skip_command([plan], {1: 50}) is None
    assert skip_command([plan, replace(plan, start=50, end=60)], {1: 50}) == SKIP.replace("=80", "=60")


def test_a_skip_command_of_thousands_of_plans_can_be_read() -> None:
    """It names the first 20 plans that it can skip, and the text before it shows that there are more."""
    plans = [OpenPlan(GROUP, TOPIC, partition, 50, 60, 5) for partition in range(3_000)]
    positions = {plan.partition: 50 for plan in plans} | {0: 40}
    to = ",".join(f"{partition}=60" for partition in range(1, 21))
    skip = f"marshal-dagster position reset {GROUP} {TOPIC} --to-offset {to}"
    assert skip_command(plans, positions) == skip
    assert way_out(plans, positions) == (
        f"Fix the cause and run `marshal-dagster retry {GROUP} {TOPIC}`, or skip offsets, 20 partitions at a time: "
        f"`{skip}`"
    )
    assert way_out(plans[:1], positions) == f"Fix the cause and run `marshal-dagster retry {GROUP} {TOPIC} 0`"


def test_a_skip_command_that_skips_all_it_can_promises_no_more() -> None:
    """Of many plans of one partition only the first begins at the position."""
    plans = [OpenPlan(GROUP, TOPIC, 1, start, start + 10, 5) for start in range(50, 1_000, 10)]
    assert f"or skip its offsets: `{SKIP.replace('=80', '=60')}`" in way_out(plans, {1: 50})


def test_doctor_shows_exhausted_plans_with_the_command(site: Site) -> None:
    """They are a problem and the first finding about the world state."""
    reader = Rationalizer(site.log(), clock=site.clock)
    reader.catch_up()
    _, found, *_ = check_world(reader.identity, reader.world, site.clock.wall_ms())
    assert (found.name, found.state) == ("exhausted plans", CheckState.PROBLEM)
    assert f"{TOPIC}/1 [50, 80) of group '{GROUP}' was tried 6 times" in found.found
    assert found.fix == COMMAND


def test_top_and_doctor_count_the_attempts_of_the_ops(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ops may have another `max_attempts` than the default, as for `status`."""
    monkeypatch.setattr(output, "wait", lambda _: None)
    for attempts_of_ops, exhausted in ((5, 1), (6, 0)):
        shown = act(capsys, "top", "--json", "--max-attempts", attempts_of_ops).json
        assert len(shown["exhausted_plans"]) == exhausted
        assert ("exhausted: " in act(capsys, "top", "--max-attempts", attempts_of_ops).out) == bool(exhausted)
        reader = Rationalizer(site.log(), clock=site.clock)
        reader.catch_up()
        _, found, *_ = check_world(reader.identity, reader.world, site.clock.wall_ms(), attempts_of_ops)
        assert (found.state is CheckState.PROBLEM) == bool(exhausted)


def test_a_check_of_an_unknown_group_fails(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """A monitor with a misspelt group would otherwise never report anything."""
    found = act(capsys, "status", "--check", "--group", "misspelt")
    assert (found.code, found.err) == (1, "")
    problem = f"unknown group: the log has no group 'misspelt'; it has '{GROUP}' start a run of the group, or correct"
    assert problem in " ".join(found.out.split())
    assert act(capsys, "status", "--group", "misspelt").code == act(capsys, "top", "--group", "misspelt").code == 1
    del site


def test_a_check_of_a_log_that_is_only_observed_fails(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing can be claimed from such a coordination partition until an operator recovers it."""
    site.broker.retain_from(site.home, 1)
    found = act(capsys, "status", "--check", "--json")
    assert found.code == 1
    (line,) = [line for line in found.json["needs_operator"] if line.startswith("incomplete log")]
    assert f"coordination partitions {site.home}; " in line
    assert "`marshal-dagster recover`" in line


def test_a_log_of_which_nothing_is_left_names_recover(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Retention has deleted all records, so the log seems to be empty."""
    monkeypatch.setattr(output, "wait", lambda _: None)
    for partition in range(site.partitions):
        site.broker.retain_from(partition, site.broker.bounds(partition).end)
    for command in ("status", "top"):
        out = act(capsys, command).out
        assert "incomplete log: nothing can be claimed from coordination partitions 0-3" in out
        assert "then run `marshal-dagster recover`" in out


def test_a_check_of_a_topic_that_was_re_created_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All runs fail then, until an operator sets the position."""
    at_work_on(site, monkeypatch, world_reader, topics=FakeTopics(topic_id=OTHER_TOPIC_ID))
    found = act(capsys, "status", "--check")
    assert found.code == 1
    assert f"run `marshal-dagster position reset {GROUP} {TOPIC} --to-earliest`" in " ".join(found.out.split())


def test_status_checks_what_needs_an_operator(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Exhausted plans, open plans without a member, claims stale for long and long pauses each end with exit code 1."""
    assert act(capsys, "status").code == 0
    found = act(capsys, "status", "--check")
    assert found.code == 1
    lines = " ".join(found.out.split())
    assert f"exhausted: {TOPIC}/1 [50, 80) of group '{GROUP}'" in lines
    assert f"open plan: {TOPIC}/2 [50, 70) of group '{GROUP}' was tried once, and no member holds it" in lines
    for number in (1, 2):
        assert act(capsys, "retry", GROUP, TOPIC, number, "--yes").code == 0
    assert act(capsys, "status", "--check").code == 0
    holder = site.member()
    assert holder.claim([0])
    holder.beat({0: 50})
    site.clock.advance(2 * HI_MS + 120_000)
    assert act(capsys, "status", "--check").code == 0
    site.clock.advance(1)
    found = act(capsys, "status", "--check", "--json")
    assert (found.code, len(found.json["needs_operator"])) == (1, 1)
    assert f"stale claim: {TOPIC}/0 of group '{GROUP}', stale for " in found.out
    assert f"held by {holder.member.instance} ({holder.member.client}); start a run of the group" in found.out
    assert site.member().claim([0])
    assert act(capsys, "status", "--check").code == 0
    site.pause(86_399)
    assert act(capsys, "status", "--check").code == 0
    site.pause(86_402)
    found = act(capsys, "status", "--check")
    assert (found.code, f"long pause: group '{GROUP}' is paused" in found.out) == (1, True)


def test_a_command_whose_input_has_ended_names_yes(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal the answer is missing: this is no interrupt, and nothing is written."""
    before = attempts(site)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    answer = act(capsys, "retry", GROUP, TOPIC)
    assert answer.code == 2
    assert "standard input has ended: run it in a terminal, or add --yes" in answer.err
    assert attempts(site) == before
