"""The run of one seed: an outbox with writers and harvesters, their faults, and the records that consumers read."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka import Consumer, KafkaError, TopicPartition

from marshal_dagster._internal.postgres import Database
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.interfaces import ID_HEADER
from marshal_dagster.outbox.schema import OutboxTables
from tests.conditions import WITHIN_S
from tests.fault_harness.journal import read_journal
from tests.fault_harness.proxy import LinkState
from tests.fault_harness.run import END_WITHIN_S, FaultRun, Script, WorkerProcess, fake_clock
from tests.outbox_faults.checkers import Seen, Verdict, judge
from tests.outbox_faults.cluster import Services
from tests.outbox_faults.scenario import (
    HARVESTERS,
    LEADER,
    OF_KAFKA_LINKS,
    OF_POSTGRES_LINKS,
    Fault,
    FaultKind,
    Scenario,
)
from tests.outbox_faults.worker import LINES, Line, Orders
from tests.outbox_faults.writers import (
    SMALL_TOPIC_BYTES,
    Counted,
    Places,
    Writer,
    create_truth,
    name_of,
    read_parked,
    read_truth,
    read_waiting,
)
from tests.simulator.checkers import ViolationError

LEADER_WITHIN_S: Final = 3.0
WHEREABOUTS_S: Final = 1.0
IN_THE_CLIENT: Final = re.compile(r'kafka/(transactions|clients)\.py", line \d+ in (__init__|producer|consumer)\n')
"""Where a harvester whose clock was wrong may hang (docs/verification/faults.md)."""
COPIES: Final = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}


@dataclass(slots=True)
class HarvesterProcess(WorkerProcess):
    """One of the harvesters."""

    @property
    def name(self) -> str:
        """Return the common name of all its runs."""
        return f"harvester{self.number}"

    @property
    def clock(self) -> Path:
        """Return the file with the error of its time of day."""
        return self.folder / f"clock{self.number}"

    @property
    def leads(self) -> bool:
        """Return whether it believes that it leads, by its journal."""
        lines = read_journal(self.journal, LINES)
        return bool(lines) and lines[-1].fence is not None


@dataclass(slots=True)
class Tally:
    """The result of a run."""

    verdict: Verdict = field(default_factory=Verdict)
    rows: int = 0
    poisoned: int = 0
    transactions: int = 0
    rolled_back: int = 0
    long: int = 0
    sessions: int = 0
    terms: int = 0
    takeovers: int = 0
    drained_after_s: float = 0.0

    @property
    def violations(self) -> list[ViolationError]:
        """Return the promises that were broken."""
        return self.verdict.violations


class Run(FaultRun[HarvesterProcess, Line, Tally]):
    """A seed's run."""

    def __init__(self, of: Scenario, services: Services, folder: Path) -> None:
        super().__init__(of.seed, services.kafka, folder, "tests.outbox_faults.worker", LINES)
        self.of = of
        self.services = services
        stem = f"s{of.seed}_{os.urandom(3).hex()}"
        self.places = Places(stem, f"{stem}-plain", f"{stem}-small", f"{stem}-missing")
        self.tables = OutboxTables(Database(services.postgres.dsn()), stem)
        self.harvesters = [HarvesterProcess(number, folder) for number in range(HARVESTERS)]
        self.counted = Counted()
        self.writers = [
            Writer(number, services.postgres.dsn(), self.places, of.seed, self.counted) for number in range(of.writers)
        ]
        self.tally = Tally()

    @property
    def processes(self) -> Sequence[HarvesterProcess]:
        """Return the harvesters."""
        return self.harvesters

    def _prepare(self) -> None:
        registration = self.tables.create(notifies=self.chance.random() < 0.8)
        self.topics = OutboxTopics.of(registration.uid)
        self.topics.create(self.connection)
        self.admin.create(self.places.plain, 3, 3, COPIES)
        self.admin.create(self.places.small, 2, 3, {**COPIES, "max.message.bytes": str(SMALL_TOPIC_BYTES)})
        with psycopg.connect(self.services.postgres.dsn()) as connection:
            create_truth(connection, self.places)

    def _topics(self) -> Sequence[str]:
        return self.places.plain, self.places.small, self.topics.notes, self.topics.leader

    # Each tick

    def _live(self) -> None:
        for process in self.processes:
            self._start(process)
        for writer in self.writers:
            writer.start()
        self._wait(lambda: any(process.leads for process in self.processes), WITHIN_S, "a first leader")
        self._play([self._inject(fault) for fault in self.of.faults])
        self._end_writers()
        self.services.repair()
        calm_s = time.monotonic()
        self._wait(self._is_drained, WITHIN_S, "all rows to be published")
        self.tally.drained_after_s = round(time.monotonic() - calm_s, 1)

    def _is_drained(self) -> bool:
        with psycopg.connect(self.services.postgres.dsn()) as connection:
            found = connection.execute(self.tables.named("SELECT count(*) FROM {rows}"), ()).fetchone()
        time.sleep(0.1)
        return found == (0,)

    def _end_writers(self) -> None:
        for writer in self.writers:
            writer.over.set()
        for writer in self.writers:
            if writer.is_alive():
                writer.join(END_WITHIN_S)
            if writer.is_alive():
                self._fail("the writers end", f"{writer.name} does not")
            if writer.failure:
                self._fail("the writers write", repr(writer.failure))

    def _end(self) -> None:
        self._end_writers()
        super()._end()

    def _is_good_end(self, process: HarvesterProcess, code: int) -> bool:
        """Return whether the exit code is good. SIGTERM before the harvester's handler is set ends it by the signal."""
        return code == 0 or (code == -signal.SIGTERM and not process.journal.exists())

    def _may_hang(self, whereabouts: str) -> bool:
        return FaultKind.CLOCK_OFF in self.of.kinds and IN_THE_CLIENT.search(whereabouts) is not None

    def _whereabouts(self, process: HarvesterProcess) -> str:
        before = process.errors.stat().st_size
        process.signal(signal.SIGUSR1)
        time.sleep(WHEREABOUTS_S)
        return f", {process.errors.read_bytes()[before:].decode(errors='replace')}"

    def _environment(self, process: HarvesterProcess) -> Mapping[str, str]:
        if FaultKind.CLOCK_OFF not in self.of.kinds:
            return {}
        return fake_clock(FAKETIME_TIMESTAMP_FILE=str(process.clock), FAKETIME_CACHE_DURATION="1")

    def _orders(self, process: HarvesterProcess) -> Orders:
        process.clock.write_text("+0")
        return Orders(
            bootstrap_servers=self.services.kafka.servers(process.number),
            dsn=self.services.postgres.dsn(process.number),
            name=self.places.outbox,
            journal=process.journal,
            session_ms=self.of.session_ms,
            receive_deadline_ms=self.of.receive_deadline_ms,
            transaction_timeout_s=self.of.transaction_timeout_s,
            timeout_s=self.of.timeout_s,
            max_in_flight_records=self.of.max_in_flight_records,
        )

    # Faults

    def _inject(self, fault: Fault) -> Script:
        yield from self._pause(fault.at_s)
        scripts: dict[FaultKind, Callable[[Fault], Script]] = {
            FaultKind.KILLED: self._harvester_killed,
            FaultKind.STOPPED: self._harvester_stopped,
            FaultKind.HANDED_OVER: self._handed_over,
            FaultKind.BROKER_KILLED: self._broker_fails,
            FaultKind.BROKER_STOPPED: self._broker_fails,
            FaultKind.POSTGRES_RESTARTED: self._postgres_restarted,
            FaultKind.POSTGRES_CRASHED: self._postgres_restarted,
            FaultKind.CLOCK_OFF: self._clock_off,
            FaultKind.POISONED: self._poisoned,
            **dict.fromkeys(OF_KAFKA_LINKS | OF_POSTGRES_LINKS, self._link),
        }
        yield from scripts[fault.kind](fault)

    def _chosen(self, fault: Fault) -> Generator[None, None, HarvesterProcess]:
        """Choose the harvester of a fault; wait a while for one that leads."""
        if fault.harvester != LEADER:
            return self.harvesters[fault.harvester]
        deadline = time.monotonic() + LEADER_WITHIN_S
        while time.monotonic() < deadline:
            for process in self.harvesters:
                if process.leads and not process.is_held:
                    return process
            yield
        return self.chance.choice(self.harvesters)

    def _harvester_killed(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        yield from self._killed([process], fault.lasts_s)

    def _harvester_stopped(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        yield from self._stopped([process], fault.lasts_s)

    def _handed_over(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        yield from self._ended(process)
        yield from self._pause(fault.lasts_s)
        self._start_again(process)

    def _broker_fails(self, fault: Fault) -> Script:
        """Stop or kill a broker, mostly one that leads a partition to which the harvester writes."""
        topic = self.chance.choice((self.topics.notes, self.topics.leader, self.places.plain, None))
        broker = yield from self._broker(topic)
        fails = self._broker_killed if fault.kind is FaultKind.BROKER_KILLED else self._broker_stopped
        yield from fails(broker, fault.lasts_s)

    def _postgres_restarted(self, fault: Fault) -> Script:
        mode = "immediate" if fault.kind is FaultKind.POSTGRES_CRASHED else "fast"
        with suppress(subprocess.CalledProcessError):
            yield from self._aside(lambda: self.services.postgres.stop(mode))
        yield from self._pause(fault.lasts_s)
        with suppress(subprocess.CalledProcessError):  # another fault has already started it
            yield from self._aside(self.services.postgres.start)

    def _clock_off(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        process.clock.write_text(f"{fault.off_s:+d}s")
        yield from self._pause(fault.lasts_s)
        process.clock.write_text("+0")

    def _poisoned(self, fault: Fault) -> Script:
        for writer in self.writers:
            writer.poisons.set()
        yield from self._pause(fault.lasts_s)
        for writer in self.writers:
            writer.poisons.clear()

    def _link(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        proxy = (self.services.kafka if fault.kind in OF_KAFKA_LINKS else self.services.postgres).proxy
        is_cut = fault.kind in {FaultKind.KAFKA_CUT, FaultKind.POSTGRES_CUT}
        is_slow = fault.kind in {FaultKind.KAFKA_SLOW, FaultKind.POSTGRES_SLOW}
        state = LinkState(is_cut, fault.delay_s if is_slow else 0.0, fault.held)
        yield from self._link_fails(proxy, process.number, state, fault)

    # Results

    def _judge(self) -> Tally:
        tally = self.tally
        with psycopg.connect(self.services.postgres.dsn()) as connection:
            facts = read_truth(connection, self.places)
            parked = read_parked(connection, self.tables)
            waiting = read_waiting(connection, self.tables)
            tally.sessions = self.tables.registration(connection).session
        seen = self._read()
        tally.verdict = judge(facts, seen, parked, waiting)
        tally.rows, tally.poisoned = len(facts), sum(fact.is_poisoned for fact in facts)
        counted = self.counted
        tally.transactions, tally.rolled_back, tally.long = counted.committed, counted.rolled_back, counted.long
        terms = sorted(
            (line.fence, run_id)
            for run_id, lines in self._journals().items()
            for line in lines
            if line.fence is not None
        )
        if len({fence for fence, _ in terms}) < len(terms):
            self._fail("each term has a fence of its own", str(terms))
        tally.terms = len(terms)
        tally.takeovers = sum(one[1] != other[1] for one, other in pairwise(terms))
        if tally.verdict.violations:
            lines = [{"facts": [str(fact) for fact in facts]}, {"seen": seen}, {"parked": parked}]
            (self.folder / "evidence.json").write_text("\n".join(map(json.dumps, lines)))
        return tally

    def _read(self) -> list[Seen]:
        """Return the records that read_committed consumers get."""
        ends = {
            (topic, partition): bounds.end
            for topic, count in ((self.places.plain, 3), (self.places.small, 2))
            for partition, bounds in self.admin.offsets(topic, range(count), committed_only=False).items()
        }
        consumer = Consumer(
            {
                "bootstrap.servers": self.connection.bootstrap_servers,
                "group.id": "reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
                "log_level": 0,
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in ends])
        due = {place for place, end in ends.items() if end > 0}
        seen: list[Seen] = []
        deadline = time.monotonic() + WITHIN_S
        try:
            while due and time.monotonic() < deadline:
                for message in consumer.consume(1_000, 0.2):
                    place, error = (message.topic() or "", message.partition() or 0), message.error()
                    if error is None:
                        headers = dict(message.headers() or [])
                        key, row = message.key(), headers.get(ID_HEADER) or b""
                        seen.append(
                            Seen(
                                *place,
                                message.offset() or 0,
                                None if key is None else key.decode(),
                                name_of(message.value()),
                                row.decode() if isinstance(row, bytes) else row,
                            )
                        )
                    elif error.code() == KafkaError._PARTITION_EOF and (message.offset() or 0) >= ends[place]:
                        due.discard(place)
        finally:
            consumer.close()
        if due:
            self._fail("consumers of committed records get to the end", f"not in {due}")
        return seen
