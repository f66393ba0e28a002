"""The outbox simulator: a seed always produces the same run, and faults in the code are found, shrunk and reported."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from marshal_dagster.outbox import harvest
from marshal_dagster.outbox.interfaces import PublishedBatch
from tests import simulator_runner
from tests.mutation_gate import LIBRARY, Mutant
from tests.outbox_simulator.mutants import MUTANTS
from tests.outbox_simulator.runner import SIMULATOR
from tests.outbox_simulator.scenario import CallFault, EventKind, scenario
from tests.outbox_simulator.world import Result, simulate
from tests.soak_results import TOP

_PRINT_A_SEED = (
    "from tests.outbox_simulator.world import simulate; from tests.outbox_simulator.scenario import scenario; "
    "print(*simulate(scenario({seed})).transcript, sep='\\n')"
)


@pytest.mark.thorough
def test_two_hundred_seeds_keep_every_promise_under_every_fault() -> None:
    """In 200 seeds every kind of fault happens, including concurrent sessions, and every promise is kept."""
    tally = SIMULATOR.run_chunk(0, 200)
    assert tally.failed == {}
    assert set(tally.faults) == {*map(str, CallFault), *map(str, EventKind)}
    assert tally.records > 2_000
    assert min(tally.outcomes[what] for what in ("fenced", "rows set aside", "sessions", "terms")) > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_seed_is_the_same_each_time(seed: int) -> None:
    """A seed produces the same run again, also in another process with another hash seed."""
    first = simulate(scenario(seed))
    assert first == simulate(scenario(seed))
    assert len(first.transcript) > 10
    if seed == 0:
        command = [sys.executable, "-c", _PRINT_A_SEED.format(seed=seed)]
        environment = {**os.environ, "PYTHONHASHSEED": "77"}
        done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == first.transcript


def test_every_fault_of_a_scenario_can_be_left_out() -> None:
    """The faults of a scenario are numbered across calls and events, so each can be removed."""
    of = next(of for of in map(scenario, range(200)) if of.call_faults and of.events)
    alone = [of.without(set(range(of.faults)) - {number}) for number in range(of.faults)]
    assert [one.faults for one in alone] == [1] * of.faults
    assert [fault for one in alone for fault in one.call_faults] == list(of.call_faults)
    assert [event for one in alone for event in one.events] == list(of.events)


@pytest.mark.thorough
def test_what_is_broken_is_caught_shrunk_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A session that does not delete published rows publishes them again.

    The report shows the command to repeat the run.
    """
    original = harvest.Harvest.begin

    def begin_without_note(self: harvest.Harvest) -> None:
        original(self)
        self._done = PublishedBatch()

    monkeypatch.setattr(harvest.Harvest, "begin", begin_without_note)
    tally = SIMULATOR.run_chunk(0, 60)
    seed = min(tally.failed)
    SIMULATOR.report(tally)
    printed = capsys.readouterr().out
    assert f"python -m tests.outbox_simulator --seed {seed}" in printed
    assert f"{len(tally.failed)} violations" in printed.splitlines()[-1]
    left_out, result = SIMULATOR.shrink(scenario(seed))
    assert result.violations[0].promise == "nothing is published twice"
    assert scenario(seed).without(left_out).faults <= 2
    assert SIMULATOR.show(seed, left_out) == 1
    assert str(result.violations[0]) in capsys.readouterr().out


@pytest.mark.slow
def test_a_seed_that_does_not_end_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that hangs is aborted and reported with its seed."""

    def hang(_: object) -> Result:
        while True:
            pass

    monkeypatch.setattr(simulator_runner, "LONGEST_SEED_S", 0.2)
    hanging = replace(SIMULATOR, simulate=hang)
    assert hanging.run_one(scenario(3)).violations[0].promise == "every seed ends"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_every_mutant_still_breaks_the_code_that_is(mutant: Mutant) -> None:
    """The text that a mutant replaces occurs exactly once in the library."""
    assert [(TOP / LIBRARY / file).read_text().count(old) for file, old, _ in mutant.edits] == [1] * len(mutant.edits)
    assert all(old != new for _, old, new in mutant.edits)
