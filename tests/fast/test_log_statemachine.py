"""The log in memory under random steps; `tests/log_statemachine.py` describes what must hold.

The same state machine runs against Kafka in `tests/real/test_log_statemachine.py`.
"""

from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from marshal_dagster.coordination.log import Ack, Append, Chunk
from marshal_dagster.testing import MemoryLog
from tests.log_statemachine import MemoryLogMachine

SETTINGS = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.thorough
def test_any_steps_leave_the_log_as_the_lists_say() -> None:
    """Members append, read, move and leave in any order, and the broker loses records.

    The log always matches the model.
    """
    run_state_machine_as_test(MemoryLogMachine, settings=SETTINGS)


# Check that the state machine finds faults.

QUICK = settings(
    SETTINGS, database=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False
)


def assert_found() -> None:
    """Check that the state machine finds the fault."""
    with pytest.raises(AssertionError):
        run_state_machine_as_test(MemoryLogMachine, settings=QUICK)


def test_acknowledgements_of_other_offsets_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledgements with the offsets of other records are found."""
    append = MemoryLog.append

    def swapped(self: MemoryLog, records: Sequence[Append]) -> Sequence[Ack]:
        return list(reversed(append(self, records)))

    monkeypatch.setattr(MemoryLog, "append", swapped)
    assert_found()


@pytest.mark.slow
def test_a_record_that_is_given_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is returned twice is found."""
    read_until = MemoryLog.read_until

    def twice(self: MemoryLog, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        for chunk in read_until(self, ends, timeout_s):
            yield chunk._replace(records=[*chunk.records, *chunk.records[-1:]])

    monkeypatch.setattr(MemoryLog, "read_until", twice)
    assert_found()


@pytest.mark.slow
def test_a_position_that_is_not_reported_as_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that moves a reader to its start, instead of raising PositionLostError, is found."""
    read_until = MemoryLog.read_until

    def moved(self: MemoryLog, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        for number, position in self._positions.items():
            self._positions[number] = max(position, self.broker.bounds(number).start)
        yield from read_until(self, ends, timeout_s)

    monkeypatch.setattr(MemoryLog, "read_until", moved)
    assert_found()


@pytest.mark.slow
def test_a_reader_that_begins_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that starts one offset too late is found."""
    follow = MemoryLog.follow

    def late(self: MemoryLog, positions: Mapping[int, int]) -> None:
        follow(self, {number: min(at + 1, self.broker.bounds(number).end) for number, at in positions.items()})

    monkeypatch.setattr(MemoryLog, "follow", late)
    assert_found()
