"""One seed's run: an outbox with writers and harvesters, what befalls them, and what consumers read in the end."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import psycopg
from confluent_kafka import Consumer, KafkaError, TopicPartition

from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.topics import Topics
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.ports import ID_HEADER
from marshal_dagster.outbox.tables import OutboxTables
from marshal_dagster.postgres import Database
from tests.befalling import END_WITHIN_S, TICK_S, TOP, BefallenRun, Child, Failed, Script
from tests.fault_harness.proxy import FAIR, Weather
from tests.outbox_faults.cluster import Services
from tests.outbox_faults.judging import Seen, Verdict, judge
from tests.outbox_faults.scenario import (
    HARVESTERS,
    LEADER,
    OF_KAFKA_LINKS,
    OF_POSTGRES_LINKS,
    Fault,
    FaultKind,
    Scenario,
)
from tests.outbox_faults.worker import Orders
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

START_WITHIN_S: Final = 40.0
DRAIN_WITHIN_S: Final = 90.0
LEADER_WITHIN_S: Final = 3.0
READ_WITHIN_S: Final = 40.0
WHEREABOUTS_S: Final = 1.0
IN_THE_CLIENT: Final = re.compile(r'kafka/(transactions|clients)\.py", line \d+ in (__init__|producer|consumer)\n')
"""Where a harvester may be stuck whose clock was off (docs/faults.md)."""
COPIES: Final = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}


@dataclass(slots=True)
class Process(Child):
    """One of the harvesters, start after start."""

    number: int
    journal: Path
    errors: Path
    clock: Path

    @property
    def leads(self) -> bool:
        """Whether it believes that it leads, by its journal."""
        lines = self.lines()
        process = self.process
        return (
            bool(lines) and process is not None and lines[-1]["pid"] == process.pid and lines[-1]["fence"] is not None
        )

    def lines(self) -> list[dict[str, int | None]]:
        """Give its journal."""
        return [json.loads(line) for line in self.journal.read_text().splitlines()] if self.journal.exists() else []

    def whereabouts(self) -> str:
        """Ask it where its threads are."""
        before = self.errors.stat().st_size
        self.signal(signal.SIGUSR1)
        time.sleep(WHEREABOUTS_S)
        return self.errors.read_bytes()[before:].decode(errors="replace")


@dataclass(slots=True)
class Tally:
    """What a run came to."""

    verdict: Verdict = field(default_factory=Verdict)
    committed: int = 0
    poisoned: int = 0
    transactions: int = 0
    rolled_back: int = 0
    long: int = 0
    sessions: int = 0
    terms: int = 0
    takeovers: int = 0
    drained_after_s: float = 0.0


class Run(BefallenRun):
    """A seed's run, from its topics to its end; `folder` has what it leaves."""

    def __init__(self, of: Scenario, services: Services, folder: Path) -> None:
        super().__init__(of.seed, services.kafka)
        self.of = of
        self.services = services
        self.folder = folder
        stem = f"s{of.seed}_{os.urandom(3).hex()}"
        self.places = Places(stem, f"{stem}-plain", f"{stem}-small", f"{stem}-missing")
        self.tables = OutboxTables(Database(services.postgres.dsn()), stem)
        self.connection = KafkaConnection(bootstrap_servers=services.kafka.bootstrap_servers, timeout_s=30)
        self.processes = [
            Process(number, folder / f"journal{number}.jsonl", folder / f"stderr{number}", folder / f"clock{number}")
            for number in range(HARVESTERS)
        ]
        self.counted = Counted()
        self.writers = [
            Writer(number, services.postgres.dsn(), self.places, of.seed, self.counted) for number in range(of.writers)
        ]
        self.tally = Tally()

    def go(self) -> Tally:
        """Let it all happen, and judge."""
        self.folder.mkdir(parents=True)
        with Topics(self.connection) as topics:
            self._prepare(topics)
            try:
                self._live()
            except Failed as failed:
                self.wrong.append(f"it goes on: {failed}")
            finally:
                self._end()
            self._judge(topics)
            if not self.wrong:
                self._remove(topics)
        self.tally.verdict.violations[:0] = self.wrong
        return self.tally

    def _prepare(self, topics: Topics) -> None:
        standing = self.tables.create(notifies=self.chance.random() < 0.8)
        self.topics = OutboxTopics.of(standing.uid)
        self.topics.create(self.connection)
        topics.create(self.places.plain, 3, 3, COPIES)
        topics.create(self.places.small, 2, 3, {**COPIES, "max.message.bytes": str(SMALL_TOPIC_BYTES)})
        with psycopg.connect(self.services.postgres.dsn()) as connection:
            create_truth(connection, self.places)

    # What goes on all the time

    def _live(self) -> None:
        for process in self.processes:
            self._start(process)
        for writer in self.writers:
            writer.start()
        self._wait(lambda: any(process.leads for process in self.processes), START_WITHIN_S, "a first leader")
        self._play([self._befall(fault) for fault in self.of.faults])
        self._end_writers()
        self.services.repair()
        calm_s = time.monotonic()
        self._wait(self._is_drained, DRAIN_WITHIN_S, "all to be drained")
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
            if not writer.is_alive():
                continue
            writer.join(END_WITHIN_S)
            if writer.is_alive():
                self.wrong.append(f"the writers end: {writer.name} does not")
        self.wrong += [f"the writers write: {writer.failure!r}" for writer in self.writers if writer.failure]

    def _end(self) -> None:
        """End writers and harvesters, after which nothing changes any more."""
        self._end_writers()
        for process in self.processes:
            process.tell_to_end()
        for process in self.processes:
            if process.process is None:
                continue
            if not process.has_ended():
                where = process.whereabouts()
                if not (FaultKind.CLOCK_OFF in self.of.kinds and IN_THE_CLIENT.search(where)):
                    self.wrong.append(f"a harvester ends when told to: {process.number} does not, {where}")
                process.signal(signal.SIGKILL)
                process.process.wait()
            elif not process.is_held:
                self._check_exit(process)
        self._helpers.shutdown()

    def _tick(self) -> None:
        for process in self.processes:
            if not process.is_alive and not process.is_held:
                self._check_exit(process)
                self._start(process)
        time.sleep(TICK_S)

    def _check_exit(self, process: Process) -> None:
        if process.process is None:
            return
        code = process.process.returncode
        is_early = all(line["pid"] != process.process.pid for line in process.lines())
        if code != 0 and not (code == -signal.SIGTERM and is_early):
            said = process.errors.read_text()[-1_500:]
            self.wrong.append(f"nothing else goes wrong: harvester {process.number} ended with {code}: {said}")

    def _start(self, process: Process) -> None:
        if process.process is not None:
            process.process.wait()
        orders = Orders(
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
        process.clock.write_text("+0")
        with process.errors.open("ab") as errors:
            process.process = subprocess.Popen(
                [sys.executable, "-m", "tests.outbox_faults.worker", orders.model_dump_json()],
                cwd=TOP,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | (_fake_clock(process.clock) if FaultKind.CLOCK_OFF in self.of.kinds else {}),
            )
        process.is_held = False

    # What befalls it

    def _befall(self, fault: Fault) -> Script:
        yield from self._pause(fault.at_s)
        scripts: dict[FaultKind, Callable[[Fault], Script]] = {
            FaultKind.KILLED: self._killed,
            FaultKind.STOPPED: self._stopped,
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

    def _chosen(self, fault: Fault) -> Generator[None, None, Process]:
        """Choose the harvester that a fault befalls; the one that leads is waited for a while."""
        if fault.harvester != LEADER:
            return self.processes[fault.harvester]
        deadline = time.monotonic() + LEADER_WITHIN_S
        while time.monotonic() < deadline:
            for process in self.processes:
                if process.leads and not process.is_held:
                    return process
            yield
        return self.chance.choice(self.processes)

    def _whereabouts(self, child: Child) -> str:
        return f", {child.whereabouts()}" if isinstance(child, Process) else ""

    def _killed(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        process.is_held = True
        process.signal(signal.SIGKILL)
        yield from self._pause(fault.lasts_s)
        self._start(process)

    def _stopped(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        process.signal(signal.SIGSTOP)
        yield from self._pause(fault.lasts_s)
        process.signal(signal.SIGCONT)

    def _handed_over(self, fault: Fault) -> Script:
        process = yield from self._chosen(fault)
        process.is_held = True
        yield from self._until_dead(process, f"harvester {process.number}")
        yield from self._pause(fault.lasts_s)
        self._start(process)

    def _broker_fails(self, fault: Fault) -> Script:
        """Mostly one fails that leads what the harvester writes to."""
        topic = self.chance.choice((self.topics.notes, self.topics.leader, self.places.plain, None))
        broker = yield from self._broker(topic)
        fails = self._broker_killed if fault.kind is FaultKind.BROKER_KILLED else self._broker_stopped
        yield from fails(broker, fault.lasts_s)

    def _postgres_restarted(self, fault: Fault) -> Script:
        mode = "immediate" if fault.kind is FaultKind.POSTGRES_CRASHED else "fast"
        with suppress(subprocess.CalledProcessError):
            yield from self._aside(lambda: self.services.postgres.stop(mode))
        yield from self._pause(fault.lasts_s)
        with suppress(subprocess.CalledProcessError):  # another fault has started it
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
        weather = Weather(is_cut, fault.delay_s if is_slow else 0.0, fault.held)
        proxy.change(process.number, weather, delivers_late=fault.comes_late)
        yield from self._pause(fault.lasts_s)
        proxy.change(process.number, FAIR, delivers_late=fault.comes_late)

    # What it came to

    def _judge(self, topics: Topics) -> None:
        tally = self.tally
        with psycopg.connect(self.services.postgres.dsn()) as connection:
            facts = read_truth(connection, self.places)
            parked = read_parked(connection, self.tables)
            waiting = read_waiting(connection, self.tables)
            tally.sessions = self.tables.standing(connection).session
        seen = self._read(topics)
        tally.verdict = judge(facts, seen, parked, waiting)
        tally.committed, tally.poisoned = len(facts), sum(fact.is_poisoned for fact in facts)
        counted = self.counted
        tally.transactions, tally.rolled_back, tally.long = counted.committed, counted.rolled_back, counted.long
        terms = sorted(
            (line["fence"] or 0, line["pid"])
            for process in self.processes
            for line in process.lines()
            if line["fence"] is not None
        )
        if len({fence for fence, _ in terms}) < len(terms):
            self.wrong.append(f"each term has a fence of its own: {terms}")
        tally.terms = len(terms)
        tally.takeovers = sum(one[1] != other[1] for one, other in pairwise(terms))
        if tally.verdict.violations:
            lines = [{"facts": [str(fact) for fact in facts]}, {"seen": seen}, {"parked": parked}]
            (self.folder / "evidence.json").write_text("\n".join(map(json.dumps, lines)))

    def _read(self, topics: Topics) -> list[Seen]:
        """Read what consumers of committed records get."""
        ends = {
            (topic, partition): bounds.end
            for topic, count in ((self.places.plain, 3), (self.places.small, 2))
            for partition, bounds in topics.offsets(topic, range(count), committed_only=False).items()
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
        deadline = time.monotonic() + READ_WITHIN_S
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
            self.wrong.append(f"consumers of committed records get to the end: not in {due}")
        return seen

    def _remove(self, topics: Topics) -> None:
        for topic in (self.places.plain, self.places.small, self.topics.notes, self.topics.leader):
            with suppress(Exception):
                topics.delete(topic)


def _fake_clock(path: Path) -> dict[str, str]:
    """Give the environment of a process whose time of day is as far off as the file says."""
    found = importlib.util.find_spec("libfaketime")
    if found is None or found.origin is None:
        raise Failed("libfaketime is not installed")
    library = Path(found.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(path),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
