"""The files of the tutorial on PostgreSQL, run as its page runs them, with the process that kills itself."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from marshal_dagster.cli.main import run as marshal
from marshal_dagster.kafka.admin_client import Topics
from tests.conditions import WITHIN_S, wait_until
from tests.topics import reserved

EXAMPLE = Path(__file__).parents[2] / "examples" / "postgres"
BATCH, ORDERS = 3_000, 12_000


def run(folder: Path, *arguments: str, crash: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a script or a module with this Python, in a folder."""
    environment = os.environ | ({"CRASH": "1"} if crash else {})
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False
    )


def execute(folder: Path, job: str, *, crash: bool = False) -> int:
    """Execute a job of the code location, and return the exit code of its process."""
    location = str(EXAMPLE / "shop_orders.py")
    return run(folder, "-m", "dagster", "job", "execute", "-f", location, "-j", job, crash=crash).returncode


def test_each_order_is_a_row_and_an_event_once_although_a_run_is_killed(
    kafka: str, topics: Topics, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run dies after PostgreSQL's commit and before Kafka's. The second run repeats no row and no event."""
    (tmp_path / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    for name, value in (("MARSHAL_BOOTSTRAP_SERVERS", kafka), ("SHOP_DSN", database), ("DAGSTER_HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with (
        reserved(topics, "__marshal"),
        reserved(topics, "orders"),
        reserved(topics, "order-events"),
        psycopg.connect(database, autocommit=True) as connection,
    ):

        def count(what: str) -> tuple[int, ...]:
            """Return the numbers of a query, whose text is a constant of this test."""
            (row,) = connection.execute(f"SELECT {what}".encode()).fetchall()
            return tuple(row)

        assert marshal(["topic", "create"]) == 0
        created = run(tmp_path, str(EXAMPLE / "create_tables.py"))
        assert "12,000 orders written" in created.stdout, created.stderr
        assert execute(tmp_path, "shop_orders_job", crash=True) == -signal.SIGKILL
        assert count("count(*) FROM shop_orders") == (BATCH,)
        assert count("count(*) FROM outbox") == (BATCH,)

        def is_drained() -> bool:
            """Start runs until one finds the dead run's claims stale, which takes four seconds."""
            return execute(tmp_path, "shop_orders_job") == 0 and count("count(*) FROM shop_orders") == (ORDERS,)

        wait_until(is_drained, "a run has taken over, and the topic is drained")
        different = "count(DISTINCT (kafka_partition, kafka_offset))"
        assert count(f"count(*), {different}, sum(amount) FROM shop_orders") == (ORDERS, ORDERS, 54_000)
        assert execute(tmp_path, "drain_outbox") == 0
        assert run(tmp_path, str(EXAMPLE / "events.py")).stdout == "12,000 events, 12,000 different ones\n"
