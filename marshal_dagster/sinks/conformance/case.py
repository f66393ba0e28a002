"""A case of the conformance kit, and the decorator that registers cases."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getdoc

from marshal_dagster.sinks.conformance.target import Target, ahead, expect_refused

Check = Callable[[Target], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A property that every sink must have, and its check; `str()` returns its name, for test ids.

    Example:
        ```python
        @pytest.mark.parametrize("case", CASES, ids=str)
        def test_my_sink(case: Case, tmp_path: Path) -> None:
            case.check(MyTarget(tmp_path))
        ```
    """

    name: str
    """The name of the case."""
    rule: str
    """The property that is checked, in one sentence."""
    _check: Check
    _in_any_order: bool = False

    def __str__(self) -> str:
        return self.name

    def check(self, target: Target) -> None:
        """Check that the sink of `target` has this property.

        If the sink's `supports_unordered_ranges` is false, cases of ranges in any order only check that the sink
        refuses these ranges.

        Args:
            target: An output that is empty.

        Raises:
            AssertionError: The sink does not have the property.
            Exception: Any error that the sink raises unexpectedly.
        """
        if self._in_any_order and not target.sink().supports_unordered_ranges:
            expect_refused(
                target, "a", ahead(0, 5, 10), why="supports_unordered_ranges is false, and a range came in any order"
            )
            return
        self._check(target)


def registers(cases: list[Case], *, in_any_order: bool = False) -> Callable[[Check], Check]:
    """Return a decorator that adds a function to `cases` as a case, with its docstring as the rule."""

    def register(check: Check) -> Check:
        cases.append(Case(check.__name__, getdoc(check) or "", check, in_any_order))
        return check

    return register
