"""At most once: what came of the commit before processing (protocol.md, section 6, "At most once")."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marshal_dagster.coordination.claimer import Claim
from marshal_dagster.coordination.range_claimer import RangeClaim
from marshal_dagster.protocol.batch_planning import ClaimedRange

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EarlyCommit:
    """The claims of which a commit was tried, each of which knows what was sent for it, and what was permitted."""

    claims: Mapping[int, Claim] | Mapping[int, RangeClaim] = field(default_factory=dict)
    permitted: frozenset[int] | None = None
    """The partitions that this process may process; None until the commit has ended."""
    _logged: set[ClaimedRange] = field(default_factory=set)

    @property
    def was_tried(self) -> bool:
        """Whether a commit was sent, so that it may be in the log."""
        return bool(self.claims)

    def is_permitted(self, part: ClaimedRange) -> bool:
        """Tell whether this very process's own record has committed the range."""
        return self.permitted is not None and part.partition in self.permitted

    def is_refused(self, part: ClaimedRange) -> bool:
        """Tell whether the commit gave no permission for the range; another process may have it by now."""
        return self.permitted is not None and not self.is_permitted(part)

    def is_dropped(self, part: ClaimedRange, *, is_aborted: bool) -> bool:
        """Tell whether the commit of the range is or may be in the log though it is not processed, or not wholly."""
        claim = self.claims.get(part.partition)
        if claim is None or not claim.may_be_at(part.end):
            return False
        return is_aborted or not self.is_permitted(part)

    def how_dropped(self, part: ClaimedRange, *, was_read: bool) -> str:
        """Return whether a dropped range is committed for sure and untouched for sure."""
        if self.is_permitted(part):
            return "possibly dropped" if was_read else "dropped"
        return "dropped" if self.claims[part.partition].offset == part.end else "possibly dropped"

    def log_dropped(self, dropped: Iterable[ClaimedRange], *, was_read: bool) -> None:
        """Log what was dropped, each range once."""
        new = [part for part in dropped if part not in self._logged]
        self._logged.update(new)
        for how in ("dropped", "possibly dropped"):
            ranges = ", ".join(str(part) for part in new if self.how_dropped(part, was_read=was_read) == how)
            if ranges:
                logger.error("%s, as at most once must: %s", how, ranges)
