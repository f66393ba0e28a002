"""A decoded batch, in which each record has a value or a reason why it has none.

No record is left out silently: the methods of `DecodedBatch` define what happens to the bad records.
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from marshal_dagster.errors import BadRecord, ConfigurationError, DecodeError
from marshal_dagster.spark import connect
from marshal_dagster.spark.column_names import check_names, check_nested_names, is_case_sensitive
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

REASON: Final = "reason"
"""The column with the reason why a record has no value; null for good records."""
RAW: Final = "raw"
"""The column with the bytes of a bad record."""
NOT_UTF8 = "it has a text that is not UTF-8"

_VALUE = "_marshal_value"
_REASON = "_marshal_reason"
_READ = "_marshal_read"
ADDED: Final = "_marshal_both"
"""The column with the result of a function that returns value and reason together."""
# A dead letter is larger than its record, which may be as large as its topic allows. The dead letters' topic decides.
_LARGE_LETTERS: Final = {"kafka.max.request.size": str(128 * 1024**2), "kafka.buffer.memory": str(128 * 1024**2)}
_OF_A_RECORD = ("topic", "partition", "offset", "timestamp", "key", "value")
_HEADERS = ("topic", "partition", "offset", "timestamp", "key", "reason")


class NullPolicy(Enum):
    """How a record with a null value is treated.

    Example:
        ```python
        rows = decode_json(frame, "id bigint, shop string", nulls=NullPolicy.KEEP).or_fail()
        ```
    """

    BAD = auto()
    """It is a bad record."""
    KEEP = auto()
    """It is a good record with a null value, such as a tombstone of a compacted topic."""


class Connection(Protocol):
    """The connection of Spark to a Kafka cluster, such as a `KafkaConnection`."""

    def spark_options(self) -> Mapping[str, str]:
        """Return the options for Spark's Kafka connector, each with the prefix `kafka.`."""
        ...


class DecodedBatch:
    """The decoded records of a batch. Choose the method that handles the bad records as you need.

    Each record is either good or bad. That never changes between evaluations of the frames, because the reason depends
    only on the record's bytes and the schemas. The rows have the columns of the frame that was decoded, with the
    decoded struct as `value`. As with `batch.read`, each action reads Kafka again: cache the frame before it is decoded
    (`frame.cache()`) if there are several actions.

    Example:
        ```python
        rows = decode_json(batch.read(spark), "id bigint NOT NULL, shop string").or_fail()
        batch.write(rows.select("partition", "offset", "value.*"))
        ```
    """

    def __init__(
        self, frame: "DataFrame", value: "Column", reason: "Column", *, columns: Sequence[str] | None = None
    ) -> None:
        """Combine a frame with columns for value and reason.

        Args:
            frame: The frame of `batch.read`.
            value: The decoded value.
            reason: Why a record is bad, or null. Bad records have no value.
            columns: The columns of `frame` in the result (default: all).

        Raises:
            ConfigurationError: The frame lacks a column, or has one of a name that is needed here.
        """
        self._columns = tuple(frame.columns if columns is None else columns)
        missing = [name for name in _OF_A_RECORD if name not in frame.columns]
        if missing:
            raise ConfigurationError(
                f"the frame to decode has no column {', '.join(missing)}: decode the unchanged frame of batch.read(...)"
            )
        self._case_sensitive = is_case_sensitive(frame.sparkSession)
        self._refuse_columns(_VALUE, _REASON, _READ, ADDED)
        self._frame = frame.select("*", value.alias(_VALUE), reason.alias(_REASON))
        decoded = self._frame.schema[_VALUE].dataType  # makes Spark check schemas and functions now
        check_nested_names("value", decoded, case_sensitive=self._case_sensitive)

    def or_fail(self) -> "DataFrame":
        """Check all records in one pass, and return the rows.

        Returns:
            The rows of all records.

        Raises:
            DecodeError: There are bad records. The message has their number and the first one of each partition.
        """
        first = f.min(f.struct("offset", f.col(_REASON).alias(REASON))).alias("first")
        rows = self._bad.groupBy("topic", "partition").agg(f.count("*").alias("count"), first).collect()
        if rows:
            firsts = sorted((row["topic"], row["partition"], *row["first"]) for row in rows)
            raise DecodeError(sum(row["count"] for row in rows), [BadRecord(*first) for first in firsts])
        return self.or_fail_at_first()

    def or_fail_at_first(self) -> "DataFrame":
        """Return the rows without checking them first: an action that reads the value of a bad record fails.

        Returns:
            The rows of all records. Spark's error names the first bad record that it evaluates.
        """
        message = f.concat_ws("", f.lit("bad record at "), _coordinates(), f.lit(": "), f.col(_REASON))
        value = f.when(f.col(_REASON).isNull(), f.col(_VALUE)).otherwise(f.raise_error(message))
        return self._with_value(self._frame, value)

    def or_dead_letter(self, topic: str, connection: Connection) -> "DataFrame":
        """Write the bad records to a Kafka topic at once, and return the good rows.

        A dead letter has the value and headers of the record, followed by the headers `marshal.topic`, `.partition`,
        `.offset`, `.timestamp` (ms), `.key` and `.reason`. Its key is `topic/partition/offset`. Dead letters are
        written at least once: a repeated batch writes them again with the same keys.

        Args:
            topic: The topic for dead letters.
            connection: The connection to its cluster.

        Returns:
            The rows of the good records.

        Raises:
            ConfigurationError: A bad record belongs to `topic` itself.
        """
        looped = f"dead letters of topic {topic!r} cannot go to that topic itself"
        key = f.when(f.col("topic") == topic, f.raise_error(f.lit(looped))).otherwise(_coordinates())
        headers = f.array(
            *(f.struct(f.lit(f"marshal.{name}").alias("key"), _header(name).alias("value")) for name in _HEADERS)
        )
        if "headers" in self._columns:
            headers = f.concat(f.coalesce(f.col("headers"), f.filter(headers, lambda _: f.lit(False))), headers)  # noqa: FBT003
        letters = self._bad.select(key.cast("binary").alias("key"), "value", headers.alias("headers"))
        options = connection.spark_options()
        if connect.is_connect(self._frame.sparkSession):
            connect.hide_secrets(self._frame.sparkSession, options)
        writer = letters.write.format("kafka").options(**{**_LARGE_LETTERS, **options})
        try:
            writer.option("topic", topic).option("includeHeaders", "true").save()
        except Exception as error:  # Spark's, with the text of the JVM's error
            if looped in str(error):
                raise ConfigurationError(looped) from error
            raise
        return self._good()

    def split(self) -> tuple["DataFrame", "DataFrame"]:
        """Return good and bad records separately, to process both as you like.

        A bad record is identified by topic, partition and offset. A repeated batch returns it again.

        Returns:
            The rows of the good records, and the bad records: their original columns, followed by `reason`.

        Raises:
            ConfigurationError: The frame already has a column `reason`.
        """
        self._refuse_columns(REASON)
        return self._good(), self._bad.select(*self._columns, f.col(_REASON).alias(REASON))

    def marked(self) -> "DataFrame":
        """Return good and bad records in one frame, for a sink that stores both in one commit.

        Returns:
            The rows of all records, with two more columns: `raw`, the bytes of a bad record's value, and `reason`. Both
            are null in good records. In bad records `value` is null.

        Raises:
            ConfigurationError: The frame already has a column `raw` or `reason`.
        """
        self._refuse_columns(RAW, REASON)
        is_bad = f.col(_REASON).isNotNull()
        rows = self._frame.withColumn(RAW, f.when(is_bad, f.col("value"))).withColumn(REASON, f.col(_REASON))
        value = f.when(~is_bad, f.col(_VALUE)).alias("value")
        return rows.select(*(value if name == "value" else f.col(name) for name in self._columns), RAW, REASON)

    def _good(self) -> "DataFrame":
        return self._with_value(self._frame.where(f.col(_REASON).isNull()), f.col(_VALUE))

    def _refuse_columns(self, *added: str) -> None:
        """Raise `ConfigurationError` if the frame already has a column with one of these names."""
        check_names(
            (*self._columns, *added),
            (*_OF_A_RECORD, "headers"),
            case_sensitive=self._case_sensitive,
            what="the columns to decode and those added to them",
        )

    def _with_value(self, frame: "DataFrame", value: "Column") -> "DataFrame":
        return frame.select(*(value.alias("value") if name == "value" else name for name in self._columns))

    @property
    def _bad(self) -> "DataFrame":
        return self._frame.where(f.col(_REASON).isNotNull())


def missing_value(nulls: NullPolicy) -> "Column":
    """Return the reason for records without bytes, else null; more conditions can be appended."""
    null_value = f.lit("null value") if nulls is NullPolicy.BAD else f.lit(None)
    return f.when(f.col("value").isNull(), null_value).when(f.length("value") == 0, f.lit("empty value"))


def read_once(frame: "DataFrame", read: "Column") -> tuple["DataFrame", "Column"]:
    """Return `frame` with an expensive expression as a column, and that column, so that it is evaluated once.

    Spark would otherwise copy the expression to each place that uses it, also into filters. It does not move
    expressions that formally depend on the number of the row.
    """
    once = f.when(f.monotonically_increasing_id() >= 0, read)
    return frame.withColumn(_READ, once), f.col(_READ)


def _coordinates() -> "Column":
    return f.concat_ws("/", "topic", f.col("partition").cast("string"), f.col("offset").cast("string"))


def _header(name: str) -> "Column":
    if name == "timestamp":
        return f.unix_millis("timestamp").cast("string").cast("binary")
    if name == "key":
        return f.col("key").cast("binary")
    return f.col(_REASON if name == "reason" else name).cast("string").cast("binary")
