"""A decoded batch: each record has a value or a reason why it has none, and none is left out silently."""

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
"""The column that says why a record has no value; null in good ones."""
RAW: Final = "raw"
"""The column of the bytes of a bad record, beside the decoded ones."""
NOT_UTF8 = "it has a text that is not UTF-8"

_VALUE = "_marshal_value"
_REASON = "_marshal_reason"
_READ = "_marshal_read"
ADDED: Final = "_marshal_both"
"""The column with the result of a function that reads value and reason at once."""
# A letter is larger than its record, which may be of any size that its topic takes; the dead letters' topic judges it.
_LARGE_LETTERS: Final = {"kafka.max.request.size": str(128 * 1024**2), "kafka.buffer.memory": str(128 * 1024**2)}
_OF_A_RECORD = ("topic", "partition", "offset", "timestamp", "key", "value")
_HEADERS = ("topic", "partition", "offset", "timestamp", "key", "reason")


class NullPolicy(Enum):
    """What a record without a value is: a tombstone of a compacted topic, or a mistake."""

    BAD = auto()
    KEEP = auto()


class Connection(Protocol):
    """How Spark reaches a Kafka cluster: a `KafkaConnection`."""

    def spark_options(self) -> Mapping[str, str]:
        """Give the options of Spark's Kafka connector, `kafka.` in front of each."""
        ...


class DecodedBatch:
    """The records of a batch, decoded; take the rows by the method that says what becomes of the bad records.

    Each record is in exactly one of good and bad, however often the frames are evaluated: the reason follows from the
    record's bytes and the schemas alone. The rows have the columns of the frame that was decoded, with the decoded
    struct as `value`; `rows.select("partition", "offset", "value.*")` spreads it. As with `batch.read`, each action
    reads Kafka again: cache what was read (`frame.cache()`) where more than one action follows.
    """

    def __init__(
        self, frame: "DataFrame", value: "Column", reason: "Column", *, columns: Sequence[str] | None = None
    ) -> None:
        """Lay `value` and `reason` beside `frame`, of which `columns` are given to the user; default: all.

        Where there is a reason there is no value.
        """
        self._columns = tuple(frame.columns if columns is None else columns)
        missing = [name for name in _OF_A_RECORD if name not in frame.columns]
        if missing:
            raise ConfigurationError(
                f"the frame to decode lacks {', '.join(missing)}: decode what batch.read(...) gave, as it is"
            )
        self._case_sensitive = is_case_sensitive(frame.sparkSession)
        self._refuse_columns(_VALUE, _REASON, _READ, ADDED)
        self._frame = frame.select("*", value.alias(_VALUE), reason.alias(_REASON))
        decoded = self._frame.schema[_VALUE].dataType  # has Spark look at schemas and functions now
        check_nested_names("value", decoded, case_sensitive=self._case_sensitive)

    def or_fail(self) -> "DataFrame":
        """Give the rows, after one pass over all of them that finds none bad.

        Raises `DecodeError`, which says how many are bad and names the first one of each partition.
        """
        first = f.min(f.struct("offset", f.col(_REASON).alias(REASON))).alias("first")
        rows = self._bad.groupBy("topic", "partition").agg(f.count("*").alias("count"), first).collect()
        if rows:
            firsts = sorted((row["topic"], row["partition"], *row["first"]) for row in rows)
            raise DecodeError(sum(row["count"] for row in rows), [BadRecord(*first) for first in firsts])
        return self.or_fail_at_first()

    def or_fail_at_first(self) -> "DataFrame":
        """Give the rows without a pass of their own: an action that looks at the value of a bad record fails.

        Spark's error names that one record.
        """
        message = f.concat_ws("", f.lit("bad record at "), _coordinates(), f.lit(": "), f.col(_REASON))
        value = f.when(f.col(_REASON).isNull(), f.col(_VALUE)).otherwise(f.raise_error(message))
        return self._with_value(self._frame, value)

    def or_dead_letter(self, topic: str, connection: Connection) -> "DataFrame":
        """Write the bad records to `topic`, now, and give the good rows.

        A dead letter has the record's value as it was and its headers, behind which come `marshal.topic`, `.partition`,
        `.offset`, `.timestamp` (ms), `.key` and `.reason`; its key is `topic/partition/offset`. It is written at least
        once: a batch that is repeated writes its dead letters again, under the same keys. Raises `ConfigurationError`
        for a bad record of `topic` itself.
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
        """Give the good rows, and the bad records: the columns that were decoded, as they were, and `reason`.

        What becomes of both is yours. A bad record is known by topic, partition and offset; a batch that is repeated
        gives it again.
        """
        self._refuse_columns(REASON)
        return self._good(), self._bad.select(*self._columns, f.col(_REASON).alias(REASON))

    def marked(self) -> "DataFrame":
        """Give all records in one frame, for a sink that takes both in one commit.

        Behind the columns of the good rows come `raw`, the bytes of a bad record's value, and `reason`; in good rows
        both are null. Of a bad record `value` is null.
        """
        self._refuse_columns(RAW, REASON)
        is_bad = f.col(_REASON).isNotNull()
        rows = self._frame.withColumn(RAW, f.when(is_bad, f.col("value"))).withColumn(REASON, f.col(_REASON))
        value = f.when(~is_bad, f.col(_VALUE)).alias("value")
        return rows.select(*(value if name == "value" else f.col(name) for name in self._columns), RAW, REASON)

    def _good(self) -> "DataFrame":
        return self._with_value(self._frame.where(f.col(_REASON).isNull()), f.col(_VALUE))

    def _refuse_columns(self, *added: str) -> None:
        """Raise `ConfigurationError` where the frame has a column of a name that is `added` here."""
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
    """Return why a record cannot be decoded that has no bytes, else null; further reasons can follow."""
    null_value = f.lit("null value") if nulls is NullPolicy.BAD else f.lit(None)
    return f.when(f.col("value").isNull(), null_value).when(f.length("value") == 0, f.lit("empty value"))


def read_once(frame: "DataFrame", read: "Column") -> tuple["DataFrame", "Column"]:
    """Give `frame` with what costs most to work out as a column, and that column.

    Spark would put it in each place that uses it, below a filter once more; what depends on the row's number in its
    task, if only by its form, it leaves where it is.
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
