"""A coordinator, a member or an independent claimer: `python -m tests.coordinator_faults.worker JSON`.

Each ends cleanly at SIGTERM. A member claims its assigned partitions in the coordination log, moves their offsets, and
releases the partitions that it must stop. An independent claimer does the same with any free partition, without a
coordinator.
"""

import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from marshal_dagster.coordination.claimer import Claimer, Member, new_instance_id
from marshal_dagster.coordination.kafka_log import KafkaLog
from marshal_dagster.coordination.rationalizer import Rationalizer
from marshal_dagster.coordinator.assignment import DataPartitionId, sticky_assignment
from marshal_dagster.coordinator.client import CoordinatedMember
from marshal_dagster.coordinator.group import GroupRules
from marshal_dagster.coordinator.service import Coordinator, CoordinatorOptions
from marshal_dagster.coordinator.transport import CoordinatorTopics
from marshal_dagster.election import elector
from marshal_dagster.election.rules import Timing
from marshal_dagster.errors import MarshalError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.protocol.messages import GroupSettings
from tests.coordinator_faults.journal import Did, GroupJournal, Line
from tests.fault_harness.journal import now_ms

GROUP: Final = "fleet"
HI_MS: Final = 1_500
WORK_S: Final = 0.25
STOP_WITHIN_S: Final = 30.0
STRANGER_HOLDS_S: Final = 1.5

logger = logging.getLogger(__name__)


class Role(StrEnum):
    """The role of a process."""

    COORDINATOR = "coordinator"
    MEMBER = "member"
    STRANGER = "stranger"


class Orders(BaseModel):
    """The orders for a process."""

    role: Role
    bootstrap_servers: str
    name: str
    run_id: str
    messages: str
    coordination_topic: str
    topic: str
    pattern: str
    partitions: int
    session_ms: int
    slow_stop_s: float
    is_static: bool
    seed: int
    journal: Path


class Worker:
    """Holds the `wanted` partitions. It uses several claimers, because a claimer claims a partition only once."""

    def __init__(self, orders: Orders, journal: GroupJournal) -> None:
        self.orders = orders
        self.journal = journal
        connection = KafkaConnection(bootstrap_servers=orders.bootstrap_servers, timeout_s=5)
        self.log = KafkaLog(connection, orders.coordination_topic, HI_MS)
        self.rationalizer = Rationalizer(self.log)
        self.chance = random.Random(f"{orders.seed} {orders.run_id}")
        self.claimers: list[Claimer] = []
        self._changed = threading.Condition()
        self._wanted: set[DataPartitionId] = set()
        self._held: set[DataPartitionId] = set()
        self._ends_s: dict[DataPartitionId, float] = {}

    def start(self, places: frozenset[DataPartitionId]) -> None:
        """Start to work on these partitions."""
        self.journal.note(Did.STARTS, places)
        with self._changed:
            self._wanted |= places

    def stop(self, places: frozenset[DataPartitionId]) -> None:
        """Stop working on these partitions; return once they are released."""
        self.journal.note(Did.STOPS, places)
        with self._changed:
            self._wanted -= places
            self._changed.wait_for(lambda: not places & self._held, STOP_WITHIN_S)
        self.journal.note(Did.STOPPED, places)

    def work(self) -> None:
        """Do one round: release, claim, commit."""
        with self._changed:
            wanted = frozenset(self._wanted)
        held = frozenset((each.topic, claim) for each in self.claimers for claim in each.claims)
        over = self._over(held - wanted)
        for claimer in self.claimers:
            mine = [number for number in claimer.claims if (claimer.topic, number) in over]
            if mine:
                claimer.release(mine)
            self._commit(claimer)
        self._claim(wanted - held)
        self.claimers = [each for each in self.claimers if each.claims]
        with self._changed:
            self._held = {(each.topic, number) for each in self.claimers for number in each.claims}
            self._changed.notify_all()

    def _over(self, places: frozenset[DataPartitionId]) -> set[DataPartitionId]:
        """Return the partitions to stop whose last message is done; each takes some time."""
        now_s = time.monotonic()
        self._ends_s = {place: at_s for place, at_s in self._ends_s.items() if place in places}
        for place in places:
            self._ends_s.setdefault(place, now_s + self.chance.random() * self.orders.slow_stop_s)
        return {place for place, at_s in self._ends_s.items() if now_s >= at_s}

    def _claim(self, places: Iterable[DataPartitionId]) -> None:
        topics: dict[str, list[int]] = {}
        for topic, number in places:
            topics.setdefault(topic, []).append(number)
        for topic, numbers in topics.items():
            member = Member(GROUP, self.orders.name, new_instance_id(self.orders.run_id))
            claimer = Claimer(self.rationalizer, member, topic, GroupSettings(HI_MS))
            try:
                claimer.ensure_group_settings()
                free = claimer.claimable(numbers)
                if free and claimer.claim(free):
                    self.claimers.append(claimer)
            except MarshalError as error:
                logger.info("claim of %s: %s", topic, error)
                claimer.release()

    def _commit(self, claimer: Claimer) -> None:
        """Process one message of each partition, and commit; the journal shows when the lease was valid."""
        at_ms = now_ms()
        try:
            claimer.check(claimer.claims.keys())
            starts = {number: 0 for number, claim in claimer.claims.items() if claim.offset is None}
            if starts:
                claimer.beat(starts)
            claims = dict(claimer.claims)
            ends = {number: claim.plan_end or (claim.offset or 0) + 1 for number, claim in claims.items()}
            signed = {number: (claimer.topic, number, claimer.member.instance, claims[number].epoch) for number in ends}
            self.journal.write(*(Line(at_ms, Did.WORKS, *signed[number], end - 1) for number, end in ends.items()))
            if ends:
                claimer.plan(ends)
                claimer.commit(ends)
                at_ms = now_ms()
                self.journal.write(*(Line(at_ms, Did.COMMITTED, *signed[n], end) for n, end in ends.items()))
        except MarshalError as error:
            logger.info("commit on %s: %s", claimer.topic, error)

    def close(self) -> None:
        """Release all claims."""
        for claimer in self.claimers:
            claimer.release()
        self.log.close()


def be_coordinator(orders: Orders, journal: GroupJournal, is_over: threading.Event) -> None:
    """Coordinate until SIGTERM."""
    # Shorter than brokers allow by default, for more takeovers in a run.
    elector._SESSION_MS = 3_000  # type: ignore[misc]
    service = Coordinator(
        KafkaConnection(bootstrap_servers=orders.bootstrap_servers, timeout_s=5),
        CoordinatorTopics(orders.messages),
        CoordinatorOptions(GroupRules(sticky_assignment), Timing(receive_deadline_ms=2_500), recovery_ms=5_000),
    )
    running = threading.Thread(target=_until_over, args=(service, is_over), daemon=True)
    running.start()
    led = False
    while not is_over.wait(0.05):
        leads = GROUP in service.groups()
        if leads != led:
            journal.note(Did.LEADS if leads else Did.FOLLOWS)
            led = leads
    service.stop()
    running.join(20)


def _until_over(service: Coordinator, is_over: threading.Event) -> None:
    while not is_over.is_set():
        try:
            service.run()
        except MarshalError as error:
            logger.info("not yet: %s", error)
            is_over.wait(0.3)


def be_member(orders: Orders, journal: GroupJournal, is_over: threading.Event) -> None:
    """Work on the assigned partitions until SIGTERM."""
    worker = Worker(orders, journal)
    while not is_over.is_set():
        member = CoordinatedMember(
            KafkaConnection(bootstrap_servers=orders.bootstrap_servers, timeout_s=5),
            GROUP,
            orders.name,
            start=worker.start,
            stop=worker.stop,
            topics=CoordinatorTopics(orders.messages),
            topics_wanted=[orders.topic],
            pattern=orders.pattern,
            session_timeout_ms=orders.session_ms,
            is_static=orders.is_static,
        )
        try:
            with member:
                leaving = _in_background(member, is_over)
                while not (is_over.is_set() and not leaving.is_alive()):
                    worker.work()
                    time.sleep(WORK_S)
        except MarshalError as error:
            logger.info("not yet: %s", error)
            is_over.wait(0.3)
    worker.close()


def _in_background(member: CoordinatedMember, is_over: threading.Event) -> threading.Thread:
    """Leave the group at SIGTERM, while the main thread continues to release claims."""

    def leave() -> None:
        is_over.wait()
        member.__exit__()

    thread = threading.Thread(target=leave, daemon=True)
    thread.start()
    return thread


def be_stranger(orders: Orders, journal: GroupJournal, is_over: threading.Event) -> None:
    """Claim a partition now and then, without regard to the assignment."""
    worker = Worker(orders, journal)
    while not is_over.is_set():
        place = (orders.topic, worker.chance.randrange(orders.partitions))
        worker._wanted = {place}
        until_s = time.monotonic() + STRANGER_HOLDS_S
        while time.monotonic() < until_s and not is_over.wait(WORK_S):
            worker.work()
        worker._wanted = set()
        worker.work()
    worker.close()


def main() -> int:
    """Run the process that the orders describe."""
    orders = Orders.model_validate_json(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(message)s")
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    be = {Role.COORDINATOR: be_coordinator, Role.MEMBER: be_member, Role.STRANGER: be_stranger}[orders.role]
    journal = GroupJournal(orders.journal)
    while not is_over.is_set():
        try:
            be(orders, journal, is_over)
        except MarshalError as error:
            logger.info("not yet: %s", error)
            is_over.wait(0.3)
    logger.info("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
