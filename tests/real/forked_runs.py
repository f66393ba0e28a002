"""Run workers that are forked from a process that has already imported everything, and executed a run.

A run worker that starts by itself takes two to three seconds of a core for imports.
"""

import multiprocessing.forkserver
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from dagster._cli import cli

FORKED: Final = multiprocessing.get_context("forkserver")
ROOT: Final = Path(__file__).parents[2]


@contextmanager
def fork_server(*modules: str) -> Iterator[None]:
    """Start the process from which run workers are forked, with these modules imported. Stop it after the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        FORKED.set_forkserver_preload(["__main__", __name__, *modules, "tests.real.executor_preload"])
        multiprocessing.forkserver.ensure_running()
        yield
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined] # no public function stops it


def execute_job(environment: Mapping[str, str], location: Path, job: str, output: Path) -> None:
    """Run `dagster job execute` in this process, with its output appended to a file."""
    os.environ.update(environment)
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    cli(["job", "execute", "-f", str(location), "-j", job])
