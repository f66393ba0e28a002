"""Tests of each database sink on its real server: the conformance kit, and groups that follow each other.

A module provides an `output` fixture (a `DatabaseOutput`: a table in a schema of its own).
"""

import threading
from collections.abc import Callable

import pytest

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.sinks.conformance import Case, Target
from marshal_dagster.sinks.conformance.target import part, rows_of
from tests.conditions import WITHIN_S, wait_until
from tests.sink_conformance import deliver
from tests.sink_kit import GROUP_CHECKS, SHORT_CASES, OutputTarget, following
from tests.sink_outputs import DatabaseOutput


class DatabaseConformance:
    """The kit, and other groups."""

    @pytest.mark.parametrize("case", SHORT_CASES, ids=str)
    def test_the_sink_passes_the_kit(self, case: Case, output: DatabaseOutput) -> None:
        """The library's own sink passes the kit for users' sinks."""
        case.check(OutputTarget(output))

    @pytest.mark.parametrize("check", GROUP_CHECKS)
    def test_another_group(self, check: Callable[[Target], None], output: DatabaseOutput) -> None:
        """An output belongs to one group, or to groups that follow each other."""
        check(OutputTarget(output))

    def test_a_group_waits_for_the_one_that_it_follows_on(self, output: DatabaseOutput) -> None:
        """Writes of the earlier group that are in progress are seen before the successor's first range is checked."""
        deliver(output, "old", part(0, 0, 5))
        errors: list[str] = []

        def take_over() -> None:
            target = following(OutputTarget(output), "g")
            with pytest.raises(SinkRejectedError) as error:
                deliver(output, "new", part(0, 5, 9, group="h"), sink=target.sink())
            errors.append(str(error.value))

        thread = threading.Thread(target=take_over)

        def reached(step: str) -> None:
            if step == "moved":
                thread.start()
                wait_until(output.is_waited_for, "a writer that waits for a lock of groups")

        assert deliver(output, "late", part(0, 5, 9), sink=output.sink(reached)).taken
        thread.join(WITHIN_S)
        assert ["has rows of group 'g' at these offsets" in error for error in errors] == [True]
        assert output.rows() == rows_of("old", part(0, 0, 5)) + rows_of("late", part(0, 5, 9))
