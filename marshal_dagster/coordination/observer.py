"""Observer callbacks for claimer events (metrics, logs); no rule depends on them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from marshal_dagster.coordination.appender import AppendResult
    from marshal_dagster.coordination.claims import BaseClaim, Member
    from marshal_dagster.coordination.clock import Clock

logger = logging.getLogger(__name__)


class ObservedClaimer(Protocol):
    """The parts of a claimer that an observer may read."""

    @property
    def member(self) -> "Member":
        """The group, client id and instance id of the claimer."""
        ...

    @property
    def topic(self) -> str:
        """The data topic."""
        ...

    @property
    def clock(self) -> "Clock":
        """The clock by which leases are counted."""
        ...

    @property
    def claims(self) -> Mapping[int, "BaseClaim"]:
        """The claims that are held, by partition."""
        ...


class Observer(Protocol):
    """Callbacks for the events of claimers. Errors that they raise are logged and have no other effect.

    A callback runs under the rationalizer's lock, in the working thread or in the one that sends heartbeats. That
    thread waits for it, so a callback must not block.
    """

    def sent(self, claimer: ObservedClaimer, sent: "AppendResult") -> None:
        """Handle the results of records; the claims and leases of `claimer` are still those from before."""
        ...

    def lost(self, claimer: ObservedClaimer, claim: "BaseClaim", why: str) -> None:
        """Handle a claim that was lost, as opposed to released."""
        ...


@dataclass(frozen=True, slots=True)
class ClaimerObserver:
    """Reports the records and losses of one claimer to an observer, if there is one."""

    observer: Observer | None
    claimer: ObservedClaimer

    def sent(self, sent: "AppendResult") -> None:
        """Report the results of records."""
        self._report(lambda observer: observer.sent(self.claimer, sent))

    def lost(self, claim: "BaseClaim", why: str) -> None:
        """Report a lost claim."""
        self._report(lambda observer: observer.lost(self.claimer, claim, why))

    def _report(self, report: Callable[[Observer], None]) -> None:
        if self.observer is None:
            return
        try:
            report(self.observer)
        except Exception:
            logger.exception("an observer of claims failed")
