"""Outputs for the sinks' tests: with rows of plain Python in place of Spark's, and readers that know no sink's code."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg import sql
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from marshal_dagster.spark.sinks import FileSink, PostgresSink
from tests.sink_conformance import Frame, Output, Row, intervals

TYPES = {"partition": IntegerType(), "offset": LongType(), "value": StringType()}
TABLE = "results"


@dataclass(frozen=True)
class StandInFrame:
    """As much of a DataFrame as a sink asks for before Spark's part."""

    columns: list[str]
    _rows: tuple[tuple[Any, ...], ...] | None

    @property
    def schema(self) -> StructType:
        """The columns' types."""
        return StructType([StructField(name, TYPES[name]) for name in self.columns])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows; evaluating a poisoned frame fails."""
        assert self._rows is not None, "evaluated"
        return [dict(zip(self.columns, row, strict=True)) for row in self._rows]


class StandInOutput(Output):
    """Frames without Spark."""

    def frame(
        self, rows: Iterable[tuple[Any, ...]], columns: Sequence[str] = ("partition", "offset", "value")
    ) -> StandInFrame:
        """A frame of these rows."""
        return StandInFrame(list(columns), tuple(rows))

    def poison(self) -> StandInFrame:
        """A frame that fails when its rows are asked for."""
        return StandInFrame(["partition", "offset", "value"], None)


def place_of(row: Mapping[str, Any]) -> str:
    """The name of a row's folder, as Spark makes it."""
    if row["partition"] is None:
        return "__HIVE_DEFAULT_PARTITION__"
    return f"{row['partition']}{'' if row.get('offset', 0) is not None else '_without_offset'}"


class StandInFileSink(FileSink):
    """A file sink that writes a line of JSON for each row, two files for each partition, as tasks would."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, format="json")

    def _check_place(self, frame: Frame, note: Path) -> None:  # noqa: ARG002
        assert note.exists()

    def _write_rows(self, frame: Frame, folder: Path, done: Sequence[int]) -> None:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in frame.rows:
            if row["partition"] is None or row["partition"] not in done:
                by_name.setdefault(place_of(row), []).append(row)
        folder.mkdir()
        for name, rows in by_name.items():
            place = folder / f"marshal_range={name}"
            place.mkdir()
            for task in (0, 1):
                text = "".join(json.dumps(row) + "\n" for row in rows[task::2])
                (place / f"part-{task}.json").write_text(text)
                (place / f".part-{task}.json.crc").write_text("checksum")
        (folder / "_temporary").mkdir()
        (folder / "_temporary" / "left").write_text("a task's")

    def _offsets_in(self, frame: Frame, paths: Sequence[Path]) -> Mapping[int, Sequence[tuple[int, int]]]:  # noqa: ARG002
        rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return intervals({(row["partition"], row["offset"]) for row in rows if row["offset"] is not None})


def hook(sink: FileSink | PostgresSink, reached: Callable[[str], None] | None) -> None:
    """Have the sink call `reached` at each step."""
    if reached is not None:
        sink._reached = reached  # type: ignore[method-assign,assignment]


FILE_STEPS = ("attempt noted", "rows written", "judged", "linked", "cleared")


class FileOutput(StandInOutput):
    """A folder, written by stand-ins."""

    steps: ClassVar[Sequence[str]] = FILE_STEPS
    racing_step: ClassVar[str] = "judged"

    def __init__(self, path: Path) -> None:
        self.path = path

    def sink(self, reached: Callable[[str], None] | None = None) -> FileSink:
        """Another process's sink."""
        sink = StandInFileSink(self.path)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """By the commit files alone, read here anew."""
        return sorted(
            (row["partition"], -1 if row.get("offset") is None else row["offset"], row["value"])
            for path, is_replaced in counting_files(self.path)
            for row in map(json.loads, path.read_text().splitlines())
            if not is_replaced(row.get("offset"))
        )

    def sweep(self) -> None:
        """Sweep as another process would."""
        self.sink().sweep()


def counting_files(path: Path) -> Iterator[tuple[Path, Callable[[int | None], bool]]]:
    """Yield each file that counts, and what tells whether a newer generation has replaced the row at an offset.

    Written from the layout alone, without the sink's own code.
    """
    folder = path / "_marshal"
    commits = [json.loads(each.read_text()) for each in sorted((folder / "commits").glob("*.json"))]
    assert [commit["number"] for commit in commits] == list(range(1, len(commits) + 1))
    entries = [(commit["attempt"], entry) for commit in commits for entry in commit["ranges"]]
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
            yield folder / "attempts" / attempt / name, is_replaced


@dataclass(frozen=True)
class StandInLines:
    """Rows as COPY text, without Spark."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def counts(self) -> dict[int | None, int]:
        """Rows by partition."""
        found: dict[int | None, int] = {}
        for row in self.rows:
            found[row["partition"]] = found.get(row["partition"], 0) + 1
        return found

    @property
    def all_have_offsets(self) -> bool:
        """Whether each row has an offset."""
        return all(row.get("offset") is not None for row in self.rows)

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for row in self.rows:
            cells = ("\\N" if each is None else str(each).replace("\\", "\\\\") for each in row.values())
            yield row["partition"], "\t".join(cells)


class StandInPostgresSink(PostgresSink):
    """A Postgres sink whose rows come without Spark."""

    @contextmanager
    def _evaluated(self, frame: Frame, done: Sequence[int]) -> Iterator[StandInLines]:
        yield StandInLines([row for row in frame.rows if row["partition"] not in done])


POSTGRES_STEPS = ("evaluated", "copied", "locked", "moved", "set", "committing", "committed")


class PostgresOutput(StandInOutput):
    """A schema of its own with a table, written by stand-ins."""

    steps: ClassVar[Sequence[str]] = POSTGRES_STEPS
    racing_step: ClassVar[str] = "copied"

    def __init__(self, dsn: str, schema: str, *, create: bool = True) -> None:
        self.dsn, self.schema = dsn, schema
        if create:
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
            PostgresSink(dsn, TABLE, schema=schema).create_tables(self.frame([]).schema)

    def sink(self, reached: Callable[[str], None] | None = None) -> PostgresSink:
        """Another process's sink."""
        sink = StandInPostgresSink(self.dsn, TABLE, schema=self.schema, lock_timeout_s=30)
        hook(sink, reached)
        return sink

    def rows(self) -> list[Row]:
        """The table as it is."""
        with psycopg.connect(self.dsn) as connection:
            found = connection.execute(
                sql.SQL("SELECT kafka_partition, coalesce(kafka_offset, -1), value FROM {}").format(
                    sql.Identifier(self.schema, TABLE)
                )
            )
            return sorted(found.fetchall())

    def sweep(self) -> None:
        """Nothing is left: the server undoes what was not committed."""


def own_schema() -> str:
    """A schema name that no other test has."""
    return f"s{os.urandom(6).hex()}"
