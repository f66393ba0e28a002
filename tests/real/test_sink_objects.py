"""The file sink on S3: moto's server, whose conditional requests are real. Rows are plain Python."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from marshal_dagster.sinks.conformance import Case
from tests.object_outputs import ObjectOutput, S3Objects
from tests.real.moto_server import BUCKET, running_moto
from tests.sink_conformance import deliver, part, rows_of
from tests.sink_kit import SHORT_CASES, OutputTarget
from tests.sink_process import EACH, KILLED, write_and_die

ON_S3 = ("subset_replayed_by_others", "foreign_rows", "judged_when_written", "some_rows_without_offsets")
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """The URL of an S3 with one bucket."""
    with running_moto() as url:
        yield url


def uri() -> str:
    """Return the URI of a new folder, whose name has special characters."""
    return f"s3://{BUCKET}/out-{next(_numbers)}/a b%20[1],c"


@pytest.fixture
def output(moto: str) -> ObjectOutput:
    """An empty output."""
    return ObjectOutput(S3Objects(moto), uri())


@pytest.mark.parametrize("case", [case for case in SHORT_CASES if str(case) in ON_S3], ids=str)
def test_the_sink_conforms(case: Case, output: ObjectOutput) -> None:
    """The cases in which files are recognised, replaced and rejected pass."""
    case.check(OutputTarget(output))


def test_a_process_killed_at_each_step(output: ObjectOutput) -> None:
    """After a repetition each row exists once, and the files of the dead writer are deleted."""
    for number, step in enumerate(output.steps):
        mine = part(number, 0, 3)
        assert write_and_die(output, step, "dead", [mine]) == KILLED
        outcome = deliver(output, "new", part(number, 0, 3, epoch=20))
        assert bool(outcome.skipped) == (step in {"linked", "cleared"})
        value = "dead" if outcome.skipped else "new"
        assert [row for row in output.rows() if row[0] == number] == rows_of(value, mine)
    output.sweep()
    assert len(output.left()) == len(output.steps)
    assert output.sink().check() == []


def test_four_processes_at_once(output: ObjectOutput) -> None:
    """Each writes every range; of each range one of them has written the rows."""
    ranges = [part(number % 2, number // 2, number // 2 + 1) for number in range(8)]
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda value: write_and_die(output, EACH, value, ranges), "abcd"))
    assert ended == [0, 0, 0, 0]
    rows = output.rows()
    assert [row[:2] for row in rows] == sorted(row[:2] for row in rows_of("a", *ranges))
    assert output.sink().check() == []
