"""The checker of the outbox's fault runs accepts a correct run and rejects altered ones; a seed determines a run."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests import soak_results
from tests.outbox_faults.__main__ import SUITE, Row
from tests.outbox_faults.checkers import Seen, judge
from tests.outbox_faults.scenario import KINDS, scenario
from tests.outbox_faults.writers import Fact

FACTS = [
    Fact("t", "a", "a1"),
    Fact("t", "b", "b1"),
    Fact("t", "a", "poison", is_poisoned=True),
    Fact("t", "a", "a2"),
    Fact("u", "a", "a3"),
    Fact("t", None, "none"),
    Fact("t", "a", "a4"),
]
PARKED = {"poison": "too large"}

COUNTED = (
    *("rows", "transactions", "rolled_back", "long", "poisoned", "sessions", "terms", "takeovers"),
    *("lost", "invented", "repeated", "out_of_order", "wrongly_parked"),
)

Doctor = Callable[[list[Seen]], list[Seen]]


def seen() -> list[Seen]:
    """Return what consumers read in a correct run: each key in order, different keys in any order."""
    rows = [("t", 0, "a", "a1"), ("t", 0, "a", "a2"), ("t", 1, None, "none"), ("t", 1, "b", "b1"), ("t", 0, "a", "a4")]
    rows.append(("u", 0, "a", "a3"))
    return [
        Seen(topic, partition, offset, key, value, f"uid-{value}")
        for offset, (topic, partition, key, value) in enumerate(rows)
    ]


def again(records: list[Seen], number: int) -> list[Seen]:
    """Append a copy of a record at the end."""
    return [*records, records[number]._replace(offset=100)]


def test_an_honest_run_passes() -> None:
    """A correct run passes, with records of different keys in any order."""
    verdict = judge(FACTS, seen(), PARKED)
    assert verdict.violations == []
    assert (verdict.lost, verdict.invented, verdict.repeated, verdict.out_of_order, verdict.wrongly_parked) == (0,) * 5


@pytest.mark.parametrize(
    ("doctor", "counts", "rule"),
    [
        (lambda records: records[1:], (1, 0, 0, 0), "no committed row is lost"),
        (lambda records: [*records, records[0]._replace(value="x", row="x")], (0, 1, 0, 0), "only committed rows"),
        (lambda records: [records[0]._replace(topic="u"), *records[1:]], (1, 1, 0, 0), "only committed rows"),
        (lambda records: [records[0]._replace(key="b"), *records[1:]], (1, 1, 0, 0), "no committed row is lost"),
        (lambda records: again(records, 4), (0, 0, 1, 0), "published twice"),
        (lambda records: again(records, 0), (0, 0, 1, 1), "the order of each key"),
        (lambda records: [records[0]._replace(offset=50), *records[1:]], (0, 0, 0, 1), "the order of each key"),
        (lambda records: [records[0]._replace(partition=1), *records[1:]], (0, 0, 0, 1), "stays in its partition"),
        (lambda records: [records[0]._replace(row="uid-a2"), *records[1:]], (0, 0, 0, 0), "each row has its id"),
        (lambda records: [records[0]._replace(row=""), *records[1:]], (0, 0, 0, 0), "each row has its id"),
    ],
)
def test_a_doctored_run_is_caught(doctor: Doctor, counts: tuple[int, ...], rule: str) -> None:
    """An altered run is rejected with the rule that it violates."""
    verdict = judge(FACTS, doctor(seen()), PARKED)
    assert (verdict.lost, verdict.invented, verdict.repeated) == counts[:3]
    assert bool(verdict.out_of_order) is bool(counts[3])
    assert any(rule in violation.promise for violation in verdict.violations)


@pytest.mark.parametrize("parked", [{}, {"poison": "", "a1": ""}], ids=["too few", "too many"])
def test_rows_set_aside_wrongly_are_caught(parked: dict[str, str]) -> None:
    """Exactly the poisoned rows may be set aside."""
    verdict = judge(FACTS, seen(), parked)
    assert verdict.wrongly_parked == 1
    assert verdict.violations[0].promise == "the rows set aside are the poisoned ones"


def test_what_waits_is_not_lost() -> None:
    """A row that still waits does not count as lost, because the run reports by itself that it was not drained."""
    verdict = judge(FACTS, seen()[1:], {}, {"a1", "poison"})
    assert verdict.violations == []


def test_seeds_one_after_another_have_each_kind_of_fault() -> None:
    """Consecutive seeds cover each kind of fault, and a seed always produces the same run."""
    found = [scenario(seed) for seed in range(len(KINDS))]
    assert {fault.kind for of in found for fault in of.faults[:1]} == set(KINDS)
    assert found == [scenario(seed) for seed in range(len(KINDS))]


def test_results_are_read_back_and_added_up(tmp_path: Path) -> None:
    """A run counts once in the line of each of its faults."""
    faults = ("harvester killed", "harvester killed", "clock off")
    counts = dict(zip(COUNTED, range(1, 14), strict=True))
    row = Row(commit="c", seed=1, faults=faults, **counts, drained_after_s=2.5, violations=("wrong",), seconds=9.0)
    rows = [row, replace(row, seed=2, violations=())]
    for each in rows:
        soak_results.add_row(tmp_path / "results", asdict(each))
    assert soak_results.rows_of(Row, tmp_path / "results") == rows
    lines = SUITE.table(rows).splitlines()
    assert (
        next(line for line in lines if "harvester killed" in line)
        == "| harvester killed | 2 | 16 | 12 | 18 | 20 | 22 | 24 | 1 |"
    )
    assert next(line for line in lines if "Postgres crashed" in line).startswith("| Postgres crashed | 0 | 0 |")
