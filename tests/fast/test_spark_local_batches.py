"""Rows as Arrow batches in the driver's process, by what the session can do. Sinks' real tests pass rows so."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError, Py4JJavaError

from marshal_dagster.spark import local_batches as module
from marshal_dagster.spark.local_batches import local_batches

BATCH = pa.RecordBatch.from_pydict({"partition": [1, 2]})


class ConnectSession:
    """A session of Spark Connect, as `is_connect` recognises one."""

    def __init__(self, client: object) -> None:
        self.client = client


ConnectSession.__module__ = "pyspark.sql.connect.session"


class Client:
    """A client that answers with a schema and two tables."""

    def to_table_as_iterator(self, plan: str, observations: object) -> Iterator[object]:
        """Yield the answers to a plan."""
        assert (plan, observations) == ("the plan", {})
        yield SimpleNamespace(names=["partition"])
        yield from [pa.Table.from_batches([BATCH])] * 2


def on_server(client: object) -> Any:  # noqa: ANN401
    """Return a frame of a session on a server."""
    plan = SimpleNamespace(to_proto=lambda _: "the plan", observations={})
    return SimpleNamespace(sparkSession=ConnectSession(client), _plan=plan)


class Session:
    """A session in the process."""

    def __init__(self) -> None:
        self.conf = SimpleNamespace(get=lambda _: "100", set=lambda *_: None, isModifiable=lambda _: False)
        self.properties = {"spark.sql.ansi.enabled": None}
        self.sparkContext = SimpleNamespace(
            getLocalProperty=self.properties.get, setLocalProperty=self.properties.__setitem__
        )

    def sql(self, statement: str) -> Any:  # noqa: ANN401
        """Return the session's settings."""
        assert statement == "SET"
        rows = [{"key": "spark.sql.ansi.enabled", "value": "true"}, {"key": "spark.master", "value": "local[2]"}]
        return SimpleNamespace(collect=lambda: rows)


def in_process(error: Exception) -> Any:  # noqa: ANN401
    """Return a frame whose JVM answers with an error."""
    session = Session()

    def raises() -> None:
        assert session.properties == {"spark.sql.ansi.enabled": "true"}
        raise error

    return SimpleNamespace(sparkSession=session, _jdf=SimpleNamespace(toArrowBatchRdd=raises))


def test_a_server_sends_batches() -> None:
    """The parts of its answer that are not rows are left out."""
    assert list(local_batches(on_server(Client()), 10, at_once=False) or ()) == [BATCH, BATCH]


def test_rows_come_one_by_one_where_batches_cannot_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is returned without pyarrow, and where PySpark has other methods than those that are used."""
    assert local_batches(on_server(object()), 10, at_once=False) is None
    frame = in_process(Py4JError("no such method"))
    assert local_batches(frame, 10, at_once=False) is None
    assert frame.sparkSession.properties == {"spark.sql.ansi.enabled": None}, "tasks know the settings only meanwhile"
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert local_batches(on_server(Client()), 10, at_once=False) is None


def test_an_error_of_the_plan_is_raised() -> None:
    """It is not taken for a missing method."""

    class PlanError(Py4JJavaError):  # type: ignore[misc] # py4j has no types
        def __init__(self) -> None:
            pass

        __str__ = Exception.__str__

    with pytest.raises(PlanError):
        local_batches(in_process(PlanError()), 10, at_once=False)
