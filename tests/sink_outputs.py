"""Outputs for tests of sinks: plain Python rows in place of Spark's, and readers that share no code with the sinks."""

import contextlib
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from marshal_dagster.sinks import FileSink, MariaDBSink, PostgresSink, Sink
from marshal_dagster.sinks.database.task_rows import PREFIX
from marshal_dagster.sinks.files.older_rows import OlderRows
from marshal_dagster.sinks.files.places import visible_place
from tests.sink_conformance import Frame, Output, Row, intervals

TYPES = {"partition": IntegerType(), "offset": LongType(), "value": StringType()}
TABLE = "results"
_MOST_MOVES = 100


@dataclass(frozen=True)
class FakeFrame:
    """The part of a DataFrame that a sink uses before Spark runs."""

    columns: list[str]
    _rows: tuple[tuple[Any, ...], ...] | None
    sparkSession: None = None  # noqa: N815 - pyspark's name

    @property
    def schema(self) -> StructType:
        """Return the types of the columns."""
        return StructType([StructField(name, TYPES[name]) for name in self.columns])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows; a poisoned frame raises an error."""
        assert self._rows is not None, "evaluated"
        return [dict(zip(self.columns, row, strict=True)) for row in self._rows]


class FakeOutput(Output):
    """Frames without Spark."""

    def frame(
        self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = ("partition", "offset", "value")
    ) -> FakeFrame:
        """Return a frame of these rows."""
        return FakeFrame(list(columns), tuple(rows))

    def poison(self) -> FakeFrame:
        """Return a frame that fails when its rows are read."""
        return FakeFrame(["partition", "offset", "value"], None)


def place_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row's folder, as Spark names it."""
    if row["partition"] is None:
        return "__HIVE_DEFAULT_PARTITION__"
    return f"{row['partition']}{'' if row.get('offset', 0) is not None else '_without_offset'}"


class FakeFileSink(FileSink):
    """A file sink that writes a line of JSON for each row, and two files for each partition, as tasks would."""

    def __init__(self, path: Path | str, **others: Any) -> None:  # noqa: ANN401 - as `FileSink`
        super().__init__(path, "json", **others)

    def _check_place(self, frame: Frame, note: str) -> None:  # noqa: ARG002
        assert self._storage.exists(note)

    def _write_rows(self, frame: Frame, folder: str, done: Sequence[int]) -> None:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in frame.rows:
            if row["partition"] is None or row["partition"] not in done:
                by_name.setdefault(place_of(row), []).append(row)
        for name, rows in by_name.items():
            place = f"{folder}/marshal_range={name}"
            for task in (0, 1):
                text = "".join(json.dumps(row) + "\n" for row in rows[task::2])
                self._put(f"{place}/part-{task}.json", text)
                self._put(f"{place}/.part-{task}.json.crc", "checksum")
        self._put(f"{folder}/_temporary/left", "a task's")

    def _write_older(self, spark: Any, folder: str, older: Mapping[str, OlderRows]) -> None:  # noqa: ANN401, ARG002
        for key, rows in older.items():
            names = [visible_place(name) for name in rows.files]
            lines = [line for name in names for line in (self._storage.read(name) or b"").decode().splitlines()]
            kept = [
                f"{line}\n"
                for line in lines
                if not any(start <= json.loads(line)["offset"] < end for start, end in rows.replaced)
            ]
            self._put(f"{folder}/_temporary/left", "a task's")
            if kept:
                self._put(f"{folder}/marshal_range={key}/part-0.json", "".join(kept))

    def _put(self, name: str, text: str) -> None:
        path = Path(self._storage.full(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _offsets_in(self, frame: Frame, names: Sequence[str]) -> Mapping[int, Sequence[tuple[int, int]]]:  # noqa: ARG002
        rows = [json.loads(line) for name in names for line in (self._storage.read(name) or b"").splitlines()]
        return intervals({(row["partition"], row["offset"]) for row in rows if row["offset"] is not None})


def hook(sink: Sink, reached: Callable[[str], None] | None) -> None:
    """Make the sink call `reached` at each step."""
    if reached is not None:
        steps: Any = sink
        steps._reached = reached


UPSERTS: Final[Mapping[str, Any]] = {"mode": "upsert", "keys": ["partition", "offset"]}
"""The options of a Delta sink with which each message has a key of its own."""
DELTA_STEPS = ("evaluated", "judged", "committed")
FILE_STEPS = ("attempt noted", "rows written", "judged", "linked", "file moved", "cleared")
REPLACING_STEPS = (
    "rows written",
    "older rows written",
    "judged",
    "linked",
    "older file removed",
    "file moved",
    "cleared",
)


class FileOutput(FakeOutput):
    """A folder that is written without Spark."""

    steps: ClassVar[Sequence[str]] = FILE_STEPS
    racing_step: ClassVar[str] = "judged"

    def __init__(self, path: Path) -> None:
        self.path = path

    def sink(self, reached: Callable[[str], None] | None = None) -> FileSink:
        """Return a sink as another process would have it."""
        sink = FakeFileSink(self.path)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Return the rows by the commit files alone, which this method reads itself.

        Another writer can move a file between the look for it and its reading; then all is read again.
        """
        for _ in range(_MOST_MOVES):
            with contextlib.suppress(FileNotFoundError):
                return self._rows()
        return self._rows()

    def _rows(self) -> list[Row]:
        return sorted(
            (row["partition"], -1 if row.get("offset") is None else row["offset"], row["value"])
            for place, is_replaced in self.counted()
            for row in map(json.loads, self.content(place).splitlines())
            if not is_replaced(row.get("offset"))
        )

    def counted(self) -> Iterable[tuple[Any, Callable[[int | None], bool]]]:
        """Return each valid file (`counting`)."""
        return counting_files(self.path)

    def content(self, place: Any) -> str:  # noqa: ANN401 - as `counted` gives it
        """Return the text of a file."""
        return Path(place).read_text()

    def sweep(self) -> None:
        """Sweep as another process would."""
        self.sink().sweep()


def counting_files(path: Path) -> Iterator[tuple[Path, Callable[[int | None], bool]]]:
    """Yield each valid file of a local folder (`counting`)."""
    folder = path / "_marshal"
    for name, is_replaced in counting([each.read_text() for each in sorted((folder / "commits").glob("*.json"))]):
        hidden, visible = folder / name, path / visible_name(name)
        yield hidden if hidden.exists() else visible, is_replaced


def visible_name(name: str) -> str:
    """Return where a file `attempts/<attempt>/...` is once it was moved, as the description of the layout has it."""
    _, attempt, *folders, file = name.split("/")
    while not folders[0].startswith("marshal_range="):
        folders.pop(0)
    range_folder, *columns = folders
    return "/".join([*columns, f"{range_folder.removeprefix('marshal_range=')}-{attempt}-{file}"])


def counting(texts: Iterable[str]) -> Iterator[tuple[str, Callable[[int | None], bool]]]:
    """Yield each file that is valid by these commits, and a function for its rows.

    The function returns whether the row of an offset in that file was replaced. Written from the description of the
    layout alone, without the sink's own code.
    """
    commits = [json.loads(text) for text in texts]
    assert [commit["number"] for commit in commits] == list(range(1, len(commits) + 1))
    entries = [(commit["attempt"], entry) for commit in commits for entry in commit["ranges"]]
    rewritten = {name: names for commit in commits for name, names in commit.get("rewritten", {}).items()}

    def now(name: str) -> Iterator[str]:
        if name not in rewritten:
            yield name
        for later in rewritten.get(name, ()):
            yield from now(later)

    for attempt, entry in entries:
        replaced = [
            bounds
            for _, other in entries
            if all(other[name] == entry[name] for name in ("group", "topic", "partition", "data_topic_id"))
            and other["generation"] > entry["generation"]
            for bounds in other.get("replaces", ())
        ]

        def is_replaced(offset: int | None, replaced: Sequence[Sequence[int]] = replaced) -> bool:
            return offset is not None and any(start <= offset < end for start, end in replaced)

        for name in entry["files"]:
            for each in now(f"{attempt}/{name}"):
                yield f"attempts/{each}", is_replaced


@dataclass(frozen=True)
class FakeCopyRows:
    """Rows as COPY text, without Spark."""

    rows: Sequence[Mapping[str, Any]]
    rejected: None = None

    @property
    def counts(self) -> dict[int | None, int]:
        """Return the number of rows in each partition."""
        found: dict[int | None, int] = {}
        for row in self.rows:
            found[row["partition"]] = found.get(row["partition"], 0) + 1
        return found

    @property
    def all_have_offsets(self) -> bool:
        """Return whether each row has an offset."""
        return all(row.get("offset") is not None for row in self.rows)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for row in self.rows:
            cells = ("\\N" if each is None else str(each).replace("\\", "\\\\") for each in row.values())
            yield row["partition"], "\t".join(cells)

    def batches(self, _: object) -> None:
        """Return that there is no Spark, which passes rows as Arrow batches."""


class FakePostgresSink(PostgresSink):
    """A Postgres sink that gets its rows without Spark."""

    @contextmanager
    def _evaluated(self, frame: Frame, done: Sequence[int], ids: Mapping[int, int]) -> Iterator[FakeCopyRows]:
        del ids
        yield FakeCopyRows([row for row in frame.rows if row["partition"] not in done])


DATABASE_STEPS = ("evaluated", "copied", "locked", "moved", "set", "committing", "committed")


class DatabaseOutput(FakeOutput):
    """A table in a schema of its own."""

    steps: ClassVar[Sequence[str]] = DATABASE_STEPS
    racing_step: ClassVar[str] = "copied"

    @abstractmethod
    def is_waited_for(self) -> bool:
        """Return whether a transaction waits for another one's lock."""

    def sweep(self) -> None:
        """Do nothing, because the server rolls back what was not committed."""


class PostgresOutput(DatabaseOutput):
    """A table in a schema of its own that is written without Spark."""

    def __init__(self, dsn: str, schema: str, *, create: bool = True) -> None:
        self.dsn, self.schema = dsn, schema
        if create:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
            PostgresSink(dsn, TABLE, schema=schema).create_tables(self.frame([]).schema)

    def sink(self, reached: Callable[[str], None] | None = None) -> PostgresSink:
        """Return a sink as another process would have it."""
        sink = FakePostgresSink(self.dsn, TABLE, schema=self.schema, lock_timeout_s=30)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(
                sql.SQL("SELECT kafka_partition, coalesce(kafka_offset, -1), value FROM {}").format(
                    sql.Identifier(self.schema, TABLE)
                )
            )
            return sorted(found.fetchall())

    def staging_tables(self) -> list[str]:
        """Return the names of the tables that tasks fill."""
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (self.schema,))
            return [name for (name,) in found if name.startswith(PREFIX)]

    def is_waited_for(self) -> bool:
        """Return whether a session waits for an advisory lock."""
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            return found.fetchone() != (0,)


class FakeLiteralRows(FakeCopyRows):
    """Rows as lists of SQL literals, without Spark."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for row in self.rows:
            yield row["partition"], ",".join(map(literal, row.values()))


def literal(value: object) -> str:
    """Return a value as an SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'").replace("\0", "\\0")
    return f"'{escaped}'"


class FakeMariaDBSink(MariaDBSink):
    """A MariaDB sink that gets its rows without Spark."""

    @contextmanager
    def _evaluated(self, frame: Frame, done: Sequence[int], ids: Mapping[int, int]) -> Iterator[FakeLiteralRows]:
        del ids
        yield FakeLiteralRows([row for row in frame.rows if row["partition"] not in done])


class MariaDBOutput(DatabaseOutput):
    """A table in a database of its own that is written without Spark."""

    def __init__(self, server: str, schema: str, *, create: bool = True) -> None:
        self.server, self.schema = server, schema
        self.dsn = f"{server}/{schema}"
        if create:
            self.execute(f"CREATE DATABASE {schema}", database=None)
            MariaDBSink(self.dsn, TABLE).create_tables(self.frame([]).schema)

    def execute(self, *statements: str, database: str | None = "") -> list[tuple[Any, ...]]:
        """Run statements in the output's database, and return the rows of the last one."""
        import pymysql

        place = urlsplit(self.server)
        connection = pymysql.connect(
            host=place.hostname,
            port=place.port,
            user=place.username,
            database=self.schema if database == "" else database,
            autocommit=True,
        )
        with connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def sink(self, reached: Callable[[str], None] | None = None) -> MariaDBSink:
        """Return a sink as another process would have it."""
        sink = FakeMariaDBSink(self.dsn, TABLE, lock_timeout_s=30)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        return sorted(self.execute(f"SELECT kafka_partition, coalesce(kafka_offset, -1), value FROM {TABLE}"))  # noqa: S608

    def is_waited_for(self) -> bool:
        """Return whether a transaction waits for a lock."""
        return self.execute("SELECT count(*) FROM information_schema.innodb_lock_waits") != [(0,)]


def own_schema() -> str:
    """Return a schema name that no other test has."""
    return f"s{os.urandom(6).hex()}"
