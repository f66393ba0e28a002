"""Check the command of the fault runs: it adds up results, reports violations, and prints a table for one commit."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import TypeAdapter

from tests import soak_results
from tests.coordinator_faults import __main__ as coordinator
from tests.fault_harness.journal import Journal, read_journal
from tests.fault_harness.suite import FaultSuite, RunRow
from tests.faults import __main__ as claims
from tests.outbox_faults import __main__ as outbox
from tests.simulator.checkers import ViolationError

CODE = ("tests/soak_results.py",)


class Kind(StrEnum):
    """The kinds of faults."""

    EVEN = "even seed"
    ODD = "odd seed"


class Fault(NamedTuple):
    """A fault of one kind."""

    kind: Kind


class Scenario(NamedTuple):
    """The run of a seed."""

    seed: int
    faults: tuple[Fault, ...]
    digit: int


@dataclass
class Tally:
    """The result of a run."""

    violations: list[ViolationError] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(RunRow):
    """A row with an additional field."""

    digit: int


class World:
    """Counts starts and repairs of the services, and records which seeds ran in which lane."""

    def __init__(self) -> None:
        self.ran: list[tuple[int, int]] = []
        self.repairs = self.starts = 0

    @contextmanager
    def services(self, folder: Path, lanes: int) -> Iterator["World"]:
        """Yield this object."""
        assert folder.is_dir()
        assert lanes > 0
        self.starts += 1
        yield self

    def run(self, of: Scenario, world: "World", lane: int, folder: Path) -> Tally:
        """Record the seed; seed 3 violates a promise, seed 4 raises an error."""
        assert world is self
        folder.mkdir()
        self.ran.append((of.seed, lane))
        if of.seed == 4:
            raise RuntimeError("it broke")
        return Tally([ViolationError("it is even", "no")] if of.seed == 3 else [])

    def repair(self) -> None:
        """Count the repair."""
        self.repairs += 1


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    return Scenario(seed, (Fault(Kind.ODD if seed % 2 else Kind.EVEN),), seed % 10)


def suite(world: World, lanes: int = 1) -> FaultSuite[Scenario, World, Tally, Row]:
    """Return the command."""
    return FaultSuite(
        module="tests.even",
        code=CODE,
        kinds=tuple(Kind),
        scenario=scenario,
        services=world.services,
        run=world.run,
        tally=Tally,
        row=Row,
        sources=lambda of, _: (of,),
        summary=lambda row: f"counted {row.digit}",
        totals=lambda rows: f"{sum(row.digit for row in rows)} in sum",
        columns=("sum",),
        cells=lambda rows: (str(sum(row.digit for row in rows)),),
        notes=lambda rows: f"{len(rows)} rows.",
        lanes=lanes,
        is_alone=lambda of: of.seed % 2 == 0,
    )


def row(commit: str, seed: int) -> dict[str, object]:
    """Return a row as the file has it."""
    return {"commit": commit, "seed": seed, "faults": ["odd seed"], "violations": ["one"], "seconds": 60.0, "digit": 7}


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.slow
def test_what_is_in_the_results_is_not_run_again(tmp_path: Path) -> None:
    """Only rows of the same commit count; rows of other commits are kept."""
    results, world = tmp_path / "folder" / "results.jsonl", World()
    soak_results.add_row(results, row("of old", 1))
    assert [row.seed for row in suite(world).soak([0, 1], results)] == [0, 1]
    assert [row.seed for row in suite(world).soak(range(3), results)] == [0, 1, 2]
    assert [seed for seed, _ in world.ran] == [0, 1, 2]
    assert world.repairs == 3
    at = soak_results.code_version(CODE)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["commit"] == at, line["seed"]) for line in lines] == [(False, 1), (True, 0), (True, 1), (True, 2)]


def test_nothing_is_started_when_nothing_is_due(tmp_path: Path) -> None:
    """Starting the services takes long."""
    results, world = tmp_path / "results.jsonl", World()
    first = suite(world).soak([0], results)
    assert suite(world).soak([0], results) == first
    assert world.starts == 1


def test_runs_that_need_the_services_for_themselves_come_last() -> None:
    """Each uses the first free lane, and the services are repaired after it."""
    world = World()
    rows = suite(world, lanes=2).soak(range(6), None)
    assert sorted(row.seed for row in rows) == list(range(6))
    assert [seed for seed, _ in world.ran[3:]] == [0, 2, 4]
    assert {lane for _, lane in world.ran} <= {0, 1}
    assert world.repairs == 3


def test_the_command_reports_what_was_violated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has the command that repeats the run; a run that raises an error counts as a violation.

    The exit code is 1 in both cases.
    """
    monkeypatch.setattr(sys, "argv", ["even", "--first", "2", "--seeds", "3"])
    assert suite(World()).main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(", ")[0] for line in lines if line.startswith("seed")] == [
        "seed 2: even seed: counted 2",
        "seed 3: odd seed: counted 3",
        "seed 4: even seed: counted 4",
    ]
    assert "    VIOLATED it is even: no" in lines
    assert any(line.startswith("    VIOLATED the run itself works: RuntimeError('it broke')") for line in lines)
    kept = [line.partition("# left in ") for line in lines if "# left in" in line]
    assert [command.strip() for command, _, _ in kept] == [f"python -m tests.even --seed {seed}" for seed in (3, 4)]
    assert all(Path(folder).is_dir() for _, _, folder in kept)
    assert lines[-1] == "3 runs, 9 in sum, 2 with violations"
    monkeypatch.setattr(sys, "argv", ["even", "--seed", "7"])
    assert suite(World()).main() == 0


def test_the_table_is_of_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table covers the newest commit, or the commit that is requested; no runs are started."""
    world = World()
    for commit, seed in (("of old", 1), ("newest", 1), ("newest", 3)):
        soak_results.add_row(tmp_path / "results", row(commit, seed))
    for more, commit, count in (([], "newest", 2), (["--commit", "of old"], "of old", 1)):
        monkeypatch.setattr(sys, "argv", ["even", "--table", str(tmp_path / "results"), *more])
        assert suite(world).main() == 0
        assert capsys.readouterr().out.splitlines() == [
            "| fault | runs | sum | violations |",
            "| --- | ---: | ---: | ---: |",
            "| even seed | 0 | 0 | 0 |",
            f"| odd seed | {count} | {7 * count} | {count} |",
            f"| all runs | {count} | {7 * count} | {count} |",
            "",
            f"Of commit {commit}, in {count} minutes of runs. {count} rows.",
        ]
    assert world.ran == []


def test_a_journal_has_whole_lines_of_several_writers(tmp_path: Path) -> None:
    """A process that starts again appends to its journal; a missing journal has no lines."""
    lines = TypeAdapter(tuple[int, str])
    for number in range(2):
        Journal(tmp_path / "journal", lines).write((number, "begun"), (number, "ended"))
    assert read_journal(tmp_path / "journal", lines) == [(0, "begun"), (0, "ended"), (1, "begun"), (1, "ended")]
    assert read_journal(tmp_path / "none", lines) == []


@pytest.mark.parametrize("suite", [claims.SUITE, outbox.SUITE, coordinator.SUITE], ids=lambda suite: suite.module)
def test_a_row_is_read_back_as_it_was_written(suite: FaultSuite[Any, Any, Any, Any], tmp_path: Path) -> None:
    """Each field comes from the scenario or from the tally, and the table shows it."""
    tally = suite.tally()
    tally.violations.append(ViolationError("it is even", "no"))
    row = suite.row_of(suite.scenario(7), tally, "c", 7, 12.34)
    soak_results.add_row(tmp_path / "results", asdict(row))
    assert soak_results.rows_of(suite.row, tmp_path / "results") == [row]
    assert (row.seed, row.violations, row.seconds) == (7, ("it is even: no",), 12.3)
    assert sum(line.endswith(" 1 |") for line in suite.table([row]).splitlines()) == 1 + len(set(row.faults))
    assert suite.summary(row)
