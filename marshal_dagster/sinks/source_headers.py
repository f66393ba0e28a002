"""Headers that say which message a record comes from, for an output topic that is written at least once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from marshal_dagster.protocol.batch_planning import ClaimedRange
from marshal_dagster.sinks.sink import OFFSET_COLUMN, PARTITION_COLUMN, check_ranges, quoted
from marshal_dagster.spark.column_names import check_names, is_case_sensitive
from marshal_dagster.spark.conversion_settings import QUOTED_NAMES, check_settings
from marshal_dagster.spark.lazy_pyspark import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_HEADERS = "headers"
_PREFIX = "marshal-"
_OWN = (PARTITION_COLUMN, OFFSET_COLUMN, _HEADERS)
_FOREIGN = (
    f"the result has rows of a partition that this batch did not read: leave the column {PARTITION_COLUMN!r} as it was "
    "read"
)


def with_source_headers(frame: "DataFrame", ranges: Sequence[ClaimedRange]) -> "DataFrame":
    """Return `frame` with a column `headers` for Spark's Kafka writer, which names the message of each row.

    They are `marshal-group`, `-topic`, `-partition`, `-generation`, `-epoch` and, where there is a column `offset`,
    `-offset`, as text; what stands in `headers` already comes before them. A delivery that is repeated has the same
    headers but for the epoch, which is higher; one that a person asked for has a higher generation. `ranges` are those
    of the batch; a row of another partition, or of none, fails the job that writes it, as no record may be missing.
    Raises `ValueError` for ranges of more than one group or topic, `ConfigurationError` for a column whose name
    is `partition`, `offset` or `headers` to the session, but spelt otherwise.
    """
    check_ranges(ranges)
    spark = frame.sparkSession
    check_names(frame.columns, _OWN, case_sensitive=is_case_sensitive(spark))
    check_settings(spark, QUOTED_NAMES, "with_source_headers")
    known = spark.createDataFrame(
        [(range_.partition, range_.group, range_.topic, range_.generation, range_.epoch) for range_ in ranges],
        "source_partition INT, source_group STRING, source_topic STRING, source_generation LONG, source_epoch LONG",
    )
    columns = {
        "group": f.coalesce(known["source_group"], f.raise_error(f.lit(_FOREIGN))),
        "topic": known["source_topic"],
        "partition": frame[PARTITION_COLUMN],
        "generation": known["source_generation"],
        "epoch": known["source_epoch"],
    }
    if OFFSET_COLUMN in frame.columns:
        columns["offset"] = frame[OFFSET_COLUMN]
    headers = f.array(
        *(
            f.struct(f.lit(_PREFIX + name).alias("key"), value.cast("string").cast("binary").alias("value"))
            for name, value in columns.items()
        )
    )
    if _HEADERS in frame.columns:
        headers = f.concat(f.coalesce(frame[_HEADERS], f.filter(headers, lambda _: f.lit(False))), headers)  # noqa: FBT003
    others = [frame[quoted(name)] for name in frame.columns if name != _HEADERS]
    joined = frame.join(f.broadcast(known), frame[PARTITION_COLUMN] == known["source_partition"], "left")
    return joined.select(*others, headers.alias(_HEADERS))
