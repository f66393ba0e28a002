"""A coordination log that fails as networks, brokers and signals do, where and when a test says."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from marshal_dagster.coordination.log import Ack, Append, Chunk, CoordinationLog, LogIdentity
from marshal_dagster.errors import UnavailableError
from marshal_dagster.protocol.state import OffsetBounds


class Fault(Enum):
    """What becomes of a record that is appended."""

    LOST_ACK = auto()
    """It is in the log, and no acknowledgement came."""
    FAILED = auto()
    """It is not in the log, and no acknowledgement came."""
    LATE = auto()
    """No acknowledgement came; it reaches the log later, with `arrive()`."""


Choice = Callable[[Append], bool]


def every(_: Append) -> bool:
    """Choose all records."""
    return True


def of_type(*types: str, partition: int | None = None) -> Choice:
    """Choose records of these types, of all partitions or of one."""

    def chosen(record: Append) -> bool:
        fields = record.value.decode().split("/")
        return fields[0] in types and (partition is None or int(fields[7]) == partition)

    return chosen


class InterruptError(BaseException):
    """What Dagster or Ctrl-C raises in the middle of anything."""


class _InterruptedRecords(list[tuple[int, int, bytes | None]]):
    """Records of which the last is never come to."""

    def __iter__(self) -> Iterator[tuple[int, int, bytes | None]]:
        for index in range(len(self) - 1):
            yield self[index]
        raise InterruptError


@dataclass(slots=True)
class FaultyLog:
    """`log`, with faults on demand. `seen` holds what members tried to append, whether it came through or not."""

    log: CoordinationLog
    seen: list[str] = field(default_factory=list)
    purged: int = 0
    is_down: bool = False
    before_append: Callable[[], None] = lambda: None
    """Called before records are appended: to let time pass, or to raise."""
    after_append: Callable[[], None] = lambda: None
    """Called when records are in the log, before the sender hears of it."""
    after_bounds: Callable[[], None] = lambda: None
    """Called after the bounds were looked up, before they are returned."""
    before_read: Callable[[], None] = lambda: None
    after_read: Callable[[], None] = lambda: None
    """Called when all that was wanted is read."""
    interrupt: str | None = None
    """Where the next reading is interrupted: "read" (records taken from the log are lost) or "apply"."""
    _faults: list[tuple[Fault, Choice, int]] = field(default_factory=list)
    _late: list[Append] = field(default_factory=list)

    @property
    def delivery_timeout_ms(self) -> int:
        """Give the log's."""
        return self.log.delivery_timeout_ms

    def fail(self, fault: Fault, choice: Choice = every, times: int = 1_000_000) -> None:
        """Let `fault` befall the next `times` records that `choice` chooses."""
        self._faults.append((fault, choice, times))

    def recover(self) -> None:
        """Let nothing fail any more."""
        self._faults.clear()
        self.is_down = False
        self.before_append = self.after_append = lambda: None
        self.after_bounds = self.before_read = self.after_read = lambda: None

    def arrive(self) -> None:
        """Let what was late reach the log."""
        late, self._late = self._late, []
        self.log.append(late)

    def types(self) -> list[str]:
        """Give the types of the records seen so far, in order."""
        return [value.split("/", 1)[0] for value in self.seen]

    def identity(self) -> LogIdentity:
        """Ask the log, unless it is down."""
        self._require_up()
        return self.log.identity()

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Ask the log, unless it is down."""
        self._require_up()
        bounds = self.log.bounds(partitions)
        self.after_bounds()
        return bounds

    def follow(self, positions: Mapping[int, int]) -> None:
        """Pass on."""
        self.log.follow(positions)

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:
        """Read, unless it is down or interrupted."""
        self.before_read()
        self._require_up()
        for chunk in self.log.read_until(ends, timeout_s):
            if self.interrupt is not None and chunk.records:
                where, self.interrupt = self.interrupt, None
                if where == "read":
                    raise InterruptError
                yield chunk._replace(records=_InterruptedRecords(chunk.records))
            else:
                yield chunk
        self.after_read()

    def append(self, records: Sequence[Append]) -> Sequence[Ack]:
        """Append what no fault befalls, in order."""
        self.seen.extend(record.value.decode() for record in records)
        self.before_append()
        acks = [self._append(record) for record in records]
        self.after_append()
        return acks

    def purge(self) -> None:
        """Count and pass on."""
        self.purged += 1
        self.log.purge()

    def close(self) -> None:
        """Pass on."""
        self.log.close()

    def _require_up(self) -> None:
        if self.is_down:
            raise UnavailableError("the broker does not answer")

    def _append(self, record: Append) -> Ack:
        if self.is_down:
            return Ack(None, "the broker does not answer")
        fault = self._fault_for(record)
        if fault is None:
            return self.log.append([record])[0]
        if fault is Fault.LOST_ACK:
            self.log.append([record])
        elif fault is Fault.LATE:
            self._late.append(record)
        return Ack(None, "no acknowledgement came")

    def _fault_for(self, record: Append) -> Fault | None:
        for index, (fault, choice, times) in enumerate(self._faults):
            if times and choice(record):
                self._faults[index] = (fault, choice, times - 1)
                return fault
        return None
