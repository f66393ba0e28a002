"""The states of a claimed batch: each allowed transition works, and all others are refused."""

from collections.abc import Iterable
from itertools import product

import pytest

from marshal_dagster.batches.batch import BATCH_TRANSITIONS, BatchEvent, BatchState
from marshal_dagster.errors import ConfigurationError
from tests.batch_fixtures import Scene

LEGAL = {
    BatchState.PREPARED: {BatchEvent.ENTER},
    BatchState.CLAIMED: {BatchEvent.PERMIT, BatchEvent.READ, BatchEvent.LEAVE},
    BatchState.PERMITTED: {BatchEvent.READ, BatchEvent.LEAVE},
    BatchState.READ: {BatchEvent.READ, BatchEvent.LEAVE},
    BatchState.LEFT_UNREAD: {BatchEvent.COMPLETE},
    BatchState.LEFT_READ: {BatchEvent.COMPLETE},
    BatchState.COMPLETED: set(),
}


def reachable(states: Iterable[BatchState]) -> set[BatchState]:
    """Return all states that can be reached from `states`."""
    found = set(states)
    while new := {after for (before, _), after in BATCH_TRANSITIONS.items() if before in found} - found:
        found |= new
    return found


@pytest.mark.parametrize(("state", "event"), list(product(BatchState, BatchEvent)))
def test_a_batch_makes_the_moves_of_the_table_and_no_other(state: BatchState, event: BatchEvent) -> None:
    """Each pair of a state and an event is allowed or refused; a refused event does not change the state."""
    scene = Scene()
    batch = scene.batch(scene.delivery())
    batch._state = state

    if event in LEGAL[state]:
        batch._move(event)
        assert batch._state is BATCH_TRANSITIONS[state, event]
    else:
        with pytest.raises(ConfigurationError, match=f"a batch that is {state} cannot {event}"):
            batch._move(event)
        assert batch._state is state


def test_every_state_is_reached_and_what_was_left_is_never_read_again() -> None:
    """Every state is reachable; after its block ended, a batch neither gets permission nor is read."""
    assert reachable([BatchState.PREPARED]) == set(BatchState)
    after = reachable([BatchState.LEFT_UNREAD, BatchState.LEFT_READ])
    assert after == {BatchState.LEFT_UNREAD, BatchState.LEFT_READ, BatchState.COMPLETED}


def test_a_batch_that_was_left_cannot_be_read() -> None:
    """After the block, the claims are released, so another member may hold the ranges."""
    scene = Scene()
    scene.data.make(messages=5)
    with scene.batch(scene.delivery()) as batch:
        batch.begin_processing()

    with pytest.raises(ConfigurationError, match="read it in the block"):
        batch.begin_processing()
