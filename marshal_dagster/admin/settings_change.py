"""A group gets other settings, or its ranges switched off, while it is paused.

See protocol.md, sections 6 ("Settings") and 8.4 ("Switch off").
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from marshal_dagster.admin.operator import LOOK_PART, GroupAdmin
from marshal_dagster.admin.paused_change import PausedChange
from marshal_dagster.coordination.claimer import Claimer, assume_alive
from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.group_reader import revocations_of
from marshal_dagster.coordination.group_settings import check_settings
from marshal_dagster.errors import ClaimLostError, GroupPausedError, PositionNotSetError, SettingsNotSetError
from marshal_dagster.protocol.messages import GroupSettings, GroupSettingsRecord, Mark, Message, ReleaseGroup
from marshal_dagster.protocol.state import RANGES, DataPartitionId, Group, Owner, without_ranges

logger = logging.getLogger(__name__)

_ALL: Final = "all topics"


class SettingsChanger(GroupAdmin):
    """Gives one group other settings, and takes the feature `ranges` from them."""

    def set_settings(
        self, settings: GroupSettings, *, wait_ms: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> None:
        """Give the group `settings` in place of those in force (protocol.md, section 6, "Settings").

        The group is paused meanwhile, as for `set_positions`, unless nothing of it is there yet. The owners, of ranges
        too, have `wait_ms` to leave; what `is_dead` knows to be dead is revoked, but not in a Go group. Where Go
        consumers use the group or the coordination topic, a person has said before that they are stopped for good.
        Where the settings are in force already nothing happens. Raises `SettingsNotSetError` when owners do not leave,
        or others pause and resume in between: it can be tried again. Raises `ConfigurationError` for settings that no
        member can keep; `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        check_settings(settings, self.rationalizer.log.delivery_timeout_ms)
        groups, numbers = self.groups(), self._with_other_settings(settings)
        if not any(
            number in groups and (groups[number].keys or groups[number].settings_accepted) for number in numbers
        ):
            self._write_settings(self.new_member(), dict.fromkeys(numbers, settings))
            if not self._with_other_settings(settings):
                return
        change = PausedChange(self, _ALL, wait_ms, is_dead)
        if not change.repeat(lambda member: self._try_to_set_settings(change, member, settings)):
            raise SettingsNotSetError(
                f"the settings of group {self.name!r} were not changed in coordination partitions "
                f"{self._with_other_settings(settings)}: others pause, resume or claim at the same time, or records "
                "were not acknowledged. Let them end, then try again, which completes it"
            )

    def switch_ranges_off(self, *, wait_ms: float) -> None:
        """Take the feature `ranges` out of the group's settings, so that members that do not know it may claim.

        The group is paused meanwhile, as for `set_positions`, for more than 2 heartbeat intervals; the position of each
        of its keys is set to where it stands. What is done ahead of an offset is forgotten, and will be done again:
        look at it `ahead`. Where the feature is off already nothing happens. Raises `PositionNotSetError` for a key
        without offset, when owners do not leave within `wait_ms`, or others pause and resume in between: it can be
        tried again. Raises `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        groups = self._with_ranges()
        if not groups:
            return
        for topic in _topics(groups.values()):
            self._warn_of_ranges_ahead(topic)
        change = PausedChange(self, _ALL, wait_ms)
        if not change.repeat(lambda member: self._try_to_switch_off(change, member)):
            raise PositionNotSetError(
                f"ranges of group {self.name!r} are still enabled in coordination partitions "
                f"{list(self._with_ranges())}: others pause, resume or claim at the same time; let them end, then try "
                "again"
            )

    def _try_to_set_settings(self, change: PausedChange, member: Member, settings: GroupSettings) -> bool:
        change.pause(member)
        while self._held():
            self._revoke_dead(member, change)
            if not (held := self._held()):
                break
            if change.is_late:
                raise SettingsNotSetError(
                    f"the settings of group {self.name!r} were not changed: {_named(held)} still held by live members "
                    "after the wait. Give them more time, or stop their runs"
                )
            self.clock.sleep_ms(self._look_ms())
        self._write_settings(member, dict.fromkeys(self._with_other_settings(settings), settings))
        if self._with_other_settings(settings):
            self.clock.sleep_ms(self._look_ms())
        return not self._with_other_settings(settings)

    def _look_ms(self) -> float:
        return min((group.settings.heartbeat_interval_ms for group in self.groups().values()), default=0) * LOOK_PART

    def _held(self) -> list[DataPartitionId]:
        """Return the keys that an owner holds who is not stale, whole or by a range."""
        worlds, wall_ms = self.rationalizer.world.partitions, self.clock.wall_ms()
        return sorted(
            place
            for number, group in self.groups().items()
            for place in group.live_keys(group.advice_time_ms(worlds[number].log_time_ms, wall_ms))
        )

    def _revoke_dead(self, member: Member, change: PausedChange) -> None:
        """Revoke what owners hold that are dead; in a Go group nothing is revoked."""
        revocations: list[tuple[int, Message]] = []
        for number, group in self.groups().items():
            for (topic, partition), key in () if group.is_go else tuple(group.keys.items()):
                fields = {**self._sender.signed(member), "topic": topic, "partition": partition}
                revocations += [(number, record) for record in revocations_of(key, key.ranges, change.is_over, fields)]
        if revocations:
            with self.rationalizer.lock:
                self._sender.send([record for _, record in revocations], [number for number, _ in revocations])

    def _with_other_settings(self, settings: GroupSettings) -> list[int]:
        """Return the coordination partitions where other settings are in force, by default too. Raises as `groups`."""
        groups, defaults = self.groups(), self.rationalizer.world.defaults
        return [n for n in self.numbers if (groups[n].settings if n in groups else defaults) != settings]

    def _write_settings(self, member: Member, settings: Mapping[int, GroupSettings]) -> None:
        """Write the settings for each coordination partition."""
        if settings:
            with self.rationalizer.lock:
                signed = self._sender.signed(member)
                records = [GroupSettingsRecord(settings=wanted, **signed) for wanted in settings.values()]
                self._sender.send(records, list(settings))

    # Switching ranges off

    def _try_to_switch_off(self, change: PausedChange, member: Member) -> bool:
        """Try once, in the order of protocol.md, section 8.4, "Switch off"."""
        # With one record each: while the state then names `member` as who paused, no other has changed that since.
        pause = ReleaseGroup(expiry_s=change.until_s(), **self._sender.signed(member))
        with self.rationalizer.lock:
            unconfirmed = self._sender.send([pause] * len(self.numbers), self.numbers).unconfirmed
        if unconfirmed:
            logger.warning("a pause was not acknowledged and could come back later: switching ranges off begins again")
            return not self._with_ranges()
        begun = {number: self.rationalizer.world.partitions[number].log_time_ms or 0 for number in self.numbers}
        topics = _topics(self._with_ranges().values())
        with self._claimers(member, topics, (ClaimLostError, GroupPausedError)) as claimers:
            for claimer in claimers:
                self._wait_for_owners(claimer, self._positions(claimer.topic), change)
            self._wait_out(member, begun)
            if all(self._confirm(claimer, change) for claimer in claimers):
                groups = self._with_ranges()
                self._write_settings(member, {n: without_ranges(group.settings) for n, group in groups.items()})
        return not self._with_ranges()

    def _wait_out(self, member: Member, begun: Mapping[int, int]) -> None:
        """Let more than 2 heartbeat intervals of log time pass since `begun`, by marks where the log is silent."""
        world = self.rationalizer.world
        interval_ms = max(group.settings.heartbeat_interval_ms for group in self.groups().values())
        deadline_ms = self.clock.lease_ms() + 4 * interval_ms
        while True:
            with self.rationalizer.lock:
                early = [
                    n for n, at_ms in begun.items() if (world.partitions[n].log_time_ms or 0) - at_ms <= 2 * interval_ms
                ]
                if not early:
                    return
                if self.clock.lease_ms() >= deadline_ms:
                    raise PositionNotSetError(
                        f"log time stands still in coordination partitions {early}: is a broker's clock wrong? Nothing "
                        "was changed"
                    )
            self.clock.sleep_ms(interval_ms * LOOK_PART)
            with self.rationalizer.lock:
                self._sender.send([Mark(**self._sender.signed(member))] * len(early), early)

    def _confirm(self, claimer: Claimer, change: PausedChange) -> bool:
        """Set the positions of a topic to where they stand; return whether all are set."""
        wanted = self._positions(claimer.topic)
        claimer.claim(wanted, is_dead=change.is_over)
        done = claimer.confirm_positions()
        change.note_done(done)
        return done >= wanted.keys()

    def _with_ranges(self) -> dict[int, Group]:
        """Return the group where its settings name ranges, by coordination partition. Raises as `groups`."""
        return {number: group for number, group in self.groups().items() if RANGES in group.settings.features}

    def _positions(self, topic: str) -> dict[int, int]:
        """Return the offset of each partition of `topic`. Raises `PositionNotSetError` for those that have none."""
        with self.rationalizer.lock:
            keys = {number: key.offset for (of, number), key in self.group(topic).keys.items() if of == topic}
        nowhere = sorted(number for number, offset in keys.items() if offset is None)
        if nowhere:
            raise PositionNotSetError(f"partitions {nowhere} of {topic!r} have no offset: set their positions first")
        return {number: offset for number, offset in keys.items() if offset is not None}


def _topics(groups: Iterable[Group]) -> list[str]:
    return sorted({topic for group in groups for topic, _ in group.keys})


def _named(places: Sequence[DataPartitionId]) -> str:
    """Name the first of `places`, and how many more there are."""
    topic, partition = places[0]
    more = f" and {len(places) - 1} more partitions are" if len(places) > 1 else " is"
    return f"{topic}/{partition}{more}"
