"""A batch processed by a script that the run submits to Spark: the example, as its user runs it."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import dagster as dg
import psutil
import pytest

from marshal_dagster.errors import TopicMissing
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.spark.sinks import FileSink
from tests.real.spark_driver import MESSAGES, PARTITIONS

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_submit"


@pytest.fixture
def example(
    kafka: str, coordination_topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The example's code location, with the library of this checkout."""
    monkeypatch.setenv("MARSHAL_BOOTSTRAP_SERVERS", kafka)
    monkeypatch.setenv("ORDERS_COORDINATION_TOPIC", coordination_topic)
    monkeypatch.setenv("ORDERS_OUTPUT", str(tmp_path / "output"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(EXAMPLE)
    yield importlib.import_module("submitting")
    del sys.modules["submitting"]


@pytest.mark.filterwarnings("ignore::dagster.PreviewWarning")  # Pipes' own, of its readers
def test_the_example_parses_each_order_once(
    example: ModuleType, topics: Topics, fill: Callable[[str, int, int], None]
) -> None:
    """Two runs: one submits a script, which writes each row once; the next has nothing to do."""
    with suppress(TopicMissing):  # another test's
        topics.delete("orders")
    topics.create("orders", PARTITIONS, 1)
    fill("orders", PARTITIONS, MESSAGES)
    job, before = example.defs.resolve_job_def("orders"), spark_processes()
    with dg.DagsterInstance.ephemeral() as instance:
        first = job.execute_in_process(instance=instance)
        assert first.success
        written = FileSink(example.OUTPUT).committed_files()
        assert len({name for path in written for name in rows_of(path)}) == MESSAGES
        (output,) = [each for each in first.all_events if each.is_successful_output]
        assert output.step_output_data.metadata["ranges"].value == PARTITIONS
        lines = [each.message for each in instance.all_logs(first.run_id)]
        assert any(f"{PARTITIONS} ranges were written" in line for line in lines)
        assert job.execute_in_process(instance=instance).success
    assert FileSink(example.OUTPUT).committed_files() == written
    assert spark_processes() == before


def spark_processes() -> set[psutil.Process]:
    """The processes of Spark that this one has started."""
    return {each for each in psutil.Process().children() if "spark" in " ".join(each.cmdline())}


def rows_of(path: Path) -> list[str]:
    """The lines of a file."""
    return path.read_text().splitlines()
