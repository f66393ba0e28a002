"""Kafka headers that name the source message of each record, for output topics that are written at least once.

Readers of the output topic can use them to drop duplicates (docs/how-to/sinks.md, "Kafka, at least once").
"""

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
    f"the result has rows of a partition that this batch did not read. Do not change the column {PARTITION_COLUMN!r}"
)


def with_source_headers(frame: "DataFrame", ranges: Sequence[ClaimedRange]) -> "DataFrame":
    """Return `frame` with a column `headers` for Spark's Kafka writer that names the source message of each row.

    The headers are `marshal-group`, `marshal-topic`, `marshal-partition`, `marshal-generation`, `marshal-epoch` and,
    if there is a column `offset`, `marshal-offset`, as UTF-8 text. They follow the headers that the column already
    has. A repeated delivery has the same headers except for a higher epoch. After an operator has reset the position,
    the generation is higher.

    A row of a partition that the batch did not read fails the Spark job that writes it, so that no record is lost.

    Args:
        frame: The rows, with the column `partition` and optionally `offset` and `headers`.
        ranges: The ranges of the batch.

    Returns:
        The rows of `frame` with the column `headers` added or extended.

    Raises:
        ValueError: The ranges belong to more than one group or topic, or a partition has more than one range.
        ConfigurationError: A column's name differs from `partition`, `offset` or `headers` only in a way that the
            session ignores, or a setting of the session would change names.

    Example:
        ```python
        records = with_source_headers(result, batch.ranges).select("value", "headers")
        records.write.format("kafka").options(**options, topic="orders-upper").save()
        ```
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
