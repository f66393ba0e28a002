"""Check the demo's deployment before any of its processes starts."""

import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from demo import deployment
from marshal_dagster.kafka.connection import KafkaConnection


@pytest.mark.slow
def test_dagsters_databases_are_there_before_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one process creates a database, it has one version; several at the same time may create two or none."""
    monkeypatch.setattr(deployment, "Topics", lambda _: nullcontext(MagicMock()))
    monkeypatch.setattr(deployment, "create_coordination_topic", MagicMock())
    monkeypatch.setattr(deployment, "create_snapshot_topic", MagicMock())
    made = deployment.Deployment(tmp_path, KafkaConnection(bootstrap_servers="127.0.0.1:9"), {})

    made.prepare()

    found = {path.name: _versions(path) for path in made.home.rglob("*.db")}
    assert {"runs.db", "index.db", "schedules.db"} <= found.keys()
    assert all(len(versions) == 1 for versions in found.values())


def _versions(path: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT version_num FROM alembic_version").fetchall()
