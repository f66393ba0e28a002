"""The check whether executors have the packages of a sink's tasks."""

import importlib.metadata
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark import executor_check
from marshal_dagster.spark.executor_check import check_executors


class Row:
    """A row of the probe's result."""

    def __init__(self, host: str, python: str, missing: str) -> None:
        self.host, self.python, self.missing = host, python, missing


class Session:
    """A session whose executors are this process, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.jobs, self._error = 0, error

    def range(self, _: int) -> "Session":
        """Return a frame."""
        return self

    def mapInArrow(self, function: Callable[[Any], Iterator[pa.RecordBatch]], _: str) -> "Session":  # noqa: N802 - Spark's name
        """Return the frame of the function's result."""
        self._rows = [Row(**row) for batch in function(iter(())) for row in batch.to_pylist()]
        return self

    def collect(self) -> list[Row]:
        """Run a job."""
        self.jobs += 1
        if self._error is not None:
            raise self._error
        return self._rows


def test_packages_that_are_there_are_looked_for_once() -> None:
    """A second batch of the session runs no job for it, unless it needs another package."""
    session: Any = Session()
    for packages in (["confluent_kafka"], ["confluent_kafka"], ["psycopg"], ["psycopg", "confluent_kafka"]):
        check_executors(session, packages, "wait")
    assert session.jobs == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, rf"on {socket.gethostname()} \({sys.executable}\) has no a_package and no another: install .* or wait"),
        (
            Exception("Lost task 0.3 in stage 1.0 (TID 4) (10.0.0.7 executor 2): No module named 'pandas'"),
            "the Python of the executors on 10.0.0.7 has no pandas: install",
        ),
        (Exception("Traceback:\nModuleNotFoundError: No module named 'pyarrow'\n"), "has no pyarrow: install"),
        (
            Exception("PYTHON_VERSION_MISMATCH"),
            r"\(PYTHON_VERSION_MISMATCH\): give them the driver's version of Python",
        ),
    ],
)
def test_what_is_missing_is_one_line(error: Exception | None, expected: str) -> None:
    """The line names a remedy. The next batch is checked again."""
    session: Any = Session(error)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=expected):
            check_executors(session, ["another", "a_package"], "wait")
    assert session.jobs == 2


def test_another_version_of_this_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that one version has pickled may not run with another one. A copy without a version is accepted."""
    there = importlib.metadata.version("marshal-dagster")
    monkeypatch.setattr(executor_check, "_own_version", lambda: "0.0.1")
    with pytest.raises(ConfigurationError, match=rf"has no marshal-dagster 0\.0\.1 \(but {there}\): install"):
        check_executors(Session(), ["psycopg"], "wait")  # type: ignore[arg-type]
    monkeypatch.setattr(executor_check, "_own_version", lambda: None)
    check_executors(Session(), ["psycopg"], "wait")  # type: ignore[arg-type]


def test_at_most_three_places_are_named() -> None:
    """A cluster can have hundreds of executors."""
    session: Any = Session()
    session.mapInArrow = lambda *_: session
    session._rows = [Row(f"host{number}", "/python", "psycopg") for number in range(5) for _ in range(2)]
    with pytest.raises(ConfigurationError) as error:
        check_executors(session, ["psycopg"], "wait")
    assert "on host0 (/python), host1 (/python), host2 (/python) and 2 more has no psycopg: install" in str(error.value)


def test_the_error_of_a_driver_without_arrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark checks the versions of pandas and pyarrow in this process too."""

    def missing() -> None:
        raise ImportError("pyarrow >= 15.0.0 must be installed; however, it was not found.")

    monkeypatch.setattr("pyspark.sql.pandas.utils.require_minimum_pyarrow_version", missing)
    with pytest.raises(
        ConfigurationError, match=r"it was not found\.\): pip install 'marshal-dagster\[spark\]', or wait"
    ):
        check_executors(Session(), ["x"], "wait")  # type: ignore[arg-type]
