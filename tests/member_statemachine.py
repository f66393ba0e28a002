"""The common part of the state machines of members: members start and die, time passes, operators pause the group.

The members write one log in memory. The library's world state and the reference reader read it after each step.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Final, Generic, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from marshal_dagster.coordination.base_claimer import BaseClaimer
from marshal_dagster.protocol.leases import delivery_timeout_ms
from marshal_dagster.protocol.world import World
from tests.members import HI_MS, Site
from tests.reference_reader import PlainReader

ROUNDS: Final = 6
"""The steps are random, so one round may leave out a case."""
MOST_MEMBERS = 4
LEASE_MS = 2 * HI_MS - HI_MS // 10
steps_ms = st.sampled_from(
    [1, HI_MS // 2, HI_MS, LEASE_MS - delivery_timeout_ms(HI_MS), LEASE_MS - 1, LEASE_MS, 2 * HI_MS, 2 * HI_MS + 1]
)
which_ones = st.integers(0, 11)

M = TypeVar("M", bound=BaseClaimer)  # type: ignore[type-arg]


class MemberMachine(RuleBasedStateMachine, Generic[M]):
    """Members of one group, identified by their place in a list."""

    seen: ClassVar[Counter[str]]
    """Counts of what happened in all runs. A test checks that each case occurs."""

    @initialize()
    def begin(self) -> None:
        """A first member writes the settings of the group."""
        self.site = Site()
        self.plain, self.world, self.read = PlainReader(self.site.partitions), World(self.site.partitions), 0
        self.world.start(self.site.home, 0)
        self.paused_until_ms = 0
        self._prepare()
        self.members: list[M] = [self._new_member()]
        self._read_log()

    @rule()
    @precondition(lambda self: len(self.members) < MOST_MEMBERS)
    def join(self) -> None:
        """A new member starts."""
        self.members.append(self._new_member())

    @rule(which=which_ones)
    @precondition(lambda self: len(self.members) > 1)
    def vanish(self, which: int) -> None:
        """A member dies without another record."""
        self.members.remove(self._member(which))

    @rule(passed_ms=steps_ms)
    def wait(self, passed_ms: int) -> None:
        """Time passes."""
        self.site.clock.advance(passed_ms)

    @rule(seconds=st.integers(1, 60))
    def pause(self, seconds: int) -> None:
        """An operator pauses the group."""
        self.site.pause(seconds)
        self.paused_until_ms = (self._now_ms // 1_000 + seconds) * 1_000

    @rule()
    def resume(self) -> None:
        """An operator resumes the group."""
        self.site.pause(0)
        self.paused_until_ms = self._now_ms // 1_000 * 1_000

    @abstractmethod
    def _prepare(self) -> None:
        """Initialise the fields of a subclass."""

    @abstractmethod
    def _new_member(self) -> M:
        """Open a member with the same settings as the group."""

    @abstractmethod
    def _read_log(self) -> None:
        """Let both readers read the new records."""

    def _succeed(self, passed_ms: int) -> int:
        """Let time pass and start a member, after which the oldest may never send a record again; return its number."""
        self.site.clock.advance(passed_ms)
        self.members = [*self.members[1 - MOST_MEMBERS :], self._new_member()]
        return len(self.members) - 1

    @property
    def _now_ms(self) -> int:
        return self.site.clock.wall_ms()

    @property
    def _is_paused(self) -> bool:
        return self._now_ms < self.paused_until_ms

    def _see(self, what: str) -> None:
        self.seen[what] += 1

    def _member(self, which: int) -> M:
        return self.members[which % len(self.members)]


def run_until_seen(machine: type[MemberMachine[Any]], of: settings, happens: AbstractSet[str]) -> None:
    """Run a machine repeatedly until all of `happens` was seen; raise `AssertionError` for what was never seen."""
    machine.seen.clear()
    for _ in range(ROUNDS):
        run_state_machine_as_test(machine, settings=of)
        if machine.seen.keys() >= happens:
            return
    raise AssertionError(f"never happened: {happens - machine.seen.keys()}")
