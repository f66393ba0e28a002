"""The rules of the Postgres sink on a real PostgreSQL, with rows of plain Python instead of Spark."""

import pytest

from tests.database_conformance import DatabaseConformance
from tests.sink_conformance import (
    AnyOrderConformance,
    CrashConformance,
    HistoryConformance,
    KillConformance,
    Model,
    Output,
    RangesModel,
    ReplacingConformance,
    SinkConformance,
)
from tests.sink_outputs import PostgresOutput, own_schema
from tests.sink_process import die

__all__ = ["die"]
SEEDS = 4


@pytest.fixture
def output(postgres: str) -> PostgresOutput:
    """A separate schema."""
    return PostgresOutput(postgres, own_schema())


class TestDatabase(DatabaseConformance):
    """The kit, and other groups."""


class TestTaking(SinkConformance):
    """Taking, skipping and rejecting ranges."""


class TestReplacing(ReplacingConformance):
    """New generations."""


class TestCrashes(CrashConformance):
    """Crashes and races."""


class TestAnyOrder(AnyOrderConformance):
    """Ranges in any order."""


class TestKills(KillConformance):
    """Writers killed by SIGKILL."""


class TestHistories(HistoryConformance):
    """Fewer random histories against a model than `tests/fast/test_sink_files.py` has."""

    @pytest.mark.parametrize("seed", range(SEEDS))
    def test_any_history_gives_the_rows_of_the_model(self, output: Output, seed: int) -> None:
        """The rules are those of statements."""
        self.play(output, seed, Model())

    @pytest.mark.parametrize("seed", range(SEEDS))
    def test_any_history_of_ranges_gives_the_rows_of_the_model(self, output: Output, seed: int) -> None:
        """The same with ranges in any order."""
        self.play(output, seed, RangesModel())
