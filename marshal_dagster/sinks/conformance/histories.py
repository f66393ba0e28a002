"""Conformance cases of many correct and incorrect batches in sequence, compared with a small model of an output."""

from random import Random

from marshal_dagster.errors import SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.conformance.case import Case, registers
from marshal_dagster.sinks.conformance.target import Row, Target, deliver, expect, expect_rows, intervals, part, rows_of

CASES: list[Case] = []
case = registers(CASES)

_SEEDS = 6
_STEPS = 15
_PARTITIONS = 3


class Model:
    """A model of an output: the position of each partition, and the rows."""

    def __init__(self, dice: Random, first_partition: int, *, can_replace: bool) -> None:
        self.rows: list[Row] = []
        self._dice = dice
        self._partitions = range(first_partition, first_partition + _PARTITIONS)
        self._can_replace = can_replace
        self._positions: dict[int, tuple[int, int, int]] = {}

    def batch(self) -> list[ClaimedRange]:
        """Return the ranges of a random batch: usually those of a correct member, sometimes wrong ones."""
        partitions = self._dice.sample(self._partitions, self._dice.randint(1, _PARTITIONS))
        return [self._range(partition) for partition in partitions]

    def taken(self, batch: list[ClaimedRange]) -> set[int] | None:
        """Return the partitions whose ranges the sink must take, or None if it must refuse the batch."""
        verdicts = {range_.partition: self._is_new(range_) for range_ in batch}
        if None in verdicts.values():
            return None
        return {partition for partition, is_new in verdicts.items() if is_new}

    def apply(self, batch: list[ClaimedRange], read: list[Row], written: list[Row]) -> None:
        """Apply the batch: replace the rows at the offsets `read`, and add the rows `written`."""
        taken = self.taken(batch) or set()
        removed = {(partition, offset) for partition, offset, _ in read if partition in taken}
        self.rows = [row for row in self.rows if row[:2] not in removed] + [row for row in written if row[0] in taken]
        for range_ in batch:
            if range_.partition in taken:
                self._positions[range_.partition] = range_.generation, range_.epoch, range_.end

    def _range(self, partition: int) -> ClaimedRange:
        dice = self._dice
        generation, epoch, position = self._positions.get(partition, (0, 10, 0))
        chance = dice.random()
        if chance < 0.15 and self._can_replace:  # noqa: PLR2004 - chances
            generation, position = generation + 5, dice.randint(0, max(1, position))
            epoch = max(epoch, generation)
        elif chance < 0.2:  # noqa: PLR2004
            generation -= 1
        elif chance < 0.25:  # noqa: PLR2004
            position += 1
        elif chance < 0.4 and position >= 3:  # noqa: PLR2004
            position -= 3
        start, end = position, position + dice.choice((0, 3, 3, 3, 8))
        epoch += dice.choice((0, 0, 1, 3)) if dice.random() < 0.95 else -1  # noqa: PLR2004
        readable = dice.randint(start, end) if dice.random() < 0.1 else start  # noqa: PLR2004
        return part(partition, start, end, generation=max(0, generation), epoch=epoch, readable=readable)

    def _is_new(self, wanted: ClaimedRange) -> bool | None:
        if wanted.partition not in self._positions:
            return True
        generation, epoch, position = self._positions[wanted.partition]
        if wanted.generation < generation or wanted.epoch < epoch:
            return None
        if wanted.generation > generation:
            return True
        if wanted.end == position:
            return False
        return True if wanted.start == position else None


@case
def random_histories(target: Target) -> None:
    """After each step of a random history the output has exactly the expected rows."""
    spare = 10**6
    deliver(target, "spare", part(spare, 0, 5))
    can_replace = target.sink().can_replace([part(spare, 0, 5, generation=1)]) is None
    for seed in range(_SEEDS):
        dice = Random(seed)  # noqa: S311 - for tests, not for security
        model = Model(dice, seed * _PARTITIONS, can_replace=can_replace)
        others = target.found()
        for step in range(_STEPS):
            _one_step(target, model, dice, f"v{step}")
            expect_rows(target, others + model.rows, f"after step {step} of the random history {seed}")


def _one_step(target: Target, model: Model, dice: Random, value: str) -> None:
    batch = model.batch()
    removed = {offset for offset in range(60) if dice.random() < 0.2}  # noqa: PLR2004 - chances
    read = rows_of(value, *batch, without=removed)
    written = [row for row in read if dice.random() < 0.9]  # noqa: PLR2004
    taken = model.taken(batch)
    try:
        outcome = target.sink().write(target.frame(written), batch, lambda: intervals(read))
    except SinkRejectedError as refused:
        if taken is not None:
            raise AssertionError(f"{batch} was refused: {refused}") from refused
        return
    expect(taken is not None, f"{batch} was not refused")
    partitions = {range_.partition for range_ in outcome.taken}
    expect(partitions == taken, f"{batch}: partitions {sorted(partitions)} were taken, expected {sorted(taken or ())}")
    model.apply(batch, read, written)
