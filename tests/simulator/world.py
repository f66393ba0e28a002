"""The run of one seed: the cluster, the members that start runs, their faults, and all checkers."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from marshal_dagster.batches import Advice, BatchRequest, BatchSession, ClaimedBatch, RangeOptions
from marshal_dagster.batches.batch import BatchEvent
from marshal_dagster.coordination import (
    claims as coordination_claims,
)
from marshal_dagster.coordination import (
    heartbeats,
    rationalizer,
    snapshot_writer,
    snapshots,
)
from marshal_dagster.coordination.claims import Claim, RangeClaim
from marshal_dagster.coordination.log import Append
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordination.snapshots import Snapshots
from marshal_dagster.errors import (
    GoGroupError,
    MarshalError,
    SchemaDriftError,
    SettingsMismatchError,
    TimestampTypeError,
)
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol import messages, world
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.leases import Lease
from marshal_dagster.protocol.messages import (
    DeliveryMode,
    GroupSettings,
    RuleSet,
    coordination_partition,
    settings_text,
)
from marshal_dagster.protocol.state import RANGES, Group, Owner, Range
from marshal_dagster.protocol.world import PartitionWorld
from marshal_dagster.runs.abandoned_work import abandoned_partitions
from marshal_dagster.runs.names import run_of
from marshal_dagster.testing import MemorySnapshotTopic
from tests import reference_reader
from tests.batch_fixtures import DataTopics
from tests.simulator import checkers
from tests.simulator.broker import EPOCH_MS, LONGEST_WAIT_MS, Cluster, SimulatedClock, SimulatedLog
from tests.simulator.checkers import (
    GO_DATED_BACK_S,
    GO_PATIENCE_MS,
    KNOWN_TO_GO,
    NOBODY,
    Belief,
    GroupState,
    KeyState,
    LogJudge,
    Place,
    RangeState,
    Seen,
    SnapshotJudge,
    ViolationError,
    check_attempts,
    check_beliefs,
    check_nothing_lost,
    check_nothing_twice,
    check_readers_agree,
    check_takes,
    ranges_of,
)
from tests.simulator.data import Attempt, Output, ProcessTopics, SimulatedSink
from tests.simulator.environment_faults import Nature
from tests.simulator.go_members import GoMember, keys_left_by_go, keys_of_former_members
from tests.simulator.scenario import (
    GO_CLIENT,
    GO_GROUP,
    GROUP,
    HI_MS,
    LOOK_LEAST_MS,
    LOOK_MOST_MS,
    TOPIC,
    Beginning,
    EventKind,
    Member,
    Scenario,
)
from tests.simulator.scheduler import Process, Scheduler, SimulatedRLock, SimulatedThreading
from tests.simulator.snapshots import SimulatedSnapshotTopic, SnapshotFault, render_in_parts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from marshal_dagster.kafka.admin_client import Topics

LOOKED_WAITS = 4
"""A look that ended before a heartbeat was sent took at most this many waits."""
STOP_WAITS = 6
"""A displaced member stops within a quarter of the heartbeat interval and this many waits."""
FORMER_TOPIC_ID = "before" * 3 + "AAAA"
MOST_ATTEMPTS = 1_000
"""A seed's faults may interrupt the same plan more often than five times."""
_CONNECTION = KafkaConnection(bootstrap_servers="127.0.0.1:1")
_THREADING = SimulatedThreading()


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a seed."""

    seed: int
    violations: tuple[ViolationError, ...]
    records: int
    steps: int
    befallen: Counter[str]
    log: tuple[tuple[int, int, int, str, str], ...] = ()
    """Coordination partition, offset, timestamp, value and verdict of each record."""

    @property
    def transcript(self) -> tuple[str, ...]:
        """Return the log, a line for each record."""
        return tuple(f"{p}/{o} at {t - EPOCH_MS} ms {verdict}: {value}" for p, o, t, value, verdict in self.log)


@dataclass(slots=True, eq=False)
class Run:
    """One Dagster run in a process of its own: the step that works batch after batch."""

    run_id: str
    number: int
    """The number of the member that started it."""
    process: Process
    clock: SimulatedClock
    settings: GroupSettings | None = None
    """Its configuration."""
    delivery: BatchSession | None = None
    batch: ClaimedBatch | None = None
    leases: list[Lease] = field(default_factory=list)
    """The leases that it held at the last check."""
    has_failed: bool = False
    """Whether it ended with an error."""


@dataclass(slots=True)
class Simulation:
    """One seed, from start to end."""

    scenario: Scenario
    scheduler: Scheduler = field(init=False)
    data: DataTopics = field(default_factory=DataTopics)
    output: Output = field(default_factory=Output)
    snapshot_topic: MemorySnapshotTopic = field(init=False)
    snapshot_judge: SnapshotJudge = field(init=False)
    snapshot_faults: dict[int, SnapshotFault] = field(init=False)
    snapshot_records: int = 0
    violations: list[ViolationError] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    over: set[str] = field(default_factory=set)
    """The runs that Dagster reports as over."""
    befallen: Counter[str] = field(default_factory=Counter)
    unsure_until_ms: float = 0.0
    """The time until which the broker's clock, after a jump ahead, may make live owners look stale."""
    hesitates: bool = False
    """Whether the next process that commits an output is stopped during the commit for a while."""
    is_cut: bool = False
    is_truncated: bool = False
    is_refused: bool = False
    """Whether an operator has to allow it before native members write anything."""
    has_intruder: bool = False
    """Whether a Go consumer has moved an offset in the native group."""
    go_members: list[GoMember] = field(default_factory=list)
    _clock_jumps: bool = field(init=False)
    """Whether the broker's clock is among the faults."""
    _has_doubles: bool = field(init=False)
    """Whether another process writes records with an owner's instance id."""
    doubled: frozenset[int] = field(init=False)
    """The members whose runs have the same instance ids as another's."""
    cluster: Cluster = field(init=False)
    judge: LogJudge = field(init=False)
    chance: random.Random = field(init=False)
    by_process: dict[Process, Run] = field(default_factory=dict)
    _busy_ms: dict[int, float] = field(default_factory=dict)
    """By a member's number: the last time at which it held something."""
    wanted: list[tuple[int, ...]] = field(default_factory=list)
    """The partitions that the sensor requested and that no run has taken yet."""

    def __post_init__(self) -> None:
        seed, coordination_partitions = self.scenario.seed, self.scenario.coordination_partitions
        self.scheduler = Scheduler(seed)
        self.scheduler.stops_end_ms = self.scenario.calm_ms
        self.chance = random.Random(seed * 7 + 1)
        self.cluster = Cluster(
            self.scheduler, coordination_partitions, self.hi_ms, dict(self.scenario.append_faults), seed * 7 + 2
        )
        self.cluster.failing_part = self.scenario.failing_part
        self.judge = LogJudge(coordination_partitions, self.fail)
        self.judge.now_ms = lambda: self.scheduler.now_ms
        self.cluster.faults_end_ms = self.scenario.calm_ms - self.hi_ms / 2
        self.cluster.appended = self._see_appended
        self.cluster.work_of = lambda process: self.by_process[process].batch if process in self.by_process else None
        self.cluster.left_queue = self._check_left_queue
        self.cluster.about_to_append = self._check_sending
        self.cluster.wall_of = self._wall_of
        kinds = {event.kind for event in self.scenario.events}
        self._clock_jumps = not kinds.isdisjoint({EventKind.CLOCK_BACK, EventKind.CLOCK_AHEAD, EventKind.SENDERS_TIME})
        self._has_doubles = EventKind.DOUBLE in kinds
        self.befallen += self.scenario.traits
        twins = {number for number, member in enumerate(self.scenario.members) if member.is_twin}
        self.doubled = frozenset({0, *twins} if twins else ())
        self.snapshot_topic = MemorySnapshotTopic(coordination_partitions)
        self.snapshot_judge = SnapshotJudge(self.fail)
        self.snapshot_faults = dict(self.scenario.snapshot_faults)
        self.data.make(TOPIC, self.scenario.data_partitions, self.scenario.messages)

    @property
    def hi_ms(self) -> int:
        """Return the group's heartbeat interval."""
        return self.scenario.hi_ms

    @property
    def home(self) -> int:
        """Return the coordination partition of the topic."""
        return coordination_partition(TOPIC, self.scenario.coordination_partitions)

    @property
    def partitions(self) -> range:
        """Return the coordination partitions."""
        return range(self.scenario.coordination_partitions)

    def run(self) -> Result:
        """Run the whole seed."""
        scheduler = self.scheduler
        with _instead_of_threads(scheduler, self.scenario.seed):
            self._begin()
            for number, member in enumerate(self.scenario.members):
                dagster = Process(scheduler, f"dagster{number}")
                dagster.spawn(lambda number=number, member=member: self._dagster(number, member))  # type: ignore[misc]
            self._let_go_members_in()
            Process(scheduler, "sensor").spawn(self._sensor)
            Process(scheduler, "producer").spawn(self._produce)
            nature = Nature(self)
            for event in self.scenario.events:
                mishap = Process(scheduler, event.kind.value)
                mishap.spawn(lambda event=event: nature.inject_fault(event))  # type: ignore[misc]
            scheduler.run(self.scenario.calm_ms)
            nature.end()
            self._run_until_drained(self.scenario.taken_up_ms)
            if not nature.has_paused_since(self.scenario.calm_ms):
                self._check_taken_up()
            self._run_to_the_end()
            self._check_end()
            scheduler.kill_all()
        for process, error in scheduler.failures:
            self.fail("nothing else goes wrong", f"{process.name}: {type(error).__name__}: {error}")
        return Result(
            self.scenario.seed,
            tuple(self.violations),
            len(self.judge.records),
            scheduler.steps,
            self.befallen + self.cluster.befallen,
            tuple(self.judge.records),
        )

    def _run_until_drained(self, until_ms: float) -> None:
        while self.scheduler.now_ms < until_ms and not self._is_drained() and not self.violations:
            self.scheduler.run(min(until_ms, self.scheduler.now_ms + self.hi_ms / 4))

    def _run_to_the_end(self) -> None:
        """Continue as long as offsets move, because a member with a slow connection needs a long time for the rest.

        Readers of a damaged log only observe, so no messages are processed.
        """
        if self.is_cut or self.is_truncated:
            return
        until_ms, before, left = self.scenario.calm_ms, inf, self._lag()
        while not self._is_drained() and left < before and not self.violations:
            until_ms += self.scenario.patience_ms
            self._run_until_drained(until_ms)
            before, left = left, self._lag()

    def _begin(self) -> None:
        """Write the records that are in the log before the members start."""
        beginning, chance = self.scenario.beginning, random.Random(self.scenario.seed * 7 + 9)
        if beginning is not Beginning.NOTHING:
            self.befallen[beginning] += 1
        if beginning is Beginning.GO_SETTINGS:
            self._write_settings(GROUP, self.settings(self.scenario.members[0]), self.partitions)
        elif beginning is Beginning.GO_KEYS:
            keys_left_by_go(self, chance, GROUP)
        elif beginning in {Beginning.BESIDE_GO, Beginning.BESIDE_BOTH}:
            keys_left_by_go(self, chance, GO_GROUP)
        elif beginning in {Beginning.FORMER_KEYS, Beginning.FORMER_PLAN, Beginning.FORMER_GO}:
            is_go, has_plans = beginning is Beginning.FORMER_GO, beginning is Beginning.FORMER_PLAN
            topic_id = FORMER_TOPIC_ID if is_go else self.data.describe(TOPIC).topic_id
            keys_of_former_members(self, chance, topic_id, has_plans=has_plans)
        if beginning is Beginning.FORMER_PLAN:  # an operator does not know that it is refused then
            self._write_settings(GROUP, self.settings(self.scenario.members[0]), [self.home])
        if beginning is Beginning.BESIDE_BOTH:
            self._write_settings("others", GroupSettings(), self.partitions)
        self.is_refused = beginning in {Beginning.GO_KEYS, Beginning.BESIDE_GO}

    def _write_settings(self, group: str, settings: GroupSettings, partitions: Iterable[int]) -> None:
        fields = f"1/1700000000/first.0/operator/{group}//0/{settings_text(settings)}"
        for partition in partitions:
            self.cluster.put(partition, f"GroupSettings/{fields}".encode())

    def _let_go_members_in(self) -> None:
        """Start Go members, in the group of the seed or in a separate one."""
        group = GROUP if self.scenario.rule_set is RuleSet.GO else GO_GROUP
        self.go_members = [GoMember(self, number, group) for number in range(self.scenario.go_members)]
        for number, member in enumerate(self.go_members):
            Process(self.scheduler, f"{GO_CLIENT}{number}").spawn(member.live)

    # Members

    def _dagster(self, number: int, member: Member) -> None:
        """Start run after run; a run that ends badly may be repeated, as a re-execution or in the same run."""
        scheduler, count, attempt = self.scheduler, 1, 0
        while True:
            run_id = f"run{'0' if member.is_twin else number}x{count}"
            run = self.start(run_id, number, member, attempt)
            self.finish(run)
            ends_badly = run.process.is_dead or run.has_failed
            is_retried = ends_badly and run_id not in self.over and self.chance.random() < 0.4
            count, attempt = (count, attempt + 1) if is_retried else (count + 1, 0)
            if run.process.is_dead and not is_retried:
                if scheduler.now_ms < self.scenario.calm_ms and self.chance.random() < 0.5:
                    scheduler.sleep(self.chance.random() * self.hi_ms)
                    self.over.add(run_id)
            elif not is_retried:
                self.over.add(run_id)
            scheduler.sleep((HI_MS if self._is_judged_soon() else self.hi_ms) * (0.05 + 0.3 * self.chance.random()))

    def _is_judged_soon(self) -> bool:
        """Return whether faults are over and the check for active members is still to come: then every member works."""
        return self.scenario.calm_ms <= self.scheduler.now_ms < self.scenario.taken_up_ms

    def start(self, run_id: str, number: int, member: Member, attempt: int = 0) -> Run:
        """Start a run of a member, or its step again, for the partitions that the sensor requested, if any."""
        process = Process(self.scheduler, f"{run_id}, attempt {attempt}")
        clock = SimulatedClock(self.scheduler, member.clock_rate, member.clock_off_ms)
        run = Run(run_id, number, process, clock)
        self.runs.append(run)
        self.by_process[process] = run
        process.after_step = partial(self._after_step, run)
        partitions = self.wanted.pop() if self.wanted and not member.claim_entire_topic else None
        request = BatchRequest(
            topic=TOPIC,
            partitions=partitions,
            max_records=self.scenario.max_records,
            max_claims=None if partitions else member.max_claims,
            claim_entire_topic=member.claim_entire_topic and self.scenario.ranges is None,
            max_attempts=MOST_ATTEMPTS,
        )
        process.spawn(lambda: self._work(run, member, request))
        return run

    def finish(self, run: Run) -> None:
        """Wait until a run's process has ended, and remove the run."""
        run.process.wait_until_over()
        self.runs.remove(run)
        run.process.after_step = None
        del self.by_process[run.process]

    def _work(self, run: Run, member: Member, request: BatchRequest) -> None:
        """Work in rounds, as the steps of a process do; after a failed round another one may follow."""
        chance = random.Random(run.process.random.getrandbits(32) + run.number)
        settings = run.settings = self.settings(member)
        if self.scenario.ranges and settings.features:
            request = replace(request, ranges=self._ranges(self.scenario.ranges, chance))

        def wait() -> None:
            self.scheduler.sleep(chance.random() * 4 * member.slowness)

        delivery = run.delivery = BatchSession(
            log=self.cluster.open(run.process, member.slowness),
            data=cast("Topics", ProcessTopics(self.data, wait)),
            connection=_CONNECTION,
            group=GROUP,
            client=member.client,
            run_id=run.run_id,
            settings=settings,
            is_dead=self.is_dead,
            announce=lambda _: self._announce(chance),
            reasons_to_stop=[lambda: "Dagster reports that it is over" if run.run_id in self.over else None],
            clock=run.clock,
            snapshots=self.snapshots(run.process, wait),
            advise=(lambda _: self._advice(chance)) if self.scenario.is_advised else None,
        )
        has_sink = self.scenario.mode is DeliveryMode.EFFECTIVELY_ONCE
        sink = SimulatedSink(self.output, wait, lambda: self._hesitate(run, chance)) if has_sink else None
        request = replace(request, late_plan=has_sink and chance.random() < 0.5)
        try:
            rounds = 1 if request.partitions else chance.randint(2, 24)
            while rounds > 0 or (self._is_judged_soon() and not request.partitions):
                rounds -= 1
                batches = delivery.batches(request, sink, max_batches=chance.choice((1, 1, 2, 3)))
                try:
                    self._work_once(run, batches, chance)
                except SettingsMismatchError:
                    break  # the next run gets the present settings
                except GoGroupError:
                    self.befallen["member refused where Go consumers work"] += 1
                    break
                except MarshalError as error:
                    # A process whose own record has its sender's timestamp can do no more until an operator restarts
                    # it.
                    is_useless = (
                        isinstance(error, TimestampTypeError) and self.scheduler.now_ms >= self.scenario.calm_ms
                    )
                    run.has_failed = chance.random() < 0.5 or is_useless
                    if run.has_failed:
                        break
                if not (request.partitions and self._is_judged_soon()):
                    self.scheduler.sleep(self._until_next(chance))
            delivery.close()
        finally:
            if delivery._followed is not None and not run.process.is_dead:
                self._check_reader(delivery._followed)

    def _ranges(self, most: RangeOptions, chance: random.Random) -> RangeOptions:
        """Return how a process claims ranges: late processes use smaller sizes than the ranges that are left."""
        is_early = self.scheduler.now_ms < self.scenario.faulty_ms / 2
        return replace(most, size=chance.randint(2, most.size if is_early else min(most.size, 3)))

    def _advice(self, chance: random.Random) -> Advice | None:
        """Return random advice on the partitions to claim; None once faults are over."""
        if self.scheduler.now_ms >= self.scenario.calm_ms or chance.random() < 0.3:
            return None
        numbers = range(self.scenario.data_partitions)
        return Advice(frozenset(number for number in numbers if chance.random() < 0.5), "by the dice")

    def _announce(self, chance: random.Random) -> None:
        """Sometimes take a while between the plan and the commit of at most once."""
        is_long = chance.random() < 0.3 and self.scheduler.now_ms < self.scenario.faulty_ms
        self.scheduler.sleep(chance.random() * (1.2 * self.hi_ms if is_long else 4))

    def _hesitate(self, run: Run, chance: random.Random) -> None:
        """Rarely stop a process between the last check of its lease and the commit of its output."""
        if (self.hesitates or chance.random() < 0.02) and self.scheduler.now_ms < self.scenario.faulty_ms:
            self.hesitates = False
            self.befallen["pause beyond the lease within an output's commit"] += 1
            run.process.stop(self.hi_ms * chance.uniform(2, 6))
        self.scheduler.sleep(chance.random() * 4)

    def _until_next(self, chance: random.Random) -> float:
        """Return how long a process waits before its next round: a short time once faults are over."""
        now_ms, scenario = self.scheduler.now_ms, self.scenario
        soon_ms, later_ms = chance.uniform(LOOK_LEAST_MS, LOOK_MOST_MS), self.hi_ms * chance.uniform(1.8, 4)
        if now_ms < scenario.calm_ms:
            return min(later_ms, scenario.calm_ms - now_ms + soon_ms)
        if now_ms < scenario.stale_ms:
            return min(self.hi_ms * chance.uniform(0.6, 0.8), scenario.stale_ms - now_ms + soon_ms)
        return soon_ms if now_ms < scenario.taken_up_ms else later_ms

    def _work_once(self, run: Run, batches: Iterable[ClaimedBatch], chance: random.Random) -> None:
        for batch in batches:
            run.batch = batch
            with batch:
                if batch.idle is None:
                    self._process(run, batch, chance)
            self._check_batch(batch)
            run.batch = None

    def _process(self, run: Run, batch: ClaimedBatch, chance: random.Random) -> None:
        """Process the messages one by one; stop if the claim is lost, as Spark's jobs are cancelled."""
        if batch.mode is DeliveryMode.EFFECTIVELY_ONCE:
            self._process_for_sink(batch, chance)
            return
        batch.begin_processing()
        self._check_permission(batch)
        for range_ in batch.ranges:
            began_at = self.cluster.broker.bounds(self.home).end
            attempt = Attempt(range_, (GROUP, TOPIC, range_.partition), self._sender_of(run, batch), began_at)
            self.output.attempts.append(attempt)
            without_lease = 0
            for _, offset in self.data.read([range_]):
                self.scheduler.sleep(chance.random() * self._slow_ms())
                if batch._guard.lost is not None:
                    raise batch._guard.lost
                self._check_stops(run, batch, attempt)
                attempt.done.append(offset)
                without_lease = 0 if _has_lease(run, range_.partition) else without_lease + 1
                if without_lease > 1:  # the first may be in progress when the lease ends, as after a pause
                    self.fail("no work without a lease", f"{range_} by {batch.batch_id} at {offset}")
            if self.scenario.rule_set is RuleSet.GO:
                self._touch_an_output(batch, attempt, chance)

    def _process_for_sink(self, batch: ClaimedBatch, chance: random.Random) -> None:
        """Compute a result and write it to the sink; the computation fails sometimes, as a user's function may."""
        if batch.request.late_plan and batch.ranges:  # as `batch.read`, which has no plan yet
            batch._take_permission()
            batch._move(BatchEvent.READ)
        else:
            batch.begin_processing()
        found = self.data.read(batch.ranges)
        self._take_time(batch, chance.random() * self._slow_ms() * len(found))
        if chance.random() < 0.05 and self.scheduler.now_ms < self.scenario.faulty_ms:
            self.befallen["function that fails"] += 1
            raise SchemaDriftError("by the dice")
        batch.write(cast("DataFrame", found))

    def _sender_of(self, run: Run, batch: ClaimedBatch) -> str:
        """Return the instance id of a batch, or an empty text if other processes use that id."""
        is_shared = run.number in self.doubled or self._has_doubles
        return "" if is_shared else batch.batch_id

    def _take_time(self, batch: ClaimedBatch, left_ms: float) -> None:
        """Work for a while, unless the claim is lost meanwhile."""
        while left_ms > 0:
            part_ms = min(left_ms, self.hi_ms / 4)
            self.scheduler.sleep(part_ms)
            if batch._guard.lost is not None:
                raise batch._guard.lost
            left_ms -= part_ms

    def _slow_ms(self) -> float:
        """Return the longest time for a message; after the faults it is short, so that the rest is processed soon."""
        return self.scenario.slow * self.hi_ms if self.scheduler.now_ms < self.scenario.calm_ms else 5.0

    def _produce(self) -> None:
        """Write messages until faults are over."""
        scheduler, chance = self.scheduler, random.Random(self.scenario.seed * 7 + 4)
        while scheduler.now_ms < self.scenario.faulty_ms:
            scheduler.sleep(self.hi_ms * chance.uniform(0.2, 1))
            partition = chance.randrange(len(self.data.describe(TOPIC).partitions))
            self.data.append(partition, chance.randint(1, self.scenario.messages))

    def snapshots(self, process: Process, wait: Callable[[], None]) -> Snapshots | None:
        """Open the snapshots for a process, if this group has any."""
        if not self.scenario.has_snapshots:
            return None
        topic = SimulatedSnapshotTopic(
            self.snapshot_topic,
            self.snapshot_judge,
            process,
            wait,
            compacts=lambda: self.chance.random() < 0.05,
            next_fault=self._next_snapshot_fault,
        )
        return Snapshots(topic)

    def _next_snapshot_fault(self) -> SnapshotFault | None:
        """Count a record for the snapshot topic, and return its fault."""
        self.snapshot_records += 1
        fault = self.snapshot_faults.pop(self.snapshot_records, None)
        if fault is not None:
            self.befallen[fault] += 1
        return fault

    def settings(self, member: Member) -> GroupSettings:
        """Return the configuration of a member, with or without ranges as the log shows."""
        features = () if self.scenario.ranges is None or self.are_ranges_off() else (RANGES,)
        return GroupSettings(self.hi_ms * member.interval_factor, self.scenario.rule_set, self.scenario.mode, features)

    def are_ranges_off(self) -> bool:
        """Return whether the group's settings in the log do not enable ranges."""
        states = self.judge.groups[self.home].get(GROUP, [])
        return bool(states) and states[-1][1][5:] == ((),)

    def keys_of_group(self) -> list[KeyState]:
        """Return the states of all keys of the group."""
        return [self.judge.state(self.home, place) for place in self.judge.history[self.home] if place[0] == GROUP]

    def is_live(self, state: KeyState) -> bool:
        """Return whether a key of the group has a live owner, of the whole or of a range, by the broker's clock."""
        now_ms, (interval_ms, *_) = self.cluster.broker.now_ms(), self.judge.settings_in_force(self.home, GROUP)
        now_ms = max(now_ms, self.judge.log_time_ms(self.home))
        beats = [state[3], *(one[6] for one in ranges_of(state))]
        return any(beat is not None and now_ms - int(str(beat)) <= 2 * int(str(interval_ms)) for beat in beats)

    def is_dead(self, owner: Owner) -> bool:
        """Return whether Dagster reports the owner's run as over."""
        return run_of(owner.instance) in self.over

    def _sensor(self) -> None:
        """Read the log as the stale-claim sensor does, and request runs."""
        scheduler = self.scheduler
        process = scheduler.current.process if scheduler.current else Process(scheduler, "sensor")
        clock = SimulatedClock(scheduler)
        follower: Rationalizer | None = None
        while True:
            scheduler.sleep(self.hi_ms * 1.6)
            try:
                follower = follower or Rationalizer(
                    self.cluster.open(process),
                    clock=clock,
                    snapshots=self.snapshots(process, lambda: scheduler.sleep(1)),
                )
                left = abandoned_partitions(follower.catch_up(), GROUP, TOPIC, clock.wall_ms())
                self.wanted = [tuple(one.partition for one in left)] if left else []
                self._check_reader(follower)
            except MarshalError:
                follower = None

    # Checks

    def fail(self, promise: str, text: str) -> None:
        """Record the first violation only, because later ones give no more information."""
        if not self.violations:
            self.violations.append(ViolationError(promise, f"at {self.scheduler.now_ms:.0f} ms: {text}"))
            self.scheduler.is_stopped = True

    def _after_step(self, run: Run) -> None:
        """Compare the beliefs of members. Only the process that has just acted can have a new belief."""
        if run.batch is None:
            return
        if self.is_truncated:
            self._check_truncation_noticed(run.batch)
            return
        claims = run.batch._claimer._claim_set.claims
        if not claims and not run.leases:
            return
        self._check_certain(run.batch)
        self._check_reported(run.batch)
        leases = [claim.lease for claim in claims.values()]
        if leases == run.leases:
            return
        run.leases = leases
        self._busy_ms[run.number] = self.scheduler.now_ms
        self._check_beliefs()

    def _see_appended(self, partition: int, offset: int, timestamp_ms: int, value: bytes) -> None:
        """Judge a record; after a plan of a range also the beliefs, because its sender now relies on the plan only."""
        self.judge.read(partition, offset, timestamp_ms, value)
        if self.is_refused and value.startswith(b"GroupSettings/"):
            self.is_refused = False
        if self.go_members and partition == self.home:
            for member in self.go_members:
                member.see(value)
        if value.startswith(b"PlanningRange/") and not self.is_truncated:
            self._check_beliefs()

    def _check_beliefs(self) -> None:
        if self.scenario.rule_set is RuleSet.NATIVE and self.scheduler.now_ms >= self.unsure_until_ms:
            check_beliefs(self.judge, self.home, self._beliefs(), self.cluster.broker.now_ms(), self.hi_ms)

    def _check_certain(self, batch: ClaimedBatch) -> None:
        """A process that only observes the log holds no claim, except within a step of its claimer."""
        rationalizer, held = batch._claimer.rationalizer, len(batch._claimer._claim_set.claims)
        is_within_a_step = cast("SimulatedRLock", rationalizer.lock).is_held
        if held and not is_within_a_step and not rationalizer.world.partition_of(TOPIC).certain:
            self.fail("an observing reader never claims", f"{batch.batch_id} holds {held} partitions")

    def _check_reported(self, batch: ClaimedBatch) -> None:
        """A process holds nothing after a record that ends all promises, or after it skipped a part of the log.

        Such a record is one of its own with its sender's timestamp, or one of a Go consumer in a native group.
        """
        claims, rationalizer = batch._claimer._claim_set.claims, batch._claimer.rationalizer
        log = cast("SimulatedLog", rationalizer.log)
        reported_ms = log.reported_sender_timed_ms
        if reported_ms is not None and reported_ms < self.scheduler.now_ms and claims and not self.is_cut:
            self.fail(
                "who reads a sender's timestamp holds nothing", f"{batch.batch_id} learned it at {reported_ms:.0f} ms"
            )
        if cast("SimulatedRLock", rationalizer.lock).is_held:
            return
        if any(claim.epoch < rationalizer.began_at(self.home) for claim in claims.values()):
            self.fail("a member that continues from a newer snapshot holds nothing", batch.batch_id)
        if not self.has_intruder or self.is_cut:
            return
        partition, offset = self.judge.unplanned.get(GROUP, (self.home, inf))
        is_read = rationalizer.world.partitions[partition].next_offset > offset
        if is_read and any(claim.epoch < offset for claim in claims.values()):
            self.fail("members stop where a Go consumer is in a native group", f"{batch.batch_id}, record {offset}")

    def _wall_of(self, process: Process) -> int | None:
        run = self.by_process.get(process)
        return self.cluster.broker.now_ms() if run is None else run.clock.wall_ms()

    def _check_sending(self, log: SimulatedLog, process: Process, records: Sequence[Append]) -> None:
        """Judge what a process is about to send by what it has read."""
        if self.is_truncated:
            reported_ms = log.reported_truncated_ms
            if process in self.by_process and reported_ms is not None and reported_ms < self.scheduler.now_ms:
                self.fail("nothing is sent to a log that was found truncated", records[0].value.decode())
            return
        if log.reported_sender_timed_ms is not None and not self.is_cut:
            self.fail("nothing follows a record with its sender's timestamp", records[0].value.decode())
        run = self.by_process.get(process)
        if run is None:
            return
        if self.is_refused:
            self.fail("nothing is written before an operator decides", records[0].value.decode())
        in_force = self.judge.settings_in_force(self.home, GROUP, self._read_to(run))
        if in_force != _settings_in_words(run.settings) and not self.is_cut:
            values = [record.value for record in records]
            claims = [value for value in values if value.startswith((b"ClaimingPartition/", b"ClaimingRange/"))]
            if claims:
                self.fail("claims are made under the settings in force", f"{claims[0].decode()} under {in_force}")
        if self.scenario.rule_set is RuleSet.GO:
            for record in records:
                self._check_sending_to_go(log, run, record.value.decode())

    def _check_sending_to_go(self, log: SimulatedLog, run: Run, value: str) -> None:
        """Check that a member of a Go group writes only what Go knows, dated back, and by the log as it has read it."""
        kind, _, time_s, *_ = value.split("/")
        if kind not in KNOWN_TO_GO:
            self.fail("members of a Go group write only what Go knows", value)
            return
        if int(time_s) > run.clock.wall_ms() // 1_000 - GO_DATED_BACK_S:
            self.fail("members of a Go group date their records back", f"{value} at {run.clock.wall_ms()}")
        if not self.is_cut:
            self._check_stand_in_go_group(log, run, value)

    def _check_stand_in_go_group(self, log: SimulatedLog, run: Run, value: str) -> None:
        """Judge a record by what its sender has read."""
        kind, _, _, instance, client, _, _, partition, *_ = value.split("/")
        read_to = self._read_to(run)
        state = self.judge.state(self.home, (GROUP, TOPIC, int(partition)), read_to)
        if kind != "ClaimingPartition":
            if state[0] != instance:
                self.fail("a displaced member sends nothing more", f"{value}, read up to {read_to}: {state[0]}")
        elif client.startswith(GO_CLIENT) and self._is_used_by_go(client, read_to):
            self.fail("a Go consumer's client id is its own", value)
        elif state[3] is not None:
            now_ms = max(self.judge.log_time_before(self.home, read_to), run.clock.wall_ms())
            if now_ms - int(str(state[3])) <= 2 * self.hi_ms + GO_PATIENCE_MS:
                self.fail("members wait a second longer in a Go group", f"{value} at {now_ms}, {state}")
        looked_until_ms = log.looked_ms + LOOKED_WAITS * LONGEST_WAIT_MS * log.slowness
        is_late = run.process.runs_from_ms <= log.looked_ms and self.scheduler.now_ms > looked_until_ms
        if kind == "Heartbeat" and is_late:
            self.fail("a heartbeat in a Go group follows a look", f"{value}, looked at {log.looked_ms:.0f} ms")

    def _read_to(self, run: Run) -> int:
        """Return the offset up to which a run has read the log, without repeated checks."""
        reader = run.delivery._followed if run.delivery is not None else None
        return 0 if reader is None else reader.world.partitions[self.home].next_offset

    def _is_used_by_go(self, client: str, read_to: int) -> bool:
        """Return whether a Go consumer with that client id owns a key, by the records below `read_to`."""
        places = [place for place in self.judge.history[self.home] if place[0] == GROUP]
        states = [self.judge.state(self.home, place, read_to) for place in places]
        return any(state[1] == client and "." not in str(state[0]) for state in states)

    def _check_permission(self, batch: ClaimedBatch) -> None:
        """In at most once no message is processed because of a commit with its sender's timestamp."""
        if batch.mode is not DeliveryMode.AT_MOST_ONCE:
            return
        for range_ in batch.ranges:
            if self._is_sender_timed(batch, range_):
                self.fail("no permission by a sender's timestamp", f"{range_} of {batch.batch_id}")

    def _is_sender_timed(self, batch: ClaimedBatch, one: ClaimedRange) -> bool:
        """Return whether the batch's own record, read with its sender's timestamp, was the first commit of a range."""
        log = cast("SimulatedLog", batch._claimer.rationalizer.log)
        at = self.judge.committed_at.get(((GROUP, TOPIC, one.partition), one.generation, one.end))
        return at is not None and (self.home, at) in log.sender_timed

    def _check_stops(self, run: Run, batch: ClaimedBatch, attempt: Attempt) -> None:
        """A displaced member of a Go group stops soon, unless a fault has delayed it since."""
        over_ms = self.judge.over_ms.get((attempt.place, attempt.range.epoch))
        if over_ms is None or self.scenario.rule_set is not RuleSet.GO or self.is_truncated:
            return
        log = cast("SimulatedLog", batch._claimer.rationalizer.log)
        is_kept = run.process.runs_from_ms > over_ms or log.trouble_until_ms > over_ms
        longest_ms = self.hi_ms / 4 / run.clock.rate + STOP_WAITS * LONGEST_WAIT_MS * log.slowness
        if not is_kept and self.scheduler.now_ms > over_ms + longest_ms:
            self.fail("a displaced member soon stops", f"{attempt.range}, displaced at {over_ms:.0f} ms")

    def _touch_an_output(self, batch: ClaimedBatch, attempt: Attempt, chance: random.Random) -> None:
        """Check before an output is written, as a user must. The check stops a displaced member, unless it failed."""
        if chance.random() < 0.5:
            return
        over_ms = self.judge.over_ms.get((attempt.place, attempt.range.epoch))
        log = cast("SimulatedLog", batch._claimer.rationalizer.log)
        failures = log.failures
        batch.check()
        if over_ms is not None and not self.is_truncated and log.failures == failures:
            self.fail("a check names the displaced member", f"{attempt.range}, displaced at {over_ms:.0f} ms")

    def _check_truncation_noticed(self, batch: ClaimedBatch) -> None:
        """A process that learned that the log ends before the records it has read holds nothing."""
        reported_ms = cast("SimulatedLog", batch._claimer.rationalizer.log).reported_truncated_ms
        if reported_ms is not None and reported_ms < self.scheduler.now_ms and batch._claimer._claim_set.claims:
            self.fail("a truncated log is noticed", f"{batch.batch_id} learned it at {reported_ms:.0f} ms")

    def _beliefs(self) -> Iterator[Belief]:
        """Yield the beliefs that the checkers judge: none of a process whose instance id another one uses too."""
        now_ms = self.scheduler.now_ms
        for run in self.runs:
            batch, process = run.batch, run.process
            if batch is None or process.is_dead or process.runs_from_ms > now_ms or run.clock.rate < 0.95:
                continue
            if run.number in self.doubled:
                continue
            lease_ms = run.clock.lease_ms()
            name = f"{run.number}: {process.name}"
            for number, claim in batch._claimer._claim_set.claims.items():
                if claim.lease.ends_ms > lease_ms and not claim.is_done:
                    ends_ms = EPOCH_MS + claim.lease.ends_ms if run.clock.rate == 1 and not self._clock_jumps else 0
                    yield Belief(name, (GROUP, TOPIC, number), claim.epoch, *_offsets_held(claim), ends_ms)

    def _check_left_queue(self, batch: object, value: bytes) -> None:
        """No record that waits to be sent is sent after its sender's lease."""
        _, _, _, instance, _, _, _, partition, *_ = value.decode().split("/")
        if isinstance(batch, ClaimedBatch) and batch.batch_id == instance:
            why = batch._claimer._claim_set.left.get(int(partition), "")
            if why.startswith("its lease ended"):
                self.fail("nothing is sent after self-fencing", value.decode())

    def check_paused(self, until_s: int) -> None:
        """A pause is written to every coordination partition."""
        ends = [
            partition
            for partition, _, _, value, _ in self.judge.records
            if value.startswith("ReleaseGroup/") and value.endswith(f"/{until_s}")
        ]
        missing = set(range(self.scenario.coordination_partitions)) - set(ends)
        if missing and not self.is_cut and not self.is_truncated:
            self.fail("a pause is written everywhere", f"not in coordination partitions {sorted(missing)}")

    def check_positions(self, offsets: Mapping[int, int], since: int) -> None:
        """After a position was set, the key has that offset from a record at log offset `since` or higher."""
        for partition, offset in offsets.items():
            states = self.judge.history[self.home][GROUP, TOPIC, partition]
            if not any(at >= since and state[4] == offset and state[7] == at for at, state in states):
                self.fail("a position that was set counts", f"partition {partition} at {offset}")

    def check_refused(self, promise: str, value: bytes) -> None:
        """The record that has just entered the log was refused."""
        *_, verdict = self.judge.records[-1]
        if verdict == "accepted":
            self.fail(promise, value.decode())

    def check_ranges_off(self) -> None:
        """The settings no longer enable ranges."""
        if self.judge.has_settings(self.home, GROUP) and not self.are_ranges_off():
            self.fail("ranges that were switched off are off", str(self.judge.groups[self.home][GROUP][-1]))

    def _check_batch(self, batch: ClaimedBatch) -> None:
        """A commit that a member believes in is in the log, with the same generation.

        The member wrote it itself. In at most once that always holds, because the commit is the permission to process.
        In the other modes a successor may have finished a range without the member's notice.
        """
        if not batch.committed or self.is_truncated:
            return
        is_own = self.scenario.ranges is None or batch.mode is DeliveryMode.AT_MOST_ONCE
        for one in (each.range for each in batch.report() if each.state in {"committed", "skipped"}):
            by = self.judge.committed[(GROUP, TOPIC, one.partition), one.generation, one.end]
            if (batch.batch_id not in by if is_own else not by) or self._is_sender_timed(batch, one):
                self.fail("a commit that is believed in is in the log", f"{one} of {batch.batch_id}")

    def _check_reader(self, reader: Rationalizer) -> None:
        if self.is_truncated or reader.failure is not None:
            return
        for number, read in reader.world.partitions.items():
            if not read.certain:
                continue
            check_readers_agree(self.judge, number, _seen(read))
            if self.is_cut:  # it may have read on without judging, until it found a snapshot
                continue
            partition, offset = self.judge.unplanned.get(GROUP, (number, inf))
            if partition == number and reader._began_at[number] <= offset < read.next_offset:
                noted = read.unplanned.get(GROUP)
                if noted is None or noted.log_offset != offset:
                    self.fail("a heartbeat without a plan is noticed", f"at {offset}: {noted}")

    def _check_taken_up(self) -> None:
        """Soon after the end of faults, every partition with messages to process has an active member."""
        if self.is_cut or self.is_truncated or self._is_stuck():
            return
        log_time_ms = self.judge.log_time_ms(self.home)
        if log_time_ms > EPOCH_MS + self.scheduler.now_ms or not self._is_anyone_idle():
            return
        for partition, (lag, state) in self._lags().items():
            if lag and self.judge.owned_at.get((GROUP, TOPIC, partition), 0) < EPOCH_MS + self.scenario.calm_ms:
                self.fail("partitions are soon worked on again", f"partition {partition}: {lag} to read, {state}")

    def _is_anyone_idle(self) -> bool:
        """Return whether a member that takes any partition, and sees stale owners by its clock, had no claim lately."""
        return any(
            self._busy_ms.get(number, 0) < self.scenario.calm_ms
            for number, member in enumerate(self.scenario.members)
            if not member.client.startswith(GO_CLIENT)
            if not member.claim_entire_topic
            and member.slowness == 1
            and member.clock_off_ms >= 0
            and member.clock_rate >= 1
        )

    def _is_stuck(self) -> bool:
        """Return whether an operator must set a position: the output lacks messages that a Go consumer processed."""
        return self.has_intruder and self.scenario.mode is DeliveryMode.EFFECTIVELY_ONCE

    def _is_drained(self) -> bool:
        return not any(lag for lag, _ in self._lags().values())

    def _lag(self) -> int:
        return sum(abs(lag) for lag, _ in self._lags().values())

    def offset(self, partition: int) -> int:
        """Return the offset of the group."""
        return int(str(self.judge.state(self.home, (GROUP, TOPIC, partition))[4] or 0))

    def _lags(self) -> dict[int, tuple[int, Any]]:
        partitions = self.data.describe(TOPIC).partitions
        bounds = self.data.offsets(TOPIC, partitions)
        states = {n: self.judge.state(self.home, (GROUP, TOPIC, n)) for n in partitions}
        return {n: (bounds[n].end - self.offset(n), states[n]) for n in partitions}

    def _check_end(self) -> None:
        mode = self.scenario.mode
        if self.is_truncated:
            return
        if mode is not DeliveryMode.EFFECTIVELY_ONCE and self.scenario.rule_set is RuleSet.NATIVE:
            check_attempts(self.judge, self.output, at_most_once=mode is DeliveryMode.AT_MOST_ONCE)
        check_takes(self.judge, self.output)
        if mode is DeliveryMode.EFFECTIVELY_ONCE:
            check_nothing_twice(self.judge, self.output)
        if self.is_cut or self._is_stuck():
            return
        undone = {partition: at for partition, at in self._lags().items() if at[0]}
        if undone:
            self.fail("everything is drained in the end", str(undone))
        elif mode is not DeliveryMode.AT_MOST_ONCE:
            check_nothing_lost(
                self.judge,
                self.output,
                self.data.all_messages(),
                effectively_once=mode is DeliveryMode.EFFECTIVELY_ONCE,
            )


def _seen(read: PartitionWorld) -> Seen:
    """Return the library's state in the form of the checkers."""
    keys: dict[Place, KeyState] = {}
    for name, group in read.groups.items():
        for place, key in group.keys.items():
            owner = NOBODY if key.owner is None else (*key.owner, key.last_beat_ms)
            stands = (key.offset, key.plan_end, key.plan_attempts, key.generation, key.data_topic_id)
            keys[name, *place] = (*owner, *stands, tuple([_range_state(range_) for range_ in key.ranges]))
    return Seen(
        read.next_offset,
        read.log_time_ms,
        {name: _group_state(group) for name, group in read.groups.items()},
        keys,
    )


def _group_state(group: Group) -> GroupState:
    pause, settings = (group.paused_until_s, group.paused_by), group.settings
    if not group.settings_accepted:
        return pause
    how = (settings.heartbeat_interval_ms, settings.rule_set, settings.delivery)
    return (*pause, *how, tuple(settings.features))


def _settings_in_words(settings: GroupSettings | None) -> GroupState:
    if settings is None:
        return ()
    features = tuple(settings.features)
    return (settings.heartbeat_interval_ms, str(settings.rule_set), str(settings.delivery), features)


def _range_state(each: Range) -> RangeState:
    held = (None, None, None, None) if each.owner is None else (*each.owner, each.last_beat_ms)
    return (each.start, each.end, each.phase, *held, each.attempts)


def _offsets_held(claim: Claim | RangeClaim) -> tuple[float, float]:
    """Return the offsets on which a process may rely: none after it has sent its last record for them."""
    if isinstance(claim, Claim):
        return 0, inf
    return claim.start, claim.start if claim.may_be_done else claim.end


def _has_lease(run: Run, partition: int) -> bool:
    """Return whether a process has a lease on a partition or on a range of it; what is done needs none."""
    claim = None if run.batch is None else run.batch._claimer._claim_set.claims.get(partition)
    return claim is not None and (claim.is_done or claim.lease.ends_ms > run.clock.lease_ms())


_remembering = lru_cache(maxsize=1_000)
"""A cache for repeated calls with the same arguments."""


@contextmanager
def _instead_of_threads(scheduler: Scheduler, seed: int) -> Iterator[None]:
    """Make the library use the scheduler in place of threads, and random bytes that depend on the seed."""
    _THREADING.scheduler = scheduler
    chance = random.Random(seed * 7 + 3)
    parts_chance = random.Random(seed * 7 + 5)

    def urandom(size: int) -> bytes:
        return (chance if scheduler.current is None else scheduler.current.process.random).randbytes(size)

    plain_parse = _remembering(reference_reader.parse)
    modules: list[tuple[Any, str, Any]] = [
        (heartbeats, "threading", _THREADING),
        (rationalizer, "threading", _THREADING),
        (heartbeats, "random", SimpleNamespace(Random=lambda _: chance)),
        (coordination_claims, "os", SimpleNamespace(urandom=urandom)),
        (snapshots, "render", partial(render_in_parts, chance=parts_chance)),
        (snapshots, "new_snapshot_id", lambda: chance.randbytes(8).hex()),
        (rationalizer, "WORTH_A_LOOK", 30),
        (snapshot_writer, "OLD_RECORDS", 15),
        (reference_reader, "parse", plain_parse),
        (reference_reader, "coordination_partition", _remembering(reference_reader.coordination_partition)),
        (reference_reader, "is_name", _remembering(reference_reader.is_name)),
        (reference_reader, "number", _remembering(reference_reader.number)),
        (checkers, "parse", plain_parse),
        (world, "parse", _remembering(messages.parse)),
    ]
    before = [getattr(module, name) for module, name, _ in modules]
    logging.disable(logging.CRITICAL)
    try:
        for module, name, fake in modules:
            setattr(module, name, fake)
        yield
    finally:
        logging.disable(logging.NOTSET)
        for (module, name, _), original in zip(modules, before, strict=True):
            setattr(module, name, original)


def simulate(scenario: Scenario) -> Result:
    """Run one seed."""
    return Simulation(scenario).run()
