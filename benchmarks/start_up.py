"""The time that `import marshal_dagster` adds to `import dagster`, in each step of a run."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks import interpreters
from benchmarks.harness import Benchmark, Case, Goal, Measured, median, rounded
from benchmarks.machine import TOP

LIMIT_S: Final = 0.05
HEAVY: Final = ("confluent_kafka", "dagster_pyspark", "pandas", "psycopg", "pyarrow", "pyspark")
"""Modules that must not be loaded before they are needed."""

_PROGRAM: Final = """
import json, sys, time
def now(): return time.perf_counter(), time.process_time()
began = now()
import dagster
with_dagster = now()
import marshal_dagster
{then}
end = now()
loaded = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps([began, with_dagster, end, loaded]))
"""
_EVERY_NAME: Final = "[getattr(marshal_dagster, name) for name in getattr(marshal_dagster, '__all__', ())]"
_JOB_NAMES: Final = (
    "from marshal_dagster import ClaimerResource, FileSink, build_claimed_batch_job, build_claimed_batch_schedule"
)
_PROGRAMS: Final = {
    "import dagster, then marshal_dagster": "",
    "import dagster, then the names of a job with a sink": _JOB_NAMES,
    "import dagster, then every public name of marshal_dagster": _EVERY_NAME,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes: new processes for each case."""

    processes: int = 15


@dataclass(frozen=True, slots=True)
class Import:
    """Duration of the imports in one process: until Dagster and until everything was imported, in seconds.

    Each has its wall-clock time and its CPU time. `loaded` are the heavy modules that were loaded at the end.
    """

    dagster_s: float
    all_s: float
    dagster_cpu_s: float
    all_cpu_s: float
    loaded: tuple[str, ...]


def run(sizes: Sizes) -> Measured:
    """Import in new processes. Both times come from the same process, so that other load affects both."""
    with interpreters.environment() as environment:
        found = {name: _import_often(then, sizes.processes, environment) for name, then in _PROGRAMS.items()}
    return Measured(
        [
            Case(
                name,
                [one.all_s for one in imports],
                [one.dagster_s for one in imports],
                "s",
                Goal.DIFFERENCE_AT_MOST,
                LIMIT_S,
            )
            for name, imports in found.items()
        ],
        {
            "heavy_modules_loaded": {name: imports[-1].loaded for name, imports in found.items()},
            "cpu_seconds_added": {
                name: rounded(median([one.all_cpu_s - one.dagster_cpu_s for one in imports]))
                for name, imports in found.items()
            },
        },
    )


def _import_often(then: str, processes: int, environment: Mapping[str, str]) -> list[Import]:
    """Import in `processes` new processes, after one to warm up."""
    return [import_once(then, environment) for _ in range(processes + 1)][1:]


def import_once(then: str, environment: Mapping[str, str]) -> Import:
    """Import Dagster and the library and run `then`, in a new process."""
    program = _PROGRAM.format(then=then, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=TOP, env=environment, capture_output=True, text=True, check=True
    )
    (began_s, began_cpu_s), (dagster_s, dagster_cpu_s), (end_s, end_cpu_s), loaded = json.loads(done.stdout)
    return Import(
        dagster_s - began_s, end_s - began_s, dagster_cpu_s - began_cpu_s, end_cpu_s - began_cpu_s, tuple(loaded)
    )


BENCHMARK: Final = Benchmark("start_up", "what importing the library adds to importing Dagster", Sizes(), run)
