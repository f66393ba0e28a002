"""Reads the state of one group and data topic for a claimer, and checks whether it may claim (protocol.md, section 6).

It sends no records. `Claimer` and `RangeClaimer` use it before and during their claims.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.clock import Clock
from marshal_dagster.coordination.group_settings import require_settings
from marshal_dagster.coordination.pause_text import paused_group_text
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import ConfigurationError, GroupPausedError, IncompleteLogError
from marshal_dagster.protocol.messages import GroupSettings, Message, RevokingClaim, RevokingRange, RuleSet
from marshal_dagster.protocol.state import Group, Key, Owner, Range
from marshal_dagster.protocol.world import PartitionWorld, Unplanned


def is_go_instance(owner: Owner) -> bool:
    """Return whether the owner is a Go consumer: only members of this library have a dot in their instance id."""
    return "." not in owner.instance


def assume_alive(_: Owner) -> bool:
    """Return False: no owner is known to be dead."""
    return False


@dataclass(frozen=True, slots=True)
class GroupReader:
    """The state of a group and of the keys of one data topic, as one member sees it.

    It returns live state, not copies: use it under the rationalizer's lock.
    """

    rationalizer: Rationalizer
    member: Member
    topic: str
    settings: GroupSettings
    """The settings with which the member is configured."""
    clock: Clock
    coordination_partition: int

    @property
    def home(self) -> PartitionWorld:
        """The state of the topic's coordination partition."""
        return self.rationalizer.world.partitions[self.coordination_partition]

    @property
    def group(self) -> Group:
        """The state of the group in the topic's coordination partition."""
        return self.home.group(self.member.group)

    def key(self, partition: int) -> Key:
        """Return the state of one partition of the data topic."""
        return self.home.key(self.member.group, self.topic, partition)

    def keys(self, partitions: Iterable[int]) -> list[Key]:
        """Return the states of partitions of the data topic, in that order."""
        return self.home.keys_of(self.member.group, self.topic, partitions)

    @property
    def unplanned(self) -> Unplanned | None:
        """The last heartbeat that moved an offset of the group without a plan; only Go consumers do that."""
        return self.home.unplanned.get(self.member.group)

    @property
    def began_at(self) -> int:
        """The log offset from which the coordination partition was read: its start, or that of a snapshot."""
        return self.rationalizer.began_at(self.coordination_partition)

    @property
    def is_certain(self) -> bool:
        """Whether the state was read from the log's start or a snapshot."""
        return self.home.certain

    @property
    def is_go(self) -> bool:
        """Whether the member shares its group with Go consumers."""
        return self.settings.rule_set is RuleSet.GO

    def paused_until_s(self) -> int | None:
        """Return the end (unix seconds) of a present pause by another instance, or None if there is none."""
        with self.rationalizer.lock:
            group = self.group
            if not group.is_paused(self.present_ms()) or group.paused_by == self.member.instance:
                return None
            return group.paused_until_s

    def require_ready(self) -> None:
        """Raise an error if the member may not claim now.

        Raises:
            IncompleteLogError: the coordination partition can only be observed.
            ConfigurationError: a Go consumer has the member's client id.
            SettingsMismatchError: the group has other settings than the member.
            GroupPausedError: another instance has paused the group.
        """
        self.require_certain()
        self.require_own_client()
        self.require_settings()
        self.require_running()

    def require_certain(self) -> None:
        """Raise `IncompleteLogError` if the coordination partition can only be observed."""
        if not self.is_certain:
            raise IncompleteLogError(
                f"coordination partition {self.coordination_partition} (topic {self.topic!r}, group "
                f"{self.member.group!r}) no longer begins at offset 0 and has no usable snapshot. Its state can "
                "only be observed, so nothing can be claimed: stop all members of all groups, then run "
                "`marshal-dagster recover`"
            )

    def require_own_client(self) -> None:
        """Raise `ConfigurationError` if a Go consumer has the member's client id.

        A Go consumer treats every claim with its client id as its own.
        """
        if not self.is_go:
            return
        clients = {key.owner.client for key in self.group.keys.values() if key.owner and is_go_instance(key.owner)}
        if self.member.client in clients:
            raise ConfigurationError(
                f"a Go consumer of group {self.member.group!r} has the same client id {self.member.client!r}, so it "
                "would treat this member's claims as its own. Give this member another client_id"
            )

    def require_settings(self) -> None:
        """Raise `SettingsMismatchError` unless the settings in force are the member's."""
        require_settings(self.member.group, self.group, self.settings)

    def require_running(self) -> None:
        """Raise `GroupPausedError` while the group is paused by another instance."""
        until_s = self.paused_until_s()
        if until_s is not None:
            raise GroupPausedError(
                f"{paused_group_text(self.member.group, until_s, self.group.pause_origin)}; resume it with "
                "`marshal-dagster resume`, or wait"
            )

    def present_ms(self) -> int:
        """Return the later of log time and the member's clock."""
        return self.home.present_ms(self.clock.wall_ms())

    def dead_owners(self, partitions: Iterable[int], is_dead: Callable[[Owner], bool]) -> frozenset[Owner]:
        """Return the owners of `partitions` that are dead by `is_dead`, called once per instance without the lock."""
        if is_dead is assume_alive or self.is_go:  # in a Go group members wait until a dead owner is stale
            return frozenset()
        with self.rationalizer.lock:
            owners = {owner for key in self.keys(partitions) for owner in key.owners}
        if not owners:
            return frozenset()
        instances = {owner.instance: owner for owner in owners}
        dead = {instance for instance, owner in instances.items() if is_dead(owner)}
        return frozenset(owner for owner in owners if owner.instance in dead)

    def revocations(
        self,
        signed: Mapping[str, Any],
        partitions: Iterable[int],
        dead: Collection[Owner],
        ranges_of: Callable[[int], Iterable[Range]],
    ) -> list[Message]:
        """Return the records that revoke the claims of `dead` owners on keys, and on the ranges from `ranges_of`.

        Without dead owners no key is read, because a claim may have a thousand partitions.
        """
        if not dead:
            return []
        return [
            record
            for partition in partitions
            for record in revocations_of(
                self.key(partition), ranges_of(partition), dead.__contains__, {**signed, "partition": partition}
            )
        ]


def revocations_of(
    key: Key, ranges: Iterable[Range], is_dead: Callable[[Owner], bool], fields: Mapping[str, Any]
) -> list[Message]:
    """Return the records that revoke the claims of dead owners on `key` and `ranges`.

    Args:
        key: the state of a partition.
        ranges: the ranges of it to look at.
        is_dead: returns whether an owner is dead.
        fields: all fields of the records except the epoch.
    """
    owners = [*((RevokingRange, range_.owner) for range_ in ranges), (RevokingClaim, key.owner)]
    return [
        record_type(epoch=owner.epoch, **fields)
        for record_type, owner in owners
        if owner is not None and owner.epoch is not None and is_dead(owner)
    ]
