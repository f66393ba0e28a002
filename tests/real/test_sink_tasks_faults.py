"""The database is restarted, and processes are stopped, while Spark's tasks write the rows of an output."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
from pyspark.sql import functions as f

from marshal_dagster.errors import SinkRejectedError, UnavailableError
from marshal_dagster.sinks import PostgresSink, WriteResult
from marshal_dagster.sinks.conformance.target import never, part
from marshal_dagster.sinks.database.task_rows import PREFIX
from tests.conditions import WITHIN_S, wait_until
from tests.outbox_faults.cluster import FaultyPostgres, faulty_postgres
from tests.session_settings import session_settings
from tests.sink_outputs import TABLE, PostgresOutput, hook, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RANGES = [part(0, 0, 10, epoch=1), part(1, 0, 10, epoch=1)]
LATER = [part(0, 0, 10, epoch=2), part(1, 0, 10, epoch=2)]
"""The same ranges, claimed by another run."""
ROWS = sorted((partition, offset, f"message {offset}") for partition in range(2) for offset in range(10))
MANY = 10_000
"""The rows of each partition of which a task copies the first ones while it computes the others."""
PADDING = " ".ljust(1_000, "x")
"""The end of each of these rows, so that those before the middle are more than a task collects before it copies."""
MANY_ROWS = [(partition, offset, f"message {offset}{PADDING}") for partition in range(2) for offset in range(MANY)]
MANY_RANGES = [part(0, 0, MANY, epoch=1), part(1, 0, MANY, epoch=1)]
MANY_LATER = [part(0, 0, MANY, epoch=2), part(1, 0, MANY, epoch=2)]


@pytest.fixture
def frame(spark: "SparkSession") -> "DataFrame":
    """The rows of two partitions, in two tasks."""
    return rows_of(spark, 10)


def rows_of(spark: "SparkSession", count: int, padding: str = "") -> "DataFrame":
    """Return the rows of two partitions with this number of offsets."""
    rows = spark.range(0, 2 * count, numPartitions=2)
    return rows.selectExpr(
        "int(id % 2) partition", "id div 2 offset", f"concat('message ', id div 2, '{padding}') value"
    )


@pytest.fixture
def many_rows(spark: "SparkSession") -> Iterator["DataFrame"]:
    """Rows that tasks copy in many pieces."""
    with session_settings(spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": "500"}):
        yield rows_of(spark, MANY, PADDING)


@pytest.fixture(scope="module")
def database() -> Iterator[FaultyPostgres]:
    """A server that tests restart."""
    with faulty_postgres(links=0) as database:
        yield database


class Output:
    """A table in a schema of its own."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.table = PostgresOutput(dsn, own_schema())

    def sink(self) -> PostgresSink:
        """Return a sink, as another process opens it."""
        return PostgresSink(self.dsn, TABLE, schema=self.table.schema)

    def staging_tables(self) -> list[str]:
        """Return the names of the staging tables."""
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, %s)",
                (self.table.schema, PREFIX),
            )
            return [name for (name,) in found]

    def is_copying(self) -> bool:
        """Return whether one task has copied all its rows, and the other one some of them."""
        with psycopg.connect(self.dsn) as connection:
            copies = connection.execute("SELECT tuples_processed FROM pg_stat_progress_copy").fetchall()
        return len(copies) == 1 and copies[0][0] > 0 and len(self.staging_tables()) == 1


class Pause:
    """A column whose computation waits once, in the middle of a task, until the test lets it continue."""

    def __init__(self, folder: Path) -> None:
        self._begun, self._may_continue = folder / "begun", folder / "may continue"

    def column(self, act: Callable[[], None] = lambda: None) -> Any:  # noqa: ANN401 - columns of either kind
        """Return the column. `act` is called instead of waiting, if it is given."""
        begun, may_continue = str(self._begun), str(self._may_continue)
        waits = act.__name__ == "<lambda>"

        def compute(value: str) -> str:
            import os
            import time

            if value.startswith("message 4000 "):
                try:
                    with open(begun, "x") as file:  # noqa: PTH123 - the code runs without this module's imports
                        file.write(str(os.getpid()))
                except FileExistsError:
                    return value
                act()
                while waits and not os.path.exists(may_continue):  # noqa: PTH110
                    time.sleep(0.01)
            return value

        compute.__module__ = act.__module__ = "__main__"
        return f.udf(compute, "string", useArrow=False)("value")

    def wait(self, output: "Output", is_over: Callable[[], object]) -> int:
        """Wait until a task that has copied rows computes the column. Return the id of the process that computes it."""
        wait_until(lambda: (self._begun.exists() and self._begun.read_text()) or is_over(), "the task is at work")
        wait_until(lambda: output.is_copying() or is_over(), "the task copies")
        return int(self._begun.read_text())

    def go_on(self) -> None:
        """Let the task continue."""
        self._may_continue.touch()


class Writing:
    """A write in another thread."""

    def __init__(self, sink: PostgresSink, frame: "DataFrame") -> None:
        self.found: list[WriteResult | Exception] = []
        self._thread = threading.Thread(target=self._write, args=(sink, frame))
        self._thread.start()

    def _write(self, sink: PostgresSink, frame: "DataFrame") -> None:
        try:
            self.found.append(sink.write(frame, MANY_RANGES, never))
        except Exception as error:  # noqa: BLE001 - the test examines it
            self.found.append(error)

    def result(self) -> WriteResult | Exception:
        """Wait for the result or the error."""
        self._thread.join(WITHIN_S)
        return self.found[0]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_database_is_restarted_while_tasks_copy(
    database: FaultyPostgres, many_rows: "DataFrame", tmp_path: Path, mode: str
) -> None:
    """The batch fails, nothing is written, and the next batch writes each row once."""
    output, pause = Output(database.dsn()), Pause(tmp_path)
    writing = Writing(output.sink(), many_rows.withColumn("value", pause.column()))
    pause.wait(output, lambda: writing.found)
    database.stop(mode)
    database.start()
    pause.go_on()

    assert isinstance(writing.result(), UnavailableError), writing.found
    assert output.table.rows() == []
    assert set(output.sink().write(many_rows, MANY_LATER, never).taken) == set(MANY_LATER)
    assert output.table.rows() == MANY_ROWS
    assert output.staging_tables() == []


@pytest.mark.parametrize(
    ("step", "mode", "error"),
    [
        ("evaluated", "fast", None),
        ("evaluated", "immediate", UnavailableError),
        ("moved", "fast", UnavailableError),
        ("set", "immediate", UnavailableError),
        ("committed", "immediate", None),
    ],
)
def test_the_database_is_restarted_around_the_move(
    database: FaultyPostgres, frame: "DataFrame", step: str, mode: str, error: type[Exception] | None
) -> None:
    """All rows are moved or none. A crash empties the staging table, and a shut-down keeps it."""
    output = Output(database.dsn())
    sink = output.sink()
    seen: list[str] = []

    def restart(now: str) -> None:
        seen.append(now)
        if now == step and (step == "evaluated" or "moved" in seen) and "restarted" not in seen:
            seen.append("restarted")
            database.stop(mode)
            database.start()

    hook(sink, restart)
    if error is None:
        assert set(sink.write(frame, RANGES, never).taken) == set(RANGES)
    else:
        with pytest.raises(error):
            sink.write(frame, RANGES, never)
    assert "restarted" in seen
    assert output.table.rows() == ([] if error else ROWS)
    assert len(output.sink().write(frame, LATER, never).taken) == (2 if error else 0)
    assert output.table.rows() == ROWS
    assert output.staging_tables() == []


def test_a_task_that_is_stopped_and_taken_over_adds_nothing(
    postgres: str, many_rows: "DataFrame", tmp_path: Path
) -> None:
    """A process of a task sleeps in the middle of its copy. Another run writes the ranges, then it continues."""
    output, pause = Output(postgres), Pause(tmp_path)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    writing = Writing(output.sink(), many_rows.withColumn("value", pause.column(stop)))
    process = psutil.Process(pause.wait(output, lambda: writing.found))
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the process of the task is stopped")
    assert set(output.sink().write(many_rows, MANY_LATER, never).taken) == set(MANY_LATER)
    assert output.staging_tables(), "the table of another task, which stays because its run still holds its lock"
    process.resume()

    assert isinstance(writing.result(), SinkRejectedError), writing.found
    assert output.table.rows() == MANY_ROWS
    assert output.staging_tables() == []


def test_a_run_whose_lock_is_lost_and_whose_staging_table_is_dropped_adds_nothing(
    postgres: str, frame: "DataFrame"
) -> None:
    """The server ends the connection that holds the lock, and the next run drops the table before the move."""
    output = Output(postgres)
    sink = output.sink()
    others: list[WriteResult] = []

    def lose(step: str) -> None:
        if step != "evaluated":
            return
        tables = output.staging_tables()
        with psycopg.connect(postgres, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND "
                "(classid::bigint << 32) + objid::bigint = hashtextextended(%s, 0)",
                (tables[0].rpartition("_")[0],),
            )
        others.append(output.sink().write(frame.where("partition = 1"), LATER[1:], never))
        assert not set(tables) & set(output.staging_tables())

    hook(sink, lose)
    with pytest.raises(UnavailableError, match="the staging table of this batch was dropped or emptied"):
        sink.write(frame.where("partition = 0"), RANGES[:1], never)
    assert output.table.rows() == [row for row in ROWS if row[0] == 1]
