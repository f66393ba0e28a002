"""Members of a group take steps in any order; `tests/claimer_statemachine.py` has the invariants."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from marshal_dagster.coordination.claim_set import ClaimSet
from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.group_reader import GroupReader
from marshal_dagster.errors import MarshalError
from marshal_dagster.protocol.leases import Lease
from tests.claimer_statemachine import ClaimerMachine
from tests.member_statemachine import run_until_seen

SETTINGS = settings(max_examples=150, stateful_step_count=40)
UNTIL_FOUND = settings(
    SETTINGS,
    max_examples=1_000,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
)


@pytest.mark.thorough
def test_any_steps_leave_every_claim_with_one_holder() -> None:
    """Members claim, plan, commit, release, revoke and die, under pauses and expiring leases; each event occurs."""
    happens = {"claim", "takeover", "paused", "plan", "commit", "lost at a heartbeat", "release", "revoke"}
    run_until_seen(ClaimerMachine, SETTINGS, happens)


# Check that the state machine finds errors


def forgetful(_: object) -> None:
    """Check no lease."""


def greedy(self: ClaimSet[Any], partition: int, _: str) -> None:
    """Keep a claim that was lost."""
    self.left.pop(partition, None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("of", "name", "instead"),
    [
        (Lease, "holds", lambda *_: True),
        (ClaimSet, "drop_ended", forgetful),
        (ClaimSet, "lose", greedy),
        (ClaimSet, "request", lambda *_: None),
        (ClaimSet, "give_up", lambda *_: []),
        (Claimer, "revoke", lambda _, epochs: frozenset(epochs)),
        (GroupReader, "require_running", forgetful),
    ],
    ids=["endless-lease", "no-fencing", "nothing-lost", "asks-twice", "stays", "revokes-nothing", "ignores-pauses"],
)
def test_a_broken_member_is_found(
    monkeypatch: pytest.MonkeyPatch, of: type, name: str, instead: Callable[..., Any]
) -> None:
    """A member that breaks a rule violates an invariant or raises an error."""
    monkeypatch.setattr(of, name, instead)
    with pytest.raises((AssertionError, MarshalError, TypeError)):
        run_state_machine_as_test(ClaimerMachine, settings=UNTIL_FOUND)
