"""Turn the records of a coordination log into a timeline. Nothing here reads a clock or draws.

The world state decides when a claim begins and ends: after each accepted record, the owners of its key are compared
with the bars that are open. A heartbeat only extends the bar of its owner.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Final, NamedTuple

from marshal_dagster.admin.record_sentences import JudgedRecord, StateBefore, judge, sentence
from marshal_dagster.admin.texts import utc
from marshal_dagster.protocol.messages import (
    GROUP_MESSAGES,
    ClaimingMessages,
    ClaimingPartition,
    ClaimingRange,
    DataTopic,
    GroupSettingsRecord,
    Heartbeat,
    InvalidMessage,
    Message,
    PlanningRange,
    RangeDone,
    RangeHeartbeat,
    ReleaseGroup,
    ReleasingPartition,
    ReleasingRange,
    RevokingClaim,
    RevokingRange,
    coordination_partition,
    parse,
)
from marshal_dagster.protocol.messages import (
    Mark as MarkRecord,
)
from marshal_dagster.protocol.replay import StoredRecord
from marshal_dagster.protocol.staleness import stale_after_ms
from marshal_dagster.protocol.state import Group, Key, Owner
from marshal_dagster.protocol.world import PartitionWorld, Verdict, VerdictKind, World
from marshal_dagster.timeline.model import Bar, BarEnd, Lane, Mark, MarkKind, Pause, Span, Timeline

_ENDS: Final[dict[type[Message], BarEnd]] = {
    ReleasingPartition: BarEnd.RELEASED,
    ReleasingRange: BarEnd.RELEASED,
    RangeDone: BarEnd.DONE,
    RevokingClaim: BarEnd.REVOKED,
    RevokingRange: BarEnd.REVOKED,
    ClaimingPartition: BarEnd.TAKEN_OVER,
    ClaimingRange: BarEnd.TAKEN_OVER,
    Heartbeat: BarEnd.DISPLACED,
    GroupSettingsRecord: BarEnd.SETTINGS,
}
_PLANS: Final = frozenset({ClaimingMessages, PlanningRange})
_CLAIMS: Final = frozenset({ClaimingPartition, ClaimingRange})
_BEATS: Final = (Heartbeat, RangeHeartbeat)
_REVOCATIONS: Final = frozenset({RevokingClaim, RevokingRange})
_MINUTE_MS: Final = 60_000
_LEAST_GAP_MS: Final = 60 * _MINUTE_MS
_MOST_OF_PICTURE: Final = 0.9
_LOST: Final = frozenset({BarEnd.REVOKED, BarEnd.TAKEN_OVER, BarEnd.DISPLACED})
"""The ends of claims whose work another claim continues."""
_SAME_ORDER_MS: Final = 60_000
"""A pause or settings are written to each coordination partition; within this time they are one event."""


class Wanted(NamedTuple):
    """What a timeline is limited to. None means no limit."""

    group: str | None = None
    topic: str | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    """The end of the picture. Without it the picture ends with the last record."""


class _Drawn(NamedTuple):
    """A valid record with its state before, and the record's message."""

    judged: JudgedRecord
    before: StateBefore
    message: Message
    verdict: Verdict

    @property
    def kind(self) -> type[Message]:
        """The type of the record."""
        return type(self.message)

    @property
    def offset(self) -> int:
        """The log offset of the record."""
        return self.judged.record.offset

    @property
    def at_ms(self) -> int:
        """The log time at the record."""
        return self.judged.log_time_ms

    @property
    def lane(self) -> Lane:
        """The lane of the record."""
        if self.kind in GROUP_MESSAGES:
            return Lane(self.message.group)
        return Lane(self.message.group, self.message.topic, self.message.partition)


@dataclass(slots=True)
class _OpenBar:
    """A claim that is held, and the time up to which its staleness is known."""

    bar: Bar
    checked_ms: int

    def check(self, at_ms: int, heartbeat_interval_ms: int) -> None:
        """Add the time up to `at_ms` in which the owner was stale."""
        stale_ms = max(self.checked_ms, self.bar.last_beat_ms + stale_after_ms(heartbeat_interval_ms))
        stale = self.bar.stale
        if stale_ms < at_ms:
            if stale and stale[-1].end_ms == stale_ms:
                stale_ms = stale.pop().start_ms
            stale.append(Span(stale_ms, at_ms))
        self.checked_ms = max(self.checked_ms, at_ms)


_Order = tuple[object, ...]
"""The content of a pause or settings, which is the same in each coordination partition."""


class _Copies(NamedTuple):
    """An order: the time of its first record, and the coordination partitions that have it."""

    at_ms: int
    partitions: set[int]


class TimelineBuilder:
    """Builds a timeline from the records of a log, which are added in the order of each coordination partition.

    Example:
        ```python
        builder = TimelineBuilder(World(8))
        for record in parse_lines(file):
            builder.add(record)
        timeline = builder.build()
        ```
    """

    def __init__(self, world: World, wanted: Wanted | None = None) -> None:
        """Start without records.

        Args:
            world: An empty world state, which the builder applies the records to.
            wanted: What the timeline is limited to; by default it shows everything.
        """
        self.world = world
        self._wanted = wanted or Wanted()
        self._name = None if self._wanted.group is None else f"/{self._wanted.group}/".encode()
        self._bars: list[Bar] = []
        self._open: defaultdict[Lane, dict[Owner, _OpenBar]] = defaultdict(dict)
        self._lost: defaultdict[Lane, list[Bar]] = defaultdict(list)
        self._marks: list[Mark] = []
        self._pauses: defaultdict[tuple[str, int], list[Span]] = defaultdict(list)
        self._orders: defaultdict[_Order, list[_Copies]] = defaultdict(list)
        self._last_orders: dict[tuple[type[Message], str, int], _Order] = {}
        self._records = 0
        self._first_ms: int | None = None
        self._last_ms: int | None = None
        self._minutes: set[int] = set()
        self._notes: list[str] = []

    def start(self, partition: int, offset: int) -> PartitionWorld:
        """Start a coordination partition at a log offset. One that is not started begins at its first record."""
        world = self.world.start(partition, offset)
        if not world.certain:
            self._notes.append(
                f"The log of coordination partition {partition} begins at offset {offset}. The records before it are "
                "not known, so claims are drawn as their senders announced them, and no record of it is refused."
            )
        return world

    def add(self, record: StoredRecord) -> None:
        """Apply one record, and draw what it changes."""
        world = self.world.partitions.get(record.partition) or self.start(record.partition, record.offset)
        if not self._may_show(record.value):
            world.apply(record.offset, record.timestamp_ms, record.value)
            self._count(world.log_time_ms or 0)
            return
        judged = judge(world, record)
        self._count(judged.log_time_ms)
        verdict, before, message = judged.verdict, judged.before, parse(record.value)
        if verdict is None or before is None or verdict.kind is VerdictKind.INVALID:
            return
        if not isinstance(message, InvalidMessage | MarkRecord) and self._is_wanted(message):
            self._draw(world, _Drawn(judged, before, message, verdict))

    def _count(self, at_ms: int) -> None:
        self._records += 1
        self._minutes.add(at_ms // _MINUTE_MS)
        self._first_ms = at_ms if self._first_ms is None else min(self._first_ms, at_ms)
        self._last_ms = at_ms if self._last_ms is None else max(self._last_ms, at_ms)

    def _may_show(self, value: bytes | None) -> bool:
        """Return false for most records of other groups. It is faster than to parse them."""
        return self._name is None or (value is not None and self._name in value)

    def build(self) -> Timeline:
        """Return the timeline of the records so far. The builder is not used afterwards."""
        span = self._span()
        self._note_gap(span)
        for world in self.world.partitions.values():
            for name, group in world.groups.items():
                for place in group.keys:
                    self._check_staleness(Lane(name, *place), group.settings.heartbeat_interval_ms, span.end_ms)
        bars = sorted((bar for bar in self._bars if _is_within(bar, span)), key=lambda bar: bar.start_ms)
        marks = sorted((mark for mark in self._marks if _has(span, mark.at_ms)), key=lambda mark: mark.at_ms)
        lanes = sorted({bar.lane for bar in bars} | {mark.lane for mark in marks})
        return Timeline(
            span=span,
            lanes=lanes,
            bars=bars,
            marks=marks,
            pauses=list(self._drawn_pauses(lanes, span)),
            rows=_place_in_rows(bars, span.end_ms),
            records=self._records,
            invalid=sum(world.invalid.total() for world in self.world.partitions.values()),
            notes=self._notes,
        )

    def _is_wanted(self, message: Message) -> bool:
        wanted = self._wanted
        if wanted.group not in {None, message.group}:
            return False
        return wanted.topic is None or not message.topic or message.topic == wanted.topic

    def _draw(self, world: PartitionWorld, drawn: _Drawn) -> None:
        is_of_group = drawn.kind in GROUP_MESSAGES
        if drawn.verdict.kind is VerdictKind.REFUSED:
            if not is_of_group or self._is_new_order(drawn):
                self._mark(MarkKind.REFUSAL, drawn)
            return
        group = world.groups[drawn.message.group]
        if is_of_group:
            self._draw_group(world, group, drawn)
            return
        key = group.keys[drawn.message.topic, drawn.message.partition]
        is_takeover = self._match(drawn.lane, key, drawn)
        kind = _mark_kind(drawn, key, is_takeover=is_takeover)
        if kind is not None:
            self._mark(kind, drawn)

    def _draw_group(self, world: PartitionWorld, group: Group, drawn: _Drawn) -> None:
        message = drawn.message
        if isinstance(message, ReleaseGroup):
            self._pause(world, drawn.at_ms, message)
        else:
            for place, key in group.keys.items():
                if self._wanted.topic in {None, place[0]}:
                    self._match(Lane(message.group, *place), key, drawn)
        if self._is_new_order(drawn):
            self._mark(MarkKind.PAUSE if isinstance(message, ReleaseGroup) else MarkKind.SETTINGS, drawn)

    def _match(self, lane: Lane, key: Key, drawn: _Drawn) -> bool:
        """Compare the owners of a key with the open bars. Return whether a claim ended another one."""
        at_ms, kind = drawn.at_ms, drawn.kind
        self._check_staleness(lane, drawn.before.heartbeat_interval_ms, at_ms)
        opened, held = self._open[lane], dict(_holders(key))
        ended = [owner for owner in opened if owner not in held]
        for owner in ended:
            bar = opened.pop(owner).bar
            bar.end_ms, bar.end_offset, bar.ended_by = at_ms, drawn.offset, _ENDS.get(kind, BarEnd.TAKEN_OVER)
            if bar.ended_by in _LOST:
                self._lost[lane].append(bar)
        for owner, (beat_ms, start, end) in held.items():
            is_new = owner not in opened
            if not is_new:
                bar = opened[owner].bar
                bar.heartbeats += (
                    isinstance(drawn.message, _BEATS) and owner.instance == drawn.message.instance and beat_ms == at_ms
                )
            else:
                bar = Bar(lane, owner, at_ms, drawn.offset, beat_ms, sentence(drawn.judged))
                opened[owner] = _OpenBar(bar, at_ms)
                self._bars.append(bar)
            bar.last_beat_ms, bar.range_start, bar.range_end = beat_ms, start, end
            if is_new:
                self._set_heir(bar)
        return bool(ended) and kind in _CLAIMS

    def _set_heir(self, heir: Bar) -> None:
        """Set the heir of the lost claims that a new claim continues."""
        lost = self._lost[heir.lane]
        for bar in lost:
            if bar.overlaps(heir):
                bar.heir = heir
        lost[:] = [bar for bar in lost if bar.heir is None]

    def _check_staleness(self, lane: Lane, interval_ms: int, at_ms: int) -> None:
        for opened in self._open[lane].values():
            opened.check(at_ms, interval_ms)

    def _pause(self, world: PartitionWorld, at_ms: int, message: ReleaseGroup) -> None:
        """End the pause that was in force, and begin the new one, unless it resumes the group."""
        spans, until_ms = self._pauses[message.group, world.number], message.expiry_s * 1_000
        if spans and spans[-1].end_ms > at_ms:
            spans[-1] = Span(spans[-1].start_ms, at_ms)
        if until_ms > at_ms:
            spans.append(Span(at_ms, until_ms))

    def _is_new_order(self, drawn: _Drawn) -> bool:
        """Return whether the record is no copy of one in another coordination partition at about this time."""
        message, partition = drawn.message, drawn.judged.record.partition
        content = getattr(message, "expiry_s", None) or getattr(message, "settings", None)
        order = (drawn.kind, message.group, message.instance, content, drawn.verdict.kind)
        place = (drawn.kind, message.group, partition)
        is_sent_again = self._last_orders.get(place) == order
        self._last_orders[place] = order
        near = [
            copies
            for copies in self._orders[order]
            if abs(drawn.at_ms - copies.at_ms) <= _SAME_ORDER_MS
            and (is_sent_again or partition not in copies.partitions)
        ]
        if not near:
            self._orders[order].append(_Copies(drawn.at_ms, {partition}))
            return True
        min(near, key=lambda copies: abs(drawn.at_ms - copies.at_ms)).partitions.add(partition)
        return False

    def _mark(self, kind: MarkKind, drawn: _Drawn) -> None:
        if self._wanted.start_ms is None or drawn.at_ms >= self._wanted.start_ms:
            mark = Mark(kind, drawn.lane, drawn.at_ms, drawn.message.instance, sentence(drawn.judged))
            self._marks.append(mark)

    def _span(self) -> Span:
        first_ms, last_ms = self._first_ms or 0, self._last_ms or 0
        start_ms = first_ms if self._wanted.start_ms is None else self._wanted.start_ms
        end_ms = last_ms if self._wanted.end_ms is None else self._wanted.end_ms
        return Span(start_ms, max(start_ms, end_ms))

    def _note_gap(self, span: Span) -> None:
        """Note the longest time without a record if it fills nearly the whole picture."""
        ordered = sorted(self._minutes)
        gaps = [Span((a + 1) * _MINUTE_MS, b * _MINUTE_MS) for a, b in pairwise(ordered)]
        seen = [Span(max(gap.start_ms, span.start_ms), min(gap.end_ms, span.end_ms)) for gap in gaps]
        start_ms, end_ms = max(seen, key=lambda gap: gap.end_ms - gap.start_ms, default=Span(0, 0))
        if end_ms - start_ms > max(_LEAST_GAP_MS, _MOST_OF_PICTURE * (span.end_ms - span.start_ms)):
            self._notes.append(
                f"No record was written from {utc(start_ms)} to {utc(end_ms)}, which is most of the picture. Choose "
                "--until before it or --since after it."
            )

    def _drawn_pauses(self, lanes: Iterable[Lane], span: Span) -> Iterator[Pause]:
        """Yield the pauses of each topic, and for each group's own lane those of all coordination partitions."""
        for group, topic in sorted({(lane.group, lane.topic) for lane in lanes}):
            if topic:
                home = coordination_partition(topic, self.world.coordination_partitions)
                spans = self._pauses.get((group, home), [])
            else:
                spans = _union(
                    sorted(each for (name, _), all_ in self._pauses.items() if name == group for each in all_)
                )
            for each in spans:
                start_ms, end_ms = max(each.start_ms, span.start_ms), min(each.end_ms, span.end_ms)
                if start_ms < end_ms:
                    yield Pause(group, topic, Span(start_ms, end_ms))


def _holders(key: Key) -> Iterator[tuple[Owner, tuple[int, int | None, int | None]]]:
    """Yield the owner of the key, and of each range, with its last heartbeat and the range."""
    if key.owner is not None:
        yield key.owner, (key.last_beat_ms, None, None)
    for held in key.ranges:
        if held.owner is not None:
            yield held.owner, (held.last_beat_ms, held.start, held.end)


def _mark_kind(drawn: _Drawn, key: Key, *, is_takeover: bool) -> MarkKind | None:
    """Return the kind of mark of an accepted record about a key; None if it has none, as most heartbeats."""
    kind, before = drawn.kind, drawn.before.key
    if kind in _PLANS:
        return MarkKind.PLAN
    if kind in _CLAIMS:
        return MarkKind.TAKEOVER if is_takeover or _continues_plan(drawn, key) else None
    if kind in _REVOCATIONS:
        return MarkKind.REVOCATION
    if kind is RangeDone:
        return MarkKind.COMMIT
    if key.generation != before.generation:
        return MarkKind.POSITION
    if key.offset == before.offset or kind is DataTopic:
        return None
    return MarkKind.POSITION if before.offset is None else MarkKind.COMMIT


def _continues_plan(drawn: _Drawn, key: Key) -> bool:
    """Return whether a claim took over an open plan, of the key or of a range."""
    if key.plan_attempts > drawn.before.key.plan_attempts:
        return True
    return any(held.attempts and held.owner is not None and held.owner.epoch == drawn.offset for held in key.ranges)


def _has(span: Span, at_ms: int) -> bool:
    return span.start_ms <= at_ms <= span.end_ms


def _is_within(bar: Bar, span: Span) -> bool:
    return bar.start_ms <= span.end_ms and (bar.end_ms is None or bar.end_ms >= span.start_ms)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Join sorted spans that overlap or touch."""
    joined: list[Span] = []
    for span in spans:
        if joined and span.start_ms <= joined[-1].end_ms:
            joined[-1] = Span(joined[-1].start_ms, max(joined[-1].end_ms, span.end_ms))
        else:
            joined.append(span)
    return joined


def _place_in_rows(bars: Iterable[Bar], end_ms: int) -> dict[Lane, int]:
    """Set each bar to the lowest free row of its lane, and return how many rows each lane with several has."""
    busy: defaultdict[Lane, list[tuple[int, int]]] = defaultdict(list)
    free: defaultdict[Lane, list[int]] = defaultdict(list)
    rows: dict[Lane, int] = {}
    for bar in bars:
        in_use = busy[bar.lane]
        while in_use and in_use[0][0] <= bar.start_ms:
            heappush(free[bar.lane], heappop(in_use)[1])
        if not free[bar.lane]:
            rows[bar.lane] = rows.get(bar.lane, 0) + 1
            heappush(free[bar.lane], rows[bar.lane] - 1)
        bar.row = heappop(free[bar.lane])
        heappush(in_use, (end_ms + 1 if bar.end_ms is None else bar.end_ms, bar.row))
    return {lane: count for lane, count in rows.items() if count > 1}
