"""Run workers and `dg`, forked from a process that has already imported everything, and executed a run.

A run worker that starts by itself takes two to three seconds of a core for imports, and `dg` five.
"""

import multiprocessing.forkserver
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
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
    _print_to(output, output)
    cli(["job", "execute", "-f", str(location), "-j", job])


def execute_dg(
    environment: Mapping[str, str], folder: Path, arguments: Sequence[str], printed: tuple[Path, Path]
) -> None:
    """Run `dg` in this process and in a project's folder, with its output and its errors in two files."""
    from dagster_dg_cli.cli import main

    for path in printed:
        path.unlink(missing_ok=True)
    os.environ.update(environment)
    os.chdir(folder)
    _print_to(*printed)
    sys.path.insert(0, str(folder))
    sys.argv = ["dg", *arguments]
    main()  # type: ignore[no-untyped-call]


def _print_to(*paths: Path) -> None:
    for stream, path in enumerate(paths, start=1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream)
