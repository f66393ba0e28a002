"""The states of a group's rebalance and of a member: which transitions are legal, and that each of them occurs."""

from collections.abc import Iterator
from enum import Enum
from itertools import product
from typing import Any

import pytest

from marshal_dagster.coordinator import member, rebalance
from marshal_dagster.coordinator.member import MemberEvent, MemberState
from marshal_dagster.coordinator.rebalance import RebalanceEvent, RebalanceState
from marshal_dagster.coordinator.state_machine import IllegalTransitionError, StateMachine, Transitions
from tests.coordinator_world import inject_fault

REBALANCE = """
                CHANGE          INTERRUPTION BALANCED STOP_SENT ALL_STOPPED  STOP_TIMED_OUT  ALL_STARTED START_TIMED_OUT
STABLE          DUE             DUE          -        -         -            -               -           -
DUE             DUE             DUE          STABLE   STOPPING  STARTING     -               -           -
STOPPING        STOPPING_DUE    DUE          -        -         STARTING     STARTING_PARTLY -           -
STOPPING_DUE    STOPPING_DUE    DUE          -        -         STARTING_DUE STARTING_PARTLY -           -
STARTING        STARTING_DUE    DUE          -        -         -            -               STABLE      DUE
STARTING_DUE    STARTING_DUE    DUE          -        -         -            -               DUE         DUE
STARTING_PARTLY STARTING_PARTLY DUE          -        -         -            -               DUE         DUE
"""
MEMBER = """
            SILENCE  SUCCESSION  ACCEPTED    REJECTED  FORGOTTEN  LAST_COMMIT  LEFT
LOOKING     LOOKING  LOOKING     REGISTERED  REFUSED   LOOKING    -            GONE
REGISTERED  LOOKING  LOOKING     REGISTERED  REFUSED   LOOKING    LEAVING      GONE
REFUSED     -        REFUSED     REGISTERED  REFUSED   LOOKING    -            GONE
LEAVING     GONE     LEAVING     LEAVING     -         -          -            GONE
GONE        -        -           -           -         -          -            -
"""


def cells(table: str) -> dict[tuple[str, str], str]:
    """Return the following state by state and event, `-` where the event is illegal."""
    events, *rows = (line.split() for line in table.strip().splitlines())
    return {(state, event): to for state, *states in rows for event, to in zip(events, states, strict=True)}


def transitions() -> Iterator[Any]:
    """Yield each state with each event, and the state that follows."""
    for text, table, states, events in (
        (REBALANCE, rebalance.TRANSITIONS, RebalanceState, RebalanceEvent),
        (MEMBER, member.TRANSITIONS, MemberState, MemberEvent),
    ):
        following = cells(text)
        assert len(following) == len(states) * len(events)
        for state, event in product(states, events):
            yield pytest.param(table, state, event, following[state.name, event.name], id=f"{state}-{event}")


@pytest.mark.parametrize(("table", "state", "event", "following"), list(transitions()))
def test_each_event_in_each_state_is_legal_or_refused(
    table: Transitions[Enum, Enum], state: Enum, event: Enum, following: str
) -> None:
    """A legal event leads to the state in the table above; an illegal one raises and changes nothing."""
    machine = StateMachine(table, state)
    if following == "-":
        with pytest.raises(IllegalTransitionError, match=f"{event} is not legal in state {state}"):
            machine.apply(event)
        assert machine.state is state
    else:
        machine.apply(event)
        assert machine.state.name == following


def test_a_state_changes_by_the_table_only() -> None:
    """Code cannot assign the state."""
    machine = StateMachine(rebalance.TRANSITIONS, RebalanceState.STABLE)
    with pytest.raises(AttributeError):
        machine.state = RebalanceState.STARTING  # type: ignore[misc]


@pytest.mark.thorough
def test_each_legal_transition_of_a_rebalance_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated groups under faults pass through each transition, so the table has no unused entry."""
    seen, apply = set(), StateMachine[Any, Any].apply

    def note(machine: StateMachine[Any, Any], event: Enum) -> None:
        seen.add((machine.state, event))
        apply(machine, event)

    monkeypatch.setattr(StateMachine, "apply", note)
    for seed in range(16):
        inject_fault(seed)
    assert {(state, event) for state, row in rebalance.TRANSITIONS.items() for event in row} <= seen
