"""What a person does to a group: pause it, resume it, set its positions (protocol.md, sections 6 and 7)."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Final

from marshal_dagster.admin.group_writer import TRIES, GroupWriter
from marshal_dagster.admin.log_access import require_certain
from marshal_dagster.admin.paused_change import RESUMED_S, SETTING, PausedChange
from marshal_dagster.coordination.claimer import Claimer, assume_alive
from marshal_dagster.coordination.claims import Member
from marshal_dagster.coordination.group_settings import check_settings, write_first_settings
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
"""Part of the heartbeat interval after which the owners are looked at again."""


class GroupAdmin(GroupWriter):
    """Pauses, resumes and repositions one group.

    A pause is a record that the newest Go consumers do not know: whether a person allows it is asked before, see
    `marshal_dagster.admin.go_groups`.
    """

    def pause(self, until_s: int) -> None:
        """Pause the group until `until_s`, unix seconds: its members claim and plan no more, and leave.

        Raises `UnavailableError` naming the coordination partitions where it could not be written;
        `CoordinationLogChangedError`; `ConfigurationError` where by log time it was over when it was written, which
        resumes the group.
        """
        with self.rationalizer.lock:
            self.write_pause(self.new_member(), dict.fromkeys(self.numbers, until_s))
            times = [world.log_time_ms for world in self.rationalizer.world.partitions.values()]
        latest_ms = max(at_ms for at_ms in times if at_ms is not None)
        if latest_ms >= until_s * 1_000:
            raise ConfigurationError(
                f"group {self.name!r} is not paused: by the brokers' clocks it is {latest_ms // 1_000} (unix seconds), "
                f"the pause was to end at {until_s}. Check this machine's clock, and pause for longer"
            )

    def resume(self) -> None:
        """End a pause, whoever began it. Raises as `pause`."""
        self.write_pause(self.new_member(), dict.fromkeys(self.numbers, RESUMED_S))

    def give_first_settings(self, settings: GroupSettings) -> None:
        """Give the group its first settings as its first member would, or complete half-written ones; without a pause.

        Raises `GoGroupError` where Go consumers use the group, or the coordination topic while no group in it has
        settings; `SettingsMismatchError` where others are in force; `ConfigurationError` for settings that no member
        can keep; `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        check_settings(settings, self.rationalizer.log.delivery_timeout_ms)
        with self.rationalizer.lock:
            self.groups()
            write_first_settings(self.rationalizer, self._sender, self.new_member(), settings)

    def ahead(self, topic: str) -> Mapping[int, Ranges]:
        """Return the ranges that are planned or done ahead of the offset, by partition: show them to the person.

        Where a position is set they are forgotten: they will be done again, or never. Raises `UnavailableError`,
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
        """Set partitions of `topic`, whose id in Kafka is `topic_id`, to `offsets`: the next to read.

        The group is paused meanwhile; a pause that was in force is put back, one that another begins meanwhile stays.
        The owners, of ranges too, have `wait_ms` to leave; what `is_dead` knows to be dead is revoked. What is planned
        or done `ahead` of an offset is forgotten, with a warning. Raises `PositionNotSetError` when they do not leave,
        or others pause and resume in between: then nothing was set, or what the message says. Raises `GoGroupError` in
        a Go group, where a late release would move the offset: see `set_go_positions`. Raises `IncompleteLogError`,
        `UnavailableError`, `CoordinationLogChangedError`.
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
        """Set partitions of `topic` to their present offsets once their owners have left: plans and attempts end.

        Acts and raises as `set_positions`; what an owner does before it leaves stays done.
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
        """Pause the group, claim the partitions in `offsets`, and have `set_claimed` set those that were won."""
        require_certain(self.rationalizer.follow_all(), topic)
        if self.group(topic).is_go:
            raise GoGroupError(
                f"group {self.name!r} has no settings of this library for topic {topic!r}, so its positions are not "
                f"set by a pause. Give it settings first with `marshal-dagster settings set {self.name}`"
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
                f"positions of {topic!r} were not seen set for partitions {sorted(unset)}: others pause, resume or "
                "claim at the same time, or records were not acknowledged. See `marshal-dagster status` for where they "
                "stand (one may have the new offset, or none), let the others end, then try again"
            )

    def set_go_positions(self, topic: str, offsets: Mapping[int, int], *, wait_ms: float) -> None:
        """Set partitions of `topic` to `offsets` in a Go group, without a pause (protocol.md, section 7).

        A person says that all consumers of the group are stopped: the next heartbeat of one would move the offset
        again. Only records that Go knows are written. The owners have `wait_ms` to go stale; nothing is revoked.
        Raises `PositionNotSetError` when they do not, or when another took a partition in between: then nothing was
        set, or what the message says. Raises `GroupPausedError`, `IncompleteLogError`, `UnavailableError`,
        `CoordinationLogChangedError`.
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
            f"positions of {topic!r} were not seen set for partitions {sorted(unset)}: a consumer of group "
            f"{self.name!r} is at work, or records were not acknowledged. Stop all of its consumers, see "
            "`marshal-dagster status` for where the partitions stand, then try again"
        )

    @contextmanager
    def _claimers(
        self, member: Member, topics: Iterable[str], retried: tuple[type[MarshalError], ...]
    ) -> Iterator[list[Claimer]]:
        """Give claimers in the name of `member`, which release what they hold after the block.

        An error in `retried` is logged, not raised: the change is tried again.
        """
        claimers = [
            Claimer(self.rationalizer, member, topic, self.group(topic).settings, clock=self.clock) for topic in topics
        ]
        try:
            yield claimers
        except retried as error:
            logger.warning("changing group %r is tried again: %s", self.name, error)
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
        """Claim the partitions in `unset`, and set the positions of those won; remove from it what was seen set."""
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
                    f"partitions {held} of {claimer.topic!r} are still held by live members after the wait: give them "
                    f"more time, or stop their runs; {change.what_was_set}"
                )
            self.clock.sleep_ms(claimer.settings.heartbeat_interval_ms * LOOK_PART)
            self.rationalizer.catch_up()

    def _warn_of_ranges_ahead(self, topic: str, partitions: Collection[int] | None = None) -> None:
        for number, ranges in self.ahead(topic).items():
            if partitions is None or number in partitions:
                forgotten = ", ".join(f"[{range_.start}, {range_.end}) {range_.phase}" for range_ in ranges)
                logger.warning("%s/%d will be done again, or never, ahead of the offset: %s", topic, number, forgotten)
