"""Check that the sink provides effectively-once delivery."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from marshal_dagster.sinks.conformance import CASES, Case, Row, Target
from sqlite_sink import TABLES, SqliteSink


class SqliteOutput(Target):
    """Output in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "output.db")

    def sink(self) -> SqliteSink:
        """Open it like another process."""
        return SqliteSink(self.path)

    def shared_sink(self) -> SqliteSink:
        """Open it like a process whose output several groups share."""
        return SqliteSink(self.path, shared_by_groups=True)

    def rows(self) -> list[Row]:
        """Read all rows of the table."""
        with closing(sqlite3.connect(self.path)) as database:
            database.executescript(TABLES)
            return database.execute(
                'SELECT partition, "offset", value FROM result'
            ).fetchall()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sink_conforms(case: Case, tmp_path: Path) -> None:
    """Each case of the conformance kit passes."""
    case.check(SqliteOutput(tmp_path))
