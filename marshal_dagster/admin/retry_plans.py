"""One more attempt at plans that were tried too often: their positions are set to where they are."""

from collections.abc import Sequence

from marshal_dagster.admin.log_access import require_certain
from marshal_dagster.admin.pause import require_known
from marshal_dagster.admin.position_spec import ToOffsets
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.errors import ConfigurationError
from marshal_dagster.protocol.open_plans import DEFAULT_MAX_ATTEMPTS, OpenPlan, exhausted, open_plans


class PlanRetrier(PositionResetter):
    """Ends exhausted plans of one group in one data topic, so that its members plan and try the offsets again.

    Only an operator can end a plan (protocol.md, section 4): by setting the position of its key, here to the offset
    where it is. That begins a new generation, in which attempts count from 0.
    """

    def exhausted(self, partition: int | None = None, *, max_attempts: int = DEFAULT_MAX_ATTEMPTS) -> list[OpenPlan]:
        """Read on, and give the plans that no member tries again; of `partition`, each that no live member holds.

        Raises `ConfigurationError` for a group that the log does not name, and for a partition without such a plan;
        `TopicNotFoundError`, `IncompleteLogError`, `AuthorizationError`, `UnavailableError`.
        """
        self.topics.describe(self.topic)
        world = self.reader.follow_all()
        require_known(world, self.group, "It has no plan")
        require_certain(world, self.topic)
        with self.reader.lock:
            plans = open_plans(world, self.clock.wall_ms(), group=self.group, topic=self.topic)
        if partition is None:
            return exhausted(plans, max_attempts)
        found = [plan for plan in plans if plan.partition == partition]
        if not found:
            raise ConfigurationError(
                f"group {self.group!r} has no plan in {self.topic}/{partition} that no member holds: there is nothing "
                "to try again"
            )
        return found

    def look_at_plans(self, plans: Sequence[OpenPlan]) -> Sequence[PositionChange]:
        """Give what is to be set, by partition; nothing is written. Raises what `look` raises."""
        keys = self.keys({plan.partition for plan in plans})
        offsets = tuple((number, key.offset) for number, key in sorted(keys.items()) if key.offset is not None)
        return self.look(ToOffsets(by_partition=offsets), allow_out_of_range=True)
