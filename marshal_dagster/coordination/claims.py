"""Who claims, and what one instance id holds (protocol.md, section 6, "Instance id")."""

import os
from dataclasses import dataclass, field, replace
from typing import Self

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import is_name
from marshal_dagster.protocol.range_set import is_done, of_epoch
from marshal_dagster.protocol.state import Key, Phase


@dataclass(frozen=True, slots=True)
class Member:
    """Who claims: the group, the client id for people to see, and the instance id of one tenure."""

    group: str
    client: str
    instance: str

    def __post_init__(self) -> None:
        for name, value in (("group", self.group), ("client id", self.client), ("instance id", self.instance)):
            if not is_name(value):
                raise ConfigurationError(
                    f"{name} {value!r} cannot be written into a record: use 1 to 255 characters, no '/' and no control "
                    "characters"
                )

    def with_new_instance(self) -> "Member":
        """Give the same member with an instance id that was never used: `<what comes before the dot>.<random>`."""
        return replace(self, instance=new_instance_id(self.instance.rpartition(".")[0] or self.instance))


def new_instance_id(run_id: str) -> str:
    """Make the id of one tenure: `<run id>.<random suffix>`."""
    return f"{run_id}.{os.urandom(6).hex()}"


@dataclass(slots=True)
class BaseClaim:
    """What this instance won with the record at log offset `epoch`, and for how long it is surely its own."""

    partition: int
    epoch: int
    lease: Lease
    plan_end: int | None = field(default=None, kw_only=True)
    is_done: bool = field(default=False, kw_only=True)
    """Whether it needs no lease and no record any more: no member can claim a range again that is done."""

    def refresh(self, key: Key, instance: str) -> bool:
        """Take over what `key` shows of the claim; return whether it still is the claim of `instance`."""
        raise NotImplementedError

    def is_held(self, key: Key, instance: str) -> bool:
        """Return whether `key` shows that the claim of `instance` is still held, or done; nothing is taken over."""
        raise NotImplementedError


@dataclass(slots=True)
class Claim(BaseClaim):
    """A key that this instance holds: where it stands by the log as last read, and for how long that is sure."""

    offset: int | None = None
    data_topic_id: str | None = None
    generation: int = 0
    plan_attempts: int = 0
    highest_sent: int = -1
    """The highest offset that a heartbeat of this tenure has carried: none may carry less."""

    @property
    def beat_offset(self) -> int | None:
        """The offset for the next heartbeat that commits nothing."""
        return None if self.offset is None else max(self.offset, self.highest_sent)

    def may_be_at(self, offset: int) -> bool:
        """Return whether a heartbeat that carries `offset` or more was sent."""
        return self.highest_sent >= offset

    @classmethod
    def won(cls, partition: int, epoch: int, lease: Lease, key: Key, instance: str) -> Self | None:
        """Make the claim that the record of `instance` at log offset `epoch` has won, if it still has `key`."""
        claim = cls(partition, epoch, lease)
        return claim if claim.refresh(key, instance) else None

    def refresh(self, key: Key, instance: str) -> bool:
        """Take over where `key` stands; return whether the claim of `instance` still holds it."""
        is_held = self.is_held(key, instance)
        if is_held:
            self.offset = key.offset
            self.data_topic_id = key.data_topic_id
            self.generation = key.generation
            self.plan_end = key.plan_end
            self.plan_attempts = key.plan_attempts
        return is_held

    def is_held(self, key: Key, instance: str) -> bool:
        """Return whether `instance` owns `key` by this claim."""
        owner = key.owner
        return owner is not None and owner.epoch == self.epoch and owner.instance == instance


@dataclass(slots=True)
class RangeClaim(BaseClaim):
    """A range that this instance holds, as it is by the log as last read (protocol.md, section 8.2).

    `plan_end` is there once it is planned, and then equals `end`. A done one stays as it was when it was done.
    """

    start: int
    end: int
    attempts: int = 0
    """How often it was claimed again since it was planned: 0 for a new one."""
    generation: int = 0
    may_be_done: bool = False
    """Whether a `RangeDone` of this instance may be in the log that was not acknowledged."""

    @property
    def offset(self) -> int:
        """Where it stands: at its end once it is done, before that at its start."""
        return self.end if self.is_done else self.start

    def may_be_at(self, offset: int) -> bool:
        """Return whether a `RangeDone` was sent, of the range that ends at `offset`."""
        return self.end == offset and (self.is_done or self.may_be_done)

    @classmethod
    def won(cls, partition: int, epoch: int, lease: Lease, key: Key, instance: str) -> Self | None:
        """Make the claim that the record of `instance` at log offset `epoch` has won, if `key` still has the range."""
        held = of_epoch(key.ranges, epoch)
        if held is None:
            return None
        claim = cls(partition, epoch, lease, held.start, held.end)
        claim.refresh(key, instance)
        return claim

    def refresh(self, key: Key, instance: str) -> bool:  # noqa: ARG002 - the epoch alone names the range
        """Take over what `key` shows of the range; return whether it is still held, or done.

        What lies after the end of a plan that was sent stays released. A range is found done too where nothing
        acknowledged its `RangeDone`.
        """
        if self.is_done:
            return True
        held = of_epoch(key.ranges, self.epoch)
        if held is None:
            self.is_done = self._is_found_done(key)
            return self.is_done
        if held.phase is Phase.PLANNED:
            self.end = self.plan_end = held.end
        self.attempts = held.attempts
        self.generation = key.generation
        return True

    def is_held(self, key: Key, instance: str) -> bool:  # noqa: ARG002 - the epoch alone names the range
        """Return whether `key` shows the range as held by this claim, or as done."""
        return self.is_done or of_epoch(key.ranges, self.epoch) is not None or self._is_found_done(key)

    def _is_found_done(self, key: Key) -> bool:
        return self.may_be_done and key.generation == self.generation and is_done(key, self.start, self.end)
