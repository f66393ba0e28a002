"""Each Spark type in a column of each type of PostgreSQL and MariaDB: values are kept, or refused before the commit."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import psycopg
import pytest
from pyspark.sql import types as t

from marshal_dagster.errors import ConfigurationError, SinkRejectedError
from marshal_dagster.sinks import MariaDBSink, PostgresSink
from marshal_dagster.sinks.database import frame_lines, task_rows
from marshal_dagster.sinks.database.column_types import table_columns
from marshal_dagster.sinks.database.pg_binary import binary_form
from marshal_dagster.sinks.database.staged_rows import CopiedRows
from marshal_dagster.sinks.rejected_rows import RowCheck
from tests.sink_conformance import never, part
from tests.sink_outputs import MariaDBOutput, own_schema
from tests.sink_typed_frames import TypedFrame
from tests.spark_frames import local_frame
from tests.type_pairs import SOURCES, UNWRITTEN, Source, is_same

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Pair = tuple[str, str]
"""A Spark type and a column's type."""

OWN: Final = [t.StructField("partition", t.IntegerType()), t.StructField("offset", t.LongType())]
NUMBERS: Final = ("tinyint", "smallint", "int", "bigint")
DECIMALS: Final = ("decimal(5,2)", "decimal(5,5)", "decimal(10,0)", "decimal(38,0)", "decimal(38,18)")
TIMES: Final = ("date", "timestamp", "timestamp_ntz")
NESTED: Final = ("array<int>", "array<timestamp>", "array<double>", "map<string,bigint>", "map<date,decimal>", "struct")


def words(text: str) -> tuple[str, ...]:
    """Return the parts of a text between semicolons."""
    return tuple(text.split("; "))


POSTGRES_TYPES: Final = (
    *words("smallint; integer; bigint; numeric; numeric(9,3); numeric(38,18); numeric(5,-2); numeric(40); real"),
    *words('double precision; money; boolean; text; varchar; varchar(40); char(40); bpchar; name; "char"; bytea; date'),
    *words("time; timetz; timestamp; timestamp(3); timestamptz; timestamptz(0); interval; json; jsonb; uuid; mood"),
    *words("whole; integer[]; text[]; jsonb[]; pair; inet; macaddr; bit(8); point; int4range; oid; regclass; xid8"),
    *words("tsvector; pg_lsn"),
)
WHOLE: Final = words("smallint; integer; bigint; numeric; numeric(9,3); numeric(38,18); numeric(40); whole")
TEXT: Final = words("text; varchar; varchar(40); char(40); bpchar")
_MORE_TEXTS: Final = words("varchar; varchar(40); bpchar; tinytext")
IN_POSTGRES: Final[Mapping[str, Collection[str]]] = {
    "tinyint": (*WHOLE, "real", "double precision", *TEXT),
    "smallint": (*WHOLE, "real", "double precision", *TEXT),
    "int": (*WHOLE, "double precision", *TEXT),
    "bigint": (*WHOLE, *TEXT),
    "float": ("real", "double precision", "numeric", *TEXT),
    "double": ("double precision", "numeric", *TEXT),
    "decimal(5,2)": ("numeric", "numeric(9,3)", "numeric(38,18)", *TEXT),
    "decimal(5,5)": ("numeric", "numeric(38,18)", *TEXT),
    "decimal(10,0)": (*WHOLE, *TEXT),
    "decimal(38,0)": (*WHOLE, *TEXT),
    "decimal(38,18)": ("numeric", "numeric(38,18)", *TEXT),
    "boolean": ("boolean", *TEXT),
    "string": (
        *words("smallint; integer; bigint; numeric; whole; json; jsonb; uuid; mood; inet; macaddr; bit(8); pg_lsn"),
        *TEXT,
    ),
    "binary": ("bytea",),
    "date": ("date", "timestamp", "timestamp(3)", *TEXT),
    "timestamp": ("timestamptz", *TEXT),
    "timestamp_ntz": ("timestamp", *TEXT),
    **dict.fromkeys(NESTED, ("json", "jsonb", *TEXT)),
}
"""The columns of PostgreSQL that keep the values of a Spark type, or reject them."""

FOR_TYPES: Final[Mapping[str, tuple[str, str]]] = {
    "smallint": ("-32768", "32768"),
    "integer": ("17", "1.5"),
    "bigint": ("9223372036854775807", "9223372036854775808"),
    "numeric": ("-0.10", "one"),
    "whole": ("1", "0"),
    "json": ('{"b": 1, "a": [null]}', "{"),
    "jsonb": ('{"a": [null], "b": 1}', '"\\u0000"'),
    "uuid": ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99"),
    "mood": ("fine", "Fine"),
    "inet": ("10.0.0.0/8", "10.0.0.256"),
    "macaddr": ("08:00:2b:01:02:03", "08:00"),
    "bit(8)": ("00000001", "1"),
    "pg_lsn": ("16/B374D848", "G"),
}
"""For the types of PostgreSQL that parse texts, a string that is kept and one that is rejected."""

IN_ORDER: Final = {name: number for number, name in enumerate(SOURCES)}
REJECTED_BY_POSTGRES: Final = [
    *((name, value, words("smallint; numeric(9,3)")) for name in ("int", "bigint") for value in (1, 2)),
    *(("bigint", value, ("integer",)) for value in (1, 2)),
    ("decimal(10,0)", 1, words("smallint; integer; numeric(9,3)")),
    ("decimal(38,0)", 1, words("smallint; integer; bigint; numeric(9,3); numeric(38,18); whole")),
    *((name, value, ("whole",)) for name, value in (("tinyint", 0), ("smallint", 0), ("int", 1), ("bigint", 1))),
    *((name, value, ("whole",)) for name, value in (("bigint", 2), ("decimal(10,0)", 1))),
    ("string", 5, ("char(40)",)),
    ("string", 6, TEXT),
    ("string", 7, TEXT),
    ("date", 5, words("date; timestamp; timestamp(3)")),
    ("timestamp", 5, ("timestamptz",)),
    ("timestamp_ntz", 4, ("timestamp",)),
    ("map<date,decimal>", 0, words("varchar(40); char(40)")),
    ("struct", 0, words("varchar(40); char(40)")),
]
"""The values, by their place in `SOURCES`, that columns of PostgreSQL reject."""

MARIADB_TYPES: Final = (
    *words("tinyint; tinyint unsigned; smallint; mediumint; int; int unsigned; bigint; bigint unsigned; decimal(9,3)"),
    *words("decimal(9,3) unsigned; decimal(38,18); decimal(65,0); float; float unsigned; float(10,2); double"),
    *words("double unsigned; double(10,2); boolean; bit(8); char(40); varchar(40); tinytext; longtext"),
    *words("varchar(40) character set latin1; enum('fine','17'); set('fine'); binary(4); varbinary(40); longblob"),
    *words("date; time(6); datetime; datetime(3); datetime(6); timestamp null; timestamp(6) null; year; json; uuid"),
    *words("inet6; point"),
)
SIGNED: Final = words("tinyint; smallint; mediumint; int; bigint; decimal(9,3); decimal(38,18); decimal(65,0); boolean")
UNSIGNED: Final = words("tinyint unsigned; int unsigned; bigint unsigned; decimal(9,3) unsigned")
TEXT_AND_JSON: Final = words("char(40); varchar(40); tinytext; longtext; json")
ANY_FLOAT: Final = words("float; float unsigned; double; double unsigned")
DOUBLE: Final = words("double; double unsigned")
IN_MARIADB: Final[Mapping[str, Collection[str]]] = {
    "tinyint": (*SIGNED, *UNSIGNED, *ANY_FLOAT, *TEXT_AND_JSON),
    "smallint": (*SIGNED, *UNSIGNED, *ANY_FLOAT, *TEXT_AND_JSON),
    "int": (*SIGNED, *UNSIGNED, *DOUBLE, *TEXT_AND_JSON),
    "bigint": (*SIGNED, *UNSIGNED, *TEXT_AND_JSON),
    "float": ANY_FLOAT,
    "double": DOUBLE,
    "decimal(5,2)": (*words("decimal(9,3); decimal(9,3) unsigned; decimal(38,18)"), *TEXT_AND_JSON),
    "decimal(5,5)": ("decimal(38,18)", *TEXT_AND_JSON),
    "decimal(10,0)": (*SIGNED, *UNSIGNED, *TEXT_AND_JSON),
    "decimal(38,0)": (*SIGNED, *UNSIGNED, *TEXT_AND_JSON),
    "decimal(38,18)": ("decimal(38,18)", *TEXT_AND_JSON),
    "boolean": (*SIGNED, *UNSIGNED),
    "string": TEXT_AND_JSON,
    "binary": ("varbinary(40)", "longblob"),
    "date": (*words("date; datetime; datetime(3); datetime(6)"), *TEXT_AND_JSON),
    "timestamp": ("timestamp(6) null",),
    "timestamp_ntz": ("datetime(6)", *TEXT_AND_JSON),
    **dict.fromkeys(NESTED, TEXT_AND_JSON),
}
"""The columns of MariaDB that keep the values of a Spark type, or reject them."""

REJECTED_BY_MARIADB: Final = [
    ("tinyint", 0, (*UNSIGNED, "float unsigned", "double unsigned")),
    ("smallint", 0, (*UNSIGNED, "float unsigned", "double unsigned", "tinyint", "boolean")),
    ("smallint", 1, words("tinyint; boolean; tinyint unsigned")),
    ("int", 1, (*UNSIGNED, *words("double unsigned; tinyint; boolean; smallint; mediumint; decimal(9,3)"))),
    ("int", 2, words("tinyint; boolean; tinyint unsigned; smallint; mediumint; decimal(9,3); decimal(9,3) unsigned")),
    ("bigint", 1, (*UNSIGNED, *words("tinyint; boolean; smallint; mediumint; int; decimal(9,3)"))),
    ("bigint", 2, words("tinyint; boolean; tinyint unsigned; smallint; mediumint; int; int unsigned; decimal(9,3)")),
    ("bigint", 2, ("decimal(9,3) unsigned",)),
    *(("float", value, ANY_FLOAT) for value in (4, 5, 6)),
    *(("double", value, DOUBLE) for value in (4, 5, 6)),
    ("decimal(5,2)", 1, ("decimal(9,3) unsigned",)),
    ("decimal(10,0)", 1, (*UNSIGNED, *words("tinyint; boolean; smallint; mediumint; int; decimal(9,3)"))),
    ("decimal(38,0)", 1, (*(each for each in SIGNED if each != "decimal(65,0)"), *UNSIGNED)),
    *(("string", value, ("json",)) for value in range(8)),
    ("string", 5, ("char(40)",)),
    ("string", 7, words("char(40); varchar(40); tinytext; longtext")),
    *(("date", value, IN_MARIADB["date"]) for value in (4, 5)),
    *(("date", value, ("json",)) for value in range(4)),
    *(("timestamp", value, ("timestamp(6) null",)) for value in (2, 3, 4, 5)),
    *(("timestamp_ntz", value, IN_MARIADB["timestamp_ntz"]) for value in (3, 4)),
    *(("timestamp_ntz", value, ("json",)) for value in (0, 1, 2)),
    *((name, 0, words("char(40); varchar(40)")) for name in ("map<date,decimal>", "struct")),
]
"""The values, by their place in `SOURCES`, that columns of MariaDB reject."""


def rejections(listed: Collection[tuple[str, int, Collection[str]]]) -> list[tuple[str, int, str]]:
    """Return each rejected value with its column."""
    found = {(source, value, target) for source, value, targets in listed for target in targets}
    return sorted(found, key=lambda each: (IN_ORDER[each[0]], *each[1:]))


def column_of(pair: Pair, targets: Sequence[str]) -> str:
    """Return the name of a pair's column."""
    return f"c{IN_ORDER[pair[0]]}_{targets.index(pair[1])}"


def refusal(sink: PostgresSink | MariaDBSink, fields: Sequence[t.StructField]) -> str:
    """Return the error with which the sink refuses a frame with these columns before it is evaluated."""
    frame: Any = TypedFrame(t.StructType([*OWN, *fields]), None)
    with pytest.raises(ConfigurationError) as error:
        sink.write(frame, [part(0, 0, 100)], never)
    return str(error.value)


def refused(sink: PostgresSink | MariaDBSink, fields: Sequence[t.StructField]) -> set[str]:
    """Return the columns whose types the sink refuses before a frame with these columns is evaluated."""
    found = re.findall(r"column '(c\d+_\d+)' is .*?, and the result's is .*?: make it ", refusal(sink, fields))
    return set(found)


def kept(frame: "DataFrame", pairs: Mapping[Pair, str], left_out: Collection[tuple[str, int, str]]) -> "DataFrame":
    """Return a frame with all values of each pair, except those that the column rejects."""
    columns = []
    for (source, target), name in pairs.items():
        bad = [str(value) for of, value, column in left_out if (of, column) == (source, target)]
        shown = f"IF(offset IN ({', '.join(bad)}), NULL, `{source}`)" if bad else f"`{source}`"
        columns.append(f"{shown} AS {name}")
    return frame.selectExpr("partition", "offset", *columns)


def values(spark: "SparkSession", sources: Mapping[str, Source] = SOURCES) -> "DataFrame":
    """Return a column with the values of each source."""
    most = max(len(source.values) for source in sources.values())
    rows = spark.range(most, numPartitions=1).selectExpr("0 AS partition", "id AS offset")
    return rows.selectExpr("*", *(f"{source.expression()} AS `{name}`" for name, source in sources.items()))


def changed(pairs: Mapping[Pair, str], rows: Sequence[Sequence[str | None]], left_out: Collection[Any]) -> list[str]:
    """Return what is not as it was written."""
    found = []
    for offset, row in enumerate(rows):
        for (source, target), shown in zip(pairs, row, strict=True):
            given = SOURCES[source].values
            if offset >= len(given) or (source, offset, target) in left_out:
                is_right = shown is None
            else:
                is_right = shown is not None and is_same(source, given[offset][1], shown, target)
            if not is_right:
                found.append(f"{source} in {target}: {given[offset : offset + 1]} is {shown!r}")
    return found


@dataclass(frozen=True)
class OneLine:
    """A row that Spark has rendered."""

    partition: int
    line: str
    rejected: None = None
    all_have_offsets: bool = True

    @property
    def counts(self) -> Mapping[int | None, int]:
        """Return the number of rows in each partition."""
        return {self.partition: 1}

    def __iter__(self) -> Iterator[tuple[int, str]]:
        yield self.partition, self.line


def refuses_each(sink: PostgresSink | MariaDBSink, frame: "DataFrame", columns: Sequence[str]) -> list[str]:
    """Write each row of a frame alone, as the driver does. Return what was not rejected with a clear error.

    Args:
        sink: The sink.
        frame: A row for each value that is rejected, with its number as partition. It is evaluated once.
        columns: The columns of the values, in the order of the rows.
    """
    problems: dict[int, int] = {}

    def note(_: RowCheck, found: Any) -> None:  # noqa: ANN401 - partitions and problems
        problems.update((partition, problem.number) for partition, problem in found if problem is not None)

    wrong = []
    dialect: Any = sink._dialect
    without_arrow = patch.object(frame_lines, "local_batches", lambda *_, **__: None)
    with patch.object(RowCheck, "first", note), without_arrow, dialect.evaluated(frame, []) as rows:
        lines: dict[int, str] = dict(rows)  # also those that Spark has found, which may not be UTF-8
    for number, column in enumerate(columns):
        if number in problems:
            continue  # Spark has found it, before anything is written

        @contextmanager
        def evaluated(*_: object, number: int = number) -> Iterator[OneLine]:
            yield OneLine(number, lines[number])

        # As lines, which name the row. `undoubted` has the batches.
        with patch.object(sink, "_evaluated", evaluated), patch.object(CopiedRows, "_copy_batches", lambda *_: None):
            try:
                sink.write(frame, [part(number, 0, 100)], never)
            except SinkRejectedError as error:
                named = rf"cannot store the row .* partition {number}, offset {number}(, column '{column}')?: "
                if re.search(named, str(error)) and "nothing was written" in str(error):
                    continue
                wrong.append(str(error))
            else:
                wrong.append(f"{column} has a value")
    return wrong


def rejected_rows(
    spark: "SparkSession", wanted: Sequence[tuple[str, int, str]], targets: Sequence[str], *, tasks: int = 1
) -> tuple["DataFrame", list[str]]:
    """Return a frame with a row for each rejected value, and the name of the column that has the row's value."""
    names = [column_of((source, target), targets) for source, _, target in wanted]
    cases = dict.fromkeys(names, "CASE offset")
    for number, ((source, value, _), name) in enumerate(zip(wanted, names, strict=True)):
        cases[name] += f" WHEN {number} THEN {SOURCES[source].values[value][0]}"
    rows = spark.range(len(wanted), numPartitions=max(1, tasks)).selectExpr("int(id) AS partition", "id AS offset")
    return rows.selectExpr("*", *(f"{case} END AS {name}" for name, case in cases.items())), names


# PostgreSQL


class Postgres:
    """A schema with tables of many columns."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.schema = dsn, own_schema()
        self.execute(
            f"CREATE SCHEMA {self.schema}",
            "CREATE TYPE mood AS ENUM ('fine', '17')",
            "CREATE DOMAIN whole AS integer CHECK (VALUE > 0)",
            "CREATE TYPE pair AS (a integer, b integer)",
        )

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, and return the rows of the last one."""
        with psycopg.connect(self.dsn, autocommit=True, options=f"-c search_path={self.schema}") as connection:
            cursor = connection.execute("SET TimeZone = 'UTC'")
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def in_binary(self, columns: Mapping[Pair, str]) -> dict[Pair, str]:
        """Return the columns that have a binary form."""
        name = f"table_{own_schema()}"
        self.table(name, columns)
        with psycopg.connect(self.dsn) as connection:
            there = table_columns(connection, self.schema, name)
        return {pair: name for pair, name in columns.items() if binary_form(SOURCES[pair[0]].data_type, there[name])}

    def table(self, name: str, columns: Mapping[Pair, str], **options: Any) -> PostgresSink:  # noqa: ANN401 - options
        """Create a table with these columns."""
        sink = PostgresSink(self.dsn, name, schema=self.schema, **options)
        sink.create_tables(t.StructType(OWN))
        added = ", ".join(f"ADD COLUMN {column} {target}" for (_, target), column in columns.items())
        self.execute(f"ALTER TABLE {name} {added}")
        return sink

    def rows(self, table: str, pairs: Mapping[Pair, str]) -> list[tuple[Any, ...]]:
        """Return the values as text, ordered by offset."""
        shown = {
            "bytea": "encode({}, 'hex')",
            # A cast to text would drop spaces.
            **dict.fromkeys(("char(40)", "bpchar"), "{}"),
        }
        columns = ", ".join(shown.get(target, "{}::text").format(name) for (_, target), name in pairs.items())
        return self.execute(f"SELECT {columns} FROM {table} ORDER BY kafka_offset")  # noqa: S608 - own names


GROUPS: Final = (NUMBERS, DECIMALS, ("float", "double", "boolean", "string", "binary"), TIMES, NESTED)
"""The Spark types of each batch. A plan with the columns of all of them would take Spark minutes."""


def groups_of(pairs: Iterable[Pair], targets: Sequence[str]) -> list[dict[Pair, str]]:
    """Return the columns of pairs for each batch. Values that are no strings are written to two types of texts."""
    chosen = [pair for pair in pairs if pair[0] == "string" or pair[1] not in _MORE_TEXTS]
    return [{pair: column_of(pair, targets) for pair in chosen if pair[0] in group} for group in GROUPS]


def test_each_pair_of_postgres_is_accepted_or_refused(postgres: str) -> None:
    """The error comes before the frame is evaluated, and names each column whose type would change values."""
    database = Postgres(postgres)
    names = {
        (source, target): column_of((source, target), POSTGRES_TYPES) for source in SOURCES for target in POSTGRES_TYPES
    }
    sink = database.table("pairs", names)
    fields = [t.StructField(name, SOURCES[source].data_type) for (source, _), name in names.items()]
    accepted = {name for pair, name in names.items() if pair[1] in IN_POSTGRES[pair[0]]}
    assert refused(sink, fields) == set(names.values()) - accepted
    for kind in UNWRITTEN:
        assert "which a PostgreSQL sink does not write. Cast the column" in refusal(sink, [t.StructField("c0_0", kind)])


@pytest.mark.parametrize("written_by", ["driver", "executors"])
def test_postgres_keeps_each_value_of_each_type(spark: "SparkSession", postgres: str, written_by: str) -> None:
    """Tasks send the columns that have a binary form in it, and those of other batches as CSV."""
    database, left_out = Postgres(postgres), rejections(REJECTED_BY_POSTGRES)
    pairs = [(source, target) for source, targets in IN_POSTGRES.items() for target in targets]
    pairs = [pair for pair in pairs if pair[0] != "string" or pair[1] in TEXT]
    groups = {f"rows_{number}": group for number, group in enumerate(groups_of(pairs, POSTGRES_TYPES))}
    if written_by == "executors":
        groups |= {f"binary_{name}": database.in_binary(group) for name, group in groups.items()}
    for table, columns in groups.items():
        sink = database.table(table, columns, written_by=written_by)
        sources = {source: SOURCES[source] for source, _ in columns}
        sink.write(kept(values(spark, sources), columns, left_out), [part(0, 0, 100)], never)
        assert changed(columns, database.rows(table, columns), left_out) == []


def test_postgres_refuses_each_value_that_a_column_would_change(spark: "SparkSession", postgres: str) -> None:
    """The driver names each such row, and no task copies it."""
    database, all_rejected = Postgres(postgres), rejections(REJECTED_BY_POSTGRES)
    of_a_kind = {(source, "whole") for source in SOURCES if source != "int"} | {
        ("string", name) for name in _MORE_TEXTS
    }
    wanted = [each for each in all_rejected if (each[0], each[2]) not in of_a_kind]
    for number, group in enumerate(GROUPS):
        pairs = groups_of(((source, target) for source, _, target in wanted), POSTGRES_TYPES)[number]
        sink = database.table(f"rows_{number}", pairs, written_by="driver")
        chosen = [each for each in wanted if (each[0], each[2]) in pairs]
        frame, names = rejected_rows(spark, chosen, POSTGRES_TYPES)
        assert refuses_each(sink, frame, names) == [], group
        assert database.execute(f"SELECT count(*) FROM rows_{number}") == [(0,)]  # noqa: S608 - an own name
        binary = database.in_binary(pairs)
        for of in (binary, {pair: name for pair, name in pairs.items() if pair not in binary}):
            rows = [each for each in chosen if (each[0], each[2]) in of]
            assert undoubted(sink, *rejected_rows(spark, rows, POSTGRES_TYPES, tasks=len(rows))) == []


def undoubted(sink: PostgresSink, frame: "DataFrame", names: Sequence[str]) -> list[str]:
    """Return the columns of values of which a task has no doubt, if each task has one row."""
    if not names:
        return []
    with sink._transaction() as connection:
        there = table_columns(connection, sink._dialect.schema, sink._dialect.table)
    ids = {number: number for number in range(len(names))}
    found = task_rows._copy(sink._dialect, "marshal_staging_test", frame, ids, there)
    return [names[partition or 0] for _, partition, _, _, error in found if error != task_rows._DOUBTFUL]


def test_types_of_postgres_that_parse_texts(spark: "SparkSession", postgres: str) -> None:
    """Each keeps a text that denotes a value, and rejects one that denotes none."""
    database = Postgres(postgres)
    columns = {("string", target): f"c{number}" for number, target in enumerate(FOR_TYPES)}
    assert {*FOR_TYPES, *TEXT} == set(IN_POSTGRES["string"])
    names = list(columns.values())
    schema = t.StructType([*OWN, *(t.StructField(name, t.StringType()) for name in names)])
    good = tuple(text for text, _ in FOR_TYPES.values())
    for writer in ("driver", "executors"):
        sink = database.table(writer, columns, written_by=writer)
        sink.write(local_frame(spark, [(0, 0, *good)], schema), [part(0, 0, 100)], never)
        assert database.rows(writer, columns) == [good]
    bad = [
        (number, number, *(text if other == number else None for other in range(len(names))))
        for number, (_, text) in enumerate(FOR_TYPES.values())
    ]
    sink = database.table("bad", columns, written_by="driver")
    assert refuses_each(sink, local_frame(spark, bad, schema), names) == []


# MariaDB


def mariadb_table(output: MariaDBOutput, name: str, columns: Mapping[Pair, str]) -> MariaDBSink:
    """Create a table with these columns and their types."""
    sink = MariaDBSink(output.dsn, name)
    sink.create_tables(t.StructType(OWN))
    added = ", ".join(f"ADD COLUMN {column} {target}" for (_, target), column in columns.items())
    output.execute(f"ALTER TABLE {name} {added}")
    return sink


def test_each_pair_of_mariadb_is_accepted_or_refused(mariadb: str) -> None:
    """The error comes before the frame is evaluated, and names each column whose type would change values."""
    output = MariaDBOutput(mariadb, own_schema())
    columns = {f"c0_{number}": target for number, target in enumerate(MARIADB_TYPES)}
    sink = mariadb_table(output, "pairs", {("", target): name for name, target in columns.items()})
    for source, accepted in IN_MARIADB.items():
        found = refused(sink, [t.StructField(name, SOURCES[source].data_type) for name in columns])
        assert {columns[name] for name in found} == set(MARIADB_TYPES) - set(accepted), source
    for kind in UNWRITTEN:
        assert "which a MariaDB sink does not write. Cast the column" in refusal(sink, [t.StructField("c0_0", kind)])


def test_mariadb_keeps_each_value_of_each_type(spark: "SparkSession", mariadb: str) -> None:
    """A negative zero is stored as zero, and equal to it."""
    output, left_out = MariaDBOutput(mariadb, own_schema()), rejections(REJECTED_BY_MARIADB)
    pairs = [(source, target) for source, targets in IN_MARIADB.items() for target in targets]
    for number, columns in enumerate(groups_of(pairs, MARIADB_TYPES)):
        sink = mariadb_table(output, f"rows_{number}", columns)
        sources = {source: SOURCES[source] for source, _ in columns}
        sink.write(kept(values(spark, sources), columns, left_out), [part(0, 0, 100)], never)
        shown = ", ".join(_shown(target).format(name) for (_, target), name in columns.items())
        selected = f"SELECT {shown} FROM rows_{number} ORDER BY kafka_offset"  # noqa: S608 - own names
        assert changed(columns, output.execute("SET time_zone = '+00:00'", selected), left_out) == []


def _shown(target: str) -> str:
    """Return SQL that shows a value as text."""
    if target.startswith("float"):
        return "CAST({} * 1e0 AS CHAR)"  # MariaDB shows six digits of a float
    if target.startswith("timestamp"):
        return "CONCAT({}, '+00')"
    return "HEX({})" if target in {"varbinary(40)", "longblob"} else "CAST({} AS CHAR)"


def test_mariadb_refuses_each_value_that_a_column_would_change(spark: "SparkSession", mariadb: str) -> None:
    """The error names the message, and nothing is written."""
    output, wanted = MariaDBOutput(mariadb, own_schema()), rejections(REJECTED_BY_MARIADB)
    for number, group in enumerate(GROUPS):
        pairs = groups_of(((source, target) for source, _, target in wanted), MARIADB_TYPES)[number]
        frame, names = rejected_rows(spark, [each for each in wanted if (each[0], each[2]) in pairs], MARIADB_TYPES)
        assert refuses_each(mariadb_table(output, f"rows_{number}", pairs), frame, names) == [], group
        assert output.execute(f"SELECT count(*) FROM rows_{number}") == [(0,)]  # noqa: S608 - an own name
