"""Runs seeds: `python -m tests.faults --seeds 16`, or one: `python -m tests.faults --seed 7`.

`--results FILE` adds a row for each finished run, with the commit that it ran on, and leaves out the seeds that are in
it for the same commit. `--table FILE` prints what those of its newest commit came to, or those of `--commit`. What
violates prints the command that repeats the seed, and keeps its folder: the recorded log, the members' journals and
what they said.
"""

import argparse
import queue
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from tests import soaking
from tests.fault_harness.cluster import FaultyKafka, faulty_kafka
from tests.faults.judging import Tally
from tests.faults.run import STOPPING, run
from tests.faults.scenario import KINDS, MEMBERS, scenario
from tests.simulator.checkers import Violation

LANES: Final = 3
BLOCK: Final = 48
MOST_SHOWN: Final = 5
MOST_KEPT: Final = 20


@dataclass(frozen=True, slots=True)
class Row:
    """What a run came to, as the results file keeps it."""

    commit: str
    seed: int
    mode: str
    faults: tuple[str, ...]
    records: int
    takeovers_ms: tuple[int, ...]
    refused_commits: int
    lost: int
    dropped: int
    twice: int
    repeated: int
    violations: tuple[str, ...]
    seconds: float
    claims_ranges: bool = False
    together: int = 0
    """The most members that worked at once on ranges of one partition."""


class Bed:
    """A cluster on which several runs can go on at once."""

    def __init__(self, cluster: FaultyKafka, lanes: int, folder: Path, commit: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.commit = commit
        self._pool = ThreadPoolExecutor(lanes)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for lane in range(lanes):
            self._free.put(lane)

    def rows(self, seeds: Iterable[int]) -> Iterator[Row]:
        """Run seeds, those that need the brokers for themselves one by one at the end."""
        alone = [seed for seed in seeds if scenario(seed).is_of_brokers]
        beside = [seed for seed in seeds if seed not in set(alone)]
        due = [self._pool.submit(self.row, seed) for seed in beside]
        try:
            for done in as_completed(due):
                yield done.result()
        except BaseException:
            STOPPING.set()
            self._pool.shutdown(cancel_futures=True)
            raise
        for seed in alone:
            yield self.row(seed)
            self.cluster.repair()

    def row(self, seed: int) -> Row:
        """Run a seed."""
        of, lane, began_s = scenario(seed), self._free.get(), time.monotonic()
        folder = self.folder / f"seed{seed}"
        try:
            tally = run(of, self.cluster, lane, folder)
        except Exception as error:  # noqa: BLE001 - the next run may go better; this one counts as failed
            tally = Tally([Violation("the run itself works", f"{error!r}, {traceback.format_exc()[-1_500:]}")])
        finally:
            self._free.put(lane)
        if not tally.violations:
            shutil.rmtree(folder)
        return Row(
            commit=self.commit,
            seed=seed,
            mode=of.mode.value,
            faults=tuple(fault.kind.value for fault in of.faults),
            records=tally.records,
            takeovers_ms=tuple(tally.takeovers_ms),
            refused_commits=tally.refused_commits,
            lost=tally.lost,
            dropped=tally.dropped,
            twice=tally.twice,
            repeated=tally.repeated,
            violations=tuple(str(violation) for violation in tally.violations[:MOST_KEPT]),
            seconds=round(time.monotonic() - began_s, 1),
            claims_ranges=of.ranges is not None,
            together=tally.together,
        )


@contextmanager
def running_bed(lanes: int = LANES) -> Iterator[Bed]:
    """Give a cluster for runs; the folders of runs that violate something stay."""
    folder = Path(tempfile.mkdtemp(prefix="marshal-faults-"))
    with faulty_kafka(folder / "kafka", links=lanes * MEMBERS) as cluster:
        yield Bed(cluster, lanes, folder, soaking.code_version(soaking.ALL_CODE))
    if not any(folder.iterdir()):
        folder.rmdir()


def table(rows: Sequence[Row]) -> str:
    """Give the results as a markdown table; a run counts in the line of each of its faults."""
    lines = [
        "| fault | runs | by ranges | takeovers | median, longest | refused commits | lost | done twice | violations |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_line(kind.value, [row for row in rows if kind.value in row.faults]) for kind in KINDS]
    lines.append(_line("all runs", rows))
    dropped, repeated = sum(row.dropped for row in rows), sum(row.repeated for row in rows)
    commits = ", ".join(sorted({row.commit for row in rows}))
    lines.append("")
    lines.append(
        f"Of commit {commits}, in {sum(row.seconds for row in rows) / 60:,.0f} minutes of runs. As the modes allow, at "
        f"most once left out {dropped:,} messages and at least once processed {repeated:,} again."
    )
    lines.append(_together(rows))
    return "\n".join(lines)


def _together(rows: Sequence[Row]) -> str:
    """Say how much of the runs ranges were, and that several members did work on one partition."""
    together = [row.together for row in rows if row.claims_ranges]
    several, all_of_them = sum(count > 1 for count in together), sum(count == MEMBERS for count in together)
    return (
        f"In {len(together):,} runs members claimed ranges; in {several:,} of these several worked on one partition at "
        f"once, in {all_of_them:,} all {MEMBERS}."
    )


def _line(name: str, rows: Sequence[Row]) -> str:
    times_s = [time_ms / 1_000 for row in rows for time_ms in row.takeovers_ms]
    cells = (
        f"{len(rows):,}",
        f"{sum(row.claims_ranges for row in rows):,}",
        f"{len(times_s):,}",
        f"{median(times_s):.1f} s, {max(times_s):.1f} s" if times_s else "",
        f"{sum(row.refused_commits for row in rows):,}",
        f"{sum(row.lost for row in rows):,}",
        f"{sum(row.twice for row in rows):,}",
        f"{sum(bool(row.violations) for row in rows):,}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def report(row: Row, folder: Path) -> None:
    """Say what a run came to."""
    takeovers = f"{len(row.takeovers_ms)} takeovers" if row.takeovers_ms else "no takeover"
    ranges = f" by ranges ({row.together} at once)" if row.claims_ranges else ""
    print(
        f"seed {row.seed}: {row.mode}{ranges}, {', '.join(row.faults)}: {row.records} records, {takeovers}, "
        f"{row.refused_commits} refused commits, {row.seconds} s",
        flush=True,
    )
    for violation in row.violations[:MOST_SHOWN]:
        print(f"    VIOLATED {violation}")
    if len(row.violations) > MOST_SHOWN:
        print(f"    and {len(row.violations) - MOST_SHOWN} more")
    if row.violations:
        print(f"    python -m tests.faults --seed {row.seed}    # left in {folder / f'seed{row.seed}'}", flush=True)


def soak(seeds: Sequence[int], lanes: int, results: Path | None) -> list[Row]:
    """Run what `results` does not have yet for this commit."""
    rows = soaking.rows_of(Row, results) if results else []
    at = soaking.code_version(soaking.ALL_CODE)
    done = {row.seed: row for row in rows if row.commit == at}
    due = [seed for seed in seeds if seed not in done]
    found = [done[seed] for seed in seeds if seed in done]
    if not due:
        return found
    with running_bed(lanes) as bed:
        for start in range(0, len(due), BLOCK):
            for row in bed.rows(due[start : start + BLOCK]):
                report(row, bed.folder)
                found.append(row)
                if results:
                    soaking.add_row(results, asdict(row))
    return found


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=len(KINDS))
    parser.add_argument("--lanes", type=int, default=LANES, help="runs at once, where brokers are not at fault")
    parser.add_argument("--results", type=Path, help="add finished runs to this file; leave out those in it")
    parser.add_argument("--table", type=Path, help="print what is in this file of a commit, by default the newest")
    parser.add_argument("--commit", help="that commit")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if options.table:
        print(table(soaking.of_one_commit(soaking.rows_of(Row, options.table), options.commit)))
        return 0
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    rows = soak(seeds, options.lanes, options.results)
    failed = sum(bool(row.violations) for row in rows)
    print(f"{len(rows)} runs, {sum(len(row.takeovers_ms) for row in rows)} takeovers, {failed} with violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
