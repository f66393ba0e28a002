"""Runs seeds: `python -m tests.coordinator_faults --first 0 --runs 16`, or one: `... --seed 7`.

`--results FILE` adds a row for each finished run, with the commit that it ran on, and leaves out the seeds that are in
it for the same commit. `--table FILE` prints what those of its newest commit came to, or those of `--commit`. What
violates keeps its folder.
"""

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
from tests.coordinator_faults.run import SETTLE_WITHIN_S, Run, Tally
from tests.coordinator_faults.scenario import KINDS, LINKS, scenario
from tests.fault_harness.cluster import FaultyKafka, faulty_kafka

MOST_KEPT: Final = 10
CODE: Final = (
    "marshal_dagster/coordinator",
    "marshal_dagster/election",
    "marshal_dagster/kafka",
    "marshal_dagster/errors.py",
    "tests/coordinator_faults/*.py",
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
    violations: tuple[str, ...]
    seconds: float
    is_unsteady: bool = False


class Bed:
    """Brokers on which one run after another goes on."""

    def __init__(self, kafka: FaultyKafka, folder: Path, commit: str) -> None:
        self.kafka = kafka
        self.folder = folder
        self.commit = commit

    def repair(self) -> None:
        """Have all run again."""
        self.kafka.repair()

    def row(self, seed: int) -> Row:
        """Run a seed."""
        of, began_s = scenario(seed), time.monotonic()
        folder = self.folder / f"seed{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            tally = Run(of, self.kafka, folder).go()
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
            ending=of.ending.value,
            coordinators=of.coordinators,
            members=of.members,
            claims=tally.claims,
            commits=tally.commits,
            terms=tally.terms,
            stops=tally.stops,
            two_owners=verdict.two_owners,
            lost=verdict.lost,
            foreign=verdict.foreign,
            settled_after_s=tally.settled_after_s,
            ended_after_s=tally.ended_after_s,
            violations=tuple(verdict.violations[:MOST_KEPT]),
            seconds=round(time.monotonic() - began_s, 1),
            is_unsteady=tally.is_unsteady,
        )


@contextmanager
def running_bed() -> Iterator[Bed]:
    """Give brokers for runs; the folders of runs that violate something stay."""
    folder = Path(tempfile.mkdtemp(prefix="marshal-coordinator-faults-"))
    with faulty_kafka(folder / "kafka", links=LINKS) as kafka:
        yield Bed(kafka, folder, soaking.code_version(CODE))
    if not any(folder.iterdir()):
        folder.rmdir()


def table(rows: Sequence[Row]) -> str:
    """Give the results as a markdown table; a run counts in the line of each of its faults."""
    lines = [
        "| fault | runs | terms | claims | settled after: median, longest | two owners | lost | foreign | violations |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_line(kind.value, [row for row in rows if kind.value in row.faults]) for kind in KINDS]
    lines.append(_line("all runs", rows))
    commits = ", ".join(sorted({row.commit for row in rows}))
    lines.append("")
    lines.append(
        f"Of commit {commits}, in {sum(row.seconds for row in rows) / 60:,.0f} minutes of runs, with "
        f"{sum(row.commits for row in rows):,} commits. To be settled within {SETTLE_WITHIN_S:g} s is promised. In "
        f"{sum(row.is_unsteady for row in rows)} runs the calm was not judged, as the machine was too busy to lead in."
    )
    return "\n".join(lines)


def _line(name: str, rows: Sequence[Row]) -> str:
    took = [row.settled_after_s for row in rows]
    cells = (
        f"{len(rows):,}",
        f"{sum(row.terms for row in rows):,}",
        f"{sum(row.claims for row in rows):,}",
        f"{median(took):.1f} s, {max(took):.1f} s" if took else "",
        f"{sum(row.two_owners for row in rows):,}",
        f"{sum(row.lost for row in rows):,}",
        f"{sum(row.foreign for row in rows):,}",
        f"{sum(bool(row.violations) for row in rows):,}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def told(row: Row) -> str:
    """Say what a run came to."""
    return (
        f"{', '.join(row.faults)}; {row.ending}: {row.members} members, {row.claims} claims, {row.commits} commits, "
        f"{row.terms} terms, settled after {row.settled_after_s} s, {row.seconds} s"
    )


SOAK: Final = soaking.Soak(
    module="tests.coordinator_faults",
    description=__doc__,
    kind=Row,
    code=CODE,
    runs=len(KINDS),
    running_bed=running_bed,
    told=told,
    counted=lambda rows: f"{sum(row.terms for row in rows)} terms",
    table=table,
)

if __name__ == "__main__":
    sys.exit(SOAK.main())
