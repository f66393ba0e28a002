"""One case of the kit."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc

from marshal_dagster.sinks.conformance.target import Target, ahead, expect_refused

Check = Callable[[Target], None]


@dataclass(frozen=True, slots=True)
class Case:
    """Something that every sink does; `str()` is its name, as a test's id."""

    name: str
    rule: str
    """What holds, in a sentence."""
    _check: Check
    _in_any_order: bool = False

    def __str__(self) -> str:
        return self.name

    def check(self, target: Target) -> None:
        """Raise `AssertionError` unless it holds of `target`, an output that is empty.

        What the sink itself raises where it should not goes through. A case of ranges in any order asks of a sink that
        says that it cannot take them just that it refuses them.
        """
        if self._in_any_order and not target.sink().supports_unordered_ranges:
            expect_refused(
                target, "a", ahead(0, 5, 10), why="supports_unordered_ranges is false, and a range came in any order"
            )
            return
        self._check(target)


def registers(cases: list[Case], *, in_any_order: bool = False) -> Callable[[Check], Check]:
    """Return a decorator that adds the case that a function is to `cases`: its name, and its docstring as the rule."""

    def register(check: Check) -> Check:
        cases.append(Case(check.__name__, getdoc(check) or "", check, in_any_order))
        return check

    return register
