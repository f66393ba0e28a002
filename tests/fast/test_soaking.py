"""Results of runs on real services add up over several sittings."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import soaking

CODE = ("tests/soaking.py",)


@dataclass(frozen=True)
class Row:
    """What a seed came to."""

    commit: str
    seed: int
    violations: tuple[str, ...] = ()


class Beds:
    """Hands out beds on which seed 3 violates something."""

    def __init__(self) -> None:
        self.commit = soaking.code_version(CODE)
        self.folder = Path("left")
        self.ran: list[int] = []
        self.repairs = 0
        self.starts = 0

    @contextmanager
    def running(self) -> Iterator["Beds"]:
        """Give the one bed."""
        self.starts += 1
        yield self

    def row(self, seed: int) -> Row:
        """Note the seed."""
        self.ran.append(seed)
        return Row(self.commit, seed, ("it is even: no",) if seed == 3 else ())

    def repair(self) -> None:
        """Count it."""
        self.repairs += 1


def soak(beds: Beds) -> soaking.Soak[Row]:
    """Make the command."""
    return soaking.Soak(
        module="tests.even",
        description=None,
        kind=Row,
        code=CODE,
        runs=2,
        running_bed=beds.running,
        told=lambda row: f"told of {row.seed}",
        counted=lambda rows: f"{sum(row.seed for row in rows)} in sum",
        table=lambda rows: f"a table of {len(rows)}",
    )


def test_what_is_in_the_results_is_not_run_again(tmp_path: Path) -> None:
    """Of the same code: another commit's rows do not count, and stay."""
    results, beds = tmp_path / "folder" / "results.jsonl", Beds()
    soaking.add_row(results, {"commit": "of old", "seed": 1, "violations": []})
    assert [row.seed for row in soak(beds).run([0, 1], results)] == [0, 1]
    assert [row.seed for row in soak(beds).run(range(3), results)] == [0, 1, 2]
    assert beds.ran == [0, 1, 2]
    assert beds.repairs == 3
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["commit"] == beds.commit, line["seed"]) for line in lines] == [
        (False, 1),
        (True, 0),
        (True, 1),
        (True, 2),
    ]


def test_nothing_is_started_when_nothing_is_due(tmp_path: Path) -> None:
    """Services take long to start."""
    results, beds = tmp_path / "results.jsonl", Beds()
    soak(beds).run([0], results)
    assert soak(beds).run([0], results) == [Row(beds.commit, 0)]
    assert (beds.starts, beds.ran) == (1, [0])


def test_the_command_says_what_was_violated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how to see it again; its exit code tells too."""
    monkeypatch.setattr(sys, "argv", ["even", "--first", "2"])
    assert soak(Beds()).main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "seed 2: told of 2",
        "seed 3: told of 3",
        "    VIOLATED it is even: no",
        "    python -m tests.even --seed 3    # left in left/seed3",
        "2 runs, 5 in sum, 1 with violations",
    ]
    monkeypatch.setattr(sys, "argv", ["even", "--seed", "7"])
    assert soak(Beds()).main() == 0


def test_the_table_is_of_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest, unless another is asked for: what other states came to does not count. Nothing is run."""
    beds = Beds()
    for commit, seed in (("of old", 1), ("newest", 1), ("newest", 2)):
        soaking.add_row(tmp_path / "results", {"commit": commit, "seed": seed, "violations": ["one"]})
    for more, count in (([], 2), (["--commit", "of old"], 1)):
        monkeypatch.setattr(sys, "argv", ["even", "--table", str(tmp_path / "results"), *more])
        assert soak(beds).main() == 0
        assert capsys.readouterr().out == f"a table of {count}\n"
    assert beds.ran == []
