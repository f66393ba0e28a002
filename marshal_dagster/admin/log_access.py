"""How commands open the coordination log: once to look, and again, as a member, to write."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import IncompleteLogError
from marshal_dagster.protocol.world import World

OpenForInterval = Callable[[int], Rationalizer]
"""Opens a reader on a coordination log that can be written as members of that heartbeat interval (ms) write it."""
LOOKING_MS: Final = 60_000
"""The interval for who looks: nothing is written."""


@dataclass(slots=True)
class LogUser:
    """Reads a coordination log, which is opened at the first look; `close` it afterwards."""

    open_log: OpenForInterval
    _reader: Rationalizer | None = field(default=None, init=False)

    @property
    def reader(self) -> Rationalizer:
        """The log as it is looked at."""
        if self._reader is None:
            self._reader = self.open_log(LOOKING_MS)
        return self._reader

    def close(self) -> None:
        """Close the log, if it was opened."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def require_certain(world: World, topic: str) -> None:
    """Raise `IncompleteLogError` where the state of the keys of `topic` can only be observed."""
    if not world.partition_of(topic).certain:
        raise IncompleteLogError(
            f"the coordination partition of topic {topic!r} no longer begins at offset 0 and has no snapshot: what it "
            "shows is not sure, and nothing can be changed by it. Stop all members of the group, then see "
            "`marshal-dagster recover`"
        )
