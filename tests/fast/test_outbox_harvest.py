"""The harvest over in-memory ports: the order of its steps, what waits after a refusal, and what is parked."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, count
from typing import Any, Self

import pytest
from greenlet import getcurrent, greenlet

from marshal_dagster.errors import ConfigurationError, MarshalError, UnavailableError
from marshal_dagster.kafka.connection import KafkaConnection
from marshal_dagster.kafka.transactions import RecordRejectedError
from marshal_dagster.outbox import publisher
from marshal_dagster.outbox.backoff import HarvestLimits, RefusalBackoff
from marshal_dagster.outbox.harvest import Harvest, HarvestCounts, LeadershipLostError
from marshal_dagster.outbox.harvester import OutboxTopics
from marshal_dagster.outbox.interfaces import (
    BatchTransaction,
    BatchUnsettledError,
    OrderingKey,
    Parked,
    PublishedBatch,
    PublisherFencedError,
    Row,
    RowRange,
    RowRejectedError,
    SessionSupersededError,
    TopicRejectedError,
    TransactionResult,
)
from marshal_dagster.outbox.publisher import is_note, read_note, render_note
from tests.members import raiser


def row(number: int, key: bytes | None = None, topic: str = "t", created_us: int = 0) -> Row:
    """Return a row, by default with its own key."""
    return Row(number, topic, b"%d" % number if key is None else key, b"value", None, created_us)


@dataclass
class Outbox:
    """A database and a Kafka cluster in memory."""

    rows: list[Row] = field(default_factory=list)
    parked: dict[int, str] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)
    """Rows that cannot be parked, because another row is parked under their id."""
    log: list[int] = field(default_factory=list)
    """The ids of the published rows, in order."""
    note: bytes = b""
    session: int = 0
    epoch: int = 0


class Ports:
    """The store and publisher of one session, with their calls. `refuse` is called before each batch and may raise."""

    def __init__(self, outbox: Outbox | None = None, *rows: Row) -> None:
        self.outbox = outbox or Outbox(list(rows))
        self.calls: list[Any] = []
        self.turns: list[BatchTransaction] = []
        self.missing: dict[str, str] = {}
        self.refuse: Callable[[Sequence[Row]], None] = lambda _: None
        self.before: Callable[[], None] = lambda: None
        self.store = Store(self)
        self.publisher = Publisher(self)
        self.epoch = 0

    def called(self, *call: object) -> None:
        """Record a call."""
        self.before()
        self.calls.append(call)

    def batches(self) -> list[list[int]]:
        """Return the row ids of each attempt to publish."""
        return [call[1] for call in self.calls if call[0] == "publish"]


def ids(ranges: Iterable[RowRange]) -> list[int]:
    """Return the ids of the rows of ranges."""
    return [number for rows in ranges for number in range(rows.first, rows.last + 1)]


def is_meant(found: Row, of: RowRange) -> bool:
    """Return whether a row is the one that was taken before, by the same rule as the statements of `PostgresStore`."""
    return of.first <= found.id <= of.last and of.created_from_us <= found.created_us <= of.created_until_us


class Store:
    """The database."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports

    def begin(self) -> int:
        """Start a session."""
        self._ports.called("store begins")
        self._ports.outbox.session += 1
        return self._ports.outbox.session

    def turn(self, session: int, turn: BatchTransaction) -> TransactionResult:
        """Delete and park rows, and return the next ones."""
        ports, outbox = self._ports, self._ports.outbox
        ports.called("turn", ids(turn.done.ranges), ids(each.row for each in turn.parked), turn.limit)
        if session != outbox.session:
            raise SessionSupersededError("deposed")
        ports.turns.append(turn)
        reasons = {each.row: each.reason for each in turn.parked if each.row.first not in outbox.stuck}
        parked = {each.id: reason for each in outbox.rows for of, reason in reasons.items() if is_meant(each, of)}
        outbox.parked |= parked
        before = len(outbox.rows)
        gone = [*turn.done.ranges, *reasons]
        outbox.rows = [each for each in outbox.rows if not any(is_meant(each, of) for of in gone)]
        free = [
            each
            for each in sorted(outbox.rows)
            if OrderingKey.of(each) not in turn.held_lanes and each.topic not in turn.held_topics
        ]
        return TransactionResult(free[: turn.limit], before - len(outbox.rows) - len(parked), len(parked))


class Publisher:
    """The Kafka side."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports

    def begin(self) -> None:
        """Start a session, or initialise the transaction again within it."""
        self._ports.called("publisher begins")
        self._ports.outbox.epoch += 1
        self._ports.epoch = self._ports.outbox.epoch

    def noted(self) -> PublishedBatch:
        """Return the last published batch."""
        self._ports.called("noted")
        return read_note(self._ports.outbox.note)

    def refused(self, topics: Collection[str]) -> dict[str, str]:
        """Return the topics that are missing."""
        self._ports.called("refused", sorted(topics))
        return {topic: self._ports.missing[topic] for topic in topics if topic in self._ports.missing}

    def publish(self, rows: Sequence[Row], settle: Callable[[], None]) -> None:
        """Publish a batch unless it is refused."""
        ports, ids = self._ports, [each.id for each in rows]
        ports.called("publish", ids)
        try:
            ports.refuse(rows)
        except (RowRejectedError, TopicRejectedError):
            self.begin()
            raise
        settle()
        if ports.epoch != ports.outbox.epoch:
            raise PublisherFencedError("fenced")
        ports.outbox.log += ids
        ports.outbox.note = render_note(PublishedBatch.of(rows))


@dataclass
class Clock:
    """A clock that a test sets. It can also advance by `step_ms` at each reading."""

    now_ms: float = 0.0
    step_ms: float = 0.0

    def __call__(self) -> float:
        """Return the time."""
        self.now_ms += self.step_ms
        return self.now_ms


def begun(
    ports: Ports,
    clock: Clock | None = None,
    leads: Callable[[], bool] = lambda: True,
    counts: HarvestCounts | None = None,
    **limits: float,
) -> Harvest:
    """Return a session that has started, with its calls cleared."""
    harvest = Harvest(
        ports.store,
        ports.publisher,
        limits=HarvestLimits(**{"topic_patience_s": 0, **limits}),  # type: ignore[arg-type]
        counts=counts or HarvestCounts(),
        now_ms=clock or Clock(),
        leads=leads,
    )
    harvest.begin()
    ports.calls.clear()
    return harvest


def refusing(*numbers: int, is_named: bool = True) -> Callable[[Sequence[Row]], None]:
    """Return a function that refuses batches with one of these rows."""

    def refuse(rows: Sequence[Row]) -> None:
        for each in rows:
            if each.id in numbers:
                raise RowRejectedError("too large", each.id if is_named else None)

    return refuse


def test_a_session_begins_in_the_database_then_at_kafkas_end_then_asks_what_was_published() -> None:
    """A session starts in the database, then in Kafka, and then reads the last note.

    Whatever an earlier session still starts in Kafka comes before this session's start there, which aborts it.
    """
    ports = Ports(Outbox([row(1), row(2)], note=render_note(PublishedBatch.of([row(1)]))))
    counts = HarvestCounts()
    harvest = Harvest(ports.store, ports.publisher, limits=HarvestLimits(), counts=counts, now_ms=Clock())
    assert ports.calls == []
    harvest.begin()
    assert ports.calls == [("store begins",), ("publisher begins",), ("noted",)]
    assert counts.sessions == 1


def test_the_rows_that_were_noted_are_struck_before_others_are_taken() -> None:
    """Rows in the last note are published already, so they are deleted before other rows are taken."""
    ports = Ports(Outbox([row(1), row(2)], note=render_note(PublishedBatch.of([row(1)]))))
    assert begun(ports).turn() == 1
    assert ports.outbox.log == [2]
    assert ports.calls[0] == ("turn", [1], [], HarvestLimits().max_in_flight_records)


def test_rows_that_were_found_published_are_counted() -> None:
    """A published row is counted once, by the session that deletes it, whichever session published it."""
    ports = Ports(None, row(1), row(2), row(3))
    counts = HarvestCounts()
    before = begun(ports, counts=counts, max_in_flight_records=2)
    before.turn()
    assert counts.published == 0
    after = begun(ports, counts=counts)
    after.turn()
    assert counts.published == 2
    after.finish()
    assert counts.published == 3
    begun(ports, counts=counts).turn()
    assert counts.published == 3


def test_a_turn_publishes_what_it_takes_and_the_next_strikes_it() -> None:
    """A turn publishes one batch in order of ids. The next turn deletes it."""
    ports = Ports(None, row(3), row(1), row(2))
    counts = HarvestCounts()
    harvest = begun(ports, counts=counts)
    assert harvest.turn() == 3
    assert ports.batches() == [[1, 2, 3]]
    assert ports.outbox.rows
    assert harvest.turn() == 0
    assert ports.outbox.rows == []
    assert counts == HarvestCounts(published=3, sessions=1)


@pytest.mark.parametrize("created_us", [5, 30])
@pytest.mark.parametrize("way", ["its own batch", "the note"])
def test_a_row_that_was_given_an_id_again_is_published(way: str, created_us: int) -> None:
    """A new row is published even if it has the id of a published one, as after `TRUNCATE ... RESTART IDENTITY`.

    The deletion also compares the times at which rows were written. The new row may be later, or earlier if its
    transaction started before.
    """
    ports = Ports(None, *(row(number, created_us=number * 10) for number in (1, 2)))
    harvest = begun(ports)
    harvest.turn()
    ports.outbox.rows = [row(1, created_us=created_us)]
    if way == "the note":
        harvest = begun(ports)
    assert harvest.turn() == 1
    assert ports.outbox.log == [1, 2, 1]
    harvest.turn()
    assert ports.outbox.rows == []


def test_a_row_with_the_id_of_a_refused_one_is_not_set_aside() -> None:
    """A new row with the id of a refused one is not parked, because it was never refused."""
    ports = Ports(None, row(1, created_us=10), row(2, created_us=11))
    harvest = begun(ports, max_attempts=1)

    def refuse(rows: Sequence[Row]) -> None:
        if len(rows) == 2:
            ports.outbox.rows = [row(1, created_us=20)]
            raise RowRejectedError("too large", 1)

    ports.refuse = refuse
    harvest.turn()
    harvest.turn()
    assert ports.outbox.parked == {}
    assert ports.outbox.log == [2, 1]


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"version":1}',
        b'{"version":true,"rows":[],"created_until_us":0}',
        b'{"version":"1","rows":[],"created_until_us":0}',
        b'{"version":0,"rows":[],"created_until_us":0}',
        b'{"version":1e3,"rows":[],"created_until_us":0}',
        b'{"version":1000000,"rows":[],"created_until_us":0}',
        b'{"version":1,"rows":7,"created_until_us":0}',
        b'{"version":1,"rows":[7],"created_until_us":0}',
        b'{"version":1,"rows":[[1,2,3]],"created_until_us":0}',
        b'{"version":1,"rows":[[2,1]],"created_until_us":0}',
        b'{"version":1,"rows":[[1,"2"]],"created_until_us":0}',
        b'{"version":1,"rows":[[0,1000000000000000000]],"created_until_us":0}',
        b'{"version":1,"rows":[[9223372036854775808,9223372036854775808]],"created_until_us":0}',
        b'{"version":1,"rows":[[1,1]]}',
        b'{"version":1,"rows":[[1,1]],"created_until_us":null}',
        b'{"version":1,"rows":[[1,1]],"created_until_us":1e400}',
        b'{"version":1,"rows":[[1,1]],"created_until_us":0,"created_from_us":"0"}',
    ],
)
def test_what_no_harvester_wrote_is_not_a_note(value: bytes | None) -> None:
    """A value that no harvester wrote is ignored. The session starts as if no batch had been published."""
    assert not is_note(value)
    assert read_note(value) == PublishedBatch()


def test_a_note_names_the_rows_of_its_batch() -> None:
    """A note contains the rows of its batch and the times between which they were written.

    A note without the earlier time matches all rows with these ids that were written before the later one.
    """
    rows = [row(number, created_us=number * 10) for number in (1, 2, 7)]
    note = render_note(PublishedBatch.of(rows))
    assert is_note(note)
    assert read_note(note).ranges == [RowRange(1, 2, 10, 70), RowRange(7, 7, 10, 70)]
    old = b'{"version":1,"rows":[[1,2]],"created_until_us":70}'
    assert read_note(old).ranges == [RowRange(1, 2, -(2**63), 70)]


def test_a_batch_has_a_range_for_each_time_and_each_gap_of_ids() -> None:
    """Rows with consecutive ids that were written at the same time are one range of the batch."""
    times = [(1, 10), (2, 10), (3, 11), (4, 11), (6, 11), (7, 10)]
    batch = PublishedBatch.of([row(number, created_us=created_us) for number, created_us in times])
    assert batch.ranges == [
        RowRange(1, 2, 10, 10),
        RowRange(3, 4, 11, 11),
        RowRange(6, 6, 11, 11),
        RowRange(7, 7, 10, 10),
    ]
    assert batch.row_count == len(times)
    assert PublishedBatch.of([]) == PublishedBatch([])


def test_runs_of_a_note_are_read_as_sorted_ranges_that_do_not_overlap() -> None:
    """The database looks an id up by a binary search, so that no row of an odd note may be missed."""
    runs = [[7, 9], [1, 2], [8, 8], [3, 3], [9, 12], [1, 1]]
    note = json.dumps({"version": 1, "rows": runs, "created_from_us": 5, "created_until_us": 6}).encode()
    assert is_note(note)
    assert read_note(note).ranges == [RowRange(1, 3, 5, 6), RowRange(7, 12, 5, 6)]


class NotelessTransaction:
    """A transaction whose note is refused."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take the arguments of `Transaction`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def send(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def send_many(self, _: object) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Refuse the note."""
        raise RecordRejectedError("note", "too large", is_too_large=True)


def test_no_row_is_set_aside_because_its_note_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter note may be accepted, but that of a single row is refused because of the topic of notes."""
    monkeypatch.setattr(publisher, "Transaction", NotelessTransaction)
    kafka = publisher.KafkaPublisher(KafkaConnection(bootstrap_servers="x:1"), "uid", "notes")
    kafka.begin()
    with pytest.raises(RowRejectedError) as refused:
        kafka.publish([row(1), row(2)], lambda: None)
    assert refused.value.row is None
    with pytest.raises(BatchUnsettledError, match=r"topic 'notes' refuses the note of row 1: too large"):
        kafka.publish([row(1)], lambda: None)


def test_no_row_is_published_to_a_topic_of_harvesters() -> None:
    """A row in the topic of notes could be a note of rows that were not published, which a session would delete."""
    kafka = publisher.KafkaPublisher(KafkaConnection(bootstrap_servers="x:1"), "uid", "notes")
    notes = OutboxTopics.of("uid").notes
    assert "is for harvesters alone" in kafka.refused([notes])[notes]


def test_a_note_of_a_newer_version_is_not_ignored() -> None:
    """A note of a newer version raises an error. Ignoring it would publish its batch twice."""
    note = b'{"version":2}'
    assert is_note(note)
    with pytest.raises(MarshalError, match="version 2, which a newer marshal-dagster wrote: update"):
        read_note(note)


def test_the_limits_are_those_of_a_turn() -> None:
    """A turn takes at most the configured rows and bytes. The next turn continues with the rest."""
    ports = Ports(None, *map(row, range(5)))
    harvest = begun(ports, max_in_flight_records=2, max_in_flight_bytes=77)
    assert [harvest.turn() for _ in range(4)] == [2, 2, 1, 0]
    assert ports.batches() == [[0, 1], [2, 3], [4]]
    assert {(turn.limit, turn.limit_bytes) for turn in ports.turns} == {(2, 77)}


def test_a_session_that_finishes_strikes_what_it_has_published() -> None:
    """`finish` deletes the published rows and takes no more. It does nothing if no row is to be deleted."""
    ports = Ports(None, row(1), row(2))
    harvest = begun(ports, max_in_flight_records=1)
    harvest.finish()
    assert ports.calls == []
    harvest.turn()
    harvest.finish()
    assert ports.calls[-1] == ("turn", [1], [], 0)
    assert [each.id for each in ports.outbox.rows] == [2]


def test_who_does_not_lead_any_more_publishes_nothing_more() -> None:
    """Leadership is checked before each batch, and a former leader publishes nothing more."""
    ports = Ports(None, *map(row, range(4)))
    answers = iter((True, True, False))
    harvest = begun(ports, leads=lambda: next(answers))
    ports.refuse = lambda rows: refusing(*range(4), is_named=False)(rows) if len(rows) > 2 else None
    with pytest.raises(LeadershipLostError):
        harvest.turn()
    assert ports.outbox.log == [0, 1]


@pytest.mark.parametrize(
    "error", [PublisherFencedError("later"), BatchUnsettledError("unknown"), UnavailableError("away")]
)
def test_a_batch_that_fails_ends_the_session_with_nothing_struck(error: Exception) -> None:
    """After a failed batch no row is deleted. The next session checks whether the batch was published."""
    ports = Ports(None, row(1))
    harvest = begun(ports)

    def fail(_: Sequence[Row]) -> None:
        raise error

    ports.refuse = fail
    with pytest.raises(type(error)):
        harvest.turn()
    harvest.finish()
    assert [each.id for each in ports.outbox.rows] == [1]


def test_a_deposed_session_publishes_nothing() -> None:
    """A session that was superseded in the database publishes nothing."""
    ports = Ports(None, row(1))
    harvest = begun(ports)
    ports.outbox.session += 1
    with pytest.raises(SessionSupersededError):
        harvest.turn()
    assert ports.batches() == []


def test_a_row_that_is_refused_is_left_out_with_its_successors_and_the_rest_flows_on() -> None:
    """Rows of the same key before the refused one are published, those after it wait, and other keys continue."""
    ports = Ports(None, row(1, b"k"), row(2, b"k"), row(3, b"other"), row(4, b"k"))
    clock = Clock()
    harvest = begun(ports, clock)
    ports.refuse = refusing(2)
    harvest.turn()
    assert ports.batches() == [[1, 2, 3, 4], [3]]
    harvest.turn()
    assert ports.turns[-1].held_lanes == [OrderingKey("t", b"k", None)]
    assert ports.outbox.log == [3]
    clock.now_ms = 1_000
    ports.refuse = lambda _: None
    harvest.turn()
    assert ports.outbox.log == [3, 1, 2, 4]


def test_a_lane_that_waits_holds_up_no_other() -> None:
    """Rows of a waiting ordering key are not taken, so they do not fill the batch."""
    ports = Ports(None, row(1, b"k"), *(row(number, b"k") for number in range(2, 9)), row(9), row(10))
    harvest = begun(ports, max_in_flight_records=2)
    ports.refuse = refusing(1)
    harvest.turn()
    assert harvest.turn() == 2
    assert ports.outbox.log == [9, 10]


def test_a_row_without_a_key_waits_alone() -> None:
    """A refused row without a key delays no other row."""
    ports = Ports(None, Row(1, "t", None, b"v"), Row(2, "t", None, b"v"))
    harvest = begun(ports)
    ports.refuse = refusing(1)
    harvest.turn()
    harvest.turn()
    assert ports.outbox.log == [2]
    assert ports.turns[-1].held_lanes == [OrderingKey("t", None, 1)]


def test_a_row_that_is_refused_too_often_is_set_aside_before_its_successors_go() -> None:
    """A row that is refused too often is parked with the reason before later rows of its key are published."""
    ports = Ports(None, row(1, b"k"), row(2, b"k"))
    clock, counts = Clock(), HarvestCounts()
    harvest = begun(ports, clock, counts=counts, max_attempts=3)
    ports.refuse = refusing(1)
    for _ in range(3):
        clock.now_ms += 10_000
        harvest.turn()
    assert ports.outbox.parked == {1: "too large (tried 3 times)"}
    assert ports.outbox.log == [2]
    assert ports.calls[-3:] == [("publisher begins",), ("publish", [2]), ("turn", [], [1], 0)]
    assert counts.refused == 3
    assert counts.parked == 1


def test_a_row_that_is_published_at_last_is_not_counted_against_its_successors() -> None:
    """Once a row is published, earlier refusals of its key do not count against later rows."""
    ports = Ports(None, row(1, b"k"))
    clock = Clock()
    harvest = begun(ports, clock, max_attempts=2)
    ports.refuse = refusing(1)
    harvest.turn()
    ports.refuse = refusing(2)
    clock.now_ms += 10_000
    harvest.turn()
    ports.outbox.rows.append(row(2, b"k"))
    harvest.turn()
    assert ports.outbox.log == [1]
    assert ports.outbox.parked == {}


def test_a_batch_is_halved_until_the_row_is_found_that_it_is_refused_for() -> None:
    """The batch is tried in halves, in order. Each part is deleted before the next one is committed."""
    ports = Ports(None, *map(row, range(1, 5)))
    harvest = begun(ports, max_attempts=1)
    ports.refuse = refusing(3, is_named=False)
    harvest.turn()
    assert ports.calls == [
        ("turn", [], [], HarvestLimits().max_in_flight_records),
        ("refused", ["t"]),
        ("publish", [1, 2, 3, 4]),
        ("publisher begins",),
        ("publish", [1, 2]),
        ("turn", [], [], 0),
        ("publish", [3, 4]),
        ("publisher begins",),
        ("publish", [3]),
        ("publisher begins",),
        ("publish", [4]),
        ("turn", [1, 2], [3], 0),
    ]


def test_the_only_row_of_a_batch_is_the_one_that_is_refused_whatever_is_named() -> None:
    """If a batch has one row, that row is the refused one, even if the error names another. So the halving ends."""
    ports = Ports(None, row(1))
    harvest = begun(ports, max_attempts=1)

    def refuse(_: Sequence[Row]) -> None:
        raise RowRejectedError("refused", 99)

    ports.refuse = refuse
    harvest.turn()
    harvest.turn()
    assert ports.outbox.parked == {1: "refused (tried 1 times)"}


def test_after_a_refusal_the_database_is_queried_for_the_session() -> None:
    """After a refusal the publisher has started again, which may have fenced a newer session.

    So the database is checked.
    """
    ports = Ports(None, row(1), row(2))
    harvest = begun(ports)

    def refuse(rows: Sequence[Row]) -> None:
        ports.outbox.session += 1
        refusing(1)(rows)

    ports.refuse = refuse
    with pytest.raises(SessionSupersededError):
        harvest.turn()
    assert (ports.batches(), ports.outbox.log) == ([[1, 2], [2]], [])


def test_refused_rows_cost_no_transaction_of_the_database_each() -> None:
    """The database is asked before a commit, and once for many refusals, which also sets their rows aside.

    A crash before that only repeats the attempts.
    """
    ports = Ports(None, *map(row, range(1_000)))
    before = begun(ports, max_attempts=1)
    ports.refuse = refusing(*range(999), is_named=False)
    attempts: list[int] = []
    crash = RuntimeError("crash")
    ports.before = lambda: attempts.append(1) if len(attempts) < 700 else raiser(crash)()
    with pytest.raises(RuntimeError):
        before.turn()
    parked = len(ports.outbox.parked)
    assert 100 < parked < 400
    assert (len(ports.outbox.rows), ports.outbox.log) == (1_000 - parked, [])
    ports.before = lambda: None
    ports.turns.clear()
    after = begun(ports, max_attempts=1)
    while after.turn():
        pass
    assert (sorted(ports.outbox.parked), ports.outbox.rows, ports.outbox.log) == ([*range(999)], [], [999])
    assert len(ports.turns) < 25


def test_a_superseded_session_notices_it_although_every_row_is_refused() -> None:
    """Each of its attempts fences the newer session."""
    ports = Ports(None, *map(row, range(1_000)))
    harvest = begun(ports)
    ports.refuse = refusing(*range(1_000), is_named=False)
    ports.outbox.session += 1
    harvest._holds.begin_turn()
    with pytest.raises(SessionSupersededError):
        harvest._publish(sorted(ports.outbox.rows))
    assert len(ports.batches()) == 100


def test_within_a_turn_no_row_gets_ahead_of_one_of_its_key_that_was_left_out() -> None:
    """A refused row's key waits until the next turn, however long the present turn takes."""
    ports = Ports(None, row(1, b"k"), row(2), row(3, b"k"), row(4))
    clock = Clock()
    harvest = begun(ports, clock)

    def refuse(rows: Sequence[Row]) -> None:
        clock.now_ms += 1_000
        if len(rows) == 4:
            raise RowRejectedError("one of them")
        refusing(1, is_named=False)(rows)

    ports.refuse = refuse
    harvest.turn()
    assert ports.batches() == [[1, 2, 3, 4], [1, 2], [1], [2], [4]]


def test_rows_of_a_topic_that_cannot_be_written_to_wait_and_are_set_aside_in_the_end() -> None:
    """Rows of a topic that cannot be written to wait and are parked in the end. Other rows continue."""
    ports = Ports(None, row(1, topic="gone"), row(2))
    clock, counts = Clock(), HarvestCounts()
    harvest = begun(ports, clock, counts=counts, max_attempts=2)
    ports.missing = {"gone": "it does not exist"}
    harvest.turn()
    assert ports.batches() == [[2]]
    assert harvest.turn() == 0
    assert ports.turns[-1].held_topics == ["gone"]
    clock.now_ms += 1_000
    harvest.turn()
    harvest.turn()
    assert ports.outbox.parked == {1: "it does not exist (tried 2 times)"}
    assert ports.outbox.log == [2]
    assert (counts.refused, counts.parked) == (2, 1)


def turn_each_second(harvest: Harvest, clock: Clock, turns: int) -> None:
    """Run turns with a second after each of them."""
    for _ in range(turns):
        harvest.turn()
        clock.now_ms += 1_000


def test_a_topic_is_waited_for_although_it_was_tried_often() -> None:
    """A topic that is being re-created, or is not known to all brokers yet, has no row parked for a while."""
    ports = Ports(None, row(1, topic="late"), row(2))
    clock = Clock()
    harvest = begun(ports, clock, max_attempts=2, topic_patience_s=30)
    ports.missing = {"late": "it does not exist"}
    turn_each_second(harvest, clock, 29)
    assert ports.outbox.parked == {}
    clock.now_ms += 1_000
    harvest.turn()
    harvest.turn()
    assert list(ports.outbox.parked) == [1]


def test_a_topic_is_looked_at_right_before_its_rows_are_set_aside() -> None:
    """If a topic exists when its rows are about to be parked, they are published instead."""
    ports = Ports(None, row(1, topic="late"))
    clock = Clock()
    harvest = begun(ports, clock, max_attempts=2, topic_patience_s=26)
    ports.missing = {"late": "it does not exist"}
    turn_each_second(harvest, clock, 25)
    ports.missing = {}
    turn_each_second(harvest, clock, 6)
    assert (ports.outbox.parked, ports.outbox.log) == ({}, [1])


def test_rows_that_cannot_be_set_aside_are_not_tried_without_end() -> None:
    """Rows that cannot be parked wait with their topic. Other rows continue, and those that can be parked are."""
    ports = Ports(Outbox([row(1, topic="gone"), row(2, topic="gone"), row(3)], stuck={1}))
    clock, counts = Clock(), HarvestCounts()
    harvest = begun(ports, clock, counts=counts, max_attempts=1)
    ports.missing = {"gone": "it does not exist"}
    assert [harvest.turn() for _ in range(3)] == [3, 0, 0]
    assert (list(ports.outbox.parked), ports.outbox.log, counts.parked) == ([2], [3], 1)
    clock.now_ms += 60_000
    assert [harvest.turn() for _ in range(3)] == [1, 1, 0]
    ports.missing = {}
    clock.now_ms += 60_000
    harvest.turn()
    assert ports.outbox.log == [3, 1]


def test_a_topic_that_is_made_in_time_has_its_rows_published_in_order() -> None:
    """Once a topic is created, its rows are published in order and its refusals are cleared."""
    ports = Ports(None, row(1, b"k", "late"), row(2, b"k", "late"))
    clock = Clock()
    harvest = begun(ports, clock, max_attempts=2)
    ports.missing = {"late": "it does not exist"}
    harvest.turn()
    ports.missing = {}
    clock.now_ms += 1_000
    harvest.turn()
    assert ports.outbox.log == [1, 2]
    ports.missing = {"late": "it is gone again"}
    ports.outbox.rows.append(row(3, b"k", "late"))
    harvest.turn()
    assert ports.outbox.parked == {}


def test_rows_that_are_set_aside_with_their_topic_are_not_published_in_a_long_turn() -> None:
    """Rows that are parked are not published in the same turn, even if their topic's wait ends before the batch."""
    ports = Ports(None, row(1, topic="gone"), row(2))
    harvest = begun(ports, Clock(step_ms=60_000), max_attempts=1)
    ports.missing = {"gone": "it does not exist"}
    harvest.turn()
    assert ports.outbox.log == [2]
    assert ports.outbox.parked == {1: "it does not exist (tried 1 times)"}


def test_a_topic_that_goes_while_a_batch_is_published_is_left_out_of_it() -> None:
    """If a topic disappears while a batch is published, the other rows are published.

    Before that, the database must confirm that the session is current.
    """
    ports = Ports(None, row(1, topic="gone"), row(2))
    harvest = begun(ports)

    def refuse(rows: Sequence[Row]) -> None:
        if rows[0].topic == "gone":
            raise TopicRejectedError("gone", "it is gone")

    ports.refuse = refuse
    harvest.turn()
    assert ports.calls[2:] == [("publish", [1, 2]), ("publisher begins",), ("publish", [2]), ("turn", [], [], 0)]


@pytest.mark.slow
def test_nothing_is_published_twice_however_two_sessions_meet_that_begin_anew() -> None:
    """Two sessions, interleaved in all ways, publish no row twice, although the older one is refused and restarts."""
    published = {meeting(places) for places in combinations_with_replacement(range(10), 4)}
    assert all(len(set(rows)) == len(rows) for rows in published)
    assert {(), (2, 3)} <= published


def meeting(places: tuple[int, ...]) -> tuple[int, ...]:
    """Run an older session's calls at these places between those of a newer one, and return the published rows."""
    outbox = Outbox([row(1), row(2), row(3)])
    old, new = Ports(outbox), Ports(outbox)
    harvest = begun(old)
    old.refuse = new.refuse = refusing(1)

    def go_on() -> None:
        with suppress(SessionSupersededError, PublisherFencedError):
            harvest.turn()

    older, here, numbers = greenlet(go_on), getcurrent(), count()
    old.before = here.switch
    while not old.batches():
        older.switch()

    def let_the_older_go_on() -> None:
        for _ in range(places.count(next(numbers))):
            older.switch()

    new.before = let_the_older_go_on
    with suppress(SessionSupersededError, PublisherFencedError):
        begun(new).turn()
    return tuple(outbox.log)


def test_waits_double_up_to_five_seconds() -> None:
    """The wait doubles with each consecutive refusal of an ordering key or a topic, up to five seconds."""
    clock = Clock()
    holds = RefusalBackoff(HarvestLimits(max_attempts=100), clock)
    waits = []
    for _ in range(8):
        holds.refuse(row(1), "reason")
        holds.refuse_topic("u", "reason")
        began_ms = clock.now_ms
        while holds.lanes():
            assert holds.topics() == ["u"]
            clock.now_ms += 100
            holds.begin_turn()
        assert holds.topics() == []
        waits.append(clock.now_ms - began_ms)
    assert waits == [200, 400, 800, 1_600, 3_200, 5_000, 5_000, 5_000]


def test_a_topic_is_not_looked_at_again_before_its_wait_is_over() -> None:
    """A refused topic is checked again after its wait, and its rows may be published then."""
    clock = Clock()
    holds = RefusalBackoff(HarvestLimits(max_attempts=3), clock)
    holds.refuse_topic("t", "reason")
    assert holds.is_checked("t")
    assert not holds.open_rows([row(1)])
    clock.now_ms = 200
    assert holds.is_checked("t")
    holds.begin_turn()
    assert not holds.is_checked("t")
    assert holds.open_rows([row(1)])


def test_a_topic_that_is_refused_for_good_has_its_rows_taken_to_be_set_aside() -> None:
    """The rows of a topic that was refused too often are parked until the topic can be written to again."""
    holds = RefusalBackoff(HarvestLimits(max_attempts=1, topic_patience_s=0), Clock())
    holds.refuse_topic("t", "reason")
    assert holds.topics() == []
    assert not holds.open_rows([row(1)])
    assert holds.to_park([row(1), row(2, topic="u")]) == [Parked(RowRange(1, 1, 0, 0), "reason (tried 1 times)")]
    holds.accept_topic("t")
    assert holds.to_park([row(1)]) == []
    assert holds.open_rows([row(1)])


def test_a_lane_is_free_again_once_its_row_is_set_aside() -> None:
    """After a row was parked, the refusals of the next row of its key are counted from zero."""
    holds = RefusalBackoff(HarvestLimits(max_attempts=2), Clock())
    assert holds.refuse(row(1, b"k"), "reason") is None
    assert not holds.open_rows([row(2, b"k")])
    assert holds.refuse(row(1, b"k"), "reason") == Parked(RowRange(1, 1, 0, 0), "reason (tried 2 times)")
    assert holds.open_rows([row(2, b"k")])
    assert holds.refuse(row(2, b"k"), "reason") is None


@pytest.mark.parametrize("patience_s", [-1, math.inf, math.nan])
def test_a_patience_that_cannot_be_is_refused(patience_s: float) -> None:
    """An impossible patience is rejected with the accepted values."""
    with pytest.raises(ConfigurationError, match=r"topic_patience_s is .*; it must be 0 or more"):
        HarvestLimits(topic_patience_s=patience_s)


@pytest.mark.parametrize("name", ["max_in_flight_records", "max_in_flight_bytes", "max_attempts"])
def test_limits_are_at_least_one(name: str) -> None:
    """Each limit must be at least 1, because with 0 no row would ever be taken or tried."""
    with pytest.raises(ConfigurationError, match=f"{name} is 0"):
        HarvestLimits(**{name: 0})
    assert getattr(HarvestLimits(**{name: 1}), name) == 1


def test_a_batch_has_no_more_rows_than_a_note_can_have() -> None:
    """A batch is limited to the rows that a note can contain, because readers ignore a larger note."""
    with pytest.raises(ConfigurationError, match="max_in_flight_records is 1000001; it must be from 1 to 1000000"):
        HarvestLimits(max_in_flight_records=1_000_001)
