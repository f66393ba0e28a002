"""The rules of the Delta sink, without Spark: a fake table compares and sets commit numbers as Delta does."""

import fcntl
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from pyspark import StorageLevel
from pyspark.errors import ParseException

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.protocol.idempotence import Verdict
from marshal_dagster.sinks import DeltaSink
from marshal_dagster.sinks.conformance import Case, Row, Target
from marshal_dagster.sinks.conformance.target import deliver, intervals, never, part, rows_of
from marshal_dagster.sinks.delta import sink as delta_sink
from marshal_dagster.sinks.delta.commit import Commit
from marshal_dagster.sinks.delta.place import DeltaPlace, delta_place
from marshal_dagster.sinks.delta.table import DeltaTable, alone_on_this_machine
from marshal_dagster.sinks.delta.transaction import TableState, rows_of_one_partition
from marshal_dagster.sinks.sink import Intervals
from marshal_dagster.sinks.upsert_keys import Keys
from tests.sink_conformance import shared
from tests.sink_kit import ALL_CASES, GROUP_CHECKS
from tests.sink_outputs import FakeFrame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MAKE = """
CREATE TABLE IF NOT EXISTS history (number INT PRIMARY KEY, metadata TEXT);
CREATE TABLE IF NOT EXISTS result (
    partition INT, "offset" INT, value TEXT,
    "group" TEXT, topic TEXT, data_topic_id TEXT, generation INT, first INT, "end" INT
);
"""
HERE = 'partition = ? AND "group" = ? AND topic = ? AND data_topic_id = ?'


@dataclass(frozen=True)
class FakeRows:
    """Rows without Spark."""

    has_offsets: bool
    rows: Sequence[tuple[Any, ...]]
    rejected: None = None

    @property
    def counts(self) -> dict[int | None, int]:
        """Rows by partition."""
        partitions = [row[0] for row in self.rows]
        return {partition: partitions.count(partition) for partition in partitions}

    def offsets(self) -> Mapping[int, Intervals]:
        """The offsets of all rows."""
        return intervals(self.rows) if self.has_offsets else {}


@dataclass(frozen=True)
class FakeWritten:
    """Rows that are not committed yet."""

    table: "FakeTable"
    rows: FakeRows
    taken: Sequence[ClaimedRange]
    written: Commit

    @property
    def counts(self) -> dict[int | None, int]:
        """Rows by partition."""
        return self.rows.counts

    def commit(self) -> TableState:
        """Commit, or raise if another commit has the number."""
        self.table.commit(self.rows, self.taken, self.written, {})
        if self.written.attempt not in {commit.attempt for commit in self.table.commits()}:
            raise OSError("another commit was first")
        return TableState(self.written.number, self.table.id)

    def is_current(self) -> bool:
        """Return whether the table has the id of the commit."""
        return self.table.id == self.written.table_id

    def discard(self) -> None:
        """Do nothing."""


class FakeTable:
    """A table in a SQLite file."""

    writes_first = False
    """Whether rows are written before they are committed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reported_properties: Mapping[str, str] = {}
        self.replaced: Mapping[ClaimedRange, Intervals] = {}
        self.id = "the first table"

    def table_id(self) -> str:
        """Return the table's id."""
        return self.id

    def reuse(self, known: object) -> None:
        """Do nothing: nothing is remembered."""

    def known(self, commit: Commit, state: TableState | None = None) -> None:
        """Return that nothing is remembered."""

    def known_unchanged(self, newest: Commit) -> None:
        """Return that nothing is remembered."""

    def written(
        self, frame: "DataFrame", done: Sequence[int], taken: Sequence[ClaimedRange], before: Commit, commit: Commit
    ) -> "FakeWritten | None":
        """Write the rows without a commit, if this table can."""
        newest = next(self.commits(), Commit())
        if not self.writes_first or newest.number != before.number or self.table_id() != commit.table_id:
            return None
        with self.evaluated(frame, done) as rows:
            return FakeWritten(self, rows, taken, commit)

    def check_partitions(self, frame: "DataFrame") -> None:
        """Do nothing: the table is not partitioned."""

    def refresh(self) -> None:
        """Do nothing: nothing is remembered."""

    def check_session(self) -> None:
        """Accept the session."""

    def check_merges(self) -> None:
        """Accept the session."""

    def prepare_merge(self, frame: "DataFrame", keys: Keys) -> None:
        """Accept the columns."""

    def repeated_keys(self, keys: Keys) -> int:  # noqa: ARG002
        """Return that each key has one row."""
        return 0

    def properties(self) -> Mapping[str, str]:
        """Return the properties that the test has set."""
        return self.reported_properties

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection of a transaction."""
        with closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            database.executescript(MAKE)
            database.execute("BEGIN IMMEDIATE")
            yield database

    def commits(self) -> Iterator[Commit]:
        """Yield all commits, the newest first."""
        with self.opened() as database:
            found = database.execute("SELECT metadata FROM history ORDER BY number DESC").fetchall()
        for (metadata,) in found:
            commit = Commit.from_metadata(metadata)
            if commit is not None:
                yield commit

    @contextmanager
    def evaluated(self, frame: "DataFrame", done: Sequence[int]) -> Iterator[FakeRows]:
        """Yield the rows of a local frame."""
        rows = [row.asDict() for row in frame.collect() if row["partition"] not in done]
        found = [(row["partition"], row.get("offset"), row["value"]) for row in rows]
        yield FakeRows("offset" in frame.columns, found)

    def held(self, ranges: Sequence[ClaimedRange], *, only_older: bool) -> list[tuple[ClaimedRange, int, bool]]:
        """Return the ranges that have rows, with their oldest generation."""
        with self.opened() as database:
            found = [
                (
                    each,
                    *database.execute(
                        f'SELECT min(generation), count(*) = count("offset") FROM result WHERE {HERE} '  # noqa: S608
                        'AND first < ? AND "end" > ? AND (generation < ? OR NOT ?)',
                        (*here(each), each.end, each.first_readable, each.generation, only_older),
                    ).fetchone(),
                )
                for each in ranges
            ]
        return [(each, generation, bool(whole)) for each, generation, whole in found if generation is not None]

    def older_offsets(self, ranges: Sequence[ClaimedRange]) -> Mapping[int, Intervals]:
        """Return the offsets of rows of older generations."""
        with self.opened() as database:
            return intervals(
                row
                for each in ranges
                for row in database.execute(
                    f'SELECT partition, "offset" FROM result WHERE {HERE} AND generation < ?',  # noqa: S608
                    (*here(each), each.generation),
                )
            )

    def commit(
        self, rows: FakeRows, taken: Sequence[ClaimedRange], commit: Commit, replaced: Mapping[ClaimedRange, Intervals]
    ) -> None:
        """Add the rows unless a commit has the same number."""
        self.replaced = replaced
        with self.opened() as database:
            (newest,) = database.execute("SELECT coalesce(max(number), 0) FROM history").fetchone()
            if newest >= commit.number:
                return
            database.execute("INSERT INTO history VALUES (?, ?)", (commit.number, commit.to_metadata()))
            for each, offsets in replaced.items():
                for start, end in offsets:
                    database.execute(
                        f"DELETE FROM result WHERE {HERE} AND generation < ? "  # noqa: S608
                        'AND "offset" >= ? AND "offset" < ?',
                        (*here(each), each.generation, start, end),
                    )
            for each in taken:
                of_range = (each.group, each.topic, each.data_topic_id, each.generation, each.first_readable, each.end)
                database.executemany(
                    "INSERT INTO result VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [(*row, *of_range) for row in rows.rows if row[0] == each.partition],
                )


def here(wanted: ClaimedRange) -> tuple[int, str, str, str]:
    """Return the values for `HERE`."""
    return wanted.partition, wanted.group, wanted.topic, wanted.data_topic_id


class FakeSink(DeltaSink):
    """A sink of such a table."""

    def __init__(self, path: Path, table: FakeTable | None = None, **options: Any) -> None:  # noqa: ANN401
        super().__init__(str(path), **options)
        self.fake = table or FakeTable(path)

    def _table(self) -> DeltaTable:
        return cast("DeltaTable", self.fake)


class DeltaTarget(Target):
    """A separate table."""

    most_steps = 20

    def __init__(self, folder: Path) -> None:
        self.table = FakeTable(folder / "table.db")

    def sink(self) -> DeltaSink:
        """Return the sink of another process."""
        return FakeSink(self.table.path)

    def shared_sink(self) -> DeltaSink:
        """Return the sink of another process, for several groups."""
        return shared(self.sink())  # type: ignore[no-any-return]

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        with self.table.opened() as database:
            return database.execute('SELECT partition, "offset", value FROM result').fetchall()


class WritingFirst(FakeTable):
    """A table whose rows are written before they are committed."""

    writes_first = True


class WritingFirstTarget(DeltaTarget):
    """A separate table, whose rows are written before they are committed."""

    def sink(self) -> DeltaSink:
        """Return the sink of another process."""
        return FakeSink(self.table.path, WritingFirst(self.table.path))


class UpsertTarget(DeltaTarget):
    """A separate table, in which each message has a key of its own."""

    def sink(self) -> DeltaSink:
        """Return the sink of another process."""
        return FakeSink(self.table.path, mode="upsert", keys=["partition", "offset"])


@pytest.fixture
def target(tmp_path: Path) -> DeltaTarget:
    """Return an empty table."""
    return DeltaTarget(tmp_path)


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_sink_conforms(case: Case, target: DeltaTarget) -> None:
    """Each case of the kit passes, also if a writer dies or stalls at any line of the sink."""
    case.check(target)


@pytest.mark.parametrize("case", ALL_CASES)
def test_the_sink_conforms_if_rows_are_written_first(case: Case, tmp_path: Path) -> None:
    """Each case passes too if rows that replace none are written before they are committed."""
    case.check(WritingFirstTarget(tmp_path))


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.id != "random_histories"])
def test_the_sink_conforms_with_one_row_for_each_key(case: Case, tmp_path: Path) -> None:
    """A table with one row for each key is written in the same steps; groups cannot share it."""
    case.check(UpsertTarget(tmp_path))


@pytest.mark.parametrize("check", GROUP_CHECKS)
def test_another_group(check: Callable[[Target], None], target: DeltaTarget) -> None:
    """An output belongs to one group and to those that continue it."""
    check(target)


class RespondingTable(FakeTable):
    """A table whose response to a commit is replaced."""

    def __init__(
        self, path: Path, respond: Callable[[Callable[[], None]], None], *, writes_first: bool = False
    ) -> None:
        super().__init__(path)
        self._respond = respond
        self.writes_first = writes_first

    def commit(
        self, rows: FakeRows, taken: Sequence[ClaimedRange], commit: Commit, replaced: Mapping[ClaimedRange, Intervals]
    ) -> None:
        """Respond as the test decides."""
        self._respond(lambda: FakeTable.commit(self, rows, taken, commit, replaced))


def write(
    target: DeltaTarget,
    respond: Callable[[Callable[[], None]], None],
    wanted: ClaimedRange,
    *,
    writes_first: bool = False,
) -> Any:  # noqa: ANN401
    """Write through a table that responds like this."""
    sink = FakeSink(target.table.path, RespondingTable(target.table.path, respond, writes_first=writes_first))
    return sink.write(target.frame(rows_of("a", wanted)), [wanted], never)


@pytest.mark.parametrize("writes_first", [False, True])
def test_a_commit_whose_answer_was_lost_counts(target: DeltaTarget, *, writes_first: bool) -> None:
    """The result of a commit is read from the table."""

    def lost(commit: Callable[[], None]) -> None:
        commit()
        raise OSError("connection lost")

    assert write(target, lost, part(0, 0, 3), writes_first=writes_first).taken == (part(0, 0, 3),)
    assert target.found() == rows_of("a", part(0, 0, 3))


@pytest.mark.parametrize("writes_first", [False, True])
def test_a_commit_that_fails_is_an_error(target: DeltaTarget, *, writes_first: bool) -> None:
    """If no other commit has the number, the error of Delta is raised."""

    def fails(_: Callable[[], None]) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(target, fails, part(0, 0, 3), writes_first=writes_first)
    assert target.found() == []
    assert deliver(target, "b", part(0, 0, 3)).taken


@pytest.mark.parametrize("writes_first", [False, True])
def test_one_that_was_too_late_judges_anew(target: DeltaTarget, *, writes_first: bool) -> None:
    """If another commit has the number, Delta raises an error or writes nothing. The range is then checked again."""
    for number, raises in enumerate((True, False)):
        mine = part(number, 0, 3)
        tries: list[str] = []

        def late(
            commit: Callable[[], None], mine: ClaimedRange = mine, tries: list[str] = tries, raises: bool = raises
        ) -> None:
            tries.append("commit")
            if len(tries) == 1:
                deliver(target, "other", part(mine.partition + 10, 0, 3))
                if raises:
                    raise RuntimeError("ConcurrentTransactionException")
                return
            commit()

        assert write(target, late, mine, writes_first=writes_first).taken == (mine,)
        assert len(tries) == 2


@pytest.mark.parametrize("writes_first", [False, True])
def test_a_table_that_changes_during_a_commit_is_judged_again(target: DeltaTarget, *, writes_first: bool) -> None:
    """Delta rejects the commit if another writer changed the schema, a property or the protocol meanwhile."""
    errors = ["[DELTA_METADATA_CHANGED] The metadata was changed", "[DELTA_PROTOCOL_CHANGED] The protocol was changed"]

    def changed(commit: Callable[[], None]) -> None:
        if errors:
            raise RuntimeError(errors.pop())
        commit()

    assert write(target, changed, part(0, 0, 3), writes_first=writes_first).taken == (part(0, 0, 3),)
    assert target.found() == rows_of("a", part(0, 0, 3))


def test_a_table_whose_log_was_cleaned_is_refused(target: DeltaTarget) -> None:
    """If Delta has our transaction but the history does not show our commits, nothing is written."""
    deliver(target, "a", part(0, 0, 3))
    with target.table.opened() as database:
        database.execute("UPDATE history SET metadata = NULL")
    with pytest.raises(SinkRejectedError, match="its history no longer shows"):
        deliver(target, "b", part(0, 0, 3, epoch=20))
    assert target.found() == rows_of("a", part(0, 0, 3))


def test_a_table_that_forgets_numbers_is_refused(target: DeltaTarget) -> None:
    """If Delta forgot the number, it would write a late commit in addition to the one with the same number."""
    deliver(target, "a", part(0, 0, 3))
    table = FakeTable(target.table.path)
    table.reported_properties = {"delta.setTransactionRetentionDuration": "interval 1 days"}
    sink, following = FakeSink(table.path, table), part(0, 3, 6)
    with pytest.raises(SinkRejectedError, match="UNSET TBLPROPERTIES"):
        sink.verdicts([following])
    with pytest.raises(SinkRejectedError, match="UNSET TBLPROPERTIES"):
        sink.write(target.frame(rows_of("b", following)), [following], never)
    assert target.found() == rows_of("a", part(0, 0, 3))


def test_a_table_for_appends_alone_takes_no_rows_away(target: DeltaTarget) -> None:
    """`can_replace` reports a table that is only for appends, before a position is set.

    A new generation over existing rows is rejected before it is read.
    """
    deliver(target, "a", part(0, 0, 3))
    table = FakeTable(target.table.path)
    table.reported_properties = {"delta.appendOnly": "true"}
    sink, over = FakeSink(table.path, table), part(0, 1, 3, generation=20, epoch=21)
    assert "delta.appendOnly" in str(sink.can_replace([over]))
    with pytest.raises(SinkRejectedError, match="unset it"):
        sink.verdicts([over])
    beyond = part(0, 3, 6, generation=20, epoch=21)
    assert sink.can_replace([beyond]) is None
    assert deliver(target, "b", beyond, sink=sink).taken


def replacing(target: DeltaTarget, old: Sequence[int], new: Sequence[int]) -> FakeTable:
    """Write rows at the offsets `old`, and in a new generation rows at the offsets `new`."""
    table, first = FakeTable(target.table.path), part(0, 0, 100)
    sink = FakeSink(table.path, table)
    sink.write(target.frame([(0, offset, "old") for offset in old]), [first], never)
    over, rows = part(0, 0, 100, generation=20, epoch=21), [(0, offset, "new") for offset in new]
    sink.write(target.frame(rows), [over], lambda: intervals(rows))
    kept = [(0, offset, "old") for offset in set(old) - set(new)]
    assert target.found() == sorted([*kept, *rows])
    return table


@pytest.mark.parametrize(
    ("old", "new", "replaced"),
    [
        (range(0, 100, 2), range(0, 100, 2), [(0, 99)]),
        (range(0, 100, 2), range(1, 100, 2), [(n, n + 1) for n in range(1, 100, 2)]),
        ([1, 50, 51, 99], [0, 2, 40, 60, 70], [(0, 1), (2, 41), (60, 71)]),
        ([1, 2, 3], [2, 8, 9], [(2, 3), (8, 10)]),
        ([30], [10, 20, 40], [(10, 21), (40, 41)]),
    ],
)
def test_gaps_in_which_no_row_stays_are_no_conditions(
    target: DeltaTarget, old: Sequence[int], new: Sequence[int], replaced: list[tuple[int, int]]
) -> None:
    """A compacted topic may have a gap at every other offset. One condition for each would take Spark minutes."""
    table = replacing(target, old, new)
    assert [list(each) for each in table.replaced.values()] == [replaced]


def test_rows_that_stay_at_too_many_places_are_refused(target: DeltaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that replaces too many intervals is rejected with advice, because Spark could not plan it."""
    monkeypatch.setattr(delta_sink, "MOST_INTERVALS", 49)
    with pytest.raises(
        SinkRejectedError, match=r"at 50 separate .* one commit can replace 49 intervals, .*max_records"
    ):
        replacing(target, range(0, 100, 2), range(1, 100, 2))
    assert {row[2] for row in target.found()} == {"old"}


def test_commits_of_others_are_passed_over(target: DeltaTarget) -> None:
    """Commits of other writers may have any text as metadata."""
    deliver(target, "a", part(0, 0, 3))
    with target.table.opened() as database:
        for number, text in enumerate((None, "", "a note", "3", "[]", '{"other": 1}'), 90):
            database.execute("INSERT INTO history VALUES (?, ?)", (number, text))
    assert deliver(target, "b", part(0, 0, 3, epoch=20)).skipped


def test_commits_of_a_newer_version_are_refused() -> None:
    """Older code must not read newer commits as its own."""
    with pytest.raises(SinkRejectedError, match="has version 4, but this marshal-dagster supports only 3"):
        Commit.from_metadata(json.dumps({"marshal-dagster": {"version": 4}}))


def test_a_table_with_one_row_for_each_key_stores_its_keys_and_where_generations_began() -> None:
    """A new generation is refused by them; commits of tables to which rows are added have the former version."""
    keys = Keys(("id",), "version")
    first = Commit().then("a", [part(0, 5, 9), part(1, 0, 3)], "id", keys)
    second = first.then("b", [part(0, 9, 12), part(1, 1, 3, generation=2, epoch=20)], "id", keys)
    third = second.then("c", [part(0, 7, 9, generation=3, epoch=30), part(1, 2, 3, generation=3, epoch=30)], "id", keys)
    last = third.then("d", [part(0, 9, 12, generation=3, epoch=30)], "id", keys)
    assert Commit.from_metadata(last.to_metadata()) == last
    assert [(kept.began, kept.older_began) for kept in last.kept.values()] == [(7, 5), (2, 0)]
    other = replace(part(0, 1, 3, generation=4, epoch=40), data_topic_id="re-created")
    assert last.kept["g", "t", 0].then(other).older_began is None
    assert json.loads(last.to_metadata())["marshal-dagster"]["version"] == 3
    appended = replace(last, keys=None).to_metadata()
    assert json.loads(appended)["marshal-dagster"]["version"] == 2
    assert "began" not in appended


class RememberedTable(FakeTable):
    """A table whose id is read once, as that of a real table."""

    remembered: str | None = None

    def table_id(self) -> str:
        """Return the id that was read first."""
        self.remembered = self.remembered or self.id
        return self.remembered

    def refresh(self) -> None:
        """Read the id again."""
        self.remembered = None


@pytest.mark.parametrize("writes_first", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_table_that_is_created_again_while_a_batch_is_computed(
    target: DeltaTarget, number: int, *, writes_first: bool
) -> None:
    """The commit has the new table's id. Otherwise each later batch would be refused."""
    table = RememberedTable(target.table.path)
    table.writes_first = writes_first
    sink, wanted = FakeSink(table.path, table), part(0, 3 * number, 3 * number + 3)
    if number:
        deliver(target, "a", part(0, 0, 3), sink=sink)

    def created_again() -> None:
        with table.opened() as database:
            database.execute("DELETE FROM history")
            database.execute("DELETE FROM result")
        table.id = "the second table"

    sink.write(target.frame(rows_of("b", wanted)), [wanted], never, created_again)
    assert next(table.commits()).table_id == "the second table"
    assert sink.verdicts([wanted]) == {wanted: Verdict.SKIP}
    assert target.found() == rows_of("b", wanted)


def test_options_of_upserts_that_contradict_each_other() -> None:
    """As with the sinks of databases."""
    for options, match in (
        ({"keys": ["id"]}, "belong to mode='upsert'"),
        ({"mode": "upsert"}, "needs a list of the key's columns"),
        ({"mode": "upsert", "keys": ["id"], "order_by": "id"}, "decides nothing"),
        ({"mode": "upsert", "keys": ["id"], "shared_by_groups": True}, "cannot be combined"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            DeltaSink("/data/customers", **cast("dict[str, Any]", options))


def test_commits_of_the_version_before_are_read() -> None:
    """Commits of version 1, in which each partition has all fields, are read."""
    commit = Commit(7).then("attempt", [part(0, 0, 4), part(3, 0, 9, generation=5, epoch=9)])
    positions = [
        {"group": group, "topic": topic, "partition": partition, "first_generation": each.first_generation}
        | asdict(each.position)
        for (group, topic, partition), each in commit.kept.items()
    ]
    said = {"version": 1, "number": 8, "attempt": "attempt", "positions": positions}
    assert Commit.from_metadata(json.dumps({"marshal-dagster": said})) == commit


@pytest.mark.thorough
def test_a_commit_says_in_common_what_partitions_have_in_common() -> None:
    """A commit stores common values once, because each file of the table's log has all partitions of the output."""
    taken = [part(number, 0, 1_000_000, epoch=1_000_000) for number in range(4_096)]
    commit = Commit().then("a" * 32, taken)
    assert len(commit.to_metadata()) < 4_096 * 25
    assert Commit.from_metadata(commit.to_metadata()) == commit


def test_what_a_commit_says_is_read_back() -> None:
    """A commit is read back equal, also if names contain characters that JSON escapes."""
    taken = [part(0, 2**62, 2**63 - 1, group='a "group"', topic="t"), part(3, 0, 0, generation=5, epoch=9)]
    commit = Commit(7).then("attempt", taken)
    assert Commit.from_metadata(commit.to_metadata()) == commit
    assert commit.number == 8
    assert commit.table_id is None
    later = commit.then("next", [part(3, 0, 4, generation=9, epoch=10)], "an id")
    assert Commit.from_metadata(later.to_metadata()) == later
    assert later.kept["g", "t", 3].first_generation == 5


def test_options_that_are_the_sinks_own_are_refused() -> None:
    """Options that the sink uses for its own commits are rejected."""
    with pytest.raises(ConfigurationError, match="txnversion"):
        DeltaSink("/out", options={"txnVersion": "1"})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"path": ""}, "path is empty; give path"),
        ({}, "neither path nor table"),
        ({"path": "/out", "table": "a.b"}, "both path and table"),
        ({"table": ""}, "give catalog.schema.table"),
        ({"table": "orders"}, "give catalog.schema.table"),
        ({"table": "shop..orders"}, "give catalog.schema.table"),
        ({"table": "shop.`orders"}, "give catalog.schema.table"),
        ({"table": "shop.orders."}, "give catalog.schema.table"),
        ({"table": "shop.`a`b"}, "give catalog.schema.table"),
        ({"table": "Delta.`/data/orders`"}, "is a path to Spark"),
    ],
)
def test_a_table_has_a_path_or_a_name(given: dict[str, Any], match: str) -> None:
    """Exactly one of them, and a name has a schema."""
    with pytest.raises(ConfigurationError, match=match):
        DeltaSink(**given)


def test_names_of_tables() -> None:
    """A part with a dot or a backquote is quoted, and each part is quoted in statements."""
    place = delta_place(None, "Main.my shop.`or.d``ers`")
    assert place.name == ("Main", "my shop", "or.d`ers")
    assert (str(place), place.sql) == ("Main.my shop.`or.d``ers`", "`Main`.`my shop`.`or.d``ers`")
    assert place.schema == "`Main`.`my shop`"
    assert repr(DeltaSink(table="shop.orders")) == "DeltaSink(table='shop.orders')"
    assert delta_place("/a`b", None).sql == "delta.`/a``b`"


def test_a_table_that_was_created_again_under_its_writers_is_refused(target: DeltaTarget) -> None:
    """Its newest commit has positions of the former table. Without such a commit the table is a new output."""
    deliver(target, "a", part(0, 0, 3))
    deliver(target, "a", part(1, 0, 3))
    table = FakeTable(target.table.path)
    table.id = "another table"
    sink, following = FakeSink(table.path, table), part(0, 3, 6)
    for call in (lambda: sink.verdicts([following]), lambda: sink.can_replace([following])):
        with pytest.raises(SinkRejectedError, match="dropped and re-created"):
            call()
    with pytest.raises(SinkRejectedError, match="dropped and re-created"):
        sink.write(target.frame(rows_of("b", following)), [following], never)
    with target.table.opened() as database:
        database.execute("DELETE FROM history")
        database.execute("DELETE FROM result")
    assert deliver(target, "c", following, sink=sink).taken == (following,)
    assert target.found() == rows_of("c", following)


class TypedSettings(dict[str, str]):
    """Settings of a session. As Spark does, it rejects a default that has not the type of the setting."""

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - as a dictionary's
        """Return the value of a setting."""
        assert not name.startswith("spark.sql.ansi.") or default in {"true", "false"}
        return super().get(name, default)


class S3Session:
    """A session with these settings."""

    def __init__(self, **settings: str) -> None:
        self.conf = TypedSettings({name.replace("_", "."): value for name, value in settings.items()})


@pytest.mark.parametrize(
    ("path", "location", "settings", "is_refused"),
    [
        ("s3a://bucket/orders", "", {}, True),
        ("S3://bucket/orders", "", {"spark_delta_logStore_s3a_impl": "x"}, True),
        ("s3a://bucket/orders", "", {"spark_delta_logStore_s3a_impl": "x"}, False),
        ("s3://bucket/orders", "", {"spark_databricks_clusterUsageTags_clusterId": "1"}, False),
        ("hdfs://host/orders", "", {}, False),
        ("/data/s3/orders", "file:/data/s3/orders", {}, False),
        ("/data/orders", "s3a://default/data/orders", {}, True),
    ],
)
def test_a_table_on_s3_needs_a_log_store_for_many_writers(
    monkeypatch: pytest.MonkeyPatch, path: str, location: str, settings: Mapping[str, str], is_refused: bool
) -> None:
    """Delta's default for S3 loses commits of a second writer. A path can be on S3 by Spark's default file system."""
    table = DeltaTable(cast("Any", S3Session(**settings)), DeltaPlace(path), {})
    monkeypatch.setattr(table, "_detail", lambda: {"location": location})
    with pytest.raises(ConfigurationError, match=r"spark.delta.logStore.s3a?.impl") if is_refused else nullcontext():
        table.check_session()


@pytest.mark.parametrize("is_ansi", ["true", "false"])
def test_reserved_names_are_refused(monkeypatch: pytest.MonkeyPatch, is_ansi: str) -> None:
    """Delta itself cannot read the statistics of the column `offset` then. Without ANSI the setting has no effect."""
    session = S3Session(spark_sql_ansi_enabled=is_ansi, spark_sql_ansi_enforceReservedKeywords="true")
    table = DeltaTable(cast("Any", session), DeltaPlace("/out"), {})
    monkeypatch.setattr(table, "_detail", lambda: None)
    with pytest.raises(ConfigurationError, match="Set it to false") if is_ansi == "true" else nullcontext():
        table.check_session()


def test_the_table_is_requested_in_a_session() -> None:
    """Without a Spark session, the error advises to start one."""
    sink = DeltaSink("/out", session=None)
    with pytest.raises(ConfigurationError, match="start one before the batch is claimed"):
        sink.verdicts([part(0, 0, 3)])


def test_a_session_without_delta_is_reported() -> None:
    """Spark without Delta raises a syntax error, which becomes a configuration error."""

    class PlainSession:
        def sql(self, _: str) -> None:
            raise ParseException("Syntax error at or near 'LIMIT'", errorClass="PARSE_SYNTAX_ERROR")

    sink = DeltaSink("/out", session=PlainSession)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="start it with `delta_settings`"):
        sink.verdicts([part(0, 0, 3)])


def test_upserts_need_a_second_session() -> None:
    """Spark Connect has none."""
    session = cast("Any", type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"}))()
    sink = DeltaSink("/out", session=lambda: session, mode="upsert", keys=["id"])
    with pytest.raises(ConfigurationError, match=r"needs a second session.*Use a session without Spark Connect"):
        sink.verdicts([part(0, 0, 3)])


class RecordingSession:
    """A session whose tables have no rows until one is added; it records the statements."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.statements: list[str] = []

    def sql(self, statement: str) -> "RecordingSession":
        """Record a statement."""
        self.statements.append(statement)
        return self

    def collect(self) -> list[dict[str, Any]]:
        """Return the rows."""
        return self.rows


def test_the_details_of_a_table_are_read_once_it_exists() -> None:
    """A table that another process creates meanwhile is found. Then one statement serves all questions."""
    session = RecordingSession()
    table = DeltaTable(cast("Any", session), DeltaPlace("/out"), {})
    frame = cast("Any", FakeFrame(["value"], ()))
    assert (table.properties(), table._partition_strings(frame)) == ({}, [])
    session.rows.append({"properties": {"a": "b"}, "partitionColumns": ["Value"]})
    assert (table.properties(), table._partition_strings(frame)) == ({"a": "b"}, ["value"])
    assert table._exists()
    assert session.statements == ["DESCRIBE DETAIL delta.`/out`"] * 3


@pytest.mark.parametrize("scheme", ["{}", "file:{}", "file://{}", "file://localhost{}"])
def test_a_local_table_has_one_writer_at_a_time(scheme: str, tmp_path: Path) -> None:
    """The lock is the same for each spelling of the path, and the folder need not exist yet."""
    table = tmp_path / "a b"
    with (
        alone_on_this_machine(scheme.format(table)),
        (table / "_marshal_dagster.lock").open() as other,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_where_a_lock_is_not_a_local_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For another file system no local lock is created. A path that cannot be created here may be on another one."""
    monkeypatch.chdir(tmp_path)
    for path in ("hdfs://h/data", "s3a://b/data", "/proc/no/such/place"):
        with alone_on_this_machine(path):
            pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="/proc/no"), alone_on_this_machine("file:/proc/no/such/place"):
        raise AssertionError


class KeptFrame:
    """A frame without rows that records its calls."""

    storageLevel = StorageLevel.NONE  # noqa: N815 - as Spark's

    def __init__(self) -> None:
        self.requested: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: object) -> Any:  # noqa: ANN401 - as Spark's
            self.requested.append(name)
            return [] if name == "collect" else self

        return call


@pytest.mark.parametrize(("error", "is_left"), [(None, False), (OSError, False), (KeyboardInterrupt, True)])
def test_after_an_interrupt_the_jvm_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None, *, is_left: bool
) -> None:
    """After an interrupt the JVM would answer only when its present work ends.

    Otherwise the cached rows are released.
    """
    frame: Any = KeptFrame()
    monkeypatch.setattr(DeltaTable, "_partition_strings", lambda *_: [])
    table = DeltaTable(cast("Any", None), DeltaPlace("/out"), {})
    with nullcontext() if error is None else pytest.raises(error), table.evaluated(frame, []) as rows:
        assert rows.counts == {}
        if error is not None:
            raise error
    assert frame.requested == ["persist", "groupBy", "count", "collect", *([] if is_left else ["unpersist"])]


class ListedTable(DeltaTable):
    """A table with this history, whose details are counted when they are read."""

    def __init__(self, history: Sequence[str | None]) -> None:
        super().__init__(cast("Any", None), DeltaPlace("/out"), {})
        self.history, self.read = history, list[str]()

    def _described(self, what: str, limit: str = "") -> list[Any]:
        self.read.append(what)
        if what == "HISTORY":
            return [{"userMetadata": metadata} for metadata in self.history[: 20 if limit else None]]
        return [{"id": "an id", "properties": {"a": "b"}}]


def test_details_are_read_again_after_another_writers_commit() -> None:
    """Delta reads the whole state of the table for them. Commits of sinks change none of them."""
    commits = [Commit()]
    for attempt in ("a", "b", "c"):
        commits.append(commits[-1].then(attempt, [part(0, 3 * len(commits) - 3, 3 * len(commits))]))
    own = [commit.to_metadata() for commit in reversed(commits[1:])]
    first = ListedTable(own)
    assert first.table_id() == "an id"
    for history, is_read in (
        (own, False),
        ([None, *own], True),
        ([own[0], None, *own[1:]], True),
        ([*own, None], False),
        (own[:1], True),
        ([], True),
    ):
        table = ListedTable(history)
        table.reuse(first.known(commits[2]))
        assert [commit.number for commit in table.commits()] == [
            commit.number for commit in map(Commit.from_metadata, history) if commit is not None
        ]
        assert table.properties() == {"a": "b"}
        assert table.read.count("DETAIL") == is_read, history
        assert table.read.count("HISTORY") == (1 if history else 2)
        assert [commit.number for commit in table.commits()][:1] == [3] * bool([*filter(None, history)])
        assert table.read.count("HISTORY") == (2 if history else 3)
    assert ListedTable(own).known(commits[2]) is None


@pytest.mark.parametrize(
    ("lowest", "highest", "nulls", "found"),
    [(3, 3, 0, (3, 5)), (3, 4, 0, None), (3, 3, 1, None), (None, None, 0, None)],
)
def test_rows_are_counted_by_deltas_statistics(
    lowest: int | None, highest: int | None, nulls: int, found: tuple[int, int] | None
) -> None:
    """Only if they show that all rows of the file are of one partition."""
    values = {"minValues": lowest, "maxValues": highest, "nullCount": nulls}
    statistics = {"numRecords": 5, **{name: {"partition": value} for name, value in values.items()}}
    assert rows_of_one_partition(json.dumps({"add": {"path": "a", "stats": json.dumps(statistics)}})) == found


@pytest.mark.parametrize("added", [{}, {"stats": None}, {"stats": '{"numRecords": 5}'}])
def test_files_without_statistics_are_read(added: Mapping[str, Any]) -> None:
    """A table can be without statistics, or without those of the column."""
    assert rows_of_one_partition(json.dumps({"add": {"path": "a", **added}})) is None


class KnownLog:
    """Delta's log of a table with this version."""

    def __init__(self, version: int) -> None:
        self.version = version

    def state(self) -> TableState:
        """Return the version."""
        return TableState(self.version, "an id")

    def detail(self) -> dict[str, Any]:
        """Return the details."""
        return {"id": "an id", "properties": {}}


class LoggedTable(ListedTable):
    """A table whose log a session can read."""

    def __init__(self, history: Sequence[str | None], log: KnownLog) -> None:
        super().__init__(history)
        self.log = log

    def _log(self) -> Any:  # noqa: ANN401 - as Delta's
        return self.log


def test_the_history_is_not_read_while_the_table_has_the_same_version() -> None:
    """The newest commit is known then. A version of another writer, or a change while it is read, lets it be read."""
    commit = Commit().then("a", [part(0, 0, 3)])
    history, log = [commit.to_metadata()], KnownLog(4)
    first = LoggedTable(history, log)
    first.reuse(None)
    assert (list(first.commits()), first.table_id()) == ([commit], "an id")
    known = first.known_unchanged(commit)
    assert known is not None
    for version, read in ((4, []), (5, ["HISTORY"])):
        table = LoggedTable(history, KnownLog(version))
        table.reuse(known)
        assert next(table.commits()) == commit
        assert table.read == read
        assert list(table.commits()) == [commit]
        assert table.read == [*read, "HISTORY"]
    log.version = 5
    assert first.known_unchanged(commit) is None


def test_rows_that_are_not_committed_are_deleted(target: DeltaTarget) -> None:
    """If a check before the commit fails, the table was replaced, or a row belongs to no range."""
    discarded: list[str] = []

    class Counting(FakeWritten):
        def discard(self) -> None:
            discarded.append(self.written.attempt)

        def is_current(self) -> bool:
            return self.table.id == "the first table"

    class CountingTable(WritingFirst):
        def written(self, *arguments: Any) -> FakeWritten | None:  # noqa: ANN401 - as its base
            found = super().written(*arguments)
            return found and Counting(found.table, found.rows, found.taken, found.written)

    table = CountingTable(target.table.path)
    sink, wanted = FakeSink(table.path, table), part(0, 0, 3)

    def lost() -> None:
        raise ConnectionError

    def replaced() -> None:
        table.id = "another"

    with pytest.raises(ConnectionError):
        sink.write(target.frame(rows_of("a", wanted)), [wanted], never, lost)
    with pytest.raises(SinkRejectedError, match="rows of partition 7"):
        sink.write(target.frame([(7, 0, "a")]), [wanted], never)
    assert sink.write(target.frame(rows_of("a", wanted)), [wanted], never, replaced).taken == (wanted,)
    assert len(discarded) == 3
    assert next(table.commits()).table_id == "another"
    assert target.found() == rows_of("a", wanted)


def test_a_commit_to_a_former_table_is_no_success(target: DeltaTarget) -> None:
    """A name can be that of another table once Delta has committed. The rows are not in that table."""

    class Moved(FakeWritten):
        def commit(self) -> TableState:
            self.table.id = "another"
            return TableState(1, "the first table")

    class MovedTable(WritingFirst):
        def written(self, *arguments: Any) -> FakeWritten | None:  # noqa: ANN401 - as its base
            found = super().written(*arguments)
            return found and Moved(found.table, found.rows, found.taken, found.written)

    table, wanted = MovedTable(target.table.path), part(0, 0, 3)
    with pytest.raises(SinkRejectedError, match="its history no longer shows"):
        FakeSink(table.path, table).write(target.frame(rows_of("a", wanted)), [wanted], never)


@pytest.mark.parametrize("version", [4, 5])
def test_details_that_are_older_than_the_transaction_are_forgotten(version: int) -> None:
    """Otherwise a property that was set in between would not be seen while only this sink commits."""

    class Begun:
        state = TableState(version, "an id")

        def number(self) -> int:
            return 9

    class BegunLog(KnownLog):
        def begin(self) -> Begun:
            return Begun()

        def detail(self) -> dict[str, Any]:
            return {**super().detail(), "partitionColumns": []}

    commit = Commit().then("a", [part(0, 0, 3)], "an id")
    table = LoggedTable([commit.to_metadata()], BegunLog(4))
    table.reuse(None)
    assert table.table_id() == "an id"
    following = [part(0, 3, 6)]
    assert table.written(cast("Any", None), [], following, commit, commit.then("b", following, "an id")) is None
    assert (table.known(commit) is None) == (version == 5)
