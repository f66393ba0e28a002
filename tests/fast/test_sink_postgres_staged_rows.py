"""What the driver checks about the rows that wait in a staging table of PostgreSQL. Real tests crash the server."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import types as t

from marshal_dagster.errors import MarshalError, SinkRejectedError, UnavailableError
from marshal_dagster.sinks.conformance.target import part
from marshal_dagster.sinks.database import column_types, postgres, task_rows
from marshal_dagster.sinks.database.column_types import TableColumn
from marshal_dagster.sinks.database.dialect import Fragment
from marshal_dagster.sinks.database.postgres import PostgresDialect
from marshal_dagster.sinks.database.staged_rows import CopiedRows, PostgresRows
from marshal_dagster.sinks.database.task_rows import TaskRows, TaskStagedRows

COLUMNS = ("partition", "offset", "value")
IDS = {0: 7}
COUNTS: Mapping[int | None, int] = {0: 3}
WANTED = [part(0, 0, 3)]


class Dialect:
    """Moves a number of rows."""

    output = "public.orders"

    def __init__(self, moved: int) -> None:
        self.moved = moved

    def execute(self, *_: object, **__: object) -> SimpleNamespace:
        """Return the result of a statement."""
        return SimpleNamespace(rowcount=self.moved)

    def quoted(self, *names: str) -> str:
        """Return a quoted name."""
        return ".".join(names)

    def one_of(self, *_: object) -> Fragment:
        """Return a condition."""
        return Fragment("true")


class Connection:
    """A connection to a server whose staging tables have a number of rows."""

    def __init__(self, staged: int = 3) -> None:
        self.staged = staged

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin a savepoint."""
        yield

    def execute(self, *_: object) -> SimpleNamespace:
        """Return the number of rows."""
        return SimpleNamespace(fetchall=lambda: [(self.staged,)])


def of_tasks(moved: int) -> PostgresRows:
    """Return rows that tasks have copied."""
    rows = TaskRows(COUNTS, all_have_offsets=True, rejected=None, tables=("a", "b"), is_read_by_hook=False)
    dialect: Any = Dialect(moved)
    return TaskStagedRows(dialect, str, IDS, COLUMNS, rows)


def copied(moved: int) -> CopiedRows:
    """Return rows that the driver copies."""
    dialect, lines = Dialect(moved), SimpleNamespace(counts=COUNTS)
    return CopiedRows(dialect, str, IDS, COLUMNS, lines, there={})  # type: ignore[arg-type] # parts of them


@pytest.mark.parametrize(("moved", "staged", "error"), [(2, 2, UnavailableError), (2, 3, SinkRejectedError)])
def test_missing_staged_rows_are_noticed(moved: int, staged: int, error: type[MarshalError]) -> None:
    """After a crash of the server the batch is repeated. A trigger that skips rows is an error of the table."""
    connection: Any = Connection(staged)
    of_tasks(3).move(connection, WANTED, COUNTS)
    with pytest.raises(error):
        of_tasks(moved).move(connection, WANTED, COUNTS)


@dataclass(frozen=True)
class Column:
    """A column of a frame, and what it is cast to."""

    name: str
    target: str = ""

    def cast(self, target: str) -> "Column":
        """Return the column as another type."""
        return Column(self.name, target)

    def alias(self, _: str) -> "Column":
        """Return the column."""
        return self


@dataclass(frozen=True)
class Frame:
    """A frame with a column of floats and one of doubles."""

    selected: tuple[Column, ...] = ()
    schema: t.StructType = field(
        default_factory=lambda: t.StructType().add("a", t.FloatType()).add("b", t.DoubleType())
    )

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return self.schema.names

    def select(self, *columns: Column) -> "Frame":
        """Return a frame with these columns."""
        return Frame(columns)


@pytest.mark.parametrize(("kind", "selected"), [("float8", (Column("`a`", "double"), Column("`b`"))), ("float4", ())])
def test_floats_go_to_a_column_of_doubles_as_doubles(
    kind: str, selected: tuple[Column, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text, 0.1 of 32 bits would be another double. Tasks and the driver get the same rows."""
    there = {name: TableColumn(kind, kind, "N", -1) for name in ("a", "b")}
    found: list[Frame] = []

    @contextmanager
    def attempt(_: object) -> Iterator[tuple[str, Mapping[str, TableColumn]]]:
        yield "attempt", there

    def keep(_dialect: object, _attempt: object, frame: Frame, *_: object) -> list[Any]:
        found.append(frame)
        return []

    monkeypatch.setattr(column_types, "f", SimpleNamespace(col=Column))
    monkeypatch.setattr(task_rows, "_attempt", attempt)
    monkeypatch.setattr(task_rows, "_copy", keep)
    with task_rows.rows_of_tasks(Dialect(0), Frame(), [], IDS, is_read_by_hook=False):  # type: ignore[arg-type]
        pass
    monkeypatch.setattr(postgres, "table_columns", lambda *_: there)
    monkeypatch.setattr(postgres, "evaluated", lambda frame, _: found.append(frame))
    dialect: Any = PostgresDialect.__new__(PostgresDialect)
    dialect.schema = dialect.table = ""
    monkeypatch.setattr(PostgresDialect, "transaction", lambda *_: nullcontext())
    dialect.evaluated(Frame(), [])
    assert [frame.selected for frame in found] == [selected, selected]


@pytest.mark.parametrize("by_lines", [False, True])
def test_rows_that_the_driver_does_not_copy_are_noticed(monkeypatch: pytest.MonkeyPatch, by_lines: bool) -> None:
    """The rows of a result that changes may be fewer or more when they are copied. Lines follow a doubtful batch."""
    connection: Any = Connection()
    for count in (3, 2, 4):
        monkeypatch.setattr(CopiedRows, "_copy_batches", lambda *_, count=count: None if by_lines else count)
        monkeypatch.setattr(CopiedRows, "_copy_lines", lambda *_, count=count: count)
        if count == sum(COUNTS.values()):
            copied(3).stage(connection, WANTED)
            continue
        with pytest.raises(SinkRejectedError, match=f"had 3 rows, and {count} when"):
            copied(3).stage(connection, WANTED)
