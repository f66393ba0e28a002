"""A sink that writes rows to a SQLite table, for effectively-once delivery."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial

from pyspark.sql import DataFrame

from marshal_dagster import ClaimedRange, ConfigurationError, Sink, WriteResult
from marshal_dagster.sinks import (
    BeforeCommit,
    Intervals,
    OffsetsRead,
    OutputGroups,
    TakenRanges,
    Verdict,
    check_columns,
    checked_after_read,
    judge_ranges,
    refuse_foreign_rows,
)

TABLES = """
CREATE TABLE IF NOT EXISTS result (
    "group" TEXT, topic TEXT, data_topic_id TEXT, generation INT, partition INT,
    "offset" INT, value TEXT
);
CREATE TABLE IF NOT EXISTS taken (
    coordination_topic_id TEXT, "group" TEXT, topic TEXT, data_topic_id TEXT,
    partition INT, generation INT,
    epoch INT, start INT, "end" INT, first_readable INT, in_any_order INT
);
"""


class SqliteSink(Sink):
    """Writes rows (partition, offset, value) to a table in the file `path`.

    The rows go to the table `result`, their ranges to the table `taken`.
    """

    supports_unordered_ranges = True

    def __init__(
        self,
        path: str,
        *,
        shared_by_groups: bool = False,
        previous_group: str | None = None,
    ) -> None:
        """Set the file and the groups that may write to it."""
        self.path = path
        self._groups = OutputGroups(f"file {path}", shared_by_groups, previous_group)

    def verdicts(
        self, ranges: Sequence[ClaimedRange]
    ) -> Mapping[ClaimedRange, Verdict]:
        """Compare each range with those taken before."""
        with self._transaction() as database:
            return self._judge(database, ranges)

    def can_replace(self, ranges: Sequence[ClaimedRange]) -> str | None:  # noqa: ARG002
        """Return None: every row has its offset, so each range can be replaced."""
        return None

    def write(
        self,
        frame: DataFrame,
        ranges: Sequence[ClaimedRange],
        offsets_read: OffsetsRead,
        before_commit: BeforeCommit = lambda: None,
    ) -> WriteResult:
        """Write the rows and the ranges in one transaction.

        The transaction first compares the ranges again.
        """
        check_columns(frame.schema, reserved=())
        if "offset" not in frame.columns:
            raise ConfigurationError("the result has no column 'offset': keep it")
        verdicts = self.verdicts(ranges)
        if set(verdicts.values()) == {Verdict.SKIP}:
            return WriteResult(taken=(), skipped=tuple(ranges), rows={})
        rows = [
            (row["partition"], row["offset"], row["value"]) for row in frame.collect()
        ]
        refuse_foreign_rows([partition for partition, _, _ in rows], ranges)
        self._check_offsets(rows)
        before_commit()
        read: Mapping[int, Intervals] = {}
        if any(range_.generation for range_ in ranges):
            read = checked_after_read(offsets_read, before_commit)()
        with self._transaction() as database:
            verdicts = self._judge(database, ranges)
            taken = tuple(each for each in ranges if verdicts[each] is not Verdict.SKIP)
            for each in taken:
                own = [row for row in rows if row[0] == each.partition]
                self._replace(
                    database,
                    each,
                    [
                        *read.get(each.partition, ()),
                        *((at, at + 1) for _, at, _ in own),
                    ],
                )
                self._insert(database, each, own)
        skipped = tuple(each for each in ranges if each not in taken)
        return WriteResult(taken=taken, skipped=skipped, rows={})

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=60)) as database, database:
            database.executescript(TABLES)
            database.execute("BEGIN IMMEDIATE")
            yield database

    def _judge(
        self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]
    ) -> dict[ClaimedRange, Verdict]:
        verdicts = {}
        for wanted in ranges:
            taken = TakenRanges()
            for row in database.execute(
                'SELECT * FROM taken WHERE "group" = ? AND topic = ? AND partition = ? '
                "ORDER BY rowid",
                (wanted.group, wanted.topic, wanted.partition),
            ):
                taken.add(ClaimedRange(*row))
            verdicts[wanted] = judge_ranges(taken.beside(wanted), wanted)
        undone = [
            wanted
            for wanted, verdict in verdicts.items()
            if verdict is not Verdict.SKIP
        ]
        groups = database.execute(
            'SELECT DISTINCT "group" FROM taken WHERE topic = ?', (ranges[0].topic,)
        )
        self._groups.check(
            undone, [group for (group,) in groups], partial(self._held, database)
        )
        return verdicts

    def _held(
        self, database: sqlite3.Connection, ranges: Sequence[ClaimedRange]
    ) -> list[ClaimedRange]:
        """Return the ranges that have rows of their group."""
        rows = (
            'SELECT 1 FROM result WHERE "group" = ? AND topic = ? '
            "AND data_topic_id = ? AND partition = ?"
            ' AND "offset" >= ? AND "offset" < ?'
        )
        places = {
            each: (each.group, each.topic, each.data_topic_id, each.partition)
            for each in ranges
        }
        return [
            each
            for each, at in places.items()
            if database.execute(rows, (*at, each.start, each.end)).fetchone()
        ]

    def _check_offsets(self, rows: Sequence[tuple[int, int | None, str]]) -> None:
        if any(offset is None for _, offset, _ in rows):
            raise ConfigurationError(
                "the result has rows without 'offset', which could not be replaced: "
                "keep it"
            )

    def _replace(
        self,
        database: sqlite3.Connection,
        wanted: ClaimedRange,
        offsets: Sequence[tuple[int, int]],
    ) -> None:
        for first, stop in offsets:
            start, end = max(first, wanted.first_readable), min(stop, wanted.end)
            database.execute(
                'DELETE FROM result WHERE "group" = ? AND topic = ? '
                "AND data_topic_id = ? AND partition = ?"
                ' AND generation < ? AND "offset" >= ? AND "offset" < ?',
                (
                    wanted.group,
                    wanted.topic,
                    wanted.data_topic_id,
                    wanted.partition,
                    wanted.generation,
                    start,
                    end,
                ),
            )

    def _insert(
        self,
        database: sqlite3.Connection,
        taken: ClaimedRange,
        rows: Sequence[tuple[int, int, str]],
    ) -> None:
        key = (taken.group, taken.topic, taken.data_topic_id, taken.generation)
        database.executemany(
            "INSERT INTO result VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(*key, *row) for row in rows],
        )
        database.execute(
            "INSERT INTO taken VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                taken.coordination_topic_id,
                taken.group,
                taken.topic,
                taken.data_topic_id,
                taken.partition,
                taken.generation,
                taken.epoch,
                taken.start,
                taken.end,
                taken.first_readable,
                taken.in_any_order,
            ),
        )
