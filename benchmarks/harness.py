"""What all benchmarks share: alternating samples, cases with a target, and the form of the result."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Generic, TypeVar

SIGNIFICANT_DIGITS: Final = 4
ENOUGH_FOR_P99: Final = 100
_TEN: Final = 10

SizesT = TypeVar("SizesT")


class Goal(Enum):
    """What is compared with the target, and in which direction. The value is the explanation in the result."""

    RATIO_AT_MOST = "ratio is ours/beside, lower is better; met when ratio <= target"
    RATIO_AT_LEAST = "ratio is ours/beside, higher is better; met when ratio >= target"
    DIFFERENCE_AT_MOST = "ratio is ours/beside; met when ours - beside <= target, in the unit given"
    OURS_AT_MOST = "ratio is ours/beside; met when ours <= target, in the unit given"
    OURS_AT_LEAST = "ratio is ours/beside; met when ours >= target, in the unit given"


def median(samples: Sequence[float]) -> float:
    """Return the median of the samples. Raises `ValueError` if there are none."""
    if not samples:
        raise ValueError("nothing was measured")
    return statistics.median(samples)


def spread(samples: Sequence[float]) -> dict[str, float | int]:
    """Return number, minimum, median and maximum of the samples, and with at least 100 the 99th percentile."""
    figures: dict[str, float | int] = {
        "samples": len(samples),
        "min": rounded(min(samples)),
        "median": rounded(median(samples)),
        "max": rounded(max(samples)),
    }
    if len(samples) >= ENOUGH_FOR_P99:
        figures["p99"] = rounded(statistics.quantiles(samples, n=100, method="inclusive")[98])
    return figures


def rounded(value: float) -> float:
    """Round to the digits that are significant in a benchmark."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: the samples of the library (`ours`) and of the other side (`beside`), in the same unit."""

    name: str
    ours: Sequence[float]
    beside: Sequence[float]
    unit: str
    goal: Goal
    target: float

    @property
    def ratio(self) -> float:
        """The median of `ours` divided by the median of `beside`. Raises `ValueError` if `beside` is not positive."""
        beside = median(self.beside)
        if beside <= 0:
            raise ValueError(f"{self.name}: what it is compared with measured {beside:g} {self.unit}")
        return rounded(median(self.ours) / beside)

    @property
    def is_met(self) -> bool:
        """Whether the target is met by the rounded figures."""
        match self.goal:
            case Goal.RATIO_AT_MOST:
                return self.ratio <= self.target
            case Goal.RATIO_AT_LEAST:
                return self.ratio >= self.target
            case Goal.DIFFERENCE_AT_MOST:
                return rounded(median(self.ours) - median(self.beside)) <= self.target
            case Goal.OURS_AT_MOST:
                return rounded(median(self.ours)) <= self.target
            case Goal.OURS_AT_LEAST:
                return rounded(median(self.ours)) >= self.target

    def figures(self) -> dict[str, Any]:
        """Return the case in the form of the result."""
        return {
            "name": self.name,
            "ours": rounded(median(self.ours)),
            "beside": rounded(median(self.beside)),
            "unit": self.unit,
            "ratio": self.ratio,
            "target": self.target,
            "met": self.is_met,
            "meaning": self.goal.value,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """What a benchmark has measured: its cases, and additional conditions."""

    cases: Sequence[Case]
    conditions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[SizesT]):
    """A benchmark. `sizes` is a frozen dataclass of whole numbers; each of its fields is an option."""

    name: str
    summary: str
    sizes: SizesT
    run: Callable[[SizesT], Measured]


def alternate(
    rounds: int, ours: Callable[[], float], beside: Callable[[], float], *, warm_up: int = 1
) -> tuple[list[float], list[float]]:
    """Measure two sides alternately (`take_turns`)."""
    first, second = take_turns(rounds, [ours, beside], warm_up=warm_up)
    return first, second


def take_turns(rounds: int, sides: Sequence[Callable[[], float]], *, warm_up: int = 1) -> list[list[float]]:
    """Measure all sides alternately in each round, and return the samples of each side.

    The first `warm_up` rounds do not count. Each callable returns what it measured, so that it can leave out preparing
    and cleaning up.
    """
    return _turns(rounds, sides, warm_up, lambda _: range(len(sides)))


def take_turns_to_begin(
    rounds: int, sides: Sequence[Callable[[], float]], prepare: Callable[[], None], *, warm_up: int = 1
) -> list[list[float]]:
    """Measure like `take_turns`, but call `prepare` before each round, and start each round with another side.

    The preparation may still keep the machine busy, which would slow down only the first side.
    """

    def order(number: int) -> list[int]:
        prepare()
        first = number % len(sides)
        return [*range(first, len(sides)), *range(first)]

    return _turns(rounds, sides, warm_up, order)


def _turns(
    rounds: int, sides: Sequence[Callable[[], float]], warm_up: int, order: Callable[[int], Sequence[int]]
) -> list[list[float]]:
    taken = [{side: sides[side]() for side in order(number)} for number in range(warm_up + rounds)][warm_up:]
    return [[samples[side] for samples in taken] for side in range(len(sides))]


def steps_of_ten(fewest: int, most: int) -> Iterator[int]:
    """Yield sizes from `fewest` to `most`, each ten times the one before."""
    while fewest <= most:
        yield fewest
        fewest *= _TEN


def result(name: str, measured: Measured, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result: the object that `--json` prints."""
    spreads = {case.name: {"ours": spread(case.ours), "beside": spread(case.beside)} for case in measured.cases}
    return {
        "benchmark": name,
        "conditions": {**conditions, **measured.conditions, "spread": spreads},
        "cases": [case.figures() for case in measured.cases],
    }


def as_json(found: Mapping[str, Any]) -> str:
    """Render a result as one JSON object."""
    return json.dumps(found, indent=2, ensure_ascii=False)


_COLUMNS: Final = ("case", "ours", "beside", "unit", "ratio", "target", "met")


def cells(case: Mapping[str, Any]) -> list[str]:
    """Return the columns of a case of a result as text."""
    signs = {
        Goal.RATIO_AT_LEAST: "≥",
        Goal.DIFFERENCE_AT_MOST: "+",
        Goal.OURS_AT_MOST: "ours ≤",
        Goal.OURS_AT_LEAST: "ours ≥",
    }
    sign = next((sign for goal, sign in signs.items() if goal.value == case["meaning"]), "≤")
    return [
        case["name"],
        f"{case['ours']:,.6g}",
        f"{case['beside']:,.6g}",
        case["unit"],
        f"{case['ratio']:.3g}",
        f"{sign} {case['target']:g}",
        "yes" if case["met"] else "NO",
    ]


def as_table(found: Mapping[str, Any]) -> str:
    """Render a result as a table for the terminal."""
    rows = [list(_COLUMNS), *(cells(case) for case in found["cases"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    spreads = found["conditions"]["spread"]
    details = [
        f"{name}, {side}: " + ", ".join(f"{word} {value:g}" for word, value in figures.items())
        for name, sides in spreads.items()
        for side, figures in sides.items()
    ]
    others = [
        f"{word}: {value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False)}"
        for word, value in found["conditions"].items()
        if word != "spread"
    ]
    return "\n".join([found["benchmark"], "", *lines, "", *details, "", *others])


def as_markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Render the cases of several results as one Markdown table for the documentation."""
    rows = [["benchmark", *_COLUMNS]]
    rows += [[found["benchmark"], *cells(case)] for found in results for case in found["cases"]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| --- " * len(rows[0]) + "|", *lines[1:]])
