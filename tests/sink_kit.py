"""Applies the conformance kit to the library's own sinks: which cases take long, and a target for an output."""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks import Sink, WriteResult
from marshal_dagster.sinks.conformance import CASES, Row, Target
from marshal_dagster.sinks.conformance.cases import race
from marshal_dagster.sinks.conformance.target import deliver, part, rows_of
from tests.sink_conformance import Output, shared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LONG = {"overtaken_at_any_step", "death_while_replacing", "death_at_any_step", "random_histories"}
"""Cases that take long. The library's own sinks with steps have their own tests of them (`tests.sink_conformance`)."""
SHORT_CASES = [case for case in CASES if str(case) not in LONG]
ALL_CASES = [
    pytest.param(case, marks=[pytest.mark.thorough] if str(case) in LONG else [], id=str(case)) for case in CASES
]


def following(target: Target, group: str) -> Target:
    """Return the target with sinks that have `previous_group` set."""

    def sink() -> Any:  # noqa: ANN401 - as above
        made: Any = target.sink()
        made._groups = replace(made._groups, previous_group=group)
        return made

    renamed = copy(target)
    renamed.sink = sink  # type: ignore[method-assign]
    return renamed


def a_second_group_is_named(target: Target) -> None:
    """The rejection names both groups, the output and the solution."""
    deliver(target, "a", part(0, 0, 5))
    said = "has ranges of topic 't' from group 'g': group 'h' would .*import h t --consumer-group g.*previous_group='g'"
    for wanted in (part(0, 0, 5, group="h"), part(3, 0, 5, group="h")):
        with pytest.raises(SinkRejectedError, match=said):
            target.sink().verdicts([wanted])
        assert "shared_by_groups=True" in (target.sink().can_replace([wanted]) or "")
    with pytest.raises(SinkRejectedError, match="group 'g': group 'h'"):
        following(target, "another").sink().verdicts([part(0, 0, 5, group="h")])


def a_renamed_group_takes_over(target: Target) -> None:
    """A renamed group continues after the former group's rows, may not repeat them, and excludes that group."""
    deliver(target, "old", part(0, 0, 10), part(1, 0, 5))
    renamed = following(target, "g")
    with pytest.raises(SinkRejectedError, match=r"t/0 \[8, 12\) of group 'h': .* has rows of group 'g'"):
        deliver(renamed, "new", part(0, 8, 12, group="h"))
    deliver(renamed, "new", part(0, 10, 20, group="h"))
    deliver(target, "new", part(0, 20, 25, group="h"))
    assert "has rows of group 'g'" in (target.sink().can_replace([part(0, 0, 5, group="h")]) or "")
    assert target.sink().can_replace([part(0, 25, 30, group="h")]) is None
    with pytest.raises(SinkRejectedError, match="has rows of group 'h' at these offsets"):
        deliver(target, "old", part(0, 10, 15))
    assert deliver(target, "old", part(0, 0, 10)).skipped
    expected = rows_of("old", part(0, 0, 10), part(1, 0, 5)) + rows_of("new", part(0, 10, 25))
    assert target.found() == sorted(expected)


def a_group_that_runs_on_beside_its_successor(target: Target) -> None:
    """The first of the two groups to store an offset keeps it, also if both run at the same time."""
    deliver(target, "a", part(0, 0, 10))
    for start in (10, 20):
        mine = {"a": part(0, start, start + 10), "b": part(0, start, start + 10, group="h")}
        results = race(following(target, "g"), {value: [range_] for value, range_ in mine.items()})
        taken = [value for value, result in results.items() if isinstance(result, WriteResult)]
        assert len(taken) <= 1, results
        rows = [row for row in target.found() if row[1] >= start]
        assert rows == [row for value in taken for row in rows_of(value, mine[value])]
        if not taken or taken == ["b"]:
            return


def an_output_without_such_a_record(target: Target) -> None:
    """An old output with ranges of two groups belongs to both; neither group repeats rows of the other."""
    for group in ("g", "h"):
        deliver(target, group, part(0, 0, 5, group=group), sink=shared(target.sink()))
    deliver(target, "g", part(0, 5, 10))
    with pytest.raises(SinkRejectedError, match=r"t/0 \[5, 10\) of group 'h': .* has rows of group 'g'"):
        deliver(target, "h", part(0, 5, 10, group="h"))
    with pytest.raises(SinkRejectedError, match="from group 'g', 'h': group 'i'"):
        deliver(target, "i", part(1, 0, 5, group="i"))
    assert deliver(target, "h", part(1, 0, 5, group="h")).taken
    deliver(target, "h", part(0, 5, 10, group="h"), sink=shared(target.sink()))
    assert len(target.found()) == 4 * 5 + 5


GROUP_CHECKS = [
    a_second_group_is_named,
    a_renamed_group_takes_over,
    a_group_that_runs_on_beside_its_successor,
    an_output_without_such_a_record,
]
"""The behaviour of the library's own sinks with another group, beyond the kit."""


class OutputTarget(Target):
    """A target whose sink gets rows without Spark."""

    def __init__(self, output: Output) -> None:
        self.output = output

    def sink(self) -> Sink:
        """Return a sink as another process would have it."""
        return self.output.sink()

    def shared_sink(self) -> Sink:
        """Return a sink for several groups, as another process would have it."""
        return shared(self.output.sink())  # type: ignore[no-any-return]

    def rows(self) -> list[Row]:
        """Return the rows of the output, read without the sink."""
        return self.output.rows()

    def frame(
        self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = ("partition", "offset", "value")
    ) -> "DataFrame":
        """Return a fake frame."""
        return self.output.frame(rows, columns)  # type: ignore[no-any-return] # it has the methods that are needed

    def unreadable(self) -> "DataFrame":
        """Return a fake frame that fails when its rows are read."""
        return self.output.poison()  # type: ignore[no-any-return]
