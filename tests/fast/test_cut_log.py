"""Cut or re-create a coordination log, or let it lose records, at each moment of each step.

See protocol.md, sections 5 and 6.

In each case only the library's errors are raised. A member holds no claim and reports no result if the log was replaced
or can only be observed.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import pytest

from marshal_dagster.admin.settings_change import SettingsChanger
from marshal_dagster.coordination.claimer import Claimer
from marshal_dagster.coordination.log import Ack, Append, Chunk, PositionLostError
from marshal_dagster.coordination.range_claimer import RangeClaimer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import MarshalError, UnavailableError
from marshal_dagster.protocol.messages import DeliveryMode, GroupSettings, Mark, RuleSet, render
from marshal_dagster.protocol.state import OffsetBounds
from marshal_dagster.testing import MemoryBroker, MemoryLog, MemorySnapshotTopic
from tests.faulty_log import FaultyLog
from tests.members import GROUP, HI_MS, OTHER_TOPIC_ID, RANGES, SETTINGS, TOPIC, TOPIC_ID, Site

MOST_MOMENTS = 400
MARK = render(Mark(instance="m.0", client="m", group="m", time_s=0))
AT_MOST_ONCE = GroupSettings(HI_MS, delivery=DeliveryMode.AT_MOST_ONCE)
RANGES_AT_MOST_ONCE = GroupSettings(HI_MS, delivery=DeliveryMode.AT_MOST_ONCE, features=("ranges",))
GO = GroupSettings(60_000, RuleSet.GO)

Cut = Callable[[Site], None]
Member = Claimer | RangeClaimer | SettingsChanger


class MomentLog(MemoryLog):
    """A log in which a cut happens at a chosen moment.

    The moments are: a query, before and after each append, and before each record that is read.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self._cut: Callable[[], None] | None = None
        self._moments_left = 0
        self.has_reported = False
        """Whether it acknowledged an offset that a reader had already passed, so it must have lost that record."""

    def cut_at(self, moment: int, cut: Callable[[], None]) -> None:
        """Let `cut` happen after this number of further moments."""
        self._moments_left, self._cut = moment, cut

    @property
    def is_cut(self) -> bool:
        """Whether the cut has happened."""
        return self._cut is None

    def bounds(self, partitions: Collection[int]) -> Mapping[int, OffsetBounds]:
        """Return the bounds."""
        self._pass_a_moment()
        return super().bounds(partitions)

    def read_until(self, ends: Mapping[int, int], timeout_s: float) -> Iterator[Chunk]:  # noqa: ARG002 - never waits
        """Yield one record at a time."""
        self.identity()
        for partition, end in ends.items():
            while self._positions[partition] < end:
                self._pass_a_moment()
                position, bounds = self._positions[partition], self.broker.bounds(partition)
                if not bounds.start <= position <= bounds.end:
                    raise PositionLostError(partition)
                if position == bounds.end:
                    raise UnavailableError(f"it ends at {position}")
                self._positions[partition] = position + 1
                yield Chunk(partition, self.broker.records(partition, position, position + 1), position + 1)

    def _append(self, record: Append) -> Ack:
        self._pass_a_moment()
        ack = super()._append(record)
        if ack.offset is not None and ack.offset < self._positions.get(record.partition, 0):
            self.has_reported = True
        self._pass_a_moment()
        return ack

    def _pass_a_moment(self) -> None:
        self._moments_left -= 1
        if self._cut is not None and self._moments_left < 0:
            cut, self._cut = self._cut, None
            cut()


def marks(site: Site, records: int) -> None:
    """Append records without meaning."""
    for _ in range(records):
        site.broker.append(site.home, MARK)


def lose(newest: int, then: int = 0) -> Cut:
    """Return a cut that loses the newest records and then appends others at their offsets."""

    def cut(site: Site) -> None:
        site.broker.truncate(site.home, max(0, site.broker.bounds(site.home).end - newest))
        marks(site, then)

    return cut


def keep(newest: int) -> Cut:
    """Return a cut in which retention deletes all but the newest records."""
    return lambda site: site.broker.retain_from(site.home, max(0, site.broker.bounds(site.home).end - newest))


def overtake(site: Site) -> None:
    """Let retention overtake every reader, and append more records."""
    site.overtake()
    marks(site, 3)


def overtake_everywhere(site: Site) -> None:
    """Let retention overtake every reader in all coordination partitions."""
    for partition in range(site.partitions):
        site.broker.append(partition, MARK)
        site.broker.retain_from(partition, site.broker.bounds(partition).end)


CUTS: dict[str, Cut] = {
    "1 lost": lose(1),
    "1 lost, 1 in its place": lose(1, then=1),
    "1 lost, 2 in its place": lose(1, then=2),
    "3 lost, 1 in their place": lose(3, then=1),
    "2 lost, 9 in their place": lose(2, then=9),
    "all lost": lose(99),
    "all deleted": keep(0),
    "all but 1 deleted": keep(1),
    "overtaken": Site.overtake,
    "overtaken, then appended to": overtake,
    "overtaken everywhere": overtake_everywhere,
    "re-created": lambda site: site.broker.recreate(),
    "gone": lambda site: site.broker.delete(),
}

QUICK_CUTS = ("1 lost, 1 in its place", "overtaken", "re-created")
"""Those that are part of `make test-fast`; all others are slow."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation, `do`, of a member that `open_one` prepares, under `settings`."""

    open_one: Callable[[Site, MomentLog, "Step"], Member]
    do: Callable[..., object]
    settings: GroupSettings = SETTINGS
    plans: Mapping[int, int] = field(default_factory=dict)


def owner(site: Site, log: MomentLog, step: Step) -> Claimer:
    """Return a member that owns partitions 0 and 1; another member owns 5."""
    site.owner_of(5, settings=step.settings)
    member = site.owner_of(0, 1, settings=step.settings, log=FaultyLog(log))
    if step.plans:
        member.plan(step.plans)
    return member


def holder(site: Site, log: MomentLog, step: Step) -> RangeClaimer:
    """Return a member that holds ranges of partitions 0 and 1."""
    site.begin(0, 1, 2, settings=step.settings)
    member = site.range_claimer(log=FaultyLog(log), settings=step.settings)
    assert len(member.claim({0: (0, 5), 1: (0, 5)})) == 2
    if step.plans:
        member.plan(step.plans)
    return member


def pausing_owner(site: Site, log: MomentLog, step: Step) -> Claimer:
    """Return a member that has paused the group and then claimed partitions 0, 1 and 4."""
    site.owner_of(0, 1, settings=step.settings).release()
    member = site.member(log=FaultyLog(log), settings=step.settings)
    site.pause(5_000, member.member.instance)
    member.rationalizer.catch_up()
    assert len(member.claim([0, 1, 4])) == 3
    return member


def operator(site: Site, log: MomentLog, step: Step) -> SettingsChanger:
    """Return an operator of a group without active members."""
    site.owner_of(0, 1, settings=step.settings).release()
    if step.settings is RANGES:
        site.holder_of({0: (0, 5), 1: (0, 5)}, plans=True).release([1])
    return SettingsChanger(site.reader(log), GROUP, "ops", clock=site.clock)


ENDS = {0: 5, 1: 5}
STEPS = {
    "claim": Step(owner, lambda member: member.claim([2, 3])),
    "claim the entire topic": Step(owner, lambda member: member.claim_entire_topic([0, 1, 2, 3])),
    "beat": Step(owner, lambda member: member.beat()),
    "beat beside Go consumers": Step(owner, lambda member: member.beat(), settings=GO),
    "plan": Step(owner, lambda member: member.plan(ENDS)),
    "commit": Step(owner, lambda member: member.commit(ENDS), plans=ENDS),
    "commit first": Step(owner, lambda member: member.commit_before_processing(ENDS), AT_MOST_ONCE, ENDS),
    "give up one": Step(owner, lambda member: member.release([0])),
    "give up": Step(owner, lambda member: member.release()),
    "revoke": Step(owner, lambda member: member.revoke([(5, 1)])),
    "agree on settings": Step(owner, lambda member: member.ensure_group_settings()),
    "set positions": Step(pausing_owner, lambda member: member.set_positions({0: 9, 1: 9, 4: 9}, OTHER_TOPIC_ID)),
    "confirm positions": Step(pausing_owner, lambda member: member.confirm_positions()),
    "name the data topic": Step(pausing_owner, lambda member: member.name_data_topic(TOPIC_ID)),
    "claim a range": Step(holder, lambda member: member.claim({2: (0, 5)}), RANGES),
    "beat for ranges": Step(holder, lambda member: member.beat(), RANGES),
    "plan ranges": Step(holder, lambda member: member.plan({0: 4, 1: 5}), RANGES),
    "end ranges": Step(holder, lambda member: member.commit(ENDS), RANGES, ENDS),
    "end ranges first": Step(holder, lambda member: member.commit_before_processing(ENDS), RANGES_AT_MOST_ONCE, ENDS),
    "give up one range": Step(holder, lambda member: member.release([0]), RANGES),
    "give up ranges": Step(holder, lambda member: member.release(), RANGES),
    "revoke a range": Step(holder, lambda member: member.revoke([(2, 1)]), RANGES),
    "pause": Step(operator, lambda ops: ops.pause(1_700_009_000)),
    "resume": Step(operator, lambda ops: ops.resume()),
    "set positions of a group": Step(operator, lambda ops: ops.set_positions(TOPIC, {0: 9, 1: 3}, TOPIC_ID, wait_ms=0)),
    "set positions over ranges": Step(
        operator, lambda ops: ops.set_positions(TOPIC, {0: 9, 1: 3}, TOPIC_ID, wait_ms=0), RANGES
    ),
    "switch ranges off": Step(operator, lambda ops: ops.switch_ranges_off(wait_ms=60_000), RANGES),
}


def from_the_start(_: GroupSettings) -> Site:
    """Return a site with an empty log."""
    return Site()


def from_a_snapshot(settings: GroupSettings) -> Site:
    """Return a log of which retention has left 10 of some 30 records, with a snapshot from which readers start."""
    site = Site(snapshot_topic=MemorySnapshotTopic())
    assert site.snapshot_topic is not None
    site.begin(0, 1, 2, 3, 5, settings=settings)
    marks(site, 20)
    Snapshots(site.snapshot_topic).write(site.world().partitions[site.home], site.broker.identity)
    keep(10)(site)
    return site


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=[] if cut in QUICK_CUTS else pytest.mark.slow) for cut in CUTS]
)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("begin", [from_the_start, pytest.param(from_a_snapshot, marks=pytest.mark.thorough)])
def test_a_log_that_is_cut_at_any_moment_of_a_step(
    step: str, cut: str, begin: Callable[[GroupSettings], Site], caplog: pytest.LogCaptureFixture
) -> None:
    """The step succeeds or raises the library's error; an uncertain result is neither held nor reported."""
    caplog.set_level(logging.CRITICAL)
    for moment in count():
        if not cut_at(moment, begin(STEPS[step].settings), STEPS[step], CUTS[cut]):
            break
    assert 0 < moment < MOST_MOMENTS


def cut_at(moment: int, site: Site, step: Step, cut: Cut) -> bool:
    """Carry out `step` with `cut` at one of its moments and check the result; return false if it has fewer moments."""
    log = MomentLog(site.broker)
    member = step.open_one(site, log, step)
    log.cut_at(moment, lambda: cut(site))
    reported, is_done = None, False
    with suppress(MarshalError):
        reported = step.do(member)
        is_done = True
    if not log.is_cut:
        return False
    if isinstance(member, SettingsChanger):
        assert not (is_done and log.has_reported), moment
        return True
    reader = member.rationalizer
    if log.has_reported or reader.changed is not None or not reader.world.partition_of(TOPIC).certain:
        assert not member.claims, moment
        assert not reported, moment
    return True
