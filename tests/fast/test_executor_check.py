"""The check whether executors have the packages of a sink's tasks."""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.spark.executor_check import check_executors


class Row:
    """A row of the probe's result."""

    def __init__(self, missing: str) -> None:
        self.missing = missing


class Session:
    """A session whose executors are this process, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.jobs, self._error = 0, error

    def range(self, _: int) -> "Session":
        """Return a frame."""
        return self

    def mapInArrow(self, function: Callable[[Any], Iterator[pa.RecordBatch]], _: str) -> "Session":  # noqa: N802 - Spark's name
        """Return the frame of the function's result."""
        self._rows = [Row(name) for batch in function(iter(())) for name in batch.column(0).to_pylist()]
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
        (None, "has no a_package and no another: install it there, or wait"),
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


def test_a_driver_without_arrow_is_told_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark checks the versions of pandas and pyarrow in this process too."""

    def missing() -> None:
        raise ImportError("pyarrow >= 15.0.0 must be installed; however, it was not found.")

    monkeypatch.setattr("pyspark.sql.pandas.utils.require_minimum_pyarrow_version", missing)
    with pytest.raises(
        ConfigurationError, match=r"it was not found\.\): pip install 'marshal-dagster\[spark\]', or wait"
    ):
        check_executors(Session(), ["x"], "wait")  # type: ignore[arg-type]
