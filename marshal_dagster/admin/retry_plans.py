"""Retry of exhausted plans, by setting their positions to the present offsets, which ends the plans."""

from collections.abc import Callable, Mapping, Sequence

from marshal_dagster.admin.log_access import require_certain
from marshal_dagster.admin.pause import require_known
from marshal_dagster.admin.position_spec import ToOffsets
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.coordination.pause_text import paused_group_text
from marshal_dagster.errors import GoGroupError
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, OpenPlan, exhausted, open_plans
from marshal_dagster.protocol.state import Owner, Phase


class PlanRetrier(PositionResetter):
    """Ends exhausted plans of one group in one data topic, so that its members plan and try the offsets again.

    Only an operator can end a plan (protocol.md, section 4), by setting the position of its key. Here the position is
    set to the present offset once the owners have left. That begins a new generation, in which attempts count from 0.
    """

    def exhausted(self, partition: int | None = None, *, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[OpenPlan]:
        """Read the log to its end and return the exhausted plans.

        For a given `partition`, return all its plans that no live member owns. Raises `ConfigurationError` for a group
        that has no record in the log; `GoGroupError` for a plan in a group that Go consumers share;
        `TopicNotFoundError`, `IncompleteLogError`, `AuthorizationError`, `UnavailableError`.
        """
        self.topics.describe(self.topic)
        world = self.reader.follow_all()
        require_certain(world, self.topic)
        require_known(world, self.group, "There is no plan to retry")
        with self.reader.lock:
            plans = open_plans(world, self.clock.wall_ms(), group=self.group, topic=self.topic)
            is_go = world.group_of(self.group, self.topic).is_go
        found = exhausted(plans, max_attempts) if partition is None else [p for p in plans if p.partition == partition]
        if found and is_go:
            raise GoGroupError(
                f"Go consumers share group {self.group!r}, or may share it because it has no settings. So its plans in "
                f"topic {self.topic!r} end only if their positions change, and nothing was written. Fix the cause, "
                "then launch the job with `retry_exhausted: true` in its run config: it tries the same plan once more"
            )
        return found

    def nothing_to_retry(self, partition: int | None) -> str:
        """Return why there is no plan to retry, of a partition or of the topic. Raises what `keys` raises."""
        if partition is None:
            return f"group {self.group!r} has no exhausted plan in topic {self.topic!r}"
        key, place = self.keys([partition])[partition], f"{self.topic}/{partition}"
        planned = [range_ for range_ in key.ranges if range_.phase is Phase.PLANNED]
        held = key.owners if key.plan_end is not None or planned else ()
        if not held:
            return f"group {self.group!r} has no plan in {place}: there is nothing to retry"
        instances = ", ".join(sorted({repr(owner.instance) for owner in held}))
        return (
            f"the plan of group {self.group!r} in {place} is being processed by {instances}, so nothing was written. "
            "Wait until its run has ended"
        )

    def warnings(self, changes: Sequence[PositionChange]) -> Sequence[str]:
        """Return warnings to show to the operator before the plans are ended, including a pause."""
        with self.reader.lock:
            group = self.reader.world.group_of(self.group, self.topic)
            until_s, origin = group.paused_until_s, group.pause_origin
            is_paused = group.is_paused(self.reader.world.advice_time_ms(self.group, self.topic, self.clock.wall_ms()))
        warnings = super().warnings(changes)
        if not is_paused:
            return warnings
        return [*warnings, f"{paused_group_text(self.group, until_s, origin)}: nothing is retried before that"]

    def look_at_plans(self, plans: Sequence[OpenPlan]) -> Sequence[PositionChange]:
        """Return the position changes that end `plans`; nothing is written. Raises what `look` raises."""
        keys = self.keys({plan.partition for plan in plans})
        offsets = tuple((number, key.offset) for number, key in sorted(keys.items()) if key.offset is not None)
        return self.look(ToOffsets(by_partition=offsets), allow_out_of_range=True)

    def _set(
        self, offsets: Mapping[int, int], interval_ms: int, wait_ms: float, is_dead: Callable[[Owner], bool]
    ) -> None:
        with self._admin(interval_ms) as admin:
            admin.end_plans(self.topic, offsets, wait_ms=wait_ms, is_dead=is_dead)
