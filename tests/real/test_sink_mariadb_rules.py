"""The rules of the MariaDB sink on a real MariaDB, with rows of plain Python instead of Spark."""

import threading
from collections.abc import Callable, Sequence

import pytest

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.conformance import Case, Target
from tests.conditions import WITHIN_S, wait_until
from tests.sink_conformance import (
    AnyOrderConformance,
    CrashConformance,
    KillConformance,
    Output,
    deliver,
    part,
    rows_of,
)
from tests.sink_kit import GROUP_CHECKS, SHORT_CASES, OutputTarget, following
from tests.sink_outputs import MariaDBOutput, own_schema
from tests.sink_process import write_and_die


@pytest.fixture
def output(mariadb: str) -> MariaDBOutput:
    """A separate schema."""
    return MariaDBOutput(mariadb, own_schema())


@pytest.fixture
def die() -> Callable[[Output, str, str, Sequence[ClaimedRange]], int]:
    """A writer in a separate process, which dies."""
    return write_and_die  # type: ignore[return-value] # of a MariaDB output, here


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_the_sink_passes_the_kit(case: Case, output: MariaDBOutput) -> None:
    """The library's own sink passes the kit for users' sinks."""
    case.check(OutputTarget(output))


@pytest.mark.parametrize("check", GROUP_CHECKS)
def test_another_group(check: Callable[[Target], None], output: MariaDBOutput) -> None:
    """An output belongs to one group, or to groups that follow each other."""
    check(OutputTarget(output))


def test_a_group_waits_for_the_one_that_it_follows_on(output: MariaDBOutput) -> None:
    """Writes of the earlier group that are in progress are seen before the successor's first range is checked."""
    deliver(output, "old", part(0, 0, 5))
    results: list[object] = []

    def take_over() -> None:
        target = following(OutputTarget(output), "g")
        results.append(captured(lambda: deliver(output, "new", part(0, 5, 9, group="h"), sink=target.sink())))

    thread = threading.Thread(target=take_over)

    def reached(step: str) -> None:
        if step == "moved":
            thread.start()
            wait_until(lambda: is_waiting(output), "a writer that waits for a lock of groups")

    assert deliver(output, "late", part(0, 5, 9), sink=output.sink(reached)).taken
    thread.join(WITHIN_S)
    assert "has rows of group 'g' at these offsets" in str(results[0])
    assert output.rows() == rows_of("old", part(0, 0, 5)) + rows_of("late", part(0, 5, 9))


def captured(call: Callable[[], object]) -> object:
    """Return what a call returns or raises."""
    try:
        return call()
    except SinkRejectedError as error:
        return error


def is_waiting(output: MariaDBOutput) -> bool:
    """Return whether a transaction waits for a lock."""
    return output.execute("SELECT count(*) FROM information_schema.innodb_lock_waits") != [(0,)]


class TestCrashes(CrashConformance):
    """Crashes and races."""


class TestAnyOrder(AnyOrderConformance):
    """Ranges in any order."""


class TestKills(KillConformance):
    """Writers killed by SIGKILL."""
