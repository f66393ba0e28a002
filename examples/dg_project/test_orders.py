"""Test of the component `orders`. It needs no Kafka; Spark starts on this machine."""

from pathlib import Path

import dagster as dg
import pytest

from marshal_dagster.testing import run_in_memory


@pytest.mark.parametrize("crash_at", [None, "after_write"])
def test_each_order_is_counted_once(crash_at: str | None) -> None:
    """A run that dies after its write loses and repeats nothing."""
    defs = dg.load_from_defs_folder(path_within_project=Path(__file__))
    job = defs.resolve_job_def("orders_job")
    records = {"orders": ["north", "south", "north"]}
    result = run_in_memory(job, records, crash_at=crash_at)
    counts = {row["shop"]: row["count"] for row in result.rows}
    assert counts == {"north": 2, "south": 1}
