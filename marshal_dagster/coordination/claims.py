"""The identity of a member, and its claims on partitions and ranges (protocol.md, section 6, "Instance id").

Claimers create and update these objects; they send no records themselves.
"""

import os
from dataclasses import dataclass, field, replace
from typing import Final, Self

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import is_name
from marshal_dagster.protocol.range_set import is_done, of_epoch
from marshal_dagster.protocol.state import Key, Phase

REVOKING: Final = "revoking"
"""The first part of the instance ids that only revoke claims: an operator's; in a sensor's, `-<run id>` follows."""
_OPERATORS: Final = frozenset({"operator", "putting-back", "recover", REVOKING, "setting-positions"})
"""The first parts of the instance ids with which operators' commands write."""


@dataclass(frozen=True, slots=True)
class Member:
    """The identity with which a process claims."""

    group: str
    client: str
    """The client id, which tools show."""
    instance: str
    """The instance id: unique to one tenure, never used again."""

    def __post_init__(self) -> None:
        for name, value in (("group", self.group), ("client id", self.client), ("instance id", self.instance)):
            if not is_name(value):
                raise ConfigurationError(
                    f"{name} {value!r} cannot be written to the coordination log: use 1 to 255 characters, without '/' "
                    "and without control characters"
                )

    def with_new_instance(self) -> "Member":
        """Return the same member with a new instance id: `<the part before the dot>.<random suffix>`."""
        return replace(self, instance=new_instance_id(self.instance.rpartition(".")[0] or self.instance))


def new_instance_id(run_id: str) -> str:
    """Return a new instance id: `<run id>.<random suffix>`."""
    return f"{run_id}.{os.urandom(6).hex()}"


def is_operator(instance: str) -> bool:
    """Return whether an operator's command wrote as this instance."""
    return instance.partition(".")[0] in _OPERATORS


@dataclass(slots=True)
class BaseClaim:
    """A claim that this instance won with the record at log offset `epoch`, and the lease under which it holds it."""

    partition: int
    epoch: int
    lease: Lease
    plan_end: int | None = field(default=None, kw_only=True)
    is_done: bool = field(default=False, kw_only=True)
    """Whether its range is done. Then it needs no lease and no further record, because no member can claim it again."""

    def refresh(self, key: Key, instance: str) -> bool:
        """Update the claim from `key`; return whether `instance` still holds it."""
        raise NotImplementedError

    def is_held(self, key: Key, instance: str) -> bool:
        """Return whether `key` shows that the claim of `instance` is still held, or done; change nothing."""
        raise NotImplementedError


@dataclass(slots=True)
class Claim(BaseClaim):
    """A partition that this instance holds, with its state by the log as last read."""

    offset: int | None = None
    data_topic_id: str | None = None
    generation: int = 0
    plan_attempts: int = 0
    highest_sent: int = -1
    """The highest offset in a heartbeat of this instance; no later heartbeat may have a lower one."""

    @property
    def beat_offset(self) -> int | None:
        """The offset for the next heartbeat that commits nothing; None while the partition has no offset."""
        return None if self.offset is None else max(self.offset, self.highest_sent)

    def may_be_at(self, offset: int) -> bool:
        """Return whether a heartbeat at `offset` or higher was sent."""
        return self.highest_sent >= offset

    @classmethod
    def won(cls, partition: int, epoch: int, lease: Lease, key: Key, instance: str) -> Self | None:
        """Return the claim that the record of `instance` at log offset `epoch` has won, if it still holds `key`."""
        claim = cls(partition, epoch, lease)
        return claim if claim.refresh(key, instance) else None

    def refresh(self, key: Key, instance: str) -> bool:
        """Update the claim from `key`; return whether `instance` still holds it by this claim."""
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
    """A range that this instance holds, with its state by the log as last read (protocol.md, section 8.2).

    Once the range is planned, `plan_end` equals `end`. Once it is done, nothing changes any more.
    """

    start: int
    end: int
    attempts: int = 0
    """How often the range was claimed again since it was planned; 0 for a new range."""
    generation: int = 0
    may_be_done: bool = False
    """Whether a `RangeDone` of this instance may be in the log without acknowledgement."""

    @property
    def offset(self) -> int:
        """The position in the range: its end if it is done, else its start."""
        return self.end if self.is_done else self.start

    def may_be_at(self, offset: int) -> bool:
        """Return whether the range ends at `offset` and a `RangeDone` was sent for it."""
        return self.end == offset and (self.is_done or self.may_be_done)

    @classmethod
    def won(cls, partition: int, epoch: int, lease: Lease, key: Key, instance: str) -> Self | None:
        """Return the claim that the record of `instance` at log offset `epoch` has won, if `key` has the range."""
        held = of_epoch(key.ranges, epoch)
        if held is None:
            return None
        claim = cls(partition, epoch, lease, held.start, held.end)
        claim.refresh(key, instance)
        return claim

    def refresh(self, key: Key, instance: str) -> bool:  # noqa: ARG002 - the epoch alone names the range
        """Update the claim from `key`; return whether the range is still held, or done.

        Offsets after the end of a plan that was sent stay released. A range can be found done even if its `RangeDone`
        was not acknowledged.
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
        """Return whether `key` shows the range as held by this claim, or as done; change nothing."""
        return self.is_done or of_epoch(key.ranges, self.epoch) is not None or self._is_found_done(key)

    def _is_found_done(self, key: Key) -> bool:
        return self.may_be_done and key.generation == self.generation and is_done(key, self.start, self.end)
