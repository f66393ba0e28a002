"""Revocation of the claims of an owner that an operator considers dead (protocol.md, section 6, "Revoke", and 7)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from marshal_dagster._internal.texts import first_few, nearest_first
from marshal_dagster.admin.log_access import LogUser, require_certain
from marshal_dagster.admin.pause import require_known, require_known_topic
from marshal_dagster.admin.texts import without_suffix
from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.claims import REVOKING, Member, new_instance_id
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, CoordinationLogChangedError
from marshal_dagster.protocol.messages import GroupSettings, RuleSet
from marshal_dagster.protocol.staleness import Freshness, freshness
from marshal_dagster.protocol.state import Group, Key, Owner
from marshal_dagster.protocol.world import World

LEAST_PREFIX: Final = 4
"""How many characters of an owner's id are enough to name it."""
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim of a partition, or of a range of its offsets."""

    partition: int
    owner: Owner
    last_beat_ms: int
    """The log time of its last heartbeat."""
    freshness: Freshness
    """Whether the owner looks alive or stale now; this is advice only."""
    start: int | None = None
    """The first offset of the range; None for a claim of the partition."""
    end: int | None = None
    """The end of the range (exclusive); None for a claim of the partition."""

    @property
    def is_range(self) -> bool:
        """Whether it is a claim of a range."""
        return self.start is not None


@dataclass(slots=True)
class ClaimRevoker(LogUser):
    """Revokes claims of one group in one data topic.

    Call `look`, show the operator the claims, then call `carry_out`.
    """

    group: str
    topic: str
    client: str
    """A name for the operator in the records, for people who read the log."""
    clock: Clock = field(default_factory=SystemClock)

    def look(self) -> Sequence[HeldClaim]:
        """Read the log to its end and return all claims, sorted by partition and offset.

        Raises `ConfigurationError` for a group that has no record in the log; `IncompleteLogError` if the log is
        incomplete, so that epochs are unknown; `UnavailableError`, `CoordinationLogChangedError`.
        """
        reader = self.reader
        with reader.lock:
            world = reader.follow_all()
            require_certain(world, self.topic)
            require_known(world, self.group, "There is nothing to revoke")
            require_known_topic(world, self.group, self.topic, "There is nothing to revoke")
            return self._held(world)

    def carry_out(self, claims: Sequence[HeldClaim]) -> Sequence[HeldClaim]:
        """Revoke `claims` and return those that the log shows as revoked; the others now have another owner.

        In a Go group nothing can be revoked. Instead, a new instance claims each partition at its offset and releases
        it. A partition without an offset stays claimed until its owner is stale. A live Go owner takes the others back
        with its next heartbeat, see `taken_back`. Raises `IncompleteLogError` if the log is incomplete by now;
        `UnavailableError`, `CoordinationLogChangedError`.
        """
        reader = self.reader
        with reader.lock:
            settings = reader.world.group_of(self.group, self.topic).settings
        with closing(self.open_log(settings.heartbeat_interval_ms)) as rationalizer:
            world = rationalizer.follow_all()
            if rationalizer.identity != reader.identity:
                raise CoordinationLogChangedError(
                    f"coordination topic {reader.identity.topic!r} was deleted and re-created since the claims were "
                    "shown. Nothing was revoked; run the command again"
                )
            require_certain(world, self.topic)
            held = {(claim.partition, claim.owner) for claim in self._held(world)}
            still_held = [claim for claim in claims if (claim.partition, claim.owner) in held]
            taken = self._revoke(still_held, rationalizer, settings)
        return [claim for claim in still_held if (claim.partition, claim.owner.epoch) in taken]

    @property
    def is_go(self) -> bool:
        """Whether Go consumers share the group, or may share it because it has no settings, by the log as read last."""
        reader = self.reader
        with reader.lock:
            return reader.world.group_of(self.group, self.topic).is_go

    def taken_back(self, taken: Sequence[HeldClaim]) -> Sequence[HeldClaim]:
        """Read the log again, and return the present claims of the partitions in `taken`. Raises what `look` raises."""
        partitions = {claim.partition for claim in taken}
        return [claim for claim in self.look() if claim.partition in partitions]

    def _revoke(
        self, claims: Sequence[HeldClaim], rationalizer: Rationalizer, settings: GroupSettings
    ) -> set[tuple[int, int | None]]:
        """Return partition and epoch of the claims that the log shows as revoked."""
        member = Member(self.group, self.client, new_instance_id(REVOKING))
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
    """Return the claims of the owner `named`.

    Args:
        named: Its instance id, the run id with which that begins, or the first characters of either, at least four.
        claims: All claims.
        partitions: Only the claims of these partitions.

    Raises:
        ConfigurationError: Several owners' ids begin with `named`.
    """
    claims = list(claims)
    found = [claim for claim in claims if named in {claim.owner.instance, _run_of(claim)}]
    if not found and len(named) >= LEAST_PREFIX:
        found = [claim for claim in claims if claim.owner.instance.startswith(named)]
        owners = list(dict.fromkeys(map(_run_of, found)))
        if len(owners) > 1:
            shown = first_few(list(map(repr, owners)), _SHOWN)
            raise ConfigurationError(f"the ids of several owners begin with {named!r}: {shown}. Give more characters")
    return held_in(found, partitions)


def _run_of(claim: HeldClaim) -> str:
    return without_suffix(claim.owner.instance)


def held_in(claims: Iterable[HeldClaim], partitions: Sequence[range] | None = None) -> Sequence[HeldClaim]:
    """Return the claims of all owners in these partitions; by default in all."""
    return [claim for claim in claims if partitions is None or any(claim.partition in run for run in partitions)]


def holds_nothing_text(named: str, topic: str, held: Iterable[HeldClaim]) -> str:
    """Return the message that the owner `named` has no claim in the selected partitions, with all owners."""
    owners = ", ".join(map(repr, nearest_first(named, {claim.owner.instance for claim in held}))) or "none"
    if 0 < len(named) < LEAST_PREFIX:
        return f"{named!r} is too short for the beginning of an id: give {LEAST_PREFIX} characters. Owners: {owners}"
    if not named:
        return (
            f"nothing to revoke in the selected partitions of topic {topic!r}, because no owner is named or none has a "
            f"claim there; the topic's owners: {owners}"
        )
    return f"{named!r} has no claim of topic {topic!r} in the selected partitions; the topic's owners: {owners}"


def _held(group: Group, number: int, key: Key, at_ms: int) -> Iterator[HeldClaim]:
    interval_ms = group.settings.heartbeat_interval_ms
    if key.owner is not None:
        age = freshness(at_ms - key.last_beat_ms, interval_ms)
        yield HeldClaim(number, key.owner, key.last_beat_ms, age)
    for range_ in key.ranges:
        if range_.owner is not None:
            age = freshness(at_ms - range_.last_beat_ms, interval_ms)
            yield HeldClaim(number, range_.owner, range_.last_beat_ms, age, range_.start, range_.end)
