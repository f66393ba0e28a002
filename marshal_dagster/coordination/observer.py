"""Who is told what becomes of a claimer's records: metrics and log lines stand on it, no rule does."""

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    def claims(self) -> "Mapping[int, BaseClaim]":
        """The claims that are held, by partition."""
        ...


class Observer(Protocol):
    """Only looks: it changes nothing, and what it raises is logged and goes no further.

    It is called under the rationalizer's lock, by the thread that works or the one that beats: both wait for it, so it
    waits for nobody.
    """

    def sent(self, claimer: "ObservedClaimer", sent: "AppendResult") -> None:
        """Take in what records came to, before the claimer does: its claims and leases are those from before."""
        ...

    def lost(self, claimer: "ObservedClaimer", claim: "BaseClaim", why: str) -> None:
        """Take in that a claim is held no more, not by the claimer's own will."""
        ...


class ClaimerObserver:
    """Tells an observer about one claimer."""

    def __init__(self, observer: Observer, claimer: "ObservedClaimer") -> None:
        """Tell `observer` about `claimer`."""
        self._observer = observer
        self._claimer = claimer

    def sent(self, sent: "AppendResult") -> None:
        """Tell it what records came to."""
        try:
            self._observer.sent(self._claimer, sent)
        except Exception:
            logger.exception("an observer of claims failed")

    def lost(self, claim: "BaseClaim", why: str) -> None:
        """Tell it of a lost claim."""
        try:
            self._observer.lost(self._claimer, claim, why)
        except Exception:
            logger.exception("an observer of claims failed")
