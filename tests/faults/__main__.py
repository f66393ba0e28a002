"""Runs groups under faults: `python -m tests.faults --seeds 16` (options: `tests.fault_harness.suite`)."""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fault_harness.cluster import FaultyKafka, faulty_kafka
from tests.fault_harness.suite import FaultSuite, RunRow, median_and_longest
from tests.faults.checkers import Tally
from tests.faults.run import Run
from tests.faults.scenario import KINDS, MEMBERS, Scenario, scenario
from tests.soak_results import ALL_CODE

LANES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(RunRow):
    """The result of a run in the results file."""

    mode: str
    records: int
    takeovers_ms: tuple[int, ...]
    refused_commits: int
    lost: int
    dropped: int
    twice: int
    repeated: int
    claims_ranges: bool = False
    together: int = 0
    """The highest number of members that worked on ranges of one partition at the same time."""


def services(folder: Path, lanes: int) -> AbstractContextManager[FaultyKafka]:
    """Start brokers with a link for each member that runs at the same time."""
    return faulty_kafka(folder / "kafka", links=lanes * MEMBERS)


def run(of: Scenario, kafka: FaultyKafka, lane: int, folder: Path) -> Tally:
    """Run a scenario."""
    return Run(of, kafka, lane, folder).go()


def sources(of: Scenario, tally: Tally) -> tuple[object, ...]:
    """Return the sources of a row."""
    return of, tally


def summary(row: Row) -> str:
    """Return the summary of one run."""
    takeovers = f"{len(row.takeovers_ms)} takeovers" if row.takeovers_ms else "no takeover"
    ranges = f" by ranges ({row.together} at once)" if row.claims_ranges else ""
    return f"{row.mode}{ranges}, {row.records} records, {takeovers}, {row.refused_commits} refused commits"


def totals(rows: Sequence[Row]) -> str:
    """Return the summary of all runs."""
    return f"{sum(len(row.takeovers_ms) for row in rows)} takeovers"


def cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the cells of a line of the table."""
    times_s = [time_ms / 1_000 for row in rows for time_ms in row.takeovers_ms]
    return (
        f"{sum(row.claims_ranges for row in rows):,}",
        f"{len(times_s):,}",
        median_and_longest(times_s),
        f"{sum(row.refused_commits for row in rows):,}",
        f"{sum(row.lost for row in rows):,}",
        f"{sum(row.twice for row in rows):,}",
    )


def notes(rows: Sequence[Row]) -> str:
    """Return the notes: what the modes allow, and how many members worked on one partition."""
    dropped, repeated = sum(row.dropped for row in rows), sum(row.repeated for row in rows)
    together = [row.together for row in rows if row.claims_ranges]
    several, all_of_them = sum(count > 1 for count in together), sum(count == MEMBERS for count in together)
    return (
        f"As the modes allow, at most once left out {dropped:,} messages and at least once processed {repeated:,} "
        f"again.\nIn {len(together):,} runs members claimed ranges; in {several:,} of these several worked on one "
        f"partition at once, in {all_of_them:,} all {MEMBERS}."
    )


SUITE: Final = FaultSuite(
    module="tests.faults",
    code=ALL_CODE,
    kinds=KINDS,
    scenario=scenario,
    services=services,
    run=run,
    tally=Tally,
    row=Row,
    sources=sources,
    summary=summary,
    totals=totals,
    columns=("by ranges", "takeovers", "median, longest", "refused commits", "lost", "done twice"),
    cells=cells,
    notes=notes,
    lanes=LANES,
    is_alone=lambda of: of.is_of_brokers,
)

if __name__ == "__main__":
    sys.exit(SUITE.main())
