"""The fuzz targets."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.fuzz import coordinator, election, notes, parser, snapshots, world

CORPUS: Final = Path(__file__).parent / "corpus"
TARGETS: Final[Mapping[str, Callable[[bytes], int]]] = {
    "parser": parser.check,
    "world": world.check,
    "snapshots": snapshots.check,
    "notes": notes.check,
    "coordinator": coordinator.check,
    "election": election.check,
}
"""Each takes bytes, returns the number of records that it read, and raises `PromiseError` when a promise is broken."""
