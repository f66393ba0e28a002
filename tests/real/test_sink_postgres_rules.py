"""The Postgres sink by its rules, on a real PostgreSQL, with rows of plain Python in place of Spark's."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from marshal_dagster.protocol.ranges import ClaimedRange
from marshal_dagster.spark.sinks import Sink
from marshal_dagster.spark.sinks.conformance import CASES, Case, Row, Target
from tests.sink_child import write_and_die
from tests.sink_conformance import (
    AnyOrderConformance,
    CrashConformance,
    HistoryConformance,
    KillConformance,
    Output,
    ReplacingConformance,
    SinkConformance,
)
from tests.sink_outputs import PostgresOutput, own_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DEATHS = {"overtaken_at_any_step", "death_while_replacing", "death_at_any_step", "random_histories"}
"""Cases that `TestCrashes`, `TestKills` and `TestHistories` are for, at the sink's own steps."""


@pytest.fixture
def output(postgres: str) -> PostgresOutput:
    """A schema of its own."""
    return PostgresOutput(postgres, own_schema())


@pytest.fixture
def die() -> Callable[[Output, str, str, Sequence[ClaimedRange]], int]:
    """A writer in a process of its own."""
    return write_and_die  # type: ignore[return-value] # of a Postgres output, here


class PostgresTarget(Target):
    """The sink with stand-ins for Spark's rows."""

    def __init__(self, output: PostgresOutput) -> None:
        self.output = output

    def sink(self) -> Sink:
        """Another process's sink."""
        return self.output.sink()

    def rows(self) -> list[Row]:
        """The table as it is."""
        return self.output.rows()

    def frame(
        self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = ("partition", "offset", "value")
    ) -> "DataFrame":
        """A stand-in's frame."""
        return self.output.frame(rows, columns)  # type: ignore[return-value] # as much of one as is asked for

    def unreadable(self) -> "DataFrame":
        """A stand-in's frame that fails when its rows are asked for."""
        return self.output.poison()  # type: ignore[return-value]


@pytest.mark.parametrize("case", [case for case in CASES if str(case) not in DEATHS], ids=str)
def test_the_sink_passes_the_kit(case: Case, output: PostgresOutput) -> None:
    """What users' sinks must do, the library's own does."""
    case.check(PostgresTarget(output))


class TestTaking(SinkConformance):
    """Taking, skipping, refusing."""


class TestReplacing(ReplacingConformance):
    """New generations."""


class TestCrashes(CrashConformance):
    """Death and races."""


class TestAnyOrder(AnyOrderConformance):
    """Ranges in any order."""


class TestKills(KillConformance):
    """SIGKILL."""


class TestHistories(HistoryConformance):
    """Random histories against a model."""
