"""No test waits for the disk."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy


def test_no_database_of_a_test_waits_for_the_disk(tmp_path: Path) -> None:
    """Connections to SQLite leave the time of writing to the operating system, those of SQLAlchemy too."""
    path = tmp_path / "rows.db"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (0,)
    with sqlalchemy.create_engine(f"sqlite:///{path}").connect() as engine:
        assert engine.exec_driver_sql("PRAGMA synchronous").fetchone() == (0,)


def test_a_file_that_is_no_database_is_reported_at_its_first_use(tmp_path: Path) -> None:
    """Connecting raises no error that it would not raise outside of the tests."""
    path = tmp_path / "text"
    path.write_text("text" * 1_000)
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.DatabaseError, match="not a database"):
        connection.execute("SELECT * FROM rows")


def test_no_file_of_a_test_waits_for_the_disk() -> None:
    """`os.fsync` does nothing, so it accepts even what is no open file."""
    os.fsync(-1)
