"""The Postgres sink by its rules, on a real PostgreSQL, with rows of plain Python in place of Spark's."""

from collections.abc import Callable, Sequence

import pytest

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.conformance import Case
from tests.sink_conformance import (
    AnyOrderConformance,
    CrashConformance,
    HistoryConformance,
    KillConformance,
    Output,
    ReplacingConformance,
    SinkConformance,
)
from tests.sink_kit import SHORT_CASES, OutputTarget
from tests.sink_outputs import PostgresOutput, own_schema
from tests.sink_process import write_and_die


@pytest.fixture
def output(postgres: str) -> PostgresOutput:
    """A schema of its own."""
    return PostgresOutput(postgres, own_schema())


@pytest.fixture
def die() -> Callable[[Output, str, str, Sequence[ClaimedRange]], int]:
    """A writer in a process of its own."""
    return write_and_die  # type: ignore[return-value] # of a Postgres output, here


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_the_sink_passes_the_kit(case: Case, output: PostgresOutput) -> None:
    """What users' sinks must do, the library's own does."""
    case.check(OutputTarget(output))


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
