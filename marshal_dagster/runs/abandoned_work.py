"""The unfinished work of dead members, found in the world state.

The stale-claim sensor, the asset check and the failed-run sensors share it. It is advice: a run must still claim the
work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from dagster import Config
from pydantic import Field

from marshal_dagster._internal.texts import first_few
from marshal_dagster.coordination.pause_text import origin_text
from marshal_dagster.protocol.state import Key, PauseOrigin, Phase, Range
from marshal_dagster.protocol.world import World
from marshal_dagster.runs.names import run_of


class ExpectedKeyState(Config):
    """The state of a partition when a sensor requested a run for it.

    The sensor later compares it with the current state. The run does not use it.
    """

    partition: int = Field(ge=0, description="The partition of the data topic.")
    generation: int = Field(description="The generation of its position.")
    offset: int | None = Field(default=None, description="The next offset to read.")
    plan_end: int | None = Field(default=None, description="The end (exclusive) of its open plan.")
    plan_attempts: int = Field(default=0, description="How often the plan had been retried.")
    epoch: int | None = Field(default=None, description="The epoch of its stale owner.")
    instance: str | None = Field(default=None, description="The instance id of its stale owner.")


MAX_NAMED: Final = 10
"""The number of items that a message lists."""


@dataclass(frozen=True, slots=True)
class AbandonedPartition:
    """A partition, or a range of one, that a dead member left unfinished.

    Its owner is stale, or its plan is open and no member holds it. In a range, `offset` is the start and `plan_end` the
    end.
    """

    topic: str
    partition: int
    offset: int | None
    plan_end: int | None
    plan_attempts: int
    generation: int
    instance: str | None
    client: str | None
    epoch: int | None
    silent_s: float | None
    """Seconds since the owner's last heartbeat. It and `instance`, `client` and `epoch` are None without an owner."""
    position: int | None
    """The position of the partition; `offset` of a range may be higher."""

    def __str__(self) -> str:
        """Return a text for the log of a tick."""
        plan = "no plan" if self.plan_end is None else f"plan [{self.offset}, {self.plan_end})"
        held = "no owner" if self.silent_s is None else f"client {self.client!r} silent for {self.silent_s:.0f} s"
        return f"{self.topic}/{self.partition}: {plan}, {held}"

    @property
    def run_id(self) -> str:
        """The run id in the stale owner's instance id; empty without one."""
        return run_of(self.instance or "")


def abandoned_partitions(world: World, group: str, topic: str, wall_ms: int) -> list[AbandonedPartition]:
    """Return the partitions of `topic` with a stale owner in `group`, or with an open plan and no live owner.

    Planned ranges without a live owner are included. Ranges that were only claimed are not, because other members can
    claim their offsets. The time is the larger of log time and `wall_ms` (unix ms). The answer is advice, like every
    answer between records (protocol.md, section 2).
    """
    state = world.group_of(group, topic)
    now_ms = world.advice_time_ms(group, topic, wall_ms)
    found = []
    for (of_topic, partition), key in sorted(state.keys.items(), key=itemgetter(0)):
        if of_topic != topic or state.is_live(key, now_ms):
            continue
        found += [
            abandoned_partition(topic, partition, key, now_ms, range_)
            for range_ in key.ranges
            if range_.phase is Phase.PLANNED and not range_.is_live(now_ms, state.settings.heartbeat_interval_ms)
        ]
        if key.owner is not None or key.plan_end is not None:
            found.append(abandoned_partition(topic, partition, key, now_ms))
    return found


def abandoned_partition(
    topic: str, partition: int, key: Key, now_ms: int, range_: Range | None = None
) -> AbandonedPartition:
    """Return the description of a key, or a range of it, without a live owner."""
    offset, attempts, plan_end = key.offset, key.plan_attempts, key.plan_end
    if range_ is not None:
        offset, attempts = range_.start, range_.attempts
        plan_end = range_.end if range_.phase is Phase.PLANNED else None
    left = range_ or key
    owner = left.owner
    return AbandonedPartition(
        topic=topic,
        partition=partition,
        offset=offset,
        plan_end=plan_end,
        plan_attempts=attempts,
        generation=key.generation,
        instance=None if owner is None else owner.instance,
        client=None if owner is None else owner.client,
        epoch=None if owner is None else owner.epoch,
        silent_s=None if owner is None else (now_ms - left.last_beat_ms) / 1_000,
        position=key.offset,
    )


def first_ten(texts: Sequence[object], separator: str = ", ") -> str:
    """Join the first ten texts, and append how many more there are."""
    return first_few(texts, MAX_NAMED, separator)


def listed(partitions: Sequence[AbandonedPartition]) -> str:
    """Describe the first ten partitions, and append how many more there are."""
    return first_ten(partitions, "; ")


def why_paused(world: World, group: str, topic: str, wall_ms: int) -> str | None:
    """Return by which member `group` is paused in `topic`, and for how long; None if it is not paused.

    The time is the larger of log time and `wall_ms` (unix ms). The answer is advice, like every answer between records.
    """
    state = world.group_of(group, topic)
    now_ms = max(world.partition_of(topic).log_time_ms or 0, wall_ms)
    if state.paused_until_s is not None and state.is_paused(now_ms):
        left_s = state.paused_until_s - now_ms / 1_000
        by = origin_text(state.pause_origin or PauseOrigin(None))
        return f"group {group!r} is paused by {by}, for {left_s:.0f} s more: no runs are requested"
    return None
