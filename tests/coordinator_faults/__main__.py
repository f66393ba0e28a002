"""Runs coordinated groups under faults: `python -m tests.coordinator_faults` (options: `tests.fault_harness.suite`)."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.coordinator_faults.run import SETTLE_WITHIN_S, Run, Tally
from tests.coordinator_faults.scenario import KINDS, LINKS, Scenario, scenario
from tests.fault_harness.cluster import FaultyKafka, faulty_kafka
from tests.fault_harness.suite import FaultSuite, RunRow, median_and_longest

CODE: Final = (
    "marshal_dagster/coordinator",
    "marshal_dagster/election",
    "marshal_dagster/kafka",
    "marshal_dagster/errors.py",
    "tests/coordinator_faults/*.py",
    "tests/fault_harness/*.py",
)
"""The paths on which a run's result depends, as git names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(RunRow):
    """The result of a run in the results file."""

    ending: str
    coordinators: int
    members: int
    claims: int
    commits: int
    terms: int
    stops: int
    two_owners: int
    lost: int
    foreign: int
    settled_after_s: float
    ended_after_s: float
    is_unsteady: bool = False


def services(folder: Path, lanes: int) -> AbstractContextManager[FaultyKafka]:
    """Start brokers with links for some coordinators and members."""
    return faulty_kafka(folder / "kafka", links=lanes * LINKS)


def run(of: Scenario, kafka: FaultyKafka, _: int, folder: Path) -> Tally:
    """Run a scenario."""
    return Run(of, kafka, folder).go()


def sources(of: Scenario, tally: Tally) -> tuple[object, ...]:
    """Return the sources of a row."""
    return of, tally, tally.verdict


def summary(row: Row) -> str:
    """Return the summary of one run."""
    return (
        f"{row.ending}; {row.members} members, {row.claims} claims, {row.commits} commits, {row.terms} terms, settled "
        f"after {row.settled_after_s} s"
    )


def totals(rows: Sequence[Row]) -> str:
    """Return the summary of all runs."""
    return f"{sum(row.terms for row in rows)} terms"


def cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the cells of a line of the table."""
    return (
        f"{sum(row.terms for row in rows):,}",
        f"{sum(row.claims for row in rows):,}",
        median_and_longest([row.settled_after_s for row in rows]),
        f"{sum(row.two_owners for row in rows):,}",
        f"{sum(row.lost for row in rows):,}",
        f"{sum(row.foreign for row in rows):,}",
    )


def notes(rows: Sequence[Row]) -> str:
    """Return the notes: what was promised, and what was not judged."""
    return (
        f"Members committed {sum(row.commits for row in rows):,} times. Runs must settle within {SETTLE_WITHIN_S:g} s. "
        f"In {sum(row.is_unsteady for row in rows)} runs the calm was not judged, because the machine was too "
        f"busy for a coordinator to lead."
    )


SUITE: Final = FaultSuite(
    module="tests.coordinator_faults",
    code=CODE,
    kinds=KINDS,
    scenario=scenario,
    services=services,
    run=run,
    tally=Tally,
    row=Row,
    sources=sources,
    summary=summary,
    totals=totals,
    columns=("terms", "claims", "settled after: median, longest", "two owners", "lost", "foreign"),
    cells=cells,
    notes=notes,
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
