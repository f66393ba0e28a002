"""The data topic, offsets and group state that a batch needs, and the texts for its errors and idle reasons."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from marshal_dagster._internal.texts import first_few
from marshal_dagster.batches.request import BatchRequest
from marshal_dagster.batches.result import Idle, IdleReason
from marshal_dagster.coordination.claimer import Claim
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.log import NO_TOPIC_ID
from marshal_dagster.coordination.pause_text import paused_group_text
from marshal_dagster.coordination.range_claimer import RangeClaim
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, DataTopicChangedError
from marshal_dagster.protocol.batch_planning import ClaimedRange, Position, other_incarnation, position
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, RuleSet
from marshal_dagster.protocol.open_plans import OpenPlan, way_out
from marshal_dagster.protocol.staleness import stale_after_ms
from marshal_dagster.protocol.state import Key, OffsetBounds, Owner, PauseOrigin, enables_ranges

if TYPE_CHECKING:
    from marshal_dagster.kafka.admin_client import Topics

logger = logging.getLogger(__name__)

_MOST_NAMED: Final = 10


@dataclass(slots=True, kw_only=True)
class BatchContext:
    """The data topic of a batch, and the state of the group's keys. Call `look_up` before any other method.

    States of keys are copies, so later records do not change them.
    """

    request: BatchRequest
    group: str
    run_id: str
    settings: GroupSettings
    data: "Topics"
    rationalizer: Rationalizer
    clock: Clock
    is_dead: Callable[[Owner], bool]
    known_ids: dict[str, str] = field(default_factory=dict)
    """The id of each data topic at its last look-up; the batches of a session share it."""
    topic_id: str = ""
    existing: Sequence[int] = ()
    """The topic's partitions."""
    _is_id_present: bool = False
    """Whether `topic_id` was looked up for this batch, and not for an earlier one."""

    @property
    def accepts_loss(self) -> bool:
        """Whether the batch continues although retention deleted unread messages."""
        if self.request.allow_data_loss is not None:
            return self.request.allow_data_loss
        return self.settings.delivery is DeliveryMode.AT_LEAST_ONCE

    @property
    def is_go(self) -> bool:
        """Whether the group is shared with Go consumers."""
        return self.settings.rule_set is RuleSet.GO

    # The data topic

    def look_up(self) -> None:
        """Read the topic's id and partitions from the cluster."""
        described = self.data.describe(self.request.topic)
        self.topic_id, self.existing = described.topic_id, described.partitions
        self.known_ids[self.request.topic], self._is_id_present = self.topic_id, True
        if self.topic_id == NO_TOPIC_ID:
            self._check_mode_without_id()

    def look_up_partitions(self) -> None:
        """Read the topic's partitions from the cluster, and its id unless an earlier batch of the session has read it.

        That is much faster for a topic of a thousand partitions. `look_up` reads the id when the claim is won.
        """
        known = self.known_ids.get(self.request.topic, NO_TOPIC_ID)
        if known == NO_TOPIC_ID:
            self.look_up()
        else:
            self.topic_id, self.existing = known, self.data.partition_numbers(self.request.topic)

    def _check_mode_without_id(self) -> None:
        """Raise `ConfigurationError` unless the group may read a topic whose re-creation would not be noticed."""
        topic, group, mode = self.request.topic, self.group, self.settings.delivery
        if mode is DeliveryMode.AT_LEAST_ONCE or self.request.allow_topic_without_id:
            _warn_of_topic_without_id(topic, group)
            return
        raise ConfigurationError(
            f"group {group!r} delivers {mode}, but topic {topic!r} has no id, so it would not be noticed if the topic "
            "were deleted and re-created. Use brokers that give topics an id (Kafka 2.8 or newer), at_least_once, or "
            "allow_topic_without_id"
        )

    def check_topic(self) -> None:
        """Raise `DataTopicChangedError` unless the topic still has the id from `look_up`."""
        now = self.data.describe(self.request.topic).topic_id
        if now != self.topic_id:
            raise DataTopicChangedError(
                f"topic {self.request.topic!r} was deleted and re-created while group {self.group!r} read it (its id "
                f"is {now}, not {self.topic_id}); nothing was written or committed. Set the group's position with "
                "`marshal-dagster position reset`"
            )

    @property
    def _compared_id(self) -> str | None:
        """The topic id with which those of keys are compared; None in a Go group, whose keys have no id."""
        return None if self.is_go else self.topic_id

    def wanted(self) -> list[int]:
        """Return the partitions that the request names; raise `ConfigurationError` if the topic does not have them."""
        if self.request.partitions is None:
            return list(self.existing)
        unknown = sorted(set(self.request.partitions) - set(self.existing))
        if unknown:
            raise ConfigurationError(
                f"topic {self.request.topic!r} has no partitions {unknown}; it has {len(self.existing)} partitions, "
                "numbered from 0"
            )
        return sorted(set(self.request.partitions))

    def extents(self, partitions: Collection[int], *, committed_only: bool = True) -> dict[int, OffsetBounds]:
        """Return the readable offsets of `partitions`; with `committed_only` they end before an open transaction."""
        return self.data.offsets(self.request.topic, partitions, committed_only=committed_only)

    def group_offsets(self) -> Mapping[int, int]:
        """Return the offsets that the consumer group of the same name has committed to Kafka."""
        return self.data.group_offsets(self.group, self.request.topic)

    def position(self, partition: int, offset: int, extent: OffsetBounds) -> Position:
        """Return the position of a batch that continues at `offset`; raises `DataLossError`."""
        return position(self.name(partition), offset, extent, allow_data_loss=self.accepts_loss)

    # The group's keys

    def keys(self, partitions: Iterable[int]) -> dict[int, Key]:
        """Return copies of the keys' states."""
        with self.rationalizer.lock:
            home, numbers = self.rationalizer.world.partition_of(self.request.topic), list(partitions)
            keys = home.keys_of(self.group, self.request.topic, numbers)
            return {partition: key.copy() for partition, key in zip(numbers, keys, strict=True)}

    def check_incarnation(self, keys: Mapping[int, Key], extents: Mapping[int, OffsetBounds]) -> None:
        """Raise `DataTopicChangedError` unless all keys, and their planned ranges, belong to this same topic.

        In a Go group, topic ids are not compared; only an offset beyond the topic's end shows that it is another topic.
        `extents` end where open transactions begin. A position may lie beyond that, but not beyond the last message.
        """
        known = self._compared_id
        doubtful = [n for n, key in keys.items() if other_incarnation(key, known, extents[n]) is not None]
        if not doubtful:
            return
        if not self._is_id_present:
            self.look_up()
        whole = self.extents(doubtful, committed_only=False)
        for number in doubtful:
            found = other_incarnation(keys[number], self._compared_id, whole[number])
            if found is not None:
                raise DataTopicChangedError(
                    f"{self.name(number)}: {found}, so the data topic was deleted and re-created. Nothing is read "
                    "until an operator sets the position with `marshal-dagster position reset`"
                )

    def check_id(self, keys: Mapping[int, Key], extents: Mapping[int, OffsetBounds]) -> None:
        """Look up the topic's id unless this batch has done so, then call `check_incarnation`.

        A batch without a claim calls it, so that a re-created topic with as many messages does not look drained.
        """
        if not self._is_id_present:
            self.look_up()
            self.check_incarnation(keys, extents)

    # Ranges and texts

    def ranges(
        self, claims: Mapping[int, Claim | RangeClaim], positions: Mapping[int, Position], ends: Mapping[int, int]
    ) -> tuple[ClaimedRange, ...]:
        """Return the ranges of the batch: for each partition in `ends`, from its position up to that end."""
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
                logger.error(
                    "group %r: retention deleted unread messages of %s: offsets %d to %d (exclusive) are lost",
                    range_.group,
                    range_,
                    *range_.lost,
                )
        return ranges

    def name(self, partition: int) -> str:
        """Return the name of a key in messages."""
        return f"{self.request.topic}/{partition} of group {self.group!r}"

    def paused(self, until_s: int | None, by: PauseOrigin | None) -> Idle:
        """Return the idle reason of a group that is paused until `until_s` (unix seconds)."""
        return Idle(IdleReason.PAUSED, paused_group_text(self.group, until_s, by))

    def given_up(self, plans: Mapping[int, tuple[int | None, int]]) -> str:
        """Return the text for `plans` that have had too many attempts."""
        topic, most = self.request.topic, self.request.max_attempts
        offsets = {number: key.offset for number, key in self.keys(plans).items()}
        tried = [OpenPlan(self.group, topic, number, *bounds, most) for number, bounds in plans.items()]
        named = first_few([f"partition {plan.partition} [{plan.start}, {plan.end})" for plan in tried], _MOST_NAMED)
        return (
            f"plans of group {self.group!r} in topic {topic!r} were tried {most + 1} times and are not tried again: "
            f"{named}. {way_out(tried, offsets)}"
        )

    def drained(self) -> Idle:
        """Return the idle reason of a topic without unread messages."""
        return Idle(IdleReason.DRAINED, f"topic {self.request.topic!r} has no unread messages")

    def why_idle(self, held: Idle | None, exhausted: Mapping[int, tuple[int | None, int]]) -> Idle:
        """Return why nothing was claimed: partitions are `held`, plans are `exhausted`, or nothing is unread."""
        if not exhausted:
            return held or self.drained()
        given_up = self.given_up(exhausted)
        return replace(held, text=f"{held.text}. {given_up}") if held else Idle(IdleReason.GIVEN_UP, given_up)

    def held(self, text: str, owners: Sequence[tuple[Owner, int]]) -> Idle:
        """Return the idle reason if other claims hold what the batch could claim.

        Args:
            text: States what is held and by which clients.
            owners: Each owner with the log time of its last heartbeat, in ms.
        """
        ours = [(owner, last_ms) for owner, last_ms in owners if owner.instance.rpartition(".")[0] == self.run_id]
        if not ours:
            return Idle(IdleReason.HELD, text)
        stale_in_s = max(0.0, self.live_for_ms(last_ms for _, last_ms in ours)) / 1_000
        instances = ", ".join(sorted({repr(owner.instance) for owner, _ in ours}))
        return Idle(
            IdleReason.HELD,
            f"{text}. This same run holds some of it (instance {instances}): either that process has died, and its "
            f"claim is stale in {stale_in_s:.1f} s, or it is still working",
            stale_in_s,
        )

    def live_for_ms(self, last_beats_ms: Iterable[int]) -> float:
        """Return in how many ms the last of some owners is stale; it is negative if all are stale already.

        `last_beats_ms` are the log times of their last heartbeats.
        """
        world, topic = self.rationalizer.world, self.request.topic
        with self.rationalizer.lock:
            now_ms = world.advice_time_ms(self.group, topic, self.clock.wall_ms())
            interval_ms = world.group_of(self.group, topic).settings.heartbeat_interval_ms
        return max(last_beats_ms) + stale_after_ms(interval_ms) - now_ms


@lru_cache(maxsize=1_024)
def _warn_of_topic_without_id(topic: str, group: str) -> None:
    """Log a warning, once for each topic and group of this process."""
    logger.warning(
        "topic %r has no id: if it is deleted and re-created, group %r may skip or repeat messages, and that is not "
        "noticed. Set the group's position then",
        topic,
        group,
    )
