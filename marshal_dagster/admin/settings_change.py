"""Change of a group's settings, and disabling of its ranges, while the group is paused.

See protocol.md, sections 6 ("Settings") and 8.4 ("Switch off"). `group_settings` is the interface for operators.
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
    """Changes the settings of one group, and removes the feature `ranges` from them."""

    def set_settings(
        self, settings: GroupSettings, *, wait_ms: float, is_dead: Callable[[Owner], bool] = assume_alive
    ) -> None:
        """Replace the settings of the group (protocol.md, section 6, "Settings").

        The group is paused during the change, as in `set_positions`, unless the log has no record of it. Owners of
        partitions and ranges have `wait_ms` to release them; claims of owners that `is_dead` reports as dead are
        revoked, except in a Go group. If Go consumers use the group or the coordination topic, the caller has made sure
        that the operator has stopped them for good. If the settings are already in force, nothing happens.

        Raises `SettingsNotSetError` if owners do not leave, or others pause and resume during the change; it can be
        tried again. Raises `ConfigurationError` for settings that members cannot meet; `IncompleteLogError`,
        `UnavailableError`, `CoordinationLogChangedError`.
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
                "were not acknowledged. Wait for the others to finish, then try again to complete the change"
            )

    def switch_ranges_off(self, *, wait_ms: float) -> None:
        """Remove the feature `ranges` from the group's settings, so that members without support for it may claim.

        The group is paused during the change, as in `set_positions`, for more than 2 heartbeat intervals. Each of its
        positions is set to its present offset. Ranges after an offset are forgotten and processed again; call `ahead`
        before to get them. If the feature is already disabled, nothing happens.

        Raises `PositionNotSetError` if a partition has no offset, or if owners do not leave within `wait_ms`;
        `SettingsNotSetError` if others pause and resume during the change, or if log time does not advance. The change
        can be tried again. Raises `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        groups = self._with_ranges()
        if not groups:
            return
        for topic in _topics(groups.values()):
            self._warn_of_ranges_ahead(topic)
        change = PausedChange(self, _ALL, wait_ms)
        if not change.repeat(lambda member: self._try_to_switch_off(change, member)):
            raise SettingsNotSetError(
                f"ranges of group {self.name!r} are still enabled in coordination partitions "
                f"{list(self._with_ranges())}: others pause, resume or claim at the same time. Wait for them to "
                "finish, then try again"
            )

    def _try_to_set_settings(self, change: PausedChange, member: Member, settings: GroupSettings) -> bool:
        change.pause(member)
        while self._held():
            self._revoke_dead(member, change)
            if not (held := self._held()):
                break
            if change.is_late:
                raise SettingsNotSetError(
                    f"the settings of group {self.name!r} were not changed: {_named(held)} still claimed by live "
                    "members after the wait. Give them more time, or stop their runs"
                )
            self.clock.sleep_ms(self._look_ms())
        self._write_settings(member, dict.fromkeys(self._with_other_settings(settings), settings))
        if self._with_other_settings(settings):
            self.clock.sleep_ms(self._look_ms())
        return not self._with_other_settings(settings)

    def _look_ms(self) -> float:
        return min((group.settings.heartbeat_interval_ms for group in self.groups().values()), default=0) * LOOK_PART

    def _held(self) -> list[DataPartitionId]:
        """Return the partitions that are claimed, as a whole or by ranges, by an owner that is not stale."""
        worlds, wall_ms = self.rationalizer.world.partitions, self.clock.wall_ms()
        return sorted(
            place
            for number, group in self.groups().items()
            for place in group.live_keys(group.advice_time_ms(worlds[number].log_time_ms, wall_ms))
        )

    def _revoke_dead(self, member: Member, change: PausedChange) -> None:
        """Revoke the claims of dead owners; in a Go group nothing is revoked."""
        revocations: list[tuple[int, Message]] = []
        for number, group in self.groups().items():
            for (topic, partition), key in () if group.is_go else tuple(group.keys.items()):
                fields = {**self._sender.signed(member), "topic": topic, "partition": partition}
                revocations += [(number, record) for record in revocations_of(key, key.ranges, change.is_over, fields)]
        if revocations:
            with self.rationalizer.lock:
                self._sender.send([record for _, record in revocations], [number for number, _ in revocations])

    def _with_other_settings(self, settings: GroupSettings) -> list[int]:
        """Return the coordination partitions where other settings are in force, including default ones.

        Raises what `groups` raises.
        """
        groups, defaults = self.groups(), self.rationalizer.world.defaults
        return [n for n in self.numbers if (groups[n].settings if n in groups else defaults) != settings]

    def _write_settings(self, member: Member, settings: Mapping[int, GroupSettings]) -> None:
        """Write the settings for each coordination partition."""
        if settings:
            with self.rationalizer.lock:
                signed = self._sender.signed(member)
                records = [GroupSettingsRecord(settings=wanted, **signed) for wanted in settings.values()]
                self._sender.send(records, list(settings))

    # Disabling ranges

    def _try_to_switch_off(self, change: PausedChange, member: Member) -> bool:
        """Try once, in the order of protocol.md, section 8.4, "Switch off"."""
        # One record for each partition: as long as the state names `member` as the last to pause, no other has paused.
        pause = ReleaseGroup(expiry_s=change.until_s(), **self._sender.signed(member))
        with self.rationalizer.lock:
            unconfirmed = self._sender.send([pause] * len(self.numbers), self.numbers).unconfirmed
        if unconfirmed:
            logger.warning(
                "group %r: a pause was not acknowledged and may still be written, so disabling ranges starts again",
                self.name,
            )
            return not self._with_ranges()
        start = {number: self.rationalizer.world.partitions[number].log_time_ms or 0 for number in self.numbers}
        topics = _topics(self._with_ranges().values())
        with self._claimers(member, topics, (ClaimLostError, GroupPausedError)) as claimers:
            for claimer in claimers:
                self._wait_for_owners(claimer, self._positions(claimer.topic), change)
            self._wait_out(member, start)
            if all(self._confirm(claimer, change) for claimer in claimers):
                groups = self._with_ranges()
                self._write_settings(member, {n: without_ranges(group.settings) for n, group in groups.items()})
        return not self._with_ranges()

    def _wait_out(self, member: Member, start: Mapping[int, int]) -> None:
        """Wait until log time is more than 2 heartbeat intervals after `start`; write Marks to advance it."""
        world = self.rationalizer.world
        interval_ms = max(group.settings.heartbeat_interval_ms for group in self.groups().values())
        deadline_ms = self.clock.lease_ms() + 4 * interval_ms
        while True:
            with self.rationalizer.lock:
                early = [
                    n for n, at_ms in start.items() if (world.partitions[n].log_time_ms or 0) - at_ms <= 2 * interval_ms
                ]
                if not early:
                    return
                if self.clock.lease_ms() >= deadline_ms:
                    raise SettingsNotSetError(
                        f"log time does not advance in coordination partitions {early}, so the settings of group "
                        f"{self.name!r} were not changed. Check the brokers' clocks, then try again"
                    )
            self.clock.sleep_ms(interval_ms * LOOK_PART)
            with self.rationalizer.lock:
                self._sender.send([Mark(**self._sender.signed(member))] * len(early), early)

    def _confirm(self, claimer: Claimer, change: PausedChange) -> bool:
        """Set the positions of a topic to their present offsets; return whether all are set."""
        wanted = self._positions(claimer.topic)
        claimer.claim(wanted, is_dead=change.is_over)
        done = claimer.confirm_positions()
        change.note_done(done)
        return done >= wanted.keys()

    def _with_ranges(self) -> dict[int, Group]:
        """Return the group by coordination partition, for those where its settings enable ranges.

        Raises what `groups` raises.
        """
        return {number: group for number, group in self.groups().items() if RANGES in group.settings.features}

    def _positions(self, topic: str) -> dict[int, int]:
        """Return the offset of each partition of `topic`. Raises `PositionNotSetError` if any has none."""
        with self.rationalizer.lock:
            keys = {number: key.offset for (of, number), key in self.group(topic).keys.items() if of == topic}
        nowhere = sorted(number for number, offset in keys.items() if offset is None)
        if nowhere:
            raise PositionNotSetError(
                f"partitions {nowhere} of {topic!r} have no offset in group {self.name!r}: set their positions first "
                "with `marshal-dagster position reset`"
            )
        return {number: offset for number, offset in keys.items() if offset is not None}


def _topics(groups: Iterable[Group]) -> list[str]:
    return sorted({topic for group in groups for topic, _ in group.keys})


def _named(places: Sequence[DataPartitionId]) -> str:
    """Return the name of the first of `places` and the number of the others, with a verb."""
    topic, partition = places[0]
    more = f" and {len(places) - 1} more partitions are" if len(places) > 1 else " is"
    return f"{topic}/{partition}{more}"
