"""The sink keeps the promise of effectively once."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from marshal_dagster.sinks.conformance import CASES, Case, Row, Target
from sqlite_sink import TABLES, SqliteSink


class SqliteOutput(Target):
    """A file of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "output.db")

    def sink(self) -> SqliteSink:
        """Open it as another process would."""
        return SqliteSink(self.path)

    def shared_sink(self) -> SqliteSink:
        """Open it as a process of several groups would."""
        return SqliteSink(self.path, shared_by_groups=True)

    def rows(self) -> list[Row]:
        """Read the table as it is."""
        with closing(sqlite3.connect(self.path)) as database:
            database.executescript(TABLES)
            return database.execute('SELECT partition, "offset", value FROM result').fetchall()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sink_conforms(case: Case, tmp_path: Path) -> None:
    """Every case of the kit holds."""
    case.check(SqliteOutput(tmp_path))
