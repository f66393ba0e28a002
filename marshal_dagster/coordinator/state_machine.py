"""A state machine whose state changes only along a table of transitions (`member`, `rebalance`)."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)
Transitions = Mapping[State, Mapping[Event, State]]
"""For each state, the events that are legal in it and the state that each leads to."""


class IllegalTransitionError(RuntimeError):
    """The table has no transition for an event in the present state: a bug in the calling code."""


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
        """Change to the state that `event` leads to. Raises `IllegalTransitionError` if the table has none."""
        following = self._transitions[self._state].get(event)
        if following is None:
            raise IllegalTransitionError(f"{event} is not legal in state {self._state}: report this as a bug")
        self._state = following
