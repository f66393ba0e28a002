"""Claims are taken from an owner whom a person holds to be dead (protocol.md, section 6, "Revoke", and 7)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from marshal_dagster.admin.log_access import LogUser, require_certain
from marshal_dagster.admin.pause import require_known
from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.claims import Member, new_instance_id
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import CoordinationLogChangedError
from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.staleness import Freshness, freshness
from marshal_dagster.protocol.state import Group, Key, Owner
from marshal_dagster.protocol.world import World


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A partition that somebody holds, whole or the offsets from `start` up to `end` (exclusive) of it.

    `last_beat_ms` is log time; `freshness` says how that looks by now, and is advice.
    """

    partition: int
    owner: Owner
    last_beat_ms: int
    freshness: Freshness
    start: int | None = None
    end: int | None = None

    @property
    def is_range(self) -> bool:
        """Whether it is a range."""
        return self.start is not None


@dataclass(slots=True)
class ClaimRevoker(LogUser):
    """Takes claims of one group in one data topic; `client` is for people to see.

    `look` first, show a person what is held, then `carry_out`.
    """

    group: str
    topic: str
    client: str
    clock: Clock = field(default_factory=SystemClock)

    def look(self) -> Sequence[HeldClaim]:
        """Give all that is held, by partition and offset.

        Raises `ConfigurationError` for a group that the log does not name; `IncompleteLogError` where the log shows no
        epochs; `UnavailableError`, `CoordinationLogChangedError`.
        """
        reader = self.reader
        with reader.lock:
            world = reader.follow_all()
            require_known(world, self.group, "There is nothing to revoke")
            require_certain(world, self.topic)
            return self._held(world)

    def carry_out(self, claims: Sequence[HeldClaim]) -> Sequence[HeldClaim]:
        """Revoke `claims`, and give those of which the log shows it; the others changed hands meanwhile.

        In a Go group nothing can be revoked: a new instance takes each partition at its offset and releases it. What
        has no offset there stays until it is stale. A live Go owner takes the rest back with its next heartbeat: see
        `taken_back`. Raises `IncompleteLogError` where the log can only be observed now; `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        reader = self.reader
        with reader.lock:
            settings = reader.world.group_of(self.group, self.topic).settings
        with closing(self.open_log(settings.heartbeat_interval_ms)) as rationalizer:
            world = rationalizer.follow_all()
            if rationalizer.identity != reader.identity:
                raise CoordinationLogChangedError(
                    f"coordination topic {reader.identity.topic!r} was made anew since the claims were looked at. "
                    "Nothing was revoked; look again"
                )
            require_certain(world, self.topic)
            held = {(claim.partition, claim.owner) for claim in self._held(world)}
            still_held = [claim for claim in claims if (claim.partition, claim.owner) in held]
            taken = self._revoke(still_held, rationalizer, settings)
        return [claim for claim in still_held if (claim.partition, claim.owner.epoch) in taken]

    @property
    def is_go(self) -> bool:
        """Whether Go consumers share the group, or may because it has no settings, by the log as read last."""
        reader = self.reader
        with reader.lock:
            return reader.world.group_of(self.group, self.topic).is_go

    def taken_back(self, taken: Sequence[HeldClaim]) -> Sequence[HeldClaim]:
        """Read the log again, and return what is held by now of the partitions in `taken`. Raises as `look`."""
        partitions = {claim.partition for claim in taken}
        return [claim for claim in self.look() if claim.partition in partitions]

    def _revoke(
        self, claims: Sequence[HeldClaim], rationalizer: Rationalizer, settings: GroupSettings
    ) -> set[tuple[int, int | None]]:
        """Give partition and epoch of those seen taken."""
        member = Member(self.group, self.client, new_instance_id("revoking"))
        if settings.rule_set is RuleSet.GO:
            claimer = Claimer(rationalizer, member, self.topic, settings, clock=self.clock)
            freed = claimer.take_over_and_release({claim.partition: None for claim in claims})
            return {(claim.partition, claim.owner.epoch) for claim in claims if claim.partition in freed}
        named: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for claim in claims:
            if claim.owner.epoch is not None:
                named[claim.is_range].append((claim.partition, claim.owner.epoch))
        taken: set[tuple[int, int | None]] = set()
        if named[False]:
            taken |= Claimer(rationalizer, member, self.topic, settings, clock=self.clock).revoke(named[False])
        if named[True]:
            ranges = RangeClaimer(rationalizer, member.with_new_instance(), self.topic, settings, clock=self.clock)
            taken |= ranges.revoke(named[True])
        return taken

    def _held(self, world: World) -> list[HeldClaim]:
        partition = world.partition_of(self.topic)
        group, at_ms = partition.group(self.group), partition.present_ms(self.clock.wall_ms())
        keys = sorted((number, key) for (topic, number), key in group.keys.items() if topic == self.topic)
        return [held for number, key in keys for held in _held(group, number, key, at_ms)]


def held_by(named: str, claims: Iterable[HeldClaim], partitions: Sequence[range] | None = None) -> Sequence[HeldClaim]:
    """Give those of `claims`, in `partitions` if any, of the owner `named`: an instance id, or the run id before it."""
    return [
        claim
        for claim in claims
        if named in {claim.owner.instance, claim.owner.instance.rpartition(".")[0]}
        and (partitions is None or any(claim.partition in run for run in partitions))
    ]


def holds_nothing_text(named: str, topic: str, held: Iterable[HeldClaim]) -> str:
    """Say that the owner `named` holds nothing of what is wanted, and who does of all that is `held`."""
    owners = ", ".join(dict.fromkeys(repr(claim.owner.instance) for claim in held)) or "nobody"
    return f"{named!r} holds nothing of topic {topic!r} in the partitions wanted; of all of it holds: {owners}"


def _held(group: Group, number: int, key: Key, at_ms: int) -> Iterator[HeldClaim]:
    interval_ms = group.settings.heartbeat_interval_ms
    if key.owner is not None:
        heard = freshness(at_ms - key.last_beat_ms, interval_ms)
        yield HeldClaim(number, key.owner, key.last_beat_ms, heard)
    for range_ in key.ranges:
        if range_.owner is not None:
            heard = freshness(at_ms - range_.last_beat_ms, interval_ms)
            yield HeldClaim(number, range_.owner, range_.last_beat_ms, heard, range_.start, range_.end)
