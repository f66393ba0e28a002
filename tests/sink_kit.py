"""The conformance kit, put to the library's own sinks: which cases take long, and a target of a stand-in output."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from marshal_dagster.sinks import Sink
from marshal_dagster.sinks.conformance import CASES, Row, Target
from tests.sink_conformance import Output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LONG = {"overtaken_at_any_step", "death_while_replacing", "death_at_any_step", "random_histories"}
"""Of these the library's own sinks with steps have tests of their own (`tests.sink_conformance`)."""
SHORT_CASES = [case for case in CASES if str(case) not in LONG]
ALL_CASES = [
    pytest.param(case, marks=[pytest.mark.thorough] if str(case) in LONG else [], id=str(case)) for case in CASES
]


class OutputTarget(Target):
    """A sink that is written by stand-ins for Spark."""

    def __init__(self, output: Output) -> None:
        self.output = output

    def sink(self) -> Sink:
        """Another process's sink."""
        return self.output.sink()

    def rows(self) -> list[Row]:
        """What the output has, read without the sink."""
        return self.output.rows()

    def frame(
        self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = ("partition", "offset", "value")
    ) -> "DataFrame":
        """A stand-in's frame."""
        return self.output.frame(rows, columns)  # type: ignore[no-any-return] # as much of one as is asked for

    def unreadable(self) -> "DataFrame":
        """A stand-in's frame that fails when its rows are asked for."""
        return self.output.poison()  # type: ignore[no-any-return]
