"""Who is told what becomes of a claimer's records: metrics and log lines stand on it, no rule does."""

import logging
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from marshal_dagster.coordination.base_claimer import BaseClaimer
    from marshal_dagster.coordination.sending import Sent
    from marshal_dagster.coordination.tenure import Held

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Only looks: it changes nothing, and what it raises is logged and goes no further.

    It is called under the rationalizer's lock, by the thread that works or the one that beats: both wait for it, so it
    waits for nobody.
    """

    def sent(self, claimer: "BaseClaimer[Any]", sent: "Sent") -> None:
        """Take in what records came to, before the claimer does: its claims and leases are those from before."""
        ...

    def lost(self, claimer: "BaseClaimer[Any]", claim: "Held", why: str) -> None:
        """Take in that a claim is held no more, not by the claimer's own will."""
        ...


class Told:
    """Tells an observer about one claimer."""

    def __init__(self, observer: Observer, claimer: "BaseClaimer[Any]") -> None:
        """Tell `observer` about `claimer`."""
        self._observer = observer
        self._claimer = claimer

    def sent(self, sent: "Sent") -> None:
        """Tell it what records came to."""
        try:
            self._observer.sent(self._claimer, sent)
        except Exception:
            logger.exception("an observer of claims failed")

    def lost(self, claim: "Held", why: str) -> None:
        """Tell it of a lost claim."""
        try:
            self._observer.lost(self._claimer, claim, why)
        except Exception:
            logger.exception("an observer of claims failed")
