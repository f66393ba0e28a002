"""What a person does to a group: pause it, resume it, set its positions, give it settings.

See protocol.md, sections 6 and 7.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from marshal_dagster.coordination.appender import Sender
from marshal_dagster.coordination.claimer import Claimer, assume_alive
from marshal_dagster.coordination.claims import Member, new_instance_id
from marshal_dagster.coordination.clock import Clock, SystemClock
from marshal_dagster.coordination.group_settings import check_settings, write_first_settings
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.errors import (
    ClaimLostError,
    ConfigurationError,
    GoGroupError,
    GroupPausedError,
    IncompleteLogError,
    MarshalError,
    PositionNotSetError,
    SettingsNotSetError,
    UnavailableError,
)
from marshal_dagster.protocol.messages import (
    GroupSettings,
    GroupSettingsRecord,
    Mark,
    Message,
    ReleaseGroup,
    RevokingClaim,
    RevokingRange,
)
from marshal_dagster.protocol.state import RANGES, DataPartitionId, Group, Owner, Phase, Ranges

logger = logging.getLogger(__name__)

RESUMED_S: Final = 0
"""A pause that ends then, in unix seconds, has ended by any clock."""
_SETTING: Final = "setting-positions"
"""What the instance ids of those who set positions begin with: their pauses are not put back by others."""
_PUTTING_BACK: Final = "putting-back"
"""What the instance ids begin with under which they put back the pause that was in force before."""
LONGEST_SETTING_S: Final = 3_600
"""How long a group stays paused, in seconds, should whoever sets its positions die in the middle."""
TRIES: Final = 5
_LOOK_PART: Final = 0.1
"""Part of the heartbeat interval after which the owners are looked at again."""


class GroupAdmin:
    """Pauses, resumes and repositions one group, and gives it settings.

    Every act is an instance of its own. The rationalizer follows all coordination partitions from the first act on.
    A pause is a record that the newest Go consumers do not know: whether a person allows it is asked before, see
    `marshal_dagster.admin.go_groups`.
    """

    def __init__(self, rationalizer: Rationalizer, group: str, client: str, *, clock: Clock | None = None) -> None:
        """Act on `group`; `client` is for people to see. Raises `ConfigurationError` for names no record can carry."""
        self._rationalizer = rationalizer
        self._clock = clock or SystemClock()
        self._member = Member(group, client, new_instance_id("operator"))
        self._sender = Sender(rationalizer, "", self._clock)

    def pause(self, until_s: int) -> None:
        """Pause the group until `until_s`, unix seconds: its members claim and plan no more, and leave.

        Raises `UnavailableError` naming the coordination partitions where it could not be written;
        `CoordinationLogChangedError`; `ConfigurationError` where by log time it was over when it was written, which
        resumes the group.
        """
        with self._rationalizer.lock:
            self._report(self._member.with_new_instance(), dict.fromkeys(self._numbers, until_s))
            times = [world.log_time_ms for world in self._rationalizer.world.partitions.values()]
        latest_ms = max(at_ms for at_ms in times if at_ms is not None)
        if latest_ms >= until_s * 1_000:
            raise ConfigurationError(
                f"group {self._member.group!r} is not paused: by the brokers' clocks it is {latest_ms // 1_000} (unix "
                f"seconds), the pause was to end at {until_s}. Check this machine's clock, and pause for longer"
            )

    def resume(self) -> None:
        """End a pause, whoever began it. Raises as `pause`."""
        self._report(self._member.with_new_instance(), dict.fromkeys(self._numbers, RESUMED_S))

    def ahead(self, topic: str) -> Mapping[int, Ranges]:
        """Give the ranges that are planned or done ahead of the offset, by partition: show them to the person.

        Where a position is set they are forgotten: they will be done again, or never. Raises `UnavailableError`,
        `CoordinationLogChangedError`.
        """
        with self._rationalizer.lock:
            self._rationalizer.follow_all()
            places = {place: key.ranges for place, key in self._group(topic).keys.items() if place[0] == topic}
        waiting = {
            number: tuple(range_ for range_ in ranges if range_.phase is not Phase.CLAIMED)
            for (_, number), ranges in places.items()
        }
        return {number: ranges for number, ranges in sorted(waiting.items()) if ranges}

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
        self._require_certain(topic)
        if self._group(topic).is_go:
            raise GoGroupError(
                f"group {self._member.group!r} has no settings of this library for topic {topic!r}, so its positions "
                f"are not set by a pause. Give it settings first with `marshal-dagster settings set "
                f"{self._member.group}`"
            )
        self._warn_of_ranges_ahead(topic, offsets)
        setting = _PositionReset(topic, topic_id, self._clock.lease_ms() + wait_ms, is_dead)
        try:
            unset = dict(offsets)
            for _ in range(TRIES):
                self._note_pauses(setting)
                unset = self._try_to_set(setting, unset)
                if not unset:
                    break
            self._put_back(setting)
        except BaseException:
            self._try_to_put_back(setting)
            raise
        if unset:
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
        self._require_certain(topic)
        setting = _PositionReset(topic, "", self._clock.lease_ms() + wait_ms, assume_alive)
        unset = dict(offsets)
        for _ in range(TRIES):
            unset = self._try_to_set_go(setting, unset)
            if not unset:
                return
        raise PositionNotSetError(
            f"positions of {topic!r} were not seen set for partitions {sorted(unset)}: a consumer of group "
            f"{self._member.group!r} is at work, or records were not acknowledged. Stop all of its consumers, see "
            "`marshal-dagster status` for where the partitions stand, then try again"
        )

    def _try_to_set_go(self, setting: "_PositionReset", unset: Mapping[int, int]) -> dict[int, int]:
        """Try once, as an instance of its own; return what is still not set."""
        topic, member = setting.topic, replace(self._member, instance=new_instance_id(_SETTING))
        claimer = Claimer(self._rationalizer, member, topic, self._group(topic).settings, clock=self._clock)
        try:
            self._wait_for_owners(claimer, unset, setting)
            wanted = {claim.partition: unset[claim.partition] for claim in claimer.claim(unset)}
            setting.in_doubt |= wanted.keys()
            done = claimer.take_over_and_release(wanted)
        except ClaimLostError as error:
            logger.warning("setting positions of %r is tried again: %s", topic, error)
            done = frozenset()
        finally:
            claimer.release()
        setting.done |= done
        setting.in_doubt -= done
        return {number: offset for number, offset in unset.items() if number not in done}

    def give_first_settings(self, settings: GroupSettings) -> None:
        """Give the group its first settings as its first member would, or complete half-written ones; without a pause.

        Raises `GoGroupError` where Go consumers use the group, or the coordination topic while no group in it has
        settings; `SettingsMismatchError` where others are in force; `ConfigurationError` for settings that no member
        can keep; `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        check_settings(settings, self._rationalizer.log.delivery_timeout_ms)
        with self._rationalizer.lock:
            self._groups()
            write_first_settings(self._rationalizer, self._sender, self._member.with_new_instance(), settings)

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
        check_settings(settings, self._rationalizer.log.delivery_timeout_ms)
        groups, numbers = self._groups(), self._with_other_settings(settings)
        if not any(
            number in groups and (groups[number].keys or groups[number].settings_accepted) for number in numbers
        ):
            self._write_settings(self._member.with_new_instance(), settings, numbers)
            if not self._with_other_settings(settings):
                return
        setting = _PositionReset("all topics", "", self._clock.lease_ms() + wait_ms, is_dead)
        try:
            for _ in range(TRIES):
                self._note_pauses(setting)
                self._try_to_set_settings(setting, settings)
                if not self._with_other_settings(settings):
                    break
            self._put_back(setting)
        except BaseException:
            self._try_to_put_back(setting)
            raise
        if left := self._with_other_settings(settings):
            raise SettingsNotSetError(
                f"the settings of group {self._member.group!r} were not changed in coordination partitions {left}: "
                "others pause, resume or claim at the same time, or records were not acknowledged. Let them end, then "
                "try again, which completes it"
            )

    def _try_to_set_settings(self, setting: "_PositionReset", settings: GroupSettings) -> None:
        """Try once, as an instance of its own."""
        member = replace(self._member, instance=new_instance_id(_SETTING))
        self._report(member, dict.fromkeys(self._numbers, self._until_s(setting)))
        while held := self._held(self._groups()):
            self._revoke_dead(member, setting)
            if not (held := self._held(self._groups())):
                break
            if self._clock.lease_ms() >= setting.deadline_ms:
                raise SettingsNotSetError(
                    f"the settings of group {self._member.group!r} were not changed: {_named(held)} still held by live "
                    "members after the wait. Give them more time, or stop their runs"
                )
            self._clock.sleep_ms(self._look_ms())
        self._write_settings(member, settings, self._with_other_settings(settings))
        if self._with_other_settings(settings):
            self._clock.sleep_ms(self._look_ms())

    def _look_ms(self) -> float:
        intervals = [group.settings.heartbeat_interval_ms for group in self._groups().values()]
        return min(intervals, default=0) * _LOOK_PART

    def _held(self, groups: Mapping[int, Group]) -> list[DataPartitionId]:
        """Return the keys that an owner holds who is not stale, whole or by a range."""
        worlds = self._rationalizer.world.partitions
        return sorted(
            place
            for number, group in groups.items()
            for place in group.live_keys(group.advice_time_ms(worlds[number].log_time_ms, self._clock.wall_ms()))
        )

    def _revoke_dead(self, member: Member, setting: "_PositionReset") -> None:
        """Revoke what owners hold that are dead; in a Go group nothing is revoked."""
        messages: list[Message] = []
        numbers: list[int] = []
        for number, group in self._groups().items():
            for (topic, partition), key in () if group.is_go else tuple(group.keys.items()):
                signed = {**self._sender.signed(member), "topic": topic, "partition": partition}
                owners = [(RevokingClaim, key.owner), *((RevokingRange, range_.owner) for range_ in key.ranges)]
                for kind, owner in owners:
                    if owner is not None and owner.epoch is not None and setting.is_over(owner):
                        messages.append(kind(epoch=owner.epoch, **signed))
                        numbers.append(number)
        if messages:
            with self._rationalizer.lock:
                self._sender.send(messages, numbers)

    def _with_other_settings(self, settings: GroupSettings) -> list[int]:
        """Return the coordination partitions where other settings are in force, by default too. Raises as `_groups`."""
        groups, defaults = self._groups(), self._rationalizer.world.defaults
        return [n for n in self._numbers if (groups[n].settings if n in groups else defaults) != settings]

    def _write_settings(self, member: Member, settings: GroupSettings, numbers: Sequence[int]) -> None:
        if numbers:
            message = GroupSettingsRecord(settings=settings, **self._sender.signed(member))
            with self._rationalizer.lock:
                self._sender.send([message] * len(numbers), numbers)

    def switch_ranges_off(self, *, wait_ms: float, is_dead: Callable[[Owner], bool] = assume_alive) -> None:
        """Take the feature `ranges` out of the group's settings, so that members that do not know it may claim.

        The group is paused meanwhile, as for `set_positions`, for more than 2 heartbeat intervals; the position of each
        of its keys is set to where it stands. What is done ahead of an offset is forgotten, and will be done again:
        look at it `ahead`. Where the feature is off already nothing happens. Raises `PositionNotSetError` for a key
        without offset, when owners do not leave within `wait_ms`, or others pause and resume in between: it can be
        tried again. Raises `IncompleteLogError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        numbers = self._with_ranges()
        if not numbers:
            return
        for topic in sorted({topic for number in numbers for topic, _ in self._places(number)}):
            self._warn_of_ranges_ahead(topic)
        setting = _PositionReset("all topics", "", self._clock.lease_ms() + wait_ms, is_dead)
        try:
            for _ in range(TRIES):
                self._note_pauses(setting)
                self._try_to_switch_off(setting)
                if not self._with_ranges():
                    break
            self._put_back(setting)
        except BaseException:
            self._try_to_put_back(setting)
            raise
        if left := self._with_ranges():
            raise PositionNotSetError(
                f"ranges of group {self._member.group!r} are still enabled in coordination partitions {left}: others "
                "pause, resume or claim at the same time; let them end, then try again"
            )

    def _try_to_switch_off(self, setting: "_PositionReset") -> None:
        """Try once, as an instance of its own, in the order of protocol.md, section 8.4, "Switch off"."""
        member = replace(self._member, instance=new_instance_id(_SETTING))
        if not self._pause_once(member, setting):
            logger.warning("a pause was not acknowledged and could come back later: switching ranges off begins anew")
            return
        begun = {number: self._rationalizer.world.partitions[number].log_time_ms or 0 for number in self._numbers}
        topics = {topic for number in self._with_ranges() for topic, _ in self._places(number)}
        claimers = [
            Claimer(self._rationalizer, member, topic, self._group(topic).settings, clock=self._clock)
            for topic in sorted(topics)
        ]
        try:
            for claimer in claimers:
                self._wait_for_owners(claimer, self._positions(claimer.topic), setting)
            self._wait_out(member, begun)
            if all(self._confirm(claimer, setting) for claimer in claimers):
                self._write_without_ranges(member)
        except (ClaimLostError, GroupPausedError) as error:
            logger.warning("switching ranges off is tried again: %s", error)
        finally:
            for claimer in claimers:
                claimer.release()
            setting.given_up.add(member.instance)

    def _pause_once(self, member: Member, setting: "_PositionReset") -> bool:
        """Pause everywhere, with one record each; tell whether all were acknowledged, so that none comes later.

        While the state then names `member` as who paused, nobody has paused or resumed in between.
        """
        pause = ReleaseGroup(expiry_s=self._until_s(setting), **self._sender.signed(member))
        with self._rationalizer.lock:
            return not self._sender.send([pause] * len(self._numbers), self._numbers).unconfirmed

    def _wait_out(self, member: Member, begun: Mapping[int, int]) -> None:
        """Let more than 2 heartbeat intervals of log time pass since `begun`, by marks where the log is silent."""
        world = self._rationalizer.world
        interval_ms = max(group.settings.heartbeat_interval_ms for group in self._groups().values())
        deadline_ms = self._clock.lease_ms() + 4 * interval_ms
        while True:
            with self._rationalizer.lock:
                early = [
                    n for n, at_ms in begun.items() if (world.partitions[n].log_time_ms or 0) - at_ms <= 2 * interval_ms
                ]
                if not early:
                    return
                if self._clock.lease_ms() >= deadline_ms:
                    raise PositionNotSetError(
                        f"log time stands still in coordination partitions {early}: is a broker's clock wrong? Nothing "
                        "was changed"
                    )
            self._clock.sleep_ms(interval_ms * _LOOK_PART)
            with self._rationalizer.lock:
                self._sender.send([Mark(**self._sender.signed(member))] * len(early), early)

    def _confirm(self, claimer: Claimer, setting: "_PositionReset") -> bool:
        """Set the positions of a topic to where they stand; tell whether all are set."""
        wanted = self._positions(claimer.topic)
        claimer.claim(wanted, is_dead=setting.is_over)
        done = claimer.confirm_positions()
        setting.done |= done
        return done >= wanted.keys()

    def _write_without_ranges(self, member: Member) -> None:
        with self._rationalizer.lock:
            world, numbers = self._rationalizer.world, self._with_ranges()
            groups = [world.partitions[number].groups[self._member.group] for number in numbers]
            messages = [
                GroupSettingsRecord(
                    settings=replace(
                        group.settings,
                        features=tuple(feature for feature in group.settings.features if feature != RANGES),
                    ),
                    **self._sender.signed(member),
                )
                for group in groups
            ]
            self._sender.send(messages, numbers)

    def _groups(self) -> dict[int, Group]:
        """Read on, and give the group as each coordination partition knows it, if it does.

        Raises `IncompleteLogError` where that is not known, as after retention has overtaken the reader.
        """
        partitions = self._rationalizer.follow_all().partitions.items()
        if unsure := [number for number, one in partitions if not one.certain]:
            raise IncompleteLogError(
                f"coordination partitions {unsure} no longer begin at offset 0 and have no snapshot: the settings "
                "there are not known. Stop all members of the group, then see `marshal-dagster recover`"
            )
        return {n: group for n, one in partitions if (group := one.groups.get(self._member.group)) is not None}

    def _with_ranges(self) -> list[int]:
        """Give the coordination partitions where the group's settings name ranges. Raises as `_groups`."""
        return [number for number, group in self._groups().items() if RANGES in group.settings.features]

    def _places(self, number: int) -> Collection[DataPartitionId]:
        return self._rationalizer.world.partitions[number].groups[self._member.group].keys.keys()

    def _positions(self, topic: str) -> dict[int, int]:
        """Give where each partition of `topic` stands. Raises `PositionNotSetError` for those that stand nowhere."""
        with self._rationalizer.lock:
            keys = {number: key.offset for (of, number), key in self._group(topic).keys.items() if of == topic}
        nowhere = sorted(number for number, offset in keys.items() if offset is None)
        if nowhere:
            raise PositionNotSetError(f"partitions {nowhere} of {topic!r} have no offset: set their positions first")
        return {number: offset for number, offset in keys.items() if offset is not None}

    def _warn_of_ranges_ahead(self, topic: str, partitions: Collection[int] | None = None) -> None:
        for number, ranges in self.ahead(topic).items():
            if partitions is None or number in partitions:
                told = ", ".join(f"[{range_.start}, {range_.end}) {range_.phase}" for range_ in ranges)
                logger.warning("%s/%d will be done again, or never, ahead of the offset: %s", topic, number, told)

    def _try_to_set(self, setting: "_PositionReset", unset: Mapping[int, int]) -> dict[int, int]:
        """Try once, as an instance of its own; give what is still not set."""
        topic, member = setting.topic, replace(self._member, instance=new_instance_id(_SETTING))
        self._report(member, dict.fromkeys(self._numbers, self._until_s(setting)))
        claimer = Claimer(self._rationalizer, member, topic, self._group(topic).settings, clock=self._clock)
        try:
            self._wait_for_owners(claimer, unset, setting)
            claims = claimer.claim(unset, is_dead=setting.is_over)
            setting.in_doubt |= {claim.partition for claim in claims}
            done = claimer.set_positions({one.partition: unset[one.partition] for one in claims}, setting.topic_id)
        except (ClaimLostError, GroupPausedError) as error:
            logger.warning("setting positions of %r is tried again: %s", topic, error)
            done = frozenset()
        finally:
            claimer.release()
            setting.given_up.add(member.instance)
        setting.done |= done
        setting.in_doubt -= done
        return {number: offset for number, offset in unset.items() if number not in done}

    @property
    def _numbers(self) -> range:
        return range(self._rationalizer.identity.partitions)

    def _until_s(self, setting: "_PositionReset") -> int:
        """Say when the pause for `setting` is to end if nobody ends it, should this machine's clock be slow too."""
        times = [world.log_time_ms or 0 for world in self._rationalizer.world.partitions.values()]
        ahead_ms = max(0, max(times) - self._clock.wall_ms())
        left_ms = max(0.0, setting.deadline_ms - self._clock.lease_ms())
        return int(self._clock.wall_ms() + ahead_ms + left_ms) // 1_000 + LONGEST_SETTING_S

    def _report(self, member: Member, ends: Mapping[int, int]) -> None:
        """Write the end of a pause to each coordination partition, in the name of `member`, and read it back."""
        with self._rationalizer.lock:
            self._rationalizer.follow_all()
            signed, unsent = self._sender.signed(member), list(ends)
            for _ in range(TRIES):
                messages = [ReleaseGroup(expiry_s=ends[number], **signed) for number in unsent]
                sent = self._sender.send(messages, unsent)
                unsent = [number for number, heard in zip(unsent, sent.outcomes, strict=True) if heard is None]
                if not unsent:
                    return
        raise UnavailableError(
            f"the pause of group {member.group!r} could not be written to coordination partitions {unsent}: the broker "
            "did not acknowledge it in time. Elsewhere it is in force; try again, which completes it"
        )

    def _wait_for_owners(self, claimer: Claimer, partitions: Mapping[int, int], setting: "_PositionReset") -> None:
        while len(free := claimer.claimable(partitions, is_dead=setting.is_over)) < len(partitions):
            if self._clock.lease_ms() >= setting.deadline_ms:
                held = sorted(partitions.keys() - set(free))
                raise PositionNotSetError(
                    f"partitions {held} of {claimer.topic!r} are still held by live members after the wait: give them "
                    f"more time, or stop their runs; {setting.what_was_set}"
                )
            self._clock.sleep_ms(claimer.settings.heartbeat_interval_ms * _LOOK_PART)
            self._rationalizer.catch_up()

    def _note_pauses(self, setting: "_PositionReset") -> list[int]:
        """Note what is to be put back; give the coordination partitions where another has paused or resumed since.

        Where retention has overtaken the reader since, what was in force before still is what is known.
        """
        changed: list[int] = []
        for number, partition in self._rationalizer.follow_all().partitions.items():
            if number in setting.before and not partition.certain:
                continue
            pause = _LastPause.of(partition.groups.get(self._member.group))
            before = setting.before.setdefault(number, _NO_PAUSE if pause.is_for_a_setting else pause)
            if not pause.is_for_a_setting and pause != before:
                setting.before[number] = pause
                changed.append(number)
        return changed

    def _put_back(self, setting: "_PositionReset") -> None:
        """End this setting's pause: with the one in force before, except where another has decided meanwhile."""
        with self._rationalizer.lock:
            theirs = self._note_pauses(setting)
            ends = {number: pause.until_s for number, pause in setting.before.items() if number not in theirs}
            self._report(replace(self._member, instance=new_instance_id(_PUTTING_BACK)), ends)

    def _try_to_put_back(self, setting: "_PositionReset") -> None:
        try:
            self._put_back(setting)
        except MarshalError:
            logger.exception(
                "group %r stays paused for %d s or a little longer, resume it; of the positions in %r: %s",
                self._member.group,
                LONGEST_SETTING_S,
                setting.topic,
                setting.what_was_set,
            )

    def _group(self, topic: str) -> Group:
        return self._rationalizer.world.group_of(self._member.group, topic)

    def _require_certain(self, topic: str) -> None:
        if not self._rationalizer.follow_all().partition_of(topic).certain:
            raise IncompleteLogError(
                f"the coordination partition of topic {topic!r} no longer begins at offset 0 and has no snapshot: no "
                "position can be set. Stop all members of the group, then see `marshal-dagster recover`"
            )


def _named(places: Sequence[DataPartitionId]) -> str:
    """Name the first of `places`, and say how many more there are."""
    topic, partition = places[0]
    more = f" and {len(places) - 1} more partitions are" if len(places) > 1 else " is"
    return f"{topic}/{partition}{more}"


class _LastPause(NamedTuple):
    """The last pause or resumption that a coordination partition has of a group."""

    until_s: int = RESUMED_S
    by: str | None = None

    @classmethod
    def of(cls, group: Group | None) -> "_LastPause":
        """Take it from a group's state."""
        return (
            _NO_PAUSE if group is None or group.paused_until_s is None else cls(group.paused_until_s, group.paused_by)
        )

    @property
    def is_for_a_setting(self) -> bool:
        """Whether it only began or ended a setting of positions, so that nobody asked for it by itself."""
        begun_by, _, _ = (self.by or "").partition(".")
        return begun_by == _SETTING or (begun_by == _PUTTING_BACK and self.until_s == RESUMED_S)


_NO_PAUSE: Final = _LastPause()


@dataclass(slots=True)
class _PositionReset:
    """One setting of positions, over all its tries.

    `given_up` are the instances of tries that ended, `done` the partitions that were set, `before` what is to be put
    back in each coordination partition.
    """

    topic: str
    topic_id: str
    deadline_ms: float
    is_dead: Callable[[Owner], bool]
    given_up: set[str] = field(default_factory=set)
    done: frozenset[int] = frozenset()
    in_doubt: frozenset[int] = frozenset()
    """Those of which a record that sets them, or takes their offset, may be in the log."""
    before: dict[int, _LastPause] = field(default_factory=dict)

    @property
    def what_was_set(self) -> str:
        """Which partitions have their new positions, in words."""
        known = f"partitions {sorted(self.done)} were set" if self.done else "nothing was seen set"
        return f"{known}, partitions {sorted(self.in_doubt)} may have been" if self.in_doubt else known

    def is_over(self, owner: Owner) -> bool:
        """Tell whether `owner` is dead, or was an earlier try."""
        return owner.instance in self.given_up or self.is_dead(owner)
