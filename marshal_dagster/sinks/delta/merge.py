"""The MERGE with which the newest row of each key replaces the stored one (decisions 20 and 24).

Rows of a key are in the total order that `database.upsert` describes. `delta.table` executes the statement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

from marshal_dagster.errors import ConfigurationError
from marshal_dagster.sinks.delta.commit import APPLICATION, MARSHAL_COLUMN, Commit
from marshal_dagster.sinks.rejected_rows import RejectedRow
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, quoted
from marshal_dagster.sinks.upsert_keys import WITHOUT_ORDER, Keys
from marshal_dagster.spark.conversion_settings import settings_of
from marshal_dagster.spark.lazy_pyspark import functions as f
from marshal_dagster.spark.lazy_pyspark import types as t

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType

KEY_COLUMN: Final = "marshal_key"
"""A struct with what is known of all rows of a key; no column of the result may have this name."""
NO_ORDER: Final = "marshal-dagster: no order decides between two rows of a key"
"""The error that Spark raises within a MERGE if no order decides between a row and the stored one."""
_SETTINGS: Final = ("spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion")
_METADATA: Final = "spark.databricks.delta.commitInfo.userMetadata"
_DECLARED_TYPE: Final = "__CHAR_VARCHAR_TYPE_STRING"
"""The name with which Spark stores the declared type of a column that it shows as a string."""
_CASE_SENSITIVE: Final = "spark.sql.caseSensitive"


def check_keys(keys: Keys, schema: "StructType") -> None:
    """Raise `ConfigurationError` unless Spark finds equal values of the keys exactly, and can order the rows."""
    keys.check(schema)
    exact = t.IntegralType | t.DecimalType | t.StringType | t.BinaryType | t.BooleanType
    times = t.DateType | t.TimestampType | t.TimestampNTZType
    for name in keys.columns:
        kind = schema[name].dataType
        has_collation = isinstance(kind, t.StringType) and kind.simpleString() != "string"
        if has_collation or not isinstance(kind, exact | times):
            raise ConfigurationError(
                f"keys: column {name!r} has type {kind.simpleString()}, of which equal values cannot be found exactly. "
                "Use a column of whole numbers, decimals, strings without a collation, bytes, dates or times"
            )


def check_types(output: str, result: "StructType", stored: "StructType", keys: Keys) -> None:
    """Raise `ConfigurationError` unless the table has each column of the result with exactly its type.

    Spark shows `char(n)` as a string, but adds spaces to what is stored. So the key `a` would never find its row.
    """
    padded = {column.name.lower() for column in stored.fields if _is_padded(column)}
    if found := next((name for name in keys.columns if name.lower() in padded), None):
        raise ConfigurationError(
            f"{output}: key {found} has type char, to which Spark adds spaces, so a row would not be found by its key. "
            "Make the column a string"
        )
    kinds = {column.name.lower(): column.dataType.simpleString() for column in stored.fields}  # Delta ignores case
    for column in result.fields:
        kind, own = kinds.get(column.name.lower()), column.dataType.simpleString()
        if kind is None:
            raise ConfigurationError(
                f"{output} lacks the column {column.name}. Add it, or give the sink options={{'mergeSchema': 'true'}}"
            )
        if kind != own:
            raise ConfigurationError(
                f"{output}: column {column.name} has type {kind}, and {own} in the result, but mode='upsert' needs the "
                "same type. Cast the column of the result"
            )


def _is_padded(column: "StructField") -> bool:
    return str(column.metadata.get(_DECLARED_TYPE, "")).startswith("char")


def newest_rows(rows: "DataFrame", keys: Keys) -> "DataFrame":
    """Return the newest row of each key, with the column `KEY_COLUMN`."""
    from pyspark.sql import Window

    order = _order(keys)
    columns = {name: f.col(quoted(name)) for name in (*keys.columns, *order)}
    of_key = Window.partitionBy(*(columns[name] for name in keys.columns))
    newest_first = of_key.orderBy(*(columns[name].desc() for name in order))
    is_null = reduce(or_, (column.isNull() for column in columns.values()))
    is_tie = f.expr("true")
    for name in order:
        is_tie &= f.lead(columns[name]).over(newest_first).eqNullSafe(columns[name])
    partition = f.col(PARTITION_COLUMN)
    of_rows = f.struct(
        f.row_number().over(newest_first).alias("rank"),
        f.max(is_null).over(of_key).alias("has_null"),
        is_tie.alias("is_tie"),
        f.min(partition).over(of_key).alias("first"),
        f.max(partition).over(of_key).alias("last"),
    )
    return rows.withColumn(KEY_COLUMN, of_rows).where(f.col(f"{KEY_COLUMN}.rank") == 1)


def first_problem(newest: "DataFrame", keys: Keys) -> RejectedRow | None:
    """Return the first of the newest rows with a null key, or with a row of the batch that no order decides."""
    own = f.col(KEY_COLUMN)
    has_null, is_tie = own.getField("has_null"), own.getField("is_tie")
    crosses = (own.getField("first") != own.getField("last")) & f.lit(keys.order_by is None)
    place = (f.col(PARTITION_COLUMN), f.col(OFFSET_COLUMN))
    found = f.struct(*place, has_null, crosses.alias("crosses"), own.getField("first"), own.getField("last"))
    row = newest.agg(f.min(f.when(has_null | is_tie | crosses, found)).alias("first")).head()
    if row is None or row["first"] is None:
        return None
    partition, offset, is_null, is_crossing, first, last = row["first"]
    reason = "the message has two rows of this key, and no order decides"
    if is_null:
        named = ", ".join([*keys.columns, *([] if keys.order_by is None else [keys.order_by]), OFFSET_COLUMN])
        reason = f"one of {named} is null in a row with these keys"
    elif is_crossing:
        reason = f"partitions {first} and {last} both have rows of its key. {WITHOUT_ORDER}"
    return RejectedRow(partition, offset, None, reason)


@dataclass(frozen=True, slots=True)
class Merge:
    """How the newest rows `s` of a batch replace the stored rows `t`."""

    keys: Keys
    gone: str | None
    """The condition for stored rows of older generations that the batch replaces, None if there are none."""

    def statement(self, table: str, source: str, columns: Sequence[str]) -> str:
        """Return the MERGE of the rows in the view `source` into the table; `columns` are those of the view."""
        names = [quoted(name) for name in columns]
        replaces = f"WHEN {self.gone} THEN true " if self.gone else ""
        key = quoted(self.keys.columns[0])
        decides = (  # Delta evaluates it for rows without a match too
            f"CASE WHEN s.{key} IS NULL OR t.{key} IS NULL THEN false {replaces}"
            f"WHEN {self._is_newer('s', 't')} THEN true WHEN {self._is_newer('t', 's')} THEN false "
            f"ELSE raise_error('{NO_ORDER}') END"
        )
        deletes = f" WHEN NOT MATCHED BY SOURCE AND {self.gone} THEN DELETE" if self.gone else ""
        return (
            f"MERGE INTO {table} AS t USING {source} AS s ON {self._same_key()} "  # noqa: S608 - names are quoted
            f"WHEN MATCHED AND {decides} THEN UPDATE SET {', '.join(f't.{name} = s.{name}' for name in names)} "
            f"WHEN NOT MATCHED THEN INSERT ({', '.join(names)}) VALUES ({', '.join(f's.{name}' for name in names)})"
            f"{deletes}"
        )

    def conflict(self, newest: "DataFrame", stored: "DataFrame", topic: str) -> RejectedRow | None:
        """Return the first row of `topic` for which no order decides, None if there is no such row any more."""
        decided = " OR ".join(filter(None, [self.gone, self._is_newer("s", "t"), self._is_newer("t", "s")]))
        found = (
            newest.alias("s")
            .join(stored.alias("t"), f.expr(self._same_key()))
            .where(f.expr(f"NOT coalesce({decided}, false)"))
            .selectExpr(
                f"s.{PARTITION_COLUMN}", f"s.{OFFSET_COLUMN}", f"t.{MARSHAL_COLUMN}.topic", "t.partition AS other"
            )
            .orderBy(PARTITION_COLUMN, OFFSET_COLUMN)
            .head()
        )
        if found is None:
            return None
        if found["topic"] is None:
            reason = "the stored row of its key was not written by this sink, so no order decides. Delete that row"
        elif (found["topic"], found["other"]) == (topic, found[PARTITION_COLUMN]):
            reason = "the stored row of its key is from another group and data topic"
        else:
            where = f"partition {found['other']} of topic {found['topic']!r}"
            reason = f"the stored row of its key is from {where}. {WITHOUT_ORDER}"
        return RejectedRow(found[PARTITION_COLUMN], found[OFFSET_COLUMN], None, reason)

    def _same_key(self) -> str:
        return " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in self.keys.columns)

    def _is_newer(self, one: str, other: str) -> str:
        """Return the condition that `one` of the stored row `t` and the batch's row `s` is newer than the `other`."""

        def both(name: str, operator: str) -> str:
            return f"{one}.{name} {operator} {other}.{name}"

        generation, topic = f"{MARSHAL_COLUMN}.generation", f"{MARSHAL_COLUMN}.topic"
        is_same_group = both(f"{MARSHAL_COLUMN}.`group`", "=")
        newer = (
            f"{both(PARTITION_COLUMN, '=')} AND (({is_same_group} AND {both(generation, '>')}) OR "
            f"((NOT {is_same_group} OR {both(generation, '=')}) AND {both(OFFSET_COLUMN, '>')}))"
        )
        if self.keys.order_by is None:
            is_same_data = both(f"{MARSHAL_COLUMN}.data_topic_id", "=")
            return f"({both(topic, '=')} AND ({is_same_group} OR {is_same_data}) AND {newer})"
        newer_message = f"{both(topic, '>')} OR ({both(topic, '=')} AND ({both(PARTITION_COLUMN, '>')} OR ({newer})))"
        order, is_foreign = quoted(self.keys.order_by), f"t.{MARSHAL_COLUMN} IS NULL"
        if one == "s":
            return (
                f"(t.{order} IS NULL OR s.{order} > t.{order} OR "
                f"(s.{order} = t.{order} AND NOT {is_foreign} AND ({newer_message})))"
            )
        return f"(t.{order} > s.{order} OR (t.{order} = s.{order} AND ({is_foreign} OR ({newer_message}))))"


def repeated_keys(stored: "DataFrame", keys: Keys) -> int:
    """Return of how many keys the table has more than one row. Reads all rows."""
    columns = [f.col(quoted(name)) for name in keys.columns]
    is_key = reduce(lambda one, other: one & other, (column.isNotNull() for column in columns))
    return stored.where(is_key).groupBy(*columns).count().where(f.col("count") > 1).count()


def commit_session(spark: "SparkSession", commit: Commit) -> "SparkSession":
    """Return a session with the settings of `spark` whose statements commit with the number and metadata of `commit`.

    A MERGE takes them from the session's settings only, and another thread of the run may use `spark` meanwhile.
    """
    from pyspark.errors import PySparkException

    session = spark.newSession()
    session.catalog.setCurrentCatalog(spark.catalog.currentCatalog())
    present = settings_of(session)
    for name, value in settings_of(spark).items():
        if present.get(name) == value:
            continue
        try:
            session.conf.set(name, value)
        except PySparkException:
            continue  # a setting of Spark's start, which both sessions have
    own = (APPLICATION, str(commit.number))
    for name, value in {**dict(zip(_SETTINGS, own, strict=True)), _METADATA: commit.to_metadata()}.items():
        session.conf.set(name, value)
    session.conf.set(_CASE_SENSITIVE, "false")  # Delta ignores case, whatever the run's session does
    return session


def _order(keys: Keys) -> list[str]:
    """Return the columns that order the rows of a key within a batch, the most important first."""
    return [OFFSET_COLUMN] if keys.order_by is None else [keys.order_by, PARTITION_COLUMN, OFFSET_COLUMN]
