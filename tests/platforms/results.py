"""The rows of `tests/results/platforms.jsonl`, one for each run with a version."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.soak_results import rows_of

RESULTS: Final = Path(__file__).parents[1] / "results" / "platforms.jsonl"


@dataclass(frozen=True, slots=True)
class PlatformRow:
    """The result of the tests with one version."""

    kind: str
    """What the version is of: spark, tutorial, python, dagster or broker."""
    version: str
    """The version of the target, such as `3.5`."""
    installed: str
    """The exact version that ran, such as `3.5.9`."""
    commit: str
    passed: int
    failed: int
    seconds: float
    """The time of the tests, without the setup of the environment."""
    scala: str = ""
    python: str = ""
    is_short: bool = False
    failures: tuple[str, ...] = ()
    """The names of the tests that failed."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What was not tested, with the reason."""
    files: dict[str, Any] = field(default_factory=dict)
    """The fields of `Counts` for each file that was a run of its own."""


def newest_rows(results: Path = RESULTS) -> dict[tuple[str, str], PlatformRow]:
    """Return the last row of each version; a whole run counts before a short one of the same commit."""
    newest: dict[tuple[str, str], PlatformRow] = {}
    for row in rows_of(PlatformRow, results):
        key = row.kind, row.version
        before = newest.get(key)
        if before is None or before.is_short or not row.is_short or before.commit != row.commit:
            newest[key] = row
    return newest
