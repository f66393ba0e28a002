"""A state that changes only along a table of transitions."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Transitions = Mapping[State, Mapping[Event, State]]
"""For each state the events that are legal in it, with the state that follows."""


class IllegalTransitionError(RuntimeError):
    """The table has no transition for an event in the present state: a defect of the caller."""


class StateMachine(Generic[State, Event]):
    """The present state, which only `apply` changes."""

    def __init__(self, transitions: Transitions[State, Event], initial: State) -> None:
        """Begin in `initial`."""
        self._transitions = transitions
        self._state = initial

    @property
    def state(self) -> State:
        """The present state."""
        return self._state

    def apply(self, event: Event) -> None:
        """Go to the state that follows `event`. Raises `IllegalTransitionError` when the table has none."""
        following = self._transitions[self._state].get(event)
        if following is None:
            raise IllegalTransitionError(f"{event} is not legal in state {self._state}")
        self._state = following
