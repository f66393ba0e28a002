"""Reads the committed files of a file output into Spark, without the rows that a newer generation has replaced.

`FileSink.read` uses it. The files of each commit are read with the columns with which they were written. Only then are
they combined by name, because CSV files contain no column names.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.files.commit_log import Commit, CommitView
from marshal_dagster.sinks.files.formats import TEXT_FORMATS, Folders, as_nullable, check_readable, read_files
from marshal_dagster.sinks.files.older_rows import OlderRows
from marshal_dagster.sinks.files.places import visible_place
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.spark.column_names import check_names, is_case_sensitive, name_key
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType

_OFFSETS_PER_BUCKET = 4096


@dataclass(slots=True)
class _Part:
    """Files that are read together, and the offsets at which their rows were replaced: (partition, start, end)."""

    schema: "StructType"
    options: Mapping[str, str]
    folders: Folders | None
    files: list[str] = field(default_factory=list)
    replaced: set[tuple[int, int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Places:
    """Where files are, as Spark reads them."""

    path: Callable[[str], str]
    """Returns the path of a committed file."""
    base: Callable[[str], str]
    """Returns the folder below which the folders of a committed file are named after columns."""


def read_committed(spark: "SparkSession", view: CommitView, places: Places, options: Mapping[str, str]) -> "DataFrame":
    """Return the rows of the commits of `view`, without those that were replaced.

    Files with replaced rows are read separately, those of one generation together, and anti-joined with the replaced
    offsets.

    Args:
        spark: The session that reads.
        view: The commits.
        places: Where the files are.
        options: The reader's options; files of a text format are read with the options of their commit.
    """
    case_sensitive = is_case_sensitive(spark)
    schemas = _schemas(view)
    columns = _columns(schemas, case_sensitive=case_sensitive)
    format_name = view.commits[-1].format
    check_readable(spark, format_name)
    frames = []
    for part in _parts(view, places, schemas, options):
        kept = _read(spark, format_name, part)
        frames.append(_with_columns(kept, part.schema, columns, case_sensitive=case_sensitive))
    if not frames:
        return spark.createDataFrame([], t.StructType(list(columns.values())))
    whole = frames[0]
    for frame in frames[1:]:
        whole = whole.union(frame)
    return whole


def read_older(
    spark: "SparkSession", older: Mapping[str, OlderRows], places: Places, options: Mapping[str, str], key_column: str
) -> "DataFrame":
    """Return the rows of ranges that are not replaced, with the columns of their commits and the range's key.

    Ranges of one generation are read together, because Spark needs some time to plan each read.

    Args:
        spark: The session that reads.
        older: The ranges of commits with the same columns and options, with the offsets that are replaced, by key.
        places: Where the visible files are.
        options: As for `read_committed`.
        key_column: The name of the column with the key.
    """
    groups: dict[tuple[object, ...], dict[str, OlderRows]] = {}
    for key, rows in older.items():
        taken = rows.entry.taken
        generation = taken.group, taken.topic, taken.data_topic_id, taken.generation
        groups.setdefault(generation, {})[key] = rows
    frames = [_read_generation(spark, group, places, options, key_column) for group in groups.values()]
    return reduce(lambda one, other: one.union(other), frames)


def _read_generation(
    spark: "SparkSession", older: Mapping[str, OlderRows], places: Places, options: Mapping[str, str], key_column: str
) -> "DataFrame":
    first = next(iter(older.values()))
    folders = _folders(first.commit, first.files[0], places)
    part = _Part(_schema_from(first.commit.schema), _options_of(first.commit, options), folders)
    keys: list[Column] = []
    for key, range_ in older.items():
        part.files.extend(map(places.path, range_.files))
        part.replaced.update((range_.entry.taken.partition, start, end) for start, end in range_.replaced)
        # The name of a visible file without its folder has the attempt and the range, so it shows the key.
        names = dict.fromkeys(visible_place(name).rpartition("/")[2] for name in range_.files)
        keys.extend(f.struct(f.lit(name).alias("file"), f.lit(key).alias(key_column)) for name in names)
    stored = read_files(spark, first.commit.format, part.schema, part.options, part.files, folders=folders)
    own = stored.columns
    file_name = f.substring_index(f.input_file_name(), "/", -1)
    named = stored.select(f.struct(*map(_column, own)).alias("row"), file_name.alias("file"))
    of_file = f.broadcast(spark.range(1).select(f.inline(f.array(*keys))))
    rows = named.join(of_file, "file").select(*(f.col("row").getField(name).alias(name) for name in own), key_column)
    return _without(spark, rows, part.replaced)


def _column(name: str) -> "Column":
    return f.col(quoted(name))


def _read(spark: "SparkSession", format_name: str, part: _Part) -> "DataFrame":
    rows = read_files(spark, format_name, part.schema, part.options, part.files, folders=part.folders)
    return _without(spark, rows, part.replaced) if part.replaced else rows


def _folders(commit: Commit, name: str, places: Places) -> Folders | None:
    return Folders(commit.partition_by, places.base(name)) if commit.partition_by else None


def _parts(
    view: CommitView,
    places: Places,
    schemas: Mapping[str, "StructType"],
    options: Mapping[str, str],
) -> list[_Part]:
    parts: dict[tuple[object, ...], _Part] = {}
    for commit in view.commits:
        schema, own_options = schemas[commit.schema], _options_of(commit, options)
        layout = id(schema), *sorted(own_options.items())
        for entry in commit.entries:
            replaced = view.replaced(entry)
            # The files of one class can share their replaced offsets, because an offset of a partition means the
            # same message in all of them.
            taken = entry.taken
            row_class = (taken.group, taken.topic, taken.data_topic_id, taken.generation) if replaced else ()
            for name in view.files(entry):
                folders = _folders(commit, name, places)
                part = parts.setdefault((row_class, layout, folders), _Part(schema, own_options, folders))
                part.files.append(places.path(name))
                part.replaced.update((taken.partition, start, end) for start, end in replaced)
    return list(parts.values())


def _options_of(commit: Commit, options: Mapping[str, str]) -> Mapping[str, str]:
    return commit.options or {} if commit.format in TEXT_FORMATS else options


def _with_columns(
    rows: "DataFrame", schema: "StructType", columns: Mapping[str, "StructField"], *, case_sensitive: bool
) -> "DataFrame":
    """Return the rows with the columns of all commits, in their order; columns that these rows lack are null."""
    own = {name_key(name, case_sensitive=case_sensitive): name for name in schema.names}
    if list(own.values()) == [column.name for column in columns.values()]:
        return rows
    return rows.select(
        *(
            (f.col(quoted(own[key])) if key in own else f.lit(None).cast(column.dataType)).alias(column.name)
            for key, column in columns.items()
        )
    )


def _without(spark: "SparkSession", rows: "DataFrame", replaced: Collection[tuple[int, int, int]]) -> "DataFrame":
    """Return the rows without those at `replaced`. Buckets of offsets make this an equi-join, which scales."""
    first, last = f.col("start"), f.col("end") - 1
    bucket = f.explode(f.sequence(_bucket(first), _bucket(last))).alias("bucket")
    gone = (
        spark.createDataFrame(sorted(replaced), _interval_schema())
        .select("partition", "start", "end", bucket)
        .alias("gone")
    )
    kept = rows.alias("kept")
    offset = f.col(f"kept.{OFFSET_COLUMN}")
    return kept.join(
        gone,
        (f.col(f"kept.{PARTITION_COLUMN}") == f.col("gone.partition"))
        & (_bucket(offset) == f.col("gone.bucket"))
        & (offset >= f.col("gone.start"))
        & (offset < f.col("gone.end")),
        "left_anti",
    )


def _interval_schema() -> "StructType":
    """Return the schema as types instead of DDL, because `end` is a reserved word in some sessions."""
    kinds = {"partition": t.IntegerType(), "start": t.LongType(), "end": t.LongType()}
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


def _bucket(offset: "Column") -> "Column":
    return f.floor(offset / _OFFSETS_PER_BUCKET)


def _schemas(view: CommitView) -> dict[str, "StructType"]:
    """Return the columns by the JSON text of a commit's schema, newest first; equal columns are one object."""
    known: dict[str, StructType] = {}
    texts = dict.fromkeys(commit.schema for commit in reversed(view.commits))
    read = {text: _schema_from(text) for text in texts}
    return {text: known.setdefault(schema.json(), schema) for text, schema in read.items()}


def _schema_from(text: str) -> "StructType":
    """Return the columns of a commit with every value nullable, as they are read."""
    columns = t.StructType.fromJson(json.loads(text)).fields
    return t.StructType([t.StructField(column.name, as_nullable(column.dataType), nullable=True) for column in columns])


def _columns(schemas: Mapping[str, "StructType"], *, case_sensitive: bool) -> dict[str, "StructField"]:
    """Return the columns of all commits, newest first, by their name as the session compares names.

    Raises:
        ConfigurationError: A column's type differs between commits.
    """
    columns: dict[str, t.StructField] = {}
    for schema in schemas.values():
        check_names(schema.names, case_sensitive=case_sensitive, what="a commit's columns")
        for column in schema.fields:
            known = columns.setdefault(name_key(column.name, case_sensitive=case_sensitive), column)
            if known.dataType != column.dataType:
                raise ConfigurationError(
                    f"column {column.name!r}: its type changed from {column.dataType.simpleString()} to "
                    f"{known.dataType.simpleString()} between commits of this output. Read the files that "
                    "`committed_files` returns with Spark's own reader, and convert the column"
                )
    return columns
