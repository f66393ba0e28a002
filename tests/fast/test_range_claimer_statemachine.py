"""Members claim ranges in any order of steps; `tests/range_claimer_statemachine.py` checks the result of each step."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from marshal_dagster.coordination.claim_set import ClaimSet
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol import range_choice
from marshal_dagster.protocol.leases import Lease
from tests.member_statemachine import run_until_seen
from tests.range_claimer_statemachine import RangeMachine

SETTINGS = settings(max_examples=150, stateful_step_count=40)
UNTIL_FOUND = settings(
    SETTINGS,
    max_examples=400,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
)
HAPPENS = {
    "range claimed",
    "planned range taken over",
    "range not won",
    "range planned",
    "range revoked",
    "commit",
    "commit after a fault",
    "commit refused",
    "lost at a heartbeat",
}


@pytest.mark.thorough
def test_any_steps_leave_every_offset_with_one_holder() -> None:
    """Members claim, plan, commit, release, revoke and die while records are lost or late.

    All listed events must occur.
    """
    run_until_seen(RangeMachine, SETTINGS, HAPPENS)


# Check that the state machine finds faults.


def nothing(*_: object) -> None:
    """Do nothing."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("of", "name", "instead"),
    [
        (Lease, "holds", lambda *_: True),
        (ClaimSet, "give_up", lambda *_: []),
        (RangeClaimer, "_note_sending", nothing),
        (RangeClaimer, "revoke", lambda _, held: frozenset(held)),
        (RangeClaimer, "_require_fitting", nothing),
        (range_choice, "_lowest_gap", lambda _, offset, until: (offset, until)),
    ],
    ids=["endless-lease", "stays", "forgets", "revokes-nothing", "plans-more", "any-gap"],
)
def test_a_broken_member_is_found(
    monkeypatch: pytest.MonkeyPatch,
    of: object,
    name: str,
    instead: Callable[..., Any],
) -> None:
    """A member without one of the rules violates an invariant or fails."""
    monkeypatch.setattr(of, name, instead)
    with pytest.raises((AssertionError, MarshalError, TypeError)):
        run_state_machine_as_test(RangeMachine, settings=UNTIL_FOUND)
