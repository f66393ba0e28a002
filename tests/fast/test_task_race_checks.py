"""The judge of the races between tasks finds each kind of wrong output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from marshal_dagster.sinks.conformance.target import part
from tests.soak_results import read_rows
from tests.task_races.__main__ import add_seed
from tests.task_races.checks import Place, Verdict, headers_of, judge, value_of

EXPECTED = {0: [(0, 0), (1, 0), (1, 1)], 1: [(0, 0)]}


@dataclass(frozen=True)
class Message:
    """A message of the output."""

    place: Place
    run: str = "a"
    headers_left: int = 9

    def key(self) -> bytes:
        """Return the key."""
        return "/".join(map(str, self.place)).encode()

    def value(self) -> bytes | None:
        """Return the value."""
        return value_of(self.place)

    def headers(self) -> list[tuple[str, bytes | None]]:
        """Return the headers, or the first ones only."""
        return headers_of(self.place, self.run)[: self.headers_left]

    def partition(self) -> int:
        """Return the output partition."""
        return self.place[0] % 2


CORRECT = [Message((partition, *row)) for partition, rows in EXPECTED.items() for row in rows]


def found(messages: Sequence[Message]) -> Verdict:
    """Judge messages of an output of which run a has reported the only range."""
    return judge(messages, EXPECTED, [(part(0, 0, 2), "a")])


def test_a_correct_output_has_no_violation() -> None:
    """All records are there, once and in order."""
    assert found(CORRECT) == Verdict(4, 0, 0, ())


@pytest.mark.parametrize(
    ("change", "lost", "twice"),
    [
        (lambda messages: messages[1:], 1, 0),
        (lambda messages: [*messages, messages[0]], 0, 1),
        (lambda messages: [messages[1], messages[0], *messages[2:]], 0, 0),
        (lambda messages: [*messages[:1], replace(messages[1], headers_left=1), *messages[2:]], 0, 0),
        (lambda messages: [replace(messages[0], run="b"), *messages[1:]], 0, 0),
        (lambda messages: [*messages, Message((2, 0, 0))], 0, 0),
    ],
)
def test_a_wrong_output_is_found(
    change: Callable[[Sequence[Message]], Sequence[Message]], lost: int, twice: int
) -> None:
    """A record that is missing, repeated, out of order, changed, of another run, or of no range is a violation."""
    verdict = found(change(CORRECT))
    assert (verdict.lost, verdict.twice) == (lost, twice)
    assert verdict.violations


def test_seeds_that_follow_each_other_are_one_row(tmp_path: Path) -> None:
    """A seed of other code, or one that does not follow, begins a row of its own."""
    results = tmp_path / "races.jsonl"
    sums = dict.fromkeys(("records", "runs", "killed", "resumed", "lost", "twice", "violations"), 2)
    for code, seed in (("a", 0), ("a", 1), ("a", 2), ("b", 3), ("b", 5)):
        add_seed(results, {"code": code, "first": seed, "seeds": 1, **sums, "seconds": 0.5})
    rows = read_rows(results)
    assert [(row["code"], row["first"], row["seeds"]) for row in rows] == [("a", 0, 3), ("b", 3, 1), ("b", 5, 1)]
    assert [(row["records"], row["seconds"]) for row in rows] == [(6, 1.5), (2, 0.5), (2, 0.5)]
