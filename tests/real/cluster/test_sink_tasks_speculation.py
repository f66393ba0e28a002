"""Spark runs a slow task of a sink twice at the same time (`spark.speculation`): each row is there once."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import pytest
from pyspark.sql import functions as f

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks import KafkaSink, PostgresSink
from marshal_dagster.sinks.conformance.target import never, part
from marshal_dagster.sinks.kafka import tasks
from tests.kafka_outputs import KafkaOutput
from tests.real.spark_cluster import SparkCluster
from tests.real.spark_driver import Driver, Where, session
from tests.session_settings import QUICK_PLANS
from tests.sink_outputs import TABLE, PostgresOutput, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SLOW_AFTER_S: Final = 9
"""Spark starts a second process of a task that takes so long."""
RANGES: Final = [part(0, 0, 10), part(1, 0, 10)]
LATER: Final = [part(0, 10, 20), part(1, 10, 20)]
ROWS: Final = [(partition, offset, f"message {offset}") for partition in range(2) for offset in range(10)]
SETTINGS: Final = QUICK_PLANS | {
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.minTaskRuntime": f"{SLOW_AFTER_S}s",
    "spark.speculation.task.duration.threshold": f"{SLOW_AFTER_S}s",  # for a job of one task
    "spark.python.task.killTimeout": "60s",  # the slower process of a task works on after the job
}


@pytest.fixture
def where(cluster: SparkCluster, delta: dict[str, str]) -> Where:
    """The session on the cluster, whose workers are on two hosts."""
    return Where(cluster.master, tuple((SETTINGS | delta).items()))


def rows_of(where: Where, order: str) -> "DataFrame":
    """Return the rows of two partitions, in two tasks and in this order."""
    rows = session(where).range(20, numPartitions=2)
    return rows.selectExpr("int(id div 10) partition", f"{order} offset").selectExpr(
        "*", "concat('message ', offset) value", "concat(partition, '/', offset) key"
    )


def waiting(path: str) -> None:
    """Wait for a file."""
    import os
    import time

    while not os.path.exists(path):  # noqa: PTH110 - the code runs without this module's imports
        time.sleep(0.01)


def leave_over(sink: KafkaSink, folder: Path) -> None:
    """Let the first process of the task wait before it begins a transaction, until that of the next run is open."""
    leftover, second_run, is_fenced = (str(folder / name) for name in ("leftover", "second run", "is fenced"))
    driver, prefix, key_of, wait_for = os.getpid(), sink._id_prefix, sink._key, waiting
    at_work: list[int] = []

    def key(wanted: ClaimedRange) -> str:
        """Wait before the transaction of a task begins, which needs its id."""
        import contextlib
        import os

        if os.getpid() != driver:
            at_work.append(wanted.partition)
            with contextlib.suppress(FileExistsError):
                if wanted.partition == 1:
                    os.symlink(str(os.getpid()), leftover)  # noqa: PTH211 - made with its text in one step
                    wait_for(second_run)
        return f"{prefix}{wanted.group}/{wanted.topic}/{wanted.partition}"

    def reached(step: str) -> None:
        import os

        if os.getpid() == driver:
            return
        is_leftover = os.path.islink(leftover) and os.readlink(leftover) == str(os.getpid())  # noqa: PTH114, PTH115
        if step == "fenced" and is_leftover:
            open(is_fenced, "x").close()  # noqa: PTH123
        elif step == "sent" and 1 in at_work and not is_leftover:
            open(second_run, "w").close()  # noqa: PTH123
            wait_for(is_fenced)

    waiting.__module__ = key.__module__ = reached.__module__ = "__main__"
    assert key(RANGES[0]) == key_of(RANGES[0])
    changed: Any = sink
    changed._key, changed._reached = key, reached


def write_to_kafka(where: Where, servers: str, topic: str, folder: Path) -> list[list[str]]:
    """Write rows that are not in order, so that the task runs twice. Return the outcomes of each run.

    In the first run Spark starts a second process of the task, whose first one waits, and uses its result.
    """
    sink = KafkaSink(KafkaConnection(bootstrap_servers=servers, timeout_s=4), topic, transaction_timeout_s=5)
    leave_over(sink, folder)
    runs: list[list[str]] = []
    run = tasks._run

    def noted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the function
        outcomes = run(*arguments, **options)
        runs.append(sorted(outcomes.values()))
        return outcomes

    with patch.object(tasks, "_run", noted):
        written = sink.write(rows_of(where, "9 - id % 10"), RANGES, never)
    assert set(written.taken) == set(RANGES)
    return runs


def test_a_process_that_is_left_over_fences_the_one_that_writes_a_range_of_kafka(
    driver: Driver, where: Where, kafka: str, connection: KafkaConnection, tmp_path: Path
) -> None:
    """The range is written once more, and the batch succeeds."""
    output = KafkaOutput(connection)
    runs = driver.call(write_to_kafka, where, kafka, output.topic, tmp_path)
    assert runs == [["unordered", "unordered"], ["fenced", "taken"], ["taken"]]
    assert output.rows() == ROWS


def write_to_postgres(where: Where, output: PostgresOutput, folder: Path) -> int:
    """Write rows of which the first process of a task waits in the middle. Return how many processes had them."""
    path = str(folder)

    def compute(value: str) -> str:
        import os
        import time

        if value == "message 15":
            attempts = [name for name in os.listdir(path) if name.startswith("attempt")]  # noqa: PTH208
            open(f"{path}/attempt {os.getpid()}", "w").close()  # noqa: PTH123
            while not attempts and not os.path.exists(f"{path}/is over"):  # noqa: PTH110
                time.sleep(0.01)
        return value

    compute.__module__ = "__main__"
    slow = f.udf(compute, "string", useArrow=False)
    sink = PostgresSink(output.dsn, TABLE, schema=output.schema)
    rows = rows_of(where, "id % 10").drop("key")
    sink.write(rows.withColumn("value", slow(f.expr("concat('message ', offset + 10 * partition)"))), RANGES, never)
    processes = len(list(folder.glob("attempt*")))
    (folder / "is over").touch()
    sink.write(rows.withColumn("offset", f.col("offset") + 10), LATER, never)
    return processes


def test_rows_of_the_slower_process_of_a_task_are_not_moved_to_a_table(
    driver: Driver, where: Where, postgres: str, tmp_path: Path
) -> None:
    """Both processes copy the rows of the task. Those of the one whose result Spark uses are moved."""
    output = PostgresOutput(postgres, own_schema())
    assert driver.call(write_to_postgres, where, output, tmp_path) == 2
    expected = [(partition, offset, f"message {offset + 10 * partition}") for partition, offset, _ in ROWS]
    later = [(partition, offset + 10, text) for partition, offset, text in ROWS]
    assert output.rows() == sorted([*expected, *later])
