"""The search for the first row that a table rejects."""

from random import Random
from typing import Any

import pytest

from marshal_dagster.sinks.rejected_rows import RowCheck, first_rejected


class Table:
    """A table that rejects some values, and values that it has."""

    def __init__(self, values: list[int], rejected: set[int]) -> None:
        self.values, self.rejected, self.rows, self.moves = values, rejected, set[int](), 0

    def error_of(self, first: int, end: int) -> ValueError | None:
        """Move a part of the values whole, or not at all."""
        self.moves += 1
        part = self.values[first:end]
        assert part
        if len(set(part)) < len(part) or self.rows & set(part) or self.rejected & set(part):
            return ValueError(f"{first} to {end}")
        self.rows |= set(part)
        return None


@pytest.mark.parametrize("seed", range(200))
def test_the_first_row_is_found_also_if_it_repeats_a_value(seed: int) -> None:
    """The error is that of this row alone, and the number of moves is logarithmic."""
    dice = Random(seed)
    count = dice.randint(1, 40)
    values = [dice.randint(0, dice.choice([20, 10_000])) for _ in range(count)]
    table = Table(values, {dice.randint(0, 10_000) for _ in range(dice.randint(0, 3))})
    wrong = [at for at, value in enumerate(values) if value in table.rejected or value in values[:at]]
    found = first_rejected(count, table.error_of)
    if not wrong:
        assert found is None
    else:
        assert found is not None
        assert (found[0], str(found[1])) == (wrong[0], f"{wrong[0]} to {wrong[0] + 1}")
    assert table.moves <= 2 * count.bit_length() + 1


def test_no_rows_have_no_rejected_one() -> None:
    """Nothing is moved then."""
    assert first_rejected(0, Table([], set()).error_of) is None


@pytest.mark.parametrize(
    ("found", "row"),
    [
        ([(1, (3, 0)), (0, None), (0, (7, 1)), (0, (5, 1)), (0, (5, 0))], (0, 5, "a")),
        ([(0, (5, 1)), (0, (None, 1))], (0, None, "b")),
        ([(None, (5, 1)), (2, (0, 1))], (2, 0, "b")),
    ],
)
def test_the_first_row_of_the_lowest_partition_is_named(found: Any, row: tuple[Any, ...]) -> None:  # noqa: ANN401
    """Several tasks may have rows of a partition. Rows without a partition are refused for that reason."""
    problem: Any = None
    rejected = RowCheck(problem, [("a", "reason"), ("b", "reason")]).first(found)
    assert rejected is not None
    assert (rejected.partition, rejected.offset, rejected.column) == row
