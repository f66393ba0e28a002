"""Test `outbox ...` as a user calls it, with fakes for the database, Kafka and the harvester."""

import logging
import os
import queue
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest

from marshal_dagster.cli import outbox, service
from marshal_dagster.election.rules import Term, Timing
from marshal_dagster.errors import MarshalError, TopicNotFoundError, UnavailableError
from marshal_dagster.kafka import topic_creation
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.outbox.backoff import HarvestLimits
from marshal_dagster.outbox.harvest import HarvestCounts
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.options import HarvesterOptions
from marshal_dagster.outbox.schema import OutboxRegistration, OutboxTables
from marshal_dagster.outbox.status import BlockingTransaction, OutboxStatus, ParkedRow
from tests.cli import Answer, call
from tests.conditions import WITHIN_S

SECRET = "canary-0c4e"
DSN = f"postgresql://user:{SECRET}@127.0.0.1:1/db"
UID = "0123456789abcdef"
AT = datetime(2026, 1, 31, 18, 0, 0, 250_000, UTC)
BROKERS = ("-b", "127.0.0.1:1")


@dataclass(slots=True)
class Box:
    """A fake database: rows that wait, rows that are set aside, and the calls made."""

    rows: int = 0
    aside: list[ParkedRow] = field(default_factory=list)
    requested: list[Any] = field(default_factory=list)
    leader: str | None = "host"
    blocked: list[BlockingTransaction] = field(default_factory=list)
    failure: UnavailableError | None = None

    def inspector(self, tables: OutboxTables) -> "Box":
        """Replace `OutboxInspector`."""
        self.requested.append((tables.schema, tables.name))
        return self

    def close(self) -> None:
        """Record that the connection was closed."""
        self.requested.append("closed")

    def status(self) -> OutboxStatus:
        """Return the status of the outbox."""
        if self.failure is not None:
            raise self.failure
        since, session = (None, 0) if self.leader is None else (AT, 3)
        age_s = 90.0 if self.rows else None
        return OutboxStatus(
            OutboxRegistration("outbox", UID, 1, session, self.leader), self.rows, age_s, len(self.aside), since
        )

    def blocking(self) -> list[BlockingTransaction]:
        """Return the transactions that harvesters wait for."""
        return self.blocked

    def parked(self, limit: int = 100, ids: Sequence[int] | None = None) -> list[ParkedRow]:
        """Return the rows that are set aside."""
        return [row for row in self.aside if ids is None or row.id in ids][:limit]

    def retry(self, ids: Sequence[int] | None) -> list[int]:
        """Remove rows, and return their ids."""
        gone = [row.id for row in self.aside if ids is None or row.id in ids]
        self.aside = [row for row in self.aside if row.id not in gone]
        return gone

    drop = retry


def row(number: int, key: bytes | None = b"k") -> ParkedRow:
    """Return a row that is set aside."""
    return ParkedRow(number, "orders", key, 12, f"too large \x1b[31m{number}", AT)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Box:
    """An outbox with two rows set aside, to which the variable points."""
    box = Box(aside=[row(7), row(9, b"\xf6")])
    monkeypatch.setattr(outbox, "OutboxInspector", box.inspector)
    monkeypatch.setenv("MARSHAL_OUTBOX_DSN", DSN)
    monkeypatch.delenv("MARSHAL_BOOTSTRAP_SERVERS", raising=False)
    return box


def act(capsys: pytest.CaptureFixture[str], *arguments: str) -> Answer:
    """Run `outbox ...`, and check that the password appears nowhere in its output."""
    answer = call(capsys, "outbox", *arguments)
    assert SECRET not in answer.out + answer.err
    return answer


def answers(monkeypatch: pytest.MonkeyPatch, agreed: bool) -> None:
    """Let the operator answer yes or no."""
    monkeypatch.setattr("typer.confirm", lambda *_, **__: agreed)


# The database


def test_without_a_database_it_says_which_variable_names_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with exit code 2 names first the way that hides the password from other users."""
    monkeypatch.delenv("MARSHAL_OUTBOX_DSN", raising=False)
    answer = act(capsys, "status")
    assert answer.code == 2
    assert answer.error.startswith("marshal-dagster: no database is specified: set MARSHAL_OUTBOX_DSN=")


def test_a_wrong_connection_string_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection string is hidden, whatever is wrong with it."""
    monkeypatch.setenv("MARSHAL_OUTBOX_DSN", f"password {SECRET}")
    answer = act(capsys, "status")
    assert (answer.code, "not a PostgreSQL connection string" in answer.error) == (2, True)


@pytest.mark.parametrize("arguments", [["--debug"], []])
def test_a_database_that_is_away_is_reported_without_its_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """The exit code is 3, with `--debug` too."""
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    answer = act(capsys, "status", "--dsn", DSN, *arguments)
    assert (answer.code, "PostgreSQL of outbox 'outbox'" in answer.err) == (3, True)


def test_without_psycopg_it_says_what_to_install(
    box: Box, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, with exit code 2."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    answer = act(capsys, "status")
    assert (answer.code, "pip install 'marshal-dagster[postgres]'" in answer.error) == (2, True)
    assert box.requested == []


# init


@dataclass(slots=True)
class Made:
    """What `init` has created."""

    notifies: list[bool] = field(default_factory=list)
    topics: list[tuple[str, str, int | None]] = field(default_factory=list)


@pytest.fixture
def made(box: Box, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Replace the creation of tables and topics."""
    del box
    made = Made()

    def create_tables(tables: OutboxTables, *, notifies: bool, forgets_target: bool) -> OutboxRegistration:
        assert not forgets_target
        made.notifies.append(notifies)
        return OutboxRegistration(tables.name, UID, 1, 0, None)

    def create_topics(topics: OutboxTopics, connection: KafkaConnection, replication: int | None) -> None:
        made.topics.append((topics.notes, connection.bootstrap_servers, replication))
        topic_creation.logger.warning("the brokers ignored min.insync.replicas=2")

    monkeypatch.setattr(OutboxTables, "create", create_tables)
    monkeypatch.setattr(OutboxTopics, "create", create_topics)
    return made


def test_init_makes_tables_and_topics(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """They are created in the schema named and with the replicas requested, and the output has their names."""
    answer = act(capsys, "init", "--name", "b", "--schema", "s", "--no-notify", "--replication", "2", *BROKERS)
    notes = f"__marshal_outbox_{UID}_notes"
    assert (answer.code, answer.err) == (0, "the brokers ignored min.insync.replicas=2\n")
    assert answer.out.splitlines() == [
        f"Outbox s.b (version 1, uid {UID}): the harvester polls for new rows",
        f"Topics __marshal_outbox_{UID}_leader and {notes} on 127.0.0.1:1",
    ]
    assert (made.notifies, made.topics) == ([False], [(notes, "127.0.0.1:1", 2)])


def test_init_without_a_kafka_makes_the_tables_alone(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """A line reports that no topics were created; in JSON they are null."""
    answer = act(capsys, "init")
    assert (answer.code, "no Kafka cluster is specified" in answer.error) == (0, True)
    reported = act(capsys, "init", "--json")
    assert (reported.err, reported.json["topics"], reported.json["notifies"]) == ("", None, True)
    assert (made.notifies, made.topics) == ([True, True], [])


# status, parked list, parked retry, parked delete


def test_status_is_for_people_and_programs(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """The status shows waiting rows, the oldest's age, rows set aside and the last harvester."""
    box.rows = 2
    answer = act(capsys, "status", "--schema", "s", "--name", "b")
    assert (answer.code, answer.err) == (1, ""), "a row waits for long"
    assert [line.split(maxsplit=1)[1].strip() for line in answer.out.splitlines()[1:4]] == [
        "2 rows, the oldest for 1 min 30 s",
        "aside  2 rows; `marshal-dagster outbox parked list --name b --schema s` shows why",
        "session 3, started by host at 2026-01-31 18:00:00.250Z",
    ]
    assert "GET /health of the harvester has its failure" in answer.out.splitlines()[4]
    assert box.requested == [("s", "b"), "closed"]
    assert act(capsys, "status", "--json").json == {
        "outbox": "outbox",
        "schema": "public",
        "uid": UID,
        "version": 1,
        "rows": 2,
        "oldest_age_s": 90.0,
        "parked": 2,
        "session": 3,
        "leader": "host",
        "cluster_id": None,
        "partitioner": None,
        "led_since": "2026-01-31T18:00:00.250000+00:00",
        "blocked_by": [],
    }


def test_a_transaction_that_blocks_the_harvester_is_shown(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """The status has the statement that ends it, also if the transaction blocks the command too."""
    box.rows = 2
    box.blocked = [
        BlockingTransaction(4711, "postgres", "psql", "idle in transaction", 400.0),
        BlockingTransaction(4712, None, None, None, None),
    ]
    lines = [
        "blocked by process 4711 of the database (user postgres, psql, idle in transaction, open for 6 min 40 s)",
        "this ends it, and undoes its changes: SELECT pg_terminate_backend(4711);",
        "blocked by process 4712 of the database",
        "this ends it, and undoes its changes: SELECT pg_terminate_backend(4712);",
    ]
    blocked = act(capsys, "status")
    assert (blocked.code, [line.strip() for line in blocked.out.splitlines()[4:]]) == (1, lines)
    assert [found["pid"] for found in act(capsys, "status", "--json").json["blocked_by"]] == [4711, 4712]
    box.failure = UnavailableError("locked")
    answer = act(capsys, "status")
    assert ([line.strip() for line in answer.out.splitlines()], answer.error) == (lines, "marshal-dagster: locked")
    answer = act(capsys, "status", "--json")
    assert answer.out == ""
    assert [line.strip() for line in answer.err.splitlines()] == [*lines, "marshal-dagster: locked"]


def test_an_outbox_that_nobody_harvested_says_so(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """The outbox has no rows either."""
    box.leader, box.aside = None, []
    out = act(capsys, "status").out
    assert ("waiting    0 rows\n" in out, "set aside  0 rows\n" in out, "harvested  never\n" in out) == (True,) * 3


def test_parked_rows_are_listed(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row has its reason, without characters that a terminal would interpret; a line reports further rows."""
    answer = act(capsys, "parked", "list")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[1] == r" 7  orders  k        12  2026-01-31 18:00:00.250Z  too large \x1b[31m7"
    assert act(capsys, "parked", "list", "-n", "1").error == "1 more; --limit shows them"
    reported = act(capsys, "parked", "list", "-n", "1", "--json").json
    assert (reported["parked"], [each["id"] for each in reported["rows"]]) == (2, [7])
    assert act(capsys, "parked", "list", "--json").json["rows"][1]["key"] == "\\xf6"
    box.aside = []
    assert act(capsys, "parked", "list").out == "No rows are set aside\n"


def test_rows_are_put_back(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows are put back by id, or all; an id that is not set aside is named, with exit code 1."""
    some = act(capsys, "parked", "retry", "9", "8")
    assert (some.code, some.out, [each.id for each in box.aside]) == (1, "1 row put back, to be published\n", [7])
    assert some.error.startswith("not set aside: 8;")
    rest = act(capsys, "parked", "retry", "--all", "--json")
    assert (rest.code, rest.json, box.aside) == (0, {"retried": [7], "missing": []}, [])
    assert act(capsys, "parked", "retry", "--all").out == "0 rows put back, to be published\n"


@pytest.mark.parametrize("agreed", [True, False])
def test_an_operator_agrees_to_what_is_deleted(
    box: Box, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, agreed: bool
) -> None:
    """The rows are shown first; without consent nothing is deleted."""
    answers(monkeypatch, agreed)
    answer = act(capsys, "parked", "delete", "7")
    assert "too large" in answer.out
    assert "9" not in [line.split()[0] for line in answer.out.splitlines()]
    assert (answer.code, [each.id for each in box.aside]) == ((0, [9]) if agreed else (1, [7, 9]))


def test_delete_does_not_ask_with_yes(
    box: Box, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON needs `--yes`; ids without a row are named and need no consent."""
    answers(monkeypatch, agreed=False)
    assert (act(capsys, "parked", "delete", "7", "--json").code, len(box.aside)) == (2, 2)
    done = act(capsys, "parked", "delete", "7", "8", "--yes", "--json")
    assert (done.code, done.json, [each.id for each in box.aside]) == (1, {"dropped": [7], "missing": [8]}, [9])
    none = act(capsys, "parked", "delete", "7")
    assert (none.code, none.out, none.error.startswith("not set aside: 7;")) == (1, "", True)


# harvest and drain


@dataclass(slots=True)
class Worker:
    """A fake harvester that works as a test specifies, until it is stopped."""

    work: Any = None
    name: str = "outbox"
    counts: HarvestCounts = field(default_factory=HarvestCounts)
    failure: MarshalError | None = None
    term: Term | None = None
    options: HarvesterOptions | None = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def made(self, _tables: OutboxTables, _connection: KafkaConnection, options: HarvesterOptions) -> "Worker":
        """Replace `Harvester`."""
        self.options = options
        return self

    def run(self) -> int:
        """Do the work, and return the number of published rows."""
        self.work()
        return self.counts.published

    drain = run

    def stop(self) -> None:
        """Request the end."""
        self.stopped.set()

    def health(self) -> dict[str, Any]:
        """Return a healthy state."""
        return {"healthy": True}


@pytest.fixture
def worker(box: Box, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A harvester that ends at once, unless a test specifies otherwise."""
    del box
    worker = Worker(work=lambda: None)
    monkeypatch.setattr(outbox, "Harvester", worker.made)
    return worker


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_has_the_harvester_hand_over(
    worker: Worker, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """The harvester is stopped and waited for, the exit code is 0, and the old signal handlers are restored."""
    before = signal.getsignal(number)

    def work() -> None:
        worker.term = Term(1, "id")
        worker.counts.published, worker.counts.sessions = 5, 1
        os.kill(os.getpid(), number)
        assert worker.stopped.wait(WITHIN_S)
        worker.counts.parked = 2

    worker.work = work
    answer = act(capsys, "harvest", *BROKERS)
    assert (answer.code, answer.out) == (0, "")
    assert answer.err.splitlines()[-1] == "outbox 'outbox': handed over; 5 rows published by this process, 2 set aside"
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_changes_of_role_are_lines_of_json(
    worker: Worker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harvester starts, is on standby, leads, is on standby again, and ends."""
    reported: queue.Queue[str] = queue.Queue()
    report_event = service.report_event

    def report(event: str, text: str, **fields: Any) -> None:  # noqa: ANN401 - JSON values
        report_event(event, text, **fields)
        reported.put(event)

    def work() -> None:
        assert reported.get(timeout=WITHIN_S) == "started"
        for term in (None, Term(1, "id"), None):
            worker.term = term
            assert reported.get(timeout=WITHIN_S) == ("standby" if term is None else "leader")

    monkeypatch.setattr(outbox, "report_event", report)
    worker.work = work
    answer = act(capsys, "harvest", "--json", *BROKERS)
    assert (answer.code, answer.err) == (0, "")
    assert [each["event"] for each in answer.lines] == ["started", "standby", "leader", "standby", "stopped"]
    assert {key: answer.lines[-1][key] for key in ("published", "parked", "sessions")} == {
        "published": 0,
        "parked": 0,
        "sessions": 0,
    }


@pytest.mark.parametrize("command", ["harvest", "drain"])
@pytest.mark.parametrize(("error", "code"), [(TopicNotFoundError("gone"), 5), (UnavailableError("away"), 3)])
def test_what_it_fails_with_is_reported(
    worker: Worker, capsys: pytest.CaptureFixture[str], command: str, error: MarshalError, code: int
) -> None:
    """The error is one line, with its exit code."""

    def work() -> None:
        raise error

    worker.work = work
    answer = act(capsys, command, *BROKERS)
    assert (answer.code, answer.err.splitlines()[-1]) == (code, f"marshal-dagster: {error}")


def test_what_the_harvester_warns_of_is_reported_each_time(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    """A service runs for long and the same problem may recur, so each warning appears on stderr."""

    def work() -> None:
        for part in ("outbox", "election", "kafka.transactions") * 2:
            logging.getLogger(f"marshal_dagster.{part}").warning("away")

    worker.work = work
    assert act(capsys, "harvest", *BROKERS).err.splitlines().count("away") == 6


def test_options_reach_the_harvester(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    """Each value is set by its option, in that option's unit."""
    given = ["--max-in-flight", "50", "--max-attempts", "3", "--poll-interval", "0.5", "--transaction-timeout", "20"]
    given += ["--topic-patience", "7", "--receive-deadline", "9", "--partitioner", "fnv1a"]
    assert act(capsys, "harvest", *given, *BROKERS).code == 0
    assert worker.options == HarvesterOptions(
        limits=HarvestLimits(max_in_flight_records=50, max_attempts=3, topic_patience_s=7),
        timing=Timing(receive_deadline_ms=9_000),
        poll_interval_s=0.5,
        transaction_timeout_s=20,
        partitioner="fnv1a",
    )
    worker.counts = HarvestCounts(published=1)
    assert act(capsys, "drain", *BROKERS).code == 0
    assert worker.options == HarvesterOptions()
    assert act(capsys, "drain", "--topic-patience", "7", "--partitioner", "fnv1a", *BROKERS).code == 0
    assert worker.options == HarvesterOptions(limits=HarvestLimits(topic_patience_s=7), partitioner="fnv1a")


@pytest.mark.slow
def test_health_is_off_unless_requested(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    """The address is reported; an invalid one is an error that names the option."""
    assert act(capsys, "harvest", "--json", *BROKERS).lines[0]["health"] is None
    assert act(capsys, "harvest", "--json", "--health", "0", *BROKERS).lines[0]["health"].startswith("127.0.0.1:")
    wrong = act(capsys, "harvest", "--health", "here", *BROKERS)
    assert (wrong.code, "--health: 'here' is not an address" in wrong.error) == (2, True)
    del worker


@pytest.mark.parametrize(("parked", "code"), [(0, 0), (2, 1)])
def test_drain_reports_what_was_published(
    worker: Worker, box: Box, capsys: pytest.CaptureFixture[str], parked: int, code: int
) -> None:
    """The exit code is 1 if rows were set aside."""
    box.aside = [row(number) for number in range(parked)]
    worker.counts = HarvestCounts(published=3, parked=parked)
    answer = act(capsys, "drain", *BROKERS)
    assert (answer.code, answer.out) == (code, f"3 rows published by this process, {parked} set aside\n")
    assert ("outbox parked list" in answer.err) == bool(parked)
    reported = act(capsys, "drain", "--json", *BROKERS)
    assert reported.json == {"published": 3, "parked": parked, "complete": True}


def test_rows_that_another_harvester_sets_aside_are_a_problem(
    worker: Worker, box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process publishes the other rows."""
    worker.counts = HarvestCounts(published=3)
    worker.work = lambda: box.aside.append(row(11))
    answer = act(capsys, "drain", *BROKERS)
    assert (answer.code, answer.out) == (1, "3 rows published by this process, 1 set aside\n")
    assert answer.err == "3 rows set aside; `marshal-dagster outbox parked list` shows why\n"


@pytest.mark.parametrize(("published", "code"), [(3, 0), (0, 1)])
def test_rows_that_were_set_aside_before_are_named(
    worker: Worker, capsys: pytest.CaptureFixture[str], published: int, code: int
) -> None:
    """They are a problem only if nothing was published, as in a run of the drain job."""
    worker.counts = HarvestCounts(published=published)
    answer = act(capsys, "drain", *BROKERS)
    assert (answer.code, answer.out) == (code, f"{published} rows published by this process, 0 set aside\n")
    assert answer.err == "2 rows set aside; `marshal-dagster outbox parked list` shows why\n"


def test_a_drain_that_is_interrupted_says_so(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    """The command completes the current step and exits with the code of an interrupt."""

    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert worker.stopped.wait(WITHIN_S)

    worker.work = work
    answer = act(capsys, "drain", "--json", *BROKERS)
    assert (answer.code, answer.json["complete"]) == (130, False)
    assert answer.error == "the command was stopped before all rows were published"


def test_a_partitioner_that_does_not_exist_is_reported(worker: Worker, capsys: pytest.CaptureFixture[str]) -> None:
    """The error lists the partitioners that exist."""
    answer = act(capsys, "harvest", "--partitioner", "java", *BROKERS)
    assert (answer.code, worker.options) == (2, None)
    assert "partitioner: 'java'; give murmur2_random or murmur2 or" in answer.err
