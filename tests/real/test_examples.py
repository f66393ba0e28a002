"""The tutorial's files, run as a reader runs them. `test_component` has the component's example."""

import importlib
import re
import runpy
import shlex
import shutil
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import dagster as dg
import pytest

import marshal_dagster
from marshal_dagster.cli.exit_codes import ExitCode
from marshal_dagster.cli.main import run
from marshal_dagster.coordination import rationalizer_cache
from marshal_dagster.kafka.admin_client import Topics
from tests.session_settings import session_settings
from tests.topics import reserved

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorial"


@pytest.fixture
def shop(
    kafka: str, topics: Topics, spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The tutorial's code location in its own folder, after the tutorial's first commands.

    `totals.py` starts a session, which is the suite's. What it sets there does not remain.
    """
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.syspath_prepend(shutil.copytree(TUTORIAL, tmp_path / "shop"))
    monkeypatch.setattr(rationalizer_cache, "_places", OrderedDict())  # as in a new process
    with (
        reserved(topics, "__marshal"),
        reserved(topics, "orders"),
        session_settings(spark, {"spark.sql.shuffle.partitions": "2"}),
    ):
        assert run(["topic", "create"]) == 0
        yield importlib.import_module("shop")
    del sys.modules["shop"]


def write_orders(shop: ModuleType) -> None:
    """Run `orders.py`."""
    runpy.run_path(str(Path(str(shop.__file__)).with_name("orders.py")))


def totals(shop: ModuleType, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Run `totals.py` and return the table that it prints, which must have a row for each shop."""
    capsys.readouterr()
    runpy.run_path(str(Path(str(shop.__file__)).with_name("totals.py")))
    printed = capsys.readouterr().out
    orders = {name: int(number) for name, number in re.findall(r"\| *(\w+)\| *(\d+)\|", printed)}
    assert orders.keys() == {"north", "south", "west"}, printed
    return orders


def test_the_tutorial_counts_each_order_once(
    shop: ModuleType, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run waits with an open plan, which another run redoes if it dies then, and the totals are correct."""
    monkeypatch.setattr("dagster_pyspark.resources.spark_session_from_config", lambda _: spark)
    definitions: dg.Definitions = shop.defs
    job, redo = map(definitions.resolve_job_def, ("orders_per_shop_job", "reprocess_orders_per_shop"))
    sensor = definitions.resolve_sensor_def("shops_stale_claims")
    resources = {"rationalizer": (definitions.resources or {})["rationalizer"]}
    with dg.DagsterInstance.ephemeral() as instance:
        write_orders(shop)
        monkeypatch.setattr(shop, "time", SimpleNamespace(sleep=lambda _: None))
        assert job.execute_in_process(instance=instance).success
        write_orders(shop)
        capsys.readouterr()
        monkeypatch.setattr(shop, "time", SimpleNamespace(sleep=lambda _: run(["status"]) / 0))
        assert not job.execute_in_process(instance=instance, raise_on_error=False).success
        assert re.search(r"^orders/0 .* 15000 +20000 ", capsys.readouterr().out, re.MULTILINE)
        monkeypatch.setattr(shop, "time", SimpleNamespace(sleep=lambda _: None))
        requested = sensor(dg.build_sensor_context(instance=instance, resources=resources))
        assert isinstance(requested, dg.SensorResult)
        (request,) = requested.run_requests or []
        assert redo.execute_in_process(instance=instance, run_config=request.run_config).success
        assert sum(totals(shop, capsys).values()) == 80_000
        assert job.execute_in_process(instance=instance).success
        assert totals(shop, capsys) == {"north": 40_000, "south": 40_000, "west": 40_000}


def test_a_bug_ends_in_a_red_run_that_says_what_to_do(
    shop: ModuleType, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six runs fail.

    A seventh fails although the bug is fixed, and names a command. After that command a run succeeds.
    """
    monkeypatch.setattr("dagster_pyspark.resources.spark_session_from_config", lambda _: spark)
    job = shop.defs.resolve_job_def("orders_per_shop_job")
    with dg.DagsterInstance.ephemeral() as instance:
        write_orders(shop)
        monkeypatch.setattr(shop, "time", SimpleNamespace(sleep=lambda _: 1 / 0))
        for _ in range(6):
            assert "ZeroDivisionError" in error_of(job.execute_in_process(instance=instance, raise_on_error=False))
        monkeypatch.setattr(shop, "time", SimpleNamespace(sleep=lambda _: None))
        error = error_of(job.execute_in_process(instance=instance, raise_on_error=False))
        named = r"orders/(.) \[\d+, \d+\) of group .shops. was tried 6 times, last in run .*?: ZeroDivision"
        assert re.findall(named, error.splitlines()[0]) == ["0", "1", "2", "3"]
        found = re.search(r"Fix the cause and run `marshal-dagster (.*?)`", error)
        assert found is not None
        assert run(["status", "--check"]) == ExitCode.PROBLEMS
        assert run([*shlex.split(found[1]), "--yes"]) == 0
        assert run(["status", "--check"]) == 0
        assert job.execute_in_process(instance=instance).success
        assert totals(shop, capsys) == {"north": 20_000, "south": 20_000, "west": 20_000}


def error_of(result: dg.ExecuteInProcessResult) -> str:
    """Return the error of a failed run."""
    assert not result.success
    failed = result.failure_data_for_node("orders_per_shop")
    assert failed is not None
    assert failed.error is not None
    return failed.error.to_string()


def test_the_script_without_dagster_counts_each_order_once(
    kafka: str, topics: Topics, spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls process what is there when they start, and nothing twice."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("ORDERS_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setattr(marshal_dagster, "start_session", lambda _: spark)
    script = TUTORIAL.parent / "plain_python" / "count_orders.py"
    with reserved(topics, "__marshal"), reserved(topics, "orders"):
        assert run(["topic", "create"]) == 0
        for _ in range(2):
            runpy.run_path(str(TUTORIAL / "orders.py"))
            assert runpy.run_path(str(script))["count_orders"]() >= 1
        rows = marshal_dagster.FileSink(tmp_path / "output").read(spark).groupBy("shop").sum("count").collect()
    assert {row[0]: row[1] for row in rows} == dict.fromkeys(("north", "south", "west"), 40_000)
