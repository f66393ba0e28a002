"""Access of an operation to the coordination log: opened once to read, and again as a member to write."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import IncompleteLogError
from marshal_dagster.protocol.world import World

OpenForInterval = Callable[[int], Rationalizer]
"""Opens the coordination log with the write timeouts of a member with that heartbeat interval in milliseconds."""
LOOKING_MS: Final = 60_000
"""The heartbeat interval of a reader, which writes nothing."""


@dataclass(slots=True)
class LogUser:
    """Reads a coordination log, which is opened at the first use; call `close` afterwards."""

    open_log: OpenForInterval
    _reader: Rationalizer | None = field(default=None, init=False)

    @property
    def reader(self) -> Rationalizer:
        """The reader of the log, opened at the first use."""
        if self._reader is None:
            self._reader = self.open_log(LOOKING_MS)
        return self._reader

    def close(self) -> None:
        """Close the log, if it was opened."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def require_certain(world: World, topic: str) -> None:
    """Raise `IncompleteLogError` if the coordination partition of `topic` is incomplete and can only be observed."""
    if not world.partition_of(topic).certain:
        raise IncompleteLogError(
            f"the coordination partition of topic {topic!r} no longer begins at offset 0 and has no usable snapshot, "
            "so its state is uncertain and nothing can be changed. Stop all members of all groups, then run "
            "`marshal-dagster recover`"
        )
