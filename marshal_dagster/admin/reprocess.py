"""Reprocessing of offsets that a group has already processed, by the group's own members.

The position of each partition is set back to the start of its range. When the members have reached the range's end, the
position is set to the one before. It is moved forward only over offsets that were processed before, so no record is
skipped, whatever happens meanwhile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final

from marshal_dagster.admin.pause import GroupPauser
from marshal_dagster.admin.paused_change import LONGEST_SETTING_S
from marshal_dagster.admin.position_spec import ToDatetime, ToOffsets
from marshal_dagster.admin.reset_positions import PositionChange, PositionResetter
from marshal_dagster.admin.times import instant_ms
from marshal_dagster.coordination.claimer import assume_alive
from marshal_dagster.errors import ConfigurationError, PositionNotSetError, UnavailableError
from marshal_dagster.kafka.record_times import hidden_by_future
from marshal_dagster.protocol.messages import DeliveryMode, RuleSet
from marshal_dagster.protocol.state import RANGES, Key, Owner

_LOOK_MS: Final = 500
_NO_MESSAGE: Final = "no message in this window"


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A half-open window of time, in unix ms.

    In each partition it has the offsets from the first message with the time `start_ms` or a later one, up to the first
    message with the time `end_ms` or a later one (exclusive). The time is the timestamp of Kafka's record. So each
    message is in exactly one of several adjacent windows. A message with an older timestamp than one before it is in
    the window of the message before it, or in a later one.

    Raises `ConfigurationError` for an empty window.
    """

    start_ms: int
    end_ms: int

    def __post_init__(self) -> None:
        if self.start_ms >= self.end_ms:
            raise ConfigurationError("the window of time is empty; give a start before the end")

    @classmethod
    def between(cls, start: str, end: str, prefix: str = "") -> "TimeWindow":
        """Parse two ISO 8601 times; `prefix` is `--` for options of the command line. Raises `ConfigurationError`."""
        joint = "-" if prefix else "_"
        return cls(instant_ms(start, f"{prefix}from{joint}datetime"), instant_ms(end, f"{prefix}to{joint}datetime"))


@dataclass(frozen=True, slots=True)
class ReprocessPlan:
    """A range of offsets of one partition to reprocess, and the position to which the group returns."""

    back: PositionChange
    """The change that sets the position back to the start of the range."""
    end: int
    """The end of the range (exclusive)."""
    position_before: int
    """The group's position when the plan was made."""
    notes: Sequence[str] = ()
    """Notes for the operator to read before confirming."""

    @property
    def partition(self) -> int:
        """The partition."""
        return self.back.partition


@dataclass(frozen=True, slots=True)
class WindowPlans:
    """The ranges of a window of time, and the partitions in which there is nothing to reprocess."""

    plans: Sequence[ReprocessPlan]
    left_out: Mapping[int, str]
    """By partition, why there is nothing to reprocess."""

    @property
    def has_messages(self) -> bool:
        """Whether a partition has messages in the window, or may have some: it may be left out for another reason."""
        return bool(self.plans) or any(why != _NO_MESSAGE for why in self.left_out.values())


def plans_finder(
    partitions: Sequence[range] | None,
    start: int | None,
    end: int | None,
    from_datetime: str | None,
    to_datetime: str | None,
    *,
    prefix: str = "",
) -> "Callable[[RangeReprocessor], WindowPlans] | None":
    """Return the function that plans what an operator selects: offsets of partitions, or a window of time.

    Returns None unless the arguments select exactly one of these two. `prefix` is as in `TimeWindow.between`. Raises
    `ConfigurationError` for an invalid window.
    """
    if start is None and end is None and from_datetime is not None and to_datetime is not None:
        window = TimeWindow.between(from_datetime, to_datetime, prefix)
        return lambda work: work.look_at_window(window, partitions)
    if partitions is None or start is None or end is None or from_datetime is not None or to_datetime is not None:
        return None
    numbers = sorted({number for some in partitions for number in some})
    return lambda work: WindowPlans([work.look(number, start, end) for number in numbers], {})


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """The result of reprocessing a range of one partition."""

    partition: int
    end: int
    """The end of the range (exclusive)."""
    reached: int
    """The offset up to which the group has reprocessed."""
    resume_offset: int
    """The offset at which the group continues."""

    @property
    def is_done(self) -> bool:
        """Whether the whole range was processed again."""
        return self.reached >= self.end


@dataclass(frozen=True, slots=True)
class ReprocessResult:
    """The result of reprocessing ranges of one or more partitions."""

    partitions: Sequence[PartitionResult]
    """The results of all partitions, in the order of their plans."""
    problem: str | None = None
    """Why a position could not be committed to Kafka's own group offsets; None if all were."""

    @property
    def unfinished(self) -> Sequence[PartitionResult]:
        """The results of the partitions whose range was not processed as a whole."""
        return [result for result in self.partitions if not result.is_done]

    def of(self, partition: int) -> PartitionResult:
        """Return the result of a partition."""
        return next(result for result in self.partitions if result.partition == partition)


@dataclass(frozen=True, slots=True)
class _PartitionWork:
    """A partition while the group reprocesses its range."""

    plan: ReprocessPlan
    generation: int
    """The generation that began when the position was set back. Another one means that another process set it."""
    position_before: int
    """The position before it was set back."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """How long members have to release partitions, and which owners need not be waited for."""

    wait_s: float
    is_dead: Callable[[Owner], bool]


@dataclass(slots=True)
class RangeReprocessor:
    """Makes one group reprocess ranges of the partitions of one topic.

    Call `look` or `look_at_window`, show the operator its result, then call `carry_out`.
    """

    work: PositionResetter
    """Sets the positions; the caller closes it."""

    def look(self, partition: int, start: int, end: int) -> ReprocessPlan:
        """Return the plan to reprocess the offsets from `start` up to `end` (exclusive); nothing is written.

        Raises `ConfigurationError` for an empty range or one that the group has not processed yet; for a group that
        delivers at most once, is shared with Go consumers, claims ranges or is paused. Raises what
        `PositionResetter.look` raises.
        """
        if start >= end:
            raise ConfigurationError(
                f"the range from {start} up to {end} (exclusive) is empty; give a start before the end"
            )
        (back,) = self.work.look(ToOffsets(by_partition=((partition, start),)), is_set_later=False)
        name, position_before = f"{self.work.topic}/{partition}", back.key.offset
        if position_before is None or back.is_other:
            raise ConfigurationError(
                f"group {self.work.group!r} has no position in {name}, so there is nothing to reprocess"
            )
        if end > position_before:
            raise ConfigurationError(
                f"group {self.work.group!r} is at {position_before} in {name} and has not processed all offsets up to "
                f"{end}. To process everything from {start} on, use `marshal-dagster position reset`"
            )
        self._require_fit()
        return ReprocessPlan(back, end, position_before, back.notes)

    def look_at_window(self, window: TimeWindow, partitions: Sequence[range] | None = None) -> WindowPlans:
        """Return the plans to reprocess the messages of a window of time; nothing is written.

        Messages of the window that the group has not processed yet are not in a plan: the group processes them anyway.

        Raises `ConfigurationError` if the end of the window cannot be found, because a message with a timestamp in the
        future hides it; otherwise as `look`.
        """
        backs = self.work.look(ToDatetime(window.start_ms), partitions, is_set_later=False)
        topics, topic = self.work.topics, self.work.topic
        ends = topics.offsets_at(topic, [back.partition for back in backs], window.end_ms)
        hidden = hidden_by_future(topics, topic, ends)
        plans, left_out = [], {}
        for back in backs:
            found = self._plan_of(back, ends.get(back.partition, back.extent.end), hidden.get(back.partition))
            if isinstance(found, ReprocessPlan):
                plans.append(found)
            else:
                left_out[back.partition] = found
        if plans:
            self._require_fit()
        return WindowPlans(plans, left_out)

    def _plan_of(self, back: PositionChange, end: int, hidden_at: int | None) -> ReprocessPlan | str:
        """Return the plan of one partition for a window that ends at `end`, or why there is nothing to reprocess.

        `hidden_at` is the offset of a message with a timestamp in the future that hides the end.
        """
        name, position, start = f"{self.work.topic}/{back.partition}", back.key.offset, back.offset
        if back.is_other:
            raise ConfigurationError(
                f"group {self.work.group!r} has no position in {name}, because the topic was deleted and re-created: "
                "leave that partition out"
            )
        if position is None:
            return _NO_MESSAGE if start >= end else "the group has no position"
        if hidden_at is not None and hidden_at < position:
            raise ConfigurationError(
                f"{name}: the message at offset {hidden_at} has a timestamp in the future, so the end of the window "
                "cannot be found by time. Give the offsets of that partition instead"
            )
        if start >= end:
            return _NO_MESSAGE
        if start >= position:
            return "not processed yet"
        notes = [*back.notes]
        if start == back.extent.start > 0:
            notes.append("earlier messages may have been deleted")
        if end > position:
            notes.append(f"the group has not processed the messages from {position} on")
        return ReprocessPlan(back, min(end, position), position, notes)

    def carry_out(
        self,
        plans: Sequence[ReprocessPlan],
        *,
        wait_s: float,
        within_s: float,
        is_dead: Callable[[Owner], bool] = assume_alive,
        report: Callable[[str], None] = lambda _: None,
    ) -> ReprocessResult:
        """Set positions back, wait until the members have reprocessed the ranges, and restore the positions.

        For each change the group is paused, and its members have `wait_s` to release the partitions. Each position is
        restored when its range is done. After `within_s`, or if the wait fails, all are restored. `report` is called
        with one line for each step.

        Raises `PositionNotSetError` if members do not leave, or if another process sets a position meanwhile;
        `DataTopicChangedError`, `UnavailableError`, `CoordinationLogChangedError`.
        """
        waiting = _Waiting(wait_s, is_dead)
        pending = self._set_back(plans, waiting, report)
        results: dict[int, PartitionResult] = {}
        problems: list[str] = []

        def restore(works: Sequence[_PartitionWork]) -> None:
            for work in works:
                del pending[work.plan.partition]
            restored, problem = self._restore(works, waiting, report)
            results.update((result.partition, result) for result in restored)
            problems.extend([] if problem is None else [problem])

        try:
            self._await(pending, within_s, restore)
        finally:
            if pending:
                restore(list(pending.values()))
        ordered = [results[plan.partition] for plan in plans]
        return ReprocessResult(ordered, problems[0] if problems else None)

    def _set_back(
        self, plans: Sequence[ReprocessPlan], waiting: _Waiting, report: Callable[[str], None]
    ) -> dict[int, _PartitionWork]:
        topic = self.work.topic
        with self._at_rest(plans, waiting):
            generations = {plan.partition: plan.back.key.generation for plan in plans}
            before = self._reached(generations)
            with _failure_with_positions(report, topic, before):
                self.work.carry_out([plan.back for plan in plans], wait_s=waiting.wait_s, is_dead=waiting.is_dead)
                keys = self.work.keys(generations)
        for plan in plans:
            report(
                f"{topic}/{plan.partition}: the group reprocesses from {plan.back.offset} on; its position before was "
                f"{before[plan.partition]}"
            )
        return {
            plan.partition: _PartitionWork(plan, keys[plan.partition].generation, before[plan.partition])
            for plan in plans
        }

    def _require_fit(self) -> None:
        settings, group = self.work.settings_in_force(), self.work.group
        if settings.delivery is DeliveryMode.AT_MOST_ONCE:
            raise ConfigurationError(
                f"group {group!r} delivers at most once: if reprocessing were interrupted, more would be processed "
                "twice than you requested. Use `marshal-dagster position reset` if you accept that"
            )
        if settings.rule_set is RuleSet.GO:
            raise ConfigurationError(
                f"Go consumers share group {group!r}, or may share it because it has no settings. Their heartbeats "
                "move positions, so a range cannot be reprocessed: use `marshal-dagster position reset` if you accept "
                "that"
            )
        if RANGES in settings.features:
            raise ConfigurationError(
                f"members of group {group!r} claim ranges after the offset, so a range cannot be reprocessed. Use "
                "`marshal-dagster position reset`"
            )
        pausing = GroupPauser(self.work.reader, group, self.work.client, self.work.clock)
        pausing.look()
        if pausing.is_in_force:
            raise ConfigurationError(
                f"group {group!r} is paused, so no member would reprocess the range: resume it first"
            )

    @contextmanager
    def _at_rest(self, plans: Sequence[ReprocessPlan], waiting: _Waiting) -> Iterator[None]:
        """Pause the group and wait until the partitions are free while the block runs; other pauses stay in force."""
        clock = self.work.clock
        deadline_ms = clock.lease_ms() + waiting.wait_s * 1_000
        with closing(self.work.open_log(self.work.settings_in_force().heartbeat_interval_ms)) as rationalizer:
            pausing = GroupPauser(rationalizer, self.work.group, self.work.client, clock)
            pausing.look()
            ours_s = None if pausing.is_in_force else pausing.end_after(round(waiting.wait_s) + LONGEST_SETTING_S)
            if ours_s is not None:
                pausing.pause(ours_s)
            try:
                while held := self._held(plans, waiting.is_dead):
                    if clock.lease_ms() >= deadline_ms:
                        partition, instance = held
                        raise PositionNotSetError(
                            f"{self.work.topic}/{partition} of group {self.work.group!r} is still claimed by "
                            f"{instance} after the wait: give it more time, or stop its run"
                        )
                    clock.sleep_ms(_LOOK_MS)
                yield
            finally:
                pausing.look()
                # Setting a position restores the pause as another instance, so this pause is recognized by its end.
                if ours_s is not None and pausing.ends_s == ours_s:
                    pausing.resume()

    def _held(self, plans: Sequence[ReprocessPlan], is_dead: Callable[[Owner], bool]) -> tuple[int, str] | None:
        """Return a partition that is held, with the instance that holds it; None if all are free."""
        keys, reader = self.work.keys([plan.partition for plan in plans]), self.work.reader
        with reader.lock:
            group = reader.world.group_of(self.work.group, self.work.topic)
            now_ms = reader.world.advice_time_ms(self.work.group, self.work.topic, self.work.clock.wall_ms())
            live = {partition: key.owner for partition, key in keys.items() if group.is_live(key, now_ms)}
        held = ((partition, owner.instance) for partition, owner in live.items() if owner and not is_dead(owner))
        return next(held, None)

    def _await(
        self,
        pending: Mapping[int, _PartitionWork],
        within_s: float,
        restore: Callable[[Sequence[_PartitionWork]], None],
    ) -> None:
        """Restore each partition whose range is done, until none is left, for at most `within_s`."""
        clock = self.work.clock
        deadline_ms = clock.lease_ms() + within_s * 1_000
        while pending and clock.lease_ms() < deadline_ms:
            clock.sleep_ms(_LOOK_MS)
            done: Sequence[_PartitionWork] = ()
            with suppress(UnavailableError):  # it may be temporary; the wait is bounded
                reached = self._reached({number: work.generation for number, work in pending.items()})
                done = [work for number, work in pending.items() if reached[number] >= work.plan.end]
            if done:
                restore(done)

    def _restore(
        self, works: Sequence[_PartitionWork], waiting: _Waiting, report: Callable[[str], None]
    ) -> tuple[list[PartitionResult], str | None]:
        """Restore positions, except those that the members have reached by now.

        Returns the results, and why a position could not be committed to Kafka. Raises `PositionNotSetError` if another
        process has set the position of one, after the others are restored.
        """
        topic, problem = self.work.topic, None
        with _failure_with_positions(report, topic, {work.plan.partition: work.position_before for work in works}):
            ours = self._ours(works, self.work.keys([work.plan.partition for work in works]))
            results = []
            if ours:
                with self._at_rest([work.plan for work in ours], waiting):
                    keys = self.work.keys([work.plan.partition for work in ours])
                    ours = self._ours(ours, keys)
                    results = [_result(work, keys[work.plan.partition]) for work in ours]
                    forward = [
                        replace(work.plan.back, key=keys[work.plan.partition], offset=work.position_before)
                        for work, result in zip(ours, results, strict=True)
                        if result.reached < work.position_before
                    ]
                    if forward:
                        problem = self.work.carry_out(forward, wait_s=waiting.wait_s, is_dead=waiting.is_dead)
            for result in results:
                report(f"{topic}/{result.partition}: the group continues at {result.resume_offset}")
            others = sorted({work.plan.partition for work in works} - {result.partition for result in results})
            if others:
                raise self._set_by_another(others[0])
        return results, problem

    def _ours(self, works: Sequence[_PartitionWork], keys: Mapping[int, Key]) -> list[_PartitionWork]:
        """Return the partitions whose position no other process has set."""
        return [
            work
            for work in works
            if (key := keys[work.plan.partition]).offset is not None and key.generation == work.generation
        ]

    def _reached(self, generations: Mapping[int, int]) -> dict[int, int]:
        """Return the present positions. Raises `PositionNotSetError` if another process has set one since."""
        reached = {}
        for partition, key in self.work.keys(generations).items():
            if key.offset is None or key.generation != generations[partition]:
                raise self._set_by_another(partition)
            reached[partition] = key.offset
        return reached

    def _set_by_another(self, partition: int) -> PositionNotSetError:
        return PositionNotSetError(
            f"another process has set the position of {self.work.topic}/{partition} meanwhile. It was not changed; "
            f"check group {self.work.group!r} with `marshal-dagster status`"
        )


def _result(work: _PartitionWork, key: Key) -> PartitionResult:
    reached = work.position_before if key.offset is None else key.offset
    return PartitionResult(work.plan.partition, work.plan.end, reached, max(reached, work.position_before))


@contextmanager
def _failure_with_positions(
    report: Callable[[str], None], topic: str, positions_before: Mapping[int, int]
) -> Iterator[None]:
    """If the block fails, report what the group may do: it is unknown whether the positions were set."""
    try:
        yield
    except BaseException:
        for partition, position in positions_before.items():
            report(
                f"{topic}/{partition}: if the group's position is before {position}, it processes all offsets up to "
                "there again"
            )
        raise
