"""Operator actions on a group: pause, resume, give first settings, set positions (protocol.md, sections 6 and 7)."""

import logging
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Final

from marshal_dagster._internal.texts import utc_to_second
from marshal_dagster.admin.group_writer import TRIES, GroupWriter
from marshal_dagster.admin.log_access import require_certain
from marshal_dagster.admin.paused_change import RESUMED_S, PausedChange
from marshal_dagster.coordination.claimer import Claimer, assume_alive
from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.group_settings import check_settings, write_first_settings
from marshal_dagster.coordination.pause_text import SETTING
from marshal_dagster.errors import (
    ClaimLostError,
    ConfigurationError,
    GoGroupError,
    GroupPausedError,
    MarshalError,
    PositionNotSetError,
)
from marshal_dagster.protocol.messages import GroupSettings
from marshal_dagster.protocol.state import Owner, Ranges

logger = logging.getLogger(__name__)

LOOK_PART: Final = 0.1
"""The fraction of the heartbeat interval after which the owners are checked again."""


class GroupAdmin(GroupWriter):
    """Pauses and resumes one group, and sets its positions.

    The newest Go consumers do not understand the record of a pause. Callers check first whether it is allowed, see
    `marshal_dagster.admin.go_groups`.
    """

    def pause(self, until_s: int, reason: str | None = None) -> None:
        """Pause the group until `until_s` (unix seconds); its members claim and plan nothing more and leave.

        `reason` is why, for people; see `marshal_dagster.admin.pause.require_reason`.

        Raises `UnavailableError`, which names the coordination partitions where the pause could not be written;
        `CoordinationLogChangedError`; `ConfigurationError` if by log time the pause had already ended when it was
        written, which resumes the group.
        """
        with self.rationalizer.lock:
            self.write_pause(self.new_member(), dict.fromkeys(self.numbers, until_s), reason)
            times = [world.log_time_ms for world in self.rationalizer.world.partitions.values()]
        latest_ms = max(at_ms for at_ms in times if at_ms is not None)
        if latest_ms >= until_s * 1_000:
            raise ConfigurationError(
                f"group {self.name!r} is not paused: its end {utc_to_second(until_s)} is in the past: the brokers' "
                f"clocks show {utc_to_second(latest_ms // 1_000)}. Check this machine's clock, or pause for longer"
            )

    def resume(self) -> None:
        """End any pause. Raises `UnavailableError` and `CoordinationLogChangedError`."""
        self.write_pause(self.new_member(), dict.fromkeys(self.numbers, RESUMED_S))

    def give_first_settings(self, settings: GroupSettings) -> None:
        """Write the group's first settings as its first member would, or complete partly written ones; without a pause.

        Raises `GoGroupError` if Go consumers use the group, or use the coordination topic while no group in it has
        settings; `SettingsMismatchError` if other settings are in force; `ConfigurationError` for settings that members
        cannot meet; `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        check_settings(settings, self.rationalizer.log.delivery_timeout_ms)
        with self.rationalizer.lock:
            self.groups()
            write_first_settings(self.rationalizer, self._sender, self.new_member(), settings)

    def ahead(self, topic: str) -> Mapping[int, Ranges]:
        """Return the ranges after the offset that are planned or done, by partition, to show them to the operator.

        Setting a position forgets them: they will be processed again, or never. Raises `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self.rationalizer.lock:
            self.rationalizer.follow_all()
            keys = sorted(self.group(topic).keys.items(), key=itemgetter(0))
            return {number: key.ahead for (name, number), key in keys if name == topic and key.ahead}

    def set_positions(
        self,
        topic: str,
        offsets: Mapping[int, int],
        topic_id: str,
        *,
        wait_ms: float,
        is_dead: Callable[[Owner], bool] = assume_alive,
    ) -> None:
        """Set the positions of `topic`, whose id in Kafka is `topic_id`, to `offsets`, the next ones to read.

        The group is paused during the change. A pause that was in force before is restored; one that another operator
        starts during the change stays. Owners of partitions and ranges have `wait_ms` to release them; claims of owners
        that `is_dead` reports as dead are revoked. Ranges after an offset are forgotten, with a warning.

        Raises `PositionNotSetError` if owners do not leave, or others pause and resume during the change; the message
        states what was set. Raises `GoGroupError` in a Go group, in which a late release would move the offset: use
        `set_go_positions`. Raises `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        self._change_positions(
            topic, offsets, wait_ms, is_dead, lambda claimer, wanted: claimer.set_positions(wanted, topic_id)
        )

    def end_plans(
        self,
        topic: str,
        partitions: Collection[int],
        *,
        wait_ms: float,
        is_dead: Callable[[Owner], bool] = assume_alive,
    ) -> None:
        """End plans and attempts: set partitions of `topic` to their present offsets once their owners have left.

        Otherwise as `set_positions`. What an owner completes before it leaves stays completed.
        """
        offsets = dict.fromkeys(partitions, 0)
        self._change_positions(topic, offsets, wait_ms, is_dead, lambda claimer, _: claimer.confirm_positions())

    def _change_positions(
        self,
        topic: str,
        offsets: Mapping[int, int],
        wait_ms: float,
        is_dead: Callable[[Owner], bool],
        set_claimed: Callable[[Claimer, Mapping[int, int]], frozenset[int]],
    ) -> None:
        """Pause the group, claim the partitions in `offsets`, and call `set_claimed` with those that were claimed."""
        require_certain(self.rationalizer.follow_all(), topic)
        if self.group(topic).is_go:
            raise GoGroupError(
                f"group {self.name!r} has no settings of this library for topic {topic!r}, so its positions cannot be "
                "set with a pause. Give it settings first with "
                f"`{shlex.join(['marshal-dagster', 'settings', 'set', self.name])}`"
            )
        self._warn_of_ranges_ahead(topic, offsets)
        change = PausedChange(self, topic, wait_ms, is_dead)
        unset = dict(offsets)

        def attempt(member: Member) -> bool:
            change.pause(member)
            with self._claimers(member, [topic], (ClaimLostError, GroupPausedError)) as (claimer,):
                self._set(change, claimer, unset, lambda wanted: set_claimed(claimer, wanted))
            return not unset

        if not change.repeat(attempt):
            raise PositionNotSetError(
                f"positions of group {self.name!r} were not confirmed for partitions {sorted(unset)} of {topic!r}: "
                "others pause, resume or claim at the same time, or records were not acknowledged. Check the present "
                "positions with `marshal-dagster status`, wait for the others to finish, then try again"
            )

    def set_go_positions(self, topic: str, offsets: Mapping[int, int], *, wait_ms: float) -> None:
        """Set positions of `topic` to `offsets` in a Go group, without a pause (protocol.md, section 7).

        The operator must have stopped all consumers of the group, because the next heartbeat of one would move the
        offset again. Only records that Go consumers understand are written. Owners have `wait_ms` to become stale;
        nothing is revoked. Raises `PositionNotSetError` if they do not, or if another member claims a partition during
        the change; the message states what was set. Raises `GroupPausedError`, `IncompleteLogError`,
        `UnavailableError`, `CoordinationLogChangedError`.
        """
        require_certain(self.rationalizer.follow_all(), topic)
        change = PausedChange(self, topic, wait_ms)
        unset = dict(offsets)
        for _ in range(TRIES):
            with self._claimers(self.new_member(SETTING), [topic], (ClaimLostError,)) as (claimer,):
                self._set(change, claimer, unset, claimer.take_over_and_release)
            if not unset:
                return
        raise PositionNotSetError(
            f"positions of group {self.name!r} were not confirmed for partitions {sorted(unset)} of topic {topic!r}: a "
            "consumer of the group is running, or records were not acknowledged. Stop all of its consumers, check the "
            "present positions with `marshal-dagster status`, then try again"
        )

    @contextmanager
    def _claimers(
        self, member: Member, topics: Iterable[str], retried: tuple[type[MarshalError], ...]
    ) -> Iterator[list[Claimer]]:
        """Yield a claimer of `member` for each topic; after the block they release their claims.

        An error of a type in `retried` is logged and not raised, because the caller tries the change again.
        """
        claimers = [
            Claimer(self.rationalizer, member, topic, self.group(topic).settings, clock=self.clock) for topic in topics
        ]
        try:
            yield claimers
        except retried as error:
            logger.warning("the change of group %r is tried again: %s", self.name, error)
        finally:
            for claimer in claimers:
                claimer.release()

    def _set(
        self,
        change: PausedChange,
        claimer: Claimer,
        unset: dict[int, int],
        set_claimed: Callable[[Mapping[int, int]], frozenset[int]],
    ) -> None:
        """Claim the partitions in `unset`, set positions of those claimed, and remove confirmed ones from `unset`."""
        self._wait_for_owners(claimer, unset, change)
        claims = claimer.claim(unset, is_dead=change.is_over)
        wanted = {claim.partition: unset[claim.partition] for claim in claims}
        change.in_doubt |= wanted.keys()
        done = set_claimed(wanted)
        change.note_done(done)
        for partition in done:
            del unset[partition]

    def _wait_for_owners(self, claimer: Claimer, partitions: Mapping[int, int], change: PausedChange) -> None:
        while len(free := claimer.claimable(partitions, is_dead=change.is_over)) < len(partitions):
            if change.is_late:
                held = sorted(partitions.keys() - set(free))
                raise PositionNotSetError(
                    f"partitions {held} of topic {claimer.topic!r} are still claimed by live members of group "
                    f"{self.name!r} after the wait; {change.what_was_set}. Give them more time, or stop their runs"
                )
            self.clock.sleep_ms(claimer.settings.heartbeat_interval_ms * LOOK_PART)
            self.rationalizer.catch_up()

    def _warn_of_ranges_ahead(self, topic: str, partitions: Collection[int] | None = None) -> None:
        for number, ranges in self.ahead(topic).items():
            if partitions is None or number in partitions:
                forgotten = ", ".join(f"[{range_.start}, {range_.end}) {range_.phase}" for range_ in ranges)
                logger.warning(
                    "group %r, %s/%d: ranges after the offset are forgotten and will be processed again, or never: %s",
                    self.name,
                    topic,
                    number,
                    forgotten,
                )
