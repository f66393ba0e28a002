"""List the plans that no live member holds, and those that are exhausted: tried too often (protocol.md, section 6).

Sensors and the command line use this to report failing batches and to suggest the command that retries them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Final

from marshal_dagster.protocol.state import Owner, Phase
from marshal_dagster.protocol.world import World

DEFAULT_MAX_ATTEMPTS: Final = 5
"""How often members take over a plan by default before they leave it to an operator (protocol.md, section 6)."""
MOST_SKIPPED: Final = 20
"""How many partitions one command skips plans of, so that it can be read and copied."""


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """A plan, of a partition or of a range, that no live member holds.

    It has the offsets from `start` to `end` (exclusive). `start` is None if the key has no offset.
    """

    group: str
    topic: str
    partition: int
    start: int | None
    end: int
    attempts: int
    """How often a member took the plan over; the attempt that wrote it does not count."""
    generation: int = 0
    """The generation of the key."""

    def __str__(self) -> str:
        """Return the plan as messages show it."""
        return f"{self.topic}/{self.partition} [{self.start}, {self.end}) of group {self.group!r}"

    @property
    def tries(self) -> int:
        """How often the plan was tried, including the attempt that wrote it."""
        return self.attempts + 1

    @property
    def tried(self) -> str:
        """The plan and how often it was tried, for messages."""
        return f"{self} was tried {'once' if self.tries == 1 else f'{self.tries} times'}"


def open_plans(
    world: World,
    wall_ms: int,
    *,
    group: str | None = None,
    topic: str | None = None,
    is_dead: Callable[[Owner], bool] = lambda _: False,
) -> list[OpenPlan]:
    """Return the open plans that no live member holds, those with the most attempts first.

    The result is advice: only the log decides.

    Args:
        world: The state of the coordination log.
        wall_ms: The present time in unix milliseconds.
        group: Only the plans of this group.
        topic: Only the plans of this data topic.
        is_dead: Returns whether an owner is known to be dead, although it is not stale yet. Its plans are included.
    """
    found = []
    for name, (of_topic, partition), state, key in world.keys():  # noqa: SIM118 - no mapping
        if group not in {None, name} or topic not in {None, of_topic}:
            continue
        now_ms = world.advice_time_ms(name, of_topic, wall_ms)
        if state.is_live(key, now_ms) and not (key.plan_end is not None and key.owner and is_dead(key.owner)):
            continue
        interval_ms = state.settings.heartbeat_interval_ms
        found += [
            OpenPlan(name, of_topic, partition, range_.start, range_.end, range_.attempts, key.generation)
            for range_ in key.ranges
            if range_.phase is Phase.PLANNED
            and (not range_.is_live(now_ms, interval_ms) or (range_.owner and is_dead(range_.owner)))
        ]
        if key.plan_end is not None:
            attempts, generation = key.plan_attempts, key.generation
            found.append(OpenPlan(name, of_topic, partition, key.offset, key.plan_end, attempts, generation))
    return sorted(found, key=lambda plan: (-plan.attempts, plan.group, plan.topic, plan.partition, plan.start or 0))


def exhausted(plans: Collection[OpenPlan], max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[OpenPlan]:
    """Return the plans that were taken over `max_attempts` times or more: members no longer retry them."""
    return [plan for plan in plans if plan.attempts >= max_attempts]


def parts_to_retry(plans: Collection[OpenPlan], max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[tuple[int, ...]]:
    """Divide the partitions whose plans were taken over before into parts that are tried one after another.

    The partitions whose plans have `a` attempts are divided into 2^a parts. Before the last attempt each partition is a
    part of its own. Partitions with the fewest attempts come first. See
    docs/contributing/decisions/0015-failing-plans-in-halves.md.
    """
    attempts: dict[int, int] = {}
    for plan in plans:
        attempts[plan.partition] = max(plan.attempts, attempts.get(plan.partition, 0))
    parts: list[tuple[int, ...]] = []
    for level in sorted(set(attempts.values()) - {0}):
        partitions = sorted(partition for partition, count in attempts.items() if count == level)
        is_last = level + 1 >= max_attempts
        size = 1 if is_last else -(-len(partitions) // 2**level)
        parts += [tuple(partitions[at : at + size]) for at in range(0, len(partitions), size)]
    return parts


def retry_commands(plans: Sequence[OpenPlan]) -> str:
    """Return the commands that retry `plans`, one for each group and topic."""
    places: dict[tuple[str, str], set[int]] = {}
    for plan in sorted(plans, key=attrgetter("group", "topic")):
        places.setdefault((plan.group, plan.topic), set()).add(plan.partition)
    return "; ".join(retry_command(group, topic, partitions) for (group, topic), partitions in places.items())


def retry_text(plans: Sequence[OpenPlan]) -> str:
    """Return what an operator does to retry `plans` after fixing the cause, for the middle of a sentence."""
    return f"run `{retry_commands(plans)}`"


def retry_command(group: str, topic: str, partitions: Collection[int]) -> str:
    """Return the command that retries the exhausted plans of a topic; it names the partition if there is only one."""
    import shlex

    only = map(str, partitions) if len(partitions) == 1 else ()
    return shlex.join(["marshal-dagster", "retry", group, topic, *only])


def skip_command(plans: Iterable[OpenPlan], offsets: Mapping[int, int | None]) -> str | None:
    """Return the command that sets positions to the ends of `plans`, so that no run processes their offsets.

    Args:
        plans: Plans of one group and topic. One that begins after the position is left out, because the command would
            also skip the offsets before it. The command names the first 20 of the others.
        offsets: The position of each partition.

    Returns:
        The command, or None if no plan begins at the position.
    """
    import shlex

    plans = list(islice(_at_position(plans, offsets), MOST_SKIPPED))
    if not plans:
        return None
    to = ",".join(f"{plan.partition}={plan.end}" for plan in sorted(plans, key=attrgetter("partition")))
    return shlex.join(["marshal-dagster", "position", "reset", plans[0].group, plans[0].topic, "--to-offset", to])


def skip_text(plans: Sequence[OpenPlan], offsets: Mapping[int, int | None]) -> str | None:
    """Return what an operator does instead of `retry_text`, with the result of `skip_command`; None if that is None."""
    if (skip := skip_command(plans, offsets)) is None:
        return None
    is_part = next(islice(_at_position(plans, offsets), MOST_SKIPPED, None), None) is not None
    what = f"offsets, {MOST_SKIPPED} partitions at a time" if is_part else "its offsets"
    return f"or skip {what}: `{skip}`"


def way_out(plans: Sequence[OpenPlan], offsets: Mapping[int, int | None]) -> str:
    """Return what an operator does about exhausted plans of one group and topic, with the commands, for an error.

    Args:
        plans: The plans, at least one.
        offsets: The position of each partition.
    """
    return ", ".join(filter(None, (f"Fix the cause and {retry_text(plans)}", skip_text(plans, offsets))))


def _at_position(plans: Iterable[OpenPlan], offsets: Mapping[int, int | None]) -> Iterator[OpenPlan]:
    return (plan for plan in plans if plan.start == offsets[plan.partition])
