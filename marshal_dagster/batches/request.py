"""What a batch should take."""

from collections.abc import Callable
from dataclasses import dataclass

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.batch_planning import StartPolicy
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class Advice:
    """Which partitions of a topic a process should claim now, and why; claims alone decide who holds them."""

    partitions: frozenset[int]
    text: str


Advise = Callable[[str], Advice | None]
"""Asked for a topic at the beginning of each batch; None leaves it all that is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOptions:
    """How a batch claims ranges of partitions, in a group whose settings name the feature `ranges`.

    It takes one range of each partition, of `size` offsets at most, not counting what retention has deleted. Where
    there is nothing to read it may claim up to `prefetch_offsets` offsets that have no message yet, and waits up to
    `wait_s` seconds for them.
    """

    size: int = 1_000_000
    prefetch_offsets: int = 0
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigurationError(f"the size of ranges is {self.size}; it must be at least 1")
        if self.prefetch_offsets < 0 or not self.wait_s >= 0:
            raise ConfigurationError(
                f"ranges are claimed {self.prefetch_offsets} offsets ahead and waited for {self.wait_s} s; "
                "neither can be negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """What one batch should take.

    `partitions` limits it to those (by default all, or those that the process is advised to claim), without
    `except_partitions`. `max_records` bounds the offsets of all its ranges together, `max_claims` how many partitions
    it holds; `claim_entire_topic` takes all partitions or none. `start` is for a group that claims the topic for the
    first time. A plan with `max_attempts` attempts is left alone unless `retry_exhausted`. `allow_data_loss` lets a
    batch go on where retention deleted messages unread (at least once does so by default); `allow_log_reset` lets it
    go on where Kafka knows an offset of the group and the coordination log does not. `ranges` says how ranges are
    claimed, in groups that do. With `late_plan` the plan is written just before the sink is given the rows
    (`ClaimedBatch.plan`), or when the sink refuses the ranges, or when an error that counts as an attempt ends the
    block. It changes nothing in at most once, which always plans late.
    """

    topic: str
    partitions: tuple[int, ...] | None = None
    max_records: int | None = None
    max_claims: int | None = None
    claim_entire_topic: bool = False
    start: StartPolicy = StartPolicy.EARLIEST
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    retry_exhausted: bool = False
    allow_data_loss: bool | None = None
    allow_log_reset: bool = False
    late_plan: bool = False
    except_partitions: frozenset[int] = frozenset()
    ranges: RangeOptions | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_records", 1), ("max_claims", 1), ("max_attempts", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}; it must be at least {least}")
        if self.partitions is not None and not self.partitions:
            raise ConfigurationError("partitions is empty: name some, or leave it out to take all")
        if self.partitions is not None and any(partition < 0 for partition in self.partitions):
            raise ConfigurationError(f"partitions is {list(self.partitions)}; partitions are numbered from 0")
        if self.claim_entire_topic and (self.partitions is not None or self.max_claims is not None):
            raise ConfigurationError("claim_entire_topic takes all partitions: leave out partitions and max_claims")
        if self.claim_entire_topic and self.ranges is not None:
            raise ConfigurationError(
                "claim_entire_topic takes whole partitions: leave out ranges, or claim_entire_topic"
            )
