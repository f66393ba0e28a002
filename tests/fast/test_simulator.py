"""The simulator: a seed always produces the same run, faults are found, shrunk and reported, and a soak continues."""

import json
import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.state import Group, Key, Keys
from marshal_dagster.protocol.world import PartitionWorld
from tests import simulator_runner
from tests.mutation_gate import LIBRARY, Mutant
from tests.reference_reader import parse
from tests.simulator.broker import Cluster, SimulatedClock
from tests.simulator.checkers import LogJudge, SnapshotJudge, check_attempts, check_nothing_twice
from tests.simulator.data import Attempt, Output
from tests.simulator.go_members import GoView
from tests.simulator.mutants import MUTANTS
from tests.simulator.runner import SIMULATOR
from tests.simulator.scenario import Beginning, scenario
from tests.simulator.scheduler import Process, Scheduler
from tests.simulator.snapshots import render_in_parts
from tests.simulator.world import Result, simulate
from tests.soak_results import TOP


@pytest.mark.parametrize("seed", range(12))
def test_a_seed_keeps_every_promise_and_is_the_same_each_time(seed: int) -> None:
    """A run depends on no clock, hash seed or random number of this process."""
    first, second = simulate(scenario(seed)), simulate(scenario(seed))
    assert first.violations == ()
    assert first == second
    assert first.records == len(first.transcript) > 10


@pytest.mark.thorough
def test_seeds_are_of_the_agreed_size() -> None:
    """A scenario has at least 3 members and on average about 100 records."""
    assert all(len(scenario(seed).members) >= 3 for seed in range(200))
    results = [simulate(scenario(seed)) for seed in range(40)]
    assert 70 < sum(result.records for result in results) / len(results) < 200


def test_half_a_snapshot_can_be_read() -> None:
    """The first part of a snapshot is often valid by itself, so only the closing part shows that a part is missing."""
    world = PartitionWorld(0, 1, GroupSettings(1_000, RuleSet.NATIVE, DeliveryMode.AT_LEAST_ONCE), 0)
    world.groups["etl"] = Group(world.defaults, keys=Keys((("orders", number), Key(number)) for number in range(3)))
    read_alone = 0
    for seed in range(20):
        records = render_in_parts(world, "t" * 22, "s", chance=random.Random(seed))
        assert len(records) > 2
        with suppress(ValueError):
            read_alone += all(json.loads(line) for line in (records[0].value or b"").split(b"\n"))
    assert 0 < read_alone < 20


@pytest.mark.parametrize(
    ("epoch", "sender", "began_at", "is_broken"),
    [
        (5, "another", 20, False),  # claimed before another member's commit, so it need not know of it
        (5, "owner", 9, False),  # started before its own commit
        (5, "owner", 11, True),
        (11, "another", 20, True),  # claimed after the commit
    ],
)
def test_what_was_committed_is_not_done_again(epoch: int, sender: str, began_at: int, is_broken: bool) -> None:
    """Committed work must not be done again by a claim or an owner that could know of the commit.

    A claim knows the records before it in the log, and an owner knows its own commits.
    """
    broken: list[str] = []
    judge = LogJudge(1, lambda promise, _: broken.append(promise))
    what = ("etl", "orders", 0), 0, 8
    judge.committed[what].add("owner")
    judge.committed_at[what] = 10
    done = ClaimedRange("", "etl", "orders", "id", 0, 0, epoch, 4, 8, 4)
    output = Output(attempts=[Attempt(done, what[0], sender, began_at, [4, 5])])
    check_attempts(judge, output, at_most_once=False)
    assert broken == ["what is committed is not done again"] * is_broken


@pytest.mark.parametrize(("reads_on_from", "is_reported"), [(1, False), (3, False), (4, True), (5, True)])
def test_what_a_reader_counts_on_is_checked(reads_on_from: int, is_reported: bool) -> None:
    """A read of one record may return later ones.

    A truncation affects only a reader that continues after the new end.
    """
    scheduler = Scheduler(seed=0)
    cluster = Cluster(scheduler, 1, 1_000, {}, seed=0)
    process = Process(scheduler, "a reader")
    log = cluster.open(process)
    for _ in range(5):
        cluster.put(0, b"a record")

    def read() -> None:
        log.follow({0: 0})
        assert [chunk.position for chunk in log.read_until({0: 1}, 1)] == [5]
        cluster.broker.truncate(0, 3)
        log.bounds([0])
        assert log.reported_truncated_ms is not None
        log.follow({0: reads_on_from})

    process.spawn(read)
    scheduler.run(1_000)
    assert not scheduler.failures
    assert (log.reported_truncated_ms is not None) == is_reported


@pytest.mark.parametrize("seed", [132_454, 162_658])
def test_an_alarm_that_was_false_is_none(seed: int) -> None:
    """Two seeds that once raised false alarms keep every promise.

    The alarms came from records that were only looked at, and from claims during the step that ends them.
    """
    assert simulate(scenario(seed)).violations == ()


@pytest.mark.parametrize(("age_s", "is_claimed"), [(-1, False), (0, True), (119, True), (120, False)])
def test_a_go_process_judges_by_its_clock_and_the_senders_time(age_s: int, is_claimed: bool) -> None:
    """A claim is stale after exactly two intervals, and while its time is later than the reader's clock."""
    clock = SimulatedClock(Scheduler(seed=0))
    view = GoView("etl", clock)
    sent_s = clock.wall_ms() // 1_000 - age_s
    value = f"ClaimingPartition/1/{sent_s}/another-1/another/etl/orders/0"
    view.read(parse(value.encode(), 0, 1), sent_s)
    assert view.is_claimed(0) == is_claimed


def test_a_former_snapshot_that_is_deleted_is_a_violation() -> None:
    """Members of the previous version start from such snapshots, so they stay. They do not count as the newest."""
    broken: list[str] = []
    judge = SnapshotJudge(lambda promise, _: broken.append(promise))
    for key in (b"1/topic/1/0/9/former/0", b"3/topic/1/0/5/present/0"):
        judge.read(0, key, b"{}")
    judge.read(0, b"3/topic/1/0/5/present/0", None)
    assert broken == []
    judge.read(0, b"1/topic/1/0/9/former/0", None)
    assert broken == ["former snapshots stay"]


@pytest.mark.parametrize("beginning", Beginning)
def test_every_beginning_keeps_every_promise(beginning: Beginning) -> None:
    """The promises hold for each kind of log that may exist before the members start."""
    of = next(of for of in map(scenario, range(1_000)) if of.beginning is beginning)
    result = simulate(of)
    assert result.violations == ()
    assert result.befallen[beginning] == (beginning is not Beginning.NOTHING)


def test_nothing_is_in_the_output_twice() -> None:
    """No row is in the output twice, whatever happened to the log."""
    broken: list[str] = []
    output = Output()
    output.rows[0, 3].update([0, 1])
    output.rows[0, 4].update([1])
    check_nothing_twice(LogJudge(1, lambda promise, _: broken.append(promise)), output)
    assert broken == ["effectively once"]


def test_every_fault_of_a_scenario_can_be_left_out() -> None:
    """The faults of a scenario are numbered across appends, events and snapshots, so each can be removed."""
    whole = (of for of in map(scenario, range(1_000)) if of.append_faults and of.events and of.snapshot_faults)
    of = next(of for of in whole if of.failing_part)
    alone = [of.without(set(range(of.faults)) - {number}) for number in range(of.faults)]
    assert [one.faults for one in alone] == [1] * of.faults
    assert [fault for one in alone for fault in one.append_faults] == list(of.append_faults)
    assert [event for one in alone for event in one.events] == list(of.events)
    assert [fault for one in alone for fault in one.snapshot_faults] == list(of.snapshot_faults)
    assert [one.failing_part for one in alone] == [0.0] * (of.faults - 1) + [of.failing_part]


@pytest.mark.slow
def test_what_is_broken_is_caught_shrunk_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken rule is a violation. The printed command leaves out the faults that the violation does not need."""
    monkeypatch.setattr(Key, "end_plan", lambda _: None)
    tally = SIMULATOR.run_chunk(0, 20)
    seed = min(tally.failed)
    SIMULATOR.report(tally)
    printed = capsys.readouterr().out
    assert f"python -m tests.simulator --seed {seed}" in printed
    assert f"{len(tally.failed)} violations" in printed.splitlines()[-1]
    left_out, result = SIMULATOR.shrink(scenario(seed))
    assert result.violations
    assert left_out == set(range(scenario(seed).faults))
    assert SIMULATOR.show(seed, left_out) == 1
    assert str(result.violations[0]) in capsys.readouterr().out


@pytest.mark.thorough
def test_a_seed_that_does_not_end_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that hangs is aborted and reported with its seed."""

    def hang(_: object) -> Result:
        while True:
            pass

    monkeypatch.setattr(simulator_runner, "LONGEST_SEED_S", 1)
    hanging = replace(SIMULATOR, simulate=hang)
    assert hanging.run_one(scenario(3)).violations[0].promise == "every seed ends"


@pytest.mark.slow
def test_a_seed_that_was_stopped_for_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only CPU time of the process counts, not time in which it waits."""
    result = SIMULATOR.run_one(scenario(3))

    def wait(_: object) -> Result:
        time.sleep(0.2)
        return result

    monkeypatch.setattr(simulator_runner, "LONGEST_SEED_S", 0.1)
    assert replace(SIMULATOR, simulate=wait).run_one(scenario(3)) is result


@pytest.mark.thorough
def test_a_soak_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished blocks are stored with the digest of the code that they ran on, and are added up."""
    results = tmp_path / "results" / "soak.jsonl"
    monkeypatch.setattr(simulator_runner, "code_digest", lambda _: "one")
    assert SIMULATOR.soak(0, 4, 1, results, block=2).seeds == 4
    before = results.read_text()
    again = SIMULATOR.soak(0, 6, 1, results, block=2)
    assert again.seeds == 6
    assert results.read_text().startswith(before)
    assert len(results.read_text().splitlines()) == 3
    monkeypatch.setattr(simulator_runner, "code_digest", lambda _: "another")
    SIMULATOR.soak(0, 2, 1, results, block=2)
    assert [json.loads(line)["code"] for line in results.read_text().splitlines()] == ["one"] * 3 + ["another"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_every_mutant_still_breaks_the_code_that_is(mutant: Mutant) -> None:
    """The text that a mutant replaces occurs exactly once in the library."""
    assert [(TOP / LIBRARY / file).read_text().count(old) for file, old, _ in mutant.edits] == [1] * len(mutant.edits)
    assert all(old != new for _, old, new in mutant.edits)
