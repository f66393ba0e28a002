"""The ground of a batch: the data topic and where the group stands in it, asked and put into words."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marshal_dagster.batches.request import BatchRequest
from marshal_dagster.batches.result import Idle, IdleReason
from marshal_dagster.coordination.claimer import Claim
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.pause_text import paused_group_text
from marshal_dagster.coordination.range_claimer import RangeClaim
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, DataTopicChangedError
from marshal_dagster.protocol.batch_planning import ClaimedRange, Position, check_incarnation, position, reach
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.open_plans import retry_command
from marshal_dagster.protocol.staleness import stale_after_ms
from marshal_dagster.protocol.state import Key, OffsetBounds, Owner, enables_ranges

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class BatchContext:
    """What a batch asks of its data topic and of the group's keys; copies, which later records do not change.

    `look_up` before anything else.
    """

    request: BatchRequest
    group: str
    run_id: str
    settings: GroupSettings
    data: "Topics"
    rationalizer: Rationalizer
    clock: Clock
    is_dead: Callable[[Owner], bool]
    topic_id: str = ""
    existing: Sequence[int] = ()
    """The topic's partitions."""

    @property
    def accepts_loss(self) -> bool:
        """Whether the batch goes on where retention deleted messages unread."""
        if self.request.allow_data_loss is not None:
            return self.request.allow_data_loss
        return self.settings.delivery is DeliveryMode.AT_LEAST_ONCE

    @property
    def is_go(self) -> bool:
        """Whether the group is shared with Go consumers."""
        return self.settings.rule_set is RuleSet.GO

    # The data topic

    def look_up(self) -> None:
        """Learn the topic's id and partitions."""
        described = self.data.describe(self.request.topic)
        self.topic_id, self.existing = described.topic_id, described.partitions

    def check_topic(self) -> None:
        """Raise `DataTopicChangedError` unless the topic is the one that was looked up."""
        now = self.data.describe(self.request.topic).topic_id
        if now != self.topic_id:
            raise DataTopicChangedError(
                f"topic {self.request.topic!r} was made anew while this batch read it (id {now} instead of "
                f"{self.topic_id}); nothing was written or committed. A person must set the position"
            )

    def wanted(self) -> list[int]:
        """Give the partitions that the request names; raises `ConfigurationError` where there are none such."""
        if self.request.partitions is None:
            return list(self.existing)
        unknown = sorted(set(self.request.partitions) - set(self.existing))
        if unknown:
            raise ConfigurationError(
                f"topic {self.request.topic!r} has no partitions {unknown}; it has {len(self.existing)}"
            )
        return sorted(set(self.request.partitions))

    def extents(self, partitions: Collection[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:
        """Return what can be read of `partitions`; it ends where open transactions begin if `committed_only`."""
        return self.data.offsets(self.request.topic, partitions, committed_only=committed_only)

    def group_offsets(self) -> Mapping[int, int]:
        """Give the offsets that Kafka knows of the group."""
        return self.data.group_offsets(self.group, self.request.topic)

    def position(self, partition: int, offset: int, extent: OffsetBounds) -> Position:
        """Lay `offset` against what can be read; raises `DataLossError`."""
        return position(self.name(partition), offset, extent, allow_data_loss=self.accepts_loss)

    # The group's keys

    def keys(self, partitions: Iterable[int]) -> dict[int, Key]:
        """Give copies of the keys' states."""
        with self.rationalizer.lock:
            world, topic = self.rationalizer.world, self.request.topic
            return {partition: world.snapshot_key(self.group, topic, partition) for partition in partitions}

    def check_incarnation(self, keys: Mapping[int, Key], extents: Mapping[int, OffsetBounds]) -> None:
        """Raise `DataTopicChangedError` unless all keys, and ranges that are batches already, are of this very topic.

        In a Go group only an offset beyond the topic's end shows another one: ids are not looked at there. `extents`
        end where open transactions begin; a position may lie beyond that, not beyond the last message.
        """
        beyond = {number for number, key in keys.items() if reach(key) > extents[number].end}
        whole = self.extents(beyond, committed_only=False) if beyond else {}
        for number, key in keys.items():
            known = replace(key, data_topic_id=None) if self.is_go else key
            check_incarnation(self.name(number), known, self.topic_id, whole.get(number, extents[number]))

    # Ranges and messages

    def ranges(
        self, claims: Mapping[int, Claim | RangeClaim], positions: Mapping[int, Position], ends: Mapping[int, int]
    ) -> tuple[ClaimedRange, ...]:
        """Make the parts of the batch: of each partition in `ends` from its claim's position up to there."""
        ranges = tuple(
            ClaimedRange(
                coordination_topic_id=self.rationalizer.identity.topic_id,
                group=self.group,
                topic=self.request.topic,
                data_topic_id=self.topic_id,
                partition=number,
                generation=claims[number].generation,
                epoch=claims[number].epoch,
                start=positions[number].offset,
                end=end,
                first_readable=min(positions[number].readable, end),
                in_any_order=enables_ranges(self.settings),
            )
            for number, end in sorted(ends.items())
        )
        for range_ in ranges:
            if range_.lost is not None:
                logger.error("retention deleted %s unread: offsets %d to %d (exclusive) are lost", range_, *range_.lost)
        return ranges

    def name(self, partition: int) -> str:
        """Name a key for people."""
        return f"{self.request.topic}/{partition} of group {self.group!r}"

    def paused(self, until_s: int | None) -> Idle:
        """Say that the group is paused until then (unix seconds)."""
        return Idle(IdleReason.PAUSED, paused_group_text(self.group, until_s))

    def given_up(self, plans: Mapping[int, tuple[int | None, int | None]]) -> str:
        """Say that `plans` are left alone."""
        named = ", ".join(f"partition {number} [{start}, {end})" for number, (start, end) in plans.items())
        topic, tries = self.request.topic, self.request.max_attempts + 1
        return (
            f"plans of topic {topic!r} were tried {tries} times and are left alone: {named}. Fix the cause and run "
            f"`{retry_command(self.group, topic, plans)}`, or set the position past them"
        )

    def drained(self) -> Idle:
        """Return that there is nothing to read."""
        return Idle(IdleReason.DRAINED, f"topic {self.request.topic!r} has nothing to read beyond what was done")

    def why_idle(self, held: Idle | None, exhausted: Mapping[int, tuple[int | None, int | None]]) -> Idle:
        """Return why nothing was claimed: what can be read is `held`, its plans are `exhausted`, or there is none."""
        if not exhausted:
            return held or self.drained()
        given_up = self.given_up(exhausted)
        return replace(held, text=f"{held.text}. {given_up}") if held else Idle(IdleReason.GIVEN_UP, given_up)

    def held(self, text: str, owners: Sequence[tuple[Owner, int]]) -> Idle:
        """Return that `owners`, with their last heartbeats (ms), hold what could be done: `text`, and what is own."""
        ours = [(owner, last_ms) for owner, last_ms in owners if owner.instance.rpartition(".")[0] == self.run_id]
        if not ours:
            return Idle(IdleReason.HELD, text)
        stale_in_s = max(0.0, self.live_for_ms(last_ms for _, last_ms in ours)) / 1_000
        instances = ", ".join(sorted({repr(owner.instance) for owner, _ in ours}))
        return Idle(
            IdleReason.HELD,
            f"{text}. Of this very run is instance {instances}: a process of it that died, and is stale in "
            f"{stale_in_s:.1f} s, or one that works on",
            stale_in_s,
        )

    def live_for_ms(self, last_beats_ms: Iterable[int]) -> float:
        """Give for how long the youngest of owners last heard of then is not stale; negative once all of them are."""
        world, topic = self.rationalizer.world, self.request.topic
        with self.rationalizer.lock:
            now_ms = world.advice_time_ms(self.group, topic, self.clock.wall_ms())
            interval_ms = world.group_of(self.group, topic).settings.heartbeat_interval_ms
        return max(last_beats_ms) + stale_after_ms(interval_ms) - now_ms
