"""No test waits for the disk."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy

from tests.fast.conftest import ENOUGH_BYTES, may_have_files


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


@pytest.mark.parametrize(
    ("flags", "free_bytes", "is_suitable"),
    [(0, ENOUGH_BYTES, True), (os.ST_NOEXEC, ENOUGH_BYTES, False), (0, ENOUGH_BYTES - 1, False)],
)
def test_files_are_in_memory_only_where_scripts_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int, free_bytes: int, is_suitable: bool
) -> None:
    """Docker forbids programs in `/dev/shm`, and some tests write and run one. Often there is little room too."""
    found = SimpleNamespace(f_flag=flags, f_frsize=1, f_bavail=free_bytes)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    assert may_have_files(tmp_path) is is_suitable
    assert not may_have_files(tmp_path / "missing")
