"""The options of a batch: which partitions and ranges to claim, and how much. `BatchSession` takes them."""

from collections.abc import Callable
from dataclasses import dataclass

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.batch_planning import StartPolicy
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class Advice:
    """The partitions of a topic that a process should claim now; only claims decide who holds them."""

    partitions: frozenset[int]
    """The partitions to claim."""
    text: str
    """Why these partitions; an idle batch shows it in its text."""


Advise = Callable[[str], Advice | None]
"""Called with the topic at the start of each batch; None lets the batch claim any free partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOptions:
    """How a batch claims ranges of partitions, in a group whose settings name the feature `ranges`.

    The batch claims at most one range of each partition.

    Raises:
        ConfigurationError: `size` is less than 1, or another value is negative.

    Example:
        ```python
        BatchRequest(topic="orders", ranges=RangeOptions(size=100_000))
        ```
    """

    size: int = 1_000_000
    """The highest number of offsets in a range; offsets that retention has deleted do not count."""
    prefetch_offsets: int = 0
    """The number of offsets that may be claimed before they have a message, if no messages are unread."""
    wait_s: float = 60.0
    """How long to wait for messages at prefetched offsets, in seconds."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigurationError(f"ranges.size is {self.size}; it must be at least 1")
        if self.prefetch_offsets < 0 or not self.wait_s >= 0:
            raise ConfigurationError(
                f"ranges.prefetch_offsets is {self.prefetch_offsets} and ranges.wait_s is {self.wait_s}; neither may "
                "be negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The options of one batch.

    Raises:
        ConfigurationError: A value is out of range, or two options exclude each other.

    Example:
        ```python
        BatchRequest(topic="orders", max_records=1_000_000, max_claims=4)
        ```
    """

    topic: str
    """The data topic."""
    partitions: tuple[int, ...] | None = None
    """The partitions that the batch may claim. By default all, or those that `BatchSession.advise` returns."""
    max_records: int | None = None
    """The highest number of offsets in all ranges of the batch together; by default no limit."""
    max_claims: int | None = None
    """The highest number of partitions that the batch claims; by default no limit."""
    claim_entire_topic: bool = False
    """Claim all partitions of the topic or none."""
    start: StartPolicy = StartPolicy.EARLIEST
    """Where the group starts when it claims the topic for the first time."""
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    """A plan that has had this many attempts is not tried again, unless `retry_exhausted` is set."""
    retry_exhausted: bool = False
    """Try plans again that have had `max_attempts` attempts."""
    allow_data_loss: bool | None = None
    """Continue although retention deleted unread messages. By default only delivery at least once continues."""
    allow_log_reset: bool = False
    """Continue although Kafka has a committed offset of the group and the coordination log has none.

    That happens if the coordination log was deleted and re-created. Delivery at least once always continues.
    """
    allow_topic_without_id: bool = False
    """Claim a data topic without an id, of brokers before Kafka 2.8 or of a service.

    If such a topic is deleted and re-created, messages may be skipped or repeated unnoticed. Delivery at least once
    always continues, with a warning.
    """
    late_plan: bool = False
    """Write the plan late: just before the sink gets the rows (`ClaimedBatch.plan`).

    The plan is also written when the sink refuses the ranges, or when the block ends with an error that counts as an
    attempt. Delivery at most once always plans late.
    """
    except_partitions: frozenset[int] = frozenset()
    """Partitions that the batch must not claim."""
    ranges: RangeOptions | None = None
    """How ranges are claimed, in groups whose settings name the feature `ranges`."""

    def __post_init__(self) -> None:
        for name, least in (("max_records", 1), ("max_claims", 1), ("max_attempts", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}; it must be at least {least}")
        if self.partitions is not None and not self.partitions:
            raise ConfigurationError("partitions is empty: name some, or leave it out to claim any partition")
        if self.partitions is not None and any(partition < 0 for partition in self.partitions):
            raise ConfigurationError(f"partitions is {list(self.partitions)}; partitions are numbered from 0")
        if self.claim_entire_topic and (self.partitions is not None or self.max_claims is not None):
            raise ConfigurationError("claim_entire_topic claims all partitions: leave out partitions and max_claims")
        if self.claim_entire_topic and self.ranges is not None:
            raise ConfigurationError(
                "claim_entire_topic claims whole partitions: leave out either ranges or claim_entire_topic"
            )
