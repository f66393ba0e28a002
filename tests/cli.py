"""Run the command line in this process or in a new one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from marshal_dagster.cli.main import run
from tests.conditions import WITHIN_S
from tests.json_schemas import check_json

REPOSITORY = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "marshal_dagster.cli")
_COLOURS = {"NO_COLOR", "FORCE_COLOR"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:  # noqa: ANN401 - whatever JSON holds
        """Return the whole output as one JSON value, without `format_version`, which `check_json` has checked."""
        value = json.loads(self.out)
        if isinstance(value, dict):
            value.pop("format_version", None)
        return value

    @property
    def lines(self) -> list[Any]:
        """Return the standard output as JSON values, one for each line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> str:
        """Return the one line on standard error."""
        (line,) = self.err.splitlines()
        return line


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Answer:
    """Run a command line in this process."""
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    check_json([str(argument) for argument in arguments], captured.out)
    return Answer(code, captured.out, captured.err)


def start(*arguments: str | Path, given: str | bytes = b"", environment: dict[str, str] | None = None) -> Answer:
    """Run a command line in a new process, which gets no MARSHAL_ variables except those in `environment`."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=given.encode() if isinstance(given, str) else given,
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
        env=environ(environment),
        cwd=REPOSITORY,
    )
    check_json([str(argument) for argument in arguments], done.stdout.decode())
    return Answer(done.returncode, done.stdout.decode(), done.stderr.decode())


def environ(more: dict[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment without the variables that configure the command line, and with `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "MARSHAL_CACHE" or not (name.startswith("MARSHAL_") or name in _COLOURS)
    }
    return kept | (more or {})


def stored(records: Sequence[tuple[int, int, int, str | None]]) -> str:
    """Write (coordination partition, offset, timestamp in ms, value) records as a stored log."""
    rows = [dict(zip(("partition", "offset", "timestamp", "value"), record, strict=True)) for record in records]
    return "".join(json.dumps(row) + "\n" for row in rows)
