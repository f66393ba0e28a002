"""What one instance id does: who it is, what it has asked for, holds, and has lost.

See protocol.md, section 6, "Instance id".
"""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import is_name
from marshal_dagster.protocol.state import Key, Phase, Range


@dataclass(frozen=True, slots=True)
class Member:
    """Who claims: the group, the client id for people to see, and the instance id of one tenure."""

    group: str
    client: str
    instance: str

    def __post_init__(self) -> None:
        """Refuse names that a record could not carry."""
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


def is_held(key: Key, instance: str, epoch: int) -> bool:
    """Tell whether `key`'s owner is the claim that `instance` won with the record at log offset `epoch`."""
    owner = key.owner
    return owner is not None and owner.epoch == epoch and owner.instance == instance


@dataclass(slots=True)
class BaseClaim:
    """What this instance won with the record at log offset `epoch`, and for how long it is surely its own."""

    partition: int
    epoch: int
    lease: Lease
    plan_end: int | None = field(default=None, kw_only=True)

    @property
    def is_over(self) -> bool:
        """Whether it needs no lease and no record any more."""
        return False


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
        """Tell whether a heartbeat that carries `offset` or more was sent."""
        return self.highest_sent >= offset

    def is_at(self, offset: int) -> bool:
        """Tell whether the log as last read says that this is the next to read."""
        return self.offset == offset

    @classmethod
    def of(cls, partition: int, epoch: int, lease: Lease, key: Key) -> "Claim":
        """Make the claim that the record at log offset `epoch` has won, where `key` stands."""
        claim = cls(partition, epoch, lease)
        claim.copy_state(key)
        return claim

    def copy_state(self, key: Key) -> None:
        """Take over where `key` stands."""
        self.offset = key.offset
        self.data_topic_id = key.data_topic_id
        self.generation = key.generation
        self.plan_end = key.plan_end
        self.plan_attempts = key.plan_attempts


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
    data_topic_id: str | None = None
    is_done: bool = False
    may_be_done: bool = False
    """Whether a `RangeDone` of this instance may be in the log that was not acknowledged."""

    @property
    def is_over(self) -> bool:
        """Whether it is done: nobody can claim it again in its generation."""
        return self.is_done

    @property
    def offset(self) -> int:
        """Where it stands: at its end once it is done, before that at its start."""
        return self.end if self.is_done else self.start

    def may_be_at(self, offset: int) -> bool:
        """Tell whether a `RangeDone` was sent, of the range that ends at `offset`."""
        return self.end == offset and (self.is_done or self.may_be_done)

    def is_at(self, offset: int) -> bool:
        """Tell whether the log as last read says that it is done up to `offset`."""
        return self.offset == offset

    @classmethod
    def of(cls, partition: int, epoch: int, lease: Lease, won: Range, key: Key) -> "RangeClaim":
        """Make the claim that the record at log offset `epoch` has won: the range `won` of `key`."""
        claim = cls(partition, epoch, lease, won.start, won.end)
        claim.copy_state(won, key)
        return claim

    def copy_state(self, held: Range, key: Key) -> None:
        """Take over what `key` says of the range; what lies behind a plan that was sent stays given up."""
        if held.phase is Phase.PLANNED:
            self.end = self.plan_end = held.end
        self.attempts = held.attempts
        self.generation = key.generation
        self.data_topic_id = key.data_topic_id


H = TypeVar("H", bound=BaseClaim)


@dataclass(slots=True)
class ClaimSet(Generic[H]):
    """The partitions that an instance has asked for at any time, and what became of them.

    `claims` are those it holds, whole or a range of each, `left` those it held once, and why no more. `unseen` are
    those for which the record that asks is or may be in the log while nobody here has read what came of it, or the one
    that gives up is not sent yet.
    """

    claims: dict[int, H] = field(default_factory=dict)
    requested: set[int] = field(default_factory=set)
    unconfirmed: set[int] = field(default_factory=set)
    left: dict[int, str] = field(default_factory=dict)
    on_lost: Callable[[H, str], None] | None = None
    """Told of each claim that is lost, and why."""

    def ask(self, partitions: Collection[int]) -> None:
        """Note that `partitions` are about to be asked for."""
        self.unconfirmed.update(partitions)
        self.requested.update(partitions)

    def lose(self, partition: int, why: str) -> None:
        """Hold `partition` no more: no further record is sent for it."""
        claim = self.claims.pop(partition, None)
        if claim is None:
            return
        self.left[partition] = why
        if self.on_lost is not None:
            self.on_lost(claim, why)

    def lose_all(self, why: str) -> None:
        """Hold nothing any more."""
        for partition in tuple(self.claims):
            self.lose(partition, why)

    def give_up(self, partitions: Iterable[int] | None) -> list[H]:
        """Hold `partitions` (None: all) no more by one's own will; give their claims, for their last record."""
        leaving = self.claims if partitions is None else dict.fromkeys(partitions)
        return [self.claims.pop(partition) for partition in tuple(leaving) if partition in self.claims]
