"""The checker of the sinks' fault runs accepts a correct output and rejects altered ones; a seed determines a run."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import soak_results
from tests.sink_conformance import Row as OutputRow
from tests.sink_faults.__main__ import Row, suite
from tests.sink_faults.checkers import SetBack, judge
from tests.sink_faults.outputs import FOREIGN, SinkKind
from tests.sink_faults.scenario import PROCESSES, FaultKind, kinds_of, scenario

WRITTEN = {0: ["a", "b", "c"], 1: ["d"]}
SET_BACK = [SetBack(0, 1, 2), SetBack(0, 2, 3)]
ROWS = [(0, 0, "a|1"), (0, 1, "b|2"), (0, 2, "c|3"), (1, 0, "d|1"), (FOREIGN, 0, "foreign")]

Change = Callable[[list[OutputRow]], list[OutputRow]]


def test_a_correct_output_passes() -> None:
    """A newer generation than the least one passes too."""
    assert judge(ROWS, WRITTEN, SET_BACK, 1).violations == []
    assert judge([(0, 0, "a|9"), *ROWS[1:]], WRITTEN, SET_BACK, 1).violations == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda rows: rows[1:], "lost"),
        (lambda rows: [*rows, rows[0]], "twice"),
        (lambda rows: [*rows, rows[3]], "twice"),
        (lambda rows: [(0, 0, "b|1"), *rows[1:]], "changed"),
        (lambda rows: [*rows, (0, 3, "d|3")], "invented"),
        (lambda rows: [*rows, (2, 0, "d|3")], "invented"),
        (lambda rows: [rows[0], (0, 1, "b|1"), *rows[2:]], "outdated"),
        (lambda rows: [*rows[:2], (0, 2, "c|2"), *rows[3:]], "outdated"),
        (lambda rows: rows[:-1], "foreign_lost"),
    ],
)
def test_an_altered_output_is_caught(change: Change, name: str) -> None:
    """An altered output is rejected for this reason alone."""
    verdict = judge(change(ROWS), WRITTEN, SET_BACK, 1)
    assert [violation.text for violation in verdict.violations] == [f"{name}: 1 rows"]


@pytest.mark.parametrize("sink", SinkKind)
def test_a_seed_determines_a_run(sink: SinkKind) -> None:
    """Consecutive seeds have each kind of fault as their main one, each of an existing process."""
    kinds = kinds_of(sink)
    drawn = [scenario(sink, seed) for seed in range(len(kinds))]
    assert [one.faults[0].kind for one in drawn] == list(kinds)
    assert drawn == [scenario(sink, seed) for seed in range(len(kinds))]
    assert all(0 <= fault.process < PROCESSES and fault.steps > 0 for one in drawn for fault in one.faults)


def test_each_kind_of_fault_is_there() -> None:
    """Only sinks that replace have positions set back; only tables that others write have their commits."""
    assert {kind for sink in SinkKind for kind in kinds_of(sink)} == set(FaultKind)
    assert FaultKind.SET_BACK not in kinds_of(SinkKind.KAFKA)
    assert FaultKind.FOREIGN not in kinds_of(SinkKind.POSTGRES)


def test_the_table_shows_what_was_found(tmp_path: Path) -> None:
    """Rows are written to the results file and read from it."""
    row = Row(
        commit="c",
        seed=0,
        faults=(FaultKind.KILLED,),
        violations=(),
        seconds=9.5,
        sink=SinkKind.DELTA,
        records=1_000,
        batches=10,
        failed_batches=2,
        skipped_ranges=3,
        processes=4,
        set_back=1,
        foreign=5,
        lost=0,
        twice=0,
        changed=0,
        outdated=0,
        drained_after_s=1.5,
    )
    results = tmp_path / "results.jsonl"
    soak_results.add_row(results, asdict(row))
    assert soak_results.rows_of(Row, results) == [row]
    table = suite(SinkKind.DELTA).table([row])
    assert "| process and its JVM killed | 1 | 1,000 | 10 | 2 | 3 | 0 | 0 | 0 | 0 |" in table
    assert "5 commits of another engine" in table
