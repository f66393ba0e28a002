"""The commit before processing in at most once, and which ranges it drops (protocol.md, section 6, "At most once").

`ClaimedBatch` uses it to find out which ranges it may process, and which are lost if it does not process them.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marshal_dagster.coordination.claimer import Claim
from marshal_dagster.coordination.range_claimer import RangeClaim
from marshal_dagster.protocol.batch_planning import ClaimedRange

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EarlyCommit:
    """The claims whose commit was sent before processing, and the partitions that may be processed."""

    claims: Mapping[int, Claim] | Mapping[int, RangeClaim] = field(default_factory=dict)
    permitted: frozenset[int] | None = None
    """The partitions that this process may process; None until the commit has ended."""
    _logged: set[ClaimedRange] = field(default_factory=set)

    @property
    def was_tried(self) -> bool:
        """Whether a commit was sent, so that it may be in the log."""
        return bool(self.claims)

    def is_permitted(self, part: ClaimedRange) -> bool:
        """Return whether this process's own record has committed the range."""
        return self.permitted is not None and part.partition in self.permitted

    def is_refused(self, part: ClaimedRange) -> bool:
        """Return whether the commit has ended without permission to process the range."""
        return self.permitted is not None and not self.is_permitted(part)

    def is_dropped(self, part: ClaimedRange, *, is_aborted: bool) -> bool:
        """Return whether the commit of the range is or may be in the log, but the range is not completely processed."""
        claim = self.claims.get(part.partition)
        if claim is None or not claim.may_be_at(part.end):
            return False
        return is_aborted or not self.is_permitted(part)

    def how_dropped(self, part: ClaimedRange, *, was_read: bool) -> str:
        """Return `dropped` if a range is certainly committed and certainly not processed, else `possibly dropped`."""
        if self.is_permitted(part):
            return "possibly dropped" if was_read else "dropped"
        return "dropped" if self.claims[part.partition].offset == part.end else "possibly dropped"

    def log_dropped(self, dropped: Iterable[ClaimedRange], *, was_read: bool) -> None:
        """Log the dropped ranges, each once."""
        new = [part for part in dropped if part not in self._logged]
        self._logged.update(new)
        for how in ("dropped", "possibly dropped"):
            ranges = ", ".join(str(part) for part in new if self.how_dropped(part, was_read=was_read) == how)
            if ranges:
                logger.error("%s, not repeated in at most once: %s", how, ranges)
