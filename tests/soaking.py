"""Results that add up over several sittings: a file of JSON lines, each a row with the commit that it was had on."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

TOP: Final = Path(__file__).parents[1]
ALL_CODE: Final = ("marshal_dagster", "tests/*.py")
"""The library and all tests, as git names them; a results file may lie beside."""


def code_version(paths: Sequence[str]) -> str:
    """Give the last commit that changed `paths`, marked when there are changes since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=TOP, capture_output=True, text=True, check=True).stdout.strip()

    changes = git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    return git("log", "-1", "--format=%h", "--abbrev=12", "--", *paths) + ("-changed" if changes else "")


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Read a results file; one that is not there yet has no rows."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def add_row(results: Path, row: Mapping[str, Any]) -> None:
    """Add a row."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
